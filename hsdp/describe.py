"""`describe`: the units of a model, and which path each parameter takes, as text."""

from __future__ import annotations

import torch
from torch import nn

from hsdp.lane import Lane
from hsdp.state import state_of
from hsdp.unit import Unit


def describe(model: nn.Module) -> str:
    """One line per unit and one per parameter: shape, placement, dtypes, bytes per rank, and how it is communicated.

    *direct* parameters are transferred from and to their place without a copy; *packed* ones share a transfer with the
    other packed ones of the unit and cost one copy. `CommPolicy` says which go where, `MixedPrecisionPolicy` the dtypes.

    Raises:
        ValueError: nothing in the model is sharded.
    """
    lines: list[str] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        state = state_of(module)
        if state is None or id(state.unit) in seen:
            continue
        seen.add(id(state.unit))
        lines += _describe_unit(name or type(model).__name__, state.unit)
    if not lines:
        raise ValueError(f"describe({type(model).__name__}): nothing in it is sharded; call fully_shard first")
    return "\n".join(lines)


def _describe_unit(name: str, unit: Unit) -> list[str]:
    held = sum(lane.layout.numel * lane.kind.storage.itemsize for lane in unit.lanes)
    padding = sum(lane.layout.padding * lane.kind.storage.itemsize for lane in unit.lanes) // unit.axes.shard_size
    head = f"{name}: {len(unit.params)} parameters, {unit.axes}, {held:,} bytes per rank ({padding:,} of them padding)"
    rows = []
    for slot, param in enumerate(unit.params):
        lane = next(lane for lane in unit.lanes if slot in lane.slots)
        rows.append(f"    {param.fqn:<32} {tuple(param.spec.shape)!s:<20} {_path(lane, lane.slots.index(slot), unit)}")
    return [head, *rows]


def _path(lane: Lane, index: int, unit: Unit) -> str:
    piece, kind = lane.layout.pieces[index], lane.kind
    dtypes = f"{_short(kind.storage)} / {_short(kind.compute)} / {_short(kind.reduce)}"
    if kind.replicated:
        where, how = "Replicate()", "kept whole, all-reduced"
    elif piece.spec.dim is None:
        where, how = "Replicate()", "kept whole, reduced packed"
    elif lane.shards == 1:
        where, how = f"Shard({piece.spec.dim})", "nothing to gather, all-reduced where autograd made it"
    else:
        where = f"Shard({piece.spec.dim})" if piece.spec.merged == 1 else "Shard(0, 1)"
        gather, reduce = (("direct" if direct else "packed") for direct in (piece.direct_gather, piece.direct_reduce))
        how = f"gathered {gather}, reduced {reduce}"
    frozen = "" if lane.params[index].sharded.requires_grad else ", frozen"
    return f"{where:<12} {dtypes:<20} {piece.numel * kind.storage.itemsize:>12,} B  {how}{frozen}"


def _short(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
