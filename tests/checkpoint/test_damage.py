"""Truncated, bit-flipped, missing and foreign files: always an error that names the file, and the model as it was."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError, reading
from hsdp.checkpoint.index import check_tiling, from_dcp
from hsdp.checkpoint.lock import LOCK
from hsdp.checkpoint.objects import unpack
from hsdp.params.shard_geometry import Box
from tests.checkpoint import models as cm
from tests.support.rig import Pool
from tests.support.worker import RankEnv

FILES = [".metadata", "__0_0.distcp", "extra.bin", "index.json", "manifest.json"]


def save_whole(directory: Path) -> Path:
    """A checkpoint of one process."""
    model = cm.build(None)
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, range(2))
    return checkpoint.save(directory, model, optimizer, {"note": "kept"}, step=2).path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole(tmp_path_factory.mktemp("whole"))


class Target:
    """A model that must not change, and that a good checkpoint loads into."""

    def __init__(self, whole: Path, tmp_path: Path) -> None:
        self.path = tmp_path / "step-000002"
        shutil.copytree(whole, self.path)
        self.model = cm.build(None, seed=7)
        self.optimizer = cm.two_groups(self.model)
        cm.train(self.model, self.optimizer, range(1))
        self.before = cm.whole_state(self.model, self.optimizer)

    def must_refuse(self, match: str = "", **kwargs: Any) -> str:
        with pytest.raises(CheckpointError, match=match) as caught:
            checkpoint.load(self.path, self.model, self.optimizer, **kwargs)
        cm.assert_equal(cm.whole_state(self.model, self.optimizer), self.before)
        return str(caught.value)


@pytest.fixture
def target(whole: Path, tmp_path: Path) -> Target:
    return Target(whole, tmp_path)


def test_what_is_not_damaged_loads(target: Target, whole: Path) -> None:
    assert checkpoint.load(target.path, target.model, target.optimizer).extra == {"note": "kept"}
    assert checkpoint.verify(whole.parent).step == 2


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(target: Target, name: str) -> None:
    (target.path / name).unlink()
    target.must_refuse(name.replace(".", r"\."))
    target.must_refuse(name.replace(".", r"\."), validate=False)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(target: Target, name: str) -> None:
    size = (target.path / name).stat().st_size
    for keep in (size - 1, size // 2, 1, 0):
        os.truncate(target.path / name, keep)
        target.must_refuse(name.replace(".", r"\."))
        target.must_refuse(name.replace(".", r"\."), validate=False)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found_and_the_file_named(target: Target, name: str) -> None:
    rng = random.Random(name)
    good = (target.path / name).read_bytes()
    for _ in range(60):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        (target.path / name).write_bytes(bad)
        target.must_refuse(name.replace(".", r"\."))


def test_damage_that_is_not_looked_for_still_leaves_errors_clear_and_the_model_whole_or_as_it_was(
    target: Target,
) -> None:
    # validate=False: a flip in a tensor's bytes goes unnoticed by contract; nothing else may come out than a clear error.
    rng = random.Random(1)
    name = "__0_0.distcp"
    good = (target.path / name).read_bytes()
    refused = 0
    for _ in range(40):
        bad = bytearray(good)
        at = rng.randrange(len(bad) - 200)
        bad[at : at + 200] = rng.randbytes(200)
        (target.path / name).write_bytes(bad)
        told = None
        try:
            checkpoint.load(target.path, target.model, target.optimizer, validate=False)
        except CheckpointError as error:
            told = str(error)
        if told is not None:
            refused += 1
            assert name in told or "which are one parameter in the model" in told
            cm.assert_equal(cm.whole_state(target.model, target.optimizer), target.before)
        target.before = cm.whole_state(target.model, target.optimizer)
    assert refused > 5


def other_checkpoint(directory: Path) -> Path:
    model = cm.build(None, seed=3)
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, range(5, 7))
    return checkpoint.save(directory, model, optimizer, {"note": "other"}, step=2).path


@pytest.mark.parametrize("name", [name for name in FILES if name != "index.json"])  # which is the same there
def test_a_file_of_another_checkpoint_is_found(target: Target, tmp_path: Path, name: str) -> None:
    other = other_checkpoint(tmp_path / "other")
    shutil.copy(other / name, target.path / name)
    # A manifest of another checkpoint fits itself: then every other file is the stranger.
    target.must_refuse(r"checksum|damaged|instead of")


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"{}", b"[1, 2]", b"PK\x03\x04", b"\x80\x04.", b"\x80\x04K\x01."])
@pytest.mark.parametrize("name", FILES)
def test_garbage_is_refused(target: Target, name: str, content: bytes) -> None:
    (target.path / name).write_bytes(content)
    target.must_refuse(name.replace(".", r"\."))


def test_what_is_no_checkpoint_is_refused(target: Target, tmp_path: Path) -> None:
    target.path = tmp_path / "nowhere"
    target.must_refuse("nowhere is not a directory")
    target.path.mkdir()
    target.must_refuse("nowhere is neither a checkpoint nor a directory that has a complete one")
    (target.path / "file").write_text("x")
    target.must_refuse("neither a checkpoint")


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("echo unpickled > /dev/stderr; exit 3",)


@pytest.mark.parametrize("plain", [False, True], ids=["hsdp", "plain-dcp"])
def test_metadata_runs_no_code(target: Target, plain: bool) -> None:
    if plain:
        for name in ("manifest.json", "index.json"):
            (target.path / name).unlink()
    (target.path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    target.must_refuse(
        r"\.metadata cannot be read: it asks for posix.system" if plain else r"\.metadata is (truncated|longer)"
    )
    with pytest.raises(CheckpointError, match=r"asks for posix.system in the place of Metadata, which is not part of any"):
        from_dcp(pickle.dumps(Bomb()))


def test_values_run_no_code(tmp_path: Path) -> None:
    """A plain DCP checkpoint whose hyperparameter is an object: PyTorch's reader would unpickle it."""
    model = cm.build(None)
    state = {"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": [{"lr": Bomb(), "params": ["x"]}]}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"'optimizer.param_groups.0.lr' in __0_0.distcp is damaged or foreign"):
        checkpoint.load(tmp_path, model, cm.two_groups(model))


def test_an_array_of_empty_strings_takes_no_memory_that_the_file_does_not_have() -> None:
    pytest.importorskip("numpy")
    header = json.dumps({"numpy array": ["|S0", [1 << 45], [0, 0]]}).encode()
    with pytest.raises(CheckpointError, match="an array whose elements have no bytes"):
        unpack(struct.pack("<Q", len(header)) + header)


def test_flipped_bits_in_a_plain_dcp_checkpoint_are_found_by_the_checksums_that_torch_save_left(tmp_path: Path) -> None:
    model = cm.build(None)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    file = tmp_path / "__0_0.distcp"
    good = file.read_bytes()
    at = good.index(model.frozen.weight.detach().numpy().tobytes())
    target = cm.build(None, seed=2)
    before = cm.whole_state(target)
    for offset in (0, 7, 100):
        bad = bytearray(good)
        bad[at + offset] ^= 0x10
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"'model.frozen.weight' in __0_0.distcp is damaged"):
            checkpoint.load(tmp_path, target)
        cm.assert_equal(cm.whole_state(target), before)


# -- every element, once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("boxes", "match"),
    [
        ([((0, 0), (2, 4)), ((3, 0), (1, 4))], "4 elements of 'w' of shape .* were never written"),
        ([((0, 0), (2, 4)), ((1, 0), (3, 4))], "4 elements of 'w' .* were written twice"),
        ([((0, 0), (3, 4)), ((2, 0), (1, 4))], r"pieces of 'w' at \(0, 0\) and \(2, 0\) overlap"),
        ([((0, 0), (4, 3)), ((0, 2), (4, 1))], "overlap"),
        ([((0, 0), (4, 4)), ((4, 0), (1, 4))], "is not inside its shape"),
        ([((0, 0), (4, 4)), ((-1, 0), (1, 4))], "is not inside its shape"),
        ([((0,), (4,))], "is not inside its shape"),
        ([], "16 elements of 'w' .* were never written"),
    ],
)
def test_pieces_that_do_not_tile_a_tensor_are_refused(boxes: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        check_tiling("w", (4, 4), [Box(*box) for box in boxes])


def test_pieces_that_tile_a_tensor_pass() -> None:
    check_tiling("w", (4, 4), [Box((r, c), (2, 2)) for r in (0, 2) for c in (0, 2)])
    check_tiling("w", (4, 4), [Box((0, 0), (4, 4)), Box((4, 0), (0, 4)), Box((4, 0), (0, 4))])
    check_tiling("scalar", (), [Box((), ())])
    check_tiling("empty", (0, 3), [Box((0, 0), (0, 3))])
    check_tiling("big", (1000,), [Box((i,), (1,)) for i in random.Random(0).sample(range(1000), 1000)])


def test_metadata_that_leaves_elements_out_is_refused() -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    found = Metadata({"model.w": TensorStorageMetadata(TensorProperties(), torch.Size([4]), [chunk])}, storage_data={})
    found.storage_data = {MetadataIndex("model.w", chunk.offsets): _StorageInfo("data", 0, 100)}
    with pytest.raises(CheckpointError, match=r"1 elements of 'model.w' of shape \(4,\) were never written"):
        from_dcp(pickle.dumps(found))


def test_elements_that_nobody_asked_the_files_for_are_noticed(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in working out which saved pieces a shard overlaps."""
    monkeypatch.setattr(reading.Reader, "_reads_of", lambda *args: [])
    target.must_refuse(r"not every element of 'model\.")


# -- on several ranks ------------------------------------------------------------------------------------------------


def save_on(env: RankEnv, directory: str) -> str:
    model = cm.build(env.mesh((1, 2)))
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, range(1), env.rank, 2)
    return str(checkpoint.save(directory, model, optimizer, step=1).path)


def load_on(env: RankEnv, path: str, validate: bool) -> str:
    model = cm.build(env.mesh((2, 1)), seed=1)
    optimizer = cm.two_groups(model)
    before = cm.whole_state(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, model, optimizer, validate=validate)
    cm.assert_equal(cm.whole_state(model, optimizer), before)
    return str(caught.value)


def unlink(path: Path) -> None:
    path.unlink()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "validate"), [(unlink, True), (unlink, False), (flip, True)])
def test_all_ranks_raise_the_same(pool2: Pool, tmp_path: Path, damage: Callable[[Path], None], validate: bool) -> None:
    path = pool2.run(save_on, str(tmp_path))[0]
    damage(Path(path) / "__1_0.distcp")
    results = pool2.run(load_on, path, validate)
    assert results[0] == results[1]
    assert "__1_0.distcp" in results[0]


def fail_on_one(env: RankEnv, directory: str) -> str:
    model = nn.Linear(3, 3)
    extra = {"bad": object()} if env.rank == 1 else {}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(directory, model, extra=extra, step=1)
    return str(caught.value)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(fail_on_one, str(tmp_path))
    assert results[0] == results[1]
    assert "on rank 1: \"extra['bad']\" is a builtins.object, which cannot be saved" in results[0]
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
