"""A checkpoint that does not fit: errors name what differs, and nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hsdp import checkpoint, full_params, fully_shard
from hsdp.checkpoint import CheckpointError
from tests.checkpoint import models as cm
from tests.support.rig import Pool
from tests.support.worker import RankEnv


class Pair(nn.Module):
    """Two layers and a buffer; `tied`: the layers are one."""

    def __init__(self, tied: bool = False, **shape: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, shape.get("out", 4))
        self.register_buffer("mean", torch.zeros(2))
        if tied:
            self.second = self.first


def no_buffer() -> nn.Module:
    model = Pair()
    del model.mean
    return model


def renamed() -> nn.Module:
    model = Pair()
    model.third = model.second
    del model.second
    return model


class WithExtraState(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.note: Any = {"calls": 3, "scale": [torch.ones(2), {"amax": 1.5}]}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def saved(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Path:
    return checkpoint.save(directory, model, optimizer, step=1).path


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


CASES: list[tuple[str, Callable[[], nn.Module], Callable[[], nn.Module], str]] = [
    ("missing", no_buffer, Pair, "the model has 'mean', which the checkpoint does not have"),
    ("unexpected", Pair, no_buffer, "the checkpoint has 'mean', which the model does not have"),
    ("renamed", Pair, renamed, "the model has 'third.weight', 'third.bias'.*the checkpoint has 'second.weight'"),
    (
        "shape",
        Pair,
        lambda: Pair(out=5),
        r"'second.weight' has shape \(4, 4\) in the checkpoint and \(5, 4\) in the model.*'second.bias' has shape",
    ),
    (
        "dtype",
        Pair,
        lambda: Pair().double(),
        "'first.weight' has dtype torch.float32 in the checkpoint and torch.float64",
    ),
    ("tied", Pair, lambda: Pair(tied=True), "different values for 'first.weight' and 'second.weight', which are one"),
    (
        "kind",
        WithExtraState,
        Pair,
        "the checkpoint has '_extra_state.calls', '_extra_state.scale.1.amax', '_extra_state.scale.0', which the model",
    ),
    ("meta", Pair, lambda: Pair().to("meta"), "'mean' of the model is on the meta device; call model.to_empty"),
]


@pytest.mark.parametrize(("source", "target", "match"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_model_that_differs_is_refused_and_unchanged(
    tmp_path: Path, source: Callable[[], nn.Module], target: Callable[[], nn.Module], match: str
) -> None:
    path = saved(tmp_path, source())
    model = target()
    before = {name: value.clone() for name, value in model.state_dict().items()} if match[-8:] != "to_empty" else {}
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(path, model)
    if before:
        cm.assert_equal(dict(model.state_dict()), before)


def test_extra_state_of_modules_comes_back(tmp_path: Path) -> None:
    for note in ({"calls": 3, "scale": [torch.ones(2), {"amax": 1.5}]}, "text", torch.arange(5), None):
        model = WithExtraState()
        model.note = note
        path = saved(tmp_path, model)
        model.note = {"of": "another shape"}
        checkpoint.load(path, model)
        if isinstance(note, dict):
            assert torch.equal(model.note["scale"].pop(0), note["scale"].pop(0))
        assert torch.equal(model.note, note) if isinstance(note, torch.Tensor) else model.note == note


class Compiled(nn.Module):
    """Names as torch.compile makes them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_a_compiled_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    plain, other = Pair(), Pair()
    path = saved(tmp_path, Compiled(plain), step_once(plain, torch.optim.AdamW(plain.parameters())))
    optimizer = torch.optim.AdamW(other.parameters())
    checkpoint.load(path, other, optimizer)
    cm.assert_equal(dict(other.state_dict()), dict(plain.state_dict()))
    checkpoint.load(path, Compiled(other), optimizer)


def refuse(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, match: str) -> None:
    before = cm.whole_state(model, optimizer)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(path, model, optimizer)
    cm.assert_equal(cm.whole_state(model, optimizer), before)


def test_optimizers_that_differ(tmp_path: Path) -> None:
    model = Pair()
    adamw = step_once(model, torch.optim.AdamW(model.parameters()))
    path = saved(tmp_path / "adamw", model, adamw)
    bare = saved(tmp_path / "bare", model)

    refuse(bare, model, adamw, "has no optimizer state; load it with optimizer=None")
    checkpoint.load(path, model)  # and the other way round nothing is wrong

    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    refuse(path, model, sgd, r"of another kind: it is AdamW, not SGD")

    part = torch.optim.AdamW(model.first.parameters())
    refuse(path, model, part, "'second.weight', 'second.bias', which the optimizer does not have; make it from all")

    foreign = torch.optim.AdamW(Pair().parameters())
    refuse(path, model, foreign, r"parameter 0 of the optimizer's group 0, of shape \(4, 4\), is not one of the model's")
    with pytest.raises(CheckpointError, match=r"is not one of the model's; make the optimizer from model\.parameters"):
        saved(tmp_path / "foreign", model, foreign)

    only_first = saved(tmp_path / "part", model, step_once(model, torch.optim.AdamW(model.first.parameters())))
    refuse(only_first, model, adamw, "does not know 'second.weight', 'second.bias' of the optimizer's group 0")


def test_an_optimizer_of_what_is_trained_by_now(tmp_path: Path) -> None:
    """As the message above advises: it is made of all, loaded, and then gives up what is frozen."""
    model = Pair()
    path = saved(tmp_path / "all", model, step_once(model, torch.optim.AdamW(model.parameters())))
    model.first.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.load(path, model, optimizer)
    (group,) = optimizer.param_groups
    group["params"] = list(model.second.parameters())
    for param in model.first.parameters():
        del optimizer.state[param]
    part = torch.optim.AdamW(model.second.parameters())
    checkpoint.load(saved(tmp_path / "part", model, optimizer), model, part)
    assert {int(state["step"]) for state in part.state.values()} == {1}


def test_state_of_weights_that_are_tied_by_now_names_the_tie(tmp_path: Path) -> None:
    models = [Pair(), Pair(tied=True)]
    with torch.no_grad():
        for mine, other in zip(models[0].second.parameters(), models[0].first.parameters(), strict=True):
            mine.copy_(other)  # the loss of a tie left equal values
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0) for model in models]
    (models[0].first(torch.ones(1, 4)) + models[0].second(torch.ones(1, 4))).sum().backward()
    optimizers[0].step()
    path = checkpoint.save(tmp_path, models[0], optimizers[0], step=1).path
    message = "'second.weight', which in this model is tied to 'first.weight'.*Untie them before fully_shard"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, models[1], optimizers[1])
    checkpoint.load(path, models[1])


def test_an_optimizer_goes_on_in_a_model_that_has_grown(tmp_path: Path) -> None:
    """As `load` advises who asks it for a part of an optimizer."""
    base, model = Pair(), Pair()
    path = saved(tmp_path, base, step_once(base, torch.optim.AdamW(base.parameters(), lr=0.5)))
    model.third = nn.Linear(4, 4)
    old = [param for name, param in model.named_parameters() if not name.startswith("third")]
    optimizer = torch.optim.AdamW(old)
    with pytest.raises(ValueError, match=r"a model that has grown.*full_optimizer_state_dict.*add_param_group"):
        checkpoint.load(path, model, optimizer, strict=False)
    held = torch.optim.AdamW(base.parameters())
    checkpoint.load(path, base, held)
    checkpoint.load(path, model, strict=False)
    checkpoint.load_full_optimizer_state_dict(model, optimizer, checkpoint.full_optimizer_state_dict(base, held))
    optimizer.add_param_group({"params": list(model.third.parameters())})
    step_once(model, optimizer)
    assert [int(optimizer.state[param]["step"]) for param in model.parameters()] == [2, 2, 2, 2, 1, 1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-3]


def test_groups_may_be_cut_otherwise_unless_their_settings_differ(tmp_path: Path) -> None:
    def grouped(model: Pair, decay: float) -> torch.optim.Optimizer:
        groups = [
            {"params": model.second.parameters(), "weight_decay": decay},
            {"params": model.first.parameters()},
        ]
        return step_once(model, torch.optim.AdamW(groups, lr=0.5, weight_decay=0.1))

    model = Pair()
    same = saved(tmp_path / "same", model, grouped(model, 0.1))
    other = saved(tmp_path / "other", model, grouped(model, 0.0))
    joined = torch.optim.AdamW(model.parameters(), lr=3.0)
    checkpoint.load(same, model, joined)
    assert joined.param_groups[0]["lr"] == 0.5
    assert joined.state[model.second.bias]["step"] == 1
    refuse(other, model, joined, "'first.weight' and 'second.weight' together.*groups that differ in 'weight_decay'")


@pytest.mark.parametrize("marked", ["first", "second"])
def test_a_setting_that_one_of_the_joined_groups_has_alone_is_a_difference(tmp_path: Path, marked: str) -> None:
    """It was taken over for all of them if it was that of the first."""
    model = Pair()
    groups: list[dict[str, Any]] = [{"params": part.parameters()} for part in (model.first, model.second)]
    groups[marked == "second"]["lr_scale"] = 10.0
    path = saved(tmp_path, model, step_once(model, torch.optim.SGD(groups, lr=0.5)))
    joined = torch.optim.SGD(model.parameters(), lr=3.0)
    refuse(path, model, joined, "'first.weight' and 'second.weight' together.*groups that differ in 'lr_scale'")


def test_state_keeps_its_dtype(tmp_path: Path) -> None:
    # torch's Optimizer.load_state_dict casts state to the parameter's dtype: moments in fp32 would be rounded to bf16.
    def with_fp32_moments() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Pair().bfloat16()
        optimizer = step_once(model, torch.optim.AdamW(model.parameters()))
        for state in optimizer.state.values():
            state["exp_avg"] = torch.rand(state["exp_avg"].shape)
        return model, optimizer

    model, optimizer = with_fp32_moments()
    path = saved(tmp_path, model, optimizer)
    other = Pair().bfloat16()
    fresh = torch.optim.AdamW(other.parameters())
    checkpoint.load(path, other, fresh)
    cm.assert_equal(cm.whole_state(other, fresh), cm.whole_state(model, optimizer))


def test_narrow_state_stays_narrow_where_weights_keep_their_dtype(tmp_path: Path) -> None:
    def with_narrow_momentum() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Pair()
        optimizer = step_once(model, torch.optim.NAdam(model.parameters()))
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16()
        return model, optimizer

    model, optimizer = with_narrow_momentum()
    path = saved(tmp_path, model, optimizer)
    other = Pair()
    fresh = torch.optim.NAdam(other.parameters())
    checkpoint.load(path, other, fresh)
    cm.assert_equal(cm.whole_state(other, fresh), cm.whole_state(model, optimizer))


class LocalState(torch.optim.Optimizer):
    """Somebody's own optimizer, with state of any dtype."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"half": param.bfloat16(), "signs": param > 0, "codes": param.to(torch.int8)}


@pytest.mark.parametrize("becomes", [torch.float32, torch.float64])
def test_state_of_others_optimizers_keeps_every_dtype(tmp_path: Path, becomes: torch.dtype) -> None:
    model = Pair()
    path = saved(tmp_path, model, step_once(model, LocalState(model.parameters())))
    other = Pair().to(becomes)
    fresh = LocalState(other.parameters())
    checkpoint.load(path, other, fresh, cast=True)
    found = {name: value.dtype for state in fresh.state.values() for name, value in state.items()}
    assert found == {"half": torch.bfloat16, "signs": torch.bool, "codes": torch.int8}


@pytest.mark.parametrize(("was", "becomes"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.RMSprop])
def test_state_follows_converted_weights(
    tmp_path: Path, was: torch.dtype, becomes: torch.dtype, optimizer_class: type[torch.optim.Optimizer]
) -> None:
    model = Pair().to(was)
    optimizer = step_once(model, optimizer_class(model.parameters(), lr=0.01))
    path = saved(tmp_path, model, optimizer)
    other = Pair().to(becomes)
    fresh = optimizer_class(other.parameters(), lr=0.01)
    assert checkpoint.load(path, other, fresh, cast=True).report.converted
    dtypes = {value.dtype for state in fresh.state.values() for name, value in state.items() if name != "step"}
    assert dtypes == {becomes}
    step_once(other, fresh)


def test_whole_state_is_never_narrower_than_its_parameter() -> None:
    model = Pair().bfloat16()
    state = checkpoint.full_optimizer_state_dict(model, step_once(model, torch.optim.AdamW(model.parameters())))
    wide = Pair()
    fresh = torch.optim.AdamW(wide.parameters())
    checkpoint.load_full_optimizer_state_dict(wide, fresh, state)
    assert fresh.state[wide.first.weight]["exp_avg"].dtype is torch.float32
    step_once(wide, fresh)


class Scalar(nn.Module):
    """Parameters without dims alone, whose moments look like counts of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def scalar_state_follows(env: RankEnv | None, directory: str) -> None:
    dtypes = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "step": torch.float32, "mu_product": torch.float32}
    for number, kind in enumerate((torch.optim.AdamW, torch.optim.NAdam)):

        def build(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
            model: nn.Module = Scalar().to(dtype)
            if env is not None:
                fully_shard(model, mesh=env.mesh((1, 2)))
            return model, kind(model.parameters(), lr=0.1)

        def check(model: nn.Module, optimizer: torch.optim.Optimizer, wanted: dict[str, torch.dtype]) -> None:
            for state in optimizer.state.values():
                assert {name: value.dtype for name, value in state.items()} == {name: wanted[name] for name in state}
            step_once(model, optimizer)

        model, optimizer = build(torch.float32)
        step_once(model, optimizer)
        path = checkpoint.save(f"{directory}/{number}", model, optimizer, step=1).path
        narrow, fresh = build(torch.bfloat16)
        checkpoint.load(path, narrow, fresh, cast=True)
        check(narrow, fresh, dtypes)
        whole = checkpoint.full_optimizer_state_dict(narrow, fresh)
        wide, fresh = build(torch.float32)
        checkpoint.load_full_optimizer_state_dict(wide, fresh, whole)
        check(wide, fresh, dict.fromkeys(dtypes, torch.float32))


def test_state_of_parameters_without_dims_follows_converted_weights(pool2: Pool, tmp_path: Path) -> None:
    scalar_state_follows(None, str(tmp_path / "alone"))
    pool2.run(scalar_state_follows, str(tmp_path / "sharded"))


class OwnRows(torch.optim.Optimizer):
    """Somebody's optimizer that steps local tensors, and keeps `kept` of each beside it."""

    def __init__(self, params: Any, kept: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kept = kept

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"sum": torch.zeros_like(param), "kept": self.kept(param)}


KEPT: dict[str, Callable[[Any], Any]] = {
    "kept": lambda param: torch.ones_like(param.to_local()),
    "kept.inner": lambda param: {"inner": torch.ones_like(param.to_local())},
}
FINE: list[Callable[[Any], Any]] = [
    torch.zeros_like,
    lambda param: torch.zeros(param.shape),
    lambda param: torch.zeros(7),
    lambda param: torch.tensor(1.0),
]


def keep_own_rows(env: RankEnv, directory: str, shape: tuple[int, ...], rows: int) -> list[str]:
    """With fewer rows than ranks, some have none, and with one row, one rank has what looks like the whole."""
    model = fully_shard(nn.Linear(3, rows, bias=False), mesh=env.mesh(shape))
    messages = []
    for entry, kept in KEPT.items():
        optimizer = step_once(model, OwnRows(model.parameters(), kept))
        for call in (
            lambda: checkpoint.save(directory, model, optimizer, step=1),
            lambda: checkpoint.full_optimizer_state_dict(model, optimizer),
            lambda: checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False),
        ):
            with pytest.raises(CheckpointError, match=rf"entry '{entry}' of the optimizer's state of 'weight'") as caught:
                call()
            messages.append(str(caught.value))
    for kept in FINE:
        checkpoint.full_optimizer_state_dict(model, step_once(model, OwnRows(model.parameters(), kept)))
    return messages


def keep_empty(env: RankEnv, directory: str) -> None:
    """The bias has one row, so that what the others hold of it is empty, too."""
    model = fully_shard(nn.Linear(3, 1), mesh=env.mesh((1, 2)))
    optimizer = step_once(model, OwnRows(model.parameters(), lambda param: torch.zeros(0)))
    for param in model.parameters():
        optimizer.state[param]["sum"] += 3.0
    path = checkpoint.save(directory, model, optimizer, step=1).path
    loaded = step_once(model, OwnRows(model.parameters(), lambda param: torch.zeros(0)))
    checkpoint.load(path, model, loaded)
    whole = checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert whole["state"]["bias"]["kept"].shape == (0,) and whole["state"]["bias"]["sum"].tolist() == [3.0]
    for param in model.parameters():
        kept, total = loaded.state[param]["kept"], loaded.state[param]["sum"]
        assert type(kept) is torch.Tensor and kept.shape == (0,)
        assert torch.equal(total.to_local(), torch.full_like(param.to_local(), 3.0))


def test_an_empty_tensor_in_the_place_of_state_is_no_ranks_own_rows(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(keep_empty, str(tmp_path))


@pytest.mark.parametrize(("shape", "rows"), [((1, 4), 8), ((2, 2), 5), ((1, 4), 2), ((2, 2), 1)])
def test_plain_state_of_a_ranks_own_rows_is_refused_by_all(
    pool4: Pool, tmp_path: Path, shape: tuple[int, ...], rows: int
) -> None:
    first, *others = pool4.run(keep_own_rows, str(tmp_path), shape, rows)
    assert all(other == first for other in others)
    assert all("keep such state as DTensors, torch.zeros_like(param)" in text for text in first)


def test_a_learning_rate_in_a_tensor(tmp_path: Path) -> None:
    model = Pair()
    path = saved(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25)))
    plain = torch.optim.AdamW(model.parameters(), lr=1.0)
    checkpoint.load(path, model, plain)
    assert plain.param_groups[0]["lr"] == 0.25
    assert isinstance(plain.param_groups[0]["lr"], float)
    held = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1.0))
    checkpoint.load(path, model, held)
    assert torch.equal(held.param_groups[0]["lr"], torch.tensor(0.25))


def save_from_hooks(env: RankEnv, directory: str) -> list[str]:
    model = cm.build(env.mesh((1, 2)))
    optimizer = cm.two_groups(model)
    messages: list[str] = []

    def refused(*_: Any) -> None:
        for call in (
            lambda: checkpoint.save(directory, model, optimizer, step=1),
            lambda: checkpoint.full_optimizer_state_dict(model, optimizer),
        ):
            with pytest.raises(CheckpointError) as caught:
                call()
            messages.append(str(caught.value))

    model.blocks[0].up.register_forward_hook(refused)
    cm.train(model, optimizer, range(1), env.rank, env.world_size)
    with full_params(model):
        refused()
    checkpoint.save(directory, model, optimizer, step=1)
    return messages


def test_a_call_at_the_wrong_moment_is_told_so(pool2: Pool, tmp_path: Path) -> None:
    for told in pool2.run(save_from_hooks, str(tmp_path)):
        states = [re.search(r"the unit is (\w+) \(.*between iterations", text) for text in told]
        assert {found[1] for found in states if found} == {"FORWARD", "FULL_PARAMS"}, told
        assert all(states)


def load_misfit(env: RankEnv, path: str) -> str:
    model = cm.build(env.mesh((1, 2)), seed=2)
    # Each rank sees the same difference; one rank that alone is wrong must not leave the other waiting.
    if env.rank == 1:
        model.register_buffer("mine", torch.zeros(1))
    before = cm.whole_state(model)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, model)
    cm.assert_equal(cm.whole_state(model), before)
    return str(caught.value)


def test_a_difference_on_one_rank_is_an_error_on_all(pool2: Pool, tmp_path: Path) -> None:
    path = saved(tmp_path, cm.build(None))
    results = pool2.run(load_misfit, str(path))
    assert results[0] == results[1]
    assert "on rank 1: checkpoint" in results[0]
    assert "the model has 'mine', which the checkpoint does not have" in results[0]


def test_an_extra_state_that_does_not_fit_together_is_found_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = WithExtraState(), WithExtraState()
    monkeypatch.setattr("hsdp.checkpoint.saving.listed", lambda state: {})  # as earlier versions, and other libraries
    monkeypatch.setattr("hsdp.checkpoint.models._path_below", lambda *args: ("a",) if "calls" in args[1] else ("a", "b"))
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(CheckpointError, match="has a part of a module's extra state, or of the optimizer's, twice"):
        checkpoint.load(saved(tmp_path, source), model)
    cm.assert_equal({name: value.detach() for name, value in model.named_parameters()}, before)
