"""What users do between a backward and the landing of its sums, which run on or wait: none of it reaches back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp
from hsdp.errors import StaleParametersError, StateError
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, mesh_id
from tests.support.twin import assert_same, full_grads

DIM = 4


class Layers(nn.Module):
    """A chain of layers, each a unit."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))
        self.between: Callable[[nn.Module], object] = lambda module: None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.between(self)
        return self.layers[-1](x)


def _pair(env: RankEnv, shape: tuple[int, ...], count: int = 3, **options: Any) -> tuple[Any, Layers]:
    """A sharded model and its twin, which gets the batches of all ranks."""
    torch.manual_seed(0)
    twin = Layers(count).double()
    model = copy.deepcopy(twin)
    for layer in model.layers:
        hsdp.fully_shard(layer, mesh=env.mesh(shape), **options)
    return hsdp.fully_shard(model, mesh=env.mesh(shape), **options), twin


def _x(micro: int, rank: int) -> Tensor:
    return torch.randn(3, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * micro + rank))


def _backward(env: RankEnv, model: nn.Module, twin: nn.Module | None, micro: int) -> None:
    model(_x(micro, env.rank)).square().sum().backward()
    for rank in range(env.world_size) if twin is not None else ():
        assert twin is not None
        (twin(_x(micro, rank)).square().sum() / env.world_size).backward()


def _same(model: nn.Module, twin: nn.Module) -> None:
    assert_same(full_grads(model), {name: param.grad for name, param in twin.named_parameters()})


def _zero_then_defer(env: RankEnv, bucket: int) -> None:
    """Gradients that wait for their all-reduce in a bucket are dropped; those of later micro-batches are not."""
    model, twin = _pair(env, (2, 1), comm_policy=hsdp.CommPolicy(all_reduce_bucket_bytes=bucket))
    model.set_is_last_backward(False)
    _backward(env, model, twin, 0)
    for one in (model, twin):
        one.zero_grad()
    for last in (False, True):
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        _backward(env, model, twin, 1 + last)
    _same(model, twin)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("on all ranks")


def _fail_behind(env: RankEnv, bucket: int) -> None:
    """A backward that fails leaves the gradients of the one before, which are still on their way."""
    model, twin = _pair(env, (2, 1), comm_policy=hsdp.CommPolicy(all_reduce_bucket_bytes=bucket))
    model.set_is_last_backward(False)
    _backward(env, model, twin, 0)
    model.layers[-1].set_requires_all_reduce(False)
    with suppress(ArithmeticError):
        model(_Fails.apply(_x(1, env.rank).requires_grad_())).square().sum().backward()
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(True)
    with pytest.warns(UserWarning, match="a backward pass failed"):
        model.flush()
    _same(model, twin)


@pytest.mark.parametrize("bucket", [0, 600, 1_000_000])
@pytest.mark.parametrize("case", [_zero_then_defer, _fail_behind], ids=["zeroed", "failed"])
def test_buckets_of_sums_do_not_take_those_that_are_deferred_later(pool2: Pool, case: Any, bucket: int) -> None:
    pool2.run(case, bucket)


def _times_ten(tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
    dist.all_reduce(tensor, op, group)
    tensor.mul_(10.0)


def _scatter_times_ten(output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
    dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
    output_tensor.mul_(10.0)


SETTERS: dict[str, Callable[[Any, bool], object]] = {
    "hook": lambda model, on: [
        layer.set_all_reduce_hook((lambda tensor: tensor.mul_(10.0)) if on else None) for layer in model.layers
    ],
    "replica reduce": lambda model, on: model.set_replica_reduce(_times_ten if on else None),
    "reduce-scatter": lambda model, on: [
        layer.set_custom_reduce_scatter(_scatter_times_ten if on else None) for layer in model.layers
    ],
}


def _set_later(env: RankEnv, shape: tuple[int, ...], what: str, policy: hsdp.CommPolicy) -> None:
    model, twin = _pair(env, shape, comm_policy=policy)
    SETTERS[what](model, True)
    model.set_is_last_backward(False)
    _backward(env, model, twin, 0)
    SETTERS[what](model, False)
    model.set_is_last_backward(True)
    model.flush()
    for param in twin.parameters() if what != "reduce-scatter" or shape[1] > 1 else ():  # one shard rank scatters nothing
        assert param.grad is not None
        param.grad.mul_(10.0)
    _same(model, twin)


@pytest.mark.parametrize("bucket", [0, 1_000_000])
@pytest.mark.parametrize("what", SETTERS)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=mesh_id)
def test_a_backward_is_reduced_as_it_was_set_then(pool4: Pool, shape: tuple[int, ...], what: str, bucket: int) -> None:
    policy = hsdp.CommPolicy(all_reduce_bucket_bytes=bucket, reduce_scatter_bucket_bytes=bucket)
    pool4.run(_set_later, shape, what, policy)


def _unused_then(env: RankEnv) -> None:
    """A parameter that no rank used gets what was asked for when the backward ran."""
    for asked, found in (("zero", True), ("none", False)):
        spare: Any = nn.Sequential(nn.Linear(DIM, DIM)).double()
        spare.unused = nn.Parameter(torch.ones(DIM, dtype=torch.float64))
        hsdp.fully_shard(spare, mesh=env.mesh((2, 1)))
        spare.set_unused_param_grads(asked)
        spare.set_is_last_backward(False)
        spare(_x(0, env.rank)).sum().backward()
        spare.set_unused_param_grads("none" if asked == "zero" else "zero")
        spare.flush()
        assert (spare.unused.grad is not None) is found


def test_unused_parameters_get_what_was_asked_for_then(pool2: Pool) -> None:
    pool2.run(_unused_then)


class Nested(nn.Module):
    """A unit of two plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.to(self.first.weight.dtype))).to(self.second.weight.dtype))


def _unit(env: RankEnv) -> tuple[Any, Nested]:
    torch.manual_seed(0)
    twin = Nested().double()
    return hsdp.fully_shard(copy.deepcopy(twin), mesh=env.mesh(2)), twin


def _moved_in_flight(env: RankEnv) -> None:
    """A part of a unit is moved to where it is, which makes its buffers anew, before gradients on their way are zeroed."""
    model, twin = _unit(env)
    model.set_is_last_backward(False)
    _backward(env, model, None, 0)
    model.first.to("cpu")
    out = model(_x(1, env.rank))
    model.zero_grad()
    model.set_is_last_backward(True)
    out.square().sum().backward()
    for rank in range(2):
        (twin(_x(1, rank)).square().sum() / 2).backward()
    _same(model, twin)


def _cast_pending(env: RankEnv) -> None:
    """A part of a unit is cast while sums are pending: refused by name, until they are zeroed."""
    model, _ = _unit(env)
    with model.no_sync():
        _backward(env, model, None, 0)
    model.first.to(torch.float32)
    with pytest.raises(StateError, match=r"first\.(weight|bias)|pending|were moved, cast or replaced"):
        model(_x(1, env.rank))
    model.zero_grad()
    _backward(env, model, None, 1)
    assert model.first.weight.grad.dtype == torch.float32


def _two_optimizers(env: RankEnv) -> None:
    """Deferred sums are given up by one optimizer after the other; then other parameters are trained."""
    torch.manual_seed(0)
    model: Any = hsdp.fully_shard(Nested().double(), mesh=env.mesh((2, 1)))
    first, second = (torch.optim.SGD(part.parameters()) for part in (model.first, model.second))
    with model.accumulate(last=False):
        _backward(env, model, None, 0)
    first.zero_grad()
    assert set(model.pending_gradients()) == {"second.weight", "second.bias"}
    second.zero_grad()
    assert not model.pending_gradients()
    model.first.requires_grad_(False)
    with model.accumulate(last=True):
        _backward(env, model, None, 1)
    assert model.first.weight.grad is None and model.second.weight.grad is not None


@pytest.mark.parametrize("case", [_moved_in_flight, _cast_pending, _two_optimizers], ids=["moved", "cast", "given up"])
def test_units_outlive_what_is_done_to_pending_sums(pool2: Pool, case: Any) -> None:
    pool2.run(case)


def _write(module: Any) -> None:
    """Past version counters."""
    weight = module.layers[-1].weight
    getattr(weight, "_local_tensor", weight).data.mul_(1.5)


def _parts_within(env: RankEnv) -> None:
    """A unit is called twice in a forward, and written to in between."""
    model, twin = _pair(env, (4,), reshard_after_forward=2)
    for _ in range(3):
        for one in (model, twin):
            one.between = _write
        torch.testing.assert_close(model(_x(0, env.rank)), twin(_x(0, env.rank)))


def _parts_between(env: RankEnv, prefetch: int) -> None:
    """A unit that stayed sharded over a smaller group is written to before its backward."""
    model, _ = _pair(env, (4,), reshard_after_forward=2, comm_policy=hsdp.CommPolicy(prefetch=prefetch))
    for micro in range(3):
        out = model(_x(micro, env.rank))
        weight = model.layers[0].weight
        weight._local_tensor.data.mul_(1.5)
        with pytest.raises(StaleParametersError, match=r"layers\.0"):
            out.square().sum().backward()
        model.zero_grad()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_parts_are_not_those_of_weights_that_were_written_since(pool4: Pool, prefetch: int) -> None:
    pool4.run(_parts_within)
    pool4.run(_parts_between, prefetch)


def _writes_replicated(env: RankEnv, raises: bool) -> None:
    """A forward writes to a parameter that every rank keeps whole: told at its end, or if it raises by the next gather."""

    class Scaled(nn.Module):
        factor: float | None = None

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))

        def forward(self, x: Tensor) -> Tensor:
            if self.factor is not None:
                with torch.no_grad():
                    self.scale.mul_(self.factor)
                if raises:
                    raise ArithmeticError("the user's")
            return self.linear(x) * self.scale

    model: Any = Scaled()
    hsdp.fully_shard(model, mesh=env.mesh(2), replicate_params=[model.scale])
    model.factor = 2.0 + env.rank
    told = pytest.raises(StateError, match=r"wrote to parameter 'scale' .*replicate_params, the parameter itself")
    with pytest.raises(ArithmeticError) if raises else told:
        model(torch.ones(1, DIM))
    if raises:
        model.factor = None
        with told:
            model(torch.ones(1, DIM))


@pytest.mark.parametrize("raises", [False, True])
def test_writes_to_replicated_parameters_are_told(pool2: Pool, raises: bool) -> None:
    pool2.run(_writes_replicated, raises)


def _finalizes(env: RankEnv, shape: tuple[int, ...], between: str, syncs: bool) -> None:
    """FSDP2's two calls since torch 2.15: nothing lands before the second one is waited for."""
    model, twin = _pair(env, shape)
    for step in range(2):
        model.set_manual_backward_finalization(True)
        model.set_reshard_after_backward(False)
        for micro in range(2):
            model.set_requires_gradient_sync(syncs)
            _backward(env, model, twin, 2 * step + micro)
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        if between == "waits":
            assert model.finalize_backward() is None
        else:
            handle = model.finalize_backward(async_op=True)
            if between == "zeroed":
                for one in (model, twin):
                    one.zero_grad()
            elif between == "goes on":
                _backward(env, model, twin, 7)
            for _ in range(2):
                handle.wait()
        model.set_manual_backward_finalization(False)
        check_rest(model)
        assert not model.pending_gradients()
        _same(model, twin)
    assert model.finalize_backward(async_op=True).wait() is None, "with nothing to do"
    _same(model, twin)


@pytest.mark.parametrize("syncs", [True, False], ids=["each", "once"])
@pytest.mark.parametrize("between", ["waits", "nothing", "zeroed", "goes on"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_a_backward_is_finalized_by_hand(pool2: Pool, shape: tuple[int, ...], between: str, syncs: bool) -> None:
    pool2.run(_finalizes, shape, between, syncs)
