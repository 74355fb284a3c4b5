"""`python -m benchmarks.checkpoint`: saving and loading hsdp's checkpoints beside DCP's of FSDP2.

Two ranks hold one model with AdamW's state (800 MB in all by default), sharded by hsdp and by FSDP2. In each round every
contender saves, saves in the background and loads once, in turn (A B A B):

    hsdp    checkpoint.save, checkpoint.save(async_=True), checkpoint.load, checksums included
    dcp     dcp.save, dcp.async_save, dcp.load and set_state_dict, of get_state_dict

Times are wall times of the slower rank, and for the background save also the time until the caller goes on; CPU times are
those of the busier rank, with all its threads and the kernel's part, which other work on the machine changes little. Memory
is what a rank's resident set grows by at its peak (Linux's VmHWM), as a share of the state that the rank holds; what a
background save keeps for the next one counts in the first round. Before each action malloc gives back what is free:
otherwise memory that an earlier one has used and freed, and which is still resident, is used again and not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.harness import positive, progress, publish, shard
from hsdp import checkpoint
from tests.support.rig import RankEnv, run_procs

CONTENDERS = ("hsdp", "dcp")
ACTIONS = ("save", "async: caller", "async: all", "load")
WORLD = 2


def build(library: str, env: RankEnv, layers: int, dim: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of square matrices, stepped once."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(layers)))
    mesh = env.mesh((WORLD,))
    shard("hsdp" if library == "hsdp" else "fsdp2", [*model, model], mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _status(field: str) -> int:
    """A size in bytes that Linux tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measured(action: Callable[[], Any]) -> tuple[float, float, int, Any]:
    """Seconds, CPU seconds, the resident set in bytes before (its peak begins there), and what the action returned."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, started, used = _status("VmRSS"), time.perf_counter(), time.process_time()
    result = action()
    return time.perf_counter() - started, time.process_time() - used, before, result


def actions(library: str, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], Any]]:
    """What is timed: save, background save, load."""
    if library == "hsdp":
        return {
            "save": lambda: checkpoint.save(path, model, optimizer, step=1),
            "async": lambda: checkpoint.save(path, model, optimizer, step=2, async_=True).wait,
            "load": lambda: checkpoint.load(path, model, optimizer),
        }

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def load() -> None:
        found = state()
        dcp.load(found, checkpoint_id=path / "1")
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    return {
        "save": lambda: dcp.save(state(), checkpoint_id=path / "1"),
        "async": lambda: dcp.async_save(state(), checkpoint_id=path / "2").result,
        "load": load,
    }


def run(env: RankEnv, directory: str, rounds: int, layers: int, dim: int) -> list[dict[str, Any]]:
    """On a rank: all rounds."""
    warnings.simplefilter("ignore")
    made = {name: build(name, env, layers, dim) for name in CONTENDERS}
    held = 3 * 4 * layers * dim * dim // WORLD
    found = []
    for number in range(rounds):
        for name, (model, optimizer) in made.items():
            path = Path(directory, name)
            calls = actions(name, path, model, optimizer)
            for action, call in calls.items():
                seconds, used, before, wait = measured(call)
                grown = _status("VmHWM") - before
                if action == "async":
                    caller = {"who": name, "what": "async: caller", "s": seconds, "cpu": used, "memory": grown / held}
                    found.append(caller | {"round": number})
                    started, used_before = time.perf_counter(), time.process_time()
                    wait()
                    seconds += time.perf_counter() - started
                    used += time.process_time() - used_before
                    grown = _status("VmHWM") - before
                what = "async: all" if action == "async" else action
                one = {"who": name, "what": what, "s": seconds, "cpu": used, "memory": grown / held}
                found.append(one | {"round": number})
            dist.barrier()
            if env.rank == 0:
                shutil.rmtree(path)
    return found


def table(ranks: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Medians over rounds, of the slower rank, and of the rounds' ratios of hsdp to DCP; the largest memory."""
    lines = [f"{'':16}{'hsdp s':>9}{'dcp s':>9}{'ratio':>7}{'hsdp cpu':>10}{'dcp cpu':>9}{'ratio':>7}"]
    lines[0] += f"{'hsdp memory':>13}{'dcp memory':>12}"

    def worst(what: str, who: str, key: str) -> list[float]:
        """By round."""
        at = [i for i, one in enumerate(ranks[0]) if (one["who"], one["what"]) == (who, what)]
        return [max(rank[i][key] for rank in ranks) for i in at]

    for what in ACTIONS:
        line = f"{what:16}"
        for key, width in (("s", 9), ("cpu", 10)):
            ours, theirs = worst(what, "hsdp", key), worst(what, "dcp", key)
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            line += f"{statistics.median(ours):{width}.2f}{statistics.median(theirs):9.2f}{ratio:7.2f}"
        memory = [max(worst(what, who, "memory")) for who in CONTENDERS]
        lines.append(f"{line}{memory[0]:13.2f}{memory[1]:12.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--megabytes", type=positive, default=800, help="of state in all (default %(default)s)")
    parser.add_argument("--layers", type=positive, default=16, help="square matrices (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    args = parser.parse_args(argv)
    dim = int((args.megabytes * 1e6 / 12 / args.layers) ** 0.5)
    progress(f"{args.layers} matrices of {dim} x {dim}, {WORLD} ranks ...")
    with tempfile.TemporaryDirectory() as directory:
        ranks = run_procs(run, WORLD, directory, args.rounds, args.layers, dim, timeout=3600.0, group_timeout=600.0)
    publish("checkpoint", table(ranks), vars(args), args.json, ranks=ranks)


if __name__ == "__main__":
    main()
