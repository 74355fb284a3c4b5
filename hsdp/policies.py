"""Policies: what the user chooses, as frozen dataclasses that are checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

ReduceOp = Literal["avg", "sum"]
Fusion = Literal["auto", "packed", "direct"]
ReplicaPolicy = Literal["broadcast", "check", "trust"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit. `None` keeps what is there.

    Args:
        param_dtype: dtype of the whole parameters, hence of compute and of the all-gather. The sharded parameters and
            the optimizer keep the original dtype. Parameters of integer, boolean, complex and 8-bit dtypes are not
            cast.
        reduce_dtype: dtype in which gradients are reduced and accumulated. `None`: the dtype of the whole parameter,
            which complex gradients keep.
        output_dtype: floating-point outputs of the module's forward are cast to it.
        cast_forward_inputs: cast floating-point inputs of the module's forward to `param_dtype`. Lists, dicts and
            dataclasses with a tensor to cast are passed as copies, all others as they are.
        buffer_dtype: floating-point buffers of the unit's modules are cast to it once, by `fully_shard`. One that several
            units share stays one if they cast it alike.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"MixedPrecisionPolicy({name}={dtype!r}): expected a floating-point torch.dtype such as "
                    "torch.bfloat16, or None to keep the original dtype"
                )
            if dtype is not None and name in ("param_dtype", "reduce_dtype") and not is_castable(dtype):
                raise ValueError(
                    f"MixedPrecisionPolicy({name}={dtype}): gradients cannot be computed or summed in it; choose one of "
                    "16 bits or more. For float8 gathers use a tensor subclass with fsdp_pre_all_gather"
                )
        if not isinstance(self.cast_forward_inputs, bool):
            raise ValueError(
                f"MixedPrecisionPolicy(cast_forward_inputs={self.cast_forward_inputs!r}): expected True or False"
            )


def is_castable(dtype: torch.dtype) -> bool:
    """Whether a policy casts values of a dtype: they mean what they say in another floating-point dtype.

    Those of the others travel as bytes: integers and booleans, float8 and packed 4-bit formats, whose scales lie elsewhere,
    and complex numbers.
    """
    return dtype.is_floating_point and dtype.itemsize > 1


def is_trainable(dtype: torch.dtype) -> bool:
    """Whether gradients of a dtype can be summed. Parameters of another one are frozen."""
    return is_castable(dtype) or dtype in (torch.complex64, torch.complex128)


@dataclass(frozen=True)
class CommPolicy:
    """How a unit communicates. `None` stands for a default that was measured for the backend.

    The bounds `max_inflight_*` and the sizes `*_bucket_bytes` are those of the outermost unit, for all units below it.

    Args:
        fusion: which path parameters take. A *direct* parameter is gathered from its shard straight into its place and
            reduced straight from the gradient that autograd made; *packed* ones share one transfer and cost one copy.
            "auto" sends large, evenly divisible `Shard(0)` parameters the direct way and packs the rest; "packed"
            packs all; "direct" sends directly whatever can be. Packed parameters are padded to equal parts. Large ones that
            this would multiply (8 experts on 64 ranks) are direct and not padded, unless all are to be packed.
        direct_gather_bytes: smallest size of a rank's piece, in bytes, that "auto" gathers directly.
        direct_reduce_bytes: smallest size of a rank's piece, in bytes, that "auto" reduces directly.
        prefetch: how many units beyond the current one may be gathered ahead (0: none). A bound on memory too: small units
            beside large ones hardly count, as long as they have no more bytes than half of the largest.
        max_inflight_reduce_scatters: how many reductions may hold their whole gradients at a time (at least 1). On a device
            small ones beside large ones hardly count.
        max_inflight_all_reduces: how many reductions may be queued behind their reduce-scatter (at least 1).
        reduce_scatter_bucket_bytes: reductions of neighbouring units share one reduce-scatter until their whole gradients
            reach this many bytes (0: each goes on its own). Fewer, larger transfers for small units, more memory.
        all_reduce_bucket_bytes: the same for all-reduces, counted in bytes of shards. Buckets are coalesced calls: no copy.
        accumulate: what `accumulate()` of the module does in all micro-batches but the last: "reduce_scatter" sums shards
            and defers the all-reduce; "local" sums whole gradients on each rank: no communication, but a whole model of
            fp32. That of the module on which it is called (the model) decides for all units below.
        reduction: in which order gradients of data ranks are added. "any": in that of the backend, which depends on the
            mesh. "tree": in one binary order of global ranks, the same for every split of as many ranks into replicas and
            shards: gradients, and `clip_grad_norm_`, are equal bit for bit on all of them. Pass it to every unit. With
            several replicas the number of shard ranks must be a power of two. It takes more memory, and deferred sums
            save no all-reduces: see docs/formulas.md.
        shared_memory: whether ranks that train on CPUs of one host gather and reduce through memory that they share, on a
            mesh axis all of whose ranks do, on Linux. False: through gloo's sockets, several times as slow. The same on
            all ranks.
    """

    fusion: Fusion = "auto"
    direct_gather_bytes: int | None = None
    direct_reduce_bytes: int | None = None
    prefetch: int = 1
    max_inflight_reduce_scatters: int = 1
    max_inflight_all_reduces: int = 4
    reduce_scatter_bucket_bytes: int = 0
    all_reduce_bucket_bytes: int = 0
    accumulate: Literal["reduce_scatter", "local"] = "reduce_scatter"
    reduction: Literal["any", "tree"] = "any"
    shared_memory: bool = True

    def __post_init__(self) -> None:
        if self.fusion not in ("auto", "packed", "direct"):
            raise ValueError(f"CommPolicy(fusion={self.fusion!r}): expected 'auto', 'packed' or 'direct'")
        if self.accumulate not in ("reduce_scatter", "local"):
            raise ValueError(f"CommPolicy(accumulate={self.accumulate!r}): expected 'reduce_scatter' or 'local'")
        if self.reduction not in ("any", "tree"):
            raise ValueError(f"CommPolicy(reduction={self.reduction!r}): expected 'any' or 'tree'")
        if not isinstance(self.shared_memory, bool):
            raise ValueError(f"CommPolicy(shared_memory={self.shared_memory!r}): expected True or False")
        smallest = {
            "direct_gather_bytes": 0,
            "direct_reduce_bytes": 0,
            "prefetch": 0,
            "max_inflight_reduce_scatters": 1,
            "max_inflight_all_reduces": 1,
            "reduce_scatter_bucket_bytes": 0,
            "all_reduce_bucket_bytes": 0,
        }
        for name, bound in smallest.items():
            value = getattr(self, name)
            if value is None and name.startswith("direct_"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < bound:
                raise ValueError(f"CommPolicy({name}={value!r}): expected an integer of at least {bound}")


_OF_THE_ROOT = (
    "max_inflight_reduce_scatters",
    "max_inflight_all_reduces",
    "reduce_scatter_bucket_bytes",
    "all_reduce_bucket_bytes",
)


def unheeded(policy: CommPolicy, root: CommPolicy) -> dict[str, Any]:
    """What was chosen in a unit's policy and is decided otherwise by its root's."""
    default = CommPolicy()
    chosen = {name: getattr(policy, name) for name in _OF_THE_ROOT}
    return {name: value for name, value in chosen.items() if value not in (getattr(default, name), getattr(root, name))}


def check_replica_policy(policy: str, where: str) -> ReplicaPolicy:
    """Returns `policy` if it is one; raises ValueError naming `where` otherwise."""
    if policy not in ("broadcast", "check", "trust"):
        raise ValueError(f"{where}(replica_policy={policy!r}): expected 'broadcast', 'check' or 'trust'")
    return cast(ReplicaPolicy, policy)


def check_reduce_op(op: str, where: str) -> ReduceOp:
    """Returns `op` as "avg" or "sum", tolerating case and spaces; raises ValueError naming `where` otherwise."""
    name = op.strip().lower() if isinstance(op, str) else op
    if name == "avg":
        return "avg"
    if name == "sum":
        return "sum"
    raise ValueError(f"{where}: reduce op {op!r} is not known; choose 'avg' or 'sum'")


def check_flag(method: str, value: Any, keyword: str = "") -> bool:
    """Returns `value` if it is True or False; raises TypeError naming `method`, and the `keyword`, otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{method}({keyword}{value!r}): expected True or False")
    return value
