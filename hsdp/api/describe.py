"""`describe`: the tree of a model's units, and which path each parameter takes, as text."""

from __future__ import annotations

from torch import nn

from hsdp.format import dotted, dtype_of, pattern_of, several, together
from hsdp.schedule.runtime import runtime_of
from hsdp.unit.dtype_group import DtypeGroup
from hsdp.unit.lookup import class_name, unit_of_module, walk
from hsdp.unit.unit import Unit


def describe(model: nn.Module, *, params: bool = True) -> str:
    """The tree of units, inner ones indented: a line per unit and, below it, one per parameter.

    A parameter's line has its shape, placement, dtypes (stored / computed / reduced), bytes per rank, and how it is
    communicated. Units that differ only by a number in their name share one entry, as in "blocks.0..31 (each of 32)".

    *direct* parameters are transferred from and to their place without a copy; *packed* ones share a transfer with the
    other packed ones of the unit and cost one copy. `CommPolicy` says which go where, `MixedPrecisionPolicy` the dtypes.

    Args:
        model: the model, or a part of it. A part is described as a model of its own until the model's first forward.
        params: whether to list parameters.

    Raises:
        TypeError: it is no module.
        ValueError: nothing in the model is sharded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"describe: expected an nn.Module, not {type(model).__name__}")
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, depth, unit in _tree(model):
        indent = "  " * depth
        head, *rows = _describe_unit(unit, is_root=depth == 0 and _may_be_root(unit))
        key = (indent, pattern_of(name), head, *(f"{indent}    {row}" for row in rows if params))
        alike.setdefault(key, []).append(name)
    if not alike:
        raise ValueError(f"describe({type(model).__name__}): nothing in it is sharded; call fully_shard first")
    lines: list[str] = []
    for (indent, _, head, *rows), names in alike.items():
        lines += [f"{indent}{together(names)}: {head}", *rows]
    return "\n".join(lines)


def _tree(model: nn.Module) -> list[tuple[str, int, Unit]]:
    """Each unit once, in the order of `named_modules`: name, number of units around it, unit."""
    found: list[tuple[str, int, Unit]] = []
    seen: set[Unit] = set()

    def visit(item: tuple[nn.Module, str, int, Unit | None]) -> list[tuple[nn.Module, str, int, Unit | None]]:
        module, name, depth, parent = item
        unit = unit_of_module(module) or parent
        if unit is not None and unit not in seen:
            seen.add(unit)
            found.append((name or class_name(module) + " (root)" * _may_be_root(unit), depth, unit))
        depth += unit is not parent
        return [(child, dotted(name, key), depth, unit) for key, child in module.named_children()]

    root: tuple[nn.Module, str, int, Unit | None] = model, "", 0, None
    walk(root, visit)
    return found


def _may_be_root(unit: Unit) -> bool:
    """Whether nothing has shown yet that the unit runs inside of another one."""
    return (runtime := runtime_of(unit)) is None or runtime.root is unit


def _describe_unit(unit: Unit, is_root: bool) -> list[str]:
    held = sum(group.shard.nbytes for group in unit.dtype_groups)
    # Of what every rank keeps whole all padding is each one's, of the rest its part.
    padding = sum(group.layout.padding * group.kind.storage.itemsize // group.shards for group in unit.dtype_groups)
    count = several(len(unit.params), "parameter")
    head = f"{count}, {unit.axes}, {held:,} bytes per rank ({padding:,} of them padding), {_after_forward(unit, is_root)}"
    rows = []
    for slot, param in enumerate(unit.params):
        group = next(group for group in unit.dtype_groups if slot in group.slots)
        rows.append(f"{param.fqn:<32} {tuple(param.spec.shape)!s:<20} {_path(group, group.slots.index(slot), unit)}")
    return [head, *rows]


def _after_forward(unit: Unit, is_root: bool) -> str:
    after = unit.settings.reshard_after_forward
    if type(after) is int and after < unit.axes.shard_size:
        return f"sharded over {after} ranks after forward"
    return "whole until backward" if after is False or (after is None and is_root) else "freed after forward"


def _path(group: DtypeGroup, index: int, unit: Unit) -> str:
    piece, kind = group.layout.pieces[index], group.kind
    dtypes = f"{dtype_of(kind.storage)} / {dtype_of(kind.compute)} / {dtype_of(kind.reduce)}"
    where = unit.axes.placement_text(piece.spec.dim, piece.spec.merged)
    if kind.replicated:
        how = "kept whole, all-reduced"
    elif group.shards == 1:
        how = "nothing to gather, all-reduced where autograd made it"
    else:
        gather, reduce = (("direct" if direct else "packed") for direct in (piece.direct_gather, piece.direct_reduce))
        if piece.uneven and not kind.extension:
            gather = reduce = "direct, without padding"
        how = f"gathered {'as its subclass says' if kind.extension else gather}, reduced {reduce}"
    frozen = "" if group.params[index].sharded.requires_grad else ", frozen"
    return f"{where:<12} {dtypes:<20} {group.held_bytes(index):>12,} B  {how}{frozen}"
