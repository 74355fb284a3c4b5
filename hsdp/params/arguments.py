"""The arguments of an operator by their names in its schema, and which of them it writes to."""

from __future__ import annotations

from typing import Any


def by_name(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments that an operator was given, in the order of its schema, then those that were given by name."""
    names = [argument.name for argument in op._schema.arguments]
    return dict(zip(names, args, strict=False)) | (kwargs or {})


def written_by(op: Any) -> list[str]:
    """The names of the arguments that an operator writes to."""
    return [one.name for one in op._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
