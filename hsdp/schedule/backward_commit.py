"""How the backwards of one root end: what landed stays, or is undone.

A graph task may go through several roots (`decoder(encoder(x))`), or around one: a reentrant checkpoint that somebody put
around a call of the root runs its backward inside of another. What landed stays when all of them have ended well.
"""

from __future__ import annotations

import weakref

from hsdp.comm.observer import Point
from hsdp.errors import StateError
from hsdp.schedule.passes import BackwardPass, Token
from hsdp.schedule.root import Root, bury_tasks
from hsdp.torch_private import graph_task, queue_callback


class BackwardCommit(Root):
    """What comes behind a root's backward, or behind the failure of one."""

    def commit_behind_others(self, backward: BackwardPass) -> None:
        """A backward has ended. Until other roots in its graph task have, too, it may fail, and what landed is undone."""
        queue_callback(lambda: self._commit(backward))

    def _commit(self, backward: BackwardPass) -> None:
        """Behind the ends of all roots that the graph task went through: what landed stays."""
        if backward is not self.backward:
            return
        if self.around.tasks and self.is_inside():
            self.around.held = backward
        else:
            backward.kept = True
            for unit in self.units:  # as `_keep_landed` does, without its call
                unit.gradients.commit()
        if backward.reduces:
            self.awaits_gradients = False
        backward.tasks.clear()
        self.backward = None
        self.tell(Point.BACKWARD_ENDS)

    def note_failure(self, token: object) -> None:
        """The engine dropped a callback, and with it the token: that graph task failed.

        If no other graph task of this backward is alive, the backward has failed. On the CPU the exception is just passing:
        gradients are put back before anybody can look at them. On a device this may be the engine's own thread, which must
        not: `recover` does it.
        """
        backward = self.backward
        if backward is None or any(left() is not None for left in backward.tasks.values()):
            return
        self.fail(backward)

    def fail(self, backward: BackwardPass) -> None:
        """The backward under way has failed. It is undone at once on a CPU, where nobody has looked yet."""
        backward.tasks.clear()
        backward.ending = False
        self.around.lost = self.around.held is not None
        self.around.held = None
        if not self.depth:
            for unit in self.units:
                unit.set_calls(0)  # of recomputations, where an interrupt came before they were set back
        self._unregister()
        if not self.streams.active:
            self._roll_back(at_once=True)
            self.tell(Point.DROPPED)

    def enclose(self) -> None:
        """Inside of a graph task a forward begins, or a unit is entered: backwards inside of it will be parts of it."""
        task, token = graph_task(), Token()
        if self.is_inside() and task in self.around.tasks:
            return
        self.around.tasks[task] = weakref.ref(token, self._dropped_around)
        # Twice: behind the ends of all roots that the task goes through.
        queue_callback(lambda: queue_callback(lambda: self._commit_held(task, token)))

    def is_inside(self) -> bool:
        """Whether a graph task is under way that backwards of this root are parts of."""
        bury_tasks(self.around.tasks)
        return bool(self.around.tasks)

    def _dropped_around(self, token: object) -> None:
        """A graph task around failed: so have the backwards inside of it that ended."""
        around = self.around
        if around.held is not None and self.backward is None:
            self.backward, around.held = around.held, None
            self.fail(self.backward)
        around.lost = False  # whoever hears of the error hears of this

    def _commit_held(self, task: int, token: Token) -> None:
        """A graph task around ended well: what landed in backwards inside of it stays.

        Raises:
            StateError: one of them failed, and somebody caught its error: with its gradients went those of the others.
        """
        around = self.around
        around.tasks.pop(task, None)
        if around.lost:
            around.lost = False
            raise StateError(
                f"backward through {self.root.name!r}: an earlier backward inside of this one failed, and its error was "
                "caught; with its gradients went those that this one had brought: let such an error pass"
            )
        if around.held is not None and not self.is_inside():
            around.held = None
            if self.backward is None:
                self._keep_landed()
