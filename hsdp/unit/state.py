"""What a unit is doing, and the errors of calls that come in the wrong state.

IDLE --forward--> FORWARD --> IDLE --backward--> BACKWARD_PRE --gradients taken--> BACKWARD_POST --> IDLE
IDLE --full_params--> FULL_PARAMS --> IDLE
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Protocol

from hsdp.errors import StaleParametersError, StateError


class TrainingState(enum.Enum):
    """What a unit is doing."""

    IDLE = "idle"
    FORWARD = "in its forward"
    BACKWARD_PRE = "in backward, its gradients not taken yet"
    BACKWARD_POST = "in backward, its gradients on their way"
    FULL_PARAMS = "lent to full_params, gathered_apply or init_sharded"


# Names of the module, as in unsharded.py: a step of a unit asks for ten.
IDLE, FORWARD, BACKWARD_PRE, BACKWARD_POST, FULL_PARAMS = TrainingState


class _Schedule(Protocol):
    def state_of(self, unit: Any) -> TrainingState | None: ...


class _Shadows(Protocol):
    def assigned(self) -> str | None: ...

    def replaced(self) -> str | None: ...


class Stateful(Protocol):
    """A unit, as far as its state is concerned."""

    name: str
    state: TrainingState
    lent: bool

    @property
    def runtime(self) -> _Schedule | None:
        """The schedule of its root."""
        ...

    @property
    def shadows(self) -> _Shadows:
        """Its shadows, by which it is opened, closed and checked."""
        ...


class UnitActivity:
    """What one unit is doing; `Unit` is one. The engine tells it what begins and ends, and writes to none of it.

    Attributes:
        state: what it is doing outside of backwards, which have their own list; `lent`: its parameters are lent to
            `full_params`; `lent_to_write`: and are written back. `training_state` knows all of it.
        calls: forward calls of its modules under way.
        ran: identities of its modules whose forward ended while others of them were still to run.
        split: a schedule of pipelines split a backward into inputs and weights, of which some weights' gradients may still
            be to come.
        unfound: it did so while `parameters()` showed its sharded parameters: gradients of weights are lost.
    """

    def __init__(self) -> None:
        self.state = IDLE
        self.lent = self.lent_to_write = False
        self.calls = 0
        self.ran: set[int] = set()
        self.split = self.unfound = False

    def rest(self) -> None:
        """The unit is idle."""
        self.state = IDLE

    def end_call(self, module: int, modules: int, calls: int) -> bool:
        """The forward of one of its `modules` ended, with `calls` others under way; returns whether more are to come."""
        self.calls = calls
        self.ran.add(module)
        return len(self.ran) < modules or calls > 0

    def set_calls(self, calls: int) -> None:
        """Sets how many forward calls of its modules are under way. Not counted: an exception may come at any point."""
        self.calls = calls

    def lend(self, writes_back: bool) -> None:
        """Its parameters are lent to `full_params` from now on, whose values may become its own in the end."""
        self.lent, self.lent_to_write = True, writes_back

    def take_back(self) -> None:
        """`full_params` has returned its parameters."""
        self.lent = self.lent_to_write = False

    def note_split(self, found: bool) -> None:
        """A schedule made the gradients of inputs alone; `found`: it knew the unsharded parameters, to go on with them."""
        self.split = True
        self.unfound = self.unfound or not found

    def end_split(self) -> None:
        """No gradients of weights are to come any more."""
        self.split = False

    def pop_unfound(self) -> bool:
        """Whether a split backward did not find its unsharded parameters since it was asked last."""
        unfound, self.unfound = self.unfound, False
        return unfound


def training_state(unit: Stateful) -> TrainingState:
    """What `unit` is doing now. A backward that raised is over, though no call told the unit."""
    if unit.lent:
        return FULL_PARAMS
    runtime = unit.runtime
    return (None if runtime is None else runtime.state_of(unit)) or unit.state


def expect(unit: Stateful, what: str, *expected: TrainingState) -> None:
    """Raises StateError if `unit` is in none of the states in which `what` can be done."""
    state = training_state(unit)
    if state not in expected:
        raise wrong_state(unit, what, f"{state.name} ({state.value})", *expected)


def refuse_assigned(units: Iterable[Stateful], what: str) -> None:
    """Raises StateError, once, if the `.data` of a sharded parameter was assigned to: the values are lost."""
    found = [(unit, name) for unit in units if (name := unit.shadows.assigned()) is not None]
    if found:
        unit, name = found[0]
        raise StateError(
            f"{what}: the .data of parameter {name!r} of unit {unit.name!r} was assigned to, which changes nothing in a "
            "DTensor; write into it instead (param.data.copy_(...), or in place under torch.no_grad())"
        )


def wrong_state(unit: Stateful, what: str, found: str, *expected: TrainingState) -> StateError:
    """The error of a call that finds `unit` in a state in which it cannot be carried out."""
    names = " or ".join(state.name for state in expected)
    when = "between iterations" if expected == (IDLE,) else "at another moment"
    return StateError(f"{what}: unit {unit.name!r} is {found}, expected {names}; call it {when}")


def unentered(unit: Stateful, what: str) -> StateError:
    """The error of a backward that runs through a unit without having entered it by an output of its forward."""
    return StateError(
        f"unit {unit.name!r}: a gradient of its {what} arrived, but none had entered the unit through what its forward "
        "returned, left on its modules or put into an argument. A tensor went out by a way that cannot be seen (a "
        "global, a closure), and its backward ran before the parameters were gathered. Return that tensor from the "
        "forward, or keep it in an attribute of the module; call the unit's module, not functions on its parameters"
    )


def other_thread(unit: Stateful, what: str = "its forward") -> StateError:
    """The error of a call beside a pass in another thread, which would free the parameters that this one reads."""
    return StateError(
        f"unit {unit.name!r}: {what} was called while a forward or backward of the same model runs in another thread; "
        "use a sharded model in one thread at a time (a lock around both, or one thread that serves a queue)"
    )


def written(unit: str, name: str) -> StateError:
    """The error of a write to unsharded parameter `name` of unit `unit`, which would be lost with it."""
    return StateError(
        f"unit {unit!r}: its forward, a hook in its backward, or code behind unshard() wrote to parameter {name!r} (in "
        "place, by an assignment to .data, or as an embedding with max_norm). They see a gathered copy, so the write would "
        "be lost, or differ between ranks (with one shard rank, or of replicate_params, the parameter itself was written "
        "to, and has to be restored); change the sharded parameter between iterations, or use hsdp.full_params(model, "
        "writeback='rank0'). Run the batch that a model sets weights from before fully_shard"
    )


def stale(unit: Stateful) -> StaleParametersError:
    """The error of a backward whose parameters are not those of its forward any more."""
    if (name := unit.shadows.replaced()) is not None:
        return StaleParametersError(
            f"unit {unit.name!r}: its parameter {name!r} was replaced, moved or tied to another one between a forward and "
            "its backward (an assignment to the attribute, in the forward itself perhaps, or .to()), so its gradients "
            "would be wrong; tie parameters before fully_shard, replace and move them between iterations, and run the "
            "forward again"
        )
    return StaleParametersError(
        f"unit {unit.name!r}: its parameters were changed (optimizer step, load_state_dict, .to(), functional_call, in "
        "place; by a forward itself perhaps) between a forward and its backward, so its gradients would be wrong; run "
        "backward before the change, or forward again after it"
    )
