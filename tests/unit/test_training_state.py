"""The training state of a unit: what it is when, and that calls at the wrong moment name unit, state and expected ones."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn

import hsdp
from hsdp.unit.state import TrainingState, training_state
from tests.support.deep import Deep, floats, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, shard


def _states(model: Any) -> dict[str, str]:
    return {unit.name: training_state(unit).name for unit in model._units()}


class Meddling(Deep):
    """Calls something in its forward, and in its backward."""

    in_forward: Callable[[], object] = staticmethod(lambda: None)
    in_backward: Callable[[], object] = staticmethod(lambda: None)
    behind_the_first_node: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.in_forward()
        x.register_hook(lambda grad: (self.in_backward(), None)[1])
        assert x.grad_fn is not None
        x.grad_fn.register_hook(lambda *_: (self.behind_the_first_node(), None)[1])
        return self.blocks[1](x)


def _sequence(env: RankEnv) -> None:
    model: Any = shard(seeded(Meddling), env.mesh(2))
    results: list[list[str]] = []

    def look() -> None:
        results.append([_states(model)[name] for name in ("Meddling (root)", "blocks.0", "blocks.1")])

    model.in_forward = model.in_backward = model.behind_the_first_node = look
    step(model, env.rank)
    look()
    with hsdp.full_params(model.blocks[0]):
        look()
    assert results == [
        ["FORWARD", "IDLE", "IDLE"],  # between the two blocks
        ["BACKWARD_PRE", "IDLE", "BACKWARD_PRE"],  # a hook on the first block's output runs before that is entered
        ["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST"],
        ["IDLE", "IDLE", "IDLE"],
        ["IDLE", "FULL_PARAMS", "IDLE"],
    ], results


def test_units_say_what_they_are_doing(pool2: Pool) -> None:
    pool2.run(_sequence)


def _threads(env: RankEnv) -> None:
    plain = seeded(Meddling)
    model: Any = shard(copy.deepcopy(plain), env.mesh(2))
    errors: list[BaseException] = []
    results: list[str] = []

    def elsewhere() -> None:
        for module in (model, model.blocks[0]):
            try:
                module(floats(env.rank))
            except hsdp.StateError as error:
                errors.append(error)
        with pytest.raises(hsdp.StateError, match=r"state_dict\(\) was called while a forward or backward"):
            model.state_dict()
        results.append("state_dict()")

    def meddle() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    for moment in ("in_forward", "in_backward"):
        setattr(model, moment, meddle)
        check_grads(model, plain, step, env.rank, env.world_size)
        setattr(model, moment, lambda: None)
        check_rest(model)
    expected = "its forward was called while a forward or backward of the same model runs in another thread; use a sharded"
    assert len(errors) == 4 and all(expected in str(error) for error in errors), errors
    assert len(results) == 2
    thread = threading.Thread(target=step, args=(model, env.rank))  # by turns they are welcome
    thread.start()
    thread.join()
    model.zero_grad()
    check_rest(model)


def test_passes_in_two_threads_at_once_are_refused_and_do_no_harm(pool2: Pool) -> None:
    pool2.run(_threads)


def _in_forward(model: Any, call: Callable[[], object], rank: int) -> None:
    model.in_forward = call
    model(floats(rank))


def _in_backward(model: Any, call: Callable[[], object], rank: int) -> None:
    model.in_backward = call
    step(model, rank)


def _in_full_params(model: Any, call: Callable[[], object], rank: int) -> None:
    with hsdp.full_params(model):
        call()


@contextmanager
def _entered(model: Any) -> Iterator[None]:
    with hsdp.full_params(model):
        yield


CALLS: dict[str, Callable[[Any, int], object]] = {
    "full_params": lambda model, rank: _entered(model).__enter__(),
    "gathered_apply": lambda model, rank: hsdp.gathered_apply(model, lambda module: None),
    "sync_module_states": lambda model, rank: hsdp.sync_module_states(model),
    "flush": lambda model, rank: model.flush(),
    "reshard": lambda model, rank: model.reshard(),
    "unshard": lambda model, rank: model.unshard(),
    "forward": lambda model, rank: model(floats(rank)),
}
MOMENTS = {"FORWARD": _in_forward, "BACKWARD": _in_backward, "FULL_PARAMS": _in_full_params}
ALLOWED = {("unshard", "FORWARD"), ("unshard", "BACKWARD"), ("forward", "FORWARD"), ("forward", "BACKWARD")}


def _refused(env: RankEnv, moment: str) -> None:
    plain, model = seeded(Meddling), shard(seeded(Meddling), env.mesh(2))
    for name, call in CALLS.items():
        if (name, moment) in ALLOWED:
            continue
        message = rf"(?i)^{name}: unit .* is .*{moment}.*, expected IDLE.*; call it "
        with pytest.raises(hsdp.StateError, match=message):
            MOMENTS[moment](model, lambda call=call: call(model, env.rank), env.rank)
        model.__dict__.pop("in_forward", None)
        model.__dict__.pop("in_backward", None)
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("moment", MOMENTS)
def test_calls_at_the_wrong_moment_name_unit_state_and_what_was_expected(pool2: Pool, moment: str) -> None:
    pool2.run(_refused, moment)


def _backward_inside(env: RankEnv) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(2))
    loss = model(floats(env.rank)).square().sum()
    message = r"^(backward|use of the sharded parameters): unit 'blocks\.2' is FULL_PARAMS \(.*\), expected IDLE"
    with hsdp.full_params(model.blocks[2]), pytest.raises(hsdp.StateError, match=message):  # type: ignore[index]
        loss.backward()
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


def test_a_backward_through_lent_parameters_is_refused(pool2: Pool) -> None:
    pool2.run(_backward_inside)


def _after_a_failure(env: RankEnv) -> None:
    """A backward that raised is over: nothing has to be reset before parameters are looked at."""
    plain, model = seeded(Meddling), shard(seeded(Meddling), env.mesh(2))
    blocks: Any = model.blocks
    model.in_backward = lambda: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        step(model, env.rank)
    del model.in_backward
    assert set(_states(model).values()) == {"IDLE"}
    with hsdp.full_params(model):
        assert type(blocks[0].weight) is nn.Parameter
    model.reshard()  # type: ignore[operator]
    check_grads(model, plain, step, env.rank, env.world_size)


def test_after_a_failed_backward_units_are_idle(pool2: Pool) -> None:
    pool2.run(_after_a_failure)


def test_every_state_has_words_of_its_own() -> None:
    assert [state.name for state in TrainingState] == ["IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST", "FULL_PARAMS"]
    assert len({state.value for state in TrainingState}) == 5
