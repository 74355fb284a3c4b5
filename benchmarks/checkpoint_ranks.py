"""`python -m benchmarks.checkpoint_ranks`: what a checkpoint of W ranks costs rank 0, by simulation.

A decoder's shards are described as each of W ranks would describe them, and rank 0 does with that what it does in a save:
it reads all descriptions, decides who writes what, describes the whole, and writes that down. Nothing else is there: no
tensor has bytes, no message travels, no file is written.

    gathered    bytes of messages that rank 0 receives: what ranks hold, then what they wrote
    sent        bytes of messages that it sends: who writes what
    plan        CPU seconds until all ranks can begin to write
    describe    CPU seconds from the last rank's end of writing until the manifest
    index       index.json, which each rank reads to load; `parse`: the CPU seconds that it takes
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from benchmarks.harness import positive, progress
from hsdp.checkpoint import manifests, saving
from hsdp.checkpoint.index import from_json
from hsdp.checkpoint.write_assignment import pack_parts, packed, shared_out, size_of, unpack_all, unpacked

HIDDEN, FEED_FORWARD, VOCAB = 8192, 28672, 128256
_OVERHEAD = 700
"""About the bytes that a piece's zip file adds to it."""


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """A decoder's parameters of the size of a 70 B model's, and AdamW's state of each, in fp32."""
    of_layer = {
        "attention.q": (HIDDEN, HIDDEN),
        "attention.k": (HIDDEN // 8, HIDDEN),
        "attention.v": (HIDDEN // 8, HIDDEN),
        "attention.o": (HIDDEN, HIDDEN),
        "mlp.gate": (FEED_FORWARD, HIDDEN),
        "mlp.up": (FEED_FORWARD, HIDDEN),
        "mlp.down": (HIDDEN, FEED_FORWARD),
        "norm_1": (HIDDEN,),
        "norm_2": (HIDDEN,),
    }
    params = {f"layers.{number}.{name}": shape for number in range(layers) for name, shape in of_layer.items()}
    params.update({"embedding": (VOCAB, HIDDEN), "norm": (HIDDEN,), "head": (VOCAB, HIDDEN)})
    states = {f"optimizer.state.{name}.{key}": s for name, s in params.items() for key in ("exp_avg", "exp_avg_sq")}
    return {**{f"model.{name}": shape for name, shape in params.items()}, **states}


def plan_of(tensors: dict[str, tuple[int, ...]], shard: int, shards: int) -> SavePlan:
    """What a rank with this shard holds."""
    items = []
    for name, shape in tensors.items():
        rows = -(-shape[0] // shards)
        first = min(rows * shard, shape[0])
        offsets = torch.Size([first, *(0 for _ in shape[1:])])
        sizes = torch.Size([min(rows, shape[0] - first), *shape[1:]])
        if sizes[0]:
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.float32), torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data={name: (name,) for name in tensors})


def measure(replicas: int, shards: int, layers: int) -> dict[str, Any]:
    """One mesh."""
    tensors = shapes(layers)
    held = [packed(plan_of(tensors, shard, shards)) for shard in range(shards)] * replicas
    planner = saving._Planner(None)
    planner.set_up_planner({}, is_coordinator=True)
    planner.create_local_plan()
    started = time.process_time()
    plans, metadata = planner.create_global_plan(shared_out(unpack_all(held)))
    sent = [len(part) for part in pack_parts(plans)]
    planned = time.process_time()

    written = []
    for rank, plan in enumerate(plans):
        places, at = {}, 0
        for item in plan.items:
            length = size_of(item) + _OVERHEAD
            places[item.index] = _StorageInfo(f"__{rank}_0.distcp", at, length)
            at += length
        files = {f"__{rank}_0.distcp": manifests.FileRecord(at, 1 << 31)} if plan.items else {}
        written.append(packed(saving._Written(files, places, {})))
    last = time.process_time()
    everything = [unpacked(one) for one in written]
    metadata.storage_data = saving._shared(metadata, everything)
    files = {name: record for one in everything for name, record in one.files.items()}
    pickled = len(pickle.dumps(metadata))
    index = saving._index(metadata).to_json()
    manifest = manifests.Manifest(1, 1, replicas * shards, files).text()
    described = time.process_time()
    from_json(index)
    parsed = time.process_time()
    sizes = [record.bytes for record in files.values()]
    return {
        "mesh": f"{replicas} x {shards}",
        "pieces": len(metadata.storage_data),
        "files": len(files),
        "largest, GB": f"{max(sizes) / 1e9:.2f}",
        "gathered, MB": f"{(sum(map(len, held)) + sum(map(len, written))) / 1e6:.1f}",
        "sent, MB": f"{sum(sent) / 1e6:.1f}",
        "manifest, kB": f"{len(manifest) / 1e3:.1f}",
        "index, MB": f"{len(index) / 1e6:.2f}",
        ".metadata, MB": f"{pickled / 1e6:.2f}",
        "plan, s": f"{planned - started:.2f}",
        "describe, s": f"{described - last:.2f}",
        "parse, s": f"{parsed - described:.2f}",
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=["1x64", "2x32", "8x64", "32x128"], help="replicas x shards, each")
    parser.add_argument("--layers", type=positive, default=80)
    options = parser.parse_args(argv)
    for number, mesh in enumerate(options.mesh):
        progress(f"{mesh}, {options.layers} layers")
        row = measure(*map(int, mesh.split("x")), options.layers)
        if not number:
            print(" | ".join(row))
        print(" | ".join(map(str, row.values())), flush=True)


if __name__ == "__main__":
    main()
