"""safetensors: what the library alone reads is what the model has, and back into shards from any rank's rows.

With 200 M parameters, on demand: `python -m tests.soak.checkpoint_large`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError
from tests.checkpoint import models as cm
from tests.support.rig import Pool
from tests.support.worker import RankEnv

safetensors = pytest.importorskip("safetensors", reason="an optional extra: pip install 'hsdp[safetensors]'")
from safetensors.torch import load_file, save_file  # noqa: E402

INDEX = "model.safetensors.index.json"
TIED = {"head.weight"}  # left out: it is embedding.weight


def read_by_library(directory: Path) -> dict[str, Tensor]:
    """As Hugging Face's loaders do: the index, then each file by the library alone."""
    if not (directory / INDEX).exists():
        return dict(load_file(directory / "model.safetensors"))
    index = json.loads((directory / INDEX).read_text())
    found: dict[str, Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(directory / name)
        assert all(index["weight_map"][key] == name for key in part)
        found.update(part)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in found.values())
    return found


def export(env: RankEnv | None, shape: cm.Shape, directory: str, max_file_bytes: int, dtype: Any) -> Any:
    model = cm.build(cm.mesh_of(env, shape))
    files = checkpoint.save_safetensors(directory, model, max_file_bytes=max_file_bytes, dtype=dtype)
    return [str(file) for file in files], cm.whole_state(model)


@pytest.mark.parametrize(("name", "max_file_bytes"), [("2x2", 10**9), ("1x4", 700), ("4x1", 1)])
def test_the_library_alone_reads_it_bit_for_bit(pool4: Pool, tmp_path: Path, name: str, max_file_bytes: int) -> None:
    outcomes = pool4.run(export, cm.SHAPES[name], str(tmp_path), max_file_bytes, None)
    files, state = outcomes[0]
    assert all(other[0] == files for other in outcomes)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == sorted(Path(file).name for file in files)
    assert len(files) == {10**9: 1, 1: len(state) - 1}.get(max_file_bytes, len(files))
    cm.assert_equal(read_by_library(tmp_path), {n: value for n, value in state.items() if n not in TIED})


def test_exporting_converts_floating_point_only(tmp_path: Path) -> None:
    _, state = export(None, (), str(tmp_path), 10**9, torch.bfloat16)
    expected = {n: v.bfloat16() if v.is_floating_point() else v for n, v in state.items() if n not in TIED}
    cm.assert_equal(read_by_library(tmp_path), expected)


def test_an_export_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter.safetensors").write_text("somebody's")
    export(None, (), str(tmp_path), 700, None)
    assert (tmp_path / INDEX).exists()
    export(None, (), str(tmp_path), 10**9, None)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["adapter.safetensors", "config.json", "model.safetensors"]


class Killed(BaseException):
    """Stands for the end of the process."""


def filled(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


@pytest.mark.parametrize(("before", "after"), [(80, 80), (40, 80), (80, 40), (80, 10**9), (10**9, 80)])
def test_who_is_killed_while_files_get_their_names_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    checkpoint.save_safetensors(tmp_path / "count", filled(2.0), max_file_bytes=after)
    names = len(list((tmp_path / "count").iterdir()))
    seen: set[Any] = set()
    for survived in range(names):
        directory = tmp_path / str(survived)
        checkpoint.save_safetensors(directory, filled(1.0), max_file_bytes=before)
        left = [survived]
        replace = Path.replace

        def dying(self: Path, target: Path, left: list[int] = left, replace: Any = replace) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return replace(self, target)  # type: ignore[no-any-return]

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", dying)
            with pytest.raises(Killed):
                checkpoint.save_safetensors(directory, filled(2.0), max_file_bytes=after)
        model = filled(0.0)
        try:
            checkpoint.load_safetensors(directory, model)
        except CheckpointError as error:
            seen.add(str(error)[-39:])
        else:
            (value,) = {param.unique().item() for param in model.parameters()}
            seen.add(value)
        checkpoint.save_safetensors(directory, filled(3.0), max_file_bytes=after)
        checkpoint.load_safetensors(directory, model)
        assert all(torch.equal(param, torch.full_like(param, 3.0)) for param in model.parameters())
        assert len(list(directory.iterdir())) == names
    assert seen <= {1.0, 2.0, " files and no model.safetensors.index.json"[-39:]}


def import_on(env: RankEnv | None, shape: cm.Shape, path: str, cast: bool) -> Any:
    model = cm.build(cm.mesh_of(env, shape), seed=8)
    checkpoint.load_safetensors(path, model, cast=cast)
    cm.train(model, cm.two_groups(model), range(1), env.rank if env else 0, env.world_size if env else 1)
    checkpoint.load_safetensors(path, model, cast=cast)
    return cm.whole_state(model)


@pytest.mark.parametrize("name", ["1x4", "2x2", "4x1", "1"])
def test_loading_straight_into_shards(pool4: Pool, tmp_path: Path, name: str) -> None:
    _, state = export(None, (), str(tmp_path), 700, None)
    shape = cm.SHAPES[name]
    found = pool4.run(import_on, shape, str(tmp_path), False)[0] if shape else import_on(None, (), str(tmp_path), False)
    cm.assert_equal(found, state)


def test_files_that_the_library_wrote_load_with_conversion(pool4: Pool, tmp_path: Path) -> None:
    state = cm.whole_state(cm.build(None, seed=4))
    narrow = {n: v.bfloat16() if v.is_floating_point() else v for n, v in state.items()}
    save_file(narrow, tmp_path / "weights.safetensors")  # both tied names are in it
    found = pool4.run(import_on, (2, 2), str(tmp_path / "weights.safetensors"), True)[0]
    cm.assert_equal(found, {n: v.to(state[n].dtype) for n, v in narrow.items()})
    with pytest.raises(CheckpointError, match=r"has dtype BF16 in the files and torch.float64 in the model \(cast=True"):
        checkpoint.load_safetensors(tmp_path, cm.build(None))


def refuse(path: Path, match: str) -> None:
    model = cm.build(None, seed=1)
    before = cm.whole_state(model)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load_safetensors(path, model)
    cm.assert_equal(cm.whole_state(model), before)


def test_misfits_and_damage_are_named_before_anything_changes(tmp_path: Path) -> None:
    state = cm.whole_state(cm.build(None))
    file = tmp_path / "model.safetensors"

    def written(**changes: Any) -> Path:
        save_file({n: v for n, v in {**state, **changes}.items() if v is not None}, file)
        return file

    refuse(written(**{"blocks.0.up.weight": None}), r"the model has 'blocks\.0\.up\.weight', which the files do not have")
    refuse(written(more=torch.zeros(1)), "the files have 'more', which the model does not have")
    refuse(written(shift=torch.zeros(2, 6)), r"'shift' has shape \(2, 6\) in the files and \(1, 6\) in the model")
    refuse(
        written(**{"head.weight": state["head.weight"] + 1}),
        r"'embedding\.weight' and 'head\.weight' are one parameter",
    )

    size = written().stat().st_size
    for keep in (size - 1, size // 2, 9, 8, 3, 0):
        written()
        os.truncate(file, keep)
        refuse(tmp_path, r"model\.safetensors cannot be read")
    rng = random.Random(0)
    header = int.from_bytes(written().read_bytes()[:8], "little")
    for _ in range(30):
        data = bytearray(written().read_bytes())
        data[:8] = (header ^ (1 << rng.randrange(40))).to_bytes(8, "little")
        file.write_bytes(data)
        refuse(file, r"model\.safetensors cannot be read")
    refuse(tmp_path / "nothing.safetensors", r"nothing\.safetensors cannot be read")
    file.unlink()
    refuse(tmp_path, r"has 0 \.safetensors files and no model\.safetensors\.index\.json")

    export(None, (), str(tmp_path), 700, None)
    parts = sorted(tmp_path.glob("*-of-*.safetensors"))
    parts[1].unlink()
    refuse(tmp_path, parts[1].name)
    (tmp_path / INDEX).write_text("{")
    refuse(tmp_path, r"index\.json is damaged")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"shift": "../elsewhere.safetensors"}}))
    refuse(tmp_path, r"index\.json is damaged: weight_map has values that are not plain file names")


def fail_on_one(env: RankEnv, directory: str) -> list[str]:
    """Rank 0 cannot write: the others must not wait for it, and all are told."""
    model = cm.build(env.mesh((1, 2)))
    messages = []
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save_safetensors(f"{directory}/file", model)
    messages.append(str(caught.value))
    if env.rank == 0:
        os.mkdir(f"{directory}/model.safetensors.partial")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save_safetensors(directory, model)
    messages.append(str(caught.value))
    return messages


def test_an_error_in_writing_comes_out_on_all_ranks(pool2: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = pool2.run(fail_on_one, str(tmp_path))
    assert first == second
    assert "FileExistsError" in first[0]
    assert "IsADirectoryError" in first[1]


def test_arguments_and_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cm.build(None)
    with pytest.raises(ValueError, match=r"save_safetensors\(dtype=torch.int32\): expected one of"):
        checkpoint.save_safetensors(tmp_path, model, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"max_file_bytes=0"):
        checkpoint.save_safetensors(tmp_path, model, max_file_bytes=0)
    with pytest.raises(ValueError, match=r"metadata={'step': 5}\): expected strings only"):
        checkpoint.save_safetensors(tmp_path, model, metadata={"step": 5})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=r"'mean' has dtype torch.complex128, which safetensors does not know"):
        model.register_buffer("mean", torch.zeros(2, dtype=torch.complex128))
        checkpoint.save_safetensors(tmp_path, model)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'hsdp\[safetensors\]'"):
        checkpoint.load_safetensors(tmp_path, model)


def test_a_base_model_is_loaded_in_part_and_reported(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    checkpoint.save_safetensors(tmp_path, base, dtype=torch.bfloat16, max_file_bytes=40)  # several files with an index
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "adapter": nn.Linear(4, 2)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = checkpoint.load_safetensors(
        tmp_path, model, strict=False, exclude=["net.1.bias"], rename=lambda name: f"net.{name}", cast=True
    )
    assert report.loaded == ("net.0.weight", "net.0.bias", "net.1.weight") == report.converted
    assert (report.missing, report.skipped) == (("adapter.weight", "adapter.bias"), ("net.1.bias",))
    assert report.left == ("1.bias",)
    for name, value in model.state_dict().items():
        rounded = base.state_dict().get(name.removeprefix("net."), value).bfloat16().float()
        assert torch.equal(value, rounded if name in report.loaded else before[name]), name
    with pytest.raises(CheckpointError, match=r"the model has 'adapter.weight', 'adapter.bias', which the files do not"):
        checkpoint.load_safetensors(tmp_path, model, rename=lambda name: f"net.{name}", cast=True)
    with pytest.raises(CheckpointError, match="nothing of what is to be loaded"):
        checkpoint.load_safetensors(tmp_path, model, strict=False)
    with pytest.raises(TypeError, match="include='net'"):
        checkpoint.load_safetensors(tmp_path, model, include="net")
