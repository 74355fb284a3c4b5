"""What the ordinary programs of users stand on: one run of a program, sharded or as its twin, and their comparison.

A scenario is a function that builds a model, has the program shard it, trains it, and returns all that must be equal. The
twin runs the same lines on one device: it trains on the mean of all ranks' losses, each rank's on batches of its own.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

import hsdp
from tests.support.rig import RankEnv
from tests.support.sharded import check_rest
from tests.support.twin import assert_same, full

DIM = 8
ROWS = (3, DIM)
"""The shape of a batch."""

MESHES: list[tuple[int, ...]] = [(2,), (2, 2)]
TOLERANCE = 1e-10

Results = dict[str, Tensor]
LossOf = Callable[[nn.Module, Tensor], Tensor]


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of programs that do not care which."""
    loss: Tensor = model(x).square().mean()
    return loss


class Program:
    """One run of a scenario, on every rank.

    Attributes:
        sharded: False for the twin.
        rank, world_size: the place of the rank, which the twin stands beside.
        mesh: that of the ranks; the twin needs it to know who draws which rows.
    """

    def __init__(self, env: RankEnv, shape: tuple[int, ...], sharded: bool) -> None:
        self.sharded = sharded
        self.rank, self.world_size = env.rank, env.world_size
        self.roots: list[nn.Module] = []
        self.mesh = env.mesh(shape)

    def shard(self, model: nn.Module, units: Iterable[nn.Module] = ()) -> nn.Module:
        """Makes units of these modules and of what is left of the model; leaves the twin alone."""
        if self.sharded:
            for module in (*units, model):
                hsdp.fully_shard(module, mesh=self.mesh)
            self.roots.append(model)
        return model

    def own_batch(self, k: int, shape: Sequence[int] = ROWS) -> Tensor:
        """Batch `k` of this rank, in float64; for the twin that of the rank it stands beside."""
        return _batch(self.rank, k, shape)

    def batches(self, k: int, shape: Sequence[int] = ROWS) -> list[Tensor]:
        """Batch `k` of this rank; for the twin those of all ranks."""
        ranks = [self.rank] if self.sharded else range(self.world_size)
        return [_batch(rank, k, shape) for rank in ranks]

    def loss(self, model: nn.Module, k: int, loss_of: LossOf = mean_square, shape: Sequence[int] = ROWS) -> Tensor:
        """The mean of the losses on batches `k`."""
        return mean([loss_of(model, x) for x in self.batches(k, shape)])

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: Iterable[int] = range(3),
        loss_of: LossOf = mean_square,
        shape: Sequence[int] = ROWS,
    ) -> None:
        """The loop that every tutorial has; `steps` are the batches."""
        for k in steps:
            self.loss(model, k, loss_of, shape).backward()
            optimizer.step()
            optimizer.zero_grad()

    def fit(
        self,
        model: nn.Module,
        units: Iterable[nn.Module] = (),
        *,
        loss_of: LossOf = mean_square,
        shape: Sequence[int] = ROWS,
    ) -> Results:
        """Shards the model, trains it for three steps, evaluates it, and returns its results."""
        self.shard(model.double(), units)
        self.train(model, sgd(model), loss_of=loss_of, shape=shape)
        return results(model, evaluated=self.evaluate(model, 90, shape))

    def evaluate(self, model: nn.Module, k: int, shape: Sequence[int] = ROWS) -> Tensor:
        """The model's output on this rank's batch `k`, in evaluation mode and without gradients."""
        was_training = model.training
        model.eval()
        with torch.no_grad():
            out: Tensor = model(self.own_batch(k, shape))
        model.train(was_training)
        return out


Scenario = Callable[[Program], Results]


def mean(values: Sequence[Tensor]) -> Tensor:
    """The mean of a few tensors."""
    return torch.stack(list(values)).mean(0)


def blocks(count: int = 3) -> nn.Sequential:
    """Layers in a row, in float64, each of which can be a unit."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(count)]).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def results(model: nn.Module, **others: Tensor) -> Results:
    """Copies of the whole parameters and buffers by name, and of what else the scenario made."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: full(tensor) for name, tensor in (*named.items(), *others.items())}


def scenarios_in(module: str) -> list[Scenario]:
    """The public functions of a module that take a program and give its results, in the order of the file."""
    functions = [value for name, value in vars(sys.modules[module]).items() if not name.startswith("_")]
    wanted = {"program": "Program", "return": "Results"}
    found = [one for one in functions if getattr(one, "__annotations__", None) == wanted and one.__module__ == module]
    assert all(one.__doc__ for one in found), "a scenario says what its user does"
    return found


def scenario_id(scenario: Scenario) -> str:
    """A scenario in a test's name."""
    return scenario.__name__


def check(env: RankEnv, shape: tuple[int, ...], scenario: Scenario) -> None:
    """The sharded run of a scenario gives what its twin gives, and leaves nothing of a step behind."""
    torch.manual_seed(0)
    expected = scenario(Program(env, shape, sharded=False))
    torch.manual_seed(0)
    program = Program(env, shape, sharded=True)
    results = scenario(program)
    assert program.roots, "the scenario has sharded nothing"
    assert_same(dict(results), dict(expected), TOLERANCE, TOLERANCE)
    gc.collect()  # a graph of gradients goes with its last reference, and keeps whole parameters until then
    for root in program.roots:
        check_rest(root)


def _batch(rank: int, k: int, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(1009 * rank + k)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
