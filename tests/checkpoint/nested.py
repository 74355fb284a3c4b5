"""An optimizer whose state is nested, and comparisons of nested values."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.twin import full


class Nested(torch.optim.Optimizer):
    """Momenta at several depths, all of which the step uses: one that comes back wrong changes the losses."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    made = [torch.zeros_like(param) for _ in range(6)]
                    state["list"] = [made[0], made[1]]
                    state[0] = {1: made[2], "b": {}}
                    state["tuple"] = (made[3], (1, [2]))
                    state["deep"] = {"a": [{2: (made[4],)}, None], "queue": collections.deque([made[5]], maxlen=2)}
                    state["plain"] = {
                        "empty": [],
                        "name": "x",
                        "none": None,
                        "ordered": collections.OrderedDict(z=1, a=(2,)),
                    }
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                moved = param.grad
                for place, held in enumerate(moments(state)):
                    held.mul_(0.5 + 0.05 * place).add_(moved)
                    moved = held
                param.sub_(moved, alpha=group["lr"])


def moments(state: dict[Any, Any]) -> list[Tensor]:
    return [*state["list"], state[0][1], state["tuple"][0], state["deep"]["a"][0][2][0], state["deep"]["queue"][0]]


def whole(value: Any) -> Any:
    """The value with whole tensors at any depth, gathered without the code under test."""
    if isinstance(value, Tensor):
        return full(value)
    if isinstance(value, dict):
        items = {key: whole(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)
    if isinstance(value, collections.deque):
        return collections.deque(map(whole, value), value.maxlen)
    return type(value)(map(whole, value)) if isinstance(value, (list, tuple)) else value


def same(found: Any, expected: Any) -> bool:
    """Of one structure, kinds of containers and keys included, and equal bit for bit."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(found, dict):
        keys = [(type(key), key) for key in found] == [(type(key), key) for key in expected]
        return keys and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, (list, tuple, collections.deque)):
        limits = getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
        return limits and len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: whole(dict(optimizer.state[p])) for name, p in model.named_parameters() if optimizer.state.get(p)}


def check_shards(model: nn.Module, optimizer: Nested) -> None:
    for param in model.parameters():
        for held in moments(optimizer.state[param]) if optimizer.state.get(param) else []:
            assert type(held) is (DTensor if isinstance(param, DTensor) else Tensor)
            if isinstance(param, DTensor):
                assert held.placements == param.placements
