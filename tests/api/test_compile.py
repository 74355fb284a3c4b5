"""`torch.compile` of each block: as many graphs as without hsdp, no breaks, no recompilation later, the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import hsdp
from tests.support.models import make_case
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest
from tests.support.twin import Twin, assert_close_to_twin, full_params, sgd, train, twin_of

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
    content: dict[str, Any] = {}
    try:
        yield content
        content |= {
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
    ("aot_eager", "wrapped", "shard"),
]


@pytest.mark.parametrize(("backend", "way", "first"), CASES)
def test_compiled_blocks_have_the_graphs_that_they_have_without_hsdp(
    pool2: Pool, backend: str, way: str, first: str
) -> None:
    twin = twin_of(make_case("transformer"), 2, STEPS, sgd)
    pool2.run(_compiled, backend, way, first, twin, _plain(backend, way), timeout=120)


WHOLE: dict[str, Callable[[Any], Any]] = {
    "in place": lambda model: model.compile(backend="eager") or model,
    "wrapped": lambda model: torch.compile(model, backend="eager"),
}


def _whole_compiled(env: RankEnv, way: str, blocks_too: bool, twin: Twin) -> None:
    """The whole model compiled around its sharded blocks: graphs break around those, whose own forwards are compiled."""
    case = make_case("transformer")
    content = {}
    for sharded in (torch_fully_shard, hsdp.fully_shard):
        model: Any = case.model()
        for module in (*model.blocks, model):
            sharded(module, mesh=env.mesh((2,)))
        with _counted() as counted:
            if blocks_too:
                _in_place(model, "eager")
            losses = train(WHOLE[way](model), case, env.rank, STEPS, sgd(model.parameters()))
        content[sharded] = counted["graphs"], counted["calls"]
        torch.testing.assert_close(losses, twin.losses[:, env.rank], rtol=1e-11, atol=1e-11)
        assert_close_to_twin(model, twin, 1e-11, 1e-11)
    assert content[hsdp.fully_shard] == content[torch_fully_shard] and content[hsdp.fully_shard][1] > 20, content
    check_rest(model)


@pytest.mark.parametrize(("way", "blocks_too"), [("in place", False), ("wrapped", False), ("in place", True)])
def test_a_whole_model_is_compiled_between_its_gathers_as_with_fsdp2(pool2: Pool, way: str, blocks_too: bool) -> None:
    twin = twin_of(make_case("transformer"), 2, STEPS, sgd)
    pool2.run(_whole_compiled, way, blocks_too, twin, timeout=120)


def _fails_compiled(env: RankEnv) -> None:
    """A forward that fails leaves the compiler as it was: code behind it is not compiled, and the next forward is right."""
    model: Any = hsdp.fully_shard(Fails(), mesh=env.mesh((2,)))
    before = _compiler()
    with _counted() as told:
        compiled = torch.compile(model, backend="eager")
        compiled(torch.randn(2, 4)).sum().backward()
        with pytest.raises(KeyError, match="as asked"):
            compiled(torch.randn(2, 4), fails=True)
        assert _compiler() is before
        compiled(torch.randn(2, 4)).sum().backward()
    assert told["graphs"] >= 1 and _compiler() is before
    check_rest(model)


def _compiler() -> Any:
    return torch._C._dynamo.eval_frame.get_eval_frame_callback()  # type: ignore[attr-defined]


class Fails(nn.Linear):
    """A layer that fails when asked to."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        if fails:
            raise KeyError("as asked")
        return super().forward(x).relu()


def test_a_compiled_forward_that_fails_leaves_the_compiler_as_it_was(pool2: Pool) -> None:
    pool2.run(_fails_compiled)


LENGTHS = (4, 6, 5, 7)


def _gelu_blocks() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))


def _by_lengths(model: nn.Module, ranks: list[int]) -> dict[str, torch.Tensor]:
    """Trains with another number of rows in each step, on the mean over `ranks`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, length in enumerate(LENGTHS):
        for rank in ranks:
            x = torch.randn(length, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            (model(x).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(full_params(model))


def _of_any_length(env: RankEnv) -> None:
    model: Any = _gelu_blocks()
    with _counted() as told:
        for block in model:
            block.compile(backend="eager", dynamic=True)
            hsdp.fully_shard(block, mesh=env.mesh((2,)))
        hsdp.fully_shard(model, mesh=env.mesh((2,)))
        ours = _by_lengths(model, [env.rank])
    torch.testing.assert_close(ours, _by_lengths(_gelu_blocks(), [0, 1]), rtol=1e-5, atol=1e-6)
    assert told["graphs"] == len(model) and told["breaks"] == 0, "no length is compiled anew"
    check_rest(model)


def test_one_graph_serves_all_lengths(pool2: Pool) -> None:
    pool2.run(_of_any_length, timeout=120)
