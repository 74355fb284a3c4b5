"""How the backwards of one root end: what landed stays, or is undone.

A graph task may go through several roots (`decoder(encoder(x))`), or enclose one: a reentrant checkpoint around a call of
the root runs its backward inside of another graph task. What landed stays when all of them have ended well.
"""

from __future__ import annotations

import weakref

from hsdp.comm.observer import Point
from hsdp.errors import StateError
from hsdp.schedule.passes import BackwardPass, Token
from hsdp.schedule.root import Root, bury_tasks
from hsdp.torch_private import graph_task, queue_callback


class BackwardCommit(Root):
    """Commits a root's backward, or undoes one that failed."""

    def commit_behind_others(self, backward: BackwardPass) -> None:
        """A backward has ended. Until other roots in its graph task have, too, it may fail, and what landed is undone."""
        queue_callback(lambda: self._commit(backward))

    def _commit(self, backward: BackwardPass) -> None:
        """Behind the ends of all roots that the graph task went through: what landed stays."""
        if backward is not self.backward:
            return
        if self.enclosing.tasks and self.is_inside():
            self.enclosing.held = backward
        else:
            backward.kept = True
            for unit in self.units:  # as `_keep_landed` does, without its call
                unit.gradients.commit()
        if backward.reduces:
            self.awaits_gradients = False
        backward.tasks.clear()
        self.backward = None
        self.notify(Point.BACKWARD_ENDS)

    def note_failure(self, token: object) -> None:
        """The engine dropped a callback, and with it the token: that graph task failed.

        If no other graph task of this backward is alive, the backward has failed. On the CPU the exception is just passing:
        gradients are put back before user code can read them. On a device this may be the engine's own thread, which must
        not write them: `recover` does it.
        """
        backward = self.backward
        if backward is None or any(left() is not None for left in backward.tasks.values()):
            return
        self.fail(backward)

    def fail(self, backward: BackwardPass) -> None:
        """The backward under way has failed. It is undone at once on a CPU, where no user code has run yet."""
        backward.tasks.clear()
        backward.ending = False
        self.enclosing.lost = self.enclosing.held is not None
        self.enclosing.held = None
        if not self.depth:
            for unit in self.units:
                unit.set_calls(0)  # counts of recomputations that a KeyboardInterrupt left
        self._unregister()
        if not self.streams.active:
            self._roll_back(at_once=True)
            self.notify(Point.DROPPED)

    def enclose(self) -> None:
        """A forward begins, or a unit is entered, inside of a graph task, which encloses the backwards that run in it."""
        task, token = graph_task(), Token()
        if self.is_inside() and task in self.enclosing.tasks:
            return
        self.enclosing.tasks[task] = weakref.ref(token, self._dropped_enclosing)
        # Twice: behind the ends of all roots that the task goes through.
        queue_callback(lambda: queue_callback(lambda: self._commit_held(task, token)))

    def is_inside(self) -> bool:
        """Whether a graph task is under way that encloses backwards of this root."""
        bury_tasks(self.enclosing.tasks)
        return bool(self.enclosing.tasks)

    def _dropped_enclosing(self, token: object) -> None:
        """An enclosing graph task failed: so have the backwards inside of it that ended."""
        enclosing = self.enclosing
        if enclosing.held is not None and self.backward is None:
            self.backward, enclosing.held = enclosing.held, None
            self.fail(self.backward)
        enclosing.lost = False  # the error of the task tells the user

    def _commit_held(self, task: int, token: Token) -> None:
        """An enclosing graph task ended well: what landed in backwards inside of it stays.

        Raises:
            StateError: one of them failed, and its error was caught: with its gradients went those of the others.
        """
        enclosing = self.enclosing
        enclosing.tasks.pop(task, None)
        if enclosing.lost:
            enclosing.lost = False
            raise StateError(
                f"backward through {self.root.name!r}: an earlier backward inside of this one failed, and its error was "
                "caught; with its gradients went those that this one had brought: let such an error pass"
            )
        if enclosing.held is not None and not self.is_inside():
            enclosing.held = None
            if self.backward is None:
                self._keep_landed()
