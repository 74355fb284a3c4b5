"""Rule 28: gradients that enter a unit beside its visible outputs are right, or refused by the unit's name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.support.deep import DIM, floats, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, mesh_id, pool_for, shard

_unseen: list[Tensor] = []
"""Where "a global" leaves its tensors: no place that hsdp could know."""


class Slotted:
    """An output object without a `__dict__`."""

    __slots__ = ("aux", "y")

    def __init__(self, y: Tensor, aux: Tensor) -> None:
        self.y, self.aux = y, aux


@dataclass
class Bag:
    """Something that a module, or its caller, keeps losses in."""

    loss: Any = None
    losses: list[Tensor] = field(default_factory=list)


class Router(nn.Module):
    """A module without parameters, which keeps the loss of the expert block around it."""

    loss: Any = None


class Block(nn.Module):
    """A unit that makes a second tensor, the side loss, and lets it out in one of several ways."""

    def __init__(self, how: str, first: bool) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.how, self.first = how, first
        self.router = Router()
        self.aux: Any = None
        self.number: Any = 0.0
        self.kept: dict[str, Any] = {"losses": []}
        self.bag, self.space, self.last = Bag(), SimpleNamespace(loss=None), deque[Tensor](maxlen=1)

    def forward(self, x: Tensor, losses: list[Tensor], bag: Bag) -> Any:
        # `inner` is used here too: its gradient is whole only when the main path has run
        if self.first:
            aux = self.gate(x).tanh() + self.inner(x)
        y = torch.tanh(self.inner(x))
        if not self.first:
            aux = self.gate(y).tanh() + self.inner(y)
        if self.how == "attribute":
            self.aux = aux
        elif self.how == "attribute of a module inside":
            self.router.loss = aux
        elif self.how == "dict of lists":
            self.kept["losses"] = [aux]
        elif self.how == "attribute that was a number":
            self.number = aux if self.training else 0.0
        elif self.how == "attribute of a dataclass":
            self.bag.loss = aux
        elif self.how == "attribute of a namespace":
            self.space.loss = aux
        elif self.how == "deque":
            self.last.append(aux)
        elif self.how == "argument":
            losses.append(aux)
        elif self.how == "list of an object":
            bag.losses.append(aux)
        elif self.how == "object with slots":
            return Slotted(y, aux)
        elif self.how == "a global":
            _unseen.append(aux)
        return y

    def side(self, out: Any, losses: list[Tensor], bag: Bag) -> Tensor:
        """The side loss of the last forward."""
        found = {
            "attribute": lambda: self.aux,
            "attribute of a module inside": lambda: self.router.loss,
            "dict of lists": lambda: self.kept["losses"][0],
            "attribute that was a number": lambda: self.number,
            "attribute of a dataclass": lambda: self.bag.loss,
            "attribute of a namespace": lambda: self.space.loss,
            "deque": lambda: self.last[0],
            "argument": lambda: losses[-1],
            "list of an object": lambda: bag.losses[-1],
            "object with slots": lambda: out.aux,
            "a global": _unseen.pop,
        }
        return torch.as_tensor(found[self.how]()).double().square().sum()


class Sides(nn.Module):
    """Blocks in a row; `only`: the loss of the row itself is left out, so that nothing but the side losses counts."""

    def __init__(self, how: str, first: bool, frozen: bool, only: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how, first) for _ in range(3))
        self.start = nn.Linear(DIM, DIM)
        self.only = only
        if frozen:
            self.blocks.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        x = self.start(x)
        losses: list[Tensor] = []
        bag = Bag()
        total = x.sum() * 0.0
        for block in self.blocks:
            out = block(x, losses, bag)
            total = total + block.side(out, losses, bag)
            x = out.y if isinstance(out, Slotted) else out
        return total if self.only else (total, x)


def run(model: nn.Module, rank: int) -> None:
    out = model(floats(rank))
    loss = out[0] + out[1].square().sum() if isinstance(out, tuple) else out
    loss.backward()


def check(env: RankEnv, shape: tuple[int, ...], how: str, first: bool, frozen: bool, only: bool) -> None:
    plain, model = (seeded(partial(Sides, how, first, frozen, only)) for _ in range(2))
    shard(model, env.mesh(shape), reshard_after_forward=True)
    for trains in (how != "attribute that was a number" or only, True, True):
        for net in (plain, model):
            net.train(trains)
            net.zero_grad()
        check_grads(model, plain, run, env.rank, env.world_size)
        check_rest(model)


WAYS = [
    "attribute",
    "attribute of a module inside",
    "attribute that was a number",
    "attribute of a dataclass",
    "attribute of a namespace",
    "dict of lists",
    "deque",
    "argument",
    "list of an object",
    "object with slots",
]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("first", "frozen", "only"), [(True, False, False), (False, True, False), (True, True, True)])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_28_side_losses_are_right(
    request: pytest.FixtureRequest, shape: tuple[int, ...], how: str, first: bool, frozen: bool, only: bool
) -> None:
    pool_for(request, shape).run(check, shape, how, first, frozen, only)


def check_loud(
    env: RankEnv, first: bool, frozen: bool, only: bool, prefetch: int, fusion: Literal["auto", "direct"] = "auto"
) -> str:
    """A side loss in a global: nothing tells hsdp when its backward begins. It is right, or an error; returns that."""
    plain, model = (seeded(partial(Sides, "a global", first, frozen, only)) for _ in range(2))
    policy = hsdp.CommPolicy(prefetch=prefetch, fusion=fusion)
    shard(model, env.mesh(2), reshard_after_forward=True, comm_policy=policy)
    try:
        check_grads(model, plain, run, env.rank, env.world_size)
    except RuntimeError as error:
        return str(error)
    finally:
        _unseen.clear()
    return ""


def check_loud_alone(env: RankEnv) -> None:
    """Frozen units: no gradient of theirs arrives that could tell that nobody entered them.

    A prefetch that gathers directly has allocated their memory, where others leave storages of size 0, which raise alone.
    """
    assert check_loud(env, True, True, True, 3, "direct"), "a backward read memory that was not gathered"


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_rule_28_a_side_loss_that_cannot_be_seen_is_right_or_refused(
    pool2: Pool, first: bool, frozen: bool, only: bool, prefetch: int
) -> None:
    results = pool2.run(check_loud, first, frozen, only, prefetch)
    for message in results:
        assert not message or "unit 'blocks." in message or "modified by an inplace operation" in message, message
    assert all(results) or not only, "its backward runs without that of the unit's output"


class Unseen(nn.Module):
    """A unit whose side loss goes out by a global; nothing of its output leads there."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        _unseen.append(self.down(torch.tanh(self.up(x))).square().sum())
        return torch.tanh(self.up(x))


def check_late(env: RankEnv, reshard: bool | None) -> None:
    """Its backward comes when the unit is whole again, with the weights of another step."""
    model = shard(seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), Unseen())), env.mesh(2), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(floats(env.rank))
    late = _unseen.pop()
    model(floats(env.rank, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    out = model(floats(env.rank, 2))
    _unseen.clear()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    del out


@pytest.mark.parametrize("reshard", [True, None, False])
def test_rule_28_weights_of_another_step_are_refused_by_whatever_way_a_backward_comes(
    pool2: Pool, reshard: bool | None
) -> None:
    pool2.run(check_late, reshard)


Heads = Callable[[int], tuple[int, ...]]


class PartialHeads(nn.Module):
    """A trunk and heads, each a unit: ranks use different heads in their losses, though all run all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.last = nn.Linear(DIM, DIM)

    def units(self) -> list[nn.Module]:
        return [*self.trunk, *self.heads]

    def forward(self, x: Tensor) -> list[Tensor]:
        for unit in self.trunk:
            x = torch.tanh(unit(x))
        x = self.last(x)
        return [head(x) for head in self.heads]


def check_heads(env: RankEnv, shape: tuple[int, ...], reshard: bool | None, prefetch: int) -> None:
    def used(rank: int, k: int) -> list[int]:
        return [(rank + k) % 4, (2 * rank + k + 1) % 4] if (rank + k) % 3 else [(rank + k) % 4]

    plain, model = seeded(PartialHeads), seeded(PartialHeads)
    policy = hsdp.CommPolicy(prefetch=prefetch)
    shard(model, env.mesh(shape), reshard_after_forward=reshard, comm_policy=policy)
    for k in range(4):

        def run(model: nn.Module, rank: int, k: int = k) -> None:
            outputs = model(floats(rank, k))
            sum(outputs[head].square().sum() for head in used(rank, k)).backward()  # type: ignore[union-attr]

        check_grads(model, plain, run, env.rank, env.world_size)
        check_rest(model)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("reshard", [True, None, False])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_21_ranks_may_use_different_heads(
    request: pytest.FixtureRequest, shape: tuple[int, ...], reshard: bool | None, prefetch: int
) -> None:
    pool_for(request, shape).run(check_heads, shape, reshard, prefetch)
