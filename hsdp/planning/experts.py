"""Which part of the experts computes with a token: told by name, as modules do not show how many of them are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hsdp.api.shard_units import compiled
from hsdp.format import dotted
from hsdp.planning.facts import ParamFacts, UnitFacts


def with_active(units: Sequence[UnitFacts], active: Mapping[str, float] | None) -> list[UnitFacts]:
    """The units with the parts of their parameters that compute with a token.

    Args:
        units: of a model.
        active: see `hsdp.plan`.

    Raises:
        TypeError: it is no mapping from patterns to numbers.
        ValueError: a number is not above 0 and at most 1, or a pattern matches no parameter that multiplies.
    """
    found = list(units)
    if active is not None and not isinstance(active, Mapping):
        raise TypeError(f'plan(active={active!r:.60}): expected a mapping, e.g. {{"**.experts.**": 2 / 64}}')
    for pattern, part in (active or {}).items():
        if not isinstance(pattern, str) or not isinstance(part, (int, float)) or isinstance(part, bool):
            raise TypeError(
                f'plan(active={{{pattern!r}: {part!r}}}): expected a glob and a number, e.g. {{"**.experts.**": 2 / 64}}'
            )
        if not 0 < part <= 1:
            raise ValueError(
                f"plan(active={{{pattern!r}: {part!r}}}): expected chosen experts over all experts, above 0 and at most 1"
            )
        found = _matched(found, pattern, float(part))
    return found


def _matched(units: list[UnitFacts], pattern: str, part: float) -> list[UnitFacts]:
    glob, matched, names = compiled(pattern, "plan(active=...)"), False, []
    found = []
    for unit in units:
        prefix = "" if unit.parent is None else unit.name
        params: list[ParamFacts] = []
        for param in unit.params:
            name = dotted(prefix, param.name)
            names.append(name)
            chosen = param.active > 0 and glob.fullmatch(name) is not None
            matched = matched or chosen
            params.append(replace(param, active=part) if chosen else param)
        found.append(replace(unit, params=tuple(params)))
    if not matched:
        raise ValueError(
            f"plan(active={{{pattern!r}: ...}}): it matches no parameter that computes with tokens; names are those of "
            f"model.named_parameters(), e.g. {names[-1:]}, and '*' does not cross a dot ('**' does)"
        )
    return found
