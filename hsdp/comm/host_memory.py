"""Collectives between ranks of one host through memory that they share, not sockets: `CommPolicy(shared_memory=)`.

    start    rank 0  [ its part ] --copy--> a block of rank 0's  --a line: where it lies--> ranks 1, 2, ...
             rank 1  [ its part ] --copy--> a block of rank 1's  --a line: where it lies--> ranks 0, 2, ...
    wait     each rank takes all ranks' lines, and reads in their blocks what it needs: copies it, or adds it in rank order

Gloo copies each byte into the kernel and out again, on threads that take turns with the ranks' own work. Here a byte is
copied once and read where it lies, and only lines of numbers go through the kernel: Unix sockets, whose messages order
memory as any lock does, let a rank sleep until they come, and end when a process does. A line also tells which posts its
sender has read: blocks of posts that all have read are written again. A block is a file without a name (memfd) that its
owner made, and sent with the first line that tells of it: it is gone with the last process that maps it, however they end.

A group of which some ranks do not reach each other so (they are on other hosts, or in other networks) keeps to gloo.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from hsdp.comm.divergence import described
from hsdp.comm.host_blocks import Block, BlockLayout, BlockLayouts, Mapping
from hsdp.comm.labels import Named
from hsdp.comm.transports import Started
from hsdp.errors import CollectiveError, DivergenceError
from hsdp.torch_private import outside_transforms

_SMALLEST_BLOCK = 1 << 20
_LINE = struct.Struct("5q")
_MOST_LATE = 63
"""Of how many posts, the newest ones, a line tells one by one whether they were read."""
_FULL = 60.0
"""Seconds for which a rank tries to send a file while too many are on their way."""

_CLOSED = "closed its connection"
_KEY = (1 << 63) - 1


class Line(NamedTuple):
    """What a rank tells of its post: what the collective is, the block's number, bytes written, and what it has read."""

    key: int
    block: int
    nbytes: int
    read_below: int
    unread: int


class Reading(NamedTuple):
    """Which posts a rank has read when it wrote post `at`: all `below` one, and of the newest those without a bit.

    One post that is never waited for must not hold the blocks of all that come after it.
    """

    at: int = -1
    below: int = 0
    unread: int = 0

    def of(self, post: int) -> bool:
        """Whether `post` was read."""
        age = self.at - post
        return post < self.below or (0 <= age < _MOST_LATE and not self.unread >> age & 1)


class _Post:
    """What the ranks write for one collective: a work that ends when all have written.

    It counts as read by this rank when it goes, whether this rank has read other ranks' blocks or never will.
    """

    def __init__(self, memory: HostMemory, kind: str, name: str, key: int, layout: BlockLayout) -> None:
        self._memory = memory
        self.number = -1  # until it is written
        self.kind = kind
        self.name = name
        self.key = key
        self.layout = layout

    def is_completed(self) -> bool:
        """Whether all ranks have written, or one never will."""
        try:
            return self._memory.receive(self.number, 0.0)
        except RuntimeError:
            return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until all ranks have written.

        Raises:
            RuntimeError: some have not within `timeout`, or one is gone.
        """
        if not self._memory.receive(self.number, timeout.total_seconds() if timeout is not None else None):
            raise RuntimeError("timed out waiting for ranks of this host to write")
        return True

    def __del__(self) -> None:
        self._memory.forget(self.number)


class HostMemory:
    """The blocks of one process group's ranks, which all run on this host: a `Transport`.

    All collectives of the group that go through it are started in the same order on all ranks.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self._peers = peers
        self._poll = select.poll()
        for peer in peers.values():
            peer.setblocking(False)
            self._poll.register(peer, select.POLLIN)
        self._rank_at = {peer.fileno(): other for other, peer in peers.items()}
        self._bytes = {other: bytearray() for other in peers}
        self._taking = threading.Lock()
        self._came = dict.fromkeys(peers, 0)  # how many lines each sent
        self._lines: dict[int, dict[int, Line]] = {}  # by post, by rank
        self._lost: dict[int, str] = {}  # ranks from which nothing can come any more, and why
        self._unread: set[int] = set()  # posts that this rank may still read
        self._layouts = BlockLayouts()
        self._posts = 0
        self._blocks = 0
        self._free: list[Block] = []
        self._written: dict[int, Block] = {}  # by post
        self._readings = dict.fromkeys(peers, Reading())  # by rank
        self._theirs: dict[int, list[Mapping]] = {rank: [] for rank in peers}  # by number of the block
        _alive.add(self)

    def close(self) -> None:
        """Closes the connections: nothing comes through them, and other ranks see that this end is gone."""
        for peer in self._peers.values():
            peer.close()

    __del__ = close

    # -- collectives -----------------------------------------------------------------------------------------------------

    def all_gather(self, owner: Named, key: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Started:
        """As `Transport.all_gather`."""
        pairs = zip(outputs, inputs, strict=True)
        in_place = [mine.data_ptr() == output.data_ptr() + self.rank * mine.nbytes for output, mine in pairs]

        def copy_parts(mappings: list[Mapping], layout: BlockLayout) -> None:
            parts = [_quietly(output).view(self.size, -1).unbind() for output in outputs]
            for rank, mapping in enumerate(mappings):
                for whole, part, there in zip(parts, mapping.tensors(layout), in_place, strict=True):
                    if rank != self.rank or not there:
                        whole[rank].copy_(part)

        return self._start("all-gather", owner, key, inputs, copy_parts)

    def reduce_scatter(
        self, owner: Named, key: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: float
    ) -> Started:
        """As `Transport.reduce_scatter`, in rank order."""
        assert factor == 1.0, "shared memory multiplies nothing"

        def sum_parts(mappings: list[Mapping], layout: BlockLayout) -> None:
            for output, parts in zip(outputs, self._parts(mappings, layout), strict=True):
                _sum(parts, output.view(-1))

        return self._start("reduce-scatter", owner, key, inputs, sum_parts)

    def all_to_all(self, owner: Named, key: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Started:
        """As `Transport.all_to_all`."""

        def copy_parts(mappings: list[Mapping], layout: BlockLayout) -> None:
            for output, parts in zip(outputs, self._parts(mappings, layout), strict=True):
                torch.cat(parts, out=_quietly(output).view(-1))

        return self._start("all-to-all", owner, key, inputs, copy_parts)

    def all_reduce(self, owner: Named, key: int, tensors: Sequence[Tensor]) -> Started:
        """As `Transport.all_reduce`: to the same bits on all."""

        def sum_all(mappings: list[Mapping], layout: BlockLayout) -> None:
            written = zip(*[mapping.tensors(layout) for mapping in mappings], strict=True)
            for tensor, theirs in zip(tensors, written, strict=True):
                _sum(theirs, _quietly(tensor))

        return self._start("all-reduce", owner, key, tensors, sum_all)

    def _parts(self, mappings: list[Mapping], layout: BlockLayout) -> Iterable[tuple[Tensor, ...]]:
        """For each tensor this rank's of S equal parts of what each rank wrote, in rank order."""
        return zip(*[mapping.parts(layout, self.rank, self.size) for mapping in mappings], strict=True)

    def _start(
        self,
        kind: str,
        owner: Named,
        key: int,
        tensors: Sequence[Tensor],
        put_down: Callable[[list[Mapping], BlockLayout], None],
    ) -> Started:
        """Posts tensors, of the same shapes on all ranks; `put_down` gets what each rank wrote, by rank, when all have."""
        if not tensors:
            return [], None
        post = _Post(self, kind, owner.name, key & _KEY, self._layouts.of(tensors))
        self._write(post, tensors)

        def read() -> None:
            mappings = self._mappings_of(post)
            with outside_transforms(), torch.no_grad():
                put_down(mappings, post.layout)
            # A block that was ever written again too early, or mapped in another's place, must not pass for results.
            wanted = post.number, post.key
            for rank, mapping in enumerate(mappings):
                if mapping.header != wanted:
                    raise CollectiveError(
                        f"the {described(post.kind, post.name)} has no results: the block of rank {rank} was written for "
                        f"post {mapping.header}, not {wanted}; pass CommPolicy(shared_memory=False), and report this"
                    )

        return [post], read

    # -- posts -----------------------------------------------------------------------------------------------------------

    def _write(self, post: _Post, tensors: Sequence[Tensor]) -> None:
        try:
            block = self._take(post.layout.nbytes)
        except OSError as error:
            limit = "sizes of files (ulimit -f)" if error.errno == errno.EFBIG else "open files (ulimit -n) or of memory"
            raise CollectiveError(
                f"no shared memory of {post.layout.nbytes} bytes for the {described(post.kind, post.name)} ({error}); "
                f"raise the limit of {limit}, or pass CommPolicy(shared_memory=False)"
            ) from error
        number = self._posts
        block.header = number, post.key
        with outside_transforms(), torch.no_grad():
            for tensor, place in zip(tensors, block.tensors(post.layout), strict=True):
                place.copy_(tensor)
        # Not before: a post that failed, for want of memory say, was none, and the next one has its number. So has the next
        # block that of one which is not sent: other ranks count those that come.
        if block.file is not None:
            self._blocks += 1
        post.number = number
        self._unread.add(number)
        self._written[number] = block
        self._posts += 1
        # A copy: garbage collection, which may run in here, lets go of posts.
        late = sum(1 << age for unread in tuple(self._unread) if (age := number - unread) < _MOST_LATE)
        line = _LINE.pack(*Line(post.key, block.number, post.layout.nbytes, min(self._unread), late))
        deadline = time.monotonic() + _FULL
        for rank in self._peers:
            self._send(rank, line, [] if block.file is None else [block.file], deadline)
        block.close()

    def _mappings_of(self, post: _Post) -> list[Mapping]:
        """The memory that each rank wrote for a post, whose lines have come."""
        found: list[Mapping] = []
        for rank in range(self.size):
            if rank == self.rank:
                found.append(self._written[post.number])
                continue
            line = self._lines[post.number][rank]
            if (line.key, line.nbytes) != (post.key, post.layout.nbytes):
                size = f"{line.nbytes} bytes, not {post.layout.nbytes},"
                what = "for another collective" if line.key != post.key else size
                raise DivergenceError(
                    f"rank {rank} of the group, on this host, wrote {what} where this rank started the "
                    f"{described(post.kind, post.name)}; make every rank run the same modules and steps in the same order"
                )
            found.append(self._theirs[rank][line.block])
        return found

    def forget(self, number: int) -> None:
        """This rank has read a post, or never will."""
        self._unread.discard(number)
        self._lines.pop(number, None)

    def _take(self, nbytes: int) -> Block:
        """A block for a post: one that all have read, or a new one.

        Waiting for other ranks to read could wait for ever: they may wait for this post.
        """
        readings = self._readings.values()
        for post in [post for post in self._written if post not in self._unread]:
            if all([reading.of(post) for reading in readings]):
                self._free.append(self._written.pop(post))
        fitting = [block for block in self._free if nbytes <= block.nbytes]
        if fitting:
            block = min(fitting, key=lambda block: block.nbytes)
            self._free.remove(block)
            return block
        # They may be those of a smaller model that is gone. Steady loops come by here in their first steps alone.
        for block in self._free:
            block.give_back()
        # Few sizes, so that blocks fit other posts, too; pages that are not touched take no memory.
        return Block(self._blocks, max(_SMALLEST_BLOCK, 1 << (nbytes - 1).bit_length()))

    # -- lines -----------------------------------------------------------------------------------------------------------

    def _send(self, rank: int, line: bytes, files: list[int], deadline: float) -> None:
        peer = self._peers[rank]
        while line and rank not in self._lost:
            try:
                line = line[socket.send_fds(peer, [line], files) if files else peer.send(line) :]
                files = []
            except BlockingIOError:
                # It is hundreds of posts behind. Both may be sending: what comes in is taken meanwhile.
                writable = select.poll()  # `select` refuses the numbers of more than a thousand open files
                writable.register(peer, select.POLLOUT)
                writable.poll(1)
                self._take_lines(0.0)
            except OSError as error:
                # Of files on their way, which no rank has taken yet, a user may have as many as one process may open.
                if error.errno == errno.ETOOMANYREFS and time.monotonic() < deadline:
                    self._take_lines(1e-3)
                    continue
                full = "cannot be sent a block: too many are on their way (raise ulimit -n)"
                self._lost[rank] = full if error.errno == errno.ETOOMANYREFS else _CLOSED  # a wait for it raises

    def receive(self, number: int, timeout: float | None) -> bool:
        """Waits until all ranks have sent their lines of a post; returns whether they have.

        Raises:
            RuntimeError: one of them is gone.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            missing = [rank for rank, came in self._came.items() if came <= number]
            if not missing:
                return True
            for rank in missing:
                if rank in self._lost:
                    raise RuntimeError(f"rank {rank} of the group, on this host, {self._lost[rank]}")
            left = None if deadline is None else deadline - time.monotonic()
            if not self._take_lines(left) and left is not None and left <= 0:
                return False

    def _take_lines(self, timeout: float | None) -> bool:
        """Takes what has come, waiting for something if need be; returns whether anything came."""
        # A post that is given up may be asked for from in here, as garbage collection ends a model, or from another
        # thread: lines that two calls take would be counted twice, or out of order.
        if timeout is not None and timeout <= 0.0 and self._taking.locked():
            return False
        with self._taking:
            ready = self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
            for file, _ in ready:
                self._take_lines_of(self._rank_at[file], file)
            return bool(ready)

    def _take_lines_of(self, rank: int, file: int) -> None:
        came = self._taken_from(rank)
        if not came:
            self._poll.unregister(file)
            return
        held = self._bytes[rank]
        held += came
        whole = len(held) // _LINE.size * _LINE.size
        for line in map(Line._make, _LINE.iter_unpack(bytes(held[:whole]))):
            number = self._came[rank]
            self._readings[rank] = Reading(number, line.read_below, line.unread)
            if number >= self._posts or number in self._unread:
                self._lines.setdefault(number, {})[rank] = line
            self._came[rank] += 1  # last: an exception from outside must not leave a post without its line
        del held[:whole]

    def _taken_from(self, rank: int) -> bytes:
        """What has come from a rank, with the block that came along mapped; nothing if nothing can come any more."""
        files: list[int] = []
        try:
            came, files, flags, _ = socket.recv_fds(self._peers[rank], 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
            if flags & socket.MSG_CTRUNC:
                self._lost[rank] = "sent a file where this process may open no more (ulimit -n)"
                return b""
            self._theirs[rank] += [Mapping(block, os.fstat(block).st_size) for block in files]
        except OSError as error:  # it was closed with lines under way, or there is no memory for the block
            self._lost[rank] = f"{_CLOSED}, or its block cannot be mapped ({error})"
            return b""
        finally:
            for block in files:
                os.close(block)
        if not came:
            self._lost[rank] = _CLOSED
        return came


_alive: weakref.WeakSet[HostMemory] = weakref.WeakSet()


def _close_all() -> None:
    for memory in list(_alive):
        memory.close()


# Workers of a data loader that are forked have the connections too, and may outlive a rank that is killed: without this
# other ranks would not see that it is gone before they are.
os.register_at_fork(after_in_child=_close_all)


def _quietly(tensor: Tensor) -> Tensor:
    """The same memory, with a version counter of its own.

    As with a backend, whose writes raise none: a gather brings what a graph that saved whole parameters has seen in them.
    """
    return tensor.data


def _sum(parts: Sequence[Tensor], output: Tensor) -> None:
    """Adds them in rank order; what has fewer than 32 bits in float32, rounded once."""
    if output.dtype.itemsize < 4:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        output.copy_(total)
        return
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output += part
