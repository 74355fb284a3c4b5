"""Rule 10: a unit reduces as gradients leave it, before the next one is gathered for or computes, whatever its inputs are.

Not at its last gradient: users' hooks may still edit them all (tests/ordinary/test_gradient_edits.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from tests.support.deep import Deep, collectives, floats, of_kind, seeded
from tests.support.models import Transformer
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import shard

INPUTS = ["floats", "floats that need grad", "tokens"]


def _model_and_input(kind: str, rank: int) -> tuple[nn.Module, Tensor]:
    if kind == "tokens":
        return seeded(lambda: Transformer(vocab=5, dim=4, hidden=6, layers=4)), floats(rank).detach().abs().long()
    return seeded(Deep), floats(rank).requires_grad_(kind == "floats that need grad")


def _log_backward(model: nn.Module, log: list[str]) -> None:
    """Appends "backward blocks.i" to the log behind the first node of a block's backward; the embedding's, too."""
    watched = {f"blocks.{index}": block for index, block in enumerate(model.blocks)}  # type: ignore[arg-type]
    if isinstance(model, Transformer):
        watched["embedding"] = model.embedding

    def watch(name: str, module: nn.Module, args: Any, out: Tensor) -> None:
        if out.grad_fn is not None:
            out.grad_fn.register_hook(lambda *_: log.append(f"backward {name}"))

    for name, module in watched.items():
        module.register_forward_hook(partial(watch, name))


def check_reductions_start_at_once(env: RankEnv, kind: str) -> None:
    model, x = _model_and_input(kind, env.rank)
    shard(model, env.mesh(2))
    for _ in range(2):  # the second time with a recorded order
        with collectives() as log:
            _log_backward(model, log)
            model(x).square().sum().backward()
        order = of_kind(log, "backward", "reduce_scatter")
        root = model._units()[0].name  # type: ignore[operator]
        expected = [f"{what} blocks.{i}" for i in (3, 2, 1, 0) for what in ("backward", "reduce_scatter")]
        last = ["backward embedding"] if kind == "tokens" else []
        assert list(dict.fromkeys(order)) == [*expected, *last, f"reduce_scatter {root}"]


@pytest.mark.parametrize("kind", INPUTS)
def test_rule_10_a_unit_reduces_as_gradients_leave_it(pool2: Pool, kind: str) -> None:
    pool2.run(check_reductions_start_at_once, kind)


def check_inner_use_delays_only_its_unit(env: RankEnv) -> None:
    """The first unit runs again at the end of forward, so it completes last, and keeps nobody waiting but the root."""

    class Again(Deep):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](super().forward(x))

    model = shard(seeded(Again), env.mesh(2))
    with collectives() as log:
        model(floats(env.rank)).square().sum().backward()
    names = [entry.partition(" ")[2] for entry in of_kind(log, "reduce_scatter")]
    assert names[:4] == ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]
    assert len(names) == 5


def test_rule_10_a_unit_that_runs_twice_reduces_once(pool2: Pool) -> None:
    pool2.run(check_inner_use_delays_only_its_unit)
