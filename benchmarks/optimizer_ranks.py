"""`python -m benchmarks.optimizer --what ranks`: the optimizer's step among gloo ranks, hsdp's beside others'.

    AdamW    hsdp.optim.local(over_replicas=True) beside hsdp.optim.local, beside torch.optim.AdamW on FSDP2, and with
             flat=True beside itself without
    Muon     hsdp.optim.Muon(over_replicas=True) beside hsdp.optim.Muon, and this beside torch.optim.Muon on FSDP2's
             DTensors, and with --dion PATH beside dion's Muon

Only the step is measured, on gradients that stay, and until its parameters can be read; with "until it returns" without
the gathers over replicas that go on behind it. Contenders take turns (harness.py); what counts is the ratio of each
round. Beside it stands the memory of the states of rank 0, counted on a fake process group.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hsdp
from benchmarks.harness import Apart, Contender, Plan, Row, Step, compare, progress, shard
from tests.support.models import Block

MESHES = {"2x2": (2, 2), "1x4": (1, 4)}
UNTIL_IT_RETURNS = "AdamW over replicas, until it returns"
PAIRS = [
    (UNTIL_IT_RETURNS, "AdamW local"),
    ("AdamW over replicas", "AdamW local"),
    ("AdamW over replicas", "AdamW on FSDP2"),
    ("AdamW flat over replicas", "AdamW over replicas"),
    ("Muon over replicas", "Muon"),
    ("Muon", "torch's Muon on FSDP2"),
    ("Muon", "dion's Muon on FSDP2"),
]


@dataclass(frozen=True)
class Size:
    """Of the transformer blocks whose parameters are stepped."""

    dim: int = 256
    layers: int = 6

    def blocks(self) -> nn.ModuleList:
        """The blocks; the same on every rank."""
        torch.manual_seed(0)
        return nn.ModuleList(Block(self.dim, 4, 3 * self.dim) for _ in range(self.layers))


def build(name: str, size: Size, dion: str | None, mesh: DeviceMesh) -> Step:
    """A contender's step, on gradients that stay."""
    blocks = size.blocks()
    optimizer = prepare(name, blocks, dion, mesh)

    def read() -> None:
        for param in blocks.parameters():
            param.to_local()  # type: ignore[operator]

    def whole_step() -> None:
        optimizer.step()
        read()

    if name == UNTIL_IT_RETURNS:
        return Apart(optimizer.step, read)
    return whole_step


def prepare(name: str, blocks: nn.ModuleList, dion: str | None, mesh: DeviceMesh) -> Any:
    """A contender's optimizer, over the sharded parameters of `blocks`, with gradients."""
    shard("fsdp2" if "FSDP2" in name else "hsdp", blocks, mesh)
    params: list[Any] = [p for p in blocks.parameters() if p.ndim == 2 or "AdamW" in name]
    for at, param in enumerate(params):
        generator = torch.Generator().manual_seed(at)
        whole = torch.randn(param.shape, generator=generator)
        param.grad = torch.distributed.tensor.distribute_tensor(
            whole, param.device_mesh, param.placements, src_data_rank=None
        )
    if name == "AdamW local":
        return hsdp.optim.local(torch.optim.AdamW(params, foreach=True))
    if name in ("AdamW over replicas", UNTIL_IT_RETURNS):
        return hsdp.optim.local(torch.optim.AdamW(params, foreach=True), over_replicas=True)
    if name == "AdamW flat over replicas":
        return hsdp.optim.local(torch.optim.AdamW(params, foreach=True), flat=True, over_replicas=True)
    if name == "AdamW on FSDP2":
        return torch.optim.AdamW(params, foreach=True)
    if name in ("Muon", "Muon over replicas"):
        return hsdp.optim.Muon(params, over_replicas=name != "Muon")
    if name == "torch's Muon on FSDP2":
        return torch.optim.Muon(params)
    return _dion(dion, params, mesh)


def _dion(path: str | None, params: list[Any], mesh: DeviceMesh) -> torch.optim.Optimizer:
    """dion's Muon from a copy of its repository, with the same iteration as the others; it takes the shard axis alone."""
    assert path is not None, "asked for without --dion"
    torch._dynamo.config.disable = True  # type: ignore[attr-defined]  # all contenders are measured without a compiler
    sys.path.insert(0, path)
    muon = importlib.import_module("dion").Muon

    def orthogonalise(matrix: Tensor, epsilon: Any = None) -> Tensor:
        stack = matrix.bfloat16() if matrix.ndim == 3 else matrix.bfloat16().unsqueeze(0)
        found = hsdp.optim.newton_schulz(stack.clone(), hsdp.optim.COEFFICIENTS, 5, 1e-7)
        return found if matrix.ndim == 3 else found[0]

    axis = mesh if mesh.ndim == 1 else mesh["shard"]
    return muon(params, distributed_mesh=axis, newton_schulz_func=orthogonalise, nesterov=True)  # type: ignore[no-any-return]


def state_bytes(name: str, size: Size, shape: tuple[int, ...]) -> int:
    """Bytes of the states that rank 0 has after a step. Inside of a fake process group."""
    blocks = size.blocks()
    optimizer = prepare(name, blocks, None, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    optimizer.step()
    values = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    return sum(getattr(value, "_local_tensor", value).untyped_storage().nbytes() for value in values)


def run(
    meshes: Sequence[str], size: Size, plan: Plan, dion: str | None, fake: Callable[[int], AbstractContextManager[Any]]
) -> tuple[list[tuple[str, Row]], dict[str, int]]:
    """Every pair on every mesh, and the bytes of states by mesh and contender; `fake` makes a fake process group."""
    rows, held = [], {}
    for mesh in meshes:
        shape = MESHES[mesh]
        for a, b in PAIRS:
            if "dion" in b and dion is None:
                continue
            progress(f"{mesh}: {a} / {b} ...")
            pair = [Contender(name, partial(build, name, size, dion)) for name in (a, b)]
            rows.append((mesh, compare(f"{mesh} {a}", shape, *pair, plan)))
        for name in sorted({name for pair in PAIRS for name in pair if "dion" not in name}):
            with fake(math.prod(shape)):
                held[f"{mesh} {name}"] = state_bytes(name, size, shape)
    return rows, held


def table(rows: Sequence[tuple[str, Row]], held: dict[str, int]) -> str:
    """The ratios and the bytes as text."""
    lines = [f"{'step time, min median max of the ratios':62}{'wall time':>22}{'CPU time of all ranks':>24}"]
    lines += [
        f"{mesh:5}{f'{row.a.name} / {row.b.name}':57}{row.wall_ratio!s:>22}{row.cpu_ratio!s:>24}" for mesh, row in rows
    ]
    lines.append("bytes of states on rank 0")
    lines += [f"{name:62}{count:>22,}" for name, count in held.items()]
    return "\n".join(lines)
