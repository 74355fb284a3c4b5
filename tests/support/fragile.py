"""A model that fails where it is told to, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.graphs import Layer, Net


class Fuse:
    """Where to fail next; blows once."""

    where: str | None = None
    error: type[BaseException] = ValueError

    @classmethod
    def at(cls, where: str) -> None:
        """Blows if this is the place."""
        if cls.where == where:
            cls.where = None
            raise cls.error("boom")


class _Mined(torch.autograd.Function):
    """Does nothing forward; backward is a place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        Fuse.at(ctx.where)
        return grad, None


def _mined(x: Tensor, where: str) -> Tensor:
    return _Mined.apply(x, where)


class FragileLayer(Layer):
    """Has places in its forward and, between its parameters' uses, in its backward."""

    index = 0
    recomputed = False

    def forward(self, x: Tensor) -> Tensor:
        Fuse.at(f"forward of {self.index}, first")
        y = self.norm(x)
        Fuse.at(f"forward of {self.index}")
        y = _mined(torch.relu(self.up(y)), f"backward of {self.index}")
        if torch._C._current_graph_task_id() != -1:
            Fuse.at(f"recomputation of {self.index}")
        return _mined(x, f"backward of {self.index}, last") + self.down(y) * self.scale


class Fragile(Net):
    """Fails where the fuse says."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__(FragileLayer)
        self.use_reentrant = use_reentrant
        for index, block in enumerate(self.blocks):
            block.index = index

    def walk(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = _mined(x, f"backward before {index}")
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
            Fuse.at(f"forward after {index}")
        if x.requires_grad:
            x.register_hook(lambda grad: Fuse.at("hook on a tensor"))
        return x


PLACES = [
    "forward of 0, first",
    "forward of 0",
    "forward of 2",
    "forward after 0",
    "forward after 2",
    "backward of 0",
    "backward of 1",
    "backward of 2",
    "backward of 0, last",
    "backward of 1, last",
    "backward before 0",
    "backward before 1",
    "backward before 2",
    "hook on a tensor",
]


def fail(where: str, error: type[BaseException], act: Callable[[], object]) -> None:
    """`act` fails at this place, in this way."""
    Fuse.where, Fuse.error = where, error
    try:
        with pytest.raises(error, match="boom"):
            act()
        assert Fuse.where is None
    finally:
        Fuse.where = None
