"""Reductions with 16 bits on the wire and fp32 in the sums: half the bytes of fp32, a fraction of the error of bf16.

    this rank's values --cast--> [ part 0 | part 1 | ... ] --all-to-all--> part r of every rank
    part r of every rank --added in fp32, rank 0 first--> the sum of part r                     (a reduce-scatter ends here)
    the sum of part r --cast--> all-gather --> the whole sum

A reduction in bf16 rounds the running sum at every hop; here each value is rounded once, and with replicas the sum once
more, however many ranks there are. Ranks add in the order of ranks, so that the result depends on no timing.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hsdp.comm.collectives import Comm
from hsdp.comm.labels import Named
from hsdp.comm.replica_reduce import AllReduceStage
from hsdp.comm.work import CommWork, TwoPhases, in_turn


class CompressedAllReduce(AllReduceStage):
    """The all-reduce stage in `wire_dtype` on the wire: for `set_replica_reduce`.

    All replicas end with the same bits. Bytes sent per rank: 2 (R-1)/R elements of `wire_dtype`, as an all-reduce of that
    dtype. On the CPU the all-gather starts where the reduction lands.

    Args:
        wire_dtype: a floating-point dtype; bf16 has fp32's range, fp16 more digits but overflows at 65504.
    """

    def __init__(self, wire_dtype: torch.dtype = torch.bfloat16) -> None:
        self.wire_dtype = _check_wire("CompressedAllReduce", wire_dtype)
        self.exact = wire_dtype is torch.bfloat16  # fp16 may lose what NCCL has scaled

    def start(
        self, owner: Named, key: int, tensors: list[Tensor], comm: Comm, finish: Callable[[], object] | None
    ) -> CommWork:
        """Sums `tensors` over the ranks of `comm`, in place; `owner`, `key` and `finish` as `AllReduceStage` says."""
        sizes = [tensor.numel() for tensor in tensors]
        part = -(-sum(sizes) // comm.size)
        sent = torch.zeros(part * comm.size, dtype=self.wire_dtype, device=tensors[0].device)
        flat = [tensor.view(-1) for tensor in tensors]
        pieces = list(sent[: sum(sizes)].split(sizes))
        torch._foreach_copy_(pieces, flat)
        received = torch.empty_like(sent)

        def gather() -> CommWork:
            mine = add_in_order(received, comm.size).to(self.wire_dtype)
            then = in_turn(lambda: torch._foreach_copy_(flat, pieces), finish)
            return comm.all_gather(owner, hash((key, 1)), [sent.view(torch.uint8)], [mine.view(torch.uint8)], then)

        return TwoPhases(comm, "all-reduce", owner, [comm.all_to_all(owner, key, [received], [sent])], gather)


class CompressedReduceScatter:
    """A reduce-scatter in `wire_dtype` on the wire: for `set_custom_reduce_scatter`, of hsdp's modules and of FSDP2's.

    Gradients that were computed in `wire_dtype` lose nothing: the result is that of an fp32 reduction. Bytes sent per
    rank: (S-1)/S elements of `wire_dtype`.

    Args:
        wire_dtype: a floating-point dtype, as for `CompressedAllReduce`.
    """

    def __init__(self, wire_dtype: torch.dtype = torch.bfloat16) -> None:
        self.wire_dtype = _check_wire("CompressedReduceScatter", wire_dtype)
        self.exact = True

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """See `hsdp.ReduceScatter`.

        Raises:
            ValueError: `op` is not a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"CompressedReduceScatter: op {op} is not a sum; call set_force_sum_reduction_for_comms(True) on the module"
            )
        sent = input_tensor.to(self.wire_dtype)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=async_op)
        behind = _Behind(work, lambda: output_tensor.copy_(add_in_order(received, group.size())))
        if not async_op:
            behind.wait()
            return None
        return behind

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for its buffers here."""
        return torch.empty(*size, dtype=dtype, device=device)


def add_in_order(parts: Tensor, ranks: int) -> Tensor:
    """The sum of `ranks` equal parts of a 1-D tensor, first to last, in fp32 (or its dtype if that is wider)."""
    rows = parts.view(ranks, -1)
    total = rows[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total.add_(row)
    return total


class _Behind:
    """A work, and what follows it: as `torch.distributed.Work` has it."""

    def __init__(self, work: dist.Work | None, then: Callable[[], object]) -> None:
        self._work = work
        self._then: Callable[[], object] | None = then

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        if self._then is not None:
            self._then()
            self._then = None
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def _check_wire(name: str, dtype: Any) -> torch.dtype:
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(f"{name}(wire_dtype={dtype!r}): expected torch.bfloat16 or another float dtype of 16 bits")
    return dtype
