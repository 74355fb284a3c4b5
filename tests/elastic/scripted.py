"""A manager of replicas whose quorums and errors are written beforehand, over a group that stays: no torchft, no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ScriptedManager:
    """Behaves as torchft's does towards hsdp.

    Args:
        across, within: the group of a rank's counterparts, and that of its replica.
        healed: steps in which the replica of number 1 in `across` does not take part, and gets the state of number 0.
        fails: (step, number of an all-reduce in it) at which this rank meets an error, as attempts count from 0.
        waits: as with `use_async_quorum=False`, a replica is healed before its forward, and takes part.
    """

    def __init__(
        self,
        across: Any,
        within: Any,
        healed: tuple[int, ...] = (),
        fails: tuple[tuple[int, int], ...] = (),
        waits: bool = False,
    ) -> None:
        self.across, self.within = across, within
        self.healed, self.fails, self.waits = healed, fails, waits
        self.attempt = -1
        self.calls = 0
        self.step = self.batches = 0
        self.error: Exception | None = None
        self.heals = False
        self.begun = False
        self.states: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self.pending: Any = None

    def start_quorum(self) -> None:
        self.begun = True
        self.attempt += 1
        self.calls = 0
        self.error = None
        self.heals = self.attempt in self.healed and self.across.rank() == 1
        if self.attempt in self.healed:
            # What the transport does: the source is asked at the beginning, and the other has a copy of what it had then.
            state = [{key: take() for key, (_, take) in self.states.items()} if self.across.rank() == 0 else None]
            dist.broadcast_object_list(state, group=self.across, group_src=0)
            self.pending = state[0] if self.heals else None
            if self.heals and self.waits:
                self._heal()
                self.heals = False

    def wait_quorum(self) -> None:
        assert self.begun, "must call start_quorum before wait_quorum"

    def is_participating(self) -> bool:
        return not self.heals

    def participating_rank(self) -> int | None:
        return None if self.heals else int(self.across.rank())

    def num_participants(self) -> int:
        """As torchft has it, one that is healed in the first step counts, though nothing of it does."""
        return int(self.across.size()) - (self.step > 0 and self.attempt in self.healed and not self.waits)

    def allreduce(self, tensor: Tensor, *, reduce_op: Any) -> Any:
        if self.heals:
            tensor.zero_()
        work: Any = dist.all_reduce(tensor, group=self.across, async_op=True)
        if (self.attempt, self.calls) in self.fails:
            self.report_error(RuntimeError("a peer is lost"))
        self.calls += 1
        assert reduce_op == dist.ReduceOp.SUM
        return _Work(self, work, tensor)

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, e: Exception) -> None:
        self.error = e

    def should_commit(self) -> bool:
        if self.heals:
            self._heal()
        well = torch.tensor([float(self.error is None)])
        dist.all_reduce(well, dist.ReduceOp.MIN, group=self.within)
        if well.item():
            self.step += 1
            self.batches += self.num_participants()
        return bool(well.item())

    def _heal(self) -> None:
        for key, (give, _) in self.states.items():
            give(self.pending[key])

    def current_step(self) -> int:
        return self.step

    def batches_committed(self) -> int:
        return self.batches

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], take: Callable[[], Any]) -> None:
        assert key not in self.states
        self.states[key] = load, take

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "batches_committed": self.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step, self.batches = state_dict["step"], state_dict["batches_committed"]


class _Work:
    """Leaves nonsense where the manager met an error."""

    def __init__(self, manager: ScriptedManager, work: Any, tensor: Tensor) -> None:
        self._manager, self._work, self._tensor = manager, work, tensor

    def wait(self) -> bool:
        self._work.wait()
        if self._manager.error is not None:
            self._tensor.fill_(float("nan") if self._tensor.is_floating_point() else 7)
        return True
