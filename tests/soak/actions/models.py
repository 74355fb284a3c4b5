"""The models that random programs of user actions train: tiny, with a place for each thing that users do in a forward.

    tokens, floats -> embedding + floats -> parts in a row, each with a tweak in it and an edit behind it -> two heads

A forward is told what to do by a `How`, a plain dictionary of what differs from an ordinary forward:

    skip    parts that it does not run                            tweaks  by part: one of `TWEAKS`, done inside the part
    edits   by part: one of `EDITS`, done by the root behind it   end     one of `ENDS`, done by the root before it returns
    heads   which of both outputs the loss uses, for each rank in turns: "both", "first" or "second"
    cuts    by part: whether the loss goes around it instead of through it, for each rank in turns
    again   parts that it runs once more before the heads, each with such cuts of its own
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

VOCAB, LENGTH, WIDTH, HIDDEN = 5, 3, 4, 3
KINDS = ("mlp", "linear", "chain", "lora", "norm", "scaled")
UNITS = ("whole", "parts", "")
"""A part is a unit, or each linear layer in it is one, or the root owns it."""

How = dict[str, Any]


class Planned(Exception):  # noqa: N818  (no error of anybody's: users raise it on purpose)
    """What a program raises because it is told to."""


@dataclass(frozen=True)
class Part:
    """One part of a model: its kind, what of it is a unit, and whether it runs under activation checkpointing.

    `inside`: what is special about it, one of `INSIDES`, or nothing.
    """

    kind: str
    unit: str = "whole"
    recompute: bool | None = None  # reentrant or not; None: not at all
    inside: str = ""


class Slots:
    """An output that only its own code can look into."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Named(NamedTuple):
    """An output by names."""

    value: Tensor
    other: None = None


@dataclass
class Fields:
    """An output as libraries return them."""

    value: Tensor
    other: str = ""


class RaisesInBackward(torch.autograd.Function):
    """The identity, until its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Planned("in backward")


class Doubled(torch.autograd.Function):
    """The first input twice, with the sum of the second's squares: saves whole weights itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return 2 * x + weight.pow(2).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return 2 * grad, 2 * weight * grad.sum()


BEFORE = ("add_ to input", "raise", "data renorm", "copy_ renorm", "hook on input")
BEHIND = (
    "mul_ output",
    "view out",
    "slice out",
    "tuple out",
    "slots out",
    "aux",
    "aux of weights",
    "aux in dict",
    "aux in list",
    "aux in argument",
    "raise in backward",
    "inner grad",
    "inner double grad",
    "detached out",
    "no grad",
)
LATER = (
    "aux in buffer",
    "aux in child",
    "named out",
    "fields out",
    "dict out",
    "distribution out",
    "swapped data",
    "saved by hand",
)
"""Tweaks that came later."""
TWEAKS = (*BEFORE, *BEHIND, *LATER)
INSIDES = ("selective", "weight norm", "complex", "buffer")
EDITS = ("+= input", "mul_", "relu_", "drop", "raise")
ENDS = ("mul_", "/= view", "grad", "raise")


class Body(nn.Module):
    """What a part computes: [batch, LENGTH, WIDTH] to the same."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        self.store: dict[str, Tensor] = {}
        self.trail: list[Tensor] = []
        self.aux: Tensor | None = None
        self.first_rank = True  # of those whose batches the model is fed with in turn
        inner = WIDTH if part.kind == "linear" else HIDDEN
        if part.kind == "norm":
            self.up: nn.Module = nn.LayerNorm(WIDTH)
        elif part.kind == "scaled":
            self.up = nn.Linear(WIDTH, WIDTH, bias=False)
            self.scale = nn.Parameter(torch.tensor(0.7))
        else:
            self.up = nn.Linear(WIDTH, inner)
        if part.kind in ("mlp", "chain", "lora"):
            self.down = nn.Linear(inner, WIDTH)
        if part.kind == "chain":
            self.act = nn.ReLU(inplace=True)
        if part.kind == "lora":
            self.base = nn.Linear(WIDTH, WIDTH)
            self.base.requires_grad_(False)
        if part.inside == "weight norm" and part.kind != "norm":
            weight_norm(self.up)
        if part.inside == "complex":
            self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.register_buffer("seen", torch.linspace(-1, 1, WIDTH), persistent=part.inside == "buffer")
        self.register_buffer("left", torch.zeros(()), persistent=False)

    def linears(self) -> list[nn.Module]:
        """The modules that are units where each linear layer is one."""
        return [module for module in self.children() if next(module.parameters(), None) is not None]

    def forward(self, x: Tensor, tweak: str, box: list[Tensor]) -> Any:
        """`box`: a list of the caller's, for what "aux in argument" leaves there."""
        if self.part.recompute is None:
            return self._tweaked(x, tweak, box)
        if self.part.inside == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
            return checkpoint(self._tweaked, x, tweak, box, use_reentrant=False, context_fn=contexts)
        return checkpoint(self._tweaked, x, tweak, box, use_reentrant=self.part.recompute)

    def _tweaked(self, x: Tensor, tweak: str, box: list[Tensor]) -> Any:
        if tweak in BEFORE:
            self._before(x, tweak)
            return self._compute(x)
        if tweak == "no grad":
            with torch.no_grad():
                return self._compute(x) + x
        y = self._compute(x)
        if tweak in LATER:
            return self._behind_later(x, y, tweak)
        return self._behind(x, y, tweak, box) if tweak else y

    def _compute(self, x: Tensor) -> Tensor:
        y = self._of_kind(x)
        if self.part.inside == "complex":
            return y + torch.view_as_real(y * self.turn).sum(-1).to(y.dtype)
        return y + self.seen.to(y.dtype) if self.part.inside == "buffer" else y

    def _of_kind(self, x: Tensor) -> Tensor:
        kind = self.part.kind
        if kind == "chain":
            return self.down(self.act(self.up(x)))
        if kind == "mlp":
            return x + self.down(torch.tanh(self.up(x)))
        if kind == "lora":
            return self.base(x) + self.down(self.up(x))
        y = self.up(x)
        return y * self.scale if kind == "scaled" else y

    def _before(self, x: Tensor, tweak: str) -> None:
        weight: Any = self.up.weight
        if "renorm" in tweak and not self._may_write():
            return
        if tweak == "add_ to input":
            x.add_(0.1)
        elif tweak == "raise":
            raise Planned("in the forward of a part")
        elif tweak == "data renorm":
            self.up.weight.data = weight.data / 1.5  # type: ignore[union-attr]
        elif tweak == "copy_ renorm":
            with torch.no_grad():
                weight.copy_(weight / 1.5)
        else:
            x.register_hook(lambda grad: grad * 2.0) if x.requires_grad else None

    def _behind(self, x: Tensor, y: Tensor, tweak: str, box: list[Tensor]) -> Any:
        if tweak == "mul_ output":
            return y.mul_(0.9)
        if tweak == "view out":
            return y.transpose(0, 1).transpose(0, 1)
        if tweak == "slice out":
            return torch.cat((y, y), 0)[: y.shape[0]]
        if tweak == "tuple out":
            return y.chunk(2, -1)
        if tweak == "slots out":
            return Slots(y)
        if tweak == "raise in backward":
            return RaisesInBackward.apply(y)
        if tweak == "detached out":
            return y.detach()
        if tweak.startswith("inner"):
            double = tweak == "inner double grad"
            with torch.enable_grad():
                probe = x.detach().requires_grad_()
                (grad,) = torch.autograd.grad(self._compute(probe).pow(2).sum(), probe, create_graph=double)
            return y + 0.1 * grad
        of_weights = tweak != "aux" and self.part.unit != "parts"  # a gradient of the output would not enter by that alone
        aux = (self.up.weight.pow(2) if of_weights else y.pow(2)).mean()  # type: ignore[union-attr,operator]
        if tweak == "aux in dict":
            self.store["aux"] = aux
        elif tweak == "aux in list":
            self.trail.append(aux)
        elif tweak == "aux in argument":
            box.append(aux)
        else:
            self.aux = aux
        return y

    def _behind_later(self, x: Tensor, y: Tensor, tweak: str) -> Any:
        if tweak == "aux in buffer":
            self.left = y.pow(2).mean()
        elif tweak == "aux in child":
            self.up.aux = y.pow(2).mean()  # type: ignore[assignment]
        elif tweak == "named out":
            return Named(y)
        elif tweak == "fields out":
            return Fields(y)
        elif tweak == "dict out":
            return {"value": y, "other": [None, x.detach()]}
        elif tweak == "distribution out":
            return Normal(y, torch.ones_like(y))
        elif tweak == "swapped data":
            z = torch.empty_like(y)
            z.data = y.detach() * 0.5
            return y + z
        elif tweak == "saved by hand" and self.part.unit != "parts":
            return Doubled.apply(y, self.up.weight)
        return y

    def _may_write(self) -> bool:
        """Once for all ranks, not again when it is recomputed, and to no weights that another unit's forward shows."""
        return self.first_rank and self.part.recompute is None and self.part.unit != "parts"

    def take_aux(self) -> list[Tensor]:
        """What forwards left beside their outputs; the module forgets it."""
        beside = [aux for aux in (self.aux, getattr(self.up, "aux", None)) if aux is not None]
        found = [*self.store.values(), *self.trail, *beside, self.left]
        self.store.clear()
        self.trail.clear()
        self.aux = self.up.aux = None  # type: ignore[assignment]
        self.left = torch.zeros_like(self.left)
        return found


class Net(nn.Module):
    """Tokens and floats to two numbers per token."""

    def __init__(self, parts: tuple[Part, ...], max_norm: float | None, ties: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, max_norm=max_norm)
        self.parts = nn.ModuleList(Body(part) for part in parts)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))
        if "embedding" in ties:
            self.heads[1] = nn.Linear(WIDTH, VOCAB)
        self.tie(ties)

    def tie(self, ties: frozenset[str]) -> None:
        """Makes one of what has several names; the first and the last part are alike if they are to be tied."""
        first, last, heads = self.parts[0], self.parts[-1], self.heads
        if "heads" in ties:
            heads[1].weight = heads[0].weight
        if "embedding" in ties:
            heads[1].weight = self.embedding.weight
        if "module" in ties:
            self.parts[-1] = first
        elif "weights" in ties:
            last.up.weight = first.up.weight  # type: ignore[union-attr]

    def forward(self, tokens: Tensor, floats: Tensor, how: How, rank: int, box: list[Tensor]) -> Tensor:
        """[2, LENGTH] and [2, LENGTH, WIDTH] to [2, LENGTH, 2]."""
        x = self.embedding(tokens) + floats
        for index, part in enumerate(self.parts):
            if index in how.get("skip", ()):
                continue
            out = part(x, how.get("tweaks", {}).get(index, ""), box)
            y = self._edited(x, opened(out), how.get("edits", {}).get(index, ""))
            x = _around(x, y, how.get("cuts", {}).get(index, (False,)), rank)
        for index, cuts in how.get("again", ()):
            x = _around(x, 0.5 * x + opened(self.parts[index](x, "", box)), cuts, rank)
        used = how.get("heads", ("both",))
        used = used[rank % len(used)]
        outs = [head(x)[..., :2] for head in self.heads]  # every rank runs both: their losses differ, not their forwards
        logits = outs[0] + outs[1] if used == "both" else outs[used == "second"]
        return self._ended(x, logits, how.get("end", ""))

    def infer(self, *args: Any) -> Tensor:
        """The forward under another name, for `register_forward_method`."""
        return Net.forward(self, *args)

    @staticmethod
    def _edited(x: Tensor, y: Tensor, edit: str) -> Tensor:
        if edit == "+= input":
            y += x
        elif edit == "mul_":
            y.mul_(0.8)
        elif edit == "relu_":
            F.relu_(y)
        elif edit == "raise":
            raise Planned("in the root's forward")
        return x if edit == "drop" else y

    @staticmethod
    def _ended(x: Tensor, logits: Tensor, end: str) -> Tensor:
        if end == "mul_":
            logits.mul_(0.5)
        elif end == "/= view":
            flat = logits.view(-1, 2)
            flat /= 2.0
        elif end == "grad":  # of the root, in the middle of its forward
            (grad,) = torch.autograd.grad(logits.pow(2).sum(), x, retain_graph=True)
            logits = logits + 0.1 * grad.mean()
        elif end == "raise":
            raise Planned("at the end of the root's forward")
        return logits

    def take_aux(self) -> list[Tensor]:
        """What this forward's parts left beside their outputs."""
        return [aux for part in self.parts for aux in part.take_aux()]  # type: ignore[operator]


def _around(x: Tensor, y: Tensor, cuts: tuple[bool, ...], rank: int) -> Tensor:
    """The values of `y`, which was made of `x`; on the ranks that `cuts` tells, gradients go to `x` alone."""
    return x + (y - x).detach() if cuts[rank % len(cuts)] else y


def opened(out: Any) -> Tensor:
    """The tensor that a part returned in one form or another."""
    if isinstance(out, (Slots, Named, Fields)):
        return out.value
    if isinstance(out, dict):
        return out["value"]
    if isinstance(out, Normal):
        return out.mean
    return torch.cat(out, -1) if isinstance(out, tuple) else out
