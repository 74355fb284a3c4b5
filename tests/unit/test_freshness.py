"""The next forward uses the newest weights, whoever changed them; a backward never uses newer ones than its forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import hsdp
from hsdp import StaleParametersError
from tests.support.graphs import Net, loss, step, tokens
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded, mesh_id, pool_for, shard
from tests.support.twin import assert_same, full_params


class Cut(Net):
    """Runs its first `take` blocks."""

    take = 3

    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.take]:
            x = block(x)
        return x


# -- ways to change weights: each does the same to a sharded and to a plain model ------------------------------------


def _step(kind: Callable[..., torch.optim.Optimizer], model: nn.Module, **options: Any) -> None:
    params = list(model.parameters())
    for param in params:
        param.grad = torch.full_like(param, 0.1)
    optimizer = kind(params, lr=0.05, **options)
    for _ in range(2):  # the optimizer's second step is in no way special
        optimizer.step()
    optimizer.zero_grad()


def _through_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.add_(0.1)


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.1)


def _foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_([p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()], 0.9)


def _load(assign: bool, model: nn.Module) -> None:
    state = {name: value * 0.8 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def _load_child(model: nn.Module) -> None:
    """Into a submodule that is no unit of its own."""
    head: Any = model.head
    head.load_state_dict({name: value + 0.3 for name, value in head.state_dict().items()})


def _there_and_back(model: nn.Module) -> None:
    model.to(torch.float32).to(torch.float64)


def _child_there_and_back(model: nn.Module) -> None:
    head: Any = model.head
    head.float().double()


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "SGD": partial(_step, torch.optim.SGD),
    "foreach SGD": partial(_step, torch.optim.SGD, foreach=True),
    "AdamW": partial(_step, torch.optim.AdamW),
    "foreach AdamW": partial(_step, torch.optim.AdamW, foreach=True),
    "fused AdamW": partial(_step, torch.optim.AdamW, fused=True),
    "p.data": _through_data,
    "in place": _in_place,
    "foreach of local tensors": _foreach,
    "load_state_dict": partial(_load, False),
    "load_state_dict(assign)": partial(_load, True),
    "load into a child": _load_child,
    "to float32 and back": _there_and_back,
    "a child to float32 and back": _child_there_and_back,
}

# -- what happened before the change --------------------------------------------------------------------------------


def _nothing(model: nn.Module, rank: int) -> None:
    """The weights were never gathered."""


def _trained(model: nn.Module, rank: int) -> None:
    step(model, rank)


def _forward_only(model: nn.Module, rank: int) -> None:
    loss(model, rank)


def _evaluated(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        loss(model, rank)


def _inferred(model: nn.Module, rank: int) -> None:
    with torch.inference_mode():
        loss(model, rank)


def _unsharded(model: nn.Module, rank: int) -> None:
    model.unshard()
    model.blocks[0].unshard()


def _half_prefetched(model: nn.Module, rank: int) -> None:
    """A forward in which a unit was gathered ahead and then not used."""
    for k in range(2):
        step(model, rank, k)
    model.take = 1
    loss(model, rank)
    model.take = 3


BEFORE: dict[str, Callable[[nn.Module, int], None]] = {
    "nothing": _nothing,
    "a training step": _trained,
    "a forward": _forward_only,
    "no_grad": _evaluated,
    "inference_mode": _inferred,
    "unshard": _unsharded,
    "prefetch in vain": _half_prefetched,
}

KEEP = {"default": None, "kept": False, "freed": True}
# With one shard rank the whole parameters alias the shards: nothing there is to be kept or freed.
WAYS: list[tuple[str, tuple[int, ...]]] = [*((keep, (2,)) for keep in KEEP), ("default", (2, 1))]


def _uses_new_weights(env: RankEnv, before: str, keep: bool | None, shape: tuple[int, ...]) -> None:
    plain = Cut().double()
    model = shard(copy.deepcopy(plain), env.mesh(shape), reshard_after_forward=keep)
    batch = tokens(env.rank)
    with torch.no_grad():
        last = plain(batch)
    for name, change in CHANGES.items():
        BEFORE[before](model, env.rank)
        model.zero_grad()
        change(model)
        change(plain)
        with torch.no_grad():
            expected = plain(batch)
        assert name.endswith("back") or not torch.allclose(expected, last, rtol=1e-6), f"{name}: nothing changed"
        last = expected
        out = model(batch)
        assert torch.allclose(out, expected, rtol=1e-11, atol=1e-11), f"{name}: off by {(out - expected).abs().max()}"
        out.sum().backward()
        check_sharded(model)
    check_grads(model, plain, step, env.rank, env.world_size)
    assert_same(dict(full_params(model)), dict(full_params(plain)))
    check_rest(model)


@pytest.mark.parametrize(("keep", "shape"), WAYS, ids=str)
@pytest.mark.parametrize("before", BEFORE)
def test_the_next_forward_uses_the_new_weights(
    request: pytest.FixtureRequest, before: str, keep: str, shape: tuple[int, ...]
) -> None:
    pool_for(request, shape).run(_uses_new_weights, before, KEEP[keep], shape)


def test_the_next_forward_uses_the_new_weights_on_replicas(pool4: Pool) -> None:
    pool4.run(_uses_new_weights, "a training step", None, (2, 2))


# -- dtypes ---------------------------------------------------------------------------------------------------------


def _move(env: RankEnv, shape: tuple[int, ...]) -> None:
    plain = Net()
    model = shard(copy.deepcopy(plain), env.mesh(shape))
    step(model, env.rank)
    model.zero_grad()
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.bfloat16, 0.1), (torch.float16, 0.02), (torch.float32, 1e-5)):
        model.to(dtype)
        plain.to(dtype)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert {value.dtype for value in model.state_dict().values()} == {dtype}
        check_grads(model, plain, step, env.rank, env.world_size, tolerance)
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
    assert model.half() is model
    assert model(tokens(env.rank)).dtype == torch.float16
    model.blocks[1].float()
    with pytest.raises(RuntimeError, match="dtype"):
        model(tokens(env.rank))  # as a plain model would
    model.float()
    plain.half().float()
    check_grads(model, plain, step, env.rank, env.world_size, 1e-5)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_to_and_half_move_everything(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_move, shape)


def _train_as_before(env: RankEnv) -> None:
    plain = Net().double()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    batch = tokens(env.rank)
    with torch.inference_mode():
        first = model(batch)  # the very first forward makes the buffers
    with torch.no_grad():
        second = model(batch)
    expected = plain(batch)
    assert torch.equal(first.clone(), second)
    assert torch.allclose(second, expected, rtol=1e-11)
    check_rest(model)
    check_grads(model, plain, step, env.rank, env.world_size)
    model.eval()
    assert not model.blocks[0].training
    check_grads(model, plain, step, env.rank, env.world_size)


def test_inference_first_and_training_later(pool2: Pool) -> None:
    pool2.run(_train_as_before)


# -- changes between a forward and its backward ---------------------------------------------------------------------

STALE: dict[str, Callable[[nn.Module], None]] = {
    name: CHANGES[name] for name in ("SGD", "foreach SGD", "AdamW", "foreach AdamW", "fused AdamW", "load_state_dict")
} | {
    "load_state_dict(assign)": partial(_load, True),
    "load into a child": _load_child,
    "to float32": lambda model: model.to(torch.float32) and None,
    "a child to float32": lambda model: model.head.float() and None,
}


def _refuses(env: RankEnv, name: str, keep: bool | None, shape: tuple[int, ...]) -> str:
    plain = Net().double()
    model = shard(copy.deepcopy(plain), env.mesh(shape), reshard_after_forward=keep)
    step(model, env.rank, 7)
    model.zero_grad()
    value = loss(model, env.rank)
    STALE[name](model)
    with pytest.raises(StaleParametersError) as caught:
        value.backward()
    STALE[name](plain)
    check_sharded(model)
    assert_same(dict(full_params(model)), dict(full_params(plain)), 1e-6, 1e-6)
    model.double()
    plain.double()
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)
    return str(caught.value)


@pytest.mark.parametrize(("keep", "shape"), WAYS, ids=str)
@pytest.mark.parametrize("name", STALE)
def test_a_backward_with_changed_weights_is_refused_and_names_the_unit(
    request: pytest.FixtureRequest, name: str, keep: str, shape: tuple[int, ...]
) -> None:
    for text in pool_for(request, shape).run(_refuses, name, KEEP[keep], shape):
        assert "(root)" in text or "blocks." in text, text
        assert "between a forward and its backward" in text
        assert "forward again" in text


def _names_the_changed_unit(env: RankEnv) -> str:
    model = shard(Net().double(), env.mesh(2))
    blocks: Any = model.blocks
    optimizer = torch.optim.SGD(blocks[1].parameters(), lr=0.1)
    step(model, env.rank)
    value = loss(model, env.rank)
    optimizer.step()
    with pytest.raises(StaleParametersError) as caught:
        value.backward()
    return str(caught.value)


def test_the_unit_that_changed_is_the_one_that_is_named(pool2: Pool) -> None:
    for text in pool2.run(_names_the_changed_unit):
        assert "'blocks.1'" in text


class _TiesInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.head.weight = self.embedding.weight
        return self.head(self.embedding(tokens))


def _names_what_was_tied(env: RankEnv) -> str:
    model = hsdp.fully_shard(_TiesInForward(), mesh=env.mesh(2))
    with pytest.raises(StaleParametersError) as caught:
        model(torch.arange(8)).sum().backward()
    return str(caught.value)


def test_a_parameter_that_a_forward_replaces_is_named(pool2: Pool) -> None:
    for text in pool2.run(_names_what_was_tied):
        assert "'head.weight' was replaced, moved or tied" in text
        assert "tie parameters before fully_shard" in text


def _step_between_backwards(env: RankEnv) -> None:
    model = shard(Net().double(), env.mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = loss(model, env.rank), loss(model, env.rank, 1)
    second.backward()
    optimizer.step()
    with pytest.raises(StaleParametersError):
        first.backward()


class _Hides(nn.Module):
    """Its output leaves by a way that nobody sees: its unit stays whole, and no gradient enters it through an output."""

    def __init__(self, left: list[Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self._left = [lambda x: left.append(self.second(torch.tanh(self.first(x))))]

    def forward(self, x: Tensor) -> None:
        self._left[0](x)


def _written_behind_a_hidden_output(env: RankEnv) -> None:
    left: list[Tensor] = []
    model = hsdp.fully_shard(_Hides(left).double(), mesh=env.mesh(2))
    x = torch.ones(2, 4).double()
    model(x)
    left.pop().sum().backward()
    model(x)
    for param in model.parameters():
        param.data.mul_(2)
    with pytest.raises(StaleParametersError):
        left.pop().sum().backward()
    model.zero_grad()
    model(x)
    left.pop().sum().backward()


def test_a_write_to_data_is_seen_though_no_gradient_enters_by_an_output(pool2: Pool) -> None:
    pool2.run(_written_behind_a_hidden_output)


def _moved_and_back(env: RankEnv) -> None:
    """Between a forward and its backward a pass runs at weights that are moved by `.data`, and stay whole behind it."""
    model = hsdp.fully_shard(Net().double(), mesh=env.mesh(2), reshard_after_forward=True)
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    before = loss(model, env.rank)
    for sign in (1.0, -1.0):
        for param in model.parameters():
            param.data.add_(0.5 * sign)
        if sign > 0:
            step(model, env.rank)
    with pytest.raises(StaleParametersError):
        before.backward()
    model.zero_grad()
    step(model, env.rank)


def test_weights_that_were_moved_and_put_back_are_not_taken_for_those_that_stayed_whole(pool2: Pool) -> None:
    pool2.run(_moved_and_back)


def test_a_step_between_two_backwards_refuses_the_second(pool2: Pool) -> None:
    pool2.run(_step_between_backwards)


def _step_of_another_model(env: RankEnv) -> None:
    plain = Net().double()
    model, other = shard(copy.deepcopy(plain), env.mesh(2)), shard(Net().double(), env.mesh(2))
    optimizer = torch.optim.AdamW(other.parameters(), foreach=True)
    small = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)

    def run(m: nn.Module, rank: int) -> None:
        value = loss(m, rank)
        if m is model:
            step(other, rank)
            optimizer.step()
            small.step()
            other.load_state_dict(other.state_dict())
        value.backward()

    for _ in range(2):
        check_grads(model, plain, run, env.rank, env.world_size)


def test_a_step_of_another_model_disturbs_nobody(pool2: Pool) -> None:
    pool2.run(_step_of_another_model)


def _hidden_outputs(env: RankEnv) -> None:
    """Through a closure no hook sees the backward begin; the accumulated gradients do."""

    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Callable[[], Tensor]:
            y = torch.tanh(self.linear(x)) * self.linear.weight.sum()
            return lambda: y

    model = shard(Hiding().double(), env.mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, dtype=torch.float64)
    value = model(x)().sum()
    optimizer.step()
    with pytest.raises(StaleParametersError):
        value.backward()


def test_hidden_outputs_do_not_hide_a_change(pool2: Pool) -> None:
    pool2.run(_hidden_outputs)


# -- assigning other tensors ----------------------------------------------------------------------------------------


def _assign(env: RankEnv, shape: tuple[int, ...]) -> None:
    plain = Net().double()
    model = shard(copy.deepcopy(plain), env.mesh(shape))
    step(model, env.rank)
    state = {name: (value * 2).detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(2):
        check_grads(model, plain, step, env.rank, env.world_size)
        for param in plain.parameters():
            assert param.grad is not None
            param.grad /= env.world_size
        for optimizer in optimizers:
            optimizer.step()
    check_sharded(model)
    # One parameter alone, by hand.
    fresh = torch.arange(11.0, dtype=torch.float64)
    mesh = env.mesh(shape)
    head: Any = model.head
    head.bias = nn.Parameter(distribute_tensor(fresh, mesh, head.bias.placements, src_data_rank=None))
    plain.head.bias = nn.Parameter(fresh.clone())
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_assigned_tensors_become_the_parameters(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_assign, shape)
