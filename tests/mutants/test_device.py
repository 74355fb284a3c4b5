"""Bugs of streams, events and memory, planted: each is found on the emulated device, by numbers or by the race detector."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import hsdp.api.fully_shard
import hsdp.api.setters
import hsdp.params.param
import hsdp.params.tensor_parallel
import hsdp.schedule.optimizer_hooks
import hsdp.schedule.pipeline
import hsdp.schedule.root
import hsdp.unit.gradients
from hsdp.comm import backends
from hsdp.comm.streams import Streams
from hsdp.comm.transports import GroupTransport
from hsdp.comm.work import CommWork, _InUse
from hsdp.schedule.passes import Visit
from hsdp.schedule.pipeline import Reduction, ReductionBucket, ReductionPipeline
from hsdp.schedule.root import Root
from hsdp.schedule.runtime import Runtime
from hsdp.torch_private import NO_TASK
from hsdp.unit.readers import Readers
from hsdp.unit.unit import Unit
from tests.mutants.planting import replaced
from tests.soak.device_cases import ONE_AXIS, TWO_AXES, Conditions, Shape, run_case
from tests.support.rig import Pool, RankEnv, RemoteError
from tests.support.share import some

Plant = Callable[[], Any]
MOST_RUNS = 10
FOUND = r"\d+ races|differ|not close|memory is gone|storage of size 0|modified by an inplace operation"
MUTANTS: dict[str, tuple[Plant, str, Shape, Conditions]] = {}


def mutant(case: str, shape: Shape = ONE_AXIS, mode: str = "none", **where: bool) -> Callable[[Plant], Plant]:
    """Registers a function that plants a bug, with the case that has to find it."""

    def register(plant: Plant) -> Plant:
        MUTANTS[plant.__name__.replace("_", " ")] = (plant, case, shape, Conditions(mode, **where))
        return plant

    return register


def _only_on(names: set[str], waits: bool) -> Any:
    """Side streams of these names start their work without waiting for what they are told to wait for."""

    def change(method: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def on(streams: Streams, name: Any, event: Any) -> Iterator[None]:
            if name not in names or (event is not None) != waits:
                with method(streams, name, event):
                    yield
                return
            with streams._module().stream(streams._stream(name)):
                yield

        return on

    return replaced(Streams, "_on", change)


@mutant("trains mlp")
def gathers_do_not_wait_for_the_optimizer() -> Any:
    return _only_on({"gather"}, waits=False)


@mutant("trained on a stream beside the one it was sharded on")
def gradients_are_made_on_whichever_stream_is_current() -> Any:
    return mock.patch.object(Streams, "is_away", lambda streams: False)


@mutant("units on streams of the forward", strict=True)
def the_allocator_is_not_told_who_reads() -> Any:
    return mock.patch.object(Readers, "add", lambda readers, *_: None)


@mutant("trains mlp", strict=True, away=True)
def the_allocator_is_not_told_who_steps() -> Any:
    return _all(
        [
            mock.patch.object(hsdp.schedule.optimizer_hooks, "note_grads_read", lambda *_: None),
            mock.patch.object(hsdp.schedule.root, "note_grads_read", lambda *_: None),
        ]
    )


@mutant("tensor parallel", (1, 2, 2), away=True)
def the_allocator_is_not_told_who_reads_what_is_inside_of_gradients() -> Any:
    return mock.patch.object(hsdp.params.tensor_parallel, "note_read", lambda tensor: None)


@mutant("backwards of inputs and of weights", strict=True, away=True)
def what_schedules_put_on_weights_is_summed_on_whichever_stream_is_current() -> Any:
    def change(method: Callable[..., Any]) -> Callable[..., Any]:
        def take_outside(root: Root) -> None:
            with gradients_are_made_on_whichever_stream_is_current():
                method(root)

        return take_outside

    return replaced(Root, "take_outside", change)


@mutant("local gradients read on another stream than they are trained on", strict=True)
def the_allocator_is_not_told_who_reads_local_gradients() -> Any:
    return mock.patch.object(hsdp.unit.gradients, "note_read", lambda tensor: None)


@mutant("buffers cast on another stream than they were made on", strict=True)
def the_allocator_is_not_told_who_casts_buffers() -> Any:
    return mock.patch.object(hsdp.api.fully_shard, "note_read", lambda tensor: None)


@mutant("gathered in 8 bits", strict=True, away=True)
def the_allocator_is_not_told_who_shards() -> Any:
    return mock.patch.object(hsdp.params.param, "note_read", lambda tensor: None)


@mutant("trains mlp")
def reduce_scatters_do_not_wait_for_gradients() -> Any:
    return _only_on({"scatter"}, waits=False)


@mutant("trains mlp", TWO_AXES)
def all_reduces_do_not_wait_for_reduce_scatters() -> Any:
    return _only_on({"replicate"}, waits=True)


@mutant("offloaded", ONE_AXIS)
def copies_to_the_host_do_not_wait_for_reductions() -> Any:
    return _only_on({"replicate"}, waits=True)


def _unjoined(kind: str) -> Any:
    def change(wait: Callable[..., None]) -> Callable[..., None]:
        def go(comm_work: CommWork) -> None:
            if comm_work.kind == kind:
                comm_work._event = None
            wait(comm_work)

        return go

    return replaced(CommWork, "wait", change)


@mutant("trains mlp")
def compute_does_not_wait_for_gathers() -> Any:
    return _unjoined("all-gather")


@mutant("trains mlp", TWO_AXES)
def gradients_land_before_their_all_reduce() -> Any:
    return _unjoined("all-reduce")


@mutant("compute on users streams")
def the_default_stream_waits_in_place_of_the_current_one() -> Any:
    def join(streams: Streams, event: Any) -> None:
        if event is not None:
            streams._module().default_stream(streams.device).wait_event(event)

    return mock.patch.object(Streams, "join", join)


@mutant("trains mlp", TWO_AXES)
def all_reduces_wait_for_the_reduce_scatter_before_theirs() -> Any:
    def change(after: Callable[..., Any]) -> Callable[..., Any]:
        def go(streams: Streams, name: Any, event: Any) -> Any:
            before = streams.__dict__.get("last", event)
            streams.last = event  # type: ignore[attr-defined]
            return after(streams, name, before)

        return go

    return replaced(Streams, "after", change)


@mutant("trains odd", mode="slow comm")
def whole_gradients_are_freed_in_the_middle_of_their_reduce_scatter() -> Any:
    return _unjoined("reduce-scatter")


@mutant("fusion packed")
@contextmanager
def a_work_s_event_comes_before_what_follows_its_collective() -> Iterator[None]:
    def change(settle: Callable[..., None]) -> Callable[..., None]:
        def go(comm_work: CommWork) -> None:
            streams = comm_work._comm.context.streams
            event = streams.mark()
            settle(comm_work)
            streams.mark = lambda: (streams.__dict__.pop("mark"), event)[1]  # type: ignore[method-assign]

        return go

    # Sums are scaled behind the collective by whoever has no backend that does it.
    with mock.patch.object(backends, "MULTIPLIES", frozenset()), replaced(CommWork, "_settle", change):
        yield


@mutant("trains mlp")
def events_are_recorded_on_the_default_stream() -> Any:
    def mark(streams: Streams) -> Any:
        module = streams._module()
        event = module.Event()
        event.record(module.default_stream(streams.device))
        return event

    return mock.patch.object(Streams, "mark", mark)


@contextmanager
def _all(patches: list[Any]) -> Iterator[None]:
    with patches[0], patches[1]:
        yield


@mutant("fusion packed")
def staging_is_freed_when_its_gather_was_launched() -> Any:
    def change(launch: Callable[..., None]) -> Callable[..., None]:
        return lambda unit, *args, **kwargs: (
            launch(unit, *args, **kwargs),
            [group.release_transients() for group in unit.dtype_groups],
        )[0]

    return replaced(Unit, "launch", change)


@mutant("fusion direct")
def reduction_operands_are_freed_when_their_reduce_scatter_was_launched() -> Any:
    def change(start: Callable[..., Any]) -> Callable[..., Any]:
        def go(pipeline: ReductionPipeline, items: list[Reduction]) -> ReductionBucket:
            bucket: ReductionBucket = start(pipeline, items)
            bucket.work._keep = None
            if bucket.work._in_use is not None:
                bucket.work._in_use.used = None
            for reduction in items:
                for part in reduction.parts:
                    part.release_inputs()
            return bucket

        return go

    return replaced(ReductionPipeline, "start_scatter", change)


@mutant("fusion packed")
def packed_parameters_are_unpacked_before_their_gather_was_waited_for() -> Any:
    def change(finish: Callable[..., None]) -> Callable[..., None]:
        def go(unit: Unit) -> None:
            for group in unit.dtype_groups:
                group.assemble()
            finish(unit)

        return go

    return replaced(Unit, "finish", change)


@mutant("all-reduce hooks on a stream of their own")
def hooks_on_a_stream_of_their_own_are_not_waited_for() -> Any:
    def on_stream(hook: Callable[[Any], None], stream: Any) -> Callable[[Any], None]:
        def there(tensor: Any) -> None:
            with hsdp.api.setters.torch.get_device_module(tensor.device).stream(stream):
                hook(tensor)

        return there

    return mock.patch.object(hsdp.api.setters, "_on_stream", on_stream)


@mutant("offloaded", mode="slow compute")
def the_host_does_not_wait_for_offloaded_gradients() -> Any:
    return mock.patch.object(hsdp.schedule.pipeline, "host_wait", lambda device: None)


@mutant("written after an evaluation", mode="slow comm")
def the_host_does_not_wait_for_copies_from_its_memory() -> Any:
    return mock.patch.object(Streams, "finish_host_reads", lambda streams: None)


@mutant("trains mlp", TWO_AXES)
def collectives_run_on_their_group_s_stream_and_nobody_waits() -> Any:
    def change(init: Callable[..., None]) -> Callable[..., None]:
        def go(transport: GroupTransport, *args: Any) -> None:
            init(transport, *args)
            for name, options in vars(transport).items():
                if name.endswith("_options"):
                    options.asyncOp = True

        return go

    def settle(comm_work: CommWork) -> None:
        comm_work._works = None
        if comm_work._finish is not None:
            comm_work._finish()

    return _all([replaced(GroupTransport, "__init__", change), mock.patch.object(CommWork, "_settle", settle)])


@mutant("the recommended loop", TWO_AXES)
def deferred_sums_are_read_before_their_reduce_scatter() -> Any:
    return _unjoined("reduce-scatter")


@mutant("a model that goes after an exception", mode="slow comm")
def buffers_of_a_collective_that_nobody_waits_for_are_given_back() -> Any:
    return mock.patch.object(_InUse, "__del__", lambda in_use: None)


@mutant("recomputed behind parameters of the root")
def autograd_nodes_of_all_threads_are_taken_to_be_numbered_alike() -> Any:
    def change(enter: Callable[..., None]) -> Callable[..., None]:
        def go(runtime: Runtime, unit: Unit, visit: Visit | None, creates_graph: bool, node: tuple[int, int]) -> None:
            if visit is not None:
                visit.first_node = NO_TASK, visit.first_node[1]
            enter(runtime, unit, visit, creates_graph, (NO_TASK, node[1]))

        return go

    return replaced(Runtime, "enter_backward", change)


@mutant("bf16 throughout")
def sums_in_bf16_are_multiplied_by_the_backend() -> Any:
    return mock.patch.object(hsdp.schedule.pipeline, "MULTIPLIED", {torch.bfloat16, torch.float32, torch.float64})


def _mutated(env: RankEnv, name: str, seed: int) -> None:
    plant, case, shape, under = MUTANTS[name]
    with plant():
        run_case(env, case, shape, replace(under, seed=seed))


@pytest.mark.parametrize("name", some(MUTANTS))
def test_mutants_are_found(request: pytest.FixtureRequest, name: str) -> None:
    """Found within a few runs: which memory is used again, and what the host meets, depend on timing and earlier tests."""
    size = 2 if MUTANTS[name][2] == ONE_AXIS else 4
    pool: Pool = request.getfixturevalue(f"device{size}")
    results: list[str] = []
    for seed in range(1, MOST_RUNS + 1):
        try:
            pool.run(_mutated, name, seed, timeout=20.0)
        except RemoteError as error:
            # The rank that found it does not wait for the others, which may be in a collective with it.
            results += [f"{one.error}: {one.message}" for one in error.outcomes if not one.ok]
        if any(re.search(FOUND, text) for text in results):
            return
    pytest.fail(f"not found in {MOST_RUNS} runs; told: {results}")
