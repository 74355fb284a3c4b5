"""Tensor and sequence parallelism inside of hsdp: parameters that are DTensors before they are sharded."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import hsdp
import hsdp.checkpoint
from hsdp.checkpoint.contents import state_staging
from hsdp.params.tensor_parallel import placements_tell
from tests.support.models import Case, mse
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, mesh_id
from tests.support.share import FULL
from tests.support.twin import (
    Twin,
    adamw,
    assert_close_to_twin,
    assert_same,
    full,
    full_grads,
    full_params,
    sgd,
    train,
    twin_of,
    whole,
)

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
    full_state = hsdp.checkpoint.full_state_dict(model)
    if env.rank == 0:
        assert_same(full_state, want, 0, 0)
    again = build(mesh, "sequence")
    other = adamw(again.parameters())
    hsdp.checkpoint.load(directory, again, other)
    assert_same(full_params(again), want, 0, 0)
    losses = [train(m, CASE, env.rank // 2, 3, o, first_step=2) for m, o in ((model, optimizer), (again, other))]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-11, atol=1e-11)
    hsdp.checkpoint.load_full_state_dict(again, full_state if env.rank == 0 else {})
    assert_same(full_params(again), want, 0, 0)


def test_checkpoints_restore_parameters_of_two_meshes(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(check_checkpoints, str(tmp_path))


def check_factored_state(env: RankEnv) -> None:
    model = build(env.mesh((1, 2, 2), NAMES), "tensor")
    weight = model.blocks[0].up.weight  # type: ignore[index,union-attr]
    assert isinstance(weight.placements[-2], _StridedShard) and weight.placements[-1] == Shard(0), weight.placements
    column = state_staging(weight, (1, DIM), torch.float64, None, False, torch.device("cpu"))
    assert isinstance(column, DTensor) and all(p.is_replicate() for p in column.placements), "its one row is no shard"
    assert column.to_local().shape == (1, DIM)


def test_factored_states_of_dims_that_both_meshes_cut_are_whole(pool4: Pool) -> None:
    pool4.run(check_factored_state)


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


def check_draws(env: RankEnv, meta: bool) -> None:
    """Blocks that tensor parallelism cuts are not alike, and what its ranks all hold is: values are one process's."""
    mesh = env.mesh((1, 2, 2), NAMES)
    with torch.device("meta" if meta else "cpu"):
        model = Net().double()
    parallelize(model, mesh["tp"], "tensor")
    for module in (*model.blocks, model):
        hsdp.fully_shard(module, mesh=mesh["shard"])

    def fn(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            with torch.no_grad():
                nn.init.trunc_normal_(param) if param.ndim > 1 else param.copy_(torch.randn_like(param))

    torch.manual_seed(env.rank + 1 if meta else 1)
    hsdp.init_sharded(model, fn) if meta else hsdp.gathered_apply(model, fn)
    plain = Net().double()
    torch.manual_seed(1)
    assert_same(full_params(model), full_params(plain.apply(fn)), 0, 0)


@pytest.mark.parametrize("meta", [True, False], ids=["init_sharded", "gathered_apply"])
def test_random_numbers_are_those_of_one_process(pool4: Pool, meta: bool) -> None:
    pool4.run(check_draws, meta)


def check_errors(env: RankEnv) -> None:
    mesh = env.mesh((1, 2, 2), NAMES)
    model = CASE.model()
    parallelize(model, mesh["tp"], "tensor")
    with pytest.raises(ValueError, match=r"'up\.weight' is a DTensor on .* cannot be joined .* slices of one mesh"):
        hsdp.fully_shard(model.blocks[0], mesh=mesh["tp"])  # type: ignore[index]


def test_errors_name_parameter_and_remedy(pool4: Pool) -> None:
    pool4.run(check_errors)


# -- rows that neither the tensor-parallel nor the shard ranks divide ------------------------------------------------


class Uneven(nn.Module):
    """Layers with few and odd rows: 7 are cut into (2, 2) and (2, 1) by 2 x 2 ranks, 3 into (1, 1) and (1, -)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(DIM, rows) for rows in UNEVEN)
        self.down = nn.ModuleList(nn.Linear(rows, DIM, bias=False) for rows in UNEVEN)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x


UNEVEN = (2, 3, 5, 6, 7, 9)
UNEVEN_CASE = Case("uneven", Uneven, draw, mse, torch.float64)


def build_uneven(mesh: DeviceMesh, dim: int, library: Any = hsdp) -> nn.Module:
    """Sharded on dim 0, which ColwiseParallel has cut already, or on -1, which RowwiseParallel has."""
    model = UNEVEN_CASE.model()
    # Between the two stay DTensors, as a plain tensor would not tell how uneven the others' are.
    parallelize_module(model, mesh["tp"], {"up.*": ColwiseParallel(use_local_output=False), "down.*": RowwiseParallel()})
    data = mesh["shard"] if mesh.size(0) == 1 else mesh["replicate", "shard"]
    place = lambda param: Shard(dim % param.ndim)  # noqa: E731
    for i in (1, 3):
        library.fully_shard([model.up[i], model.down[i]], mesh=data, shard_placement_fn=place)  # type: ignore[index]
    return library.fully_shard(model, mesh=data, shard_placement_fn=place)  # type: ignore[no-any-return]


@cache
def uneven_twin(world: int) -> Twin:
    return twin_of(UNEVEN_CASE, world, 3, sgd)


def check_uneven(env: RankEnv, shape: tuple[int, int, int], dim: int, twin: Twin) -> None:
    """Training, gradients and clipping are the twin's, and `full_params` shows and writes back what is there."""
    mesh, data_rank = env.mesh(shape, NAMES), env.rank // shape[2]
    model = build_uneven(mesh, dim)
    losses = train(model, UNEVEN_CASE, data_rank, 3, sgd(model.parameters()))
    torch.testing.assert_close(losses, twin.losses[:, data_rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, twin, grads=True)
    check_rest(model)
    total = torch.stack([g.norm() for g in twin.grads.values() if g is not None]).norm()
    torch.testing.assert_close(hsdp.clip_grad_norm_(model, 0.01), total, rtol=1e-11, atol=1e-11)
    scale = 0.01 / (total + 1e-6)
    assert_same(full_grads(model), {name: None if g is None else g * scale for name, g in twin.grads.items()})
    before = full_params(model)
    with hsdp.full_params(model, writeback="local"), torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    assert_same(full_params(model), {name: 2 * value for name, value in before.items()}, 0, 0)


@pytest.mark.parametrize("dim", [0, -1])
def test_uneven_rows_train_as_the_twin(pool4: Pool, dim: int) -> None:
    pool4.run(check_uneven, (1, 2, 2), dim, uneven_twin(2))


def check_uneven_as_fsdp2(env: RankEnv) -> None:
    mesh = env.mesh((1, 2, 2), NAMES)
    ours, theirs = build_uneven(mesh, 0), build_uneven(mesh, 0, fsdp)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(a, DTensor) and isinstance(b, DTensor)
        assert a.placements == b.placements and a.__create_chunk_list__() == b.__create_chunk_list__(), name
        torch.testing.assert_close(a.to_local(), b.to_local(), rtol=0, atol=0)


def test_uneven_rows_are_placed_as_fsdp2_places_them(pool4: Pool) -> None:
    pool4.run(check_uneven_as_fsdp2)


def check_uneven_checkpoints(env: RankEnv, dim: int, directory: str) -> None:
    """From 2 x 2 ranks onto 4 shard ranks and back, by hsdp and by torch; all values and optimizer states arrive."""
    meshes = [env.mesh(shape, NAMES) for shape in ((1, 2, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4))]
    model = build_uneven(meshes[0], dim)
    optimizer = adamw(model.parameters())
    train(model, UNEVEN_CASE, env.rank // 2, 2, optimizer)
    want, moments = full_params(model), full_moments(model, optimizer)
    for number, mesh in enumerate(meshes[1:]):
        path = f"{directory}/{number}"
        hsdp.checkpoint.save(path, model, optimizer, step=number)
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path}-torch")
        model = build_uneven(mesh, dim)
        optimizer = adamw(model.parameters())
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=f"{path}-torch")
        assert_same(full_params(model), want, 0, 0)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        hsdp.checkpoint.load(path, model, optimizer)
        assert_same(full_params(model), want, 0, 0)
        assert_same(full_moments(model, optimizer), moments, 0, 0)
    full_state = hsdp.checkpoint.full_state_dict(model)
    if env.rank == 0:
        assert_same(full_state, want, 0, 0)
    again = build_uneven(meshes[0], dim)
    hsdp.checkpoint.load_full_state_dict(again, full_state if env.rank == 0 else {})
    assert_same(full_params(again), want, 0, 0)


def full_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return whole({name: optimizer.state[param]["exp_avg"] for name, param in model.named_parameters()})


@pytest.mark.parametrize("dim", [0, -1])
def test_uneven_rows_are_saved_and_loaded(pool4: Pool, tmp_path: Path, dim: int) -> None:
    pool4.run(check_uneven_checkpoints, dim, str(tmp_path))


def check_least_padding(env: RankEnv) -> None:
    """Tensor-parallel ranks with 3 rows and with 2 choose one dim, as their DTensor is one."""
    mesh = env.mesh((1, 2, 2), NAMES)
    layer = nn.Linear(DIM, 5, bias=False, dtype=torch.float64)
    want = layer.weight.detach().clone()
    parallelize_module(layer, mesh["tp"], ColwiseParallel(use_local_output=False))
    hsdp.fully_shard(layer, mesh=mesh["shard"], shard_placement_fn=hsdp.least_padding)
    assert layer.weight.placements == (Shard(1), Shard(0))
    torch.testing.assert_close(full(layer.weight), want, rtol=0, atol=0)


def test_the_least_padding_is_chosen_alike_on_all_ranks(pool4: Pool) -> None:
    pool4.run(check_least_padding)


def parts_of(rows: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """What the ranks of a mesh of these sizes get when its axes cut one after the other; empty ones too."""
    if sizes:
        chunks = list(rows.chunk(sizes[0]))
        chunks += [rows[:0]] * (sizes[0] - len(chunks))
        return [part for chunk in chunks for part in parts_of(chunk, sizes[1:])]
    return [rows]


def told_rightly(rows: int, inner: tuple[int, ...], shards: int) -> bool:
    """DTensor reads off the placements how many rows each rank holds, and from which on."""
    placements = (_StridedShard(0, split_factor=math.prod(inner)), *(Shard(0) for _ in inner))
    for at, block in zip(product(*map(range, inner)), parts_of(torch.arange(rows), inner), strict=True):
        for rank, held in enumerate(parts_of(block, (shards,))):
            mesh, coordinate = (shards, *inner), [rank, *at]
            (size,), (offset,) = _compute_local_shape_and_global_offset((rows,), mesh, coordinate, placements)
            if size != len(held) or (size and offset != held[0]):
                return False
    return True


def test_uneven_rows_are_taken_exactly_where_dtensor_tells_them() -> None:
    refused = 0
    for rows, inner, shards in product(range(1, 30), (1, 2, 3, 4, 5), range(1, 6)):
        right = told_rightly(rows, (inner,), shards)
        assert placements_tell(rows, (inner,), shards) is right, (rows, inner, shards)
        refused += not right
    assert refused > 0 and not told_rightly(7, (2,), 3)
    for rows, inner, shards in product(range(1, 30), ((2, 2), (2, 3)), range(1, 5)):  # of two axes only what is simple
        assert placements_tell(rows, inner, shards) <= told_rightly(rows, inner, shards), (rows, inner, shards)
    assert placements_tell(12, (2, 2), 2) and not told_rightly(10, (2, 2), 2)


def check_untold(env: RankEnv) -> None:
    mesh = env.mesh((1, 4, 2), NAMES)
    odd = nn.Linear(4, 9, bias=False, dtype=torch.float64)
    parallelize_module(odd, mesh["tp"], ColwiseParallel())
    with pytest.raises(ValueError, match=r"'weight': its inner mesh cuts dim 0 of size 9 .* shard_placement_fn"):
        hsdp.fully_shard(odd, mesh=mesh["shard"])
    hsdp.fully_shard(odd, mesh=mesh["shard"], shard_placement_fn=lambda p: Shard(1))
    odd(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    assert odd.weight.grad.placements == (Shard(1), Shard(0))  # type: ignore[union-attr]


def test_replicas_shards_and_tensor_parallel_ranks_train_together() -> None:
    """2 replicas x 2 shards x 2 tensor-parallel ranks."""
    with Pool(8, group_timeout=60.0) as pool:
        pool.run(check_training, (2, 2, 2), "sequence", twin(4, 2), {}, timeout=120.0)
        if FULL:
            pool.run(check_uneven, (2, 2, 2), 0, uneven_twin(4), timeout=120.0)
        pool.run(check_untold, timeout=120.0)
