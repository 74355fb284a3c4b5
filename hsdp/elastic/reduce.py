"""The all-reduce stage over replicas that a manager keeps: what fails is reported to it, and nothing is raised.

    start   the manager's all-reduces begin, in the order in which the pipeline comes to them, and run beside its stages
    wait    they have ended, well or not; if not, the values are void: the manager lets nobody take the step

A rank that meets an error goes on with its replica as if there had been none, so that the ranks of the replica start the
same collectives among each other; they learn of the error together, from `ElasticOptimizer.step`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hsdp.comm.backends import REDUCE_ALONE_BYTES, share_calls
from hsdp.comm.collectives import Comm
from hsdp.comm.labels import Named, labelled
from hsdp.comm.replica_reduce import AllReduceStage
from hsdp.comm.work import CommWork, in_turn
from hsdp.elastic.manager import Manager
from hsdp.errors import DivergenceError, StateError
from hsdp.policies import ReduceOp, check_reduce_op
from hsdp.schedule.pipeline import ReductionBucket

_MASK = (1 << 48) - 1
"""So that the sum over replicas fits into 64 bits."""


def replicas(manager: Manager, reduce_op: ReduceOp = "avg") -> ManagedAllReduce:
    """The stage for `model.set_replica_reduce`; `ElasticOptimizer` sets it by itself.

    Args:
        manager: torchft's manager of this rank.
        reduce_op: "avg" divides by the number of replicas that take part in a step, which is counted, so that a gradient is
            the mean over those; "sum" does not. What happens among the ranks of one replica is the model's
            `set_reduce_op_type`.

    Raises:
        ValueError: `reduce_op` is neither.
    """
    return ManagedAllReduce(manager, reduce_op)


class ManagedAllReduce(AllReduceStage):
    """The all-reduce stage whose replicas are a manager's; see `replicas`.

    Attributes:
        manager: the manager.
        reduce_op: "avg" or "sum".
        joined: `compare` found that a replica took part that had taken no step yet.
        skipped_apart: it found that the others skipped different steps.
    """

    beyond_mesh = True

    def __init__(self, manager: Manager, reduce_op: ReduceOp = "avg") -> None:
        self.manager = manager
        self.reduce_op = check_reduce_op(reduce_op, "elastic.replicas")
        self._order = 0
        self._count: Tensor | None = None
        self.drops = self.joined = self.skipped_apart = False

    def start(
        self, owner: Named, key: int, tensors: list[Tensor], comm: Comm, finish: Callable[[], object] | None
    ) -> CommWork:
        """Starts to reduce `tensors` over the replicas that take part, in place. `comm` has one rank.

        Raises:
            StateError: no step has begun.
        """
        manager = self.manager
        self._join_quorum()
        self._order = hash((self._order, key, *[tensor.numel() for tensor in tensors])) & _MASK
        if not manager.is_participating() and isinstance(owner, ReductionBucket):
            # The manager sends zeros. What the others did not use has no gradient here, either.
            owner.mark_unused()
        works = []
        if self._count is None:
            self.drops = False  # nothing had been sent when a backward failed: what the others get is this one's
            # The manager's own number counts replicas that are healed in the first step of all.
            self._count = torch.ones((), dtype=torch.float32, device=tensors[0].device)
            works.append(manager.allreduce(self._count, reduce_op=dist.ReduceOp.SUM))
        count = self._count
        packs = _packed(tensors)

        def start() -> list[Any]:
            return works + [manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM) for flat, _ in packs]

        def land() -> None:
            for flat, pieces in packs:
                if self.reduce_op == "avg":
                    flat.div_(count)
                if pieces[0] is not flat:
                    torch._foreach_copy_(pieces, flat.split([piece.numel() for piece in pieces]))
            if manager.errored() is not None:
                # Void values that are finite, and with used-flags that say yes: what the ranks of a replica do next, and
                # whether they clip, must not depend on what this rank found in its buffers.
                torch._foreach_zero_(tensors)
                torch._foreach_add_(tensors, 1)

        started = labelled("all_reduce", owner.name, start)
        return CommWork(comm, "all-reduce", owner, started, tensors, in_turn(land, finish))

    def fail(self) -> None:
        """Has the step dropped in whose all-reduces a backward of this replica failed.

        Others wait for those that were still to come. What another backward of this step sends must not meet these: behind
        an error the manager sends nothing, and the next quorum has process groups of its own.

        Before the first of them another backward of the step may still bring all; if none does, `give_up` has it dropped.
        """
        self.drops = True
        if self._count is not None:
            self.give_up()

    def give_up(self) -> None:
        """Has the step dropped if a backward failed in it."""
        if self.drops:
            self.manager.report_error(StateError("a backward over elastic replicas failed"))

    def begin(self) -> None:
        """A step begins."""
        self._order = 0
        self._count = None
        self.drops = False

    @property
    def sent(self) -> int:
        """Another number with each all-reduce of this step; 0 before the first."""
        return self._order

    def compare(self, joins: bool, skipped: int, digest: Callable[[], int], device: torch.device) -> bool:
        """Has the step dropped if gradients do not belong together: of other units, or of other weights.

        Replicas have no divergence guard: who is there changes from step to step. One small all-reduce behind those of a
        step tells whether they reduced the same units in the same order, and skipped the same steps, and another one, where
        a replica takes its first step, whether their weights are the same. A replica that does not take part compares, too,
        and a third one has it drop what the others drop.

        Args:
            joins: this replica has taken no step yet, or not all of one that was taken.
            skipped: how many steps its script has skipped.
            digest: gives one of this rank's weights.
            device: that of the manager's all-reduces.

        Returns:
            Whether the weights were the same, as far as was asked.
        """
        manager = self.manager
        if (sums := self._sums([1, self._order, joins, 0 if joins else skipped], device)) is None:
            return True
        count, orders, joining, skips = sums
        # One that does not take part gets the others' number with their state; where one joins, all count anew.
        self.joined = joining > 0
        self.skipped_apart = manager.is_participating() and not joins and skips != skipped * (count - joining)
        if self.skipped_apart:
            manager.report_error(DivergenceError("elastic replicas skipped different steps"))
        if orders != self._order * count:
            what = (
                "elastic replicas reduced different units, or in another order: their gradients do not belong together, "
                "and the step is dropped; every replica must run the same model, with the same modules in each forward"
            )
            warnings.warn(f"hsdp: {what}", stacklevel=3)
            manager.report_error(DivergenceError(what))
        if not joining:
            return True
        weights = digest() & _MASK
        if (sums := self._sums([1, weights], device)) is None:
            return True
        # Behind step 0 one that takes no part has its old weights by right: it gets the others' before it steps. In step 0
        # managers heal some ranks of a replica by one and the rest by another, which must be alike.
        is_healed = manager.current_step() > 0 and not manager.is_participating()
        same = is_healed or sums[1] == weights * sums[0]
        # One that takes no part cannot see it by its own weights, and would go on alone with the gradients of two models.
        apart = self._sums([not same], device)
        if not same or (apart is not None and apart[0]):
            manager.report_error(DivergenceError("elastic replicas have different weights"))
        return same

    def _sums(self, values: list[int], device: torch.device) -> list[int] | None:
        """Sums over those that take part; None behind an error."""
        sums = torch.tensor(values, dtype=torch.int64, device=device)
        self.manager.allreduce(sums, reduce_op=dist.ReduceOp.SUM).wait()
        return sums.tolist() if self.manager.errored() is None else None

    def _join_quorum(self) -> None:
        """Waits until it is known who takes part. A quorum that was not found is an error of the step, which raises it."""
        try:
            self.manager.wait_quorum()
        except AssertionError as error:
            raise StateError(
                "backward over elastic replicas: no step has begun; call ElasticOptimizer.zero_grad() before the forward"
            ) from error
        except Exception as error:
            self.manager.report_error(error)


def _packed(tensors: list[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """How 1-D tensors travel: large ones as they are, small ones of a dtype together, as (what is sent, its pieces)."""
    packs: list[tuple[Tensor, list[Tensor]]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        for call in share_calls([tensor.nbytes for tensor in alike], REDUCE_ALONE_BYTES):
            pieces = [alike[i] for i in call]
            packs.append((pieces[0] if len(pieces) == 1 else torch.cat(pieces), pieces))
    return packs
