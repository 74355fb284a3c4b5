"""Each part of a tensor is written by one rank; replicas share what is large, and what may differ is rank 0's."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from benchmarks.checkpoint_ranks import measure
from hsdp import checkpoint
from hsdp.checkpoint import write_assignment
from hsdp.checkpoint.write_assignment import packed, shared_out, size_of, unpack_all
from tests.checkpoint import models as cm
from tests.support.rig import Pool
from tests.support.worker import RankEnv

MIB = 1 << 20


def item(name: str, shard: int, mib: int, kind: WriteItemType = WriteItemType.SHARD) -> WriteItem:
    offsets, sizes = torch.Size([shard * mib * MIB]), torch.Size([mib * MIB])
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.uint8), torch.Size([4 * mib * MIB]))
    return WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data)


def held(names: dict[str, int], shards: int, replicas: int, *more: WriteItem) -> list[SavePlan]:
    """What each rank of a mesh (replicas, shards) holds of tensors of so many MiB per shard."""
    ranks = [shard for _ in range(replicas) for shard in range(shards)]
    return [SavePlan([*(item(name, shard, mib) for name, mib in names.items()), *more]) for shard in ranks]


def loads(plans: list[SavePlan]) -> list[int]:
    return [sum(map(size_of, plan.items)) // MIB for plan in plans]


def test_replicas_share_what_is_large() -> None:
    names = {f"layer.{number}": 8 for number in range(12)}
    assert loads(shared_out(held(names, 2, 3))) == [32] * 6
    assert loads(shared_out(held({"a": 30, "b": 10, "c": 10, "d": 10}, 1, 2))) == [30, 30]


def test_few_files_for_what_is_small() -> None:
    assert loads(shared_out(held({"a": 8, "b": 7}, 2, 3))) == [15, 15, 0, 0, 0, 0]


def test_each_part_is_written_once_by_a_rank_that_has_it() -> None:
    plans = held({f"layer.{number}": number + 1 for number in range(9)}, 2, 4)
    done = shared_out(plans)
    written = [one.index for plan in done for one in plan.items]
    assert len(written) == len(set(written)) == 18
    for plan, before in zip(done, plans, strict=True):
        assert set(map(id, plan.items)) <= set(map(id, before.items))


def test_what_is_no_shard_stays_with_all() -> None:
    plain = item("buffer", 0, 100, WriteItemType.TENSOR)
    assert all(plain in plan.items for plan in shared_out(held({"a": 20}, 1, 3, plain)))


def test_what_travels_through_rank_0_and_what_dcp_reads_is_compact() -> None:
    row = measure(replicas=1, shards=64, layers=2)
    per_part = {key: float(row[key]) * 1e6 / row["pieces"] for key in ("gathered, MB", "sent, MB", ".metadata, MB")}
    assert per_part["gathered, MB"] < 60 and per_part["sent, MB"] < 60, per_part  # 127 and 190 uncompressed
    assert per_part[".metadata, MB"] < 150, per_part  # 178 if each rank's names and sizes are objects of their own


def test_what_replicas_describe_alike_is_held_once() -> None:
    plans = held({"a": 1, "b": 2}, 2, 3, item("buffer", 0, 1, WriteItemType.TENSOR))
    found = unpack_all([packed(plan) for plan in plans])
    assert found == plans
    assert len({id(plan) for plan in found}) == 2


def share(env: RankEnv, directory: str) -> dict[str, Any]:
    """Saves a model whose buffer differs between ranks, with replicas that share everything."""
    model = cm.build(env.mesh((2, 1)))
    optimizer = cm.two_groups(model)
    cm.train(model, optimizer, range(1), env.rank, 2)
    for block in model.blocks:
        block.calls.fill_(100 + env.rank)
    with mock.patch.object(write_assignment, "_FILE", 0):
        path = checkpoint.save(directory, model, optimizer, step=1).path
    state = cm.whole_state(model, optimizer)
    other = cm.build(env.mesh((1, 2)), seed=4)
    its = cm.two_groups(other)
    checkpoint.load(path, other, its)
    for block in model.blocks:
        block.calls.fill_(100)
    state.update({name: value for name, value in model.state_dict().items() if name.endswith("calls")})
    cm.assert_equal(cm.whole_state(other, its), state)
    return {one.name: one.stat().st_size for one in Path(path).iterdir()}


def test_what_replicas_wrote_together_loads_and_buffers_are_those_of_rank_0(pool2: Pool, tmp_path: Path) -> None:
    sizes = pool2.run(share, str(tmp_path))[0]
    assert min(sizes["__0_0.distcp"], sizes["__1_0.distcp"]) > 0.3 * max(sizes["__0_0.distcp"], sizes["__1_0.distcp"])
