"""FSDP2's face: every name of `torch.distributed.fsdp` is there with FSDP2's meaning, or refused with a remedy."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import hsdp
from hsdp.api import fsdp2
from tests.support.counting import CollectiveCounter
from tests.support.deep import Deep, collectives, loss_of, of_kind, seeded, step
from tests.support.models import make_case
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_grads, check_rest, mesh_id, pool_for, shard
from tests.support.twin import assert_same, full_grads

METHODS = [name for name in vars(FSDPModule) if not name.startswith("_")]
FUNCTIONS = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]
TYPES = ["CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle"]
if hasattr(fsdp, "DataParallelMeshDims"):  # newer than torch 2.11
    TYPES.append("DataParallelMeshDims")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_hsdps_own_and_takes_the_same_arguments(name: str) -> None:
    ours, theirs = getattr(hsdp.HSDPModule, name), getattr(FSDPModule, name)
    assert ours is not theirs, f"torch's own {name} would run on a module that it knows nothing of"
    wanted = [p for p in inspect.signature(theirs).parameters.values() if p.name != "self"]
    have = dict(inspect.signature(ours).parameters)
    for position, param in enumerate(wanted, 1):
        assert param.name in have, f"{name}({param.name}=...)"
        if param.kind is not param.KEYWORD_ONLY:
            assert list(have)[position] == param.name, f"{name}: {param.name} by position"
        assert have[param.name].default == param.default, f"{name}({param.name}={param.default})"


@pytest.mark.parametrize("name", [*FUNCTIONS, *TYPES])
def test_every_public_name_is_there(name: str) -> None:
    assert hasattr(fsdp, name) or torch.__version__ < "2.13"
    assert name in hsdp.__all__


def test_private_methods_of_fsdp2_are_overridden() -> None:
    private = {name for name in vars(FSDPModule) if name.startswith("_") and not name.startswith("__")}
    for name in private - {"_orig_cls_mro_index"}:
        assert getattr(hsdp.HSDPModule, name) is not getattr(FSDPModule, name)


# -- what a model is ------------------------------------------------------------------------------------------------


def test_a_sharded_module_is_an_fsdp_module_and_a_plain_one_is_not() -> None:
    with fake_world(4):
        model: Any = shard(Deep(), None)
        assert isinstance(model, FSDPModule)
        assert isinstance(model.blocks[0], hsdp.FSDPModule)
        assert not isinstance(model.blocks, FSDPModule)
        assert type(type(model)()) is Deep, "a sharded class makes plain modules"
        with pytest.raises(AssertionError, match="only be applied to a module once"):
            fsdp.fully_shard(model)
        state = model._get_fsdp_state()
        assert state._mp_policy == hsdp.MixedPrecisionPolicy()
        assert state._fsdp_param_group.reshard_after_backward is True
        for part in (state, state._fsdp_param_group):
            with pytest.raises(AttributeError, match=r"hsdp has no 'fsdp_params' of FSDP2's internal state.*hsdp.describe"):
                _ = part.fsdp_params


def test_the_state_of_a_module_is_found_where_fsdp2_has_it() -> None:
    with fake_world(4):
        model: Any = shard(Deep(), None)
        found = hsdp.fully_shard.state(model)
        assert found is fsdp.fully_shard.state(model) and callable(found._root_post_backward_final_callback)
        assert found is not hsdp.fully_shard.state(model.blocks[0])
        assert hsdp.fully_shard.state(model.blocks) is None and hsdp.fully_shard.state(nn.Linear(2, 2)) is None


def test_policies_of_fsdp2_are_taken() -> None:
    theirs = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64, False)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))
        # Newer than torch 2.11.
        dims = getattr(fsdp, "DataParallelMeshDims", hsdp.DataParallelMeshDims)(shard=("one", "two"))
        model: Any = hsdp.fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=dims, mp_policy=theirs)
        (unit,) = model._units()
    assert unit.axes.shard_size == 4
    assert unit.mp_policy == hsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64, False)


def test_what_is_not_there_is_refused_with_a_remedy() -> None:
    with fake_world(4):
        model: Any = hsdp.fully_shard(nn.Linear(4, 4))
        model.set_allocate_memory_from_process_group_for_comm(False)
        with pytest.raises(NotImplementedError, match=r"straight into their place.*set_custom_all_gather"):
            model.set_allocate_memory_from_process_group_for_comm(True)
        model.set_keep_unsharded_storage(False)
        with pytest.raises(NotImplementedError, match=r"set_keep_unsharded_storage\(True\).*reshard_after_forward=False"):
            model.set_keep_unsharded_storage(True)
        with pytest.raises(NotImplementedError, match="set_symm_mem_for_comm"):
            model.set_symm_mem_for_comm("NCCL")
        with pytest.raises(ValueError, match="max_inflight_reduce_scatters=0"):
            model.set_reduce_scatter_max_input_buffers(0)
        for odd in (2.5, True):  # a TypeError with FSDP2, too
            with pytest.raises(TypeError, match=r"set_reduce_scatter_max_input_buffers\((2.5|True)\): expected an int"):
                model.set_reduce_scatter_max_input_buffers(odd)
        with pytest.raises(TypeError, match=r"set_custom_all_gather\(3\)"):
            model.set_custom_all_gather(3)
        with pytest.raises(TypeError, match="set_unshard_in_backward"):
            model.set_unshard_in_backward(1)
        with pytest.raises(ValueError, match="share_comm_ctx: Linear is not sharded"):
            hsdp.share_comm_ctx([nn.Linear(2, 2)])


class Wrapper(torch.Tensor):
    """A tensor that keeps its values in another one, as quantised weights do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Wrapper:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return cls(args[0].inner)


def test_wrapped_weights_are_refused_by_name() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Wrapper(torch.zeros(4, 4)), requires_grad=False)
    with (
        fake_world(4),
        pytest.raises(ValueError, match=r"parameter 'weight' of shape \(4, 4\) is a Wrapper, .*ignored_params"),
    ):
        hsdp.fully_shard(model)


# -- meaning and reach ----------------------------------------------------------------------------------------------

REACH: dict[str, tuple[Callable[[Any], object], Callable[[Any], Any], bool]] = {
    # what is called, what it changes in a unit, whether it reaches modules below
    "set_requires_gradient_sync": (
        lambda m: m.set_requires_gradient_sync(False),
        lambda unit: (unit.settings.requires_grad_sync, unit.settings.requires_all_reduce),
        True,
    ),
    "set_reduce_scatter_unused_params": (
        lambda m: m.set_reduce_scatter_unused_params(True),
        lambda unit: unit.settings.unused_grads,
        True,
    ),
    "set_reduce_scatter_max_input_buffers": (
        lambda m: m.set_reduce_scatter_max_input_buffers(3),
        lambda unit: unit.comm_policy.max_inflight_reduce_scatters,
        True,
    ),
    "set_reshard_after_forward": (
        lambda m: m.set_reshard_after_forward(False, True),
        lambda unit: unit.settings.reshard_after_forward,
        True,
    ),
    "set_unshard_in_backward": (
        lambda m: m.set_unshard_in_backward(False),
        lambda unit: unit.settings.unshard_in_backward,
        False,
    ),
    "set_reduce_scatter_divide_factor": (
        lambda m: m.set_reduce_scatter_divide_factor(3.0),
        lambda unit: unit.settings.factor(2),
        False,
    ),
    "set_custom_all_gather": (
        lambda m: m.set_custom_all_gather(print),
        lambda unit: unit.shard_comm.custom_all_gather,
        False,
    ),
    "set_custom_reduce_scatter": (
        lambda m: m.set_custom_reduce_scatter(print),
        lambda unit: unit.scatter_comm.custom_reduce_scatter,
        False,
    ),
}


@pytest.mark.parametrize("name", REACH)
def test_setters_reach_what_those_of_fsdp2_reach(name: str) -> None:
    call, read, below = REACH[name]
    with fake_world(4):
        model: Any = shard(Deep(), None)
        units = model._units()
        before = [read(unit) for unit in units]
        call(model)
        changed = [read(unit) != old for unit, old in zip(units, before, strict=True)]
        assert changed == [True] + [below] * (len(units) - 1)


def test_no_gradient_sync_and_sync_again_switch_both_stages() -> None:
    with fake_world(4) as env:
        model: Any = shard(Deep(), env.mesh((2, 2)))
        model.set_requires_all_reduce(False)
        model.set_requires_gradient_sync(True)
        assert all(unit.settings.requires_all_reduce and unit.settings.requires_grad_sync for unit in model._units())


def test_forward_methods_of_plain_modules_are_left_alone() -> None:
    plain = nn.Linear(2, 2)
    hsdp.register_fsdp_forward_method(plain, "extra_repr")
    assert "extra_repr" not in vars(plain)
    with fake_world(4):
        model: Any = hsdp.fully_shard(nn.Linear(4, 4))
        hsdp.register_fsdp_forward_method(model, "forward")
        assert "forward" in vars(model)


def test_roots_share_streams() -> None:
    with fake_world(4):
        first, second = (shard(Deep(), None) for _ in range(2))
        hsdp.share_comm_ctx([first, second])
        a, b = (m.__dict__["_hsdp_state"].own_runtime() for m in (first, second))
        assert a.streams is b.streams is b.pipeline.streams
        hsdp.share_comm_ctx([])


def test_the_bound_on_reductions_holds_for_a_root_that_ran() -> None:
    with fake_world(4):
        model: Any = shard(Deep(), None)
        model(torch.zeros(1, 6)).sum().backward()
        model.set_reduce_scatter_max_input_buffers(2)
        model(torch.zeros(1, 6)).sum().backward()
        (runtime,) = model._runtimes()
        assert runtime.pipeline.policy.max_inflight_reduce_scatters == 2


def test_what_a_part_is_set_to_while_it_has_another_root_holds_when_it_is_one_again() -> None:
    with fake_world(4):
        outer: Any = shard(Deep(), None)
        inner = outer.blocks[1]
        for module in (inner, outer):  # a root of its own first
            module(torch.zeros(1, 6)).sum().backward()
        inner.set_reduce_scatter_max_input_buffers(3)
        inner(torch.zeros(1, 6)).sum().backward()
        assert inner._hsdp_state.own_runtime().pipeline.policy.max_inflight_reduce_scatters == 3


def test_the_last_backward_is_the_roots_whichever_module_is_told() -> None:
    with fake_world(4):
        model: Any = shard(Deep(), None)
        model(torch.zeros(1, 6)).sum().backward()
        for flag in (False, True):
            model.blocks[0].set_is_last_backward(flag)
            assert model._units()[0].settings.drains is flag


# -- unshard --------------------------------------------------------------------------------------------------------


def _gathers(call: Callable[[], object]) -> list[str]:
    with collectives() as log:
        call()
    return of_kind(log, "all_gather")


def _unshards(env: RankEnv) -> None:
    plain = seeded(Deep)
    model: Any = shard(copy.deepcopy(plain), env.mesh((2,)), reshard_after_forward=False)
    step(model, env.rank)
    assert model.unshard() is None
    whole = model.last.weight
    assert not isinstance(whole, DTensor) and whole.shape == (6, 6)
    model.reshard()
    assert isinstance(model.last.weight, DTensor)
    handles = [unit.unshard(async_op=True) for unit in (model, *model.blocks)]
    assert all(isinstance(handle, fsdp.UnshardHandle) for handle in handles)
    handles[1].wait()
    assert not isinstance(model.blocks[0].weight, DTensor)
    handles[1].wait()  # once more does nothing
    model.set_reshard_after_backward(False)
    for k in range(3):
        assert not _gathers(lambda k=k: step(model, env.rank, k)), "what was gathered ahead serves until reshard()"
    with torch.no_grad():
        assert not _gathers(lambda: loss_of(model, env.rank))
    for unit in (model, *model.blocks):
        unit.reshard()
    assert isinstance(model.blocks[0].weight, DTensor)
    assert len(_gathers(lambda: step(model, env.rank))) == 5
    # New values are used although the old ones were asked to stay.
    model.unshard(async_op=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    with torch.no_grad():
        for param in model.parameters():
            param.data.add_(0)
    fresh = seeded(Deep)
    fresh.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    model.set_reshard_after_backward(True)
    check_grads(model, fresh, step, env.rank, env.world_size)
    check_rest(model)


def test_an_asynchronous_unshard_stays_until_reshard(pool2: Pool) -> None:
    pool2.run(_unshards)


class _Around(nn.Module):
    """Layers that torch replicates around layers that hsdp shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.first(x))
        return out


def _replicated_around(env: RankEnv, shards: bool) -> None:
    model, twin = (seeded(lambda: _Around().double()) for _ in range(2))
    for layer in (model.inner[0], model.inner[2], model.inner) if shards else ():
        hsdp.fully_shard(layer, mesh=env.mesh((2,)))
    replicate(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for k in range(3):
        batches = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        model(batches[env.rank]).square().mean().backward()
        twin(batches.flatten(0, 1)).square().mean().backward()
        assert_same(full_grads(model), full_grads(twin))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("shards", [False, True], ids=["replicate-alone", "around-hsdp"])
def test_torch_s_replicate_leaves_out_what_is_sharded(pool2: Pool, shards: bool) -> None:
    pool2.run(_replicated_around, shards)


def _unshard_unused(env: RankEnv) -> None:
    model: Any = shard(seeded(Deep), env.mesh((2,)))
    model.blocks[3].unshard(async_op=True)
    model.blocks[0](torch.zeros(1, 6, dtype=torch.float64)).sum().backward()
    assert not _gathers(lambda: model.blocks[3].unshard(async_op=True).wait()), "another root's pass leaves it"
    model.blocks[3].reshard()
    check_rest(model)


def test_an_unshard_outlives_a_pass_of_its_neighbour(pool2: Pool) -> None:
    pool2.run(_unshard_unused)


class _Embedded(nn.Module):
    """An embedding, whose backward needs no weights, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.layer = nn.Linear(6, 6)

    def units(self) -> list[nn.Module]:
        return [self.embedding, self.layer]

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.layer(self.embedding(tokens))
        return out


def _embedded(model: nn.Module, rank: int) -> None:
    tokens = torch.arange(4) + 3 * rank
    model(tokens).square().sum().backward()


def _no_gather_in_backward(env: RankEnv) -> None:
    plain = seeded(_Embedded)
    model: Any = shard(copy.deepcopy(plain), env.mesh((2,)), reshard_after_forward=True)
    _embedded(model, env.rank)
    count = len(_gathers(lambda: _embedded(model, env.rank)))
    model.embedding.set_unshard_in_backward(False)
    for _ in range(2):
        assert len(_gathers(lambda: _embedded(model, env.rank))) == count - 1
    check_grads(model, plain, _embedded, env.rank, env.world_size)
    check_rest(model)


def test_a_unit_that_needs_no_weights_in_backward_is_not_gathered(pool2: Pool) -> None:
    pool2.run(_no_gather_in_backward)


# -- reduction ------------------------------------------------------------------------------------------------------


def _separate_group(env: RankEnv, shape: tuple[int, ...]) -> None:
    plain = seeded(Deep)
    model: Any = shard(copy.deepcopy(plain), env.mesh(shape))
    step(model, env.rank)
    model.set_separate_reduce_scatter_group()
    scatters = {unit.scatter_comm.group for unit in model._units()}
    assert len(scatters) == 1, "units with the same ranks share one"
    assert not scatters & {unit.shard_comm.group for unit in model._units()}
    for _ in range(2):
        check_grads(model, plain, step, env.rank, env.world_size)
    model.set_separate_reduce_scatter_group(False)
    assert {unit.scatter_comm.group for unit in model._units()} == {unit.shard_comm.group for unit in model._units()}
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_reduce_scatters_may_have_a_group_of_their_own(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(_separate_group, shape)


def _reset(env: RankEnv) -> None:
    plain = seeded(Deep)
    model: Any = shard(copy.deepcopy(plain), env.mesh((2,)))
    with model.no_sync():
        step(model, env.rank)
    hook = model.blocks[1].register_full_backward_hook(lambda *args: (_ for _ in ()).throw(RuntimeError("planted")))
    loss = loss_of(model, env.rank, 1)
    with pytest.raises(RuntimeError, match="planted"):
        loss.backward()
    hook.remove()
    model.reset_iter_state()  # no warning: it was asked for
    # As FSDP2, it drops the sums of earlier micro-batches too; that they are gone is told until gradients are zeroed.
    assert set(model.pending_gradients().values()) == {"lost with a backward that failed"}
    model.zero_grad()
    assert not model.pending_gradients()
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


def test_reset_iter_state_after_an_exception(pool2: Pool) -> None:
    pool2.run(_reset)


def _hooked(env: RankEnv) -> None:
    model: Any = shard(seeded(Deep), env.mesh((2,)))
    sides: list[Any] = []
    model.blocks[0].set_all_reduce_hook(lambda tensor: sides.append(tensor.mul_(2)), stream=torch.cpu.current_stream())
    step(model, env.rank)
    assert len(sides) == 1
    model.set_post_optim_event(None)  # a CPU has none
    hybrid: Any = shard(seeded(Deep), env.mesh((2, 1)))
    with pytest.raises(ValueError, match="with replicas the hook runs on the stream of their all-reduce"):
        hybrid.set_all_reduce_hook(print, stream=torch.cpu.current_stream())


# -- custom collectives ---------------------------------------------------------------------------------------------


class Gather:
    """FSDP2's own default, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return (
            group._allgather_base(output_tensor, input_tensor)
            if async_op
            else dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group)
        )


class Scatter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        assert op == dist.ReduceOp.SUM
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


class Replicas:
    """An all-reduce, counted, that is a gather and a sum in the order of ranks."""

    def __init__(self, waits: bool) -> None:
        self.calls = 0
        self._waits = waits

    def __call__(self, tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        assert op == dist.ReduceOp.SUM and async_op
        if not self._waits:
            return dist.all_reduce(tensor, op, group, async_op)
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor, group=group)
        tensor.copy_(torch.stack(parts).sum(0))
        return None


class Allocating:
    """Memory of its own, and collectives that return nothing."""

    made: list[int]

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = torch.full(tuple(size), 7, dtype=dtype, device=device)
        self.made.append(made.data_ptr())
        return made


class AllocatingGather(Allocating, Gather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        assert output_tensor.untyped_storage().data_ptr() in self.made
        super().__call__(output_tensor, input_tensor, group)


class AllocatingScatter(Allocating, Scatter):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        assert {one.untyped_storage().data_ptr() for one in (output_tensor, input_tensor)} <= set(self.made)
        super().__call__(output_tensor, input_tensor, group, op)


class Waited:
    """A work of which FSDP2 asks no more than this."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class WaitedGather(Gather):
    def __call__(self, *args: Any, **named: Any) -> Any:
        return Waited(super().__call__(*args, **named))


class WaitedScatter(Scatter):
    def __call__(self, *args: Any, **named: Any) -> Any:
        return Waited(super().__call__(*args, **named))


class WaitedReplicas(Replicas):
    def __call__(self, *args: Any, **named: Any) -> Any:
        return Waited(super().__call__(*args, **named))


def _waited(env: RankEnv) -> None:
    plain = seeded(Deep)
    model: Any = shard(copy.deepcopy(plain), env.mesh((2, 2)))
    gather, scatter, replicas = WaitedGather(), WaitedScatter(), WaitedReplicas(waits=False)
    for unit in model._units():
        unit.gather_by(gather)
        unit.reduce_scatter_by(scatter)
    model.set_replica_reduce(replicas)
    with hsdp.trace(model):
        check_grads(model, plain, step, env.rank, env.world_size)
    assert gather.calls and scatter.calls and replicas.calls
    check_rest(model)


def test_works_of_custom_collectives_need_no_more_than_wait(pool4: Pool) -> None:
    pool4.run(_waited)


class Failing:
    """A user's collective: waiting for its first work raises, once, so that nobody may take a second wait for success."""

    def __init__(self, collective: Callable[..., Any], error: Exception) -> None:
        self._collective = collective
        self._errors = [error]
        self.calls = 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        work = Waited(self._collective(*args, **named))
        if self.calls == 1:
            waits = work.wait

            def fails() -> None:
                waits()
                if self._errors:
                    raise self._errors.pop()

            work.wait = fails  # type: ignore[method-assign]
        return work


def _wait_raises(env: RankEnv, kind: str, error: Exception) -> None:
    plain = seeded(Deep)
    model: Any = shard(copy.deepcopy(plain), env.mesh((2, 2)))
    check_grads(model, plain, step, env.rank, env.world_size)
    unit = model.blocks[1]
    if kind == "all-gather":
        failing = Failing(Gather(), error)
        unit.set_custom_all_gather(failing)
    elif kind == "reduce-scatter":
        failing = Failing(Scatter(), error)
        unit.set_custom_reduce_scatter(failing)
    else:
        failing = Failing(Replicas(waits=False), error)
        unit.set_replica_reduce(failing)
    began = time.monotonic()
    with pytest.raises(
        hsdp.CollectiveError, match=rf"^the {kind} of unit '.*blocks\.1.*' failed on rank .*checksum"
    ) as caught:
        step(model, env.rank)
    assert time.monotonic() - began < 10, "it was waited for until the group's time-out"
    assert caught.value.__cause__ is error
    assert (type(error).__name__ in str(caught.value)) == (type(error) is not RuntimeError)
    for _ in range(2):
        check_grads(model, plain, step, env.rank, env.world_size)
    assert failing.calls > 1
    check_rest(model)


@pytest.mark.parametrize("error", [RuntimeError("checksum"), ValueError("checksum")], ids=["RuntimeError", "ValueError"])
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_a_work_whose_wait_raises_has_failed(pool4: Pool, kind: str, error: Exception) -> None:
    """torch's works raise a RuntimeError when a tick is over; those that know of no time-outs mean what they raise."""
    pool4.run(_wait_raises, kind, error)


def _custom(env: RankEnv, shape: tuple[int, ...], fusion: Any, allocates: bool, reshard: bool | int = True) -> None:
    plain = seeded(Deep)
    comm_policy = hsdp.CommPolicy(fusion=fusion)
    model: Any = shard(copy.deepcopy(plain), env.mesh(shape), reshard_after_forward=reshard, comm_policy=comm_policy)
    gather, scatter = (AllocatingGather(), AllocatingScatter()) if allocates else (Gather(), Scatter())
    gather.made = scatter.made = []  # type: ignore[union-attr]
    for unit in (model.blocks[1], model):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
    check_grads(model, plain, step, env.rank, env.world_size)
    assert gather.calls >= 4 and scatter.calls >= 2
    if fusion == "packed":
        assert (gather.calls, scatter.calls) == (4, 2), "one call for each transfer, of these two units only"
    for unit in (model.blocks[1], model):
        unit.set_custom_all_gather(None)
        unit.set_custom_reduce_scatter(None)
    before = (gather.calls, scatter.calls)
    check_grads(model, plain, step, env.rank, env.world_size)
    assert before == (gather.calls, scatter.calls)
    check_rest(model)


def _custom_replicas(env: RankEnv, shape: tuple[int, int], waits: bool) -> None:
    plain = seeded(Deep)
    model: Any = shard(copy.deepcopy(plain), env.mesh(shape))
    custom = Replicas(waits)
    model.set_replica_reduce(custom)
    check_grads(model, plain, step, env.rank, env.world_size)
    units = len(list(model._units()))
    assert custom.calls >= units, "called for every reduction of every unit"
    calls = custom.calls
    model.set_replica_reduce(None)
    check_grads(model, plain, step, env.rank, env.world_size)
    assert custom.calls == calls
    check_rest(model)


@pytest.mark.parametrize("waits", [False, True], ids=["work", "no work"])
@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_users_all_reduces_take_the_place_of_the_backends(pool4: Pool, shape: tuple[int, int], waits: bool) -> None:
    pool4.run(_custom_replicas, shape, waits)


@pytest.mark.parametrize("allocates", [False, True], ids=["in place", "own memory"])
@pytest.mark.parametrize("fusion", ["packed", "direct"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_custom_collectives_take_the_place_of_the_backends(
    pool4: Pool, shape: tuple[int, ...], fusion: str, allocates: bool
) -> None:
    pool4.run(_custom, shape, fusion, allocates)


@pytest.mark.parametrize("allocates", [False, True], ids=["in place", "own memory"])
def test_custom_gathers_gather_parts_too(pool4: Pool, allocates: bool) -> None:
    """Of units that stay sharded over groups of two after forward."""
    pool4.run(_custom, (4,), "packed", allocates, 2)


class TimedReplicas(Replicas):
    """A user's all-reduce with a method that hsdp's own stages have, too."""

    def start(self) -> None:
        raise AssertionError("it is for the user")


def _named_alike(env: RankEnv) -> None:
    model: Any = shard(seeded(Deep), env.mesh((2, 1)))
    model.set_replica_reduce(TimedReplicas(waits=False))
    check_grads(model, seeded(Deep), step, env.rank, env.world_size)


def test_a_users_all_reduce_may_have_methods_of_any_name(pool2: Pool) -> None:
    pool2.run(_named_alike)


def test_hooks_on_streams(pool2: Pool) -> None:
    pool2.run(_hooked)


def _same_reduction(env: RankEnv, shape: tuple[int, ...]) -> None:
    """A divide factor that no group has, which FSDP2 has too, but not on gloo unless forced to sum."""
    case = make_case("mlp")
    mesh = env.mesh(shape)
    grads = []
    for library in (hsdp, fsdp):
        model: Any = case.model()
        for module in (*model.blocks, model):
            library.fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)
        case.loss(model, case.batch(0, env.rank)).backward()
        grads.append(full_grads(model))
    assert_same(*grads)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_divide_factors_mean_what_they_mean_in_fsdp2(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(_same_reduction, shape)


def _divided_by_tokens(env: RankEnv, shape: tuple[int, ...]) -> None:
    """What to divide the sum of a step by is known before its last backward only: as in FSDP2, it divides all of it."""
    case = make_case("mlp")
    mesh = env.mesh(shape)
    grads: list[dict[str, Tensor | None]] = []
    for library in (hsdp, fsdp, None):
        model: Any = case.model()
        modules: list[Any] = [*model.blocks, model] if library else []
        for module in modules:
            library.fully_shard(module, mesh=mesh)
            module.set_force_sum_reduction_for_comms(True)
        for index, tokens in enumerate((3.0, 7.0, 11.0)):
            if library:
                model.set_requires_gradient_sync(index == 2)
            for module in modules:
                module.set_gradient_divide_factor(tokens)
            for rank in [env.rank] if library else range(env.world_size):
                case.loss(model, case.batch(index, rank)).backward()
        grads.append(full_grads(model))
    assert_same(*grads[:2])
    assert_same(grads[0], {name: None if grad is None else grad / 11.0 for name, grad in grads[2].items()})


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_a_divide_factor_divides_what_was_accumulated_before_it(
    request: pytest.FixtureRequest, shape: tuple[int, ...]
) -> None:
    pool_for(request, shape).run(_divided_by_tokens, shape)


def _divided_in_the_shard_group(env: RankEnv) -> None:
    """Where FSDP2 divides behind the last collective, it divides sums of earlier ones once more by a new factor."""
    model: Any = hsdp.fully_shard(nn.Linear(4, 4), mesh=env.mesh((1, 2)))
    model.set_force_sum_reduction_for_comms(True)
    model.set_requires_all_reduce(False)
    model.set_gradient_divide_factor(3.0)
    model(torch.ones(1, 4)).sum().backward()
    model.set_gradient_divide_factor(3.0)
    with pytest.raises(hsdp.StateError, match=r"unit 'Linear.*in the shard group.*set_requires_grad_sync\(False\)"):
        model.set_gradient_divide_factor(5.0)
    model.zero_grad()
    model.set_gradient_divide_factor(5.0)


def test_no_factor_changes_behind_sums_that_fsdp2_would_divide_again(pool2: Pool) -> None:
    pool2.run(_divided_in_the_shard_group)


def test_custom_gathers_send_what_the_others_send() -> None:
    with fake_world(4) as env:
        sent = []
        for custom in (None, Gather()):
            model: Any = hsdp.fully_shard(nn.Linear(64, 64), mesh=env.mesh(4), reshard_after_forward=True)
            model.set_custom_all_gather(custom)
            with CollectiveCounter() as counter:
                model(torch.zeros(1, 64))
            sent.append(counter.total("all_gather").bytes_in)
        assert sent[0] == sent[1] > 0


@dataclass(frozen=True)
class _NewerPolicy(fsdp.MixedPrecisionPolicy):
    """As torch 2.15 has it."""

    param_dtype_override_fn: Any = None


def test_settings_of_a_newer_torch_are_refused_by_name() -> None:
    with mock.patch.dict(fsdp2._OWN_POLICIES, {_NewerPolicy: hsdp.MixedPrecisionPolicy}):
        assert fsdp2.own_policy(_NewerPolicy(torch.bfloat16)) == hsdp.MixedPrecisionPolicy(torch.bfloat16)
        with pytest.raises(ValueError, match=r"_NewerPolicy\(param_dtype_override_fn=.*has no such setting"):
            fsdp2.own_policy(_NewerPolicy(torch.bfloat16, param_dtype_override_fn=len))
