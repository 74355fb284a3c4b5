"""How ranks of a process group find out whether they can share memory, and connect: once for each group.

    all    tell each other a name, under which each listens on a Unix socket of the host
    all    call the ranks before them, and send each a block
    all    take the calls of the ranks behind them, and map what they are sent

What a system forbids (other hosts, networks or containers, no files over sockets) shows here, on some rank. Then all
of them keep to their backend.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hsdp.comm.host_blocks import Block, Mapping
from hsdp.comm.host_memory import HostMemory
from hsdp.torch_private import outside_transforms

_known: weakref.WeakKeyDictionary[ProcessGroup, HostMemory | None] = weakref.WeakKeyDictionary()


def host_memory_of(group: ProcessGroup) -> HostMemory | None:
    """The shared memory of a group's ranks, which all call it; None if they do not all run where they can share any."""
    if group not in _known:
        _known[group] = _meet(group)
    return _known[group]


def _meet(group: ProcessGroup) -> HostMemory | None:
    """Connects each pair of ranks, and has the one that called send a block: what the system forbids shows here."""
    rank, size = group.rank(), group.size()
    with ExitStack() as until_done, outside_transforms():
        secret, probe = 0, None
        if hasattr(os, "memfd_create"):  # Linux, whose sockets have names outside of the file system, too
            with suppress(OSError):
                listener = until_done.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                probe = Block(0, mmap.PAGESIZE)
                until_done.callback(probe.close)
                name = secrets.randbits(62) | 1
                listener.bind(_address(name))
                listener.listen(size)
                secret = name
        names = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(size)]
        dist.all_gather(names, torch.tensor([secret], device="cpu"), group=group)
        peers: dict[int, socket.socket] = {}
        goes = all(int(name) for name in names)
        if goes and probe is not None and probe.file is not None:
            probe.header = secret, rank
            goes = all(_reaches(peers, other, int(names[other]), rank, probe.file) for other in range(rank))
        # Behind the first question all connections are made, or no rank goes on; behind the second all are accepted.
        if _on_all(goes, group) and _on_all(_hears(peers, listener, secret, names), group):
            return HostMemory(rank, peers)
        for peer in peers.values():
            peer.close()
        return None


def _on_all(goes: bool, group: ProcessGroup) -> bool:
    answer = torch.tensor(int(goes), device="cpu")
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=group)
    return bool(answer)


_HELLO = struct.Struct("2q")
"""The secret of the called rank, and the caller's rank."""


def _address(secret: int) -> str:
    return f"\0hsdp-{secret}"


def _reaches(peers: dict[int, socket.socket], other: int, secret: int, rank: int, file: int) -> bool:
    try:
        peer = peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.connect(_address(secret))
        socket.send_fds(peer, [_HELLO.pack(secret, rank)], [file])
    except OSError:  # it is on another host, or in another network namespace; or there are no files left
        return False
    return True


def _hears(peers: dict[int, socket.socket], listener: socket.socket, secret: int, names: Sequence[Tensor]) -> bool:
    """Takes the calls of the ranks above, and maps the block that each sends."""
    while len(peers) < len(names) - 1:
        try:
            peer, _ = listener.accept()
            hello, files, _, _ = socket.recv_fds(peer, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
            known, other = _HELLO.unpack(hello.ljust(_HELLO.size, b"\0"))
            try:
                if known != secret:  # another program's call
                    peer.close()
                    continue
                peers[other] = peer
                header = None
                for file in files:
                    header = Mapping(file, mmap.PAGESIZE).header
            finally:
                for file in files:
                    os.close(file)
        except OSError:
            return False
        if header != (int(names[other]), other):
            return False
    return True
