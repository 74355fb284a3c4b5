"""The casts of what goes into a forward and comes out of it: containers of users' classes come back as they were."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hsdp.schedule.outputs import SideOutputs, map_tensors


class Both(OrderedDict[str, Any]):
    """Attributes that are items as well, as outputs of diffusers' models have them."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


@dataclasses.dataclass
class Sample(Both):
    sample: Any = None


@dataclasses.dataclass
class Needed(Both):
    """Its constructor wants arguments."""

    sample: Any
    other: int = 3


class Split(dict[str, Any]):
    """A constructor that takes something else."""

    def __init__(self, split: str = "train", **items: Any) -> None:
        super().__init__(**items)
        self.split = split


class Attributes(dict[str, Any]):
    """Items are attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


@dataclasses.dataclass
class Derived:
    x: Tensor
    total: Any = dataclasses.field(init=False, default=None)
    calls: int = 0

    def __post_init__(self) -> None:
        self.calls += 1
        self.total = self.x.sum()


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    name: str = "a"


class Pair(NamedTuple):
    x: Tensor
    y: int


def ones() -> Tensor:
    return torch.ones(2, 3)


VALUES: list[Any] = [
    Sample(sample=ones()),
    Needed(ones()),
    Split("test", x=ones(), y=1),
    Attributes(x=ones(), y=[ones()]),
    Derived(ones()),
    Frozen(ones(), "b"),
    Pair(ones(), 2),
    {ones()},
    frozenset([1, ones()]),
    defaultdict(list, x=ones()),
    OrderedDict(x=ones()),
    {"x": [ones(), (ones(), {"y": ones()})]},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_containers_keep_their_class_and_all_that_is_in_them(value: Any) -> None:
    before = _told(value)
    same = map_tensors(value, lambda tensor: tensor)
    cast = map_tensors(value, lambda tensor: tensor.bfloat16())
    assert same is value, "nothing changed"
    assert type(cast) is type(value)
    assert _told(value) == before, "the caller's own was changed"
    assert _told(cast) == before.replace("float32", "bfloat16")


def _told(value: Any) -> str:
    """What is in a value, with dtypes in the places of tensors."""
    if isinstance(value, Tensor):
        return str(value.dtype)
    told: list[Any] = [type(value).__name__]
    if isinstance(value, dict):
        told += [(key, _told(item)) for key, item in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        told += sorted(map(_told, value)) if isinstance(value, (set, frozenset)) else map(_told, value)
    names = dir(value) if dataclasses.is_dataclass(value) else getattr(value, "__dict__", {})
    if not isinstance(value, (int, str, float)):
        told += [
            (n, _told(getattr(value, n)))
            for n in sorted(names)
            if not n.startswith("_") and not callable(getattr(value, n))
        ]
    else:
        told.append(value)
    return str(told)


class Reluctant:
    """What a subclass of a container may do to those who ask it, as e3nn's irreps do."""

    def __len__(self) -> int:
        raise NotImplementedError

    __reversed__ = values = __len__


@pytest.mark.parametrize("container", [tuple, list, deque, dict])
def test_side_outputs_are_found_in_containers_whose_own_methods_raise(container: type) -> None:
    left = torch.ones((), requires_grad=True) * 2
    module = nn.Module()
    module.left = type("Held", (Reluctant, container), {})([("aux", left)])
    assert [id(found) for found in SideOutputs([module]).tensors((), 0)] == [id(left)]
