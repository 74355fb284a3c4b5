"""Bytes, seconds, counts, dtypes and rows of names as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

_NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}

_MOST_LISTED = 12
"""Ranks, or kinds of them, that a message lists: a person reads no thousand."""


_ROUNDED = 0.9995
"""From here on three digits are those of 1, which the next larger unit writes shorter than "1e+03" of this one."""


def bytes_of(nbytes: float) -> str:
    """With three digits: "1.25 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1000 * _ROUNDED or unit == "TiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{_three_digits(nbytes)} {unit}"
        nbytes /= 1024
    raise AssertionError("TiB takes whatever is left")


def seconds_of(seconds: float) -> str:
    """With three digits: "12.5 ms"."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale * _ROUNDED or unit == "us":
            return f"{_three_digits(seconds / scale)} {unit}"
    raise AssertionError("microseconds take whatever is left")


def count_of(count: float) -> str:
    """With three digits: "70.6 B"."""
    for scale, unit in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if count >= scale * _ROUNDED:
            return f"{_three_digits(count / scale)}{unit}"
    return f"{count:.0f}"


def _three_digits(value: float) -> str:
    """Or more, where no unit is larger: "12,345"."""
    return f"{value:.3g}" if abs(value) < 1000 * _ROUNDED else f"{value:,.0f}"


def several(count: int, noun: str, plural: str = "s") -> str:
    """A number of things: "1 unit", "1,024 units", "2 micro-batches" with "es" as its plural's ending."""
    return f"{count:,} {noun}{plural if count != 1 else ''}"


def dtype_of(dtype: torch.dtype) -> str:
    """As the field abbreviates it: "bf16"."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def dotted(prefix: str, name: str) -> str:
    """The qualified name of what is called `name` in the module `prefix`; "" is the root."""
    return f"{prefix}.{name}" if prefix else name


def pattern_of(name: str) -> str:
    """A name without its numbers: those of alike modules are equal."""
    return re.sub(r"\d+", "#", name)


def together(names: Sequence[str]) -> str:
    """Names of one pattern as one: "blocks.0..31 (each of 32)"."""
    if len(names) == 1:
        return names[0]
    parts = zip(*(re.split(r"(\d+)", name) for name in (names[0], names[-1])), strict=True)
    span = "".join(first if first == last else f"{first}..{last}" for first, last in parts)
    return f"{span} (each of {len(names)})"


def listing(names: Iterable[str], limit: int = 8) -> str:
    """Names for a message, cut after `limit`."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def ranks_of(ranks: Sequence[int]) -> str:
    """At most a dozen of some ranks, and how many more there are: "[0, 1]", "[0, 1, ..., 11] and 1,012 more"."""
    first, more = list(ranks[:_MOST_LISTED]), len(ranks) - _MOST_LISTED
    return f"{first} and {more:,} more" if more > 0 else f"{first}"


def kinds_by_rank(doing: Mapping[int, str]) -> str:
    """What each rank does, ranks that do the same together, the rarest first: "rank(s) [1]: this; rank(s) [0, 2]: that"."""
    kinds: dict[str, list[int]] = {}
    for rank, what in doing.items():
        kinds.setdefault(what, []).append(rank)
    rarest = sorted(kinds.items(), key=lambda kind: len(kind[1]))
    listed = "; ".join(f"rank(s) {ranks_of(ranks)}: {what}" for what, ranks in rarest[:_MOST_LISTED])
    more = len(rarest) - _MOST_LISTED
    return f"{listed}; and {more:,} more kinds" if more > 0 else listed
