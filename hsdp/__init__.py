"""hsdp: hybrid-sharded data-parallel training for PyTorch.

    from hsdp import fully_shard

    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

The training loop stays as it was.
"""

from hsdp.api import HSDPModule, fully_shard
from hsdp.errors import CollectiveError, DivergenceError, HSDPError, StaleParametersError, StateError
from hsdp.pipeline import ReductionPipeline
from hsdp.policies import CommPolicy, MixedPrecisionPolicy

__all__ = [
    "CollectiveError",
    "CommPolicy",
    "DivergenceError",
    "HSDPError",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "ReductionPipeline",
    "StaleParametersError",
    "StateError",
    "fully_shard",
]
