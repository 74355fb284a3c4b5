"""Training programs for a device: what `test_device.py` runs a share of, and `device.py` all, in every delay mode.

A case is a function of a rank. Those made by `trains` compare with the plain twin; those made by `program` return tensors,
which must be what the same program returns on a CPU mesh of the same ranks.
"""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import hsdp
import hsdp.checkpoint
import hsdp.optim
from hsdp.examples.int8_gather import quantise
from hsdp.params.dtensors import as_dtensor
from tests.params import test_tensor_parallel as tp
from tests.schedule import test_pipelining as pipelining
from tests.support import device as emulator
from tests.support.deep import RootFirst, floats, seeded
from tests.support.fragile import Fragile, fail
from tests.support.graphs import tokens
from tests.support.models import MLP, Batch, Case, PartlyUsed, make_case, regression
from tests.support.rig import RankEnv
from tests.support.sharded import check_rest, shard
from tests.support.twin import (
    MakeOptimizer,
    Twin,
    adamw,
    assert_close_to_twin,
    assert_same,
    full_grads,
    full_params,
    sgd,
    train,
    twin_of,
)

Shape = tuple[int, ...]
Found = dict[str, Tensor | None]
Run = Callable[[RankEnv, Shape], None]
Program = Callable[[RankEnv, Shape], Found]

ONE_AXIS, TWO_AXES = (2,), (2, 2)
STEPS = 3


@dataclass(frozen=True)
class DeviceCase:
    """A named program, with the meshes it runs on."""

    name: str
    run: Run
    shapes: tuple[Shape, ...]


CASES: dict[str, DeviceCase] = {}


def _register(name: str, run: Run, shapes: tuple[Shape, ...]) -> None:
    assert name not in CASES, f"two cases are called {name!r}"
    CASES[name] = DeviceCase(name, run, shapes)


@dataclass(frozen=True)
class Conditions:
    """What a case runs under on the emulated device.

    Attributes:
        mode: which streams lag.
        seed: of the delays.
        strict: memory is poisoned as soon as it is freed, and not only when it is handed out again.
        away: the case runs on another stream than the one on which its models are sharded.
    """

    mode: str = "none"
    seed: int = 0
    strict: bool = False
    away: bool = False

    def __str__(self) -> str:
        where = " ".join(name for name, holds in (("strict", self.strict), ("away", self.away)) if holds)
        return f"{self.mode:13s} {where:11s} seed {self.seed:6d}"


def run_case(env: RankEnv, name: str, shape: Shape, under: Conditions) -> None:
    """Runs a case on this rank and looks for races.

    CUDA's streams have no delay modes; in mode "sanitizer" torch's own detector of races watches them.
    """
    if env.device != emulator.NAME:
        with _sanitizer() if under.mode == "sanitizer" else nullcontext():
            CASES[name].run(env, shape)
        return
    with (
        emulator.watched(under.mode, under.seed, poison_free=under.strict),
        _away() if under.away else nullcontext(),
    ):
        CASES[name].run(env, shape)


@contextmanager
def _away() -> Iterator[None]:
    """Runs the body on a stream of its own, and `shard` on the one that was current."""
    module = torch.get_device_module(emulator.NAME)
    home, beside, sharded = module.current_stream(), module.Stream(), shard

    def at_home(*args: Any, **options: Any) -> Any:
        with _behind(module, home):
            model = sharded(*args, **options)
        beside.wait_stream(home)
        return model

    with mock.patch(f"{__name__}.shard", at_home), _behind(module, beside):
        yield
    home.wait_stream(beside)


@functools.cache
def _sanitizer() -> Any:
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode

    return CUDASanitizerDispatchMode()


def check_sanitizer(env: RankEnv) -> None:
    """The detector of races finds one that was planted."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    module = torch.get_device_module(env.device)
    with _sanitizer():
        x = torch.zeros(1000, device=env.device)
        with module.stream(module.Stream()), pytest.raises(CUDASanitizerErrors):
            x.add_(1.0)


# -- against the twin -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _twin(name: str, dtype: torch.dtype, world: int, make_optimizer: MakeOptimizer, accumulate: int) -> Twin:
    return twin_of(make_case(name, dtype), world, STEPS, make_optimizer, accumulate)


def trains(
    name: str,
    *shapes: Shape,
    model: str = "mlp",
    optimizer: MakeOptimizer = adamw,
    accumulate: int = 1,
    before_micro: Callable[[Any, bool], Any] | None = None,
    prepare: Callable[[RankEnv, Any, str], Any] | None = None,
    make: Callable[[RankEnv, Case, Shape, dict[str, Any]], nn.Module] | None = None,
    tolerance: float = 1e-10,
    **options: Any,
) -> None:
    """Registers a case that trains `model` for three steps. `options` are those of `fully_shard`."""

    def run(env: RankEnv, shape: Shape) -> None:
        case = make_case(model)
        twin = _twin(model, torch.float64, env.world_size, optimizer, accumulate)
        with tempfile.TemporaryDirectory() as folder:
            told = {key: value(folder) if callable(value) else value for key, value in options.items()}
            built = make(env, case, shape, told) if make else shard(case.model(), env.mesh(shape), **told)
            if prepare is not None:
                prepare(env, built, folder)
            stepper = optimizer(built.parameters())
            losses = train(built, case, env.rank, STEPS, stepper, accumulate, before_micro=before_micro, device=env.device)
        torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=tolerance, atol=tolerance)
        assert_close_to_twin(built, twin, tolerance, tolerance, grads=True)
        check_rest(built)

    _register(name, run, shapes or (ONE_AXIS, TWO_AXES))


def _policy(**settings: Any) -> dict[str, Any]:
    return {"comm_policy": hsdp.CommPolicy(**settings)}


for _model in ("mlp", "odd", "tied", "frozen", "tiny", "partly_used", "called_twice"):
    trains(f"trains {_model}", model=_model)
trains("trains mixed", model="mixed", tolerance=1e-6)
trains("transformer", model="transformer")
trains("replicas only", (2, 1), (4, 1))
for _fusion in ("packed", "direct"):
    trains(f"fusion {_fusion}", **_policy(fusion=_fusion))
for _ahead in (0, 2, 3, 4):
    trains(f"prefetch {_ahead}", model="transformer", **_policy(prefetch=_ahead))
trains("wide bounds", **_policy(max_inflight_reduce_scatters=3, max_inflight_all_reduces=1))
trains("narrow bounds", **_policy(max_inflight_reduce_scatters=1, max_inflight_all_reduces=1))
trains("scatter buckets", **_policy(reduce_scatter_bucket_bytes=3000))
trains("all-reduce buckets", TWO_AXES, **_policy(all_reduce_bucket_bytes=2000))
trains("both buckets", TWO_AXES, **_policy(reduce_scatter_bucket_bytes=3000, all_reduce_bucket_bytes=2000))
trains("tree", TWO_AXES, (4, 1), **_policy(reduction="tree"))
trains(
    "tree, accumulating in buckets",
    TWO_AXES,
    (4, 1),
    accumulate=3,
    **_policy(reduction="tree", all_reduce_bucket_bytes=2000),
)
trains(
    "tree, accumulating, deferred and offloaded",
    TWO_AXES,
    accumulate=3,
    before_micro=lambda model, last: model.set_requires_all_reduce(last),
    offload_policy=hsdp.CPUOffloadPolicy(),
    **_policy(reduction="tree"),
)
for _reshard in (True, False, 2):
    trains(f"reshard after forward {_reshard}", ONE_AXIS, (4,), reshard_after_forward=_reshard)
trains("replicated parameters", make=lambda env, case, shape, told: _with_replicated(env, case, shape))
trains("offloaded", offload_policy=hsdp.CPUOffloadPolicy())
trains("offloaded, not pinned", offload_policy=hsdp.CPUOffloadPolicy(pin_memory=False))
trains("offloaded to disk", offload_policy=hsdp.DiskOffloadPolicy)
trains("offloaded, accumulating", accumulate=3, offload_policy=hsdp.CPUOffloadPolicy())
trains("every micro-batch reduces", accumulate=3)
trains("accumulating, deferred", accumulate=3, before_micro=lambda model, last: model.set_requires_all_reduce(last))
trains(
    "accumulating, deferred and offloaded",
    TWO_AXES,
    accumulate=3,
    before_micro=lambda model, last: model.set_requires_all_reduce(last),
    offload_policy=hsdp.CPUOffloadPolicy(),
)
trains(
    "accumulating, deferred and bucketed",
    TWO_AXES,
    accumulate=3,
    before_micro=lambda model, last: model.set_requires_all_reduce(last),
    **_policy(all_reduce_bucket_bytes=2000, reduce_scatter_bucket_bytes=3000),
)
trains("accumulating without sync", accumulate=3, before_micro=lambda model, last: model.set_requires_grad_sync(last))
trains("reductions run on", accumulate=3, before_micro=lambda model, last: model.set_is_last_backward(last))
trains("foreach", optimizer=functools.partial(torch.optim.AdamW, lr=0.01, foreach=True))
trains("fused", optimizer=functools.partial(torch.optim.AdamW, lr=0.01, fused=True))


def _optimizes(flat: bool) -> MakeOptimizer:
    return lambda params: hsdp.optim.local(torch.optim.AdamW(params, lr=0.01, weight_decay=0.1), flat=flat)


def _over_replicas(params: Any) -> torch.optim.Optimizer:
    return hsdp.optim.local(torch.optim.AdamW(params, lr=0.01, weight_decay=0.1), over_replicas=True)


trains("over replicas", TWO_AXES, (4, 1), optimizer=_over_replicas)
trains("over replicas, of odd sizes", TWO_AXES, (4, 1), model="odd", optimizer=_over_replicas)
trains(
    "over replicas, accumulating, deferred, bucketed and offloaded",
    TWO_AXES,
    (4, 1),
    accumulate=3,
    optimizer=_over_replicas,
    before_micro=lambda model, last: model.set_requires_all_reduce(last),
    offload_policy=hsdp.CPUOffloadPolicy(),
    **_policy(all_reduce_bucket_bytes=2000, reduce_scatter_bucket_bytes=3000),
)
for _flat in (False, True):
    _name = f"local optimizer{', flat' * _flat}"

    def _run_local(env: RankEnv, shape: Shape, flat: bool = _flat) -> None:
        case, twin = make_case("mlp"), _twin("mlp", torch.float64, env.world_size, adamw, 1)
        model = shard(case.model(), env.mesh(shape))
        train(model, case, env.rank, STEPS, _optimizes(flat)(model.parameters()), device=env.device)
        assert_close_to_twin(model, twin, 1e-10, 1e-10)

    _register(_name, _run_local, (ONE_AXIS, TWO_AXES))


def _with_replicated(env: RankEnv, case: Case, shape: Shape) -> nn.Module:
    model = case.model()
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    return shard(model, env.mesh(shape), replicate_params=biases)


def _own_groups(env: RankEnv, model: Any, folder: str) -> None:
    model.set_separate_reduce_scatter_group()


trains("separate reduce-scatter group", model="transformer", prepare=_own_groups)


def _hooked(env: RankEnv, model: Any, folder: str) -> None:
    for unit in (*model.blocks, model):
        unit.set_all_reduce_hook(lambda tensor: tensor.mul_(2.0).mul_(0.5))


trains("all-reduce hooks", prepare=_hooked)


def _hooked_elsewhere(env: RankEnv, model: Any, folder: str) -> None:
    if env.device == "cpu":
        return
    stream = torch.get_device_module(env.device).Stream()
    for unit in (*model.blocks, model):
        unit.set_all_reduce_hook(lambda tensor: tensor.mul_(2.0).mul_(0.5), stream=stream)


trains("all-reduce hooks on a stream of their own", ONE_AXIS, prepare=_hooked_elsewhere)


class _Gather:
    """A user's all-gather in memory of its own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Gather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:  # type: ignore[override]
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)


class _Sum:
    """A user's all-reduce that returns no work: a gather, and a sum in the order of ranks behind it."""

    def __call__(self, tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        parts = torch.empty(group.size() * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        dist.all_gather_into_tensor(parts, tensor, group=group)
        tensor.copy_(parts.view(group.size(), -1).sum(0))


def _customised(env: RankEnv, model: Any, folder: str) -> None:
    for unit in (*model.blocks, model):
        unit.set_custom_all_gather(_Gather())
        unit.set_custom_reduce_scatter(_Scatter())
    model.set_replica_reduce(_Sum())


trains("custom collectives", prepare=_customised)

# -- against the same program on the CPU ------------------------------------------------------------------------------


def _cpu(env: RankEnv) -> RankEnv:
    """The same ranks with meshes on the CPU."""
    if not hasattr(env, "on_cpu"):
        env.on_cpu = RankEnv(env.rank, env.world_size)  # type: ignore[attr-defined]
    found: RankEnv = env.on_cpu  # type: ignore[attr-defined]
    return found


_expected: dict[tuple[str, Shape], Found] = {}


def program(*shapes: Shape, tolerance: float = 1e-10) -> Callable[[Program], Program]:
    """Registers a function that does something on a mesh and returns what it came to, under its own name."""

    def register(body: Program) -> Program:
        name = body.__name__.strip("_").replace("_", " ")

        def run(env: RankEnv, shape: Shape) -> None:
            found = body(env, shape)
            if (name, shape) not in _expected:
                _expected[name, shape] = body(_cpu(env), shape)
            assert_same(found, _expected[name, shape], tolerance, tolerance)

        _register(name, run, shapes or (ONE_AXIS, TWO_AXES))
        return body

    return register


def _built(env: RankEnv, shape: Shape, name: str = "mlp", dtype: Any = torch.float64, **options: Any) -> tuple[Any, Case]:
    case = make_case(name, dtype)
    return shard(case.model(), env.mesh(shape), **options), case


def _loss(env: RankEnv, model: nn.Module, case: Case, step: int, micro: int = 0) -> Tensor:
    batch: Batch = tuple(x.to(env.device) for x in case.batch(step, env.rank, micro))
    return case.loss(model, batch)


def _state(model: Any) -> Found:
    grads = {f"gradient of {name}": grad for name, grad in full_grads(model).items()}
    return {**full_params(model), **grads}


def _trained(env: RankEnv, model: Any, case: Case, steps: int = STEPS, make: MakeOptimizer = adamw) -> Found:
    train(model, case, env.rank, steps, make(model.parameters()), device=env.device)
    return _state(model)


@program(tolerance=2e-2)
def _bf16(env: RankEnv, shape: Shape) -> Found:
    policy = hsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, case = _built(env, shape, "transformer", torch.float32, mp_policy=policy)
    return _trained(env, model, case, make=sgd)


@program(tolerance=2e-2)
def _bf16_throughout(env: RankEnv, shape: Shape) -> Found:
    policy = hsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model, case = _built(env, shape, "mlp", torch.float32, mp_policy=policy)
    return _trained(env, model, case, make=sgd)


@program(tolerance=2e-2)
def _bf16_accumulating_and_offloaded(env: RankEnv, shape: Shape) -> Found:
    policy = hsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy, "offload_policy": hsdp.CPUOffloadPolicy()}
    model, case = _built(env, shape, "mlp", torch.float32, **options)
    return _accumulate(env, model, case)


@program((2, 2), (4, 1), tolerance=1e-5)
def _tree_has_the_bits_of_another_split(env: RankEnv, shape: Shape) -> Found:
    found = []
    for split in (shape, (4,)):
        model, case = _built(env, split, "mlp", torch.float32, comm_policy=hsdp.CommPolicy(reduction="tree"))
        found.append(_trained(env, model, case))
    assert_same(*found, 0.0, 0.0)
    return found[0]


def _accumulate(env: RankEnv, model: Any, case: Case, steps: int = STEPS, micros: int = 3) -> Found:
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micros):
            with model.accumulate(last=micro == micros - 1):
                _loss(env, model, case, step, micro).backward()
        optimizer.step()
    return _state(model)


@program()
def _the_recommended_loop(env: RankEnv, shape: Shape) -> Found:
    return _accumulate(env, *_built(env, shape))


@program()
def _the_recommended_loop_in_fp32(env: RankEnv, shape: Shape) -> Found:
    return {
        k: None if v is None else v.round(decimals=4)
        for k, v in _accumulate(env, *_built(env, shape, dtype=torch.float32)).items()
    }


@program()
def _accumulating_on_each_rank(env: RankEnv, shape: Shape) -> Found:
    return _accumulate(env, *_built(env, shape, comm_policy=hsdp.CommPolicy(accumulate="local")))


@program()
def _mixed_accumulation(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    optimizer = sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        for micro, (sync, all_reduce) in enumerate([(True, False), (False, True), (True, True), (True, False)]):
            model.set_requires_grad_sync(sync)
            model.set_requires_all_reduce(all_reduce)
            _loss(env, model, case, step, micro).backward()
        model.flush()
        optimizer.step()
    return _state(model)


@program()
def _gradients_set_to_none_between_micro_batches(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    told = 0
    for step in range(2):
        model.zero_grad()
        for micro in range(4):
            with model.accumulate(last=micro == 3):
                _loss(env, model, case, step, micro).backward()
            if micro == 1:
                for at, param in enumerate(model.parameters()):
                    if at % 2:
                        param.grad = None
                told += len(model.pending_gradients())
    return {**_state(model), "pending": torch.tensor(float(told))}


@program()
def _gradients_zeroed_between_micro_batches(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    for micro in range(4):
        with model.accumulate(last=micro == 3):
            _loss(env, model, case, 0, micro).backward()
        if micro == 1:
            model.zero_grad(set_to_none=False)
    return _state(model)


@program(TWO_AXES)
def _deferred_sums_dropped_between_micro_batches(env: RankEnv, shape: Shape) -> Found:
    """They are noticed at once, outside of a backward."""
    model, case = _built(env, shape)
    told = 0
    for micro in range(6):
        with model.accumulate(last=micro == 5):
            _loss(env, model, case, 0, micro).backward()
        if micro in (1, 3):
            for param in model.parameters():
                param.grad.detach().zero_()
            told += len(model.pending_gradients())
    return {**_state(model), "pending": torch.tensor(float(told))}


@program()
def _clipping(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    optimizer, norms = sgd(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(env, model, case, step).backward()
        norms.append(hsdp.clip_grad_norm_(model, 0.05))
        optimizer.step()
    return {**_state(model), "norms": torch.stack(norms).cpu()}


@program()
def _clipping_what_runs_on(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    model.set_is_last_backward(False)
    _loss(env, model, case, 0).backward()
    norm = hsdp.clip_grad_norm_(model, 0.05)
    return {**_state(model), "norm": norm.cpu()}


def _checkpointed(reentrant: bool) -> Any:
    def forward(self: MLP, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = torch.tanh(checkpoint(block, x, use_reentrant=reentrant))  # type: ignore[arg-type]
        last: Tensor = self.blocks[-1](x)
        return last

    return mock.patch.object(MLP, "forward", forward)


@program()
def _checkpointing(env: RankEnv, shape: Shape) -> Found:
    with _checkpointed(False):
        return _trained(env, *_built(env, shape))


@program()
def _checkpointing_reentrant(env: RankEnv, shape: Shape) -> Found:
    with _checkpointed(True):
        return _trained(env, *_built(env, shape))


@program()
def _initialised_from_meta(env: RankEnv, shape: Shape) -> Found:
    case = make_case("transformer")
    with torch.device("meta"):
        blank = case.build().double()
    values = case.model().state_dict()
    model = shard(blank, env.mesh(shape))

    def fill(module: nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            nn.init.constant_(param, 0.01 * len(name))

    hsdp.init_sharded(model, fill)
    # Gradients of equal weights are rounding noise, which AdamW makes large.
    with hsdp.full_params(model, writeback="rank0"):
        for name, param in model.named_parameters():
            param.data.copy_(values[name])
    return _trained(env, model, case)


@program()
def _whole_parameters_between_steps(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    optimizer, found = sgd(model.parameters()), {}
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(env, model, case, step).backward()
        optimizer.step()
        with hsdp.full_params(model), torch.no_grad():
            found[f"sum {step}"] = torch.stack([p.sum() for p in model.parameters()]).cpu()
            for param in model.parameters():
                param.mul_(0.9)
    return {**_state(model), **found}


@program()
def _evaluation_between_steps(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    optimizer, told = sgd(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.no_grad():
            told.append(_loss(env, model, case, step + 7))
        _loss(env, model, case, step).backward()
        optimizer.step()
        with torch.inference_mode():
            told.append(_loss(env, model, case, step + 8).clone())
    return {**_state(model), "told": torch.stack([t.clone() for t in told]).cpu()}


@program()
def _written_after_an_evaluation(env: RankEnv, shape: Shape) -> Found:
    """Host memory is written while the gathers that read it may not have run yet."""
    found: Found = {}
    for name, pins in (("pinned", True), ("not pinned", False)):
        model, case = _built(env, shape, offload_policy=hsdp.CPUOffloadPolicy(pin_memory=pins))
        with torch.no_grad():
            for step in range(2):
                found[f"{name} {step}"] = _loss(env, model, case, step)
                for param in model.parameters():
                    param.data.mul_(1.5)
    return {name: value.cpu() for name, value in found.items() if value is not None}


@program()
def _written_after_a_forward_without_a_backward(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape, offload_policy=hsdp.CPUOffloadPolicy())
    value = _loss(env, model, case, 0).detach()
    with torch.no_grad():
        for param in model.parameters():
            param.data.mul_(1.5)
    return {"value": value.cpu(), **_trained(env, model, case)}


@program()
def _unsharded_by_hand(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        handles = [unit.unshard(async_op=True) for unit in model.blocks]
        for handle in reversed(handles):
            handle.wait()
        _loss(env, model, case, step).backward()
        for unit in model.blocks:
            unit.reshard()
        optimizer.step()
    return _state(model)


@program()
def _unused_on_one_rank(env: RankEnv, shape: Shape) -> Found:
    case = regression("sometimes", functools.partial(_Sometimes, env.rank))
    model = shard(case.model(), env.mesh(shape))
    return _trained(env, model, case)


class _Sometimes(PartlyUsed):
    """Uses its last block on rank 0 only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.extra = nn.ParameterList(nn.Parameter(torch.full((8,), 1.0 + i)) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * self.extra[0])
        return x * self.extra[1] if self.rank == 0 else x


@program()
def _two_models(env: RankEnv, shape: Shape) -> Found:
    student, case = _built(env, shape)
    teacher, _ = _built(env, shape)
    critic, _ = _built(env, shape, "odd")
    del critic
    optimizer = sgd(student.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        x = case.batch(step, env.rank)[0].to(env.device)
        out = student(x)
        with torch.no_grad():
            target = teacher(x * 2)
        (out - target).square().mean().backward()
        optimizer.step()
        _loss(env, teacher, case, step).backward()
    return {**_state(student), **{f"teacher {k}": v for k, v in _state(teacher).items()}}


def _behind(module: Any, stream: Any) -> AbstractContextManager[Any]:
    """Has the body run on a stream of the user's, behind what the current one holds; without a device's module as it is."""
    if module is None:
        return nullcontext()
    stream.wait_stream(module.current_stream())
    return module.stream(stream)  # type: ignore[no-any-return]


def _own_stream(env: RankEnv) -> tuple[Any, Any]:
    """The module of a rank's device and a stream of the user's; None and None on CPUs."""
    module = torch.get_device_module(env.device) if env.device != "cpu" else None
    return module, module.Stream() if module else None


@program()
def _compute_on_users_streams(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    optimizer = sgd(model.parameters())
    on_device = env.device != "cpu"
    module = torch.get_device_module(env.device) if on_device else None
    streams = [module.Stream() for _ in range(2)] if module else [None, None]
    for step in range(4):
        stream = streams[step % 2]
        with _behind(module, stream):
            optimizer.zero_grad()
            _loss(env, model, case, step).backward()
            optimizer.step()
        if module:
            module.current_stream().wait_stream(stream)
    return _state(model)


@program()
def _stepped_on_a_stream_of_its_own(env: RankEnv, shape: Shape) -> Found:
    """The optimizer's hook hands over an event, as FSDP2's tests do; the next forward waits for nothing else."""
    model, case = _built(env, shape)
    optimizer, told = sgd(model.parameters()), []
    module, stream = _own_stream(env)

    def hand_over(*args: Any) -> None:
        model.set_post_optim_event(module.current_stream().record_event() if module else None)

    optimizer.register_step_post_hook(hand_over)
    for step in range(STEPS):
        loss = _loss(env, model, case, step)
        optimizer.zero_grad()
        loss.backward()
        if module:
            stream.wait_stream(module.current_stream())
        with module.stream(stream) if module else nullcontext():
            optimizer.step()
        told.append(loss.detach())
    if module:
        module.current_stream().wait_stream(stream)
    return {**full_params(model), "losses": torch.stack(told).cpu()}


class _Scaled(nn.Module):
    """A unit around another one; autograd copies the gradient of its own weight, an expanded number, as it accumulates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((16, 8), 0.01))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x * (1 + self.weight.sum()))
        return out


class _Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), _Scaled(), nn.Linear(8, 8))

    def units(self) -> list[nn.Module]:
        """Inner ones first."""
        scaled: Any = self.layers[4]
        return [self.layers[0], self.layers[2], scaled.inner, scaled, self.layers[5]]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def _take_memory(env: RankEnv) -> None:
    """The current stream writes to all memory of others that it can get, as a loop does that loads its next batch on it."""
    for numel in (16, 32, 64, 128, 256, 512):
        for _ in range(4):
            torch.full((numel,), 7.0, dtype=torch.float64, device=env.device)


def _beside(env: RankEnv, shape: Shape, step_of: Callable[[Any, Callable[[], Any]], None]) -> Found:
    """Each step on a stream of its own, behind the one on which the model was sharded; that one waits for nothing.

    `step_of(optimizer, backward)` steps.
    """
    case = regression("stages", _Stages)
    model = shard(case.model(), env.mesh(shape))
    optimizer = sgd(model.parameters())
    module, stream = _own_stream(env)
    for step in range(4):
        with _behind(module, stream):
            step_of(optimizer, lambda step=step: _loss(env, model, case, step).backward())
        _take_memory(env)
    if module:
        module.current_stream().wait_stream(stream)
    return _state(model)


@program()
def _trained_on_a_stream_beside_the_one_it_was_sharded_on(env: RankEnv, shape: Shape) -> Found:
    def step_of(optimizer: Any, backward: Callable[[], Any]) -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    return _beside(env, shape, step_of)


@program()
def _gradients_dropped_on_a_stream_beside_the_one_it_was_sharded_on(env: RankEnv, shape: Shape) -> Found:
    def step_of(optimizer: Any, backward: Callable[[], Any]) -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return _beside(env, shape, step_of)


@program()
def _weights_assigned_on_another_stream_than_they_are_trained_on(env: RankEnv, shape: Shape) -> Found:
    """That stream takes the memory of what was assigned as soon as the next forward has moved it."""
    case = regression("stages", _Stages)
    model = shard(case.model(), env.mesh(shape))
    module, stream = _own_stream(env)
    for step in range(2):
        held = {name: as_dtensor(param.to_local() * 0.9, param._spec) for name, param in model.named_parameters()}
        model.load_state_dict(held, assign=True)
        del held
        with _behind(module, stream):
            _loss(env, model, case, step).backward()
        _take_memory(env)
        if module:
            module.current_stream().wait_stream(stream)
    return _state(model)


@program()
def _local_gradients_read_on_another_stream_than_they_are_trained_on(env: RankEnv, shape: Shape) -> Found:
    case = regression("stages", _Stages)
    model = shard(case.model(), env.mesh(shape))
    module, stream = _own_stream(env)
    found: Found = {}
    for step in range(3):
        with model.no_sync():
            _loss(env, model, case, step).backward()
        with _behind(module, stream):
            found.update({f"{name} of step {step}": value * 2 for name, value in model.local_gradients().items()})
            model.zero_grad()
            assert not model.pending_gradients()
        _take_memory(env)
    if module:
        module.current_stream().wait_stream(stream)
    return {name: value.cpu() for name, value in found.items() if value is not None}


class _Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale  # type: ignore[operator]


@program()
def _buffers_cast_on_another_stream_than_they_were_made_on(env: RankEnv, shape: Shape) -> Found:
    model: Any = _Buffered().to(env.device)
    module, stream = _own_stream(env)
    with _behind(module, stream):
        policy = hsdp.MixedPrecisionPolicy(buffer_dtype=torch.float64)
        hsdp.fully_shard(model, mesh=env.mesh(shape), mp_policy=policy)
    _take_memory(env)
    if module:
        module.current_stream().wait_stream(stream)
    return {name: buffer.cpu() for name, buffer in model.named_buffers()}


class _Branches(nn.Module):
    """Two units beside each other, on a device each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.streams: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return torch.tanh(self.blocks[0](x)) + torch.tanh(self.blocks[1](x))
        module: Any = torch.get_device_module(x.device)
        self.streams = self.streams or [module.Stream()]
        here, beside = module.current_stream(), self.streams[0]
        beside.wait_stream(here)
        with module.stream(beside):
            x.record_stream(beside)
            other = torch.tanh(self.blocks[1](x))
        one = torch.tanh(self.blocks[0](x))
        here.wait_stream(beside)
        other.record_stream(here)
        return one + other


class _TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(_Branches(), _Branches(), _Branches())

    def units(self) -> list[nn.Module]:
        """Those of all branches."""
        return [unit for layer in self.layers for unit in layer.blocks]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def _branched(env: RankEnv, shape: Shape, **options: Any) -> Found:
    case = regression("branches", _TwoBranches)
    return _trained(env, shard(case.model(), env.mesh(shape), **options), case)


@program()
def _units_on_streams_of_the_forward(env: RankEnv, shape: Shape) -> Found:
    return _branched(env, shape)


@program()
def _units_on_streams_of_the_forward_that_stay_whole(env: RankEnv, shape: Shape) -> Found:
    return _branched(env, shape, reshard_after_forward=False, **_policy(fusion="packed"))


@program()
def _forwards_and_backward_on_streams_of_their_own(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape, "called_twice", reshard_after_forward=False)
    optimizer = sgd(model.parameters())
    module = torch.get_device_module(env.device) if env.device != "cpu" else None
    streams = [module.Stream() for _ in range(3)] if module else []
    for step in range(STEPS):
        losses = []
        for at in range(2):
            if module:
                streams[at].wait_stream(module.current_stream())
            with module.stream(streams[at]) if module else nullcontext():
                losses.append(_loss(env, model, case, step, at))
        for stream in streams[:2]:
            streams[2].wait_stream(stream)
        with module.stream(streams[2]) if module else nullcontext():
            (losses[0] + losses[1]).backward()
        if module:
            module.current_stream().wait_stream(streams[2])
        optimizer.step()
        optimizer.zero_grad()
    return full_params(model)


@program()
def _after_an_exception(env: RankEnv, shape: Shape) -> Found:
    torch.manual_seed(3)
    model: Any = shard(Fragile().double(), env.mesh(shape))
    found: Found = {}
    for at, where in enumerate(("forward of 1", "backward of 1", "backward of 0")):
        batch = tokens(env.rank, at).to(env.device)
        fail(where, ValueError, lambda batch=batch: model(batch).square().sum().backward())
        model(batch).square().sum().backward()
        found.update({f"{where} {name}": grad for name, grad in full_grads(model).items()})
        model.zero_grad()
    return found


@program()
def _after_an_exception_on_another_stream(env: RankEnv, shape: Shape) -> Found:
    """Nobody orders what the caller does next, to write to weights say, behind what ran on the stream of the forward."""
    torch.manual_seed(3)
    model: Any = shard(Fragile().double(), env.mesh(shape))
    module = torch.get_device_module(env.device) if env.device != "cpu" else None
    streams = [module.Stream() for _ in range(2)] if module else [None, None]
    for where in ("backward before 0", "backward of 1", "backward of 0"):
        with _behind(module, streams[0]):
            loss = model(tokens(env.rank, 0).to(env.device)).square().sum()
        with _behind(module, streams[1]):
            fail(where, ValueError, loss.backward)
            with pytest.warns(UserWarning, match="a backward pass failed"):
                model.flush()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.01)
        if module:
            module.current_stream().wait_stream(streams[1])
    model(tokens(env.rank, 1).to(env.device)).square().sum().backward()
    return dict(full_grads(model))


@program()
def _a_model_that_goes_after_an_exception(env: RankEnv, shape: Shape) -> Found:
    """Its reductions are under way when its memory is there for the next model."""

    def build() -> Any:
        torch.manual_seed(3)
        return shard(Fragile().double(), env.mesh(shape))

    def step(model: Any) -> None:
        model(tokens(env.rank, 0).to(env.device)).square().sum().backward()

    fail("backward before 0", ValueError, lambda: step(build()))
    gc.collect()
    model = build()
    step(model)
    return dict(full_grads(model))


@program()
def _recomputed_behind_parameters_of_the_root(env: RankEnv, shape: Shape) -> Found:
    """The recomputed forwards make their autograd nodes on a thread of the engine, which numbers them from 0."""
    model: Any = shard(seeded(lambda: RootFirst(recompute=True)), env.mesh(shape), reshard_after_forward=True)
    ahead = torch.zeros(1, requires_grad=True)
    for _ in range(5000):  # this thread is ahead of the engine's, as it is in a training loop
        ahead = ahead * 1.0
    for k in range(2):
        model(floats(env.rank, k).detach().to(env.device).requires_grad_()).square().mean().backward()
    return dict(full_grads(model))


@program()
def _saved_in_the_background_and_resumed(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    optimizer = adamw(model.parameters())
    folders = [tempfile.mkdtemp() if env.rank == 0 else None]
    dist.broadcast_object_list(folders, device=torch.device("cpu"))
    train(model, case, env.rank, 2, optimizer, device=env.device)
    handle = hsdp.checkpoint.save(folders[0], model, optimizer, step=2, async_=True)
    train(model, case, env.rank, 2, optimizer, first_step=2, device=env.device)
    handle.wait()
    again, _ = _built(env, shape)
    resumed = adamw(again.parameters())
    hsdp.checkpoint.load(folders[0], again, resumed)
    train(again, case, env.rank, 2, resumed, first_step=2, device=env.device)
    assert_same(full_params(again), dict(full_params(model)), 1e-12, 1e-12)
    return _state(again)


@program()
def _loaded_while_gathers_run(env: RankEnv, shape: Shape) -> Found:
    """Whatever hsdp writes into shards comes behind the gathers that read them."""
    model, case = _built(env, shape)
    folders = [tempfile.mkdtemp() if env.rank == 0 else None]
    dist.broadcast_object_list(folders, device=torch.device("cpu"))
    hsdp.checkpoint.save(folders[0], model, step=1)

    def written() -> None:
        with hsdp.full_params(model, writeback="local"):
            pass

    loads = [
        lambda: hsdp.checkpoint.load(folders[0], model),
        lambda: hsdp.sync_module_states(model),
        lambda: model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}),
        written,
    ]
    for load in loads:
        handles = [unit.unshard(async_op=True) for unit in model.blocks]
        load()
        for unit, handle in zip(model.blocks, handles, strict=True):
            handle.wait()
            unit.reshard()
    return _trained(env, model, case)


@program(tolerance=1e-4)
def _gathered_in_8_bits(env: RankEnv, shape: Shape) -> Found:
    case = make_case("mlp", torch.float32)
    model = case.model().to(env.device)
    quantise(model)
    return _trained(env, shard(model, env.mesh(shape)), case)


@program(tolerance=2e-2)
def _compressed(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape, dtype=torch.float32)
    for unit in (*model.blocks, model):
        unit.set_custom_reduce_scatter(hsdp.CompressedReduceScatter())
    if len(shape) == 2:
        model.set_replica_reduce(hsdp.CompressedAllReduce())
    return _trained(env, model, case)


class _Spectrum(nn.Linear):
    """Adds to a spectrum, as the emulator has no product of complex numbers."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.shift = nn.Parameter(torch.randn(9, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(super().forward(x))[:, None] + self.shift, n=8).mean(1)


class _Spectra(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(_Spectrum(), nn.Tanh(), _Spectrum())
        self.blocks = [self[0], self[2]]


@program(tolerance=1e-5)
def _complex_weights(env: RankEnv, shape: Shape) -> Found:
    case = replace(regression("spectra", _Spectra), dtype=None)
    model = shard(case.model().to(env.device), env.mesh(shape))
    _trained(env, model, case, make=sgd)
    return _accumulate(env, model, case)


@program((1, 2, 2), (2, 1, 2))
def _tensor_parallel(env: RankEnv, shape: Shape) -> Found:
    mesh = env.mesh(shape, tp.NAMES)
    model = tp.CASE.model().to(env.device)
    local = functools.partial(parallelize_module, src_data_rank=None)  # all ranks have the same values
    with mock.patch.object(tp, "parallelize_module", local):
        tp.parallelize(model, mesh["tp"], "tensor")
    data = mesh["shard"] if shape[0] == 1 else mesh["replicate", "shard"]
    replicas = RankEnv(env.rank // shape[2], env.world_size, env.device)  # both ranks of a pair have the same batches
    return _trained(replicas, shard(model, data), tp.CASE)


@program()
def _several_forwards_one_backward(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    (_loss(env, model, case, 0) + _loss(env, model, case, 1)).backward()
    return _state(model)


@program()
def _backwards_of_inputs_and_of_weights(env: RankEnv, shape: Shape) -> Found:
    """As pipeline schedules split them; the gradients of weights are put on unsharded parameters, unseen by hsdp."""
    model, case = _built(env, shape)
    for module in filter(lambda one: isinstance(one, hsdp.HSDPModule), model.modules()):
        module.unshard(async_op=True).wait()
    xs = [case.batch(step, env.rank)[0].to(env.device).requires_grad_() for step in range(2)]
    for groups in [pipelining._inputs(model, x) for x in xs]:
        pipelining._weights(model, groups)
    pipelining._reduce(model)
    return _state(model)


@program()
def _gradients_penalised(env: RankEnv, shape: Shape) -> Found:
    model, case = _built(env, shape)
    x, y = (t.to(env.device) for t in case.batch(0, env.rank))
    x.requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad((out - y).square().mean(), x, create_graph=True)
    (out.sum() + grad.square().sum()).backward()
    return _state(model)


@program()
def _moved_and_offloaded(env: RankEnv, shape: Shape) -> Found:
    """Parameters reach an offloading model from the device, in each of the ways there are."""
    found: Found = {}
    policy = hsdp.CPUOffloadPolicy()
    model, case = _built(env, shape, offload_policy=policy)
    values = {name: param.detach().clone() for name, param in model.state_dict().items()}
    found.update(_trained(env, model.to(env.device), case))

    moved = {name: _on(param, env.device) for name, param in values.items()}
    model.load_state_dict(moved, assign=True)
    found.update({f"assigned {name}": value for name, value in _trained(env, model, case).items()})

    with torch.device("meta"):
        blank = case.build().double()
    model = shard(blank, env.mesh(shape), offload_policy=policy)
    hsdp.init_sharded(model, lambda module: [nn.init.constant_(p, 0.02) for p in module.parameters(recurse=False)])
    found.update({f"initialised {name}": value for name, value in _trained(env, model, case).items()})

    with torch.device("meta"):
        blank = case.build().double()
    model = shard(blank, env.mesh(shape), offload_policy=policy)
    model.to_empty(device=env.device)
    model.load_state_dict(values)
    found.update({f"emptied {name}": value for name, value in _trained(env, model, case).items()})
    assert all(param.to_local().device.type == "cpu" for param in model.parameters())
    return found


def _on(param: Any, device: str) -> Any:
    """The DTensor with its local tensor on `device`."""
    return as_dtensor(param.to_local().to(device), param._spec)
