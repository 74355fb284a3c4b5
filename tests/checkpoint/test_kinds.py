"""Other optimizers, other values, other names: what fits is loaded, what does not is refused before anything is changed."""

from __future__ import annotations

import collections
import datetime
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import hsdp
from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError, optimizer_schema
from hsdp.checkpoint.settings import merge_groups
from hsdp.optim import local
from tests.checkpoint import models as cm
from tests.checkpoint.test_mismatch import Pair, refuse, saved, step_once
from tests.support.rig import fake_world

Make = Callable[[Any], torch.optim.Optimizer]
O = torch.optim  # noqa: E741

# -- optimizers --------------------------------------------------------------------------------------------------------

KINDS: dict[str, Make] = {
    "Adam": lambda p: O.Adam(p, lr=0.1),
    "AdamW": lambda p: O.AdamW(p, lr=0.1),
    "amsgrad": lambda p: O.AdamW(p, lr=0.1, amsgrad=True),
    "Adamax": lambda p: O.Adamax(p, lr=0.1),
    "NAdam": lambda p: O.NAdam(p, lr=0.1),
    "RAdam": lambda p: O.RAdam(p, lr=0.1),
    "SGD": lambda p: O.SGD(p, lr=0.1),
    "momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: O.RMSprop(p, lr=0.1),
    "centered": lambda p: O.RMSprop(p, lr=0.1, centered=True),
    "Adagrad": lambda p: O.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: O.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: O.Adafactor(p, lr=0.1),
    "Rprop": lambda p: O.Rprop(p, lr=0.1),
    "ASGD": lambda p: O.ASGD(p, lr=0.1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_optimizer_takes_its_own_state_and_no_others(tmp_path: Path, kind: str) -> None:
    model = Pair()
    optimizer = step_once(model, KINDS[kind](model.parameters()))
    path = saved(tmp_path, model, optimizer)
    fresh = KINDS[kind](model.parameters())
    checkpoint.load(path, model, fresh)
    cm.assert_equal(cm.whole_state(model, fresh), cm.whole_state(model, optimizer))
    step_once(model, fresh)
    for other, make in KINDS.items():
        if type(make(model.parameters())) is type(optimizer):
            continue  # their settings are the checkpoint's
        for held in (make(model.parameters()), step_once(model, make(model.parameters()))):
            refuse(path, model, held, rf"of another kind: it is {type(optimizer).__name__}, not {type(held).__name__}")
        del other


@pytest.mark.parametrize(("left", "right"), [("RAdam", "NAdam"), ("Adam", "Adamax"), ("Adam", "RAdam"), ("SGD", "Rprop")])
def test_without_the_name_of_the_class_settings_and_state_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, right: str
) -> None:
    """Checkpoints of other libraries do not say whose state it is."""
    monkeypatch.setattr("hsdp.checkpoint.saving.kind_of", lambda optimizer: None)
    model = Pair()
    path = saved(tmp_path, model, step_once(model, KINDS[left](model.parameters())))
    refuse(path, model, KINDS[right](model.parameters()), "of another kind: only")


def test_a_step_is_tried_once_for_each_shape(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    optimizer = O.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    path = checkpoint.save(tmp_path, model, optimizer, step=1).path
    with mock.patch.object(optimizer_schema, "_made", wraps=optimizer_schema._made) as tried:
        checkpoint.load(path, model, optimizer)
    assert [tuple(call.args[2].shape) for call in tried.call_args_list] == [(3, 3), (3,)]


def test_state_that_the_optimizer_does_not_make_is_refused(tmp_path: Path) -> None:
    model = Pair()
    changes: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda state: state.pop("exp_avg_sq"), "'first.weight' has no 'exp_avg_sq', which AdamW keeps"),
        (lambda state: state.update(more=torch.ones(1)), "'first.weight' has 'more', which AdamW does not keep"),
        (lambda state: state.update(exp_avg=torch.ones(3)), r"has 'exp_avg' of shape \(3,\).*keeps of shape \(4, 4\)"),
        (lambda state: state.update(exp_avg=torch.ones(4, 4, dtype=torch.int64)), r"has 'exp_avg' of torch.int64"),
        (lambda state: state.update(exp_avg="text"), "has 'exp_avg' as a str"),
    ]
    for number, (change, match) in enumerate(changes):
        optimizer = step_once(model, O.AdamW(model.parameters()))
        change(optimizer.state[model.first.weight])
        path = saved(tmp_path / str(number), model, optimizer)
        refuse(path, model, O.AdamW(model.parameters()), match)


@pytest.mark.parametrize("whole", [False, True])
def test_settings_that_users_put_into_groups_are_taken_over(tmp_path: Path, whole: bool) -> None:
    """As PyTorch's `load_state_dict` does; what the checkpoint knows nothing of stays as it is."""
    model = Pair()
    with_own, plain = (step_once(model, O.AdamW(model.parameters())) for _ in range(2))
    with_own.param_groups[0].update(name="decay", scale=2.0)
    for saver, loader in ((with_own, O.AdamW(model.parameters())), (plain, with_own)):
        if whole:
            state = checkpoint.full_optimizer_state_dict(model, saver)
            checkpoint.load_full_optimizer_state_dict(model, loader, state)
        else:
            checkpoint.load(saved(tmp_path, model, saver), model, loader)
        assert (loader.param_groups[0]["name"], loader.param_groups[0]["scale"]) == ("decay", 2.0)


class Scaled(O.Optimizer):
    """An optimizer with a setting that others do not have."""

    def __init__(self, params: Any, **settings: float) -> None:
        super().__init__(params, {"lr": 0.1, **settings})


def test_settings_that_make_the_kind_are_compared(tmp_path: Path) -> None:
    model = Pair()
    path = saved(tmp_path, model, Scaled(model.parameters()))
    refuse(path, model, Scaled(model.parameters(), scale=2.0), r"of another kind: only Scaled has 'scale'")
    path = saved(tmp_path, model, Scaled(model.parameters(), rho=0.5))
    refuse(path, model, Scaled(model.parameters()), r"of another kind: only it has 'rho'")


def _as_of(module: str, cls: type[Any]) -> type[Any]:
    """The class as another module has it that runs the same file."""
    return type(cls.__name__, (cls,), {"__module__": module, "__qualname__": cls.__qualname__})


@pytest.mark.filterwarnings("error")
def test_a_class_is_the_same_by_whatever_module_it_is_found(tmp_path: Path) -> None:
    """A run is saved by a script, and its optimizer's class imported to evaluate it; or wrapped by `hsdp.optim.local`."""
    model = Pair()
    script, imported, moved = (_as_of(name, Scaled) for name in ("__main__", "train", "lib.train"))
    path = saved(tmp_path / "script", model, script(model.parameters(), scale=2.0))
    for make in (imported, moved, script):
        for stepping in (lambda optimizer: optimizer, lambda optimizer: local(optimizer, elementwise=True)):
            optimizer = stepping(make(model.parameters(), scale=1.0))
            checkpoint.load(path, model, optimizer)
            assert optimizer.param_groups[0]["scale"] == 2.0
    path = saved(tmp_path / "imported", model, local(imported(model.parameters()), elementwise=True))
    checkpoint.load(path, model, script(model.parameters()))
    with pytest.warns(UserWarning, match=r"a train.Scaled; lib.train.Scaled is taken for the same class"):
        checkpoint.load(path, model, moved(model.parameters()))
    other = type("Other", (script,), {"__module__": "train"})
    refuse(path, model, other(model.parameters()), "of another kind: it is train.Scaled, not train.Other")
    mine = type("SGD", (O.Optimizer,), {"__module__": "train"})
    path = saved(tmp_path / "mine", model, mine(model.parameters(), {"lr": 0.1}))
    refuse(path, model, O.SGD(model.parameters()), "of another kind: it is train.SGD, not SGD")
    path = saved(tmp_path / "torch", model, O.SGD(model.parameters()))
    refuse(path, model, mine(model.parameters(), {"lr": 0.1}), "of another kind: it is SGD, not train.SGD")


@pytest.mark.parametrize("whole", [False, True])
def test_groups_without_parameters_keep_their_settings(tmp_path: Path, whole: bool) -> None:
    """Of layers that are thawed later, say: schedulers go on with the learning rates that all groups had."""
    model = Pair()

    def make() -> torch.optim.Optimizer:
        return O.AdamW([{"params": list(model.parameters())}, {"params": [], "lr": 0.5}], lr=0.5)

    optimizer, fresh = step_once(model, make()), make()
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.25, 0.125
    if whole:
        state = checkpoint.full_optimizer_state_dict(model, optimizer)
        checkpoint.load_full_optimizer_state_dict(model, fresh, state)
    else:
        checkpoint.load(saved(tmp_path, model, optimizer), model, fresh)
    assert [group["lr"] for group in fresh.param_groups] == [0.25, 0.125]
    more = O.AdamW([{"params": []}, {"params": list(model.parameters())}], lr=0.5)
    checkpoint.load_full_optimizer_state_dict(model, more, checkpoint.full_optimizer_state_dict(model, optimizer))
    assert [group["lr"] for group in more.param_groups] == [0.5, 0.25]


SWITCHED: dict[str, tuple[Make, dict[str, Any]]] = {
    "momentum": (lambda p: O.SGD(p, lr=0.1, momentum=0.9), {"momentum": 0.0}),
    "amsgrad": (lambda p: O.AdamW(p, lr=0.1, amsgrad=True), {"amsgrad": False}),
    "centered": (lambda p: O.RMSprop(p, lr=0.1, centered=True, momentum=0.5), {"centered": False, "momentum": 0}),
}


@pytest.mark.parametrize("kind", SWITCHED)
def test_state_of_settings_that_a_run_has_switched_off_is_loaded(tmp_path: Path, kind: str) -> None:
    """A scheduler of the momentum may end at 0; the buffers of before stay in the optimizer."""
    model = Pair()
    make, off = SWITCHED[kind]
    optimizer = step_once(model, make(model.parameters()))
    optimizer.param_groups[0].update(off)
    path = saved(tmp_path, model, step_once(model, optimizer))
    for other in (make(model.parameters()), optimizer):
        checkpoint.load(path, model, other)
        cm.assert_equal(cm.whole_state(model, other), cm.whole_state(model, optimizer))
        step_once(model, other)
    optimizer.state[model.first.weight]["more"] = torch.ones(4, 4)
    path = saved(tmp_path, model, optimizer)
    refuse(path, model, make(model.parameters()), "has 'more', which .* does not keep")


def test_settings_in_tensors_come_back_on_the_device_of_the_optimizers_own() -> None:
    """The meta device stands for an accelerator; settings are read into host memory."""
    model = Pair()
    own = O.AdamW(model.parameters())
    there = torch.ones((), device="meta")
    own.param_groups[0].update(lr=there, betas=(there, 0.5))
    settings = {**own.param_groups[0], "lr": torch.tensor(0.25), "betas": (torch.tensor(0.5), torch.tensor(0.75))}
    names = [name for name, _ in model.named_parameters()]
    with torch.inference_mode():
        (merged,) = merge_groups(own, [names], [(names, settings)])
    assert merged["lr"].is_meta and not merged["lr"].is_inference()
    assert merged["betas"][0].is_meta and merged["betas"][1] == 0.75 and type(merged["betas"][1]) is float


SCHEDULERS: list[Callable[[Any], object]] = [
    lambda optimizer: O.lr_scheduler.StepLR(optimizer, 5),
    lambda optimizer: O.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
    lambda optimizer: O.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
    lambda optimizer: O.swa_utils.SWALR(optimizer, swa_lr=0.05),
]


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_a_scheduler_may_be_made_before_or_after_a_load(tmp_path: Path, schedule: Callable[[Any], object]) -> None:
    model = Pair()
    bare, scheduled = (step_once(model, O.SGD(model.parameters(), lr=0.1, momentum=0.9)) for _ in range(2))
    schedule(scheduled)
    path = saved(tmp_path / "scheduled", model, scheduled)
    checkpoint.load(saved(tmp_path / "bare", model, bare), model, scheduled)
    checkpoint.load(path, model, bare)
    assert "initial_lr" in bare.param_groups[0]


# -- values ------------------------------------------------------------------------------------------------------------


def values() -> dict[str, Any]:
    numpy = pytest.importorskip("numpy")
    counts: Any = collections.defaultdict(list, {"a": [1]})
    return {
        "none": None,
        "numbers": [True, 3, -(2**70), 1.5, float("inf"), 2 + 3j],
        "text": "grüße\ud800",
        "bytes": [b"ab\x00", bytearray(b"c")],
        "tuple": (1, (2,), ()),
        "dict": {1: "a", "1": "b", (1, "x"): None, None: 3},
        "sets": [{1, 2}, frozenset({"x"}), set()],
        "range": [range(1, 9, 2), slice(None, 3)],
        "path": [Path("a/b"), PurePosixPath("/c")],
        "dates": [
            datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc),
            datetime.date(2020, 1, 1),
            datetime.time(3, 4),
            datetime.timedelta(days=-1, microseconds=5),
        ],
        "collections": [collections.deque([1, 2], maxlen=5), collections.OrderedDict(b=1, a=2), collections.Counter("aab")],
        "defaultdict": counts,
        "numpy": [numpy.float64(1.5), numpy.int8(-3), numpy.str_("x"), numpy.bool_(True), numpy.datetime64("2020-01-01")],
        "torch": [torch.float32, torch.Size([2, 3]), torch.device("cpu")],
    }


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    extra = values()
    checkpoint.save(tmp_path, model, extra=extra, step=1)
    found = checkpoint.load(tmp_path, model).extra
    assert found == extra
    assert repr(found) == repr(extra)  # types too
    assert found["defaultdict"]["new"] == []
    assert found["collections"][0].maxlen == 5


def test_arrays_and_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    model = nn.Linear(2, 2)
    arrays = [numpy.arange(6.0).reshape(2, 3).T, numpy.array(["a", "bcd"]), numpy.zeros((0, 3), "int16"), numpy.array(3)]
    arrays += [numpy.array(["", ""]), numpy.array([], "U3")]
    dtypes = [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
    tensors = [torch.ones(2, 3).to(dtype) for dtype in dtypes] + [torch.ones(()), torch.ones(0, 2), torch.arange(6)[::2]]
    scalars = [numpy.str_(""), numpy.bytes_(b""), numpy.str_("ab"), numpy.float32(0.5)]
    extra = {"a": arrays, "t": tensors, "p": nn.Parameter(torch.ones(1)), "s": scalars}
    checkpoint.save(tmp_path, model, extra=extra, step=1)
    found = checkpoint.load(tmp_path, model).extra
    assert found["s"] == scalars and list(map(type, found["s"])) == list(map(type, scalars))
    for array, other in zip(arrays, found["a"], strict=True):
        assert array.dtype == other.dtype and array.shape == other.shape and (array == other).all()
    for tensor, other in zip(tensors, found["t"], strict=True):
        assert tensor.dtype == other.dtype and tensor.shape == other.shape
        assert tensor.contiguous().view(-1).view(torch.uint8).equal(other.view(-1).view(torch.uint8))
    assert isinstance(found["p"], nn.Parameter)


def deep() -> Any:
    value: Any = []
    for _ in range(5000):
        value = [value]
    return value


def test_what_cannot_be_saved_is_named_with_its_type(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    model = nn.Linear(2, 2)
    cases: list[tuple[Any, str]] = [
        ({"a": [1, {"b": object()}]}, r"extra\['a'\]\[1\]\['b'\]\" is a builtins.object, which cannot be saved"),
        ({"f": len}, r"extra\['f'\]\" is a builtins.builtin_function_or_method"),
        ({"m": model}, r"extra\['m'\]\" is a torch.nn.modules.linear.Linear"),
        ({"o": numpy.array([object()])}, r"extra\['o'\]\" is a numpy.ndarray of dtype object"),
        ({"s": torch.ones(2).to_sparse()}, r"extra\['s'\]\" is a Tensor \(torch.sparse_coo"),
        ({"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, r"extra\['q'\]\" is a Tensor .*torch.qint8"),
        (deep(), "is nested more than 100 deep"),
        ({object(): 1}, r"'a key of extra' is a builtins.object"),
    ]
    for extra, match in cases:
        with pytest.raises(CheckpointError, match=match):
            checkpoint.save(tmp_path, model, extra=extra, step=1)


@pytest.mark.parametrize("where", ["buffer", "state"])
def test_tensors_around_others_are_refused_by_name(tmp_path: Path, where: str) -> None:
    """They have no memory of their own: to write it would end the process."""
    around = TwoTensor(torch.ones(2), torch.zeros(2))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if where == "buffer":
        model.register_buffer("table", around)
    else:
        optimizer.state[model.bias]["table"] = around
    for async_ in (False, True):
        with pytest.raises((TypeError, CheckpointError), match=r"'table'.* TwoTensor"):
            checkpoint.save(tmp_path, model, optimizer, step=1, async_=async_)


def _freed() -> Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("make", [_freed, lambda: torch._efficientzerotensor((2,))], ids=["freed", "zeros"])
def test_tensors_without_memory_are_refused_by_name(tmp_path: Path, make: Callable[[], Tensor]) -> None:
    """What lies at address 0 was saved in their place, or the process ended."""
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, model, extra=torch.empty(0), step=1)
    with pytest.raises(CheckpointError, match=r"extra\['t'\].* has 2 elements and no memory"):
        checkpoint.save(tmp_path, model, extra={"t": make()}, step=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.bias]["momentum_buffer"] = make()
    with pytest.raises(CheckpointError, match=r"'momentum_buffer' of .* has 2 elements and no memory"):
        checkpoint.full_optimizer_state_dict(model, optimizer)
    model.register_buffer("table", make())
    calls: list[Callable[[], object]] = [
        lambda: checkpoint.save(tmp_path, model, step=2, async_=True),
        lambda: checkpoint.load(tmp_path, model),
        lambda: checkpoint.full_state_dict(model),
        lambda: checkpoint.save_safetensors(tmp_path / "export", model),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match="'table' has 2 elements and no memory"):
            call()


def test_a_learning_rate_that_is_a_tensor_is_saved_as_it_was() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), betas=(torch.tensor(0.5), torch.tensor(0.75)))
    saved = checkpoint.full_optimizer_state_dict(model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(1.0)
    optimizer.param_groups[0]["betas"][0].fill_(1.0)
    assert saved["param_groups"][0]["lr"] == 0.25
    assert saved["param_groups"][0]["betas"] == (0.5, 0.75)


def test_a_quantized_buffer_is_left_alone_and_not_saved(tmp_path: Path) -> None:
    with fake_world(2):
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
        hsdp.fully_shard(model)
    with pytest.raises(CheckpointError, match="'table' of the model is quantized"):
        checkpoint.save(tmp_path, model, step=1)


@pytest.mark.parametrize(
    ("buffer", "match"),
    [
        (
            torch.eye(2).to_sparse(),
            r"'table' of the model is a tensor of layout torch.sparse_coo, .*keep its parts as dense",
        ),
        (
            torch.zeros(2, dtype=torch.uint8).view(torch.int4),
            r"'model.table' has dtype torch.int4, .*view of dtype torch.uint8",
        ),
    ],
)
def test_a_tensor_of_a_kind_that_cannot_be_saved_is_named(tmp_path: Path, buffer: Tensor, match: str) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", buffer)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.save(tmp_path, model, step=1)


def test_a_parameter_without_a_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'weight' of the model has no shape yet; run the model once"):
        checkpoint.save(tmp_path, nn.LazyLinear(2), step=1)


# -- parts of a checkpoint -----------------------------------------------------------------------------------------------


class Tuned(Pair):
    """The base model, with an adapter beside one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(4, 2)


def test_a_base_model_goes_into_one_with_more(tmp_path: Path) -> None:
    base, model = Pair(), Tuned()
    path = saved(tmp_path, base)
    adapter = model.adapter.weight.clone()
    with pytest.raises(CheckpointError, match=r"the model has 'adapter.weight', 'adapter.bias', which the checkpoint"):
        checkpoint.load(path, model)
    report = checkpoint.load(path, model, strict=False).report
    assert report.missing == ("adapter.weight", "adapter.bias")
    assert torch.equal(model.first.weight, base.first.weight) and torch.equal(model.adapter.weight, adapter)
    assert set(report.loaded) == set(base.state_dict())

    report = checkpoint.load(saved(tmp_path / "tuned", model), base, strict=False).report
    assert set(report.left) == {"adapter.weight", "adapter.bias"}
    with pytest.raises(CheckpointError, match="has nothing of what is to be loaded"):
        checkpoint.load(path, nn.Linear(9, 9), strict=False)


def test_include_exclude_and_rename(tmp_path: Path) -> None:
    source, model = Pair(), Pair()
    path = saved(tmp_path, source)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = checkpoint.load(path, model, include=["first.*"], exclude=["*.bias"]).report
    assert report.loaded == ("first.weight",)
    assert set(report.skipped) == {"first.bias", "second.weight", "second.bias", "mean"}
    cm.assert_equal(dict(model.state_dict()), {**before, "first.weight": source.first.weight.detach()})

    swap = {"first.weight": "second.weight", "second.weight": "first.weight"}
    checkpoint.load(path, model, rename=swap)
    assert torch.equal(model.second.weight, source.first.weight)
    report = checkpoint.load(
        path,
        model,
        rename=lambda n: None if n == "mean" else n.replace("first", "x").replace("second", "first"),
        strict=False,
    ).report
    assert torch.equal(model.first.bias, source.second.bias)
    assert set(report.left) == {"mean", "first.weight", "first.bias"}
    with pytest.raises(CheckpointError, match="makes 'a' of both"):
        checkpoint.load(path, model, rename=lambda name: "a")
    with pytest.raises(ValueError, match="an optimizer is loaded with all of its model or not at all"):
        checkpoint.load(path, model, O.SGD(model.parameters()), strict=False)
    with pytest.raises(TypeError, match=r"include='first\.\*'\): expected a list"):
        checkpoint.load(path, model, include="first.*")


def test_other_dtypes_are_refused_unless_cast_is_on(tmp_path: Path) -> None:
    source = Pair()
    path = saved(tmp_path, source)
    model = Pair().bfloat16()
    with pytest.raises(CheckpointError, match="cast=True converts floating point"):
        checkpoint.load(path, model)
    report = checkpoint.load(path, model, cast=True).report
    assert torch.equal(model.first.weight, source.first.weight.bfloat16())
    assert set(report.converted) == set(source.state_dict())


class Doubling(nn.Linear):
    """A module that changes what is loaded: reading past it would be wrong."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_modules_that_change_what_is_loaded_still_do(tmp_path: Path) -> None:
    source = nn.Sequential(Doubling(2, 2))
    path = saved(tmp_path, source)
    model = nn.Sequential(Doubling(2, 2))
    checkpoint.load(path, model)
    assert torch.equal(model[0].weight, source[0].weight * 2)


class Lazy(nn.Module):
    """Buffers whose memory does not hold their values: torch negates what is read of them."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("conjugate", values.conj())
        self.register_buffer("negative", values.clone().conj().imag)


def test_tensors_that_are_conjugated_or_negated_as_they_are_read(tmp_path: Path) -> None:
    """What lies in memory is the other sign; it was written and read as if it were the value."""
    first, second = (Lazy(torch.randn(3, dtype=torch.complex64)) for _ in range(2))
    expected = {name: value.clone() for name, value in first.state_dict().items()}
    assert first.conjugate.is_conj()
    assert first.negative.is_neg()
    for async_ in (False, True):
        checkpoint.save(tmp_path, first, extra=[first.conjugate, first.negative], step=1, async_=async_).wait()
        for target in (second, Lazy(torch.zeros(3, dtype=torch.complex64)), first):
            extra = checkpoint.load(tmp_path, target).extra
            cm.assert_equal(dict(target.state_dict()), expected)
            assert torch.equal(extra[0], expected["conjugate"])
            assert torch.equal(extra[1], expected["negative"])
