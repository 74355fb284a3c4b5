"""Large weights are communicated where they lie: no copy, told by counting operators and by the identity of memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from benchmarks.copies import (
    MESHES,
    UNIT,
    WORLD,
    Counts,
    build,
    gathered_elements,
    measure,
    over_formula,
    plan_of,
    planned,
    scattered_elements,
)
from benchmarks.shapes import BLOCKS, EXPERTS, Shapes
from tests.support.counting import CollectiveCounter, by_sockets
from tests.support.rig import Pool, RankEnv, fake_world

LIMITS = {"nccl": (32 * 1024, 32 * 1024), "gloo": (256 * 1024, 1024 * 1024)}


def _measure(library: str, precision: str, mesh: str) -> Counts:
    with fake_world(WORLD) as env:
        return measure(library, precision, env.mesh(MESHES[mesh]))


EVERY = BLOCKS | EXPERTS


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("fusion", ["direct", "auto"])
def test_fp32_weights_are_never_copied(fusion: str, mesh: str) -> None:
    counts = _measure(f"hsdp {fusion}", "fp32", mesh)
    assert (counts.gather_copied, counts.gather_cast, counts.reduce_copied, counts.reduce_cast) == (0, 0, 0, 0)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("fusion", ["direct", "auto"])
def test_mixed_precision_costs_one_cast_each_way(fusion: str, mesh: str) -> None:
    counts = _measure(f"hsdp {fusion}", "bf16/fp32", mesh)
    assert (counts.gather_copied, counts.reduce_copied) == (0, 0)
    few = 32  # bytes, of the scalar that runs through the model
    assert abs(counts.gather_cast - UNIT / MESHES[mesh][-1] * 2) <= few, "of the shards"
    assert abs(counts.reduce_cast - UNIT * 4) <= few, "of the gradients"


def test_collectives_and_bytes_are_those_of_the_formula() -> None:
    counts = _measure("hsdp auto", "fp32", "2x4")
    assert counts.calls == {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1}
    assert all(1 <= ratio < 1.0001 for ratio in over_formula(counts, (2, 4), 4).values())


@by_sockets
def _same_memory(env: RankEnv, shape: tuple[int, ...]) -> None:
    # One unit, and each pointer is of a moment in which all of them are alive: none can be another's memory used again.
    model: Any = build("hsdp direct", "fp32", env.mesh(shape), units=1)
    layer, x = model[0], torch.zeros(1)
    wholes: set[int] = set()
    made: set[int] = set()
    layer.register_forward_pre_hook(lambda layer, args: wholes.update(one.data_ptr() for one in _wholes(layer)))
    with CollectiveCounter() as forward:
        loss = model(x).sum()
    gathered = {ptr for call in forward.select("all_gather") for ptr in call.out_ptrs}
    assert gathered == wholes, "a gather writes into the whole parameters"
    layer.unshard()
    for whole in _wholes(layer):
        whole.register_hook(lambda grad: made.add(grad.data_ptr()))
    with CollectiveCounter() as backward:
        loss.backward()
    # gloo has no reduce-scatter of its own: an all-to-all takes its inputs, a local sum makes its outputs.
    scatters = backward.select("reduce_scatter") or backward.select("all_to_all")
    sent = {ptr for call in scatters for ptr in call.in_ptrs}
    assert len(made) == len(_wholes(layer))
    assert made <= sent, "a reduce-scatter reads the gradients that autograd made"
    grads = [param.grad.to_local() for param in model.parameters()]
    if backward.select("reduce_scatter"):
        received = {ptr for call in scatters for ptr in call.out_ptrs}
        assert {grad.data_ptr() for grad in grads} <= received, "and writes what becomes .grad"
    buffers = {grad.untyped_storage().data_ptr() for grad in grads}
    assert len(buffers) == 1
    if len(shape) == 2:
        reduced = {ptr for call in backward.select("all_reduce") for ptr in call.in_ptrs}
        assert reduced == buffers, "which is the operand of the all-reduce"


def _wholes(layer: nn.Module) -> list[Tensor]:
    return [linear.weight for linear in layer.weights]  # type: ignore[union-attr]


@pytest.mark.parametrize("mesh", MESHES)
def test_all_is_the_same_memory(mesh: str) -> None:
    with fake_world(WORLD) as env:
        _same_memory(env, MESHES[mesh])


def test_all_is_the_same_memory_on_gloo(pool4: Pool) -> None:
    pool4.run(_same_memory, (2, 2))


@pytest.mark.parametrize("backend", LIMITS)
@pytest.mark.parametrize("precision", ["fp32", "bf16/fp32"])
@pytest.mark.parametrize("ranks", [8, 12, 64])
@pytest.mark.parametrize("block", EVERY)
def test_plans_of_published_models_send_what_the_formula_says(block: str, ranks: int, precision: str, backend: str) -> None:
    found = planned(block, EVERY[block], ranks, precision, LIMITS[backend])
    assert 1 <= found.gather <= 1.03
    assert 1 <= found.scatter <= 1.03
    assert 1 <= found.all_reduce <= 1.03


class _Shapes(nn.Module):
    """Parameters of given shapes, all of them used."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.params = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(param.mean() for param in self.params.values())


@pytest.mark.parametrize("ranks", [8, 12, 64])
@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_sent_is_what_was_planned(block: str, ranks: int) -> None:
    # An eighth of each size: small enough to exist.
    shapes = {name: tuple(math.ceil(size / 8) for size in shape) for name, shape in BLOCKS[block].items()}
    layout = plan_of(shapes, ranks, "fp32", LIMITS["nccl"])
    with fake_world(ranks) as env:
        model = hsdp.fully_shard(_Shapes(shapes), mesh=env.mesh(ranks), reshard_after_forward=True)
        with CollectiveCounter() as counter:
            model(torch.zeros(1)).backward()
    gathers, scatters = counter.total("all_gather"), counter.total("reduce_scatter")
    assert gathers.bytes_in == 2 * 4 * gathered_elements(layout)
    assert scatters.bytes_out == 4 * scattered_elements(layout, len(shapes))
