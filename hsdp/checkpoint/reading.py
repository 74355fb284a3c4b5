"""Reading a checkpoint in two passes: everything that can be wrong is found in the first, the second only moves bytes.

    prepare   open each piece that a tensor of this rank overlaps, compare it with the index, count the elements
    run       read each rank's rows from their place in the file to their place in the tensor

No copy of the state is made in between: bytes go into the tensors themselves, or, where they must be converted, reordered
or brought to a device, through one block of rows at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hsdp.checkpoint.archive_reader import OpenPiece, Stored, read_into, read_tensor
from hsdp.checkpoint.contents import local_box
from hsdp.checkpoint.index import FileRange, Index, PieceRecord, TensorRecord, ValueRecord
from hsdp.checkpoint.objects import unpack
from hsdp.checkpoint.open_files import OpenFiles
from hsdp.checkpoint.store import Progress
from hsdp.errors import CheckpointError
from hsdp.format import listing
from hsdp.params.local import local_of
from hsdp.params.shard_geometry import Box

PARTLY = "The model and the optimizer are partly changed; load a checkpoint before you use them"
"""What an error says once loading has begun to change them."""

_BLOCK = 32 << 20
"""How many bytes are read at a time where they cannot go to their place directly."""


@contextlib.contextmanager
def handing_over(where: str) -> Iterator[None]:
    """Says of an error of the body, which gives a model or an optimizer what was read, what it means for them.

    Raises:
        CheckpointError: the body raised, a hook of the model's perhaps; begins with `where`.
    """
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{where}: handing it over raised {type(error).__name__}: {error}. {PARTLY}") from error


@dataclass(frozen=True)
class _Read:
    """A part of a piece, and the part of a tensor that it is read to."""

    key: str
    stored: Stored
    file: str
    source: Box
    """Where it lies in the piece."""
    target: Tensor

    @property
    def bytes(self) -> int:
        return self.target.numel() * self.stored.dtype.itemsize

    def run(self, stream: BinaryIO) -> None:
        stored, source, target = self.stored, self.source, self.target
        if not stored.contiguous:
            target.copy_(_narrowed(read_tensor(stream, stored), source))
            return
        row, rows = (source.offsets[0], source.sizes[0]) if stored.shape else (0, 1)
        row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        whole_rows = source.sizes[1:] == stored.shape[1:]
        start = stored.start + row * row_bytes
        as_stored = (target.device.type, target.dtype) == ("cpu", stored.dtype) and not (
            target.is_conj() or target.is_neg()
        )
        if whole_rows and target.is_contiguous() and as_stored:
            read_into(stream, start, target)
            torch.autograd.graph.increment_version(target)  # autograd has not seen the write
            return
        at_once = max(1, _BLOCK // max(1, row_bytes))
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            shape = (count, *stored.shape[1:]) if stored.shape else ()
            block = torch.empty(shape, dtype=stored.dtype, device="cpu")
            read_into(stream, start + first * row_bytes, block)
            if not stored.shape:
                target.copy_(block)
            else:
                part = Box((0, *source.offsets[1:]), (count, *source.sizes[1:]))
                target.narrow(0, first, count).copy_(_narrowed(block, part))


def _narrowed(tensor: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


class Reader:
    """Reads values and parts of tensors out of the files of one checkpoint.

    Args:
        where: what the checkpoint is called in errors.
        files: its files.
        index: what it holds.
        check_zip: compare the CRC-32 that torch.save put beside each tensor. For checkpoints without a manifest.
        progress: called with the bytes read and to be read.
        packed: values by key as `objects.pack` packs them; those that are not there are read from their place.
    """

    def __init__(
        self,
        where: object,
        files: OpenFiles,
        index: Index,
        check_zip: bool,
        progress: Progress | None,
        packed: Mapping[str, bytes],
    ) -> None:
        self._where = where
        self._files = files
        self._index = index
        self._check_zip = check_zip
        self._progress = progress
        self._tensors: dict[str, Tensor] = {}
        self._packed = packed
        self._asked: list[str] = []
        self._early: set[str] = set()
        self._reads: list[_Read] = []
        self._opened: dict[FileRange, Stored] = {}
        self.values: dict[str, Any] = {}

    def value(self, key: str) -> None:
        """Asks for a value that is no tensor; after `prepare` it is in `values`."""
        self._asked.append(key)

    def tensor(self, key: str, tensor: Tensor) -> Tensor:
        """Asks for a tensor, of a DTensor for this rank's part, to be read into `tensor`, which it returns."""
        self._tensors[key] = tensor
        return tensor

    def early(self, key: str, tensor: Tensor) -> Tensor:
        """Asks for a tensor to be read in `prepare`, because what it says decides whether the rest is wanted."""
        self._early.add(key)
        return self.tensor(key, tensor)

    def prepare(self) -> None:
        """Finds everything that was asked for, and reads the values; no other tensor is changed.

        Raises:
            CheckpointError: a file or a piece of it cannot be read, is not what the index says, or an element that was
                asked for is not there; names the file and the tensor.
        """
        for key in self._asked:
            if key not in self.values:
                self.values[key] = self._value(key)
        short = []
        for key, tensor in self._tensors.items():
            reads = self._reads_of(key, tensor)
            if sum(read.target.numel() for read in reads) != local_of(tensor).numel():
                short.append(key)
            if key in self._early:
                for read in reads:
                    read.run(self._files.open(read.file))
            else:
                self._reads += reads
        if short:
            raise CheckpointError(f"checkpoint {self._where}: not every element of {listing(short)} is there to be read")
        self._reads.sort(key=lambda read: (read.file, read.stored.start))

    def run(self) -> None:
        """Reads all tensors. What can still fail is the reading itself.

        Raises:
            CheckpointError: it did, or `progress`; tells that tensors are partly changed.
        """
        done, total = 0, sum(read.bytes for read in self._reads)
        with torch.no_grad():
            for read in self._reads:
                self._tell(done, total)
                try:
                    read.run(self._files.open(read.file))
                except Exception as error:  # also for want of memory
                    text = f"{read.key!r} in {read.file} could not be read after all: {error}. {PARTLY}"
                    raise CheckpointError(f"checkpoint {self._where}: {text}") from error
                done += read.bytes
        self._tell(total, total)

    def same(self, key: str, other: str, like: Tensor) -> bool:
        """Whether two tensors of the checkpoint are equal, bit for bit, in the part that `like` holds on this rank."""
        held = []
        for name in (key, other):
            record = self._index.records[name]
            assert isinstance(record, TensorRecord), "the caller has compared what the checkpoint has with the model"
            block = torch.empty(local_of(like).shape, dtype=record.dtype, device="cpu")
            for read in self._reads_of(name, like, block):
                read.run(self._files.open(read.file))
            held.append(block.reshape(-1).view(torch.uint8))  # so that NaN equals NaN
        return torch.equal(*held)

    # -- pieces --

    def _reads_of(self, key: str, tensor: Tensor, into: Tensor | None = None) -> list[_Read]:
        """The parts of pieces that overlap with this rank's part of a tensor."""
        record = self._index.records[key]
        assert isinstance(record, TensorRecord), "the caller has checked what the checkpoint has"
        mine, local = local_box(tensor), local_of(tensor) if into is None else into
        reads = []
        for piece in record.pieces:
            if (part := mine.common(piece.box)) is not None:
                stored, target = self._stored(key, record, piece), _narrowed(local, part.inside(mine))
                reads.append(_Read(key, stored, piece.place.file, part.inside(piece.box), target))
        return reads

    def _stored(self, key: str, record: TensorRecord, piece: PieceRecord) -> Stored:
        if piece.place not in self._opened:
            with self._telling(key, piece.place):
                stored = self._piece(piece.place).tensor()
                if (stored.shape, stored.dtype) != (piece.box.sizes, record.dtype):
                    raise CheckpointError(
                        f"the index promises {record.dtype} of shape {piece.box.sizes}, the file has {stored.dtype} of "
                        f"shape {stored.shape}"
                    )
                self._opened[piece.place] = stored
        return self._opened[piece.place]

    def _value(self, key: str) -> Any:
        record = self._index.records[key]
        assert isinstance(record, ValueRecord), "the caller has checked what the checkpoint has"
        with self._telling(key, record.place):
            return unpack(self._packed[key]) if key in self._packed else self._piece(record.place).value()

    def _piece(self, place: FileRange) -> OpenPiece:
        piece = OpenPiece(self._files.open(place.file), place)
        if self._check_zip:
            piece.check()
        return piece

    @contextlib.contextmanager
    def _telling(self, key: str, place: FileRange) -> Iterator[None]:
        where = f"checkpoint {self._where}: {key!r} in {place.file}"
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{where} is damaged or foreign: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from error

    def _tell(self, done: int, total: int) -> None:
        if self._progress is not None:
            try:
                self._progress(done, total)
            except Exception as error:
                text = f"progress= raised {type(error).__name__}: {error}. {PARTLY}"
                raise CheckpointError(f"checkpoint {self._where}: {text}") from error
