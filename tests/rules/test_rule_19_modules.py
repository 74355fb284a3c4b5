"""Rule 19: children used alone, sub-models, inference before training, modules that hold parameters in other ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

import hsdp
from tests.support.deep import DIM, Deep, floats, mean_grads, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded, shard
from tests.support.twin import assert_same, full_grads


def _child_first(model: nn.Module, rank: int) -> None:
    blocks: Any = model.blocks
    blocks[2](floats(rank)).sum().backward()
    step(model, rank)
    with torch.no_grad():
        blocks[1](floats(rank))
    step(model, rank, 1)


def _sub_model(model: nn.Module, rank: int) -> None:
    blocks: Any = model.blocks
    nn.Sequential(blocks[3], nn.Tanh(), blocks[0])(floats(rank)).square().sum().backward()
    step(model, rank)


def _child_between(model: nn.Module, rank: int) -> None:
    # The child becomes a root of its own while the model's backward is still to come.
    blocks: Any = model.blocks
    loss = model(floats(rank)).square().sum()
    with torch.no_grad():
        blocks[2](floats(rank))
    loss.backward()


USES: dict[str, Callable[[nn.Module, int], None]] = {
    "a child first": _child_first,
    "a sub-model": _sub_model,
    "a child between": _child_between,
}


def check_use(env: RankEnv, name: str, shape: tuple[int, ...]) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape))
    for _ in range(2):
        check_grads(model, plain, USES[name], env.rank, env.world_size)
        check_rest(model)


@pytest.mark.parametrize("name", USES)
def test_rule_19_children_work_alone(pool2: Pool, name: str) -> None:
    pool2.run(check_use, name, (2,))


def check_inference_first(env: RankEnv, how: str) -> None:
    """Parameters that change behind an inference are fresh in training, and the other way round."""
    mode = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[how]
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    for k in range(3):
        with mode():
            torch.testing.assert_close(model(floats(env.rank, k)), plain(floats(env.rank, k)), rtol=1e-11, atol=1e-11)
        check_rest(model)
        model(floats(env.rank, k))  # a forward that no backward follows, which leaves the root's parameters whole
        for param in (*model.parameters(), *plain.parameters()):
            local = param.to_local() if hasattr(param, "to_local") else param
            local.data.mul_(0.9)
        check_grads(model, plain, step, env.rank, env.world_size)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_rule_19_inference_then_training(pool2: Pool, how: str) -> None:
    pool2.run(check_inference_first, how)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(DIM, DIM, num_layers=2), nn.GRU(DIM, DIM, bidirectional=True)])

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.blocks[0](x.unsqueeze(1))
        x, _ = self.blocks[1](x)
        return x


class Lists(nn.Module):
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList(nn.Parameter(torch.randn(DIM)) for _ in range(3))
            self.named = nn.ParameterDict({"gain": nn.Parameter(torch.rand(DIM)), "shift": nn.Parameter(torch.rand(1))})

        def forward(self, x: Tensor) -> Tensor:
            for row in self.rows:
                x = x * row
            return x * self.named["gain"] + self.named["shift"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Unit() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _parametrized() -> nn.Module:
    model = Deep(layers=2)
    parametrize.register_parametrization(model.blocks[0], "weight", Symmetric())
    return model


def _weight_norm() -> nn.Module:
    model = Deep(layers=2)
    nn.utils.parametrizations.weight_norm(model.blocks[1])
    return model


def _attention() -> nn.Module:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.MultiheadAttention(DIM, 2)])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.blocks[0](x, x, x)[0]
            return out

    return Attention()


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "RNN": Recurrent,
    "ParameterList": Lists,
    "parametrization": _parametrized,
    "weight_norm": _weight_norm,
    "attention": _attention,
}


def refused(run: Callable[[], object]) -> bool:
    """Whether hsdp refuses to run it, in words that name the parameter."""
    message = ""
    try:
        run()
    except (ValueError, TypeError, hsdp.StateError) as error:
        message = str(error)
    assert not message or "parameter" in message, message
    return bool(message)


def check_own_ways(env: RankEnv, name: str) -> None:
    """Equal to the twin, before and after a step; or refused with a text that says more than a type."""
    plain, model = seeded(BUILDS[name]), seeded(BUILDS[name])
    if refused(lambda: check_grads(shard(model, env.mesh(2)), plain, step, env.rank, env.world_size)):
        return
    with torch.no_grad():
        for param in (*model.parameters(), *plain.parameters()):
            param.mul_(0.9)
    check_grads(model, plain, step, env.rank, env.world_size)
    check_sharded(model)
    check_rest(model)


@pytest.mark.parametrize("name", BUILDS)
def test_rule_19_modules_with_their_own_ways_work_or_are_refused(pool2: Pool, name: str) -> None:
    pool2.run(check_own_ways, name)


def check_functional_call(env: RankEnv) -> None:
    """Plain tensors in the parameters' place are refused or used, never ignored; afterwards all is as before."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    x = floats(env.rank)
    others = {name: torch.full_like(param, 0.25) for name, param in plain.named_parameters()}
    expected = torch.func.functional_call(plain, others, (x,))
    found: list[Tensor] = []
    if not refused(lambda: found.append(torch.func.functional_call(model, others, (x,)))):
        torch.testing.assert_close(found[0], expected, rtol=1e-11, atol=1e-11)
    check_sharded(model)
    check_grads(model, plain, step, env.rank, env.world_size)
    assert_same(full_grads(model), mean_grads(plain, step, env.world_size))


def test_rule_19_functional_call_works_or_is_refused(pool2: Pool) -> None:
    pool2.run(check_functional_call)


class Entered(Deep):
    """A model with a second entry point."""

    def embed(self, x: Tensor) -> Tensor:
        return self.forward(x) * 2.0


def check_opened_by_hand(env: RankEnv, how: str, known: bool) -> None:
    """`unshard()` and then a call: it is an entry of its own, and no part of one under way."""

    def run(model: Any, rank: int) -> None:
        if isinstance(model, hsdp.HSDPModule):
            model.unshard()
        call = {"the module": model, "forward": model.forward, "a registered method": model.embed}[how]
        call(floats(rank)).square().sum().backward()

    plain, model = seeded(Entered), shard(seeded(Entered), env.mesh(2))
    hsdp.register_forward_method(model, "embed")
    if known:
        step(model, env.rank)
    for _ in range(2):
        check_grads(model, plain, run, env.rank, env.world_size)
        check_rest(model)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("how", ["the module", "forward", "a registered method"])
def test_rule_19_a_call_after_unshard(pool2: Pool, how: str, known: bool) -> None:
    pool2.run(check_opened_by_hand, how, known)


class Facade(nn.Module):
    """Its `embed` is another module's, and one of its methods the class's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer = Entered(), nn.Linear(DIM, DIM)
        self.embed = self.inner.embed

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.inner(x))


def check_methods_of_others(env: RankEnv) -> None:
    def run(model: Any, rank: int) -> None:
        (model.embed(floats(rank)).square().sum() + model(floats(rank)).sum()).backward()

    plain, model = seeded(Facade), seeded(Facade)
    hsdp.fully_shard(model, mesh=env.mesh(2))
    for name in ("embed", "kind"):
        hsdp.register_forward_method(model, name)
    check_grads(model, plain, run, env.rank, env.world_size)
    assert model.kind() == "FSDPFacade"


def test_rule_19_a_registered_method_of_another_module_stays_that_one(pool2: Pool) -> None:
    pool2.run(check_methods_of_others)


def check_functions_on_parameters(env: RankEnv) -> None:
    """What is computed with parameters that the user opened, beside every module's call, trains them all the same."""

    def run(model: Any, rank: int) -> None:
        if isinstance(model, hsdp.HSDPModule):
            model.unshard()
        nn.functional.linear(floats(rank), model.weight, model.bias).square().sum().backward()

    plain, model = (seeded(lambda: nn.Linear(DIM, DIM)) for _ in range(2))
    hsdp.fully_shard(model, mesh=env.mesh(2))
    for _ in range(2):
        check_grads(model, plain, run, env.rank, env.world_size)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for param in plain.parameters():
            param.data.add_(param.grad / env.world_size, alpha=-0.1)  # type: ignore[arg-type]


def test_rule_19_functions_on_opened_parameters(pool2: Pool) -> None:
    pool2.run(check_functions_on_parameters)
