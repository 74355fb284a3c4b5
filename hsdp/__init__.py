"""hsdp: hybrid-sharded data-parallel training for PyTorch.

    from hsdp import fully_shard

    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

The training loop stays as it was. What else there is, by purpose:

    units                    shard_units, by_numel, describe
    policies                 MixedPrecisionPolicy, CommPolicy, OffloadPolicy, CPUOffloadPolicy, DiskOffloadPolicy
    meshes, placements       DataParallelMeshDims, least_padding
    sharded modules          HSDPModule: accumulation, reduction and gathering; register_forward_method
    whole parameters         full_params, gathered_apply, init_sharded, sync_module_states, check_replicas
    optimizers               clip_grad_norm_, optim.local, optim.Muon, optim.whole_matrix
    saving and loading       checkpoint
    replicas that may die    elastic
    libraries that shard     integrations
    before and after a step  plan, trace
    errors                   HSDPError: StateError, StaleParametersError, DivergenceError, CollectiveError,
                             ExtensionError, CheckpointError
    other collectives        AllGather, ReduceScatter, ReplicaReduce, AllReduce, CompressedAllReduce,
                             CompressedReduceScatter
    traces                   Trace
    FSDP2's names            FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx

`python -m pydoc hsdp.HSDPModule` shows the methods of a sharded module, `python -m pydoc hsdp.NAME` any other class.
"""

from hsdp import checkpoint as checkpoint  # not in __all__: `from hsdp import *` must not hide torch's checkpoint
from hsdp import elastic as elastic
from hsdp import integrations as integrations
from hsdp import optim as optim  # nor torch's optim
from hsdp.api.describe import describe
from hsdp.api.forward_methods import register_forward_method, register_fsdp_forward_method
from hsdp.api.fsdp2 import UnshardHandle, share_comm_ctx
from hsdp.api.fully_shard import fully_shard
from hsdp.api.module import HSDPModule
from hsdp.api.module import HSDPModule as FSDPModule  # FSDP2's name of it
from hsdp.api.shard_units import by_numel, shard_units
from hsdp.clip import clip_grad_norm_
from hsdp.comm.compressed import CompressedAllReduce, CompressedReduceScatter
from hsdp.comm.custom import AllGather, ReduceScatter, ReplicaReduce
from hsdp.comm.mesh import DataParallelMeshDims
from hsdp.comm.replica_reduce import AllReduce
from hsdp.errors import (
    CheckpointError,
    CollectiveError,
    DivergenceError,
    ExtensionError,
    HSDPError,
    StaleParametersError,
    StateError,
)
from hsdp.offload import CPUOffloadPolicy, DiskOffloadPolicy, OffloadPolicy
from hsdp.params.placement import least_padding
from hsdp.planning import plan
from hsdp.policies import CommPolicy, MixedPrecisionPolicy
from hsdp.tracing import Trace, trace
from hsdp.weights.drift import check_replicas
from hsdp.weights.full_params import full_params, gathered_apply
from hsdp.weights.init import init_sharded, sync_module_states

__all__ = [
    "AllGather",
    "AllReduce",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CollectiveError",
    "CommPolicy",
    "CompressedAllReduce",
    "CompressedReduceScatter",
    "DataParallelMeshDims",
    "DiskOffloadPolicy",
    "DivergenceError",
    "ExtensionError",
    "FSDPModule",
    "HSDPError",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ReplicaReduce",
    "StaleParametersError",
    "StateError",
    "Trace",
    "UnshardHandle",
    "by_numel",
    "check_replicas",
    "clip_grad_norm_",
    "describe",
    "full_params",
    "fully_shard",
    "gathered_apply",
    "init_sharded",
    "least_padding",
    "plan",
    "register_forward_method",
    "register_fsdp_forward_method",
    "shard_units",
    "share_comm_ctx",
    "sync_module_states",
    "trace",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """What `dir`, a shell's completion and pydoc list: the public names."""
    return [*__all__, "checkpoint", "elastic", "integrations", "optim", *(name for name in globals() if name[:2] == "__")]
