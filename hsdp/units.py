"""`shard_units`: `fully_shard` on the modules that patterns choose, bottom-up; `by_numel` chooses them by size.

    blocks.0.attn   ModuleType or predicate --.
    blocks.0        "blocks.*" ---------------+--> plan (refused as a whole, or not at all) --> fully_shard, children first
    (root)          root=True ----------------'

Everything is checked before the first module is touched: a model is never left half sharded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from hsdp.api import fully_shard
from hsdp.module import HSDPModule


@dataclass(frozen=True)
class by_numel:  # noqa: N801  (reads as a function where it is used)
    """A pattern for `shard_units`: modules with at least `smallest` parameter elements that no unit below them has.

    So a block that is large enough becomes a unit, its small layers stay with it, and what remains above is counted
    without it.
    """

    smallest: int

    def __post_init__(self) -> None:
        if not isinstance(self.smallest, int) or isinstance(self.smallest, bool) or self.smallest < 1:
            raise ValueError(f"by_numel({self.smallest!r}): expected a number of elements, an integer of at least 1")


Pattern = str | type[nn.Module] | nn.Module | Callable[[nn.Module], bool] | by_numel


@dataclass
class _Planned:
    """A unit to be."""

    name: str
    module: nn.Module
    params: dict[int, tuple[str, nn.Parameter]]


def shard_units(
    model: nn.Module,
    patterns: Pattern | Sequence[Pattern],
    *,
    root: bool = True,
    dry_run: bool = False,
    **kwargs: Any,
) -> list[str]:
    """Calls `fully_shard` on every module that a pattern matches, children first, and then on the model.

        hsdp.shard_units(model, "blocks.*", mesh=mesh)
        hsdp.shard_units(model, [nn.TransformerEncoderLayer, "head"], mesh=mesh, mp_policy=policy)
        hsdp.shard_units(model, hsdp.by_numel(10_000_000), dry_run=True)

    A matched module that has no parameters left for it, because it has none or units below it own them, is passed over.

    Args:
        model: the model; not sharded itself yet.
        patterns: what makes a module a unit, one or several of
            a string: a glob over qualified names, where `*` and `?` stand for characters but a dot, and `**` for any:
            "blocks.*" is each block and "blocks.**" also everything below them;
            a module type: its instances, and those of subclasses;
            a module of the model: itself;
            `by_numel(n)`: modules with so many elements;
            a function that takes a module and says whether it is a unit.
        root: whether the model itself is the last unit, with all parameters that are left. Without it those stay plain.
        dry_run: print the plan, on the first rank, and change nothing. Needs no process group.
        kwargs: passed to every `fully_shard`.

    Returns:
        The qualified names of the units in the order in which they were made; the model's own is "".

    Raises:
        TypeError: a pattern, or `model`, is of the wrong type.
        ValueError: a pattern matches nothing; a matched module is sharded already, lies in a unit, or has no forward;
            a parameter is tied between two units. And what `fully_shard` refuses.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard_units: expected an nn.Module, not a {type(model).__name__}")
    many = [patterns] if isinstance(patterns, (str, type, nn.Module, by_numel)) or callable(patterns) else patterns
    chosen = _choose(model, [_Matcher(pattern, model) for pattern in many], root)
    units = _plan(model, chosen)
    if dry_run:
        _show(model, units)
    else:
        for unit in units:
            fully_shard(unit.module, **kwargs)
    return [unit.name for unit in units]
