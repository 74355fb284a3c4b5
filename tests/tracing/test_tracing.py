"""`hsdp.trace`: exact in virtual time, consistent on real ranks, and nothing when it is off."""

from __future__ import annotations

import ast
import gc
import json
import time
import warnings
import weakref
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hsdp
import hsdp.optim
import hsdp.tracing
from hsdp.comm.replica_reduce import AllReduceStage
from hsdp.comm.work import CommWork
from hsdp.examples import train_lm
from hsdp.examples.launch import JobError
from hsdp.examples.options import parse_options
from hsdp.schedule.pipeline import ReductionPipeline
from hsdp.tracing import events, recorder
from hsdp.tracing.spans import intersection, length, union
from hsdp.unit.lookup import unit_of
from tests.support.best_step import Durations
from tests.support.counting import CollectiveCounter, by_sockets
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


@by_sockets
def _trace_compressed(env: RankEnv) -> None:
    """An all-reduce stage that is made of other collectives is traced as the stage that it is."""
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    for module in (*model, model):
        hsdp.fully_shard(module, mesh=env.mesh((2, 2)))
    batch = torch.randn(8, 64)
    results = []
    for stage in (hsdp.AllReduce(), hsdp.CompressedAllReduce()):
        model.set_replica_reduce(stage)
        model(batch).sum().backward()
        with hsdp.trace(model) as t, CollectiveCounter() as counter:
            model(batch).sum().backward()
        results.append(t.summary().collectives)
        sent = sum(one.sent for one in results[-1].values())
        assert sent == pytest.approx(counter.total().wire_bytes)
        assert {span.track for span in t.recording.started() if span.kind == "all-reduce"} == {"replicate"}
    plain, compressed = results
    assert compressed["all-gather"].nbytes == plain["all-gather"].nbytes, "the gathers are those of weights"
    assert compressed["all-reduce"].sent == plain["all-reduce"].sent / 2
    assert compressed["all-reduce"].started == 2 * plain["all-reduce"].started


def test_a_compressed_all_reduce_is_traced_as_an_all_reduce(pool4: Pool) -> None:
    pool4.run(_trace_compressed)


@by_sockets
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
    untraced = full_params(models[1])
    for name, param in full_params(models[0]).items():
        assert torch.equal(param, untraced[name]), f"{name}: tracing changes the numbers"
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


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _trace_scalars(env: RankEnv) -> None:
    """Sums of what every rank has whole are all-reduces, on the track of the reduce-scatters, as a plan counts them."""
    model = hsdp.fully_shard(_Scaled(), mesh=env.mesh(2))
    with hsdp.trace(model) as t:
        model(torch.ones(2, 4)).sum().backward()
    found = {kind: told.sent for kind, told in t.summary().collectives.items() if told.started}
    planned = {one.kind: one.sent for one in hsdp.plan(model, tokens_per_rank=8, backend="gloo").collectives}
    assert found == planned and list(found) == ["all-reduce"]
    assert {span.track for span in t.recording.started() if span.kind == "all-reduce"} == {"scatter"}


def test_scalars_are_all_reduced_in_a_trace_as_in_a_plan(pool2: Pool) -> None:
    pool2.run(_trace_scalars)


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


@by_sockets
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


def _engine(model: Any) -> list[tuple[Any, type, list[str], list[str]]]:
    """The engine's objects of a model, the classes that they have, and which methods lie in front of those of the class."""
    found: list[Any] = list(ReductionPipeline.live)
    for unit in model._units():
        found += [unit, unit.gradients, unit.shard_comm, unit.replicate_comm, unit.runtime]
    for module in model.modules():
        found += [state] if (state := vars(module).get("_hsdp_state")) is not None else []
    methods = [sorted(name for name in vars(one) if callable(getattr(type(one), name, None))) for one in found]
    return [(one, type(one), lying, sorted(vars(type(one)))) for one, lying in zip(found, methods, strict=True)]


def _observers(model: Any) -> set[Any]:
    return {unit.context.observer for unit in model._units()}


def test_the_engine_is_not_changed_and_nothing_is_left_behind() -> None:
    with fake_world(2) as env:
        model = shard(CASE.model(), env.mesh((2,)))
        batch = CASE.batch(0, 0)
        CASE.loss(model, batch).backward()
        before = _engine(model)
        assert _observers(model) == {None}
        with hsdp.trace(model) as t:
            assert _engine(model) == before and None not in _observers(model)
            with pytest.raises(RuntimeError, match="still recording"):
                t.summary()
            with pytest.raises(RuntimeError, match="already"), hsdp.trace(model):
                pass
            CASE.loss(model, batch).backward()
            assert _engine(model) == before
        assert _engine(model) == before and _observers(model) == {None}
        held = [unit_of(param) for param in model.parameters()]
        assert all(held) and t.summary().iterations == 1
        with pytest.raises(ValueError, match="nothing in it is sharded"), hsdp.trace(nn.Linear(2, 2)):
            pass
        gone = weakref.ref(model)
        del model, held, before
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


_PAUSE = 1000.0


@contextmanager
def _clock() -> Iterator[Callable[[], None]]:
    """The traces' clock meanwhile: a pause puts it forward by `_PAUSE` seconds, for which nobody waits."""
    ahead = 0.0

    def now() -> float:
        return time.perf_counter() + ahead

    def pause() -> None:
        nonlocal ahead
        ahead += _PAUSE

    with mock.patch.object(events, "_now", now), mock.patch.object(recorder, "_now", now):
        yield pause


def _fails_and_goes_on(env: RankEnv) -> None:
    model = shard(_Catches(), env.mesh((2,)))
    x = torch.randn(2, 4)
    with _clock() as pause, hsdp.trace(model) as t:
        with pytest.raises(KeyError):
            model(x, True)
        pause()
        model(x, False).sum().backward()
        pause()
    busy = length(union((s.start, s.end) for s in t.recording.track("compute")))
    assert busy < _PAUSE < 2 * _PAUSE < t.recording.end, "the pauses belong to no unit"


def test_failures_leave_no_spans_open(pool2: Pool) -> None:
    pool2.run(_fails_and_goes_on)


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise KeyError("planned")


class _Chain(nn.Module):
    """Fails where it is told to: in the middle of its forward, or of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, fails: str = "") -> torch.Tensor:
        for at, block in enumerate(self.blocks):
            x = block(x)
            if at == 1 and fails == "forward":
                raise KeyError("planned")
            if at == 1 and fails == "backward":
                x = _FailsInBackward.apply(x)  # type: ignore[no-untyped-call]
        return x


def _fails_under_a_trace(env: RankEnv) -> None:
    model = shard(_Chain(), env.mesh((2,)))
    x = torch.randn(2, 4)
    with _clock() as pause, hsdp.trace(model) as t:
        for where in ("forward", "backward"):
            with pytest.raises(KeyError):
                model(x, where).sum().backward()
            pause()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the backward that failed
            model(x).sum().backward()
        pause()
    busy = length(union((s.start, s.end) for s in t.recording.track("compute")))
    assert busy < _PAUSE < 3 * _PAUSE < t.recording.end, "the pauses belong to no unit"
    assert t.recording.memory[-1][1] == 0, "no buffer is held"


def test_a_backward_that_fails_leaves_no_spans_open(pool2: Pool) -> None:
    pool2.run(_fails_under_a_trace)


def _raises_out_of_a_trace(env: RankEnv) -> None:
    """A trace whose block raises lets the units go in whatever state they are, and what it has seen can be read."""
    model = shard(_Chain(), env.mesh((2,)))
    x = torch.randn(2, 4)
    for where in ("forward", "backward", "between", "ahead"):
        with pytest.raises(KeyError), hsdp.trace(model) as t:
            if where == "ahead":
                model.blocks[2].unshard(async_op=True)
            else:
                output = model(x, where)
                if where == "backward":
                    output.sum().backward()
            raise KeyError("planned")
        assert _observers(model) == {None}
        assert any(span.kind == "all-gather" for span in t.recording.spans), "what came before can be read"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the backward that failed
            model(x).sum().backward()
        with hsdp.trace(model) as again:
            model(x).sum().backward()
        assert again.summary().iterations == 1 and _observers(model) == {None}


def test_a_trace_ends_when_its_block_raises(pool2: Pool) -> None:
    pool2.run(_raises_out_of_a_trace)


def _ends_inside(env: RankEnv) -> None:
    """A trace that is ended in the middle of a forward, a backward and a landing: by a hook, with collectives under way."""
    model = shard(_Chain(), env.mesh((2,)))
    x = torch.randn(2, 4)
    for at in ("forward", "backward", "landing"):
        with ExitStack() as stack:
            t = stack.enter_context(hsdp.trace(model))
            end = lambda *_: stack.close()  # noqa: E731
            block = model.blocks[2]
            hook = {
                "forward": block.register_forward_hook,
                "backward": block.register_full_backward_hook,
                "landing": block.weight.register_post_accumulate_grad_hook,
            }[at](end)
            model(x).sum().backward()
            assert _observers(model) == {None}
            hook.remove()
        assert {span.kind for span in t.recording.track("compute")} >= {"forward", "launch"}
        assert not t._recorder._held and not t._recorder._log, "it learns nothing behind its end"


def test_a_trace_may_end_in_the_middle_of_a_step(pool2: Pool) -> None:
    pool2.run(_ends_inside)


def test_traces_of_two_models_and_of_parts_do_not_mix() -> None:
    with fake_world(2) as env:
        models: list[Any] = [shard(_Chain(), env.mesh((2,))) for _ in range(2)]
        beside = nn.Linear(2, 2)
        optimizers = [torch.optim.SGD([*beside.parameters(), *model.parameters()], lr=0.1) for model in models]
        for param in beside.parameters():
            param.requires_grad_(False)
        x = torch.randn(2, 4)
        with hsdp.trace(models[0]) as first, hsdp.trace(models[1]) as second:
            for model, optimizer in ((models[0], optimizers[0]), (models[1], optimizers[1]), (models[1], optimizers[1])):
                model(x).sum().backward()
                optimizer.step()
        assert (first.summary().steps, second.summary().steps) == (1, 2)
        assert (first.summary().iterations, second.summary().iterations) == (1, 2)
        with _clock() as pause, hsdp.trace(models[0].blocks[1]) as part, hsdp.trace(models[0].blocks[2]):
            for _ in range(2):
                models[0](x).sum().backward()
            pause()
        assert part.summary().iterations == 2
        assert {span.unit for span in part.recording.spans} == {"blocks.1"}
        assert sum(span.seconds for span in part.recording.track("compute")) < _PAUSE < part.recording.end


def test_units_of_two_models_in_one_trace_are_told_apart() -> None:
    """Both models call their units alike: sums of both under one name would belong to neither."""
    with fake_world(2) as env:
        models = nn.ModuleList(shard(_Chain(), env.mesh((2,))) for _ in range(2))
        with hsdp.trace(models) as t:
            for model in models:
                model(torch.randn(2, 4)).sum().backward()
        with hsdp.trace(models[1]) as alone:
            models[1](torch.randn(2, 4)).sum().backward()
    told = {unit.name: unit.by_kind for unit in t.summary().units}
    blocks = {f"{at}.blocks.{block}" for at in (0, 1) for block in range(4)}
    assert set(told) == set(t.recording.units) == {"0", "1"} | blocks
    assert all({"forward", "backward"} <= told[name].keys() for name in blocks), told
    assert {span.unit for span in t.recording.started()} == blocks
    assert set(alone.recording.units) == {"_Chain (root)", *(f"blocks.{block}" for block in range(4))}


@by_sockets
def _trace_what_optimizers_send(env: RankEnv) -> None:
    """An exchange of stepped shares between replicas is a gather, beside the all-reduces of gradients."""
    model: Any = hsdp.fully_shard(nn.Linear(64, 64), mesh=env.mesh((2, 2)))
    optimizer = hsdp.optim.local(torch.optim.AdamW(model.parameters(), lr=0.1), over_replicas=True)
    model(torch.randn(2, 64)).sum().backward()
    with hsdp.trace(model) as t, CollectiveCounter() as counter:
        optimizer.step()
    (span,) = t.recording.started()
    assert (span.kind, span.track) == ("all-gather", "replicate")
    assert span.sent == counter.total("all_gather").wire_bytes > 0


def test_optimizers_in_backward_are_one_step() -> None:
    with fake_world(2) as env:
        model: Any = shard(_Chain(), env.mesh((2,)))
        for param in model.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)
            param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        with hsdp.trace(model) as t:
            for _ in range(2):
                model(torch.randn(2, 4)).sum().backward()
        assert len([span for span in t.recording.track("compute") if span.kind == "optimizer"]) > 4
        assert t.summary().steps == t.summary().iterations == 2


class _Failing(torch.optim.SGD):
    """Its step raises once."""

    failed = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise RuntimeError("no step")
        return super().step(closure)


def test_a_step_that_failed_is_not_under_way_until_the_next_forward() -> None:
    with fake_world(2) as env:
        model: Any = shard(_Chain(), env.mesh((2,)))
        optimizer = _Failing(model.parameters(), lr=0.1)
        with _clock() as pause, hsdp.trace(model) as t:
            model(torch.randn(2, 4)).sum().backward()
            with pytest.raises(RuntimeError, match="no step"):
                optimizer.step()
            pause()
            optimizer.step()
        spans = [span for span in t.recording.track("compute") if span.kind == "optimizer"]
        assert spans and sum(span.seconds for span in spans) < _PAUSE
        assert t.summary().steps == 1


def test_what_an_optimizer_sends_is_no_all_reduce(pool4: Pool) -> None:
    pool4.run(_trace_what_optimizers_send)


@by_sockets
def _trace_custom(env: RankEnv) -> None:
    model: Any = hsdp.fully_shard(nn.Linear(64, 64), mesh=env.mesh((2,)))
    x = torch.randn(2, 64)
    model(x).sum().backward()
    results = []
    for custom in (None, hsdp.CompressedReduceScatter()):
        model.set_custom_reduce_scatter(custom)
        with hsdp.trace(model) as t, CollectiveCounter() as counter:
            model(x).sum().backward()
        results.append(t.summary().collectives["reduce-scatter"])
        assert results[-1].sent == pytest.approx(counter.total("all_to_all").wire_bytes)
    plain, compressed = results
    assert compressed.sent == plain.sent / 2 and compressed.nbytes == plain.nbytes
    assert compressed.started == plain.started == 1


def test_a_compressed_reduce_scatter_is_traced_with_its_bytes_on_the_wire(pool2: Pool) -> None:
    pool2.run(_trace_custom)


class _OwnReduce(AllReduceStage):
    """A user's all-reduce stage, of a collective that hsdp did not start."""

    exact = True

    def start(self, owner: Any, key: int, tensors: list[torch.Tensor], comm: Any, finish: Any) -> CommWork:
        works = [torch.distributed.all_reduce(tensor, group=comm.group, async_op=True) for tensor in tensors]
        return CommWork(comm, "all-reduce", owner, works, tensors, finish)


def _trace_own_reduce(env: RankEnv) -> None:
    model: Any = hsdp.fully_shard(nn.Linear(64, 64), mesh=env.mesh((2, 2)))
    results = []
    for stage in (hsdp.AllReduce(), _OwnReduce()):
        model.set_replica_reduce(stage)
        with hsdp.trace(model) as t:
            model(torch.randn(2, 64)).sum().backward()
        results.append(t.summary().collectives["all-reduce"])
    assert results[0].sent == results[1].sent > 0 and results[0].started == results[1].started == 1


def test_an_all_reduce_of_the_user_s_own_is_traced(pool4: Pool) -> None:
    pool4.run(_trace_own_reduce)


def test_the_tracer_assigns_to_nothing_but_its_own() -> None:
    """What it sees it is told: it puts no method, class or attribute onto an object of the engine."""
    for path in sorted(Path(hsdp.tracing.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                owner = node.value.id if isinstance(node.value, ast.Name) else ast.unparse(node.value)
                assert owner in ("self", "record"), f"{path.name}: {ast.unparse(node)} is assigned"
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            assert name not in ("setattr", "delattr", "__class__", "__dict__", "__setattr__", "vars"), (
                f"{path.name}: {name}"
            )


def _train(env: RankEnv, folder: str, steps: int) -> int:
    flags = (
        f"--steps {steps} --batch 8 --seq-len 16 --width 16 --layers 2 --heads 2 --hidden 24 --corpus-bytes 200000 "
        f"--no-sample --device cpu --out {folder}/run --trace {folder}/trace"
    )
    stop: Any = SimpleNamespace(requested=False)
    return train_lm.run(parse_options(flags.split(), env.world_size), torch.device("cpu"), stop)


@pytest.mark.parametrize("steps", [7, 3])
def test_the_main_job_draws_a_step(pool2: Pool, tmp_path: Path, steps: int) -> None:
    assert pool2.run(_train, str(tmp_path), steps) == [0, 0]
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [
        "rank0.json",
        "rank0.svg",
        "rank1.json",
        "rank1.svg",
    ]
    assert "optimizer" in (tmp_path / "trace/rank1.svg").read_text()


def _no_folder_for_a_trace(env: RankEnv, folder: str) -> None:
    with pytest.raises(JobError, match=r"make the folder .*trace"), mock.patch.object(train_lm, "train_step") as step:
        _train(env, folder, 7)
    assert not step.called, "training began though its trace cannot be written"


def test_the_main_job_looks_for_the_folder_of_its_trace_before_it_trains(pool2: Pool, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("")
    pool2.run(_no_folder_for_a_trace, str(tmp_path))


def test_a_trace_of_no_forward_is_beside_no_plan() -> None:
    with fake_world(2) as env:
        model: Any = hsdp.fully_shard(nn.Linear(4, 4), mesh=env.mesh(2))
        with hsdp.trace(model) as trace:
            pass
        with pytest.raises(ValueError, match="the trace has no forward; record whole steps"):
            trace.summary().beside(hsdp.plan(model, tokens_per_rank=4, flops=1e9))
