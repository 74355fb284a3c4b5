"""The state of one forward or one backward of a root, each an object; and the record of one forward of a unit."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from threading import get_ident
from typing import NamedTuple

from hsdp.schedule.gather_order import BackwardGathers
from hsdp.schedule.reduce_order import ReduceTurns
from hsdp.schedule.sequence_numbers import SequenceNumber
from hsdp.unit.unit import Unit
from hsdp.unit.unsharded import Version

Exit = tuple[SequenceNumber, Version]
"""How the last forward of a unit ended in a forward of the root: the sequence number of the first autograd node that it
made, and the unit's version in it."""


class OpenVisits(NamedTuple):
    """The visits of a unit that are under way in a backward.

    There are several of a unit that calls itself: that of the outer call begins first, and goes on when that of the inner
    one is over.

    Attributes:
        begun: the sequence numbers of the first autograd nodes of their forwards; none if the unit was recomputed only.
            `earliest`: the first of them.
        task: the graph task that opened the unit last.
    """

    begun: set[SequenceNumber]
    earliest: SequenceNumber | None
    task: int


class ForwardPass:
    """One forward of the root.

    Attributes:
        number: how many there were before.
        begins_at: the sequence number of the first node that autograd made, or would have made, in it.
        exits: the units in the order in which their forwards ended, each with how its last forward ended; None if no
            gradient can enter it.
        calls: for each unit, of those of its forwards that gradients can enter, the sequence numbers of the first autograd
            nodes, ascending.
        visited: the units that a backward of this forward has entered or passed over.
    """

    __slots__ = ("begins_at", "calls", "exits", "number", "visited")

    def __init__(self, number: int, begins_at: int) -> None:
        self.number = number
        self.begins_at = begins_at
        self.exits: dict[Unit, Exit | None] = {}
        self.calls: dict[Unit, list[SequenceNumber]] = {}
        self.visited: set[Unit] = set()


class Visit:
    """The record of one forward of a unit, for its backward. The forward's autograd graph holds it.

    Attributes:
        version: the unit's version in that forward.
        first_node: sequence number of the first autograd node made inside it.
        forward_pass: the root's forward that it was a part of; None for a recomputation.
    """

    __slots__ = ("__weakref__", "first_node", "forward_pass", "version")

    def __init__(self, version: Version, first_node: SequenceNumber, forward_pass: ForwardPass | None) -> None:
        self.version = version
        self.first_node = first_node
        self.forward_pass = forward_pass


class Token:
    """Lives as long as autograd's engine holds the callback for the end of a graph task."""


class BackwardPass:
    """One backward of the root, from its first hook on. If it fails it is there until `recover` drops it.

    Args:
        reduces: its first graph task accumulates into unsharded parameters; that of `autograd.grad` does not.
        turns: the order of its reductions.
        found: the units whose unsharded parameters a pipeline schedule has, which computes gradients of weights apart.

    Attributes:
        tasks: the graph tasks under way, the outermost first; each token lives until its task ends or fails.
        keeps_graph: it runs with create_graph=True: unsharded parameters are part of its own graph.
        opened: the units whose visits are under way.
        entered: the units that it has entered; `reduced`: those whose gradients are complete.
        forward_pass: the forward whose backward runs at present, and `gathers`, the order of that backward's gathers; None
            before the first one. `uncounted`: of that forward, the calls of units that the engine may still come behind.
        ending: its last graph task is over, and the remaining units are reduced, or other roots in that task are to end.
        kept: what landed stays, in all units: from here on an interrupt does not undo it.
        thread: the thread that began it: on a device the engine's.
    """

    __slots__ = (
        "ending",
        "entered",
        "forward_pass",
        "found",
        "gathers",
        "keeps_graph",
        "kept",
        "opened",
        "reduced",
        "reduces",
        "tasks",
        "thread",
        "turns",
        "uncounted",
    )

    def __init__(self, reduces: bool, turns: ReduceTurns, found: Collection[Unit]) -> None:
        self.tasks: dict[int, weakref.ref[Token]] = {}
        self.thread = get_ident()
        self.reduces = reduces
        self.turns = turns
        self.keeps_graph = False
        self.opened: dict[Unit, OpenVisits] = {}
        self.found = found
        self.entered: set[Unit] = set()
        self.reduced: set[Unit] = set()
        self.forward_pass: ForwardPass | None = None
        self.gathers: BackwardGathers[Unit] | None = None
        self.uncounted: dict[Unit, list[SequenceNumber]] = {}
        self.ending = False
        self.kept = False

    def exit_of(self, unit: Unit) -> Exit:
        """The entry of `ForwardPass.exits` for a unit in the forward whose backward runs."""
        assert self.forward_pass is not None, "an order belongs to a forward"
        found = self.forward_pass.exits[unit]
        assert found is not None, f"no gradient can enter unit {unit.name!r}"
        return found


class EnclosingTasks:
    """The graph tasks that a root's backwards run inside of: those of reentrant checkpoints around a call of the root.

    Attributes:
        tasks: each token lives until its task ends or fails.
        held: a backward that ended inside of one, and is undone if that one fails.
        lost: such a backward was undone because a later one failed.
    """

    __slots__ = ("held", "lost", "tasks")

    def __init__(self) -> None:
        self.tasks: dict[int, weakref.ref[Token]] = {}
        self.held: BackwardPass | None = None
        self.lost = False
