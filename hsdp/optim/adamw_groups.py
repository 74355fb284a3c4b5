"""AdamW for the parameters beside the matrices (norms, biases, embeddings), inside the same optimizer object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hsdp.optim.elementwise import bare_step, local


class AdamWGroups:
    """Steps an optimizer's groups with `algorithm="adamw"`, with that optimizer's own state, on local tensors.

    Args:
        over_replicas: as for `local`.
    """

    def __init__(self, over_replicas: bool) -> None:
        self._inner: Any = local(torch.optim.AdamW([nn.Parameter(torch.empty(0))]), over_replicas=over_replicas)
        self._bare: Callable[..., Any] = bare_step(torch.optim.AdamW)
        self._groups: list[dict[str, Any]] = []

    @staticmethod
    def defaults() -> dict[str, Any]:
        """The settings of such a group, as the installed torch has them."""
        return dict(torch.optim.AdamW([nn.Parameter(torch.empty(0))]).defaults)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of these groups of `optimizer`."""
        groups = [group for group in optimizer.param_groups if group.get("algorithm") == "adamw"]
        if len(groups) != len(self._groups) or any(a is not b for a, b in zip(groups, self._groups, strict=True)):
            self._groups = self._inner.param_groups = groups
        self._inner.state = optimizer.state
        self._inner._hsdp_stepper.step(self._inner, self._bare)
