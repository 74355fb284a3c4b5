"""`CommPolicy(reduction="tree")`: the same bits of gradients, norms and weights on every split of as many data ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

import hsdp
import hsdp.checkpoint
import hsdp.comm.tree
from hsdp.comm.tree import fold
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_rest, mesh_id
from tests.support.share import FULL
from tests.support.twin import full_grads

TREE = hsdp.CommPolicy(reduction="tree")
BF16 = torch.bfloat16
PRECISIONS = {
    "fp32": hsdp.MixedPrecisionPolicy(),
    "bf16 with fp32 sums": hsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "bf16": hsdp.MixedPrecisionPolicy(param_dtype=BF16),
}
SHAPES: dict[int, list[tuple[int, ...]]] = {2: [(1, 2), (2, 1)], 4: [(1, 4), (2, 2), (4, 1)], 6: [(1, 6), (3, 2), (6, 1)]}
SHAPES[8] = [(1, 8), (2, 4), (8, 1)]


class Net(nn.Module):
    """Uneven rows, a large weight, one that only some ranks use, one that none does, and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24)) for _ in range(2))
        self.uneven = nn.Linear(24, 11)
        self.sometimes = nn.Linear(24, 11, bias=False)
        self.never = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        for block in self.blocks:
            x = x + block(self.norm(x))
        y = self.uneven(x)
        return y + self.sometimes(x) if extra else y


def build(mesh: DeviceMesh, policy: hsdp.CommPolicy = TREE, storage: torch.dtype = torch.float32, **options: Any) -> Any:
    """The net, sharded; the same on every rank and mesh."""
    torch.manual_seed(0)
    net: Any = Net().to(storage)
    for block in net.blocks:
        hsdp.fully_shard(block, mesh=mesh, comm_policy=policy, **options)
    replicated = [net.norm.weight, net.norm.bias]
    return hsdp.fully_shard(net, mesh=mesh, comm_policy=policy, replicate_params=replicated, **options)


def backward(net: Any, rank: int, step: int, micro: int = 0) -> None:
    """One backward of a data rank's own batch, whose gradients are of very different sizes."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    x, y = (torch.randn(6, size, generator=generator) for size in (24, 11))
    loss = F.mse_loss(net(x, extra=(rank + step) % 3 == 0).float(), y)
    (loss * 10.0 ** ((rank * 7 + step) % 4 - 2)).backward()


def bits(values: dict[str, Tensor | None]) -> dict[str, str]:
    """A digest of each tensor's bits."""
    return {
        name: "none"
        if value is None
        else hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in values.items()
    }


def train(net: Any, rank: int, steps: range, optimizer: Any, micro_batches: int = 1) -> list[Any]:
    """What each step shows: digests of gradients, the norm before clipping; the weights' digests at the end."""
    seen: list[Any] = []
    for step in steps:
        for micro in range(micro_batches):
            with net.accumulate(last=micro == micro_batches - 1):
                backward(net, rank, step, micro)
        seen.append(bits(full_grads(net)))
        seen.append(hsdp.clip_grad_norm_(net, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    check_rest(net)
    seen.append(bits({name: value.full_tensor() for name, value in net.state_dict().items()}))
    return seen


def adamw(net: Any) -> Any:
    """As jobs have it, on plain local tensors."""
    return hsdp.optim.local(torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1, foreach=True))


def same(runs: dict[Any, list[Any]]) -> None:
    """All runs saw the same; the first difference is told."""
    (first, expected), *others = runs.items()
    for shape, seen in others:
        assert len(seen) == len(expected)
        for at, (mine, theirs) in enumerate(zip(seen, expected, strict=True)):
            names = [name for name in mine if mine[name] != theirs[name]] if isinstance(mine, dict) else [mine, theirs]
            assert mine == theirs, f"{shape} and {first} differ at entry {at}: {names}"


def check_training(
    env: RankEnv,
    precision: str,
    policy: hsdp.CommPolicy,
    steps: int,
    micro_batches: int = 1,
    storage: torch.dtype = torch.float32,
) -> None:
    """On every shape of as many ranks the same bits in every step."""
    runs: dict[Any, list[Any]] = {}
    for shape in SHAPES[env.world_size]:
        net = build(env.mesh(shape), policy, storage, mp_policy=PRECISIONS[precision])
        runs[shape] = train(net, env.rank, range(steps), adamw(net), micro_batches)
    same(runs)


STEPS = 20 if FULL else 2
"""A sum in another order shows in the first."""


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_give_the_same_bits_on_every_split_of_4_ranks(pool4: Pool, precision: str) -> None:
    pool4.run(check_training, precision, TREE, STEPS)


@pytest.fixture(scope="module")
def pool8() -> Iterator[Pool]:
    """Eight ranks."""
    with Pool(8, group_timeout=60.0) as pool:
        yield pool


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_give_the_same_bits_on_every_split_of_8_ranks(pool8: Pool, precision: str) -> None:
    pool8.run(check_training, precision, TREE, STEPS, timeout=240.0)


def test_a_number_of_ranks_that_is_no_power_of_two() -> None:
    with Pool(6, group_timeout=60.0) as pool:
        pool.run(check_training, "fp32", TREE, 3, timeout=120.0)


@pytest.mark.parametrize("fusion", ["packed", "direct"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_path_of_parameters_gives_the_same_bits(pool4: Pool, precision: str, fusion: Any) -> None:
    pool4.run(check_training, precision, replace(TREE, fusion=fusion), 2)


@pytest.mark.parametrize("accumulate", ["local", "reduce_scatter"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_accumulation_gives_the_same_bits(pool4: Pool, precision: str, accumulate: Any) -> None:
    pool4.run(check_training, precision, replace(TREE, accumulate=accumulate), 2, 3)


@pytest.mark.parametrize("precision", ["bf16 with fp32 sums", "bf16"])
def test_weights_stored_in_bf16_have_the_same_bits(pool4: Pool, precision: str) -> None:
    """With AdamW: other optimizers use a kernel of the CPU that rounds the last elements of a tensor otherwise."""
    pool4.run(check_training, precision, TREE, 5, 2, BF16)


def test_buckets_give_the_same_bits(pool4: Pool) -> None:
    policy = replace(TREE, all_reduce_bucket_bytes=1 << 20, reduce_scatter_bucket_bytes=1 << 16)
    pool4.run(check_training, "bf16", policy, 2, 3)


def _unlike_any(env: RankEnv) -> None:
    """What these tests compare would be seen: sums in the order of the backend differ from mesh to mesh."""
    check_training(env, "fp32", hsdp.CommPolicy(), 1)


def test_the_order_of_the_backend_depends_on_the_mesh(pool4: Pool) -> None:
    assert all("differ at entry" in one.message for one in pool4.run_raw(_unlike_any))


# -- the order itself --------------------------------------------------------------------------------------------------


def tree_sum(values: list[Tensor]) -> Tensor:
    """The tree as its definition has it: level by level, neighbours."""
    while len(values) > 1:
        pairs = [values[at : at + 2] for at in range(0, len(values), 2)]
        values = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


def folded(rows: Tensor) -> Tensor:
    """`fold` of a copy."""
    out = torch.empty_like(rows[0])
    if len(rows) == 1:
        return rows[0].clone()
    fold(rows.clone(), out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("ranks", range(2, 18))
def test_a_fold_is_the_tree_and_splits_at_shards(ranks: int, dtype: torch.dtype) -> None:
    rows = (torch.randn(ranks, 301) * 10.0 ** torch.randint(-3, 4, (ranks, 1))).to(dtype)
    expected = tree_sum(list(rows))
    assert torch.equal(folded(rows), expected)
    for shards in (1, 2, 4, 8, 16):
        if ranks % shards == 0:
            replicas = torch.stack([folded(part) for part in rows.split(shards)])
            assert torch.equal(folded(replicas), expected)
    aliased = rows.clone()
    fold(aliased, aliased[0])
    assert torch.equal(aliased[0], expected)


def check_order(env: RankEnv, shape: tuple[int, ...], divide: float) -> None:
    """Gradients are the tree of what each rank's backward alone gives, divided once, at its root."""
    torch.manual_seed(0)
    plain = Net()
    alone: dict[str, list[Tensor]] = {name: [] for name, _ in plain.named_parameters()}
    for rank in range(env.world_size):
        plain.zero_grad()
        backward(plain, rank, step=0)
        for name, param in plain.named_parameters():
            alone[name].append(torch.zeros_like(param) if param.grad is None else param.grad.clone())
    net = build(env.mesh(shape))
    net.set_gradient_divide_factor(divide, recurse=True)
    backward(net, env.rank, step=0)
    for name, grad in full_grads(net).items():
        if name.startswith("never"):
            assert grad is None
        else:
            assert grad is not None
            assert torch.equal(grad, tree_sum(alone[name]) * (1 / divide)), name


@pytest.mark.parametrize("shape", SHAPES[4], ids=mesh_id)
def test_gradients_are_the_tree_of_the_ranks_own(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_order, shape, 3.0)


def check_norms(env: RankEnv) -> None:
    """The norm of gradients of many sizes, by the bits of the exact one, whatever the mesh."""
    nets = [build(env.mesh(shape)) for shape in SHAPES[env.world_size]]
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.float64):
        shapes = [(name, param.shape) for name, param in Net().named_parameters()]
        whole = {name: torch.randn(shape, generator=generator) * 0.3**at for at, (name, shape) in enumerate(shapes)}
        flat = torch.cat([value.double().flatten() for value in whole.values()])
        for net in nets:
            for name, param in net.to(dtype).named_parameters():
                grad = whole[name].to(dtype)
                param.grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        for order in (1.0, 2.0, float("inf")):
            norms = [hsdp.clip_grad_norm_(net, float("inf"), order) for net in nets]
            assert all(torch.equal(norm, norms[0]) for norm in norms), f"norms of order {order} differ: {norms}"
            torch.testing.assert_close(norms[0], torch.linalg.vector_norm(flat, order).to(dtype))


def test_the_norm_is_the_same_on_every_mesh(pool4: Pool) -> None:
    pool4.run(check_norms)


# -- as every other reduction ------------------------------------------------------------------------------------------


def _large_operands(env: RankEnv) -> None:
    """Tensors that travel from where they are, with ends that do not divide, beside small ones of two dtypes."""
    model: Any = hsdp.fully_shard(nn.Linear(2, 2), mesh=env.mesh((env.world_size, 1)), comm_policy=TREE)
    unit = model._units()[0]
    sizes = [(1 << 19) + 77, 5, 1 << 20, 1, (1 << 18) + 3]
    dtypes = [torch.float32, torch.float32, BF16, BF16, torch.float32]
    generator = torch.Generator().manual_seed(1)
    of_ranks = [
        [torch.randn(size, generator=generator).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
        for _ in range(env.world_size)
    ]
    mine = [tensor.clone() for tensor in of_ranks[env.rank]]
    landed: list[str] = []
    work = unit.settings.replica_reduce.start(unit, 1, mine, unit.replicate_comm, lambda: landed.append("yes"))
    assert not work.done(), "no poll may start the second phase"
    work.wait()
    assert work.done() and landed == ["yes"]
    for at, tensor in enumerate(mine):
        assert torch.equal(tensor, tree_sum([values[at] for values in of_ranks]))


def test_tensors_of_any_size_are_summed_in_place(pool4: Pool) -> None:
    pool4.run(_large_operands)


# -- resumed on another shape ------------------------------------------------------------------------------------------


def check_resume(env: RankEnv, directory: str, precision: str) -> None:
    """A run that changes its shape after 4 steps, and again after 8, ends as one that never does."""
    shapes = SHAPES[env.world_size]
    made = partial(build, mp_policy=PRECISIONS[precision])
    straight = made(env.mesh(shapes[0]))
    expected = train(straight, env.rank, range(12), adamw(straight))
    seen: list[Any] = []
    for turn, shape in enumerate(shapes):
        net = made(env.mesh(shape))
        for param in net.parameters():
            param.detach().mul_(0 if turn else 1)  # what is not loaded shows
        optimizer = adamw(net)
        if turn:
            assert hsdp.checkpoint.resume(directory, net, optimizer) is not None
        seen += train(net, env.rank, range(4 * turn, 4 * turn + 4), optimizer)[: None if turn == 2 else -1]
        hsdp.checkpoint.save(directory, net, optimizer, step=4 * turn + 4)
    same({"straight": expected, "resumed": seen})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_resumed_on_another_shape_continues_bit_for_bit(pool4: Pool, tmp_path: Path, precision: str) -> None:
    pool4.run(check_resume, str(tmp_path), precision)


# -- what cannot be ----------------------------------------------------------------------------------------------------


def _refusals() -> Iterator[tuple[Callable[[], object], str]]:
    from torch.distributed.device_mesh import init_device_mesh

    def sharded(mesh: DeviceMesh) -> Any:
        return hsdp.fully_shard(nn.Linear(6, 6), mesh=mesh, comm_policy=TREE)

    odd = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
    yield lambda: sharded(odd), "shard ranks must be a power of two, and it is 3"
    turned = init_device_mesh("cpu", (2, 3), mesh_dim_names=("shard", "replicate"))
    yield lambda: sharded(turned), r"in another order: \[0, 3, 1, 4, 2, 5\]"
    model = sharded(init_device_mesh("cpu", (3, 2), mesh_dim_names=("replicate", "shard")))
    yield lambda: model.set_replica_reduce(hsdp.CompressedAllReduce()), "set_replica_reduce: unit 'Linear' has CommPolicy"
    custom = hsdp.CompressedReduceScatter()
    yield lambda: model.set_custom_reduce_scatter(custom), "set_custom_reduce_scatter: unit 'Linear' has CommPolicy"
    model.weight.grad = torch.zeros_like(model.weight)
    yield lambda: hsdp.clip_grad_norm_(model, 1.0, 3.0), "norm_type=3.0"
    yield lambda: hsdp.plan(nn.Linear(6, 6), mesh=(2, 3), tokens_per_rank=1, comm_policy=TREE), "plan: unit .* power of two"


def test_what_cannot_have_the_order_is_refused_by_name() -> None:
    with fake_world(6):
        for call, message in _refusals():
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(ValueError, match=r"CommPolicy\(reduction='ring'\): expected 'any' or 'tree'"):
        hsdp.CommPolicy(reduction="ring")  # type: ignore[arg-type]


def test_advice_of_the_planner_keeps_to_meshes_that_fit() -> None:
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
    plan = hsdp.plan(model, mesh=(3, 4), tokens_per_rank=8, comm_policy=TREE, memory=1)
    for advice in plan.advice:
        plan.changed(**advice.options)
