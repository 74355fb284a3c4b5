"""Options of a load: which names of a model are loaded, from which of a checkpoint, and the report of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate

from hsdp.errors import CheckpointError
from hsdp.policies import check_flag

Rename = Mapping[str, str] | Callable[[str], str | None]
"""From a checkpoint's name to a model's: a mapping (names that are not in it stay), or a function (None: leave it out)."""


@dataclass(frozen=True)
class Report:
    """What became of each name. Of several names of one (tied) parameter each has its own entry: one that is missing or
    skipped has the values that were loaded under another name.

    Attributes:
        loaded: names of the model that were loaded.
        missing: names of the model that the checkpoint does not have; they are as they were.
        skipped: names of the model that were not to be loaded (`include`, `exclude`).
        left: names of the checkpoint that the model does not have, or that were not to be loaded.
        converted: names that were loaded from another dtype.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in vars(self).items() if names or kind == "loaded")
        return f"{counts} of the names of model and checkpoint"


@dataclass(frozen=True)
class LoadOptions:
    """How names of a checkpoint are mapped to names of a model.

    Attributes:
        strict: names that are on one side only are errors.
        include, exclude: globs of the model's names; what `include` does not match or `exclude` does is not loaded.
        rename: from the checkpoint's names to the model's.
        cast: floating-point tensors of other dtypes are converted to the model's.
    """

    strict: bool = True
    include: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    rename: Rename | None = None
    cast: bool = False
    _patterns: list[list[re.Pattern[str]]] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        check_flag("load", self.strict, "strict=")
        check_flag("load", self.cast, "cast=")
        for name, globs in (("include", self.include), ("exclude", self.exclude)):
            if isinstance(globs, str) or not all(isinstance(one, str) for one in globs or ()):
                raise TypeError(f"load({name}={globs!r}): expected a list of patterns, like ['blocks.*']")
            self._patterns.append([re.compile(translate(one)) for one in globs or ()])
        if not (self.rename is None or isinstance(self.rename, Mapping) or callable(self.rename)):
            raise TypeError(f"load(rename={self.rename!r}): expected a mapping of names or a function of a name")

    @property
    def partial(self) -> bool:
        """Whether it can leave something out."""
        return not self.strict or self.include is not None or bool(self.exclude) or self.rename is not None

    def wants(self, name: str) -> bool:
        """Whether a name of the model is to be loaded."""
        include, exclude = self._patterns
        chosen = self.include is None or any(pattern.match(name) for pattern in include)
        return chosen and not any(pattern.match(name) for pattern in exclude)

    def sources(self, saved: Sequence[str]) -> dict[str, str]:
        """The name in the checkpoint by the name in the model.

        Raises:
            CheckpointError: two names would become one.
        """
        found: dict[str, str] = {}
        for name in saved:
            new = self._renamed(name)
            if new is None:
                continue
            if new in found:
                raise CheckpointError(f"rename= makes {new!r} of both {found[new]!r} and {name!r}")
            found[new] = name
        return found

    def _renamed(self, name: str) -> str | None:
        if self.rename is None:
            return name
        return self.rename.get(name, name) if isinstance(self.rename, Mapping) else self.rename(name)
