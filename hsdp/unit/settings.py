"""A unit's settings, which users may change between iterations by the setters of `HSDPModule`.

What more follows from than a value to read (process groups of its own, users' collectives) is set by methods of `Unit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from torch import Tensor

from hsdp.comm.replica_reduce import DEFAULT, AllReduceStage
from hsdp.comm.streams import Event
from hsdp.policies import ReduceOp

UnitT = TypeVar("UnitT")


@dataclass(slots=True)
class UnitSettings(Generic[UnitT]):
    """The settings of a unit. Every rank of its mesh must have the same.

    Attributes:
        reshard_after_forward: as `fully_shard` takes it.
        reshard_after_backward: free the unsharded parameters as soon as their backward is over.
        unshard_in_backward: backward gathers the unit.
        forward_prefetch, backward_prefetch: what is gathered when its pass begins; None: what the recorded order says.
        requires_grad_sync: backward communicates gradients.
        requires_all_reduce: if so, it sums over replicas too.
        drains: the end of a backward of which the unit is the root waits for every reduction.
        reduce_op, gradient_scale, divide_factor: how sums become gradients, see `factor`; of which backward, see `Stash`.
        forces_sum: FSDP2 would divide by `divide_factor` behind the last collective of a step.
        unused_grads: what a parameter gets that no rank used: None or zeros.
        replica_reduce: the all-reduce stage.
        all_reduce_hook: called on each reduction buffer after that stage.
        reduces_by_custom: reduce-scatters are a user's collective.
        post_optim_event: of a root; its next forward waits for it.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: list[UnitT] | None = None
    backward_prefetch: list[UnitT] | None = None
    requires_grad_sync: bool = True
    requires_all_reduce: bool = True
    drains: bool = True
    reduce_op: ReduceOp = "avg"
    gradient_scale: float = 1.0
    divide_factor: float | None = None
    forces_sum: bool = False
    unused_grads: Literal["none", "zero"] = "none"
    replica_reduce: AllReduceStage = DEFAULT
    all_reduce_hook: Callable[[Tensor], None] | None = None
    reduces_by_custom: bool = False
    post_optim_event: Event = None

    def factor(self, ranks: int) -> float:
        """The factor of a sum over so many ranks when it is sent.

        `divide_factor` replaces the division of "avg"; the scale comes on top of either.
        """
        if self.divide_factor is not None:
            return self.gradient_scale / self.divide_factor
        return self.gradient_scale / self.op_divisor(ranks)

    def op_divisor(self, ranks: int, op: str | None = None) -> int:
        """The divisor of the reduce op, or of another one, for a sum over so many ranks."""
        return ranks if (op or self.reduce_op) == "avg" else 1
