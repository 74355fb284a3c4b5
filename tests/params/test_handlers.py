"""Operators that hsdp does otherwise than DTensor, while another thread does them as DTensor does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hsdp
from hsdp.params.handlers import handle, past_handler
from tests.support.rig import Pool, RankEnv

_aten = torch.ops.aten
WRITES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "rows": (_aten.slice.Tensor, lambda weight: weight[1:3].fill_(7.0)),
    "plain rows": (_aten.copy_.default, lambda weight: weight.__setitem__(slice(1, 3), torch.full((2, 4), 7.0))),
    "a mask": (_aten.index_put_.default, lambda weight: weight.__setitem__(torch.arange(4) > 2, 7.0)),
    "foreach": (_aten._foreach_mul_.Scalar, lambda weight: torch._foreach_mul_([weight], 2.0)),
}


@contextmanager
def _elsewhere(op: Any) -> Iterator[None]:
    """Inside it another thread does `op` as DTensor does, and is not through."""
    begun, over = threading.Event(), threading.Event()

    def do() -> None:
        with past_handler(op):
            begun.set()
            assert over.wait(60)

    thread = threading.Thread(target=do)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def _writes(env: RankEnv, write: str) -> None:
    weights = []
    for beside in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        hsdp.fully_shard(model, mesh=env.mesh(2))
        op, do = WRITES[write]
        with torch.no_grad():
            if beside:
                with _elsewhere(op):
                    do(model.weight)
            else:
                do(model.weight)
        weights.append((model.weight.full_tensor(), model.weight._version))
    (mine, version), (alone, version_alone) = weights
    assert torch.equal(mine, alone) and version == version_alone > 0


@pytest.mark.parametrize("write", list(WRITES))
def test_writes_beside_another_thread_are_not_lost(pool2: Pool, write: str) -> None:
    pool2.run(_writes, write)


def test_handlers_are_hidden_for_as_long_as_their_operators_are_done() -> None:
    table, asked = DTensor._op_dispatcher._custom_op_handlers, []
    handle([first := _aten.lerp_.Scalar, second := _aten.lerp_.Tensor], lambda op, args, kwargs: asked.append(op))

    def known() -> tuple[bool, bool]:
        return first in table, second in table

    try:
        assert known() == (True, True)
        with past_handler(first):
            assert known() == (False, True)
            with past_handler(second):
                assert known() == (False, False)
            with pytest.raises(RuntimeError), past_handler(first):
                raise RuntimeError
            assert known() == (False, True)
        assert known() == (True, True)
    finally:
        del table[first], table[second]
    assert known() == (False, False) and not asked
