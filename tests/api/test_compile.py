"""`torch.compile` of each block: as many graphs as without hsdp, no breaks, no recompilation later, the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hsdp
from tests.support.models import make_case
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest
from tests.support.twin import Twin, assert_close_to_twin, sgd, train, twin_of

STEPS = 3


def _in_place(model: Any, backend: str) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


def _wrapped(model: Any, backend: str) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)


WAYS: dict[str, Callable[[Any, str], None]] = {"in place": _in_place, "wrapped": _wrapped}


@contextmanager
def _counted() -> Iterator[dict[str, Any]]:
    """What dynamo did inside it: graphs, breaks, frames."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    told: dict[str, Any] = {}
    try:
        yield told
        told |= {
            "graphs": counters["stats"]["unique_graphs"],
            "calls": counters["stats"]["calls_captured"],
            "breaks": sum(counters["graph_break"].values()),
            "frames": counters["frames"]["ok"],
        }
    finally:
        torch._dynamo.reset()
        counters.clear()


def _compiled(env: RankEnv, backend: str, way: str, first: str, twin: Twin, expected: dict[str, Any]) -> None:
    case = make_case("transformer")
    model: Any = case.model()
    with _counted() as told:
        if first == "compile":
            WAYS[way](model, backend)
        for block in model.blocks:
            hsdp.fully_shard(block, mesh=env.mesh((2,)))
        hsdp.fully_shard(model, mesh=env.mesh((2,)))
        if first == "shard":
            WAYS[way](model, backend)
        losses = train(model, case, env.rank, STEPS, sgd(model.parameters()))
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert told == expected
    if way != "wrapped":  # names of a wrapped block have "_orig_mod" in them
        assert_close_to_twin(model, twin, 1e-11, 1e-11)
    check_rest(model)


def _plain(backend: str, way: str) -> dict[str, Any]:
    case = make_case("transformer")
    model = case.model()
    with _counted() as told:
        WAYS[way](model, backend)
        train(model, case, 0, STEPS, sgd(model.parameters()))
    assert told["graphs"] > 0 and told["breaks"] == 0
    return told


CASES = [
    ("eager", "in place", "shard"),
    ("aot_eager", "in place", "compile"),
    ("eager", "wrapped", "compile"),
]


@pytest.mark.parametrize(("backend", "way", "first"), CASES)
def test_compiled_blocks_have_the_graphs_that_they_have_without_hsdp(
    pool2: Pool, backend: str, way: str, first: str
) -> None:
    twin = twin_of(make_case("transformer"), 2, STEPS, sgd)
    pool2.run(_compiled, backend, way, first, twin, _plain(backend, way), timeout=120)


def _module_compiled(env: RankEnv, blocks_too: bool) -> None:
    """The whole model compiled around its sharded blocks: graphs break around those, and the numbers stay right."""
    case = make_case("mlp")
    twin = twin_of(case, 2, STEPS, sgd)
    model: Any = case.model()
    for module in (*model.blocks, model):
        hsdp.fully_shard(module, mesh=env.mesh((2,)))
    with _counted() as told, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.compile(backend="eager")
        if blocks_too:
            _in_place(model, "eager")
        losses = train(model, case, env.rank, STEPS, sgd(model.parameters()))
    said = [str(one.message) for one in warned if "leaves it uncompiled" in str(one.message)]
    assert bool(said) is not blocks_too
    assert not blocks_too or told["graphs"] >= len(model.blocks)
    torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, 1e-11, 1e-11)
    assert isinstance(model.blocks[0], nn.Linear)
    check_rest(model)


@pytest.mark.parametrize("blocks_too", [False, True])
def test_a_whole_compiled_model_trains_right(pool2: Pool, blocks_too: bool) -> None:
    pool2.run(_module_compiled, blocks_too, timeout=120)
