"""What the rules' tests share: a small deep model, what plain autograd says, and a log of what the engine starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hsdp
from hsdp.comm.collectives import Comm
from hsdp.comm.work import CommWork
from tests.support.twin import full_grads

DIM = 6  # not a multiple of 4: some ranks of four hold less than others, of vectors nothing

VERBS = ("all_gather", "reduce_scatter", "all_reduce")
"""The verbs of `Comm` that start a collective."""


class Deep(nn.Module):
    """Units in a row, and a root with a parameter of its own behind them.

    `recompute` checkpoints the units in pairs, reentrant or not, so that a recomputation opens units itself.
    """

    def __init__(self, recompute: bool | None = None, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(layers))
        self.last = nn.Linear(DIM, DIM)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, len(self.blocks), 2):
            pair = partial(self._pair, first)
            x = pair(x) if self.recompute is None else checkpoint(pair, x, use_reentrant=self.recompute)
        return self.last(x)

    def _pair(self, first: int, x: Tensor) -> Tensor:
        for block in self.blocks[first : first + 2]:
            x = torch.tanh(block(x))
        return x


class RootFirst(Deep):
    """The root computes with parameters of its own before the units."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.last(x))
        for first in range(0, len(self.blocks), 2):
            x = checkpoint(self._pair, first, x, use_reentrant=self.recompute)
        return x


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A model in float64, the same at every call and on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return build().double()


def floats(rank: int, k: int = 0, dim: int = DIM) -> Tensor:
    """Batch `k` of a rank: [3, dim], float64. It needs gradients: reentrant checkpoints do without otherwise."""
    generator = torch.Generator().manual_seed(1009 * rank + k)
    return torch.randn(3, dim, generator=generator, dtype=torch.float64).requires_grad_()


def loss_of(model: nn.Module, rank: int, k: int = 0) -> Tensor:
    """A loss whose gradients depend on the parameters."""
    loss: Tensor = model(floats(rank, k)).square().sum()
    return loss


def step(model: nn.Module, rank: int, k: int = 0) -> None:
    """One forward and backward."""
    loss_of(model, rank, k).backward()


def mean_grads(plain: nn.Module, run: Callable[[nn.Module, int], object], world: int) -> dict[str, Tensor | None]:
    """The mean over ranks of the gradients that `run(plain, rank)` makes; None where no rank makes one."""
    sums: dict[str, Tensor | None] = {name: None for name, _ in plain.named_parameters()}
    for rank in range(world):
        plain.zero_grad()
        run(plain, rank)
        for name, grad in full_grads(plain).items():
            held = sums[name]
            sums[name] = held if grad is None else grad if held is None else held + grad
    return {name: None if total is None else total / world for name, total in sums.items()}


def mean_into(plain: nn.Module, run: Callable[[nn.Module, int], object], world: int) -> None:
    """Gives the twin the gradients that the sharded model has: those of `mean_grads`."""
    means = mean_grads(plain, run, world)
    for name, param in plain.named_parameters():
        param.grad = means[name]


def only_sharded(model: nn.Module, method: str, *args: Any) -> None:
    """Calls a method that only a sharded model has, so that one function drives both the model and its twin."""
    if isinstance(model, hsdp.HSDPModule):
        getattr(model, method)(*args)


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The collectives that start inside it, in order, as "verb unit"; a test may append what happens between."""
    log: list[str] = []

    def logged(verb: str, start: Callable[..., CommWork]) -> Callable[..., CommWork]:
        def wrapper(comm: Comm, owner: Any, *args: Any) -> CommWork:
            log.append(f"{verb} {owner.name}")
            return start(comm, owner, *args)

        return wrapper

    with ExitStack() as stack:
        for verb in VERBS:
            stack.enter_context(mock.patch.object(Comm, verb, logged(verb, getattr(Comm, verb))))
        yield log


def of_kind(log: Sequence[str], *kinds: str) -> list[str]:
    """The entries of a log that are of these kinds."""
    return [entry for entry in log if entry.partition(" ")[0] in kinds]


@contextmanager
def never_done() -> Iterator[None]:
    """Collectives seem under way until they are waited for: nothing lands because a poll came late enough."""
    with mock.patch.object(CommWork, "done", return_value=False):
        yield
