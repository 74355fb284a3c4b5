"""Rule 29: a gradient comes if the parameter wanted it in the forward, and still does when it arrives: as on one device."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hsdp
from tests.support.deep import DIM, Deep, floats, loss_of, seeded
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, mesh_id, pool_for, shard
from tests.support.twin import assert_same, full_grads


def freeze(model: nn.Module, wanted: bool, *blocks: int) -> None:
    for block in blocks:
        model.blocks[block].requires_grad_(wanted)  # type: ignore[index]


def off_and_on(model: nn.Module, rank: int) -> None:
    """Two losses in one backward; the second forward froze the model for itself (a generator's loss, say)."""
    first = loss_of(model, rank)
    freeze(model, False, 0, 1, 2, 3)
    second = loss_of(model, rank, 1)
    freeze(model, True, 0, 1, 2, 3)
    (first + second).backward()


def off_and_on_apart(model: nn.Module, rank: int) -> None:
    """The same with a backward for each, the frozen one first."""
    first = loss_of(model, rank)
    freeze(model, False, 1, 2)
    second = loss_of(model, rank, 1)
    second.backward()
    freeze(model, True, 1, 2)
    first.backward()


def frozen_before_backward(model: nn.Module, rank: int) -> None:
    loss = loss_of(model, rank)
    freeze(model, False, 1)
    loss.backward()
    freeze(model, True, 1)


def helper_that_restores(model: nn.Module, rank: int) -> None:
    """An evaluation helper that freezes everything and restores it, between a forward and its backward."""
    loss = loss_of(model, rank)
    model.requires_grad_(False)
    with torch.no_grad():
        model(floats(rank, 2))
    model(floats(rank, 3))
    model.requires_grad_(True)
    loss.backward()


def one_parameter(model: nn.Module, rank: int) -> None:
    bias = model.get_parameter("blocks.2.bias")
    first = loss_of(model, rank)
    bias.requires_grad_(False)
    second = loss_of(model, rank, 1)
    bias.requires_grad_(True)
    (first + second).backward()


def frozen_first(model: nn.Module, rank: int) -> None:
    freeze(model, False, 0, 1)
    first = loss_of(model, rank)
    freeze(model, True, 0, 1)
    second = loss_of(model, rank, 1)
    (first + second).backward()


def thawed_before_a_recomputation(model: nn.Module, rank: int) -> None:
    """A reentrant checkpoint inside a unit's own forward makes its graph anew, of what is trained by then."""
    freeze(model, False, 1)
    block = model.blocks[1]  # type: ignore[index]
    forward = block.forward
    linear = lambda x: nn.functional.linear(x, block.weight, block.bias)  # noqa: E731
    block.forward = lambda x: checkpoint(linear, x, use_reentrant=True)
    loss = loss_of(model, rank)
    freeze(model, True, 1)
    loss.backward()
    block.forward = forward


def frozen_for_good(model: nn.Module, rank: int) -> None:
    loss_of(model, rank)  # its loss is dropped
    freeze(model, False, 3)
    loss_of(model, rank, 1).backward()
    freeze(model, True, 3)


PROGRAMS: dict[str, Callable[[nn.Module, int], None]] = {
    program.__name__: program
    for program in (
        off_and_on,
        off_and_on_apart,
        frozen_before_backward,
        helper_that_restores,
        one_parameter,
        frozen_first,
        frozen_for_good,
        thawed_before_a_recomputation,
    )
}


def check(env: RankEnv, shape: tuple[int, ...], name: str, recompute: bool | None) -> None:
    plain, model = (seeded(lambda: Deep(recompute=recompute)) for _ in range(2))
    shard(model, env.mesh(shape))
    for _ in range(2):
        check_grads(model, plain, PROGRAMS[name], env.rank, env.world_size)
        check_rest(model)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_29_toggles(request: pytest.FixtureRequest, shape: tuple[int, ...], name: str) -> None:
    pool_for(request, shape).run(check, shape, name, None)


def check_frozen_before_an_accumulating_backward(env: RankEnv, shape: tuple[int, ...]) -> None:
    model = shard(seeded(Deep), env.mesh(shape))
    loss = loss_of(model, env.rank)
    freeze(model, False, 1)
    with model.no_sync():  # type: ignore[operator]
        loss.backward()
    has = {name: param.grad is not None for name, param in model.named_parameters()}
    assert has == {name: not name.startswith("blocks.1.") for name in has}, has


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_29_frozen_before_an_accumulating_backward(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(check_frozen_before_an_accumulating_backward, shape)


class Heads(nn.Module):
    """A trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = torch.tanh(self.blocks[0](x))
        return [self.blocks[1](x), self.blocks[2](x)]


def thawed_before_backwards_of_other_heads(model: nn.Module, rank: int) -> None:
    """All was frozen in the forwards, and the ranks' losses come from different heads: what trains is one answer."""
    model.requires_grad_(False)
    losses = [model(floats(rank, k))[head].square().sum() for k, head in enumerate((rank % 2, 0))]
    model.requires_grad_(True)
    for loss in losses:
        loss.backward()


def check_other_heads(env: RankEnv, shape: tuple[int, ...]) -> None:
    plain, model = seeded(Heads), shard(seeded(Heads), env.mesh(shape))
    check_grads(model, plain, thawed_before_backwards_of_other_heads, env.rank, env.world_size)
    masks = [unit.trainable for unit in model._units()]  # type: ignore[operator]
    assert masks == [tuple(True for _ in mask) for mask in masks], f"thawed, but rank {env.rank} has {masks}"
    for k in range(2):
        run = lambda model, rank: model(floats(rank, k))[rank % 2].square().sum().backward()  # noqa: E731
        check_grads(model, plain, run, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_rule_29_ranks_agree_about_what_trains(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(check_other_heads, shape)


def frozen_behind_a_graph_of_gradients(model: nn.Module, rank: int) -> None:
    """The units are opened by hand, frozen, while a graph of gradients still reads what they gathered."""
    x = floats(rank)
    loss = model(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + grad.square().sum()
    loss.backward(retain_graph=True)
    model.requires_grad_(False)
    handles = [module.unshard(async_op=True) for module in model.modules() if hasattr(module, "unshard")]
    loss.backward()
    for handle in handles:
        handle.wait()
    model.requires_grad_(True)


def check_behind_a_graph(env: RankEnv) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    for _ in range(2):
        check_grads(model, plain, frozen_behind_a_graph_of_gradients, env.rank, env.world_size)


def test_rule_29_frozen_behind_a_graph_of_gradients(pool2: Pool) -> None:
    pool2.run(check_behind_a_graph)


class Toggling(Deep):
    """Sets `requires_grad` inside its forward, of a parameter that is the root's own or another unit's."""

    sets: bool | None = None
    behind = False
    of = "last"

    def forward(self, x: Tensor) -> Tensor:
        if self.sets is not None and not self.behind:
            self.get_submodule(self.of).requires_grad_(self.sets)
        out = super().forward(x)
        if self.sets is not None and self.behind:
            self.get_submodule(self.of).requires_grad_(self.sets)
        return out


INSIDE: dict[str, list[bool | str | None]] = {
    "frozen": [False, None],
    "frozen, thawed outside": [False, "thaw", None],
    "frozen outside, thawed": ["freeze", None, True, None],
    "in turns": [False, True, False, True, None, False],
    "in turns with the outside": [False, "thaw", False, True, "freeze", True, "freeze", None, True],
}


def check_inside(env: RankEnv, shape: tuple[int, ...], name: str, of: str, behind: bool, at_once: bool) -> None:
    """The forwards of a program set, or find, what trains; their backwards come one by one, or all behind the last."""

    def run(model: nn.Module, rank: int) -> None:
        assert isinstance(model, Toggling)
        model.requires_grad_(True)
        model.of, model.behind = of, behind
        losses = []
        for k, what in enumerate(INSIDE[name]):
            if isinstance(what, str):
                model.get_submodule(of).requires_grad_(what == "thaw")
                continue
            model.sets = what
            losses.append(loss_of(model, rank, k))
            if not at_once:
                losses.pop().backward()
        if at_once:
            torch.stack(losses).sum().backward()

    plain, model = seeded(Toggling), shard(seeded(Toggling), env.mesh(shape))
    for _ in range(2):
        check_grads(model, plain, run, env.rank, env.world_size)
        flags = {name: param.requires_grad for name, param in model.named_parameters()}
        assert flags == {name: param.requires_grad for name, param in plain.named_parameters()}
        check_rest(model)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("of", ["last", "blocks.1"])
@pytest.mark.parametrize("name", INSIDE)
def test_rule_29_toggles_inside_the_forward(pool2: Pool, name: str, of: str, behind: bool, at_once: bool) -> None:
    pool2.run(check_inside, (2,), name, of, behind, at_once)


def check_opened(env: RankEnv) -> None:
    """Attributes of a unit that the user opened show unsharded parameters; what is set there holds as well."""

    def run(model: nn.Module, rank: int) -> None:
        for wants in (False, True, False):
            if hasattr(model, "unshard"):
                model.unshard()
            model.last.weight.requires_grad_(wants)  # type: ignore[union-attr]
            if hasattr(model, "reshard"):
                model.reshard()
            assert model.last.weight.requires_grad is wants  # type: ignore[union-attr]
            loss_of(model, rank, int(wants)).backward()
        model.requires_grad_(True)

    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    for _ in range(2):
        check_grads(model, plain, run, env.rank, env.world_size)
        check_rest(model)


def test_rule_29_toggles_of_an_open_unit(pool2: Pool) -> None:
    pool2.run(check_opened)


class Scripted(nn.Module):
    """Five layers; `script` says what to set where: (before which layer, of what, requires_grad)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(5))
        self.script: list[tuple[int, str, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        for at in range(len(self.layers) + 1):
            for when, what, wants in self.script:
                if when == at:
                    set_requires_grad(self, what, wants)
            if at < len(self.layers):
                x = torch.tanh(self.layers[at](x))
        return x


def set_requires_grad(model: nn.Module, what: str, wants: bool) -> None:
    layer, _, name = what.partition(".")
    found: Any = model.layers[int(layer)]  # type: ignore[index]
    (getattr(found, name) if name else found).requires_grad_(wants)


def draw(rng: random.Random) -> list[tuple[Any, ...]]:
    """Forwards with their scripts, toggles and `zero_grad` between them, backwards of the oldest or of all forwards."""
    what = lambda: rng.choice(["0", "1", "2", "4", "0.weight", "3.bias", "4.weight"])  # noqa: E731
    program: list[tuple[Any, ...]] = []
    for k in range(rng.randint(2, 7)):
        kind = rng.choice(["forward"] * 6 + ["set", "set", "oldest", "all", "zero"])
        script = [(rng.randint(0, 5), what(), rng.random() < 0.5) for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
        program.append((kind, *{"forward": (k, script), "set": (what(), rng.random() < 0.5)}.get(kind, ())))
    return [*program, ("all",)]


def play(program: list[tuple[Any, ...]], model: nn.Module, rank: int) -> None:
    losses: list[Tensor] = []
    for kind, *told in program:
        if kind == "forward":
            model.script = told[1]
            losses.append(loss_of(model, rank, told[0]))
            model.script = []
        elif kind == "set":
            set_requires_grad(model, *told)
        elif kind == "zero":
            model.zero_grad()
        elif losses:
            due = losses[:1] if kind == "oldest" else losses
            losses = losses[len(due) :]
            torch.stack(due).sum().backward()


def check_scripts(env: RankEnv, first: int, last: int) -> None:
    for seed in range(first, last):
        rng = random.Random(seed)
        program = draw(rng)
        plain, model = seeded(Scripted), seeded(Scripted)
        reshard = rng.choice([None, True, False])
        for layer in rng.sample(list(model.layers), rng.randint(0, 5)):  # type: ignore[arg-type]
            hsdp.fully_shard(layer, mesh=env.mesh(2), reshard_after_forward=reshard)
        hsdp.fully_shard(model, mesh=env.mesh(2), reshard_after_forward=reshard)
        try:
            check_run(model, plain, program, env)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{program}") from error


def check_run(model: nn.Module, plain: nn.Module, program: list[tuple[Any, ...]], env: RankEnv) -> None:
    play(program, model, env.rank)
    sums: dict[str, Any] = {}
    flags: dict[str, bool] = {}
    for rank in range(env.world_size):
        twin = copy.deepcopy(plain)
        play(program, twin, rank)
        for name, param in twin.named_parameters():
            flags[name] = param.requires_grad
            if param.grad is not None:
                sums[name] = sums.get(name, 0) + param.grad / env.world_size
    assert {name: param.requires_grad for name, param in model.named_parameters()} == flags
    assert_same(full_grads(model), {name: sums.get(name) for name in flags}, 1e-11, 1e-11)
    check_rest(model)


def test_rule_29_random_toggles(pool2: Pool) -> None:
    pool2.run(check_scripts, 0, 40)
