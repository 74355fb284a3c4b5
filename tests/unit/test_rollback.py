"""What a failed backward is undone with knows of a sum before it is there."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from hsdp.unit.rollback import Undo


def _behind(memory: Tensor, landed: Tensor) -> None:
    memory.copy_(memory + landed)
    raise KeyboardInterrupt


def _before(memory: Tensor, landed: Tensor) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("interrupted", [_behind, _before])
def test_an_interrupt_at_a_sum_leaves_the_gradient_of_before(
    interrupted: Callable[[Tensor, Tensor], None], at_once: bool
) -> None:
    undo, memory = Undo(), torch.ones(3)
    undo.add_noted(memory, torch.ones(3))
    with mock.patch.object(Tensor, "add_", interrupted), pytest.raises(KeyboardInterrupt):
        undo.add_noted(memory, torch.ones(3))
    assert undo.run(at_once)
    assert torch.equal(memory, torch.ones(3))
