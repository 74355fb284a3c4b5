"""What the checkpoint tests save and load: a model with every kind of parameter, and its training on any mesh.

The global batch has 4 rows whatever the number of ranks, so training goes the same way on each mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hsdp import fully_shard
from tests.support.twin import full
from tests.support.worker import RankEnv

GLOBAL_ROWS = 4
Shape = tuple[int, ...]
SHAPES: dict[str, Shape] = {"1": (), "1x2": (1, 2), "2x1": (2, 1), "1x4": (1, 4), "2x2": (2, 2), "4x1": (4, 1)}


class Layer(nn.Module):
    """Sizes that no number of ranks divides, a bias that is frozen, a norm with a running buffer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.up.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x)))


class Everything(nn.Module):
    """Tied, frozen, scalar, one-row, empty and unused parameters beside ordinary ones, in three units."""

    def __init__(self, vocab: int = 13, dim: int = 6, hidden: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Layer(dim, hidden) for _ in range(2))
        self.frozen = nn.Linear(dim, dim)
        self.frozen.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.25))
        self.shift = nn.Parameter(torch.rand(1, dim))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.rand(3))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.shift + self.nothing.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x) * self.temperature)


def build(mesh: DeviceMesh | None, seed: int = 0, model: Callable[[], nn.Module] = Everything) -> nn.Module:
    """The model in float64, sharded on `mesh` if there is one."""
    torch.manual_seed(seed)
    built = model().double()
    if mesh is not None:
        for block in built.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(built, mesh=mesh)
    return built


def mesh_of(env: RankEnv | None, shape: Shape) -> DeviceMesh | None:
    """The mesh of this shape; None for a process alone."""
    return env.mesh(shape) if env is not None and shape else None


def two_groups(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    """AdamW with two parameter groups: matrices decay, the rest does not and learns faster."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.03}]
    return torch.optim.AdamW(groups, lr=0.01, **kwargs)


def sgd_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw_fused(model: nn.Module) -> torch.optim.Optimizer:
    return two_groups(model, fused=True)


def adamw_foreach(model: nn.Module) -> torch.optim.Optimizer:
    return two_groups(model, foreach=True)


def adamw_amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return two_groups(model, amsgrad=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int], rank: int = 0, world_size: int = 1
) -> list[float]:
    """Trains on this rank's rows of the global batches of `steps`; returns this rank's losses."""
    rows = GLOBAL_ROWS // world_size
    losses = []
    for step in steps:
        tokens = torch.randint(13, (GLOBAL_ROWS, 6), generator=torch.Generator().manual_seed(step))
        mine = tokens[rank * rows : (rank + 1) * rows]
        logits = model(mine[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything in the model and the optimizer, whole, by name; gathered without the code under test."""
    found: dict[str, Any] = {name: full(value) for name, value in model.state_dict().items()}
    if optimizer is not None:
        names = {param: name for name, param in model.named_parameters()}
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                for key, value in optimizer.state.get(param, {}).items():
                    found[f"state.{names[param]}.{key}"] = full(value) if isinstance(value, Tensor) else value
            for key, value in group.items():
                if key not in ("params", "foreach", "fused"):
                    found[f"group.{index}.{key}"] = value
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal bit for bit; tells every name that differs."""
    assert found.keys() == expected.keys(), f"names differ: {sorted(found.keys() ^ expected.keys())}"
    wrong = []
    for name, value in found.items():
        other = expected[name]
        if isinstance(value, Tensor):
            same = isinstance(other, Tensor) and value.dtype == other.dtype and torch.equal(value, other)
        else:
            same = type(value) is type(other) and value == other
        if not same:
            wrong.append(name)
    assert not wrong, f"{len(wrong)} of {len(found)} differ: {wrong}"
