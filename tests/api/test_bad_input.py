"""Bad input is refused at the call: the right type of error, what and where in the message, and what to do instead."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate

import hsdp
from hsdp import CommPolicy, MixedPrecisionPolicy, StateError, fully_shard
from tests.support.models import MLP
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import shard


@pytest.fixture
def world() -> Iterator[RankEnv]:
    """Rank 0 of 4; collectives move nothing."""
    with fake_world(4) as env:
        yield env


def _says(error: BaseException, *parts: str) -> None:
    """The message has all parts, and more words than a bare assertion would."""
    for part in parts:
        assert re.search(part, str(error), re.IGNORECASE), f"no {part!r} in: {error}"


class _Tied(nn.Module):
    """Two blocks that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


# -- modules --------------------------------------------------------------------------------------------------------


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but people have them
        return torch.jit.script(nn.Linear(2, 2))


_MODULES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "list without forward": (lambda: MLP().blocks, ValueError, ("ModuleList", "no forward", "children")),
    "dict without forward": (lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}), ValueError, ("ModuleDict", "no forward")),
    "not a module": (lambda: "model", TypeError, ("nn.Module", "str")),
    "a parameter": (lambda: nn.Linear(2, 2).weight, TypeError, ("nn.Module", "Parameter")),
    "empty list": (list, ValueError, ("empty", "at least one")),
    "twice in a list": (lambda: [nn.Linear(2, 2)] * 2, ValueError, ("twice", "once")),
    "scripted": (_scripted, TypeError, ("scripted", "pass the module")),
    "traced": (
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))),
        ValueError,
        ("'0.weight'", "torch.jit", "shard the plain module"),
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), ValueError, ("'0.weight'", "lazy", "run a forward")),
    "not a module in a list": (lambda: [nn.Linear(2, 2), 3], TypeError, ("nn.Module", "int")),
}


@pytest.mark.parametrize("what", _MODULES)
def test_what_is_no_module_with_a_forward_is_refused(world: RankEnv, what: str) -> None:
    make, kind, parts = _MODULES[what]
    with pytest.raises(kind) as caught:
        fully_shard(make(), mesh=world.mesh(4))
    _says(caught.value, "fully_shard", *parts)


def test_a_module_sharded_twice_is_refused_by_class(world: RankEnv) -> None:
    model = fully_shard(MLP(), mesh=world.mesh(4))
    for module in (model, [model]):
        with pytest.raises(ValueError) as caught:
            fully_shard(module, mesh=world.mesh(4))
        _says(caught.value, "MLP", "sharded already", "once")


def test_a_module_inside_a_unit_is_refused_with_the_order_to_call_in(world: RankEnv) -> None:
    model = fully_shard(MLP(), mesh=world.mesh(4))
    with pytest.raises(ValueError) as caught:
        fully_shard(model.blocks[0], mesh=world.mesh(4))
    _says(caught.value, "'weight'", "MLP", "bottom-up", "inner modules first")


@pytest.mark.parametrize("outer", [False, True], ids=["siblings", "parent"])
def test_a_weight_tied_to_another_unit_is_refused_by_both_names(world: RankEnv, outer: bool) -> None:
    model = _Tied()
    fully_shard(model.first, mesh=world.mesh(4))
    with pytest.raises(ValueError) as caught:
        fully_shard(model if outer else model.second, mesh=world.mesh(4))
    _says(caught.value, "second.weight" if outer else "'weight'", "tied", "Linear", "one unit", "untie")
    assert model.second.weight.shape == (4, 4)
    assert type(model.second) is nn.Linear


def test_a_tied_weight_is_still_refused_when_its_other_unit_is_gone(world: RankEnv) -> None:
    model = _Tied()
    fully_shard(model.first, mesh=world.mesh(4))
    del model.first
    with pytest.raises(ValueError) as caught:
        fully_shard(model.second, mesh=world.mesh(4))
    _says(caught.value, "'weight'", "tied")


# -- meshes ---------------------------------------------------------------------------------------------------------


def test_a_mesh_of_three_axes_is_refused_with_its_shape(world: RankEnv) -> None:
    mesh = world.mesh((2, 1, 2), ("a", "b", "c"))
    with pytest.raises(ValueError) as caught:
        fully_shard(MLP(), mesh=mesh)
    _says(caught.value, "3 axes", r"\(2, 1, 2\)", "1-D", "2-D", "slice")


def test_a_mesh_whose_ranks_do_not_ascend_is_refused(world: RankEnv) -> None:
    for ranks, refused in (([1, 0, 2, 3], True), ([[1, 0], [3, 2]], True), ([[2, 3], [0, 1]], False)):
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        with pytest.raises(ValueError) if refused else contextlib.nullcontext() as caught:
            fully_shard(MLP(), mesh=mesh)
        if refused:
            _says(caught.value, "shard axis", re.escape(str(ranks)), "sort")


class Doubled(torch.Tensor):
    """Is not what it seems to be: its functions see twice of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            args = args[0], args[1].as_subclass(torch.Tensor) * 2, *args[2:]
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_parameter_with_functions_of_its_own_is_refused_by_name(world: RankEnv) -> None:
    model = MLP()
    model.blocks[0].weight = nn.Parameter(model.blocks[0].weight.detach().as_subclass(Doubled))
    with pytest.raises(ValueError) as caught:
        fully_shard(model, mesh=world.mesh(4))
    _says(caught.value, "blocks.0.weight", "Doubled", "__torch_function__", "ignored_params")


def test_what_is_no_mesh_is_refused_by_type(world: RankEnv) -> None:
    for mesh in (4, (2, 2), torch.distributed.group.WORLD):
        with pytest.raises(TypeError) as caught:
            fully_shard(MLP(), mesh=mesh)
        _says(caught.value, "DeviceMesh", type(mesh).__name__, "init_device_mesh")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device must be missing")
def test_a_mesh_for_a_device_that_is_not_here_is_refused(world: RankEnv) -> None:
    mesh = DeviceMesh("cuda", torch.arange(4), _init_backend=False, _rank=0)
    with pytest.raises(ValueError) as caught:
        fully_shard(MLP(), mesh=mesh)
    _says(caught.value, "cuda", "cpu")


def test_no_mesh_and_no_process_group_is_refused() -> None:
    with pytest.raises(RuntimeError) as caught:
        fully_shard(MLP())
    _says(caught.value, "mesh", "init_process_group")


def _shard_on_foreign_mesh(env: RankEnv) -> str:
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("shard",))
    if env.rank < 2:
        return ""
    with pytest.raises(ValueError) as caught:
        fully_shard(MLP(), mesh=mesh)
    return str(caught.value)


def test_a_rank_outside_the_mesh_is_refused_by_its_number(pool4: Pool) -> None:
    for rank, text in enumerate(pool4.run(_shard_on_foreign_mesh)):
        assert rank < 2 or f"rank {rank}" in text


# -- parameters -----------------------------------------------------------------------------------------------------


class _Counts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.inner.table = nn.Parameter(torch.zeros(3, 5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex32], ids=str)
def test_trained_parameters_whose_gradients_cannot_be_summed_are_refused_by_name(
    world: RankEnv, dtype: torch.dtype
) -> None:
    model = _Counts(dtype)
    with pytest.raises(ValueError) as caught:
        fully_shard(model, mesh=world.mesh(4))
    _says(caught.value, "_Counts", r"inner\.table", r"\(3, 5\)", str(dtype), r"requires_grad_\(False\)", "ignored_params")
    assert fully_shard(model, mesh=world.mesh(4), ignored_params=[model.inner.table]) is model


@pytest.mark.parametrize("layout", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_and_mkldnn_parameters_are_refused_by_name(world: RankEnv, layout: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(layout(torch.eye(4)), requires_grad=False)
    with pytest.raises(ValueError) as caught:
        fully_shard(model, mesh=world.mesh(4))
    _says(caught.value, "Linear", "'weight'", str(model.weight.layout), r"to_dense\(\)", "ignored_params")
    assert fully_shard(model, mesh=world.mesh(4), ignored_params=[model.weight]) is model


def test_dtensors_on_an_overlapping_mesh_are_refused_by_name(world: RankEnv) -> None:
    model = nn.Linear(8, 8)
    model.bias = nn.Parameter(distribute_tensor(torch.zeros(8), world.mesh(4), [Replicate()], src_data_rank=None))
    with pytest.raises(ValueError) as caught:
        fully_shard(model, mesh=world.mesh(4))
    _says(caught.value, "'bias'", "DTensor", "Replicate", "ignored_params")


_PLACEMENTS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "dim too large": (lambda p: Shard(2), ValueError, (r"Shard\(dim=2\)|S\(2\)", "-2 to 1")),
    "dim too small": (lambda p: Shard(-3), ValueError, (r"Shard\(dim=-3\)|S\(-3\)", "-2 to 1")),
    "an int": (lambda p: 1, TypeError, ("returned 1", r"Shard\(dim\)")),
    "not Shard": (lambda p: Replicate(), TypeError, (r"Replicate\(\)|R\b", r"Shard\(dim\)")),
}


@pytest.mark.parametrize("what", _PLACEMENTS)
def test_placements_that_do_not_exist_are_refused_by_parameter(world: RankEnv, what: str) -> None:
    choose, kind, parts = _PLACEMENTS[what]
    model = MLP()
    with pytest.raises(kind) as caught:
        fully_shard(model, mesh=world.mesh(4), shard_placement_fn=choose)
    _says(caught.value, "MLP", r"blocks\.0\.weight", r"\(16, 8\)", *parts)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_unit_that_is_partly_on_meta_never_runs_with_made_up_values(world: RankEnv, name: str) -> None:
    model = nn.Linear(4, 4)
    setattr(model, name, nn.Parameter(getattr(model, name).to("meta")))
    with pytest.raises((ValueError, StateError)) as caught:
        fully_shard(model, mesh=world.mesh(4))(torch.ones(1, 4))
    _says(caught.value, name, "meta")


# -- other arguments ------------------------------------------------------------------------------------------------

_ARGUMENTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "reshard_after_forward": ({"reshard_after_forward": "yes"}, ("'yes'", "True, False")),
    "mp_policy": ({"mp_policy": torch.bfloat16}, ("MixedPrecisionPolicy", "dtype")),
    "comm_policy": ({"comm_policy": "packed"}, ("CommPolicy", "str")),
    "ignored_params": ({"ignored_params": ["blocks.0.weight"]}, ("str", "parameter")),
    "shard_placement_fn": ({"shard_placement_fn": Shard(1)}, ("Shard", "function|callable")),
}


@pytest.mark.parametrize("name", _ARGUMENTS)
def test_arguments_of_the_wrong_type_are_refused_by_name(world: RankEnv, name: str) -> None:
    arguments, parts = _ARGUMENTS[name]
    with pytest.raises(TypeError) as caught:
        fully_shard(MLP(), mesh=world.mesh(4), **arguments)
    _says(caught.value, name, *parts)


_POLICIES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "param_dtype": (lambda: MixedPrecisionPolicy(param_dtype=torch.int8), ("int8", "floating", "bfloat16")),
    "reduce_dtype": (lambda: MixedPrecisionPolicy(reduce_dtype="fp32"), ("'fp32'", "floating")),
    "param_dtype=": (lambda: MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn), ("float8", "16 bits")),
    "cast_forward_inputs": (lambda: MixedPrecisionPolicy(cast_forward_inputs="no"), ("'no'", "True or False")),
    "pin_memory": (lambda: hsdp.CPUOffloadPolicy(pin_memory="no"), ("'no'", "True or False")),
    "output_dtype": (lambda: MixedPrecisionPolicy(output_dtype=torch.bool), ("bool", "floating")),
    "fusion": (lambda: CommPolicy(fusion="always"), ("'always'", "'auto', 'packed' or 'direct'")),
    "prefetch": (lambda: CommPolicy(prefetch=-1), ("-1", "at least 0")),
    "max_inflight_reduce_scatters": (lambda: CommPolicy(max_inflight_reduce_scatters=0), ("at least 1",)),
    "max_inflight_all_reduces": (lambda: CommPolicy(max_inflight_all_reduces=True), ("True", "integer")),
    "direct_gather_bytes": (lambda: CommPolicy(direct_gather_bytes=1.5), ("1.5", "integer")),
}


@pytest.mark.parametrize("name", _POLICIES)
def test_policies_are_checked_where_they_are_made(name: str) -> None:
    make, parts = _POLICIES[name]
    with pytest.raises(ValueError) as caught:
        make()
    _says(caught.value, name, *parts)


_SETTERS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "set_requires_grad_sync": (1, TypeError, ("True or False",)),
    "set_requires_all_reduce": ("no", TypeError, ("True or False",)),
    "set_reshard_after_forward": (None, TypeError, ("True or False",)),
    "set_reshard_after_backward": (2, TypeError, ("True or False",)),
    "set_reduce_op_type": ("max", ValueError, ("'max'", "'avg' or 'sum'")),
    "set_gradient_scaling_factor": (0, ValueError, ("not 0",)),
    "set_gradient_divide_factor": (float("inf"), ValueError, ("inf", "finite")),
    "set_all_reduce_hook": (3, TypeError, ("3", "function")),
    "set_modules_to_forward_prefetch": (fully_shard, TypeError, ("list of sharded modules",)),
    "set_modules_to_backward_prefetch": ([nn.Linear(2, 2)], ValueError, ("Linear is not sharded",)),
    "unshard": ("x", TypeError, ("'x'", "True or False")),
    "accumulate": ({"last": 3}, TypeError, ("3", "True or False")),
    "set_replica_reduce": ("ring", TypeError, ("'ring'", "tensor=", "CompressedAllReduce")),
}


@pytest.mark.parametrize("name", _SETTERS)
def test_setters_refuse_what_makes_no_sense_and_change_nothing(world: RankEnv, name: str) -> None:
    value, kind, parts = _SETTERS[name]
    model = shard(MLP(), world.mesh(4))
    before = [copy.copy(unit.settings) for unit in model._units()]
    if value is fully_shard:
        value = shard(nn.Sequential(MLP()), world.mesh(4))  # it may be iterated over, as a list
    with pytest.raises(kind) as caught, contextlib.ExitStack() as stack:
        if isinstance(value, dict):
            stack.enter_context(getattr(model, name)(**value))
        else:
            getattr(model, name)(value)
    _says(caught.value, name, *parts)
    assert [unit.settings for unit in model._units()] == before


def test_a_refused_call_leaves_the_module_as_it_was(world: RankEnv) -> None:
    model = _Counts(torch.complex32)
    before, names = type(model), dict(model.named_parameters())
    with pytest.raises(ValueError):
        fully_shard(model, mesh=world.mesh(4))
    assert type(model) is before
    assert all(param is names[name] for name, param in model.named_parameters())
    assert "_hsdp_state" not in vars(model)
    ignored = [model.inner.table]
    assert fully_shard(model, mesh=world.mesh(4), ignored_params=ignored) is model, "no trace of the refused call"


def test_tensors_without_values_are_refused(world: RankEnv) -> None:
    mesh = world.mesh(4)
    with FakeTensorMode(), pytest.raises(TypeError) as caught:
        fully_shard(MLP(), mesh=mesh)
    _says(caught.value, "FakeTensorMode", r"hsdp\.plan\(")


# -- copies ---------------------------------------------------------------------------------------------------------


def test_copies_and_pickles_are_refused_with_what_to_do(world: RankEnv) -> None:
    model = shard(MLP(), world.mesh(4))
    ways = copy.deepcopy, copy.copy, pickle.dumps, lambda sharded: sharded.share_memory()
    remedies = "before fully_shard", ".", "state_dict", "full_state_dict"
    for copying, remedy in zip(ways, remedies, strict=True):
        with pytest.raises(TypeError) as caught:
            copying(model)
        _says(caught.value, "FSDP", remedy)


def _share_around(env: RankEnv) -> None:
    model = nn.Sequential(nn.Linear(4, 4), hsdp.fully_shard(nn.Linear(4, 4), mesh=env.mesh(2)))
    with pytest.raises(TypeError, match=r"FSDPLinear is sharded and cannot be shared .*full_state_dict"):
        model.share_memory()


def test_sharing_the_memory_of_a_module_around_sharded_ones_is_refused(pool2: Pool) -> None:
    pool2.run(_share_around)


class _Kinds(nn.Linear):
    """Classes below it have to say what they are."""

    def __init_subclass__(cls, *, kind: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)


class _Kind(_Kinds, kind="one"):
    pass


def test_a_module_whose_class_cannot_be_made_is_as_it_was(world: RankEnv) -> None:
    module = _Kind(4, 4)
    before = dict(module.named_parameters())
    for _ in range(2):
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'kind'"):
            hsdp.fully_shard(module)
    assert type(module) is _Kind
    assert all(param is before[name] for name, param in module.named_parameters())


def test_constructing_a_sharded_class_makes_a_plain_module(world: RankEnv) -> None:
    sharded = type(fully_shard(nn.Linear(4, 4), mesh=world.mesh(4)))
    assert sharded.__name__ == "FSDPLinear"
    assert type(sharded(3, 2)) is nn.Linear
    with pytest.raises(TypeError) as caught:
        hsdp.HSDPModule()
    _says(caught.value, "fully_shard")


def test_mesh_none_uses_the_default_group(world: RankEnv) -> None:
    model = fully_shard(nn.Linear(8, 8))
    assert model.weight.device_mesh == init_device_mesh("cpu", (4,)), "without names, as FSDP2's default"
