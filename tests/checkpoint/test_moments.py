"""Checkpoints at the moments at which users save and load while they train, each beside a twin that copies state dicts.

Sharded models are saved and loaded by hsdp.checkpoint, and by torch.distributed.checkpoint with torch's own functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from hsdp import checkpoint
from tests.ordinary.program import DIM, MESHES, TOLERANCE, Program, Results, adamw, blocks, results
from tests.support.rig import RankEnv
from tests.support.sharded import mesh_id, pool_for
from tests.support.twin import assert_same

Optimizer = torch.optim.Optimizer


class Saving(Program):
    """A program that saves and loads, in a directory that all ranks see; its twin keeps copies."""

    def __init__(self, env: RankEnv, shape: tuple[int, ...], sharded: bool, directory: Path) -> None:
        super().__init__(env, shape, sharded)
        self._directory = directory
        self._kept: dict[str, Any] = {}

    def save(self, name: str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        if not self.sharded:
            self._kept[name] = copy.deepcopy((model.state_dict(), optimizer and optimizer.state_dict()))
        else:
            checkpoint.save(self._directory / name, model, optimizer, step=0)

    def load(self, name: str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        if self.sharded:
            checkpoint.load(self._directory / name, model, optimizer)
            return
        state, of_optimizer = copy.deepcopy(self._kept[name])
        model.load_state_dict(state)
        if optimizer is not None:
            optimizer.load_state_dict(of_optimizer)

    def steps(self, model: nn.Module, optimizer: Optimizer, steps: Iterable[int], micro: Callable[[int], None]) -> None:
        """Steps of three micro-batches, of which the last one communicates; behind each `micro` runs."""
        for k in steps:
            for i in range(3):
                if self.sharded:
                    model.set_requires_gradient_sync(i == 2)  # type: ignore[operator]
                self.loss(model, 3 * k + i).backward()
                micro(i)
            optimizer.step()
            optimizer.zero_grad()


class SavingByTorch(Saving):
    """The same by torch.distributed.checkpoint."""

    def save(self, name: str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        if not self.sharded:
            super().save(name, model, optimizer)
            return
        dcp.save(self._states(model, optimizer), checkpoint_id=str(self._directory / name))

    def load(self, name: str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        if not self.sharded:
            super().load(name, model, optimizer)
            return
        states = self._states(model, optimizer)
        dcp.load(states, checkpoint_id=str(self._directory / name))
        set_model_state_dict(model, states["model"])
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, states["optimizer"])

    @staticmethod
    def _states(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
        states = {"model": get_model_state_dict(model)}
        return states if optimizer is None else states | {"optimizer": get_optimizer_state_dict(model, optimizer)}


Scenario = Callable[[Saving], Results]


def _begun(program: Saving, steps: int = 2) -> tuple[nn.Sequential, Optimizer]:
    model = blocks()
    program.shard(model, model)
    optimizer = adamw(model)
    program.train(model, optimizer, range(steps))
    return model, optimizer


def goes_back_and_on(program: Saving) -> Results:
    """Trains on, goes back to what was saved, and trains on other batches."""
    model, optimizer = _begun(program)
    program.save("a", model, optimizer)
    program.train(model, optimizer, range(2, 4))
    program.load("a", model, optimizer)
    program.train(model, optimizer, range(4, 6))
    return results(model)


def saves_between_micro_batches(program: Saving) -> Results:
    """Saves while sums of gradients are pending, and goes back there later."""
    model, optimizer = _begun(program)
    program.steps(model, optimizer, [5], lambda i: program.save("a", model, optimizer) if i == 1 else None)
    program.load("a", model, optimizer)
    program.train(model, optimizer, range(2))
    return results(model)


def loads_between_micro_batches(program: Saving) -> Results:
    """Loads older weights while sums of gradients are pending: the sums stay, as with one device."""
    model, optimizer = _begun(program, steps=1)
    program.save("a", model)
    program.train(model, optimizer, range(1, 3))
    program.steps(model, optimizer, [5], lambda i: program.load("a", model) if i == 1 else None)
    return results(model)


def saves_between_forward_and_backward(program: Saving) -> Results:
    """Saves while a forward waits for its backward."""
    model, optimizer = _begun(program)
    loss = program.loss(model, 3)
    program.save("a", model, optimizer)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    program.load("a", model, optimizer)
    program.train(model, optimizer, range(2))
    return results(model)


def saves_between_backward_and_step(program: Saving) -> Results:
    """Saves while gradients are there, and goes back behind the step."""
    model, optimizer = _begun(program)
    program.loss(model, 3).backward()
    program.save("a", model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    program.load("a", model, optimizer)
    program.train(model, optimizer, range(2))
    return results(model)


def saves_and_loads_without_gradients(program: Saving) -> Results:
    """Evaluates under `no_grad`, saves there, and loads there."""
    model, optimizer = _begun(program)
    with torch.no_grad():
        seen = model(program.own_batch(7))
        program.save("a", model, optimizer)
    program.train(model, optimizer, range(2))
    with torch.no_grad():
        program.load("a", model, optimizer)
        seen = seen + model(program.own_batch(7))
    program.train(model, optimizer, range(2))
    return results(model, seen=seen)


def trades_weights_for_their_averages(program: Saving) -> Results:
    """Keeps averages in a second model, saves both, and goes on from the averages."""
    (model, optimizer), averages = _begun(program), blocks()
    program.shard(averages, averages)
    averages.load_state_dict(model.state_dict())
    for k in range(3):
        program.train(model, optimizer, [k])
        with torch.no_grad():
            for mean, param in zip(averages.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.3)
    program.save("model", model, optimizer)
    program.save("averages", averages)
    program.load("averages", model)
    program.train(model, optimizer, [5])
    return results(model, evaluated=program.evaluate(averages, 9))


def goes_on_in_a_model_of_other_units(program: Saving) -> Results:
    """Loads what several units saved into a model that is one unit, with a new optimizer."""
    model, optimizer = _begun(program)
    program.save("a", model, optimizer)
    other = blocks()
    program.shard(other)
    optimizer = adamw(other)
    program.load("a", other, optimizer)
    program.train(other, optimizer)
    return results(other)


def loads_one_block(program: Saving) -> Results:
    """Saves a block, and a layer inside of another, and loads those alone."""
    model, optimizer = _begun(program)
    program.save("block", model[1])
    program.save("layer", model[2][0])  # type: ignore[index]
    program.train(model, optimizer, range(2, 4))
    program.load("block", model[1])
    program.load("layer", model[2][0])  # type: ignore[index]
    program.train(model, optimizer, range(4, 6))
    return results(model)


def steps_what_is_not_frozen(program: Saving) -> Results:
    """Has groups of its own for what it trains, and a block that is frozen."""
    model = blocks()
    model[0].requires_grad_(False)
    program.shard(model, model)
    groups = [{"params": model[k].parameters(), "lr": 0.01 * k} for k in (1, 2)]
    optimizer = torch.optim.AdamW(groups)
    program.train(model, optimizer)
    program.save("a", model, optimizer)
    program.train(model, optimizer)
    program.load("a", model, optimizer)
    program.train(model, optimizer)
    return results(model)


def loads_into_another_dtype(program: Saving) -> Results:
    """Loads weights of float64 into a model of float32."""
    model, _ = _begun(program)
    program.save("a", model)
    other = blocks().float()
    program.shard(other, other)
    if program.sharded and type(program) is Saving:
        checkpoint.load(program._directory / "a", other, cast=True)
    else:
        program.load("a", other)
    return results(other)


def fine_tunes_with_a_new_head(program: Saving) -> Results:
    """Loads all but the head, under other names, into a model with a head of another size."""

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = blocks(2)
            self.head = nn.Linear(DIM, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x))
            return out

    model, _ = _begun(program)
    state = copy.deepcopy(dict(model.state_dict()))
    program.save("a", model)
    torch.manual_seed(5)
    tuned = Tuned()
    program.shard(tuned, tuned.body)
    if program.sharded and type(program) is Saving:
        names = {name: f"body.{name}" for name in state if not name.startswith("2.")}
        checkpoint.load(program._directory / "a", tuned, rename=names.get, include=["body.*"])
    else:
        kept = {f"body.{name}": value for name, value in state.items() if not name.startswith("2.")}
        missing, unexpected = tuned.load_state_dict(kept, strict=False)
        assert (missing, unexpected) == (["head.weight", "head.bias"], [])
    program.train(tuned, adamw(tuned))
    return results(tuned)


SCENARIOS: list[Scenario] = [
    goes_back_and_on,
    saves_between_micro_batches,
    loads_between_micro_batches,
    saves_between_forward_and_backward,
    saves_between_backward_and_step,
    saves_and_loads_without_gradients,
    trades_weights_for_their_averages,
    goes_on_in_a_model_of_other_units,
    loads_one_block,
    steps_what_is_not_frozen,
    loads_into_another_dtype,
    fine_tunes_with_a_new_head,
]


def check_moments(env: RankEnv, shape: tuple[int, ...], directory: Path, kind: type[Saving], scenario: Scenario) -> None:
    def run(sharded: bool) -> Results:
        torch.manual_seed(0)
        return scenario(kind(env, shape, sharded, directory))

    expected, told = run(False), run(True)
    assert_same(dict(told), dict(expected), TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("kind", [Saving, SavingByTorch], ids=["hsdp", "dcp"])
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_saving_and_loading_at_any_moment_equals_the_twin(
    request: pytest.FixtureRequest, tmp_path: Path, shape: tuple[int, ...], kind: type[Saving], scenario: Scenario
) -> None:
    pool_for(request, shape).run(check_moments, shape, tmp_path, kind, scenario)
