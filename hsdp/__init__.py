"""hsdp: hybrid-sharded data-parallel training for PyTorch.

    from hsdp import fully_shard

    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

The training loop stays as it was.
"""

from hsdp.api import fully_shard, register_forward_method
from hsdp.clip import clip_grad_norm_
from hsdp.errors import CollectiveError, DivergenceError, HSDPError, StaleParametersError, StateError
from hsdp.module import HSDPModule
from hsdp.pipeline import ReductionPipeline
from hsdp.policies import CommPolicy, MixedPrecisionPolicy
from hsdp.replicas import AllReduce, ReplicaReduce

__all__ = [
    "AllReduce",
    "CollectiveError",
    "CommPolicy",
    "DivergenceError",
    "HSDPError",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "ReductionPipeline",
    "ReplicaReduce",
    "StaleParametersError",
    "StateError",
    "clip_grad_norm_",
    "fully_shard",
    "register_forward_method",
]
