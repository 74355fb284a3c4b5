"""PyTorch's own FSDP2 as a side of programs of user actions, for information: where it differs from the twin, and how.

It has no `flush` and cannot tell what is pending, so programs for it are drawn without
the feature "levels"; nor does it take parameters without dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from tests.soak.actions.models import Net
from tests.soak.actions.programs import Program
from tests.soak.actions.sides import Sharded, Side, Values, units_of

LEFT_OUT = frozenset(
    {"factors", "levels", "locals", "meshes", "muon", "options", "rows"}
    | {"others", "policies", "repeats", "saves", "scalars", "tunes"}
)
"""Features that programs for it must not use."""


class FSDP2(Sharded):
    """The model under FSDP2. Any error that the twin does not have ends the program: its errors have no names."""

    ends_with_errors = True

    def _shard(self, program: Program, model: Net) -> None:
        options: dict[str, Any] = {"mesh": self.mesh}
        if program.reshard is not None:
            options["reshard_after_forward"] = program.reshard
        for module in units_of(program, model):
            fully_shard(module, **options)
        fully_shard(model, **options)
        register_fsdp_forward_method(model, "infer")

    def pending(self) -> bool:
        return False

    def lost(self) -> bool:
        return False

    def clip(self, at: int) -> Values:
        norm: Any = torch.nn.utils.clip_grad_norm_(self.params.values(), 0.5)
        return [("norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm.clone())]

    def peek(self, at: int) -> Values:
        return [(name, param.detach().full_tensor()) for name, param in self.params.items()]  # type: ignore[attr-defined]

    def full_write(self, at: int) -> Values:
        return Side.full_write(self, at)

    def step(self, at: int) -> Values:
        return Side.step(self, at)

    def flush(self, at: int) -> Values:
        return []

    def set(self, at: int, what: str, flag: bool) -> Values:
        return []

    def _unit(self, who: int) -> Any:
        parts = [part for part in self.model.parts if isinstance(part, FSDPModule)]
        return self.model if who < 0 or not parts else parts[who % len(parts)]
