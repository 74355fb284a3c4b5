"""`BoundedGroup`: what is not formed in time is an error, and is never used; a dead store is noticed at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from hsdp.elastic import BoundedGroup

SECOND = timedelta(seconds=1)


class Group:
    """Formed as slowly, or as badly, as it is told."""

    made: list[Group]
    pause = 0.0
    error: Exception | None = None

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.told: Any = None
        self.aborted = False
        self.pause, self.error = Group.pause, Group.error
        Group.made.append(self)

    def configure(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.pause)
        if self.error is not None:
            raise self.error
        self.told = args, kwargs

    def abort(self, errored: bool = True) -> None:
        assert not errored, "a group that is formed anew has met no error"
        self.aborted = True

    def allreduce(self) -> Any:
        return self.told


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> BoundedGroup:
    monkeypatch.setattr(Group, "made", [], raising=False)
    return BoundedGroup(Group, SECOND / 2)


@pytest.fixture
def store() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listens:
        yield f"127.0.0.1:{listens.getsockname()[1]}/torchft/7/0"


def test_each_quorum_forms_a_group_of_its_own(group: BoundedGroup, store: str) -> None:
    for quorum in range(2):
        group.configure(store, "replica", 0, 2, quorum_id=quorum)
        assert group.allreduce() == ((store, "replica", 0, 2), {"quorum_id": quorum})
    assert [one.aborted for one in Group.made] == [True, True, False]
    assert {one.timeout for one in Group.made} == {SECOND / 2}


def test_a_group_that_is_formed_too_late_is_never_used(
    group: BoundedGroup, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "pause", 2.0)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"meet at 127.0.0.1:\d+/torchft/7/0 was not formed in 0.5 s"):
        group.configure(store, "replica", 0, 2)
    assert time.monotonic() - began < 1.9
    monkeypatch.setattr(Group, "pause", 0.0)
    group.configure(store, "another", 0, 2)
    while Group.made[1].told is None:
        time.sleep(0.01)
    assert group.allreduce() == ((store, "another", 0, 2), {})


def test_errors_are_those_of_forming(group: BoundedGroup, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "error", TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        group.configure(store, "replica", 0, 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "[127.0.0.1]"])
def test_a_store_without_a_listener_is_noticed_at_once(
    group: BoundedGroup, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "pause", 10.0)
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port = listens.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):  # not TimeoutError
        group.configure(f"{host}:{port}/torchft/7/0", "replica", 0, 2)


def test_a_time_out_must_be_positive() -> None:
    with pytest.raises(ValueError, match="BoundedGroup: timeout must be positive"):
        BoundedGroup(Group, timedelta(0))


STORE = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("what", ["stops", "dies", "comes too late"])
def test_torchfts_group_ends_in_time_whatever_the_other_replica_does(process: subprocess.Popen[str], what: str) -> None:
    torchft = pytest.importorskip("torchft", reason="torchft is not installed: pip install 'hsdp[elastic]'")
    assert process.stdout is not None
    address = f"127.0.0.1:{int(process.stdout.readline())}/torchft/1/0"
    if what != "comes too late":
        os.kill(process.pid, signal.SIGSTOP if what == "stops" else signal.SIGKILL)
    if what == "dies":
        process.wait()
    group = BoundedGroup(torchft.ProcessGroupGloo, 2 * SECOND)
    began = time.monotonic()
    with pytest.raises((TimeoutError, ConnectionError, RuntimeError)):
        group.configure(address, "replica", 0, 2)
    took = time.monotonic() - began
    assert took < (1.9 if what == "dies" else 4), took
    if what == "comes too late":
        late = BoundedGroup(torchft.ProcessGroupGloo, 2 * SECOND)
        second = threading.Thread(target=lambda: late.configure(address.replace("/1/", "/2/"), "other", 1, 2))
        second.start()
        group.configure(address.replace("/1/", "/2/"), "replica", 0, 2)  # in the next quorum all is well
        second.join()
