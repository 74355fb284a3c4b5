"""What hsdp asks of a manager of replicas, as torchft's `Manager` has it, and which part of the data a replica takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class Manager(Protocol):
    """One rank's view of the replicas; `torchft.Manager` is one. All ranks of a replica call the same methods."""

    def start_quorum(self) -> None:
        """Begins a step: asks who takes part in it."""
        ...

    def wait_quorum(self) -> None:
        """Waits for the answer; a replica that is behind has the state of another one by then."""
        ...

    def is_participating(self) -> bool:
        """Whether this replica's gradients count in this step. They do not while it is being healed."""
        ...

    def participating_rank(self) -> int | None:
        """This replica's place among those that take part; None if it does not."""
        ...

    def num_participants(self) -> int:
        """Number of replicas that take part."""
        ...

    def allreduce(self, tensor: Tensor, *, reduce_op: Any) -> Any:
        """Starts to sum or average a tensor over those that take part, in place; returns a work that never raises."""
        ...

    def errored(self) -> Any:
        """The first error of this step, or None."""
        ...

    def report_error(self, e: Exception) -> None:
        """Has the step dropped."""
        ...

    def should_commit(self) -> bool:
        """Whether all ranks of this replica may take the step. A replica that is healed has its state behind it."""
        ...

    def current_step(self) -> int:
        """Number of steps taken, by whichever replicas."""
        ...

    def batches_committed(self) -> int:
        """Number of batches in the steps taken: a step of three replicas has three."""
        ...

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Has a part of the state given to replicas that join."""
        ...

    def state_dict(self) -> dict[str, int]:
        """The manager's own state: the numbers of steps and of batches."""
        ...

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Takes it up again."""
        ...


def batch_index(manager: Manager) -> int:
    """The number of the batch that this replica takes in the step that has begun, counted from 0 over the whole run.

    Batches are those of one replica. A step of n replicas takes the next n of them, one each, so that over a run each batch
    is trained on once, whoever takes part; those of a step that is dropped are taken again. It waits until it is known
    who takes part, which otherwise happens beside the forward. A replica that does not take part gets some batch, whose
    gradients do not count.

    Raises:
        RuntimeError: no quorum was found in time.
    """
    manager.wait_quorum()
    return manager.batches_committed() + (manager.participating_rank() or 0)
