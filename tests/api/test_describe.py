"""`describe` and `repr` tell what a model's units are and which path each parameter takes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from hsdp import (
    CommPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    least_padding,
    shard_units,
)
from tests.support.models import Transformer
from tests.support.rig import fake_world


def _lines(model: nn.Module) -> dict[str, str]:
    return {line.split()[0]: line for line in describe(model).splitlines()}


def test_describe_shows_the_path_of_each_parameter() -> None:
    with fake_world(8) as env:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
        policy = CommPolicy(direct_gather_bytes=1024, direct_reduce_bytes=4096)
        fully_shard(model[0], mesh=env.mesh((2, 4)), comm_policy=policy)
        fully_shard(model, mesh=env.mesh((2, 4)), replicate_params=[model[1].bias])
        lines = _lines(model)
        whole = describe(model[0]).splitlines()[1]
    assert "gathered direct, reduced direct" in whole, whole  # 64 / 4 rows of 64 floats: 4096 bytes
    assert "2 replicas x 4 shards" in lines["Sequential"]
    assert "gathered packed, reduced packed" in lines["1.weight"]  # 3 rows do not go on 4 ranks
    assert "kept whole" in lines["1.bias"]


def test_describe_tells_the_padding_of_what_is_kept_whole() -> None:
    with fake_world(8) as env:
        model = nn.Linear(64, 5)
        fully_shard(model, mesh=env.mesh((2, 4)), replicate_params=[model.bias])
        described = describe(model)
    # Of 5 rows on 4 ranks each has 3/4 of one as padding; the bias lies in 256 bytes, of which it takes 20.
    assert f"{64 * 4 * 3 // 4 + 256 - 20:,} of them padding" in described, described


def test_describe_shows_dtypes_and_what_is_frozen() -> None:
    with fake_world(4) as env:
        model = nn.Linear(8, 8)
        model.bias.requires_grad_(False)
        fully_shard(model, mesh=env.mesh((4,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        lines = _lines(model)
        assert "fp32 / bf16 / fp32" in lines["weight"]
        assert lines["bias"].endswith("frozen")
        assert "in_features=8" in repr(model)
        assert "hsdp unit of 2 parameters, 4 shards on cpu, float32 as bfloat16, Shard(0)" in repr(model)


def test_repr_and_describe_tell_the_same_placements() -> None:
    with fake_world(8) as env:
        model = nn.Module()
        model.experts = nn.Parameter(torch.zeros(2, 64, 4))
        model.bias = nn.Parameter(torch.zeros(5))
        model.scale = nn.Parameter(torch.zeros(()))
        model.forward = lambda: None
        fully_shard(model, mesh=env.mesh((2, 4)), shard_placement_fn=least_padding, replicate_params=[model.bias])
        described = describe(model)
        assert "Replicate()/Shard(0, 1)" in repr(model), repr(model)
        assert "Shard(0, 1)" in described and "Shard(0) " not in described, described
        replicas = nn.Linear(4, 4)
        fully_shard(replicas, mesh=env.mesh((8,), ("pod",)), dp_mesh_dims=DataParallelMeshDims(replicate="pod"))
        assert replicas.weight.placements == (Replicate(),)
        assert "Replicate()" in repr(replicas) and "Shard" not in repr(replicas), repr(replicas)
        assert "Shard" not in describe(replicas), describe(replicas)


def test_names_are_those_of_the_original_class_or_fsdp2_s() -> None:
    class FSDPNet(nn.Linear):
        """A class of the user's own that begins as FSDP2's names do."""

    with fake_world(4) as env:
        assert describe(fully_shard(FSDPNet(4, 4), mesh=env.mesh((4,)))).startswith("FSDPNet (root): ")
        model = fully_shard(nn.Linear(4, 4), mesh=env.mesh((4,)))
        assert repr(model).startswith("FSDPLinear(") and describe(model).startswith("Linear (root): ")
        # What transformers' save_pretrained writes as "architectures".
        assert type(model).__name__.removeprefix("FSDP") == "Linear"
        with pytest.raises(TypeError, match=r"^FSDPLinear is sharded and cannot be pickled"):
            pickle.dumps(model)


def test_describe_refuses_a_model_that_is_not_sharded() -> None:
    with pytest.raises(ValueError, match=r"describe\(Linear\).*fully_shard"):
        describe(nn.Linear(2, 2))


def test_describe_shows_the_tree_of_units_and_alike_ones_once() -> None:
    with fake_world(8) as env:
        model = Transformer(layers=5)
        mesh = env.mesh((2, 4))
        shard_units(model, "blocks.2.q", mesh=mesh, root=False, reshard_after_forward=False)
        shard_units(model, "blocks.*", mesh=mesh, root=False, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)
        heads = [line.split(":")[0] for line in describe(model, params=False).splitlines()]
        lines = describe(model).splitlines()
        assert "1 parameter, 2 replicas x 4 shards on cpu" in repr(model.blocks[2].q)
    assert heads == ["Transformer (root)", "  blocks.0..4 (each of 4)", "  blocks.2", "    blocks.2.q"]
    assert len(lines) == 4 + 3 + 9 + 8 + 1
    for line, ending in zip((line for line in lines if "per rank" in line), AFTER, strict=True):
        assert line.endswith(ending), line


AFTER = ("whole until backward", *["sharded over 2 ranks after forward"] * 2, "whole until backward")


def test_a_part_is_no_root_once_its_model_has_run() -> None:
    with fake_world(4) as env:
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(8, 8), mesh=env.mesh((4,)))), mesh=env.mesh((4,)))
        assert "Linear (root): 2 parameters" in describe(model[0]) and "whole until backward" in describe(model[0])
        model(torch.ones(2, 8))
        assert "Linear: 2 parameters" in describe(model[0]) and "freed after forward" in describe(model[0])
        assert "whole until backward" in describe(model)
