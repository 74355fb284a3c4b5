"""Collectives per unit and step, and their bytes, are those of the formulas in docs/formulas.md.

P parameters, S shard ranks, R replicas, A micro-batches, k gathers per micro-batch (2 = freed after forward, 1 = kept):

    all-gather      A*k*P*b_p*(S-1)/S       reduce-scatter  A*P*b_g*(S-1)/S       all-reduce  a*2*(P/S)*b_g*(R-1)/R

On gloo hsdp's reduce-scatter is an all-to-all and a local sum: the same bytes under another name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp

import hsdp
from hsdp import CommPolicy, MixedPrecisionPolicy
from hsdp.comm.backends import direct_bytes
from tests.support.counting import CollectiveCounter, CopyCounter, by_sockets
from tests.support.models import MLP, CalledTwice, Transformer
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import mesh_id, shard

WORLDS: list[tuple[int, ...]] = [(8,), (2, 4), (4, 2), (1, 8), (8, 1)]
PADDING = 1.03  # what docs/formulas.md allows bytes to be above the formula


def _sizes(shape: tuple[int, ...]) -> tuple[int, int]:
    """(S, R) of a mesh."""
    return shape[-1], math.prod(shape[:-1])


def _model() -> nn.Module:
    """Three units of large weights, with biases; the root has none."""
    return MLP((256, 512, 256, 128))


def _loss(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 256)).sum()


def _num_params(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _within(actual: float, formula: float) -> None:
    assert formula <= actual <= formula * PADDING, f"{actual} bytes; by the formula {formula}"


@pytest.mark.parametrize("fusion", ["auto", "packed", "direct"])
@pytest.mark.parametrize("shape", WORLDS, ids=mesh_id)
def test_calls_and_bytes_of_a_step(shape: tuple[int, ...], fusion: Any) -> None:
    shards, replicas = _sizes(shape)
    with fake_world(8) as env:
        model = shard(_model(), env.mesh(shape), comm_policy=CommPolicy(fusion=fusion), reshard_after_forward=True)
        num_params = _num_params(model)
        for _ in range(2):  # with and without a recorded order
            with CollectiveCounter() as counter:
                _loss(model).backward()
            units = 3 if shards > 1 else 0
            expected = {"all_gather": 2 * units, "reduce_scatter": units, "all_reduce": 3 if replicas > 1 else 0}
            assert counter.counts() == {kind: count for kind, count in expected.items() if count}
            size = 4 * num_params * (shards - 1) / shards
            _within(counter.total("all_gather").wire_bytes, 2 * size)
            _within(counter.total("reduce_scatter").wire_bytes, size)
            share = 2 * 4 * num_params / shards * (replicas - 1) / replicas
            _within(counter.total("all_reduce").wire_bytes, share)
            model.zero_grad()


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=mesh_id)
def test_collectives_use_the_groups_of_their_axes(shape: tuple[int, ...]) -> None:
    with fake_world(8) as env:
        mesh = env.mesh(shape)
        model = shard(_model(), mesh)
        with CollectiveCounter() as counter:
            _loss(model).backward()
        inner = mesh.get_group("shard")
        assert counter.select("all_gather") == counter.select("all_gather", inner)
        assert counter.select("reduce_scatter") == counter.select("reduce_scatter", inner)
        if len(shape) == 2:
            assert counter.select("all_reduce") == counter.select("all_reduce", mesh.get_group("replicate"))


# By default the root's unit stays whole between forward and backward, and the last one as soon as the order is known.
KEEP: dict[str, tuple[bool | None, list[int]]] = {
    "default": (None, [5, 4, 4]),
    "freed": (True, [6, 6, 6]),
    "kept": (False, [3, 3, 3]),
}


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("keep", KEEP)
def test_gathers_per_step_depend_on_what_is_kept_and_not_on_prefetch(keep: str, prefetch: int) -> None:
    option, gathers = KEEP[keep]
    with fake_world(8) as env:
        model = Transformer(layers=2)  # a root with parameters of its own
        policy = CommPolicy(prefetch=prefetch)
        shard(model, env.mesh((2, 4)), reshard_after_forward=option, comm_policy=policy)
        tokens = torch.ones(1, 4, dtype=torch.int64)
        for expected in gathers:
            with CollectiveCounter() as counter:
                model(tokens).sum().backward()
            assert counter.counts() == {"all_gather": expected, "reduce_scatter": 3, "all_reduce": 3}
        for mode in (torch.no_grad, torch.inference_mode):
            with CollectiveCounter() as counter, mode():
                model(tokens)
            assert counter.counts() == {"all_gather": 3}


def test_as_many_calls_as_fsdp2() -> None:
    tokens = torch.ones(1, 4, dtype=torch.int64)
    counts = []
    for fully_shard in (hsdp.fully_shard, fsdp.fully_shard):
        with fake_world(8) as env:
            model = Transformer(layers=4)
            for module in (*model.blocks, model):
                fully_shard(module, mesh=env.mesh((2, 4)))
            with CollectiveCounter() as counter:
                model(tokens).sum().backward()
            counts.append(counter.counts())
    assert counts[0] == counts[1]


# a = what is communicated over A = 3 micro-batches: (gathers, reduce-scatters, all-reduces) per unit
ACCUMULATIONS: dict[str, tuple[str | None, tuple[int, int, int]]] = {
    "full": (None, (6, 3, 3)),
    "scatter only": ("set_requires_all_reduce", (6, 3, 1)),
    "no sync": ("set_requires_grad_sync", (6, 1, 1)),
}


@pytest.mark.parametrize("how", ACCUMULATIONS)
def test_calls_of_an_accumulation(how: str) -> None:
    setter, (gathers, scatters, reduces) = ACCUMULATIONS[how]
    with fake_world(8) as env:
        model = shard(_model(), env.mesh((2, 4)), reshard_after_forward=True)
        with CollectiveCounter() as counter:
            for micro in range(3):
                if setter is not None:
                    getattr(model, setter)(micro == 2)
                _loss(model).backward()
        expected = {"all_gather": 3 * gathers, "reduce_scatter": 3 * scatters, "all_reduce": 3 * reduces}
        assert counter.counts() == expected
        _within(counter.total("all_reduce").wire_bytes, reduces * 2 * 4 * _num_params(model) / 4 * 1 / 2)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.float64])
def test_bytes_follow_the_dtypes(reduce_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    size = (reduce_dtype or torch.bfloat16).itemsize
    with fake_world(8) as env:
        model = shard(_model(), env.mesh((2, 4)), mp_policy=policy)
        num_params = _num_params(model)
        with CollectiveCounter() as counter:
            _loss(model).backward()
        _within(counter.total("all_gather").wire_bytes, 2 * num_params * 2 * 3 / 4)
        _within(counter.total("reduce_scatter").wire_bytes, num_params * size * 3 / 4)
        _within(counter.total("all_reduce").wire_bytes, 2 * num_params / 4 * size / 2)
        reduced = {dtype for call in counter.select("reduce_scatter") for dtype in call.dtypes}
        assert reduced == {reduce_dtype or torch.bfloat16}


# -- kinds of units -------------------------------------------------------------------------------------------------


def _freeze_second(model: nn.Module) -> None:
    model.blocks[1].requires_grad_(False)


def _freeze_a_bias(model: nn.Module) -> None:
    model.blocks[1].bias.requires_grad_(False)


FREEZES: dict[str, tuple[Callable[[nn.Module], None], int, int]] = {
    "a whole unit": (_freeze_second, 2, 256 * 512 + 512 + 256 * 128 + 128),
    "a bias": (_freeze_a_bias, 3, 256 * 512 + 512 + 512 * 256 + 256 * 128 + 128),
}


@pytest.mark.parametrize("what", FREEZES)
def test_frozen_parameters_are_gathered_and_not_reduced(what: str) -> None:
    freeze, reductions, trained = FREEZES[what]
    with fake_world(8) as env:
        model = shard(_model(), env.mesh((2, 4)), reshard_after_forward=True)
        freeze(model)
        for _ in range(2):
            with CollectiveCounter() as counter:
                _loss(model).backward()
            assert counter.counts() == {"all_gather": 6, "reduce_scatter": reductions, "all_reduce": reductions}
            _within(counter.total("reduce_scatter").wire_bytes, trained * 4 * 3 / 4)


def test_a_unit_called_twice_reduces_once() -> None:
    with fake_world(8) as env:
        model = shard(CalledTwice(), env.mesh((2, 4)))
        for _ in range(2):
            with CollectiveCounter() as counter:
                model(torch.ones(2, 8)).sum().backward()
            counts = counter.counts()
            assert (counts["reduce_scatter"], counts["all_reduce"]) == (2, 2)
            assert counts["all_gather"] <= 3 + 3  # once per call, forward and backward


def test_units_of_several_dtypes_make_one_call_each_and_scalars_one_more() -> None:
    with fake_world(8) as env:
        model = nn.Linear(64, 64)
        model.extra = nn.Parameter(torch.ones(64, 64, dtype=torch.float64))
        model.scalar = nn.Parameter(torch.tensor(1.0))
        hsdp.fully_shard(model, mesh=env.mesh((2, 4)), reshard_after_forward=True)
        model.register_forward_hook(lambda m, args, out: out * m.scalar + m.extra.sum())
        with CollectiveCounter() as counter:
            model(torch.ones(1, 64)).sum().backward()
        assert counter.counts()["all_gather"] == 2
        assert counter.counts()["reduce_scatter"] <= 2  # a reduction takes one dtype
        assert counter.counts()["all_reduce"] <= 3  # over replicas by dtype, and of the scalar over shard ranks


def test_units_without_parameters_are_silent() -> None:
    with fake_world(8) as env:
        model = hsdp.fully_shard(nn.Sequential(hsdp.fully_shard(nn.ReLU(), mesh=env.mesh(8))), mesh=env.mesh(8))
        with CollectiveCounter() as counter:
            model(torch.ones(2, requires_grad=True)).sum().backward()
        assert counter.calls == []


# -- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_large_weights_are_gathered_and_reduced_without_copies(dtype: torch.dtype | None) -> None:
    with fake_world(8) as env:
        model: Any = nn.Linear(256, 512, bias=False)
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        hsdp.fully_shard(model, mesh=env.mesh((2, 4)), mp_policy=policy, reshard_after_forward=True)
        unit = 256 * 512
        with CopyCounter() as copies, CollectiveCounter() as collectives:
            model.unshard()
        one_cast = 0 if dtype is None else unit // 4 * 2
        assert copies.written() == one_cast
        assert copies.written(casts=True) == one_cast
        assert collectives.select("all_gather")[0].out_ptrs[0] == model.weight.data_ptr()
        out = model(torch.ones(2, 256))
        with CopyCounter() as copies, CollectiveCounter() as collectives:
            out.float().sum().backward()
        # Other dtypes: the shard is cast for the gather before backward, and the reduced gradient back to float32.
        assert copies.written(min_bytes=unit // 4) == (0 if dtype is None else one_cast + unit // 4 * 4)
        assert collectives.counts() == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}


# -- the same on gloo -----------------------------------------------------------------------------------------------


@by_sockets
def _on_gloo(env: RankEnv, shape: tuple[int, ...], setter: str | None) -> list[tuple[dict[str, int], list[float], int]]:
    model = shard(_model(), env.mesh(shape), reshard_after_forward=True)
    results = []
    for _ in range(2):
        with CollectiveCounter() as counter:
            for micro in range(2):
                if setter is not None:
                    getattr(model, setter)(micro == 1)
                _loss(model).backward()
        totals = [counter.total(kind).wire_bytes for kind in ("all_gather", "all_to_all", "all_reduce")]
        results.append((counter.counts(), totals, _num_params(model)))
        model.zero_grad()
    return results


@pytest.mark.parametrize("how", ACCUMULATIONS)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_calls_and_bytes_on_gloo(pool4: Pool, shape: tuple[int, ...], how: str) -> None:
    shards, replicas = _sizes(shape)
    setter, (_, scatters, reduces) = ACCUMULATIONS[how]
    scatters, reduces = min(scatters, 2), min(reduces, 2)  # two micro-batches here
    # Weights that go directly have calls of their own there, beside those of the biases.
    large = [param for param in _model().parameters() if param.nbytes // shards >= direct_bytes("gloo")[0]]
    for rank in pool4.run(_on_gloo, shape, setter):
        for counts, (gathered, scattered, reduced), num_params in rank:
            expected = {
                "all_gather": 2 * 2 * (3 + len(large)) * (shards > 1),
                "all_to_all": scatters * 3 * (shards > 1),
                "all_reduce": reduces * 3 * (replicas > 1),
            }
            assert counts == {kind: count for kind, count in expected.items() if count}
            size = 4 * num_params * (shards - 1) / shards
            _within(gathered, 2 * 2 * size)
            _within(scattered, scatters * size)
            _within(reduced, reduces * 2 * 4 * num_params / shards * (replicas - 1) / replicas)
