"""Memory that ranks of one host share, block by block, and how the tensors of a post lie in a block."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hsdp.torch_private import outside_transforms

_libc = ctypes.CDLL(None)
_ALIGNMENT = 64
_MOST_LAYOUTS = 256
"""A model has a few for each kind of its units; tensors whose sizes change from step to step have ever new ones."""


class BlockLayout:
    """How tensors lie in a block, one behind the other: the same object for tensors of the same dtypes and shapes.

    Attributes:
        nbytes: of the block that they take, with its header.
    """

    def __init__(self, kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
        self._places: list[tuple[int, int, torch.dtype, torch.Size]] = []
        self.nbytes = _ALIGNMENT
        for dtype, shape in kinds:
            size = shape.numel() * dtype.itemsize
            self._places.append((self.nbytes, size, dtype, shape))
            self.nbytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def views_of(self, memory: Tensor) -> list[Tensor]:
        """The tensors in a block's bytes."""
        return [memory[at : at + size].view(dtype).view(shape) for at, size, dtype, shape in self._places]


class BlockLayouts:
    """Block layouts by the dtypes and shapes of tensors."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[torch.dtype, torch.Size], ...], BlockLayout] = {}

    def of(self, tensors: Sequence[Tensor]) -> BlockLayout:
        """The layout of tensors like these."""
        kinds = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
        layout = self._made.get(kinds)
        if layout is None:
            if len(self._made) >= _MOST_LAYOUTS:
                self._made.clear()
            layout = self._made[kinds] = BlockLayout(kinds)
        return layout


class Mapping:
    """Memory of one rank, mapped by this one: a header that says for which post it was written, and the post's tensors.

    It keeps the views of tensors that it made: a block is written again for posts like those before.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        # By its name: Python's mmap keeps a file open for each mapping, and of open files a process may have a thousand.
        name = f"/proc/self/fd/{file}"
        try:
            with outside_transforms(), torch.inference_mode(False):  # written again outside of both
                self.memory = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise OSError(f"{name} of {nbytes} bytes cannot be mapped") from error
        self._header = (ctypes.c_int64 * 2).from_address(self.memory.data_ptr())
        self._views: dict[tuple[BlockLayout, bool], list[Tensor]] = {}

    @property
    def header(self) -> tuple[int, int]:
        """Number and key of the post."""
        number, key = self._header
        return number, key

    @header.setter
    def header(self, header: tuple[int, int]) -> None:
        self._header[:] = list(header)

    def tensors(self, layout: BlockLayout) -> list[Tensor]:
        """The tensors of a post."""
        return self._kept((layout, False), lambda: layout.views_of(self.memory))

    def parts(self, layout: BlockLayout, part: int, count: int) -> list[Tensor]:
        """Of each tensor, cut into `count` equal parts along its elements, one part: the same one in every call."""
        return self._kept((layout, True), lambda: [whole.view(count, -1)[part] for whole in self.tensors(layout)])

    def _kept(self, key: tuple[BlockLayout, bool], make: Callable[[], list[Tensor]]) -> list[Tensor]:
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_LAYOUTS:
                self._views.clear()
            with outside_transforms(), torch.inference_mode(False), torch.no_grad():  # as above
                found = self._views[key] = make()
        return found


class Block(Mapping):
    """Memory of this rank's own: until `close` a file that can be sent to other ranks."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.file: int | None = None
        self.file = os.memfd_create(f"hsdp-{number}", os.MFD_CLOEXEC)
        os.ftruncate(self.file, nbytes)
        super().__init__(self.file, nbytes)

    def give_back(self) -> None:
        """Gives pages back that will not be read again; they come back, as zeros, when the block is written to."""
        # Where the kernel cannot, they stay.
        _libc.madvise(ctypes.c_void_p(self.memory.data_ptr()), ctypes.c_size_t(self.nbytes), mmap.MADV_REMOVE)

    def close(self) -> None:
        """Closes the file when other ranks have it: their mappings keep the memory, and this one's."""
        if self.file is not None:
            os.close(self.file)
        self.file = None

    __del__ = close
