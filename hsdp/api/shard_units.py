"""`shard_units`: `fully_shard` on the modules that patterns choose, bottom-up; `by_numel` chooses them by size.

    patterns --> chosen modules, children first --> what each will own --checked as a whole--> fully_shard, one by one

Patterns, ties, and the names of arguments are checked before the first module is touched. What `fully_shard` itself refuses
(a mesh, the answer of `shard_placement_fn` for a parameter) shows at that unit: units before it stay sharded then.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from hsdp.api.fully_shard import fully_shard
from hsdp.api.module import HSDPModule, has_forward
from hsdp.comm.groups import own_rank
from hsdp.format import dotted
from hsdp.policies import check_flag
from hsdp.unit.lookup import walk


@dataclass(frozen=True)
class by_numel:  # noqa: N801  (where it is used it reads as a function)
    """A pattern of `shard_units`: modules with at least `smallest` parameter elements that no unit below them owns.

    So a block that is large enough becomes a unit and small layers stay with the module around them, whose own size is
    counted without the units in it.
    """

    smallest: int

    def __post_init__(self) -> None:
        if not isinstance(self.smallest, int) or isinstance(self.smallest, bool) or self.smallest < 1:
            raise ValueError(f"by_numel({self.smallest!r}): expected a number of elements, an integer of at least 1")


Pattern = str | type[nn.Module] | nn.Module | by_numel | Callable[[nn.Module], bool]
Params = dict[int, nn.Parameter]


def shard_units(
    model: nn.Module,
    patterns: Pattern | Iterable[Pattern],
    *,
    root: bool = True,
    dry_run: bool = False,
    **kwargs: Any,
) -> list[str]:
    """Calls `fully_shard` on every module that a pattern matches, children first, and then on the model.

        hsdp.shard_units(model, "blocks.*", mesh=mesh)
        hsdp.shard_units(model, [nn.TransformerEncoderLayer, "head"], mesh=mesh, mp_policy=policy)
        hsdp.shard_units(model, hsdp.by_numel(10_000_000), dry_run=True)

    Modules without a `forward` (`nn.ModuleList`) are passed over, and so are those for which units below them leave no
    parameters.

    Args:
        model: the model, not sharded itself yet.
        patterns: what a unit is, one or several of: a string, a glob over qualified names in which `*` and `?` stand for
            characters but dots and `**` for any ("blocks.*" is each block, "blocks.**" everything below it too); a module
            type, for its instances; a module of the model; `by_numel(n)`; a predicate, a function of a module.
        root: make the model itself the last unit, of all parameters that are left. Otherwise those stay as they are.
        dry_run: change nothing and print the plan, on rank 0. Needs no process group.
        kwargs: for `fully_shard`.

    Returns:
        The qualified names of the units, in the order in which they are made; "" is the model.

    Raises:
        TypeError: `model` or a pattern is of the wrong type.
        ValueError: a pattern makes no unit; a module that is to be a unit is sharded already or lies inside a unit; a
            parameter is tied to one outside of its unit. And what `fully_shard` refuses.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard_units: expected an nn.Module, not {type(model).__name__}")
    check_flag("shard_units", root, "root=")
    check_flag("shard_units", dry_run, "dry_run=")
    kwargs = {name: list(value) if name in _SETS and value is not None else value for name, value in kwargs.items()}
    try:
        inspect.signature(fully_shard).bind(model, **kwargs)
    except TypeError as error:
        raise TypeError(f"shard_units: {error}; its further arguments are those of fully_shard") from None
    ignored = {id(param) for param in kwargs.get("ignored_params") or ()}
    units = choose_units(model, patterns, root, ignored)
    if dry_run:
        _show(model, units, ignored)
    else:
        for unit in units:
            fully_shard(unit.module, **kwargs)
    return [unit.name for unit in units]


def choose_units(
    model: nn.Module, patterns: Pattern | Iterable[Pattern], root: bool, ignored: set[int]
) -> list[ChosenUnit]:
    """The units that `shard_units` would make, in its order; `ignored`: identities of parameters to leave alone.

    Raises:
        TypeError, ValueError: what `shard_units` raises before it changes anything.
    """
    matchers = [_Matcher(pattern) for pattern in _listed(patterns)]
    units = _Chooser(model, matchers, root, ignored).units
    for matcher in matchers:
        matcher.check()
    _check_ties(model, units, ignored)
    return units


_SETS = ("ignored_params", "replicate_params")
"""Arguments of `fully_shard` that may be iterators, which its first call would use up."""


def _listed(patterns: Any) -> list[Any]:
    one = isinstance(patterns, (str, nn.Module, by_numel)) or callable(patterns) or not isinstance(patterns, Iterable)
    return [patterns] if one else list(patterns)


@dataclass
class ChosenUnit:
    """A unit to be."""

    name: str
    module: nn.Module
    params: Params


@dataclass
class _Matcher:
    """A pattern, and what became of it."""

    pattern: Any
    made: int = 0
    formless: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    largest: int = 0

    def __post_init__(self) -> None:
        pattern = self.pattern
        if isinstance(pattern, str):
            self._regex = compiled(pattern, "shard_units")
        elif isinstance(pattern, type) and not issubclass(pattern, nn.Module):
            raise TypeError(f"shard_units: pattern {pattern!r} is not a type of nn.Module")
        elif not callable(pattern) and not isinstance(pattern, by_numel):
            raise TypeError(
                f"shard_units: pattern {pattern!r} is not a glob, a module type, a module, by_numel(n) or a function of a "
                "module"
            )

    def matches(self, name: str, module: nn.Module, free: Params) -> bool:
        """Whether the module is to be a unit; `free` are the parameters that it would own."""
        pattern = self.pattern
        if isinstance(pattern, str):
            return self._regex.fullmatch(name) is not None
        if isinstance(pattern, type):
            return isinstance(module, pattern)
        if isinstance(pattern, nn.Module):
            return module is pattern
        if isinstance(pattern, by_numel):
            numel = sum(param.numel() for param in free.values())
            self.largest = max(self.largest, numel)
            return numel >= pattern.smallest
        return bool(pattern(module))

    def check(self) -> None:
        """Raises ValueError if the pattern made no unit."""
        if self.made:
            return
        pattern = self.pattern
        named = f"an instance of {type(pattern).__name__}" if isinstance(pattern, nn.Module) else repr(pattern)
        if isinstance(pattern, type) or (callable(pattern) and not isinstance(pattern, nn.Module)):
            named = getattr(pattern, "__qualname__", named)
        why = "matches nothing in the model"
        if self.empty:
            why = f"matches {self.empty}, for which units below them leave no parameters"
        elif self.formless:
            why = f"matches {self.formless}, which have no forward; match the modules in them, as 'blocks.*' does"
        elif isinstance(pattern, by_numel):
            why += f", whose largest module without a unit has {self.largest} elements"
        elif isinstance(pattern, str):
            why += "; names are those of model.named_modules(), and '*' does not cross a dot ('**' does)"
        raise ValueError(f"shard_units: pattern {named} {why}")


def compiled(glob: str, function: str) -> re.Pattern[str]:
    """A glob that was passed to a function, as a regular expression; `**.` may also stand for no component at all.

    Raises:
        ValueError: it is none.
    """
    rest = glob
    rules = (("**.", r"(?:.*\.)?"), ("**", ".*"), ("*", r"[^.]*"), ("?", r"[^.]"))
    pattern = ""
    while rest:
        sign, meaning = next((rule for rule in rules if rest.startswith(rule[0])), (rest[0], re.escape(rest[0])))
        if sign == "[" and "]" in rest[2:]:
            stop = rest.index("]", 2)
            inside = rest[1:stop].replace("\\", r"\\")
            sign, meaning = rest[: stop + 1], f"[{'^' + inside[1:] if inside[0] == '!' else inside}]"
        pattern += meaning
        rest = rest[len(sign) :]
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{function}: pattern {glob!r} is no glob: {error}") from None


class _Chooser:
    """Walks a model, children first, and decides which modules are units."""

    def __init__(self, model: nn.Module, matchers: list[_Matcher], root: bool, ignored: set[int]) -> None:
        self.units: list[ChosenUnit] = []
        self._matchers = matchers
        self._root = model if root else None
        self._ignored = ignored
        self._seen: set[int] = set()
        self._visit(model, "", None)

    def _visit(self, module: nn.Module, name: str, inside: str | None) -> Params:
        """Plans the units in a module; returns the parameters in it that none of them owns."""
        self._seen.add(id(module))
        if isinstance(module, HSDPModule):
            inside = name or "(root)"
        free: Params = {}
        for child_name, child in module.named_children():
            if id(child) not in self._seen:
                free |= self._visit(child, dotted(name, child_name), inside)
        own = {id(p): p for p in module._parameters.values() if p is not None and id(p) not in self._ignored}
        if inside is None:
            free |= own
        runs = has_forward(module)
        hits = [matcher for matcher in self._matchers if matcher.matches(name, module, free if runs else {})]
        if not runs:
            for hit in hits:
                hit.formless.append(name)
            hits = []
        if not hits and module is not self._root:
            return free
        if inside is not None:
            raise ValueError(
                f"shard_units: module {name or '(root)'!r} ({type(module).__name__}) is to be a unit, but "
                + (
                    "is sharded already"
                    if inside == (name or "(root)")
                    else f"lies in {inside!r}, which is sharded already"
                )
                + "; shard children before parents, and each once"
            )
        if not free and module is not self._root:
            for hit in hits:
                hit.empty.append(name)
            return free
        for hit in hits:
            hit.made += 1
        self.units.append(ChosenUnit(name, module, free))
        return {}


def _check_ties(model: nn.Module, units: list[ChosenUnit], ignored: set[int]) -> None:
    """Raises ValueError if a parameter has names in two units, or in one and outside of all."""
    planned = {id(unit.module): unit.name or "(root)" for unit in units}
    owners: dict[int, tuple[str | None, str]] = {}

    def visit(item: tuple[nn.Module, str, str | None]) -> list[tuple[nn.Module, str, str | None]]:
        module, name, around = item
        owner = planned.get(id(module), around)
        for key, param in module._parameters.items():
            if param is None or id(param) in ignored:
                continue
            fqn = dotted(name, key)
            first_owner, first = owners.setdefault(id(param), (owner, fqn))
            if first_owner != owner:
                found = [f"unit {one!r}" if one is not None else "no unit" for one in (first_owner, owner)]
                raise ValueError(
                    f"shard_units: parameter {first!r} of {found[0]} is tied to {fqn!r} of {found[1]}; leave both to one "
                    "unit (the smallest module that holds both), or untie them"
                )
        below = [(key, child) for key, child in module.named_children() if not isinstance(child, HSDPModule)]
        return [(child, dotted(name, key), owner) for key, child in below]

    root: tuple[nn.Module, str, str | None] = model, "", None
    walk(root, visit)


def _show(model: nn.Module, units: list[ChosenUnit], ignored: set[int]) -> None:
    if own_rank() != 0:
        return
    rows = [("unit", "module", "parameters", "elements", "MiB")]
    rows += [(unit.name or "(root)", type(unit.module).__name__, *_sizes(unit.params)) for unit in units]
    owned = {key for unit in units for key in unit.params} | ignored
    left = {id(p): p for p in model.parameters() if id(p) not in owned and not isinstance(p, DTensor)}
    if left:
        rows.append(("not sharded", "", *_sizes(left)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"shard_units would make {len(units)} units of {type(model).__name__}:")
    for row in rows:
        cells = [cell.rjust(n) if at > 1 else cell.ljust(n) for at, (cell, n) in enumerate(zip(row, widths, strict=True))]
        print("  " + "  ".join(cells))


def _sizes(params: Params) -> tuple[str, str, str]:
    numel = sum(param.numel() for param in params.values())
    return str(len(params)), f"{numel:,}", f"{sum(param.nbytes for param in params.values()) / 2**20:,.2f}"
