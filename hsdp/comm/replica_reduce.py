"""The all-reduce stage of the pipeline: how the sums of one shard group meet those of its replicas.

    hsdp's own stages     `AllReduce`; 16 bits on the wire (compressed.py), the order of a tree (tree.py), the replicas of a
                          manager (`hsdp.elastic`)
    users' own            a `ReplicaReduce` (custom.py), which `CustomAllReduce` makes a stage of

Whichever it is, the queue, its bounds and its order stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from hsdp.comm.collectives import Comm
from hsdp.comm.custom import ReplicaReduce, is_exact
from hsdp.comm.labels import Named
from hsdp.comm.work import CommWork


class AllReduceStage(ABC):
    """A stage in terms of the engine's own collectives.

    Attributes:
        exact: as of a `ReplicaReduce`.
        beyond_mesh: its replicas are not in the mesh (`hsdp.elastic`). It is called though the mesh has one replica, with
            a `comm` of one rank, and averages by itself, as the mesh does not tell over how many ranks.
        drops: the step under way will be dropped, as a backward of this rank failed in it: sums of it that are pending need
            not be communicated any more.
    """

    exact = False
    beyond_mesh = False
    drops = False

    @abstractmethod
    def start(
        self, owner: Named, key: int, tensors: list[Tensor], comm: Comm, finish: Callable[[], object] | None
    ) -> CommWork:
        """Starts summing `tensors` (1-D, in place) over the ranks of `comm`; `finish` runs behind the sum.

        On a device the stream that is current is the all-reduce stream. Every rank calls it for the same reductions in
        the same order; `owner` and `key` go into the collectives of `comm` as they are.
        """

    def fail(self) -> None:  # noqa: B027  # most stages have nothing to do
        """A backward of this rank failed: what it was still to start does not come."""


class AllReduce(AllReduceStage):
    """The default: one coalesced all-reduce in the reduce dtype. It has no state: units share `DEFAULT`."""

    exact = True

    def start(
        self, owner: Named, key: int, tensors: list[Tensor], comm: Comm, finish: Callable[[], object] | None
    ) -> CommWork:
        """Sums `tensors` over the ranks of `comm`, in place; `owner`, `key` and `finish` as `AllReduceStage` says."""
        return comm.all_reduce(owner, key, tensors, finish)


class CustomAllReduce(AllReduceStage):
    """A stage of a user's all-reduce."""

    def __init__(self, custom: ReplicaReduce) -> None:
        self._custom = custom
        self.exact = is_exact(custom)

    def start(
        self, owner: Named, key: int, tensors: list[Tensor], comm: Comm, finish: Callable[[], object] | None
    ) -> CommWork:
        """Sums `tensors`, each by a call of the user's."""
        return comm.all_reduce(owner, key, tensors, finish, self._custom)


DEFAULT = AllReduce()
