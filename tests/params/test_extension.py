"""Parameters that say themselves how they are gathered (FSDP2's `fsdp_pre_all_gather`, `fsdp_post_all_gather`)."""

from __future__ import annotations

import gc
import importlib.util
import math
import re
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hsdp
from hsdp.examples.int8_gather import Int8Weight, quantise
from tests.support.counting import CollectiveCounter, by_sockets
from tests.support.models import Case, mse
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import MESHES, check_rest, check_sharded, mesh_id, pool_for
from tests.support.twin import Twin, adamw, assert_close_to_twin, assert_same, full_params, sgd, train, train_twin

EVEN, ODD = (8, 16, 8), (5, 7, 3, 6)


# -- the oracle: rounded in the forward, on one device ----------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """What a weight is after it went through int8; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        (codes, scales), _ = Int8Weight(weight.detach()).fsdp_pre_all_gather(None, None, None, None, None)  # type: ignore[arg-type]
        return codes * scales

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class RoundedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Rounded.apply(self.weight), self.bias)  # type: ignore[no-untyped-call]


class Net(nn.Module):
    """Linear layers with tanh between them."""

    def __init__(self, dims: tuple[int, ...], kind: type[nn.Linear]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(i, o) for i, o in pairwise(dims))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _batch(dims: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, dims[0], generator=generator), torch.randn(4, dims[-1], generator=generator)


def _case(dims: tuple[int, ...], kind: type[nn.Linear] = nn.Linear) -> Case:
    return Case("net", partial(Net, dims, kind), partial(_batch, dims), mse)


def rounded_twin(dims: tuple[int, ...], world: int, steps: int, optimizer: Any, accumulate: int = 1) -> Twin:
    case = _case(dims, RoundedLinear)
    return train_twin(case.model, case.batch, world, steps, optimizer, accumulate)


def _wrap(model: nn.Module, kind: type[Int8Weight] = Int8Weight) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(kind(layer.weight))
    return model


def _shard(model: nn.Module, mesh: Any, **options: Any) -> Any:
    for block in model.blocks:  # type: ignore[union-attr]
        hsdp.fully_shard(block, mesh=mesh, **options)
    return hsdp.fully_shard(model, mesh=mesh, **options)


def _check_nothing_is_whole(model: Any) -> None:
    check_rest(model)
    held = {
        unit.name: group.transient_bytes for unit in model._units() for group in unit.dtype_groups if group.kind.extension
    }
    assert held and not any(held.values()), f"held after the iteration: {held}"
    for unit in model._units():
        for param in unit.params:
            if param.wrapper is not None:
                assert param.unsharded.untyped_storage().nbytes() == 0, param.fqn
                assert isinstance(param.sharded.to_local(), param.wrapper.kind), param.fqn


# -- training ---------------------------------------------------------------------------------------------------------


def check_trains(
    env: RankEnv, shape: tuple[int, ...], dims: tuple[int, ...], optimizer: Any, twin: Twin, options: dict[str, Any]
) -> None:
    case = _case(dims)
    model = _shard(_wrap(case.model()), env.mesh(shape), **options)
    steps, _, accumulate = twin.losses.shape
    before = lambda _, last: model.set_requires_grad_sync(last)  # noqa: E731
    losses = train(model, case, env.rank, steps, optimizer(model.parameters()), accumulate, before_micro=before)
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, grads=True)
    check_sharded(model)
    _check_nothing_is_whole(model)


def check_odd_rows(env: RankEnv, shape: tuple[int, ...]) -> None:
    check_trains(env, shape, ODD, sgd, rounded_twin(ODD, math.prod(shape), 2, sgd), {})


@pytest.mark.parametrize("dims", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_training_equals_that_of_rounded_weights_on_one_device(
    request: pytest.FixtureRequest, shape: tuple[int, ...], dims: tuple[int, ...]
) -> None:
    twin = rounded_twin(dims, math.prod(shape), 3, adamw)
    pool_for(request, shape).run(check_trains, shape, dims, adamw, twin, {})


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"comm_policy": hsdp.CommPolicy(prefetch=0, fusion="direct")},
        {"comm_policy": hsdp.CommPolicy(prefetch=2, fusion="packed")},
        {"offload_policy": hsdp.CPUOffloadPolicy()},
    ],
    ids=["freed", "kept", "no prefetch", "prefetch", "offload"],
)
def test_accumulation_and_policies(pool2: Pool, options: dict[str, Any]) -> None:
    pool2.run(check_trains, (2,), ODD, sgd, rounded_twin(ODD, 2, 3, sgd, 2), options)


# -- other extensions -------------------------------------------------------------------------------------------------


class Bf16Weight(Int8Weight):
    """Travels in 16 bits, and what arrives is the whole weight."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]  # the older signature
        assert mesh.ndim == 1 and mesh.size() == 2
        return (self.rows.to(torch.bfloat16),), "told"

    def fsdp_post_all_gather(  # type: ignore[override]
        self, gathered: tuple[Tensor, ...], metadata: str, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        assert metadata == "told" and param_dtype == torch.bfloat16
        (whole,) = gathered
        if out is None:
            return whole, gathered
        assert whole.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        assert (whole.count_nonzero(1) > 0).all(), "rows of every rank are there"
        return None


class Coded(Tensor):
    """A whole weight that stays int8 and is made wide by whoever computes with it."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Coded:
        return Tensor._make_wrapper_subclass(cls, codes.shape, strides=codes.stride(), dtype=scale.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Coded:
        return Coded(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.view.default):
            return Coded(func(args[0].codes, *args[1:]), args[0].scale)
        return func(*(arg.codes * arg.scale if isinstance(arg, Coded) else arg for arg in args), **(kwargs or {}))


class OneScale(Int8Weight):
    """One scale for the whole weight, about which the ranks agree; it travels beside the codes."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert isinstance(module, nn.Linear) and isinstance(mp_policy, fsdp.MixedPrecisionPolicy)
        assert outer_size == (module.out_features, module.in_features) and outer_stride == (module.in_features, 1)
        scale = self.rows.abs().max() / 127
        dist.all_reduce(scale, dist.ReduceOp.MAX, mesh.get_group())
        return (self.rows.div(scale).round_().to(torch.int8),), scale

    def fsdp_post_all_gather(  # type: ignore[override]
        self, gathered: tuple[Tensor, ...], metadata: Tensor, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is None:
            return Coded(gathered[0], metadata), gathered
        out.scale = metadata
        return None


class AroundParameter(Int8Weight):
    """Its data is a parameter itself, as those of torchao are."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].rows)
        return super().__torch_dispatch__(func, types, args, kwargs)


class OneScaleWide(OneScale):
    """The same, made wide at once."""

    def fsdp_post_all_gather(  # type: ignore[override]
        self, gathered: tuple[Tensor, ...], metadata: Tensor, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return super(OneScale, self).fsdp_post_all_gather((gathered[0], metadata.expand(1)), None, param_dtype, out=out)


class Careless(Int8Weight):
    """Writes into the whole weight itself."""

    def fsdp_post_all_gather(self, gathered: Any, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
        if out is None:
            return super().fsdp_post_all_gather(gathered, metadata, param_dtype)
        return torch.mul(*gathered, out=out)


class Keeping(Careless):
    """Has memory of its own for the whole weight, which is never freed."""

    def fsdp_post_all_gather(self, gathered: Any, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
        if out is None:
            return super().fsdp_post_all_gather(gathered, metadata, param_dtype)[0].clone(), ()
        return super().fsdp_post_all_gather(gathered, metadata, param_dtype, out=out)


def check_as_another(
    env: RankEnv, kind: type[Int8Weight], other: type[Int8Weight] | None, policy: hsdp.MixedPrecisionPolicy
) -> None:
    """Two ways of gathering that come to the same, bit for bit: as `kind` has it, and as `other` (None: plain weights)."""
    case = replace(_case(EVEN), dtype=torch.float32)
    models = [_wrap(case.model(), kind), case.model() if other is None else _wrap(case.model(), other)]
    losses = []
    for model in models:
        _shard(model, env.mesh((2,)), mp_policy=policy)
        losses.append(train(model, case, env.rank, 3, adamw(model.parameters())))
        check_rest(model)
    assert torch.equal(*losses)
    params, expected = map(full_params, models)
    assert_same(dict(params), dict(expected), 0, 0)
    for unit in models[0]._units():  # type: ignore[operator]
        assert not any(group.transient_bytes for group in unit.dtype_groups)


def test_a_whole_weight_that_lives_in_what_arrives(pool2: Pool) -> None:
    pool2.run(check_as_another, Bf16Weight, None, hsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def test_a_weight_that_is_written_again_for_backward_is_no_change(pool2: Pool) -> None:
    for kind in (Careless, Keeping):
        pool2.run(check_as_another, kind, Int8Weight, hsdp.MixedPrecisionPolicy())


def test_a_whole_weight_that_is_a_subclass_with_a_scale_beside_it(pool2: Pool) -> None:
    pool2.run(check_as_another, OneScale, OneScaleWide, hsdp.MixedPrecisionPolicy())


def check_thaw(env: RankEnv, frozen: bool) -> None:
    """The scale that every gather sets is that of the weights of now, whether they are trained, frozen, or thawed."""
    case = replace(_case(EVEN), dtype=torch.float32)
    losses = []
    for kind in (OneScale, OneScaleWide):
        model = _wrap(case.model(), kind)
        weights = lambda: [block.weight for block in model.blocks]  # noqa: E731
        for weight in weights():
            weight.requires_grad_(not frozen)
        _shard(model, env.mesh((2,)))
        optimizer, told = torch.optim.SGD(model.parameters(), 0.5), []
        for step, wanted in enumerate((not frozen, True, True, False, False, True, True)):
            for weight in weights():
                weight.requires_grad_(wanted)
            if step == 4:
                with torch.no_grad():
                    for weight in weights():
                        weight.mul_(3)
            loss = mse(model, case.batch(step, env.rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.detach())
        losses.append(torch.stack(told))
    assert torch.equal(*losses)


@pytest.mark.parametrize("frozen", [False, True])
def test_rule_29_a_scale_is_set_on_thawed_and_frozen_weights(pool2: Pool, frozen: bool) -> None:
    pool2.run(check_thaw, frozen)


def test_the_data_may_be_a_parameter(pool2: Pool) -> None:
    assert isinstance(_wrap(nn.Linear(2, 2), AroundParameter).weight.rows, nn.Parameter)  # type: ignore[union-attr]
    pool2.run(check_as_another, AroundParameter, Int8Weight, hsdp.MixedPrecisionPolicy())


def _torchao_losses(env: RankEnv, sharded: bool) -> list[Tensor]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=sharded, emulate=True)
    case = replace(_case((16, 32, 16)), dtype=torch.float32)
    model = convert_to_float8_training(case.model(), config=config)
    if sharded:
        _shard(model, env.mesh((2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        loss = mse(model, case.batch(step, env.rank))
        loss.backward()
        losses.append(loss.detach())
        for param in () if sharded else model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        if sharded and step > 1:
            precompute_float8_dynamic_scale_for_fsdp(model)
    if sharded:
        names = {type(block.weight.to_local()).__name__ for block in model.blocks}
        assert names == {"WeightWithDynamicFloat8CastTensor"}
    return losses


def check_torchao(env: RankEnv) -> None:
    """float8 training of torchao: gathered as float8, and the losses are those of replicas that gather nothing."""
    torch.testing.assert_close(_torchao_losses(env, True), _torchao_losses(env, False), rtol=1e-6, atol=0)


def test_torchao_trains_in_float8(pool2: Pool) -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed: pip install 'hsdp[ecosystem]'")
    pool2.run(check_torchao)


# -- bytes ------------------------------------------------------------------------------------------------------------


@by_sockets
def check_bytes(env: RankEnv) -> None:
    """fp32 weights travel in a quarter of their bytes, and take only the memory that they need."""
    model = _wrap(nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)))
    mesh = env.mesh((2,))
    for layer in model:
        hsdp.fully_shard(layer, mesh=mesh)
    root: Any = hsdp.fully_shard(model, mesh=mesh)
    with CollectiveCounter() as counter, torch.no_grad():
        model(torch.randn(2, 64))
    codes, scales = 2 * 64 * 32, (32 + 64) * 4
    assert counter.total("all_gather").bytes_out == codes + scales
    for unit, rows in zip(root._units()[1:], (32, 64), strict=True):
        (group,) = unit.dtype_groups
        unit.launch()
        assert group.transient_bytes == 64 * 32 + rows * 4, "on the way there are the codes and scales only"
        unit.finish()
        assert group.transient_bytes == 64 * 32 * 4, "and then the whole weight only"
        unit.reshard()
        assert group.transient_bytes == 0 and not group.inputs


def test_a_quarter_of_the_bytes_and_no_more_memory_than_needed(pool2: Pool) -> None:
    pool2.run(check_bytes)


# -- what can go wrong ------------------------------------------------------------------------------------------------


class Fragile(Int8Weight):
    """Fails where it is told to."""

    fails: str | None = None

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        if Fragile.fails == "pre":
            raise KeyError("no scale")
        inputs, metadata = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        if Fragile.fails in ("wider", f"wider on {mesh.get_local_rank()}"):
            inputs = (F.pad(inputs[0], (0, 1)), inputs[1])
        return inputs, metadata

    def fsdp_post_all_gather(self, gathered: Any, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
        if Fragile.fails == "post" or (Fragile.fails == "post later" and out is not None):
            raise KeyError("no whole")
        if out is not None or not str(Fragile.fails).startswith("wider"):
            return super().fsdp_post_all_gather(gathered, metadata, param_dtype, out=out)
        return super().fsdp_post_all_gather((gathered[0][:, : self.shape[1]], gathered[1]), metadata, param_dtype)


def check_failure(env: RankEnv, fails: str, told: str, in_backward: bool) -> None:
    """An iteration fails; the error tells whose fault it is, nothing is left, and the next iteration is as a first one."""
    case = _case(EVEN)
    model = _shard(_wrap(case.model(), Fragile), env.mesh((2,)))
    batch = case.batch(9, env.rank)
    try:
        loss = None if not in_backward else mse(model, batch)
        Fragile.fails = fails
        with pytest.raises(hsdp.ExtensionError, match=rf"unit 'blocks.\d', parameter 'weight': Fragile\.fsdp_{told}"):
            mse(model, batch) if loss is None else loss.backward()
    finally:
        Fragile.fails = None
    if not in_backward:
        _check_nothing_is_whole(model)
    del loss
    with torch.no_grad(), pytest.warns(UserWarning, match="backward pass did not end") if in_backward else nullcontext():
        model(batch[0])
    _check_nothing_is_whole(model)
    train(model, case, env.rank, 2, sgd(model.parameters()))
    assert_close_to_twin(model, rounded_twin(EVEN, 2, 2, sgd))


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ("pre", "pre_all_gather failed with KeyError: 'no scale'"),
        ("post", "post_all_gather failed with KeyError: 'no whole'"),
        ("wider", r"pre_all_gather failed with ValueError: it returned .*int8.*, and .*int8.* the first time"),
    ],
)
def test_rule_20_an_extension_fails(pool2: Pool, fails: str, told: str, in_backward: bool) -> None:
    pool2.run(check_failure, fails, told, in_backward)


def check_divergence(env: RankEnv) -> None:
    """Rank 1 would send more than rank 0: nobody sends anything."""
    Fragile.fails = "wider on 1"
    try:
        model = _shard(_wrap(Net(EVEN, nn.Linear), Fragile), env.mesh((2,)))
        model(torch.randn(2, 8))
    except hsdp.DivergenceError:
        _check_nothing_is_whole(model)
        raise
    finally:
        Fragile.fails = None


def test_ranks_that_would_send_different_sizes_are_told(pool2: Pool) -> None:
    for outcome in pool2.run_raw(check_divergence, group_timeout=10):
        assert outcome.error == "DivergenceError", f"{outcome.error}: {outcome.message}"
        assert re.search(r"rank\(s\) \[0\]: all-gather of unit 'blocks.0'.*rank\(s\) \[1\]", outcome.message)


@pytest.mark.parametrize("fails", ["pre", "post"])
def test_a_module_whose_extension_fails_at_once_is_as_it_was(fails: str) -> None:
    layer = nn.Linear(8, 8)
    weight = layer.weight = nn.Parameter(Fragile(layer.weight.detach()))
    with fake_world(4):
        Fragile.fails = fails
        with pytest.raises(hsdp.ExtensionError, match=r"parameter 'weight': Fragile.*failed with KeyError"):
            hsdp.fully_shard(layer)
        Fragile.fails = None
        assert type(layer) is nn.Linear and layer.weight is weight
        hsdp.fully_shard(layer)
        assert isinstance(layer.weight, DTensor)


class NoPost(Int8Weight):
    """Half an extension."""

    fsdp_post_all_gather = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "fsdp_post_all_gather":
            raise AttributeError(name)
        return super().__getattribute__(name)


class ThreeArguments(Int8Weight):
    """Of no known protocol."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any) -> Any:  # type: ignore[override]
        raise AssertionError("never called")


WEIGHT = r"parameter 'weight'"


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        (NoPost, {}, rf"{WEIGHT} .*is a NoPost, whose gather extension is incomplete; the class needs .*post_all_gather"),
        (ThreeArguments, {}, rf"{WEIGHT}: ThreeArguments.*it takes 3 arguments, and not \(mesh\) or \(mesh, outer_size"),
        (Int8Weight, {"reshard_after_forward": 2}, rf"{WEIGHT} has .* and cannot stay.* 2 ranks.*True or False"),
        (Int8Weight, {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}, rf"{WEIGHT} has .* on dim 0 only.*return None"),
        (Int8Weight, {"dp_mesh_dims": hsdp.DataParallelMeshDims(None, "shard")}, rf"{WEIGHT} has.* a shard axis.*names"),
        (Int8Weight, {"replicate_params": True}, rf"{WEIGHT} has .* and is in replicate_params.*leave it out"),
    ],
    ids=["half", "signature", "integer", "dim 1", "no shard axis", "replicated"],
)
def test_what_is_not_supported_is_refused_by_name(kind: Any, options: dict[str, Any], error: str) -> None:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(kind(layer.weight.detach()))
    with fake_world(4):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        if "replicate_params" in options:
            options = {"replicate_params": [layer.weight]}
        with pytest.raises((ValueError, hsdp.ExtensionError), match=error):
            hsdp.fully_shard(layer, mesh=mesh, **options)
        assert type(layer) is nn.Linear


def test_subclasses_inside_of_dtensors_are_refused_by_name() -> None:
    layer = nn.Linear(8, 8)
    with fake_world(4):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        rows = DTensor.from_local(Int8Weight(torch.randn(4, 8)), mesh["tp"], (Shard(0),), run_check=False)
        layer.weight = nn.Parameter(rows)
        with pytest.raises(ValueError, match=rf"{WEIGHT} .* is a DTensor around a Int8Weight.*ignored_params"):
            hsdp.fully_shard(layer, mesh=mesh["shard"])


# -- the rest of the library ------------------------------------------------------------------------------------------


def check_changes(env: RankEnv, twin: Twin) -> None:
    """Whatever changes parameters: the subclass stays, and training goes on from the new values."""
    case = _case(ODD)
    torch.manual_seed(env.rank)  # so that only what is loaded can be right
    with torch.device("meta"):
        model = _shard(_wrap(Net(ODD, nn.Linear).double()), env.mesh((2,)))
    assert model.blocks[0].weight.to_local().is_meta
    hsdp.init_sharded(model)
    start = case.model().state_dict()
    with hsdp.full_params(model, writeback="rank0"), torch.no_grad():
        for name, param in model.named_parameters():
            assert type(param) is nn.Parameter and param.shape == start[name].shape
            param.copy_(start[name])
    _check_nothing_is_whole(model)
    assert_same(dict(full_params(model)), dict(start), 0, 0)
    model.float().double()
    _check_nothing_is_whole(model)
    for name, param in model.named_parameters():  # the values are fp32's now
        param.detach().copy_(distribute_tensor(start[name], param.device_mesh, param.placements))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(state, assign=True)
    model.sum = "mark"
    train(model, case, env.rank, 3, hsdp.optim.local(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)))
    assert_close_to_twin(model, twin)
    _check_nothing_is_whole(model)


def test_initialised_edited_moved_and_loaded(pool2: Pool) -> None:
    pool2.run(check_changes, rounded_twin(ODD, 2, 3, adamw))


def check_checkpoint(env: RankEnv, path: Path, twin: Twin) -> None:
    """Saved on one mesh after two steps, loaded on another, and into plain weights."""
    case = _case(EVEN)
    model = _shard(_wrap(case.model()), env.mesh((2, 2)))
    optimizer = adamw(model.parameters())
    train(model, case, env.rank, 2, optimizer)
    hsdp.checkpoint.save(path, model, optimizer, step=2)
    saved = full_params(model)
    other = _shard(_wrap(case.model(1)), env.mesh((4,)))
    optimizer = adamw(other.parameters())
    assert hsdp.checkpoint.load(path, other, optimizer).step == 2
    train(other, case, env.rank, 1, optimizer, first_step=2)
    assert_close_to_twin(other, twin)
    plain = _shard(case.model(1), env.mesh((4,)))
    hsdp.checkpoint.load(path, plain, adamw(plain.parameters()))
    assert_same(dict(full_params(plain)), dict(saved), 0, 0)
    whole = hsdp.checkpoint.full_state_dict(other)
    assert env.rank or all(type(value) is Tensor for value in whole.values())


def test_checkpoints_of_such_parameters(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(check_checkpoint, tmp_path, rounded_twin(EVEN, 4, 3, adamw))


class StridedScale(Int8Weight):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        (codes, scales), told = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        return (codes, torch.stack([scales, scales], -1)[..., 0]), told


def test_one_element_that_is_sent_may_have_any_stride() -> None:
    with fake_world(2):
        model = hsdp.fully_shard(_wrap(nn.Sequential(nn.Linear(8, 2)), StridedScale))
        model(torch.randn(2, 8)).sum().backward()


def test_marks_stay_and_the_original_goes() -> None:
    layer = nn.Linear(8, 8)
    quantise(layer)
    layer.weight.sparse_grad = True
    before = weakref.ref(layer.weight.rows)
    with fake_world(4):
        hsdp.fully_shard(layer)
        assert layer.weight.sparse_grad
        assert not hasattr(layer.weight, "rows")
        gc.collect()
        assert before() is None
        assert layer.weight.placements == (Shard(0),) and Replicate() not in layer.weight.placements


def test_a_disk_holds_the_shards(pool2: Pool, tmp_path: Path) -> None:
    options = {"offload_policy": hsdp.DiskOffloadPolicy(tmp_path)}
    pool2.run(check_trains, (2,), ODD, sgd, rounded_twin(ODD, 2, 2, sgd), options)


def test_plans_and_descriptions_tell_of_them() -> None:
    model = _wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    message = str(hsdp.plan(model, mesh=(1, 4), tokens_per_rank=8))
    assert "fp32/fp32/fp32 subclass" in message and "Subclass: the tensors say what of them is gathered" in message
    with fake_world(4):
        hsdp.fully_shard(model)
        assert "fp32/fp32/fp32 subclass" in str(hsdp.plan(model, tokens_per_rank=8))
        assert "gathered as its subclass says" in hsdp.describe(model)
