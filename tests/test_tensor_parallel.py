"""Tensor and sequence parallelism inside of hsdp: parameters that are DTensors before they are sharded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hsdp
import hsdp.checkpoint
from tests.models import Case, mse
from tests.rig import Pool, RankEnv
from tests.sharded import check_rest, mesh_id
from tests.twin import Twin, adamw, assert_close_to_twin, assert_same, full_grads, full_params, sgd, train, twin_of

DIM, HIDDEN, LENGTH = 8, 16, 4
NAMES = ("replicate", "shard", "tp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 2, LENGTH, DIM, generator=generator, dtype=torch.float64)
    return x, y


CASE = Case("tensor parallel", Net, draw, mse, torch.float64)

TENSOR = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def parallelize(model: nn.Module, mesh: DeviceMesh, style: str) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        if style == "tensor":
            parallelize_module(block, mesh, TENSOR)
        else:
            parallelize_module(block, mesh, SEQUENCE)
    if style == "sequence":
        entry = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        parallelize_module(model.blocks[0], mesh, entry)  # type: ignore[index]
        exit_ = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
        parallelize_module(model.out, mesh, exit_)  # type: ignore[arg-type]


def build(env_mesh: DeviceMesh, style: str, **options: Any) -> nn.Module:
    model = CASE.model()
    parallelize(model, env_mesh["tp"], style)
    data = env_mesh["shard"] if env_mesh.size(0) == 1 else env_mesh["replicate", "shard"]
    for block in model.blocks:  # type: ignore[union-attr]
        hsdp.fully_shard(block, mesh=data, **options)
    return hsdp.fully_shard(model, mesh=data, **options)


@cache
def twin(world: int, steps: int) -> Twin:
    return twin_of(CASE, world, steps, sgd)


def check_training(env: RankEnv, shape: tuple[int, int, int], style: str, twin: Twin, options: dict[str, Any]) -> None:
    mesh = env.mesh(shape, NAMES)
    model = build(mesh, style, **options)
    data_rank = env.rank // shape[2]
    losses = train(model, CASE, data_rank, len(twin.losses), sgd(model.parameters()))
    torch.testing.assert_close(losses, twin.losses[:, data_rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, grads=True)
    check_rest(model)


SHAPES = [(1, 2, 2), (2, 1, 2), (1, 1, 4), (1, 4, 1)]


@pytest.mark.parametrize("style", ["tensor", "sequence"])
@pytest.mark.parametrize("shape", SHAPES, ids=mesh_id)
@pytest.mark.parametrize("fusion", ["direct", "packed"])
def test_training_equals_the_twin(pool4: Pool, shape: tuple[int, int, int], style: str, fusion: str) -> None:
    options = {"comm_policy": hsdp.CommPolicy(fusion=fusion)}  # type: ignore[arg-type]
    pool4.run(check_training, shape, style, twin(4 // shape[2], 3), options)


def check_as_fsdp2(env: RankEnv, shape: tuple[int, int, int]) -> None:
    """Placements, meshes, shards and gradients are those that FSDP2 gives the same model."""
    mesh = env.mesh(shape, NAMES)
    ours = build(mesh, "sequence")
    theirs = CASE.model()
    parallelize(theirs, mesh["tp"], "sequence")
    data = mesh["shard"] if shape[0] == 1 else mesh["replicate", "shard"]
    for block in theirs.blocks:  # type: ignore[union-attr]
        fsdp.fully_shard(block, mesh=data)
    fsdp.fully_shard(theirs, mesh=data)
    for model in (ours, theirs):
        mse(model, CASE.batch(0, env.rank // shape[2])).backward()
    for (name, a), (other, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert isinstance(a, DTensor) and isinstance(b, DTensor)
        assert (name, a.placements, a.device_mesh) == (other, b.placements, b.device_mesh)
        torch.testing.assert_close(a.to_local(), b.to_local(), rtol=0, atol=0)
        torch.testing.assert_close(a.grad.to_local(), b.grad.to_local(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)], ids=mesh_id)
def test_parameters_are_those_of_fsdp2(pool4: Pool, shape: tuple[int, int, int]) -> None:
    pool4.run(check_as_fsdp2, shape)


def check_accumulation(env: RankEnv, twin: Twin) -> None:
    mesh = env.mesh((1, 2, 2), NAMES)
    model = build(mesh, "sequence")
    sync = lambda m, last: m.set_requires_grad_sync(last)  # noqa: E731
    train(model, CASE, env.rank // 2, len(twin.losses), sgd(model.parameters()), 3, before_micro=sync)
    assert_close_to_twin(model, twin, grads=True)


def test_accumulation_equals_the_twin(pool4: Pool) -> None:
    pool4.run(check_accumulation, twin_of(CASE, 2, 2, sgd, 3))


def check_clipping(env: RankEnv, twin: Twin, limit: float) -> None:
    """Parameters on two meshes, which torch's own function refuses."""
    mesh = env.mesh((1, 2, 2), NAMES)
    model = build(mesh, "tensor")
    mse(model, CASE.batch(0, env.rank // 2)).backward()
    norm = hsdp.clip_grad_norm_(model, limit)
    total = torch.stack([g.norm() for g in twin.grads.values() if g is not None]).norm()
    torch.testing.assert_close(norm, total, rtol=1e-11, atol=1e-11)
    scale = limit / (total + 1e-6)
    clipped = {name: None if g is None else g * scale for name, g in twin.grads.items()}
    assert_same(full_grads(model), clipped)


def test_clipping_over_both_meshes(pool4: Pool) -> None:
    pool4.run(check_clipping, twin(2, 1), 0.01)


def check_precision(env: RankEnv) -> None:
    """bf16 forward on bf16 DTensors, fp32 parameters and gradients: near the fp32 run, and of the right dtypes."""
    mesh = env.mesh((1, 2, 2), NAMES)
    policy = hsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build(mesh, "sequence", mp_policy=policy)
    seen = []
    model.blocks[0].up.register_forward_pre_hook(lambda m, args: seen.append(m.weight))  # type: ignore[index,union-attr]
    mse(model, CASE.batch(0, env.rank // 2)).backward()
    assert isinstance(seen[0], DTensor) and seen[0].dtype is torch.bfloat16 and seen[0].placements == (Shard(0),)
    plain = CASE.model()
    for rank in range(2):
        mse(plain, CASE.batch(0, rank)).backward()
    for (name, grad), param in zip(full_grads(model).items(), plain.parameters(), strict=True):
        assert grad is not None and param.grad is not None
        assert grad.dtype is torch.float64, name
        torch.testing.assert_close(grad, param.grad / 2, rtol=0.1, atol=0.05)


def test_blocks_compute_in_the_param_dtype(pool4: Pool) -> None:
    pool4.run(check_precision)


def check_checkpoints(env: RankEnv, directory: str) -> None:
    mesh = env.mesh((1, 2, 2), NAMES)
    model = build(mesh, "sequence")
    optimizer = adamw(model.parameters())
    train(model, CASE, env.rank // 2, 2, optimizer)
    hsdp.checkpoint.save(directory, model, optimizer, step=2)
    want = full_params(model)
    told = hsdp.checkpoint.full_state_dict(model)
    if env.rank == 0:
        assert_same(told, want, 0, 0)
    again = build(mesh, "sequence")
    other = adamw(again.parameters())
    hsdp.checkpoint.load(directory, again, other)
    assert_same(full_params(again), want, 0, 0)
    losses = [train(m, CASE, env.rank // 2, 3, o, first_step=2) for m, o in ((model, optimizer), (again, other))]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-11, atol=1e-11)
    hsdp.checkpoint.load_full_state_dict(again, told if env.rank == 0 else {})
    assert_same(full_params(again), want, 0, 0)


def test_checkpoints_restore_parameters_of_two_meshes(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(check_checkpoints, str(tmp_path))


def check_whole(env: RankEnv) -> None:
    """Outside of an iteration, parameters are whole along hsdp's axes and stay DTensors along theirs."""
    mesh = env.mesh((1, 2, 2), NAMES)
    model = build(mesh, "sequence")
    before = full_params(model)
    with hsdp.full_params(model, writeback="local"), torch.no_grad():
        weight = model.blocks[0].up.weight  # type: ignore[index,union-attr]
        assert isinstance(weight, DTensor) and weight.placements == (Shard(0),)
        for param in model.parameters():
            param.mul_(2)
    assert_same(full_params(model), {name: 2 * value for name, value in before.items()})


def test_full_params_are_whole_along_hsdp_s_axes_only(pool4: Pool) -> None:
    pool4.run(check_whole)


def check_meta(env: RankEnv) -> None:
    mesh = env.mesh((1, 2, 2), NAMES)
    with torch.device("meta"):
        model = Net().double()
    parallelize(model, mesh["tp"], "tensor")
    for module in (*model.blocks, model):
        hsdp.fully_shard(module, mesh=mesh["shard"])
    hsdp.init_sharded(model)
    weights = full_params(model)
    assert all(0.01 < weights[f"blocks.{i}.up.weight"].std() < 1.0 for i in range(3))
    train(model, CASE, env.rank // 2, 1, sgd(model.parameters()))


def test_initialisation_on_meta(pool4: Pool) -> None:
    pool4.run(check_meta)


def check_errors(env: RankEnv) -> None:
    mesh = env.mesh((1, 2, 2), NAMES)
    model = CASE.model()
    parallelize(model, mesh["tp"], "tensor")
    with pytest.raises(ValueError, match=r"'up\.weight' is a DTensor on .* cannot be joined .* slices of one mesh"):
        hsdp.fully_shard(model.blocks[0], mesh=mesh["tp"])  # type: ignore[index]
    odd = nn.Linear(4, 6, dtype=torch.float64)
    parallelize_module(odd, mesh["tp"], ColwiseParallel())
    with pytest.raises(ValueError, match=r"'weight': its inner mesh cuts dim 0 into 2 parts, and 6 .* shard_placement_fn"):
        hsdp.fully_shard(odd, mesh=mesh["shard"])
    columns = lambda p: Shard(1 if p.ndim == 2 else 0)  # noqa: E731
    hsdp.fully_shard(odd, mesh=mesh["shard"], shard_placement_fn=columns, replicate_params=[odd.bias])
    x = torch.ones(2, 4, dtype=torch.float64)
    odd(x).square().sum().backward()
    assert odd.weight.grad.placements == (Shard(1), Shard(0))  # type: ignore[union-attr]


def test_errors_name_parameter_and_remedy(pool4: Pool) -> None:
    pool4.run(check_errors)


def test_replicas_shards_and_tensor_parallel_ranks_train_together() -> None:
    """2 replicas x 2 shards x 2 tensor-parallel ranks."""
    with Pool(8, group_timeout=60.0) as pool:
        pool.run(check_training, (2, 2, 2), "sequence", twin(4, 2), {}, timeout=120.0)
