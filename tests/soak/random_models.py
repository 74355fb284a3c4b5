"""Random models, and how they are sharded and trained: what `test_models.py` draws and `models.py` soaks.

Subject   a model (parts in a row between an embedding and a head), its units, policies, mesh and a schedule of
          micro-batches; plain data, so that hypothesis can shrink it and it travels to the workers
run       builds the subject sharded and as its twin in float64, and plays the schedule on both
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hsdp
from tests.soak.random_schedules import POLICIES, Action, play
from tests.support.rig import RankEnv

VOCAB, LENGTH = 7, 3
KINDS = ("mlp", "tied mlp", "norm", "conv", "attention", "experts", "scaled")


@dataclass(frozen=True)
class Part:
    """One part of a model.

    Attributes:
        kind: one of `KINDS`.
        hidden: its inner width; odd ones do not divide among ranks.
        unit: whether it is a unit of its own; else the root owns it.
        calls: how often a forward runs it.
        frozen: "" (nothing), "all" of its parameters, or those whose name has this in it.
        dropped: it runs and its result is not used.
        recompute: under activation checkpointing, reentrant or not; None: not.
        extra: it has a parameter that nobody uses.
    """

    kind: str
    hidden: int = 3
    unit: bool = True
    calls: int = 1
    frozen: str = ""
    dropped: bool = False
    recompute: bool | None = None
    extra: bool = False


@dataclass(frozen=True)
class Subject:
    """A model with its sharding and its training."""

    shape: tuple[int, ...]
    width: int
    parts: tuple[Part, ...]
    tied_head: bool = False
    paired: bool = False  # the first two units form one, as a list
    reshard: bool | int | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    replicated: bool = False  # one-dimensional parameters are kept whole
    over_replicas: bool = False  # the optimizer's step is shared out among replicas
    schedule: tuple[Action, ...] = ()


class Experts(nn.Module):
    """A batch goes to one of three experts or to none: a rank may leave some of them, or all, unused."""

    def __init__(self, width: int, hidden: int, choices: int) -> None:
        super().__init__()
        self.choices = choices
        self.up = nn.Parameter(torch.randn(3, width, hidden) / width)
        self.down = nn.ParameterList(nn.Parameter(torch.randn(hidden, width) / hidden) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x.detach().abs().sum() * 1e3) % self.choices
        if chosen == 3:
            return torch.zeros_like(x)
        return torch.tanh(x @ self.up[chosen]) @ self.down[chosen]


class Body(nn.Module):
    """What a part computes: [batch, LENGTH, width] to the same."""

    def __init__(self, part: Part, width: int) -> None:
        super().__init__()
        self.part, hidden = part, part.hidden
        if part.kind in ("mlp", "tied mlp"):
            self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
            if part.kind == "tied mlp":
                self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
                self.down.weight = self.up.weight
        elif part.kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif part.kind == "conv":
            self.up, self.down = nn.Conv1d(LENGTH, hidden, 1), nn.Conv1d(hidden, LENGTH, 3, padding=1)
        elif part.kind == "attention":
            self.inner = nn.MultiheadAttention(width, 1, batch_first=True)
        elif part.kind == "experts":
            # Inside a reentrant checkpoint a rank must not use none of the parameters while others use some.
            self.inner = Experts(width, hidden, choices=3 if part.recompute else 4)
        else:
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.nothing = nn.Parameter(torch.zeros(0, width))
        if part.extra:
            self.extra = nn.Parameter(torch.ones(hidden, 2))
        for name, param in self.named_parameters():
            param.requires_grad_(not part.frozen or (part.frozen != "all" and part.frozen not in name))

    def forward(self, x: Tensor) -> Tensor:
        if self.part.recompute is None:
            return self._compute(x)
        return checkpoint(self._compute, x, use_reentrant=self.part.recompute)

    def _compute(self, x: Tensor) -> Tensor:
        kind = self.part.kind
        if kind == "norm":
            return self.norm(x)
        if kind == "attention":
            return x + self.inner(x, x, x, need_weights=False)[0]
        if kind == "experts":
            return x + self.inner(x)
        if kind == "scaled":
            return x * self.scale + self.nothing.sum()
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Tokens [2, LENGTH] to logits."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject
        self.embedding = nn.Embedding(VOCAB, subject.width)
        self.parts = nn.ModuleList(Body(part, subject.width) for part in subject.parts)
        self.head = nn.Linear(subject.width, VOCAB)
        if subject.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for part, module in zip(self.subject.parts, self.parts, strict=True):
            for _ in range(part.calls):
                out = module(x)
                x = x if part.dropped else out
        return self.head(x)


def sharded(model: Model, env: RankEnv) -> Model:
    """Shards the model as its subject says."""
    subject = model.subject
    kept = [param for param in model.parameters() if param.ndim == 1] if subject.replicated else []
    options: dict[str, Any] = {
        "mesh": env.mesh(subject.shape),
        "comm_policy": hsdp.CommPolicy(**subject.policy),
        "reshard_after_forward": subject.reshard,
        "replicate_params": kept,
    }
    units: list[Any] = [module for part, module in zip(subject.parts, model.parts, strict=True) if part.unit]
    if subject.paired and len(units) > 1:
        units[:2] = [units[:2]]
    for unit in units:
        hsdp.fully_shard(unit, **options)
    return hsdp.fully_shard(model, **options)


def _loss(model: nn.Module, seed: int, rank: int, uses: object) -> Tensor:
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1000 * seed + rank))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def run(env: RankEnv, subjects: list[Subject]) -> None:
    """Runs subjects on this rank; raises AssertionError where one differs from its twin."""
    for subject in subjects:
        torch.manual_seed(7)
        twin = Model(subject).double()
        try:
            play(
                env,
                sharded(copy.deepcopy(twin), env),
                twin,
                list(subject.schedule),
                _loss,
                None,
                over_replicas=subject.over_replicas,
            )
        except Exception as error:
            raise AssertionError(f"{subject}: {type(error).__name__}: {error}") from error


# -- what hypothesis draws ------------------------------------------------------------------------------------------

PARTS = st.builds(
    Part,
    kind=st.sampled_from(KINDS),
    hidden=st.sampled_from([1, 2, 3, 4, 5, 8]),
    unit=st.sampled_from([True, True, True, False]),
    calls=st.sampled_from([1, 1, 1, 2]),
    frozen=st.sampled_from(["", "", "", "weight", "bias", "all"]),
    dropped=st.sampled_from([False] * 7 + [True]),
    recompute=st.sampled_from([None, None, False, True]),
    extra=st.booleans(),
)
MICRO_BATCHES = st.tuples(
    st.just("micro"),
    st.sampled_from(["full", "scatter", "local"]),
    st.none(),
    st.sampled_from([1, 1, 2]),
    st.sampled_from(["together", "reversed", "twice"]),
)
ACTIONS = st.one_of(
    MICRO_BATCHES,
    MICRO_BATCHES,
    MICRO_BATCHES,
    st.tuples(st.just("zero"), st.sampled_from(["module", "optimizer"]), st.booleans()),
    st.sampled_from([("flush",), ("eval",), ("step",)]),
)


def subjects(shapes: list[tuple[int, ...]]) -> st.SearchStrategy[Subject]:
    """Subjects on meshes of these shapes."""
    return st.builds(
        Subject,
        shape=st.sampled_from(shapes),
        width=st.sampled_from([2, 3, 4, 5]),
        parts=st.lists(PARTS, min_size=1, max_size=4).map(tuple),
        tied_head=st.booleans(),
        paired=st.sampled_from([False, False, True]),
        reshard=st.sampled_from([None, True, False, 2 if max(shapes[0]) == 4 else True]),
        policy=POLICIES,
        replicated=st.sampled_from([False, False, True]),
        over_replicas=st.booleans(),
        schedule=st.lists(ACTIONS, min_size=1, max_size=4).map(tuple),
    )


ON_TWO = subjects([(2,), (2, 1), (1, 2)])
ON_FOUR = subjects([(4,), (2, 2)])
