"""What a unit is doing, and the errors of a call that comes at another moment than it can be carried out at.

IDLE --forward--> FORWARD --> IDLE --backward--> BACKWARD_PRE --gradients complete--> BACKWARD_POST --> IDLE
IDLE --full_params--> FULL_PARAMS --> IDLE
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from hsdp.errors import StaleParametersError, StateError

if TYPE_CHECKING:
    from hsdp.unit import Unit


class TrainingState(enum.Enum):
    """What a unit is doing."""

    IDLE = "idle"
    FORWARD = "in its forward"
    BACKWARD_PRE = "in backward, its gradients incomplete"
    BACKWARD_POST = "in backward, its gradients on their way"
    FULL_PARAMS = "lent to full_params, gathered_apply or init_sharded"


def training_state(unit: Unit) -> TrainingState:
    """What `unit` is doing now. A backward that raised is over, though nobody could tell the unit."""
    if unit.lent:
        return TrainingState.FULL_PARAMS
    if unit.state in (TrainingState.BACKWARD_PRE, TrainingState.BACKWARD_POST):
        runtime = unit.runtime
        return unit.state if runtime is not None and runtime.in_backward() else TrainingState.IDLE
    return unit.state


def expect(unit: Unit, what: str, *expected: TrainingState) -> None:
    """Raises StateError if `unit` is in none of the states in which `what` can be done."""
    state = training_state(unit)
    if state not in expected:
        raise wrong_state(unit, what, f"{state.name} ({state.value})", *expected)


def wrong_state(unit: Unit, what: str, found: str, *expected: TrainingState) -> StateError:
    """The error of a call that finds `unit` in a state in which it cannot be carried out."""
    names = " or ".join(state.name for state in expected)
    when = "between iterations" if expected == (TrainingState.IDLE,) else "at another moment"
    return StateError(f"{what}: unit {unit.name!r} is {found}, expected {names}; call it {when}")


def stale(unit: Unit) -> StaleParametersError:
    """The error of a backward whose parameters are not those of its forward any more."""
    return StaleParametersError(
        f"unit {unit.name!r}: the parameters were changed (optimizer step, load_state_dict or .to()) between a forward and "
        "its backward, so its gradients would be wrong; run backward before the change, or forward again after it"
    )
