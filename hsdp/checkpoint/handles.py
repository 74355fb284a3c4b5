"""The handle of a save: waited for or not, a failure is told.

A save in the background fails when nobody looks. So the failure is logged at once, raised by whoever comes next (`wait`,
the next save, the next load), and, if nobody comes, told once more when the process ends. The thread is no daemon: a
process that ends normally completes its checkpoint first, also after its process group was destroyed, whose connections the
thread keeps.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from hsdp.checkpoint.remote import AnyPath
from hsdp.errors import CheckpointError

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("hsdp.checkpoint")


class SaveHandle:
    """A save under way, or done.

    Attributes:
        path: where the checkpoint is, once it is complete.
        step: the step it is of.
    """

    _in_flight: SaveHandle | None = None

    def __init__(self, path: AnyPath, step: int) -> None:
        self.path = path
        self.step = step
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._reported = False

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> AnyPath:
        """Waits until the checkpoint is complete.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            Its path.

        Raises:
            CheckpointError: it could not be saved; the directory has nothing of it.
            TimeoutError: it is not done yet.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"saving {self.path} is not done after {timeout:g} s")
        if SaveHandle._in_flight is self:
            SaveHandle._in_flight = None
        if self._error is not None:
            self._reported = True
            if isinstance(self._error, Exception):
                raise self._error
            raise CheckpointError(f"saving {self.path} was ended by {self._error!r}") from self._error
        return self.path

    def run(self, finish: Callable[[], AnyPath], *, in_background: bool) -> None:
        """Does the rest of a save, here or in a thread."""

        def body() -> None:
            try:
                self.path = finish()
            except BaseException as error:  # also SystemExit: what is not there must not be said to be
                self._error = error
                if not in_background and not isinstance(error, Exception):
                    raise  # Ctrl-C in the caller's own thread is the caller's
                if in_background:
                    logger.error("saving %s in the background failed: %s", self.path, error)
            finally:
                self._finished.set()

        if in_background:
            SaveHandle._in_flight = self
            try:
                # Not a daemon: a process that ends normally first completes its checkpoint.
                threading.Thread(target=body, name=f"hsdp-save-{self.step}").start()
            except BaseException as error:  # no thread is to be had: the next save must not wait for this one
                self._error = error
                self._finished.set()
                raise
        else:
            body()


_entered = threading.RLock()


@contextmanager
def settled() -> Iterator[None]:
    """The body runs when no other save or load of this process is under way: neither in another thread that calls one, nor
    in the background.
    """
    with _entered:
        handle = SaveHandle._in_flight
        if handle is not None:
            handle._finished.wait()
        yield


def raise_untold() -> None:
    """Raises what the last save in the background raised, if nobody was told. It is called where ranks agree: on another
    rank somebody may have been told by `wait`, and would wait for this one.
    """
    handle = SaveHandle._in_flight
    if handle is not None:
        handle.wait()


def when_settled(call: Callable[P, R]) -> Callable[P, R]:
    """Has a function that talks to the other ranks run when no save or load of this process is under way.

    The thread of a background save talks over the same group, under the same tag: messages of both would be mixed up.
    """

    @functools.wraps(call)
    def settled_call(*args: P.args, **kwargs: P.kwargs) -> R:
        with settled():
            return call(*args, **kwargs)

    return settled_call


@atexit.register
def _complain() -> None:
    handle = SaveHandle._in_flight
    if handle is not None and handle._error is not None and not handle._reported:
        logger.critical(
            "the process ends without a checkpoint of step %d: saving %s failed, and nobody called wait(): %s",
            handle.step,
            handle.path,
            handle._error,
        )
