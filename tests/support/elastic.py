"""One rank of one elastic replica, which may be told to die at a certain moment; and the run as one process does it.

Every rank writes a line of JSON for each step that it took or dropped, with a digest of its shards and optimizer states.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hsdp import MixedPrecisionPolicy, clip_grad_norm_, elastic, fully_shard

WIDTH, ROWS = 24, 4
MAX_NORM = 0.5
SAVE_EVERY = 10

MOMENTS = ["quorum", "forward", "backward", "all-reduce", "commit", "step", "saving", "healing", "healed"]
"""When a rank can be told to die: by their numbers, from 1."""


@dataclass(frozen=True)
class Place:
    """Where a rank is, and what the run is like.

    Attributes:
        replica, incarnation, rank, ranks: the replica's number, how often it was started, the rank in it, their number.
        port: that of the replica's own store.
        lighthouse: its address.
        folder: where lines are written.
        accumulate: micro-batches of a step.
        checkpoints: whether steps are saved, and a start begins with the last checkpoint.
        waits: whether a step begins with the quorum, instead of asking for it beside the forward.
        bf16: whether it computes in bf16.
        timeout: the manager's, in seconds; of its process group a third.
        pause: seconds that a step waits, so that a run of tiny steps can be hit.
    """

    replica: int
    incarnation: int
    rank: int
    ranks: int
    port: int
    lighthouse: str
    folder: Path
    accumulate: int = 1
    checkpoints: bool = False
    waits: bool = False
    bf16: bool = False
    timeout: float = 10.0
    pause: float = 0.0


class Net(nn.Module):
    """Blocks of uneven sizes, the last of which is used by every third batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Tanh(), nn.Linear(2 * WIDTH + 1, WIDTH))
            for _ in range(3)
        )
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        if batch % 3 == 0:
            x = x + self.sometimes(x)
        return self.head(x)


def make_net(seed: int, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def make_adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)


def learning_rate(step: int) -> float:
    return 3e-3 / (1 + step / 50)


def loss_of(net: nn.Module, batch: int, rank: int, micro: int) -> Tensor:
    """That of one micro-batch of a rank in one of the run's batches."""
    random = torch.Generator().manual_seed(batch * 1009 + rank * 31 + micro)
    x = torch.randn(ROWS, WIDTH, generator=random, dtype=torch.float64)
    dtype = next(net.parameters()).dtype
    return (net(x.to(dtype), batch).double() - x.cumsum(1)[:, 4:24:4]).square().mean()


class _Doom:
    """Dies at the moment that it was told."""

    def __init__(self, told: Any) -> None:
        self._told = told

    def at(self, moment: str) -> None:
        if self._told.value == 1 + MOMENTS.index(moment):
            os.kill(os.getpid(), signal.SIGKILL)


def run_rank(place: Place, told: Any, progress: Any, last: Any) -> None:
    """Trains until `last` steps were taken.

    Args:
        place: where it is.
        told: the number of the moment at which it is to die; 0: none.
        progress: gets the number of steps taken.
        last: the number of steps after which all stop.
    """
    name = f"replica{place.replica}.{place.incarnation}.{place.rank}"
    log = os.open(place.folder / f"{name}.err", os.O_CREAT | os.O_WRONLY, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    doom = _Doom(told)
    store = dist.TCPStore("127.0.0.1", place.port, is_master=False, timeout=timedelta(seconds=30))
    patience = timedelta(seconds=6 * place.timeout)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("ranks", store), rank=place.rank, world_size=place.ranks, timeout=patience
    )
    dtype = torch.float32 if place.bf16 else torch.float64
    net = make_net(0 if place.incarnation == 0 else 1 + place.incarnation, dtype)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if place.bf16 else None
    mesh = init_device_mesh("cpu", (place.ranks,))
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    net.blocks[1].register_forward_pre_hook(lambda *_: doom.at("forward"))
    net.blocks[1].register_full_backward_hook(lambda *_: doom.at("backward"))
    manager = make_manager(place)
    optimizer = elastic.ElasticOptimizer(manager, net, make_adamw(net))
    _watch(optimizer, manager, doom)
    if place.checkpoints:
        elastic.resume(place.folder / "checkpoints", optimizer)
    out = os.open(place.folder / f"{name}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    while manager.current_step() < last.value:
        line = _step(place, net, optimizer, doom)
        os.write(out, (json.dumps(line) + "\n").encode())
        progress.value = manager.current_step()
        if place.checkpoints and line["took"] and manager.current_step() % SAVE_EVERY == 0:
            doom.at("saving")
            elastic.save(place.folder / "checkpoints", optimizer, keep=2)
    dist.barrier()  # rank 0 serves the other one, which may not have its answer yet
    manager.shutdown(wait=False)
    os._exit(0)


def make_manager(place: Place) -> Any:
    from torchft import Manager, ProcessGroupGloo

    patience = timedelta(seconds=place.timeout)
    return Manager(
        pg=elastic.BoundedGroup(ProcessGroupGloo, timeout=patience / 3),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        init_sync=False,
        use_async_quorum=not place.waits,
        timeout=patience,
        quorum_timeout=3 * patience,
        rank=place.rank,
        world_size=place.ranks,
        store_addr="127.0.0.1",
        store_port=place.port,
        lighthouse_addr=place.lighthouse,
        replica_id=f"replica{place.replica}",
        hostname="127.0.0.1",
    )


def _watch(optimizer: elastic.ElasticOptimizer, manager: Any, doom: _Doom) -> None:
    """Puts the moments into what is called on the way."""
    stage = optimizer._stage
    start, take, give, commit = stage.start, optimizer._healed.take, optimizer._healed.give, manager.should_commit

    def starts(*args: Any) -> Any:
        work = start(*args)
        doom.at("all-reduce")
        return work

    def takes() -> Any:
        doom.at("healing")  # another one, from here
        return take()

    def gives(shards: Any) -> None:
        doom.at("healing")
        give(shards)
        doom.at("healed")

    def commits() -> bool:
        doom.at("commit")
        return bool(commit())

    stage.start, optimizer._healed.take, optimizer._healed.give = starts, takes, gives  # type: ignore[method-assign]
    manager.should_commit = commits
    optimizer.optimizer.register_step_pre_hook(lambda *_: doom.at("step"))


def _step(place: Place, net: Net, optimizer: elastic.ElasticOptimizer, doom: _Doom) -> dict[str, Any]:
    manager: Any = optimizer.manager
    began = time.time()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(manager.current_step())
    optimizer.zero_grad()
    doom.at("quorum")
    time.sleep(place.pause)
    batch = elastic.batch_index(manager)
    losses = []
    for micro in range(place.accumulate):
        with net.accumulate(last=micro == place.accumulate - 1):  # type: ignore[operator]
            loss = loss_of(net, batch, place.rank, micro) / place.accumulate
            loss.backward()
        losses.append(loss.item())
    clip_grad_norm_(net, MAX_NORM)
    before = manager.current_step()
    took = optimizer.step()
    if not took:
        assert all(param.grad is None for param in net.parameters()), "a dropped step left gradients"
        assert not net.pending_gradients(), "a dropped step left sums"  # type: ignore[operator]
        assert not any(len(runtime.pipeline) for runtime in net._runtimes()), "reductions"  # type: ignore[operator]
    return {
        "began": began,
        "at": time.time(),
        "replica": place.replica,
        "incarnation": place.incarnation,
        "rank": place.rank,
        "step": before,
        "took": took,
        "replicas": manager.num_participants(),
        "takes_part": manager.is_participating(),
        "batch": batch,
        "first": manager.batches_committed() - manager.num_participants() if took else None,
        "quorum": manager._quorum_id,
        "losses": losses,
        "digest": digest_of(net, optimizer.optimizer),
    }


def digest_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """That of a rank's shards and optimizer states, bit for bit."""
    found = hashlib.sha256()
    for name, param in net.named_parameters():
        for key, value in ("", param), *sorted(optimizer.state.get(param, {}).items()):
            local = value._local_tensor if isinstance(value, DTensor) else value
            found.update(f"{name} {key}".encode())
            found.update(local.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def twin_losses(steps: list[tuple[int, int]], ranks: int, accumulate: int) -> list[dict[tuple[int, int], list[float]]]:
    """One process that takes the same steps.

    Args:
        steps: for each step the first of its batches, and their number.
        ranks: of a replica.
        accumulate: micro-batches of a rank.

    Returns:
        For each step, by batch and rank, the losses of the micro-batches.
    """
    net = make_net(0)
    optimizer = make_adamw(net)
    results = []
    for step, (first, count) in enumerate(steps):
        found: dict[tuple[int, int], list[float]] = {}
        for batch in range(first, first + count):
            for rank in range(ranks):
                losses = [loss_of(net, batch, rank, micro) / accumulate for micro in range(accumulate)]
                torch.autograd.backward([loss / (ranks * count) for loss in losses])
                found[batch, rank] = [loss.item() for loss in losses]
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        results.append(found)
    return results
