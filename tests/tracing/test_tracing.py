"""`hsdp.trace`: exact in virtual time, consistent on real ranks, and nothing when it is off."""

from __future__ import annotations

import gc
import json
import time
import weakref
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hsdp
from hsdp.examples import train_lm
from hsdp.examples.options import parse_options
from hsdp.schedule.pipeline import ReductionPipeline
from hsdp.tracing.spans import intersection, length, union
from hsdp.unit.lookup import unit_of
from tests.support.best_step import Durations
from tests.support.counting import CollectiveCounter
from tests.support.models import language
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import shard
from tests.support.twin import full_params
from tests.support.virtual import Clock, micro_batch, use_device, virtual_model

TIMES = Durations(forward=10, backward=20, gather=13, scatter=12, all_reduce=28)
WORKING = {"forward", "backward", "optimizer", "launch", "copy", "sum", "landing"}


def _seconds(covered: list[tuple[float, float]], grid: list[float]) -> set[int]:
    """Which cells of a grid lie in an interval: the naive way to add up intervals that may overlap."""
    return {i for i, (a, b) in enumerate(pairwise(grid)) if any(s <= a and b <= e for s, e in covered)}


def overlap_of(started: list[tuple[float, float]], work: list[tuple[float, float]]) -> float:
    """The share of the time with a collective under way in which there was work too."""
    grid = sorted({at for interval in (*started, *work) for at in interval})
    under_way, working = _seconds(started, grid), _seconds(work, grid)
    return sum(grid[i + 1] - grid[i] for i in under_way & working) / sum(grid[i + 1] - grid[i] for i in under_way)


def overlap_of_chrome(text: str) -> float:
    """The overlap share, from nothing but the file."""
    events = json.loads(text)["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    started, work = [], []
    for event in events:
        if event["ph"] == "X":
            interval = (event["ts"], event["ts"] + event["dur"])
            if threads[event["pid"], event["tid"]] == "compute":
                work += [interval] if event["cat"] in WORKING else []
            elif event["cat"] in ("all-gather", "reduce-scatter", "all-reduce"):
                started.append(interval)
    return overlap_of(started, work)


def test_intervals_are_joined_and_cut_as_sets_are() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (5, 5)]) == [(0, 2), (3, 4)]
    assert intersection([(0, 2), (3, 6)], [(1, 4), (5, 7)]) == [(1, 2), (3, 4), (5, 6)]
    assert length([(1, 2), (3, 4.5)]) == 2.5


def test_a_device_s_times_are_those_of_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock("device")
    use_device(monkeypatch, clock)
    with fake_world(4) as env:
        model = virtual_model(clock, env.mesh((2, 2)), TIMES, 8)
        for _ in range(3):
            micro_batch(model)
        clock.restart()
        with hsdp.trace(model) as t:
            micro_batch(model)
    collectives = [span for span in clock.trace if span.kind not in ("forward", "backward")]
    compute = [span for span in clock.trace if span.kind in ("forward", "backward")]
    found = [(span.kind, span.unit, span.start, span.end) for span in t.recording.started()]
    assert Counter(found) == Counter((span.kind, span.unit, span.ready, span.end) for span in collectives)
    track = t.recording.track("compute")
    for kind in ("forward", "backward"):
        took = {span.unit: span.end - span.start for span in compute if span.kind == kind}
        assert {name: sum(s.seconds for s in track if (s.kind, s.unit) == (kind, name)) for name in took} == took
    summary = t.summary()
    expected = overlap_of([(s.ready, s.end) for s in collectives], [(s.start, s.end) for s in compute])
    assert summary.overlap == pytest.approx(expected, abs=1e-9)
    assert 0.2 < summary.overlap < 0.95, "the case is one where some is hidden and some is not"
    # The compute stream stands still when it waits, or at the end, when nothing is left to compute.
    waits = sum(one.exposed for one in summary.collectives.values())
    assert waits == pytest.approx(clock.now - sum(span.end - span.start for span in compute))


CASE = language("trace", vocab=64, dim=32, heads=2, hidden=64, layers=3, rows=2, length=16)


def _trace_compressed(env: RankEnv) -> None:
    """An all-reduce stage that is made of other collectives is traced as the stage that it is."""
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    for module in (*model, model):
        hsdp.fully_shard(module, mesh=env.mesh((2, 2)))
    batch = torch.randn(8, 64)
    told = []
    for stage in (hsdp.AllReduce(), hsdp.CompressedAllReduce()):
        model.set_replica_reduce(stage)
        model(batch).sum().backward()
        with hsdp.trace(model) as t, CollectiveCounter() as counter:
            model(batch).sum().backward()
        told.append(t.summary().collectives)
        sent = sum(one.sent for one in told[-1].values())
        assert sent == pytest.approx(counter.total().wire_bytes)
        assert {span.track for span in t.recording.started() if span.kind == "all-reduce"} == {"replicate"}
    plain, compressed = told
    assert compressed["all-gather"].nbytes == plain["all-gather"].nbytes, "the gathers are those of weights"
    assert compressed["all-reduce"].sent == plain["all-reduce"].sent / 2
    assert compressed["all-reduce"].started == 2 * plain["all-reduce"].started


def test_a_compressed_all_reduce_is_traced_as_an_all_reduce(pool4: Pool) -> None:
    pool4.run(_trace_compressed)


def _trace_and_count(env: RankEnv, folder: str, shape: tuple[int, ...]) -> None:
    models = [shard(CASE.model(), env.mesh(shape)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]

    def step(at: int, which: int) -> None:
        CASE.loss(models[which], CASE.batch(at, env.rank)).backward()
        optimizers[which].step()
        optimizers[which].zero_grad()

    for which in (0, 1):
        for at in range(3):
            step(at, which)
    with hsdp.trace(models[0]) as t, CollectiveCounter() as counter:
        for at in range(3, 6):
            step(at, 0)
    for at in range(3, 6):
        step(at, 1)
    for name, param in full_params(models[0]).items():
        assert torch.equal(param, full_params(models[1])[name]), f"{name}: tracing changes the numbers"
    _check_recording(t, counter)
    plan = hsdp.plan(models[0], tokens_per_rank=32, backend="gloo")
    planned = {kind: sum(one.sent for one in plan.collectives if one.kind == kind) for kind in _COUNTED}
    assert {kind: one.sent / 3 for kind, one in t.summary().collectives.items()} == pytest.approx(planned)
    started = {kind: sum(one.calls for one in plan.collectives if one.kind == kind) for kind in _COUNTED}
    assert {kind: one.calls / 3 for kind, one in t.summary().collectives.items()} == started
    beside = t.summary().beside(plan)
    assert f"{started['all-gather']} / {started['all-gather']}" in beside, beside
    chrome, svg = Path(folder, f"{env.rank}.json"), Path(folder, f"{env.rank}.svg")
    t.to_chrome(chrome)
    t.to_svg(svg)
    assert t.summary().overlap == pytest.approx(overlap_of_chrome(chrome.read_text()), abs=1e-6)
    text = " ".join(ElementTree.fromstring(svg.read_text()).itertext())
    assert all(title in text for title in ("compute", "all-gather", "reduce-scatter", "blocks.2")), text
    assert ("all-reduce of" in text) == (len(shape) == 2)
    with pytest.raises(ValueError, match=r"3 forwards \(a micro-batch each\)"):
        t.to_svg(svg, iteration=3)


def _check_recording(t: hsdp.Trace, counter: CollectiveCounter) -> None:
    summary, recording = t.summary(), t.recording
    told = counter.counts()
    calls = {kind: one.calls for kind, one in summary.collectives.items()}
    assert calls == {
        "all-gather": told["all_gather"],
        "reduce-scatter": told["all_to_all"],  # as gloo has it
        "all-reduce": told.get("all_reduce", 0),
    }
    wire = {kind: counter.total(of).wire_bytes for kind, of in _COUNTED.items()}
    assert {kind: one.sent for kind, one in summary.collectives.items()} == pytest.approx(wire)
    assert summary.iterations == summary.steps == 3
    assert str(summary).startswith("3 steps in ")
    for span in recording.spans:
        assert 0 <= span.start <= span.end <= recording.end, span
    track = recording.track("compute")
    for before, after in pairwise(track):
        assert before.end <= after.start, f"{before} and {after} overlap"
    kinds = Counter(span.kind for span in track)
    assert kinds["optimizer"] == 3 and {"forward", "backward", "launch", "copy", "sum", "landing"} <= kinds.keys()
    computed = {span.unit for span in track if span.kind == "backward"}
    assert {"blocks.0", "blocks.1", "blocks.2"} < computed
    assert recording.memory[-1][1] == 0, "at the end no communication buffer is held"
    assert 0 < summary.peak_bytes == max(nbytes for _, nbytes in recording.memory)
    assert "under compute" in str(summary) and "blocks.1" in str(summary)


_COUNTED = {"all-gather": "all_gather", "reduce-scatter": "all_to_all", "all-reduce": "all_reduce"}


def test_a_1d_trace_agrees_with_counters_and_its_files(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(_trace_and_count, str(tmp_path), (2,))


def test_a_2d_trace_agrees_with_counters_and_its_files(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(_trace_and_count, str(tmp_path), (2, 2))


def _wait_for_a_late_rank(env: RankEnv) -> None:
    model = shard(CASE.model(), env.mesh((2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(4):  # until the ranks know what follows a step: before, rank 0 would ask instead of starting its gather
        CASE.loss(model, CASE.batch(0, env.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with hsdp.trace(model) as t:
        if env.rank == 1:
            time.sleep(0.3)
        CASE.loss(model, CASE.batch(1, env.rank)).backward()
    exposed = t.summary().collectives["all-gather"].exposed
    # Rank 0 stands in its first gather until rank 1 comes.
    assert (exposed > 0.2) == (env.rank == 0), f"{exposed:.3f} s"


def test_a_late_rank_shows_as_an_exposed_wait(pool2: Pool) -> None:
    pool2.run(_wait_for_a_late_rank)


def _sleep_beside_a_gather(env: RankEnv) -> None:
    model: Any = shard(CASE.model(), env.mesh((2,)))
    CASE.loss(model, CASE.batch(0, env.rank)).backward()
    unit = model.blocks[1]._units()[0]
    torch.distributed.barrier()
    with hsdp.trace(model) as t:
        unit.launch()
        time.sleep(1.0)
        unit.finish()
        unit.reshard()
    (gather,) = t.recording.started()
    assert gather.seconds < 0.7, "its end is when it was done, not when somebody waited for it"
    assert t.summary().collectives["all-gather"].exposed < 0.3


def test_the_end_of_a_collective_is_when_it_was_done(pool2: Pool) -> None:
    pool2.run(_sleep_beside_a_gather)


def _objects(model: Any) -> list[Any]:
    found: list[Any] = list(ReductionPipeline.live)
    for unit in model._units():
        found += [unit, unit.gradients, unit.shard_comm, unit.replicate_comm, unit.runtime]
    return found


def _wrapped(model: nn.Module) -> list[str]:
    """Methods that something lies in front of."""
    return [f"{type(one).__name__}.{name}" for one in _objects(model) for name in vars(one) if hasattr(type(one), name)]


def test_nothing_is_left_behind() -> None:
    with fake_world(2) as env:
        model = shard(CASE.model(), env.mesh((2,)))
        batch = CASE.batch(0, 0)
        CASE.loss(model, batch).backward()
        before = _wrapped(model)
        with hsdp.trace(model) as t:
            assert len(_wrapped(model)) > len(before) + 20
            with pytest.raises(RuntimeError, match="still recording"):
                t.summary()
            with pytest.raises(RuntimeError, match="already"), hsdp.trace(model):
                pass
            CASE.loss(model, batch).backward()
        assert _wrapped(model) == before
        held = [unit_of(param) for param in model.parameters()]
        assert all(held) and t.summary().iterations == 1
        with pytest.raises(ValueError, match="nothing in it is sharded"), hsdp.trace(nn.Linear(2, 2)):
            pass
        gone = weakref.ref(model)
        del model, held
        gc.collect()
        assert gone() is None, "a trace that is kept keeps the model"


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        if fail:
            raise KeyError("planned")
        return self.linear(x)


class _Catches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Fails() for _ in range(2))

    def forward(self, x: torch.Tensor, fail: bool) -> torch.Tensor:
        if fail:
            return self.blocks[0](x, fail=True)
        try:
            self.blocks[0](x, fail=True)
        except KeyError:
            return self.blocks[1](x)
        raise AssertionError("the block does not fail")


def _fails_and_goes_on(env: RankEnv) -> None:
    model = shard(_Catches(), env.mesh((2,)))
    x = torch.randn(2, 4)
    with hsdp.trace(model) as t:
        with pytest.raises(KeyError):
            model(x, True)
        time.sleep(0.05)
        model(x, False).sum().backward()
        time.sleep(0.05)
    busy = length(union((s.start, s.end) for s in t.recording.track("compute")))
    assert busy < t.recording.end - 0.09, "the pauses belong to no unit"


def test_failures_leave_no_spans_open(pool2: Pool) -> None:
    pool2.run(_fails_and_goes_on)


def _train(env: RankEnv, folder: str) -> int:
    flags = (
        f"--steps 7 --batch 8 --seq-len 16 --width 16 --layers 2 --heads 2 --hidden 24 --corpus-bytes 100000 --no-sample "
        f"--device cpu --out {folder}/run --trace {folder}/trace"
    )
    stop: Any = SimpleNamespace(requested=False)
    return train_lm.run(parse_options(flags.split(), env.world_size), torch.device("cpu"), stop)


def test_the_main_job_draws_a_step(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(_train, str(tmp_path)) == [0, 0]
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [
        "rank0.json",
        "rank0.svg",
        "rank1.json",
        "rank1.svg",
    ]
    assert "optimizer" in (tmp_path / "trace/rank1.svg").read_text()
