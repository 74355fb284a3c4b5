"""Blocks compiled by inductor, on the CPU, inside of units: the twin's numbers, two graphs for all lengths, none later."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hsdp
from tests.support.models import make_case, next_token
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest
from tests.support.share import FULL
from tests.support.twin import full_params

LENGTHS = (4, 7, 4, 6, 7, 9)
"""Of the sequences of each step. The second is no longer the first: from there on, lengths are symbols."""

pytestmark = [
    pytest.mark.skipif(
        shutil.which("g++") is None or sys.platform != "linux", reason="inductor needs g++ for what it makes on CPUs"
    ),
    pytest.mark.beside,
]


def _needs_attention_in_float64() -> None:
    """What torch 2.11 compiles takes a float64 sum that attention keeps for its backward for float32, and raises there."""
    heads = torch.empty(1, 1, 2, 8, dtype=torch.float64, device="meta")
    _, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)
    if logsumexp.dtype != torch.float64:
        pytest.skip("this torch cannot run a compiled backward of attention in float64, whatever the model")


def _tokens(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(32, (2, LENGTHS[step] + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _train(model: nn.Module, call: Any, ranks: Sequence[int]) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses of every step, parameters at the end, and the number of graphs behind every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, graphs = [], []
    for step in range(len(LENGTHS)):
        for rank in ranks:
            loss = next_token(call, _tokens(step, rank))
            (loss / len(ranks)).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, full_params(model), graphs


def _blocks(model: Any) -> Any:
    for block in model.blocks:
        block.compile(fullgraph=True)
    return model


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "blocks before": (_blocks, lambda model: model),
    "blocks after": (lambda model: model, _blocks),
    "model": (lambda model: model, torch.compile),
    "model, reduce-overhead": (lambda model: model, lambda model: torch.compile(model, mode="reduce-overhead")),
}
"""What is done before fully_shard, and after it; the latter gives what is called."""


def _compiled(env: RankEnv, way: str, expected: tuple[list[float], dict[str, Tensor]]) -> None:
    before, after = WAYS[way]
    torch._dynamo.reset()
    counters.clear()
    try:
        with torch._inductor.config.patch(compile_threads=1):
            model: Any = before(make_case("transformer").model())
            for module in (*model.blocks, model):
                hsdp.fully_shard(module, mesh=env.mesh((2,)))
            losses, params, graphs = _train(model, after(model), [env.rank])
        assert counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_miss"] >= 4
    finally:
        torch._dynamo.reset()
        counters.clear()
    torch.testing.assert_close(losses, expected[0][env.rank :: env.world_size], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(params, expected[1], rtol=1e-11, atol=1e-11)
    assert graphs[0] == 1 and set(graphs[1:]) == {2}, f"graphs behind every step: {graphs}"
    check_rest(model)


@pytest.mark.parametrize("way", WAYS if FULL else ["blocks before", "model"])
def test_what_inductor_makes_trains_as_the_twin(pool2: Pool, way: str) -> None:
    _needs_attention_in_float64()
    model = make_case("transformer").model()
    losses, params, _ = _train(model, model, range(2))
    pool2.run(_compiled, way, (losses, params), timeout=900, group_timeout=600)
