"""Modules whose forward changes their buffers, and averages that are copies of a model: what is beside the parameters.

Every rank has running statistics and power iterations of its own batches, as under DDP without SyncBatchNorm: the twin
takes the buffers of the rank whose loss it computes, and shows those of the rank that it stands beside.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.ordinary.program import (
    DIM,
    MESHES,
    LossOf,
    Program,
    Results,
    Scenario,
    blocks,
    check,
    mean_square,
    results,
    scenario_id,
    scenarios_in,
    sgd,
)
from tests.support.sharded import mesh_id, pool_for


class _BuffersOfRanks:
    """A loss for which the twin's model has the buffers of each rank in turn."""

    def __init__(self, program: Program, model: nn.Module, loss_of: LossOf) -> None:
        self.program, self.loss_of, self.calls = program, loss_of, 0
        self.buffers = [
            [{name: None if b is None else b.clone() for name, b in module._buffers.items()} for module in model.modules()]
            for _ in range(program.world_size)
        ]

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        if self.program.sharded:
            return self.loss_of(model, x)
        self._show(model, self.calls % self.program.world_size)
        self.calls += 1
        loss = self.loss_of(model, x)
        self._show(model, self.program.rank)
        return loss

    def _show(self, model: nn.Module, rank: int) -> None:
        for module, buffers in zip(model.modules(), self.buffers[rank], strict=True):
            module._buffers.update(buffers)


def _fit(program: Program, model: nn.Module, units: Iterable[nn.Module], loss_of: LossOf = mean_square) -> Results:
    program.shard(model.double(), units)
    optimizer, seen = sgd(model), []
    of_ranks = _BuffersOfRanks(program, model, loss_of)
    for k in range(3):
        program.train(model, optimizer, [k], of_ranks)
        seen.append(program.evaluate(model, 90 + k))
    return results(model, seen=torch.stack(seen))


def _normalised(*momenta: float | None) -> nn.Sequential:
    layers = [(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM, momentum=momentum)) for momentum in momenta]
    return nn.Sequential(*[nn.Sequential(*pair) for pair in layers])


def keeps_running_statistics(program: Program) -> Results:
    """Has batch norms with several momenta, some of them units by themselves."""
    model = _normalised(0.1, None, 0.5)
    return _fit(program, model, [model[0][1], model[1][1], model[2]])  # type: ignore[index]


def toggles_evaluation_between_forward_and_backward(program: Program) -> Results:
    """Evaluates between a forward and its backward, and trains with the statistics of one unit at rest."""

    def toggled(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        model[0].eval()  # type: ignore[index,operator]
        loss: Tensor = out.square().mean() + model(x + 1).square().mean()
        model.train()
        return loss

    model = _normalised(0.1, 0.2, 0.3)
    return _fit(program, model, model, toggled)


def normalises_spectra(program: Program) -> Results:
    """Has `spectral_norm` in each unit, once with the original weight in a unit inside of it."""
    model = blocks(3)
    for block in model:
        parametrizations.spectral_norm(block[0])  # type: ignore[index]
    return _fit(program, model, [model[0][0].parametrizations.weight, *model])  # type: ignore[index]


def averages_weights_in_a_copy_that_it_shards_too(program: Program) -> Results:
    """Makes an `AveragedModel` before sharding, shards what is inside, and updates and evaluates it."""
    model = blocks(2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    program.shard(model, model)
    program.shard(average.module, average.module)
    optimizer = sgd(model)
    for k in range(4):
        program.train(model, optimizer, [k])
        average.update_parameters(model)
    averages = {f"average of {name}": tensor for name, tensor in results(average.module).items()}
    return {**results(model, evaluated=program.evaluate(average, 9)), **averages}


@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_states_equal_their_twins(request: pytest.FixtureRequest, shape: tuple[int, ...], scenario: Scenario) -> None:
    pool_for(request, shape).run(check, shape, scenario)
