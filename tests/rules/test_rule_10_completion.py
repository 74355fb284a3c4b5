"""Rule 10: a unit reduces when its own parameters' gradients are complete, whatever its inputs are."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from tests.support.deep import Deep, collectives, floats, log_backward, of_kind, seeded
from tests.support.models import Transformer
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import shard

INPUTS = ["floats", "floats that need grad", "tokens"]


def _model_and_input(kind: str, rank: int) -> tuple[nn.Module, Tensor]:
    if kind == "tokens":
        return seeded(lambda: Transformer(vocab=5, dim=4, hidden=6, layers=4)), floats(rank).detach().abs().long()
    return seeded(Deep), floats(rank).requires_grad_(kind == "floats that need grad")


def check_reductions_start_at_once(env: RankEnv, kind: str) -> None:
    model, x = _model_and_input(kind, env.rank)
    shard(model, env.mesh(2))
    for _ in range(2):  # the second time with a recorded order
        with collectives() as log:
            log_backward(model, log)
            model(x).square().sum().backward()
        order = of_kind(log, "backward", "reduce_scatter")
        root = model._units()[0].name  # type: ignore[operator]
        expected = [f"{what} blocks.{i}" for i in (3, 2, 1, 0) for what in ("backward", "reduce_scatter")]
        assert list(dict.fromkeys(order)) == [*expected, f"reduce_scatter {root}"]


@pytest.mark.parametrize("kind", INPUTS)
def test_rule_10_a_unit_reduces_as_soon_as_its_own_gradients_are_there(pool2: Pool, kind: str) -> None:
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
