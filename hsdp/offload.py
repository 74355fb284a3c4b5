"""Where shards live when they are not on the device: policies, and the memory that each stands for.

forward, backward    shard (host memory or file) --copied, once per gather--> gather on the device
end of a reduction   gradient on the device --copied, once per unit--> gradient beside its shard
step                 on the host, where parameters, gradients and so the optimizer's state are
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards stay on the mesh's device: nothing is offloaded. The base of those that do."""

    def home(self, device: torch.device) -> torch.device:
        """Where the shards of a mesh on `device` live, and the gradients beside them."""
        return device

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor of `numel` zeros of `dtype`, for the shards of a dtype group whose mesh is on `device`."""
        return torch.zeros(numel, dtype=dtype, device=self.home(device))

    def staging(self, like: Tensor) -> Tensor:
        """Memory beside the shards to copy a gradient into: shape and dtype of `like`."""
        return torch.empty_like(like, device=self.home(like.device))


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and so the optimizer's state live in host memory; the device has only what is whole at the time.

    Args:
        pin_memory: use page-locked memory, from which copies run beside compute. It cannot be swapped out; turn it off
            where the host has little memory. Without an accelerator it has no effect.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise ValueError(f"CPUOffloadPolicy(pin_memory={self.pin_memory!r}): expected True or False")

    def home(self, device: torch.device) -> torch.device:
        """Host memory."""
        return torch.device("cpu")

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in host memory."""
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self._pins(device))

    def staging(self, like: Tensor) -> Tensor:
        """Host memory, page-locked too."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self._pins(like.device))

    def _pins(self, device: torch.device) -> bool:
        return self.pin_memory and device.type not in ("cpu", "meta")


@dataclass(frozen=True)
class DiskOffloadPolicy(OffloadPolicy):
    """Shards live in files, one per unit and dtype, mapped into memory: the system reads what a gather needs, and writes
    back what the optimizer changed. For models whose shards do not fit into host memory; gradients and the optimizer's
    state stay there.

    The files are allocated in full when a module is sharded, so that a full disk shows there and then, and they have no
    name: nobody can remove or shorten them, and they are gone with the process, however it ends.

    Args:
        directory: an existing directory on a local disk that this rank may write to.
    """

    directory: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not isinstance(self.directory, (str, os.PathLike)):
            raise TypeError(f"DiskOffloadPolicy(directory={self.directory!r}): expected the path of a directory")

    def home(self, device: torch.device) -> torch.device:
        """The CPU: to torch, a mapped file is host memory."""
        return torch.device("cpu")

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in a file.

        Raises:
            OSError: the directory is not there, cannot be written to, or has no room left.
        """
        if numel == 0:
            return torch.zeros(0, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=self.directory, prefix="hsdp-") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                mapped = mmap.mmap(file.fileno(), nbytes)  # holds the file after it is closed
        except OSError as error:
            raise OSError(
                error.errno,
                f"DiskOffloadPolicy(directory={os.fspath(self.directory)!r}): cannot make a file of {nbytes:,} bytes for "
                f"shards ({os.strerror(error.errno or 0)}); choose an existing, writable directory with more room",
            ) from error
        return torch.frombuffer(mapped, dtype=dtype)
