"""Whole tensors in `load_state_dict` of a sharded module: a sentence that says what to do, before torch's refusal."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp.params.dtensors import replicates_implicitly


def explain_whole_tensors(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    """A hook before a module's `load_state_dict`: it changes nothing of what is loaded."""
    messages: list[str] = rest[-1]
    assigns = metadata.get("assign_to_params_buffers", False)  # refused when the module runs
    if assigns or replicates_implicitly() or any("load_full_state_dict" in message for message in messages):
        return
    for name, param in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(param, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            messages.insert(
                0,
                f"{prefix + name!r} is a whole tensor {tuple(value.shape)} in the state dict, but sharded in the "
                "model; load whole tensors with hsdp.checkpoint.load_full_state_dict(model, state_dict), on all ranks",
            )
            return
