"""A process group over replicas that is formed within its time-out, whoever dies or stops meanwhile.

torchft forms a group anew whenever others take part: it reaches the store of one replica, finds the others' addresses
in it and connects to them. torch gives each of these the group's time-out, some several times, and the wait for a store's
answer none at all; so one replica that dies in between can cost the others more than the manager's patience. Here
the time-out is that of the sum, and a store that nobody listens at is noticed at once.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch


class BoundedGroup:
    """A manager's process group whose forming takes no longer than its time-out; as `pg=` of `torchft.Manager`.

    What is not formed in time is an error of the step, which the manager drops, and is never used: each attempt makes a
    group of its own. An attempt that torch does not give up is left to a thread of its own.

    Args:
        make: makes a group that `configure` forms, when called with `timeout=`: torchft's `ProcessGroupGloo` or
            `ProcessGroupNCCL`. (Groups in processes of their own, as `ProcessGroupBabyNCCL`, need no bound.)
        timeout: of forming the group, and of each all-reduce. A death costs the others one to form a group and one in an
            all-reduce at most, beside the heartbeat that the lighthouse misses: a third of the manager's keeps within that.

    Raises:
        ValueError: `timeout` is not positive.
    """

    def __init__(self, make: Callable[..., Any], timeout: timedelta) -> None:
        if timeout <= timedelta(0):
            raise ValueError(f"BoundedGroup: timeout must be positive, not {timeout}")
        self._make = make
        self._timeout = timeout
        self._group = make(timeout=timeout)

    def __getattr__(self, name: str) -> Any:
        if name == "_group":  # before __init__ has run
            raise AttributeError(name)
        return getattr(self._group, name)

    def configure(self, store_addr: str, *args: Any, **kwargs: Any) -> None:
        """Forms the group of the next quorum, in the place of the last one, whose collectives end; the manager calls it.

        Args:
            store_addr: the store in which the members meet, as host:port/prefix.
            args, kwargs: as the group's own `configure` has them.

        Raises:
            ConnectionError, TimeoutError: nobody listens at the store; it was not formed in time.
        """
        self._group.abort(errored=False)
        group = self._make(timeout=self._timeout)
        formed: Future[None] = Future()
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def form() -> None:
            try:
                if device is not None:
                    torch.accelerator.set_device_index(device)  # each thread has its own
                self._look(store_addr)
                group.configure(store_addr, *args, **kwargs)
            except BaseException as error:
                formed.set_exception(error)
            else:
                formed.set_result(None)

        threading.Thread(target=form, name="hsdp-form-group", daemon=True).start()
        if not wait([formed], self._timeout.total_seconds()).done:
            raise TimeoutError(
                f"the group of replicas that meet at {store_addr} was not formed in {self._timeout.total_seconds():g} s; "
                "one of them may have died or stopped meanwhile"
            )
        formed.result()
        self._group = group

    def _look(self, store_addr: str) -> None:
        """Looks whether somebody listens, as somebody did before that replica asked for a quorum: no need to try again."""
        host, _, port = store_addr.partition("/")[0].rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), self._timeout.total_seconds()).close()
