"""Muon: momentum, orthogonalised by a Newton-Schulz iteration (Jordan et al., 2024), on one owner rank per matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hsdp.optim.whole_matrix import BUCKET_BYTES, WholeMatrix
from hsdp.policies import check_flag

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial, for the steepest slope at 0."""

RULES = (None, "original", "match_rms_adamw")
"""What `adjust_lr_fn` may be."""


class Muon(WholeMatrix, torch.optim.Muon):
    """`torch.optim.Muon` for sharded and replicated parameters: its arguments, numbers and state, its work done once.

        optimizer = hsdp.optim.Muon([
            {"params": matrices, "lr": 0.02},
            {"params": experts, "matrices": "stacked"},
            {"params": qkv_weights, "split_sizes": (dim, dim, dim)},
            {"params": others, "algorithm": "adamw", "lr": 3e-4},
        ])

    Each matrix has one owner among all ranks that hold parts or copies of it. Momentum is kept and updated on the shards;
    its pieces go to the owner, which orthogonalises matrices of equal shape as a stack, and the pieces of the result come
    back, to the shards of all replicas. Every rank must call `step`, with gradients for the same parameters.

    Args:
        params: parameters, or groups of them. DTensors (of hsdp, FSDP2, tensor parallelism) and plain tensors, which each
            rank steps by itself. Beside torch's settings a group may have
            `matrices`: "one" (the default: parameters are 2-D); "stacked": the last two dims are matrices, which the dims
            before number, as experts are; "flattened": all dims but the first are columns, as for convolutions.
            `split_sizes`: each matrix is several, one above the other, with these numbers of rows (a fused projection of
            queries, keys and values), or of this many rows each (heads). Each is orthogonalised, and has its learning rate
            adjusted, by itself.
            `algorithm="adamw"`: the group is stepped by AdamW, with the settings and defaults of `torch.optim.AdamW`.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: weight of the past in the momentum, at least 0.
        nesterov: look ahead by one step of momentum.
        ns_coefficients: a, b and c of the iteration X <- a X + b (X X^T) X + c (X X^T)^2 X.
        eps: the least norm that a matrix is divided by.
        ns_steps: number of iterations, below 100.
        adjust_lr_fn: how the learning rate goes by a matrix's rows A and columns B: None or "original", times
            sqrt(max(1, A / B)); "match_rms_adamw", times 0.2 sqrt(max(A, B)).
        ns_dtype: dtype in which matrices travel and are iterated with; None: that of each parameter.
        bucket_bytes: about how many bytes of matrices an owner works on while others travel.
        over_replicas: share gradients and momentum out among replicas, as `hsdp.optim.local(over_replicas=True)` does: each
            of R replicas gets the sums of 1/R of each shard's gradient, in the place of an all-reduce, and has the momentum
            of that alone; owners get pieces from all replicas. `.grad` is a DTensor that both axes shard from now on. AdamW
            groups are stepped so, too.

    Raises:
        ValueError: a setting makes no sense, or a parameter is no matrix as its group says; or `over_replicas`, and ranks
            do not ascend along the replicate axis of a mesh.
        StateError: `over_replicas`, and sums of earlier micro-batches are pending.
    """

    _settings = (*WholeMatrix._settings, "_ns_dtype")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | None = torch.bfloat16,
        bucket_bytes: int = BUCKET_BYTES,
        over_replicas: bool = False,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"Muon(lr=...): a tensor must have one element, not shape {tuple(lr.shape)}")
        for name, value in {"lr": float(lr), "momentum": momentum, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"Muon({name}={value}): it must be at least 0")
        if adjust_lr_fn not in RULES:
            raise ValueError(f"Muon(adjust_lr_fn={adjust_lr_fn!r}): expected one of {RULES}")
        if len(ns_coefficients) != 3 or not 0 <= ns_steps < 100:
            raise ValueError(
                f"Muon(ns_coefficients={ns_coefficients}, ns_steps={ns_steps}): expected three coefficients, and "
                "fewer than 100 steps"
            )
        check_flag("Muon", over_replicas, "over_replicas=")
        if bucket_bytes < 1:
            raise ValueError(f"Muon(bucket_bytes={bucket_bytes}): it must be at least 1")
        self._ns_dtype = ns_dtype
        self._bucket_bytes = bucket_bytes
        self._over_replicas = over_replicas
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)  # torch.optim.Muon's own takes nothing but matrices

    def wire_dtype(self, param: Tensor) -> torch.dtype:
        """`ns_dtype`, or the parameter's: `WholeMatrix.wire_dtype`."""
        return self._ns_dtype or param.dtype

    def cost(self, rows: int, cols: int, group: Mapping[str, Any]) -> float:
        """Multiplications of an iteration: `WholeMatrix.cost`."""
        small, large = sorted((rows, cols))
        return float(small * small * (2 * large + small) * group["ns_steps"])

    def scale(self, rows: int, cols: int, group: Mapping[str, Any]) -> float:
        """`adjust_lr_fn`'s factor: `WholeMatrix.scale`."""
        rule = group["adjust_lr_fn"]
        return 0.2 * math.sqrt(max(rows, cols)) if rule == "match_rms_adamw" else math.sqrt(max(1, rows / cols))

    def transform(self, matrices: Tensor, group: dict[str, Any]) -> Tensor:
        """The orthogonalised matrices: `WholeMatrix.transform`."""
        return newton_schulz(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])


def newton_schulz(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Brings the singular values of matrices near 1, and keeps their singular vectors.

    Args:
        matrices: `[k, rows, cols]`; they are overwritten.
        coefficients: of the polynomial of singular values a s + b s^3 + c s^5.
        steps: how often it is applied.
        eps: the least norm that a matrix is divided by, so that zeros stay zeros.

    Returns:
        `[k, rows, cols]`, in the same dtype.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # the smaller Gram matrix
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=eps))  # so that no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
