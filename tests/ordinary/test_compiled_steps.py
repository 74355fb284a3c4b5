"""Loops, or pieces of them, that users compile: what cannot be traced runs as it is, and the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.ordinary.program import (
    Program,
    Results,
    Scenario,
    blocks,
    check,
    mean_square,
    results,
    scenario_id,
    scenarios_in,
)
from tests.support.sharded import mesh_id, pool_for


def _compiled(program: Program, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled, in the sharded run."""
    if not program.sharded:
        return function
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(function, backend="eager")
    return compiled


def _local(program: Program, model: nn.Module, **options: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hsdp.optim.local(optimizer, **options) if program.sharded else optimizer


def _fit(program: Program, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Results:
    """Trains with a compiled step of the optimizer."""
    model = blocks(2)
    program.shard(model, model)
    optimizer = make(model)
    step = _compiled(program, optimizer.step)
    for k in range(3):
        program.loss(model, k).backward()
        step()
        optimizer.zero_grad()
    return results(model)


def compiles_a_stock_step(program: Program) -> Results:
    """Compiles the step of an optimizer of torch."""
    return _fit(program, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def compiles_a_local_step(program: Program) -> Results:
    """Compiles a step of local tensors."""
    return _fit(program, lambda model: _local(program, model))


def compiles_a_shared_step(program: Program) -> Results:
    """Compiles a step that replicas share."""
    return _fit(program, lambda model: _local(program, model, over_replicas=True))


def compiles_clipping(program: Program) -> Results:
    """Compiles a function that clips gradients."""
    model = blocks(2)
    program.shard(model, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clip() -> Tensor:
        if program.sharded:
            return hsdp.clip_grad_norm_(model, 0.01)
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    compiled = _compiled(program, clip)
    for k in range(3):
        program.loss(model, k).backward()
        compiled()
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def compiles_its_loss(program: Program) -> Results:
    """Compiles the function that calls the model and computes the loss."""
    return program.fit(model := blocks(2), model, loss_of=_compiled(program, mean_square))


def compiles_a_whole_step(program: Program) -> Results:
    """Compiles a function with a forward, a backward, and a step that replicas share."""
    model = blocks(2)
    program.shard(model, model)
    optimizer = _local(program, model, over_replicas=True)

    def train(k: int) -> None:
        program.loss(model, k).backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = _compiled(program, train)
    for k in range(3):
        compiled(k)
    return results(model)


@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_compiled_steps_equal_their_twins(
    request: pytest.FixtureRequest, shape: tuple[int, ...], scenario: Scenario
) -> None:
    pool_for(request, shape).run(check, shape, scenario, timeout=120)
