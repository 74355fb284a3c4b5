"""The device suite's programs as FSDP2 runs them: the same cases, meshes, delays and judges, with its own calls in place.

What has another name in FSDP2 is given the suite's name here; what it has not is listed, with the reason, in `WHY_NOT`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import hsdp
from tests.soak import device_cases
from tests.soak.device_cases import CASES, Conditions, Shape, run_case
from tests.support.rig import RankEnv

_REASONS = {
    "its prefetching, queues, buckets and transfers have no such settings": (
        *(name for name in CASES if name.startswith(("fusion", "prefetch", "wide", "narrow", "both buckets"))),
        "scatter buckets",
        "all-reduce buckets",
        "accumulating, deferred and bucketed",
        "accumulating on each rank",
    ),
    "it shards every parameter that it manages": ("replicated parameters",),
    "it offloads to host memory only": ("offloaded to disk",),
    "hsdp.optim and hsdp's checkpoints are hsdp's": (
        *(name for name in CASES if name.startswith("local optimizer")),
        "saved in the background and resumed",
    ),
    "it has no full_params and no init_sharded": (
        "initialised from meta",
        "whole parameters between steps",
        "moved and offloaded",
    ),
    "it does not tell which gradients are pending, and has no flush": (
        "mixed accumulation",
        "gradients set to none between micro batches",
    ),
    "its reductions do not run on behind the backward": ("reductions run on", "clipping what runs on"),
    "the collectives are hsdp's": ("compressed",),
}
WHY_NOT = {name: reason for reason, names in _REASONS.items() for name in names}
"""Why a case cannot be expressed with FSDP2, by its name."""


def run_case_of_fsdp2(env: RankEnv, name: str, shape: Shape, under: Conditions) -> None:
    """As `run_case`, with FSDP2."""
    with in_place():
        run_case(env, name, shape, under)


@contextmanager
def in_place() -> Iterator[None]:
    """The cases' programs call FSDP2 where they call hsdp."""
    with (
        mock.patch.object(device_cases, "shard", _shard),
        mock.patch.object(device_cases, "check_rest", lambda model: None),
        mock.patch.object(device_cases, "_expected", {}),
        mock.patch.object(hsdp, "clip_grad_norm_", _clip),
    ):
        yield


def _shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """As `tests.support.sharded.shard`."""
    told = {key: _own(value) for key, value in options.items()}
    if not any(param.is_meta for param in model.parameters()):
        model.to(mesh.device_type)  # it cannot bring parameters to the emulated device itself
    units: Any = model.units() if hasattr(model, "units") else getattr(model, "blocks", ())
    for unit in units:
        _rename(fsdp.fully_shard(unit, mesh=mesh, **told))
    return _rename(fsdp.fully_shard(model, mesh=mesh, **told))


def _own(value: Any) -> Any:
    if isinstance(value, hsdp.CPUOffloadPolicy):
        return fsdp.CPUOffloadPolicy(pin_memory=value.pin_memory)
    if isinstance(value, hsdp.MixedPrecisionPolicy):
        return fsdp.MixedPrecisionPolicy(value.param_dtype, value.reduce_dtype, value.output_dtype)
    return value


def _rename(model: Any) -> Any:
    @contextmanager
    def accumulate(*, last: bool) -> Iterator[None]:
        # What FSDP2's users write: sums over shards in every micro-batch, over replicas in the last one.
        model.set_requires_all_reduce(last)
        yield

    model.set_requires_grad_sync = model.set_requires_gradient_sync
    model.accumulate = accumulate
    return model


def _clip(model: nn.Module, max_norm: float) -> Tensor:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
