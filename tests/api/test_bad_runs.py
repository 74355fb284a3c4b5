"""Bad input that shows while a model runs, or only on some ranks: refused by name, and nothing is left of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from hsdp import DivergenceError, StateError, fully_shard
from tests.support.models import make_case
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, shard
from tests.support.twin import full_params

# -- while a model runs ---------------------------------------------------------------------------------------------


def _run_on_meta(env: RankEnv) -> str:
    case = make_case("mlp")
    with torch.device("meta"):
        model = shard(case.build().double(), env.mesh(2))
    with pytest.raises(StateError) as caught:
        model(case.batch(0, env.rank)[0])
    model.to_empty(device="cpu")
    plain = case.model()
    with torch.no_grad():
        for param, source in zip(model.parameters(), plain.parameters(), strict=True):
            param.copy_(distribute_tensor(source, env.mesh(2), param.placements))
    check_grads(model, plain, lambda m, rank: case.loss(m, case.batch(0, rank)).backward(), env.rank, env.world_size)
    return str(caught.value)


def test_parameters_still_on_meta_are_refused_and_materialised_ones_train(pool2: Pool) -> None:
    for text in pool2.run(_run_on_meta):
        for part in (r"unit 'blocks\.0'", "'weight'", "meta", "to_empty"):
            assert re.search(part, text), text


def _call_forward_directly(env: RankEnv) -> None:
    case = make_case("mlp")
    model, plain = shard(case.model(), env.mesh(2)), case.model()

    def run(module: nn.Module, rank: int) -> None:
        x, y = case.batch(0, rank)
        (module.forward(x) - y).square().mean().backward()
        (module.blocks[1].forward(x.repeat(1, 2))).sum().backward()

    for _ in range(2):
        check_grads(model, plain, run, env.rank, env.world_size)


def test_forward_may_be_called_directly(pool2: Pool) -> None:
    pool2.run(_call_forward_directly)


class _Generator(nn.Linear):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            x = super().forward(x)
            yield x


class _Coroutine(nn.Linear):
    async def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class _Lazy(nn.Linear):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        return map(super().forward, (x, x))


def _refuse_what_runs_later(env: RankEnv) -> None:
    for kind, told in ((_Generator, "generator"), (_Coroutine, "coroutine"), (_Lazy, "map")):
        model = fully_shard(kind(4, 4), mesh=env.mesh(2))
        with pytest.raises(StateError, match=rf"unit '{kind.__name__} \(root\)' returns a {told}, .*return a list"):
            model(torch.ones(1, 4))
    model = fully_shard(nn.Linear(4, 4), mesh=env.mesh(2))
    with pytest.raises(TypeError, match=r"FSDPLinear is sharded and cannot be exported.*full_state_dict"):
        torch.export.export(model, (torch.ones(1, 4),))
    with pytest.raises(TypeError, match=r"Linear.* is sharded and cannot be traced.*full_state_dict"):
        torch.jit.trace(model, torch.ones(1, 4))
    assert model(torch.ones(1, 4)).shape == (1, 4), "a plain forward goes on"


def test_what_would_run_after_forward_is_refused(pool2: Pool) -> None:
    pool2.run(_refuse_what_runs_later)


class _Remembering(nn.Module):
    """Computes with a parameter that it looked up when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        weight = self.blocks[0].weight
        self.first = lambda x: nn.functional.linear(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.first(x))


def _use_what_was_before(env: RankEnv) -> None:
    model = shard(_Remembering(), env.mesh(2))
    message = r"what parameter 'weight' of unit 'blocks\.0' was before fully_shard.*Look it up when"
    with pytest.raises(StateError, match=message):
        model(torch.ones(1, 4)).sum().backward()
    tied = nn.Linear(4, 4)
    both = nn.Sequential(nn.Linear(4, 4), tied)
    both[0].weight = tied.weight
    fully_shard(tied, mesh=env.mesh(2))
    with pytest.raises(StateError, match="tied to it and not sharded"):
        both(torch.ones(1, 4)).sum().backward()
    linear = nn.Linear(4, 4)
    weight = linear.weight
    fully_shard(linear, mesh=env.mesh(2))
    del linear
    weight.sum().backward()  # nobody else trains it: it is a plain parameter again


def test_computing_with_what_a_parameter_was_before_is_refused_by_name(pool2: Pool) -> None:
    pool2.run(_use_what_was_before)


def _replace_parameter(env: RankEnv, how: str) -> str:
    case = make_case("mlp")
    model = shard(case.model(), env.mesh(2))
    x = case.batch(0, env.rank)[0]
    expected = model(x).detach()
    block = model.blocks[1]
    held = block.weight
    if how == "plain":
        block.weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.float64))
    elif how == "shape":
        block.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 16), env.mesh(2), [Shard(0)]))
    elif how == "placement":
        block.weight = nn.Parameter(distribute_tensor(torch.zeros(16, 16), env.mesh(2), [Shard(1)]))
    with pytest.raises(StateError) as caught:
        if how == "functional_call":
            torch.func.functional_call(model, full_params(model), (x,))
        else:
            model(x)
    if how != "functional_call":
        block.weight = held
    assert torch.equal(model(x), expected), "the refusal left something behind"
    return str(caught.value)


@pytest.mark.parametrize("how", ["plain", "shape", "placement", "functional_call"])
def test_parameters_replaced_by_something_else_are_refused_by_name(pool2: Pool, how: str) -> None:
    for text in pool2.run(_replace_parameter, how):
        name = r"blocks\.\d|MLP" if how == "functional_call" else r"'weight'.*'blocks\.1'"
        assert re.search(name, text), text
        assert re.search("in place|must keep", text), text


def _assign_plain_state(env: RankEnv) -> str:
    model = shard(make_case("mlp").model(), env.mesh(2))
    state = full_params(model)
    with pytest.raises((StateError, RuntimeError)) as caught:
        model.load_state_dict(state, assign=True)
        model(torch.ones(1, 8, dtype=torch.float64))
    return str(caught.value)


def test_assigning_a_plain_state_dict_is_refused_by_name(pool2: Pool) -> None:
    for text in pool2.run(_assign_plain_state):
        assert re.search(r"weight.*(sharded|DTensor)", text, re.DOTALL), text


def _copy_plain_state(env: RankEnv) -> None:
    model = shard(make_case("mlp").model(), env.mesh(2))
    state = dict(full_params(model))
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    first = str(caught.value).splitlines()[1]
    assert re.search(r"'[\w.]+' is a whole tensor .*load_full_state_dict\(model, state_dict\)", first), first
    assert str(caught.value).count("load_full_state_dict") == 1, "once is enough"
    model.load_state_dict(model.state_dict())
    with implicit_replication():  # torch's own way to make it work
        model.load_state_dict({key: torch.zeros_like(value) for key, value in state.items()})


def test_loading_whole_tensors_says_how(pool2: Pool) -> None:
    pool2.run(_copy_plain_state)


# -- ranks that disagree --------------------------------------------------------------------------------------------


def _build_differently(env: RankEnv, what: str, shape: tuple[int, ...]) -> str:
    odd = env.rank == env.world_size - 1
    model: nn.Module = nn.Linear(8, 6 if odd and what == "shape" else 4, bias=not (odd and what == "names"))
    if what == "dtype" and odd:
        model.double()
    if what == "frozen" and odd:
        model.requires_grad_(False)
    choose = (lambda p: Shard(p.ndim - 1)) if odd and what == "placement" else None
    with pytest.raises(DivergenceError) as caught:
        fully_shard(model, mesh=env.mesh(shape), shard_placement_fn=choose)
    assert type(model) is nn.Linear
    return str(caught.value)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("what", ["shape", "names", "dtype", "frozen", "placement"])
def test_ranks_that_build_different_models_are_told_which_parameter(pool4: Pool, what: str, shape: tuple[int, ...]) -> None:
    for text in pool4.run(_build_differently, what, shape):
        assert re.search("bias" if what == "names" else "weight", text), text
        assert "Linear" in text
        assert "rank(s) [3]" in text


def _start_from_other_values(env: RankEnv, shape: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(env.rank)
    model = nn.Linear(5, 7)
    mine = {name: param.detach().clone() for name, param in model.named_parameters()}
    fully_shard(model, mesh=env.mesh(shape))
    return {**{f"before.{name}": value for name, value in mine.items()}, **full_params(model)}


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
def test_values_that_differ_are_replaced_by_those_of_the_first_rank(pool4: Pool, shape: tuple[int, ...]) -> None:
    results = pool4.run(_start_from_other_values, shape)
    for rank in results:
        for name in ("weight", "bias"):
            assert torch.equal(rank[name], results[0][f"before.{name}"])
