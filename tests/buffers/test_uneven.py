"""Parameters that torch.chunk cuts unevenly travel without padding: few experts on many ranks, under every option."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import hsdp
import hsdp.checkpoint
from hsdp import CommPolicy, MixedPrecisionPolicy
from hsdp.buffers.layout import ParamSpec, Thresholds, lay_out
from hsdp.comm import backends
from hsdp.comm.mesh import MeshAxes
from tests.support import device as emulator
from tests.support.models import Case, mse
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded, mesh_id, pool_for
from tests.support.twin import (
    Twin,
    adamw,
    assert_close_to_twin,
    assert_same,
    full_grads,
    full_params,
    sgd,
    train,
    twin_of,
)

DIM = 8


class Experts(nn.Module):
    """Soft mixture: every expert sees every token, weighted by a router; some batches use `spare`, none `unused`."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, DIM) / DIM)
        self.up = nn.Parameter(torch.randn(experts, DIM, 16) / DIM)
        self.down = nn.Parameter(torch.randn(experts, 16, DIM) / 16)
        self.bias = nn.Parameter(torch.zeros(experts, 3))
        self.spare = nn.Parameter(torch.randn(experts, 2, DIM) / DIM)
        self.unused = nn.Parameter(torch.randn(experts, 2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ self.router.T).softmax(-1)
        hidden = torch.tanh(torch.einsum("nd,edh->enh", x, self.up))
        outputs = torch.einsum("enh,ehd->end", hidden, self.down) * self.bias.exp().mean(-1)[:, None, None]
        x = x + torch.einsum("end,ne->nd", outputs, weights)
        return x + self.spare.mean((0, 1)) if x.sum() > 0 else x


class Net(nn.Module):
    """Blocks of 1, 3 and 5 experts, which lie on 4 ranks as (1 0 0 0), (1 1 1 0) and (2 2 1 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(count) for count in (1, 3, 5))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 3, DIM, generator=generator, dtype=torch.float64)
    return x, y


CASE = Case("uneven experts", Net, draw, mse, torch.float64)
DIRECT = CommPolicy(fusion="direct")


@pytest.fixture(scope="module")
def pool3() -> Iterator[Pool]:
    with Pool(3) as pool:
        yield pool


@contextlib.contextmanager
def for_small_ones() -> Iterator[None]:
    """Padding is spared however small it is."""
    with patch.object(backends, "UNEVEN_BYTES", 1):
        yield


def build(env: RankEnv, shape: tuple[int, ...], model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = CASE.model() if model is None else model
    options = {"comm_policy": DIRECT} | options
    with for_small_ones():
        for module in (*model.blocks, model):  # type: ignore[misc,operator]
            hsdp.fully_shard(module, mesh=env.mesh(shape), **options)
    return model


def uneven_names(model: nn.Module) -> set[str]:
    """Of all parameters that travel so, with a number for each unit."""
    groups = [(at, group) for at, unit in enumerate(model._units()) for group in unit.dtype_groups]  # type: ignore[operator]
    found = [(at, *pair) for at, group in groups for pair in zip(group.params, group.layout.pieces, strict=True)]
    return {f"{at}.{param.fqn}" for at, param, piece in found if piece.uneven}


def twin(world: int, steps: int = 3, accumulate: int = 1) -> Twin:
    return twin_of(CASE, world, steps, sgd, accumulate)


def check_training(env: RankEnv, shape: tuple[int, ...], expected: Twin, options: dict[str, Any]) -> None:
    model = build(env, shape, **options)
    losses = train(model, CASE, env.rank, len(expected.losses), sgd(model.parameters()))
    assert bool(uneven_names(model)) == (shape[-1] > 1)
    torch.testing.assert_close(losses, expected.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, expected, grads=True)
    check_sharded(model)
    check_rest(model)


# -- layout -------------------------------------------------------------------------------------------------------------


SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
LIMITS = st.sampled_from([0, 64, 1024])


@given(st.lists(st.tuples(SHAPES, st.sampled_from([0, 0, 0, 1])), max_size=6), st.integers(1, 12), LIMITS, LIMITS, LIMITS)
@example([((3, 4), 0), ((4, 4), 0), ((3, 3), 0), ((0, 4), 0)], 4, 0, 0, 0)
def test_uneven_pieces(drawn: list[tuple[Any, int]], shards: int, gather: int, reduce: int, least: int) -> None:
    """They hold torch.chunk's rows in memory order; nothing large that is cut on dim 0 is padded much."""
    specs = [ParamSpec(shape, min(dim, len(shape) - 1)) for shape, dim in drawn]
    limits = Thresholds(gather, 4, reduce, 8)
    layout = lay_out(specs, shards, replace(limits, uneven_bytes=least))
    padded = lay_out(specs, shards, limits)
    assert not any(piece.uneven for piece in padded.pieces), "who does not ask for it gets none"
    for piece, other in zip(layout.pieces, padded.pieces, strict=True):
        rows, row = piece.spec.cut, piece.spec.numel // max(1, piece.spec.cut)
        extra = (shards * piece.chunk - rows) * row
        if not piece.uneven:
            assert replace(piece, offset=0, whole_offset=0) == replace(other, offset=0, whole_offset=0)
            large = piece.numel * 4 >= gather and piece.numel * 8 >= reduce and row * 4 % 16 == 0
            holders = -(-rows // piece.chunk) if piece.chunk else 0
            assert piece.spec.dim != 0 or not large or 64 * extra <= piece.spec.numel or extra * 4 < holders * least
            continue
        assert piece.direct_gather and piece.direct_reduce and not piece.even and extra > 0
        parts = torch.arange(piece.spec.numel).view(piece.spec.shape).chunk(shards)
        sizes = piece.sizes(shards)
        assert sizes == [part.numel() for part in parts] + [0] * (shards - len(parts))
        flat = torch.arange(piece.spec.numel).split(sizes)
        assert all(torch.equal(part.flatten(), own) for part, own in zip(parts, flat, strict=False))
        assert max(sizes) == piece.numel == sizes[0]
        assert piece.offset + piece.numel <= min(layout.reduce_packed_start, layout.gather_packed_start)
    starts = sorted((piece.offset, piece.offset + piece.numel) for piece in layout.pieces if piece.numel)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(starts))


# -- training -----------------------------------------------------------------------------------------------------------


MESHES = [(2,), (4,), (2, 2), (1, 2), (1, 4), (4, 1)]


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_training_equals_the_twin(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool = pool_for(request, shape)
    pool.run(check_training, shape, twin(pool.world_size), {})


@pytest.mark.parametrize("shape", [(3,), (1, 3)], ids=mesh_id)
def test_training_on_three_ranks_equals_the_twin(pool3: Pool, shape: tuple[int, ...]) -> None:
    pool3.run(check_training, shape, twin(3), {})


OPTIONS: dict[str, dict[str, Any]] = {
    "some packed": {"comm_policy": CommPolicy(direct_gather_bytes=256, direct_reduce_bytes=1024)},
    "buckets": {"comm_policy": replace(DIRECT, reduce_scatter_bucket_bytes=1 << 20, all_reduce_bucket_bytes=1 << 20)},
    "tree": {"comm_policy": replace(DIRECT, reduction="tree")},
    "kept whole": {"reshard_after_forward": False},
    "kept in parts": {"reshard_after_forward": 2},
    "no prefetch": {"comm_policy": replace(DIRECT, prefetch=0)},
    "cast": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)},
}


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_changes_the_numbers(request: pytest.FixtureRequest, name: str, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(check_training, shape, twin(4), OPTIONS[name])


# -- gradients ----------------------------------------------------------------------------------------------------------


HOWS: dict[str, Any] = {
    "every micro-batch": None,
    "no sync": lambda model, last: model.set_requires_grad_sync(last),
    "deferred": lambda model, last: model.set_requires_all_reduce(last),
}


def check_accumulation(env: RankEnv, shape: tuple[int, ...], how: str, policy: CommPolicy, expected: Twin) -> None:
    model = build(env, shape, comm_policy=policy)
    losses = train(model, CASE, env.rank, 2, sgd(model.parameters()), 3, before_micro=HOWS[how])
    torch.testing.assert_close(losses, expected.losses[:, env.rank], rtol=1e-11, atol=1e-11)
    assert_close_to_twin(model, expected, grads=True)
    check_rest(model)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
@pytest.mark.parametrize("how", HOWS)
def test_accumulated_gradients_equal_the_twins(pool4: Pool, how: str, shape: tuple[int, ...]) -> None:
    pool4.run(check_accumulation, shape, how, DIRECT, twin(4, 2, 3))


@pytest.mark.parametrize("policy", [replace(DIRECT, accumulate="local"), replace(DIRECT, reduction="tree")])
@pytest.mark.parametrize("how", ["no sync", "deferred"])
def test_accumulated_gradients_of_policies_equal_the_twins(pool4: Pool, how: str, policy: CommPolicy) -> None:
    pool4.run(check_accumulation, (2, 2), how, policy, twin(4, 2, 3))


def check_frozen(env: RankEnv, shape: tuple[int, ...]) -> None:
    """What gets no gradient is gathered; the layout of the others' gradients is one of its own."""
    plain, model = CASE.model(), CASE.model()
    for one in (plain, model):
        for name, param in one.named_parameters():
            param.requires_grad_("up" not in name)
    build(env, shape, model)
    assert len(uneven_names(model)) >= 6
    for block in model.blocks:  # type: ignore[union-attr]
        assert block.up.grad is None
    check_grads(model, plain, lambda one, rank: [_backward(one, rank)], env.rank, env.world_size)
    for one in (plain, model):
        for param in one.parameters():
            param.requires_grad_(True)
    check_grads(model, plain, lambda one, rank: [_backward(one, rank)], env.rank, env.world_size)
    check_rest(model)


def _backward(model: nn.Module, rank: int) -> Tensor:
    loss = mse(model, CASE.batch(0, rank))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_frozen_parameters_and_thawed_ones(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_frozen, shape)


def check_low_precision(env: RankEnv, shape: tuple[int, ...], reduce: torch.dtype, tolerance: float) -> None:
    """As with padding, but for the order of sums; fp16 is scaled before its sum and after it."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce)
    found = []
    for fusion in ("direct", "packed"):
        model = build(env, shape, CASE.model().float(), mp_policy=policy, comm_policy=CommPolicy(fusion=fusion))
        assert bool(uneven_names(model)) == (fusion == "direct")
        x, y = (tensor.float() for tensor in CASE.batch(0, env.rank))
        (model(x).float() - y).square().mean().backward()
        found.append((full_params(model), full_grads(model)))
    assert_same(found[0][0], found[1][0], 0, 0)
    assert_same(found[0][1], found[1][1], tolerance, tolerance / 10)


LOW = [(torch.float32, 1e-6), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)]


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
@pytest.mark.parametrize(("reduce", "tolerance"), LOW, ids=str)
def test_low_precision(pool4: Pool, shape: tuple[int, ...], reduce: torch.dtype, tolerance: float) -> None:
    pool4.run(check_low_precision, shape, reduce, tolerance)


def check_steps(env: RankEnv, shape: tuple[int, ...], over_replicas: bool, expected: Twin) -> None:
    model = build(env, shape)
    optimizer = hsdp.optim.local(adamw(model.parameters()), over_replicas=over_replicas)
    train(model, CASE, env.rank, len(expected.losses), optimizer)
    assert_close_to_twin(model, expected)
    optimizer.zero_grad()
    check_rest(model)


@pytest.mark.parametrize("over_replicas", [False, True])
def test_optimizers_on_local_tensors(pool4: Pool, over_replicas: bool) -> None:
    pool4.run(check_steps, (2, 2), over_replicas, twin_of(CASE, 4, 3, adamw))


def check_offload(env: RankEnv, shape: tuple[int, ...], kind: str, directory: str, expected: Twin) -> None:
    """The mesh's device is told apart from the shards', so that everything is copied as with one."""
    policy = hsdp.CPUOffloadPolicy() if kind == "cpu" else hsdp.DiskOffloadPolicy(directory)
    with patch.object(MeshAxes, "device", property(lambda axes: torch.device("cpu", 0))):
        check_training(env, shape, expected, {"offload_policy": policy})


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_offloaded_shards(pool4: Pool, kind: str, tmp_path: Any) -> None:
    pool4.run(check_offload, (2, 2), kind, str(tmp_path), twin(4))


def check_lists(env: RankEnv, shape: tuple[int, ...], mode: str, options: dict[str, Any], expected: Twin) -> None:
    """On streams, by lists of tensors of different sizes, as on NCCL."""
    lists = frozenset({"emulccl"})
    with (
        patch.object(backends, "UNEVEN_LISTS", lists),
        patch.object(backends, "UNEVEN", lists),
        patch.object(backends, "MULTIPLIES", lists),
        emulator.watched(mode, 5),
    ):
        model = build(env, shape, CASE.model().to(env.device), **options)
        assert uneven_names(model)
        losses = train(model, CASE, env.rank, len(expected.losses), sgd(model.parameters()), device=str(env.device))
        torch.testing.assert_close(losses, expected.losses[:, env.rank], rtol=1e-11, atol=1e-11)
        assert_close_to_twin(model, expected, grads=True)
        check_rest(model)


LISTS: dict[str, tuple[tuple[int, ...], str, dict[str, Any]]] = {
    "1-D": ((4,), "comm", {}),
    "2-D": ((2, 2), "all", {}),
    "slow": ((4,), "slow comm", {"comm_policy": replace(DIRECT, prefetch=2, max_inflight_reduce_scatters=2)}),
    "tree": ((2, 2), "side", {"comm_policy": replace(DIRECT, reduction="tree")}),
    "kept in parts": ((4,), "comm", {"reshard_after_forward": 2}),
    "offloaded": ((2, 2), "compute", {"offload_policy": hsdp.CPUOffloadPolicy()}),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_on_a_device(device4: Pool, name: str) -> None:
    shape, mode, options = LISTS[name]
    device4.run(check_lists, shape, mode, options, twin(4))


# -- what stands in the way ---------------------------------------------------------------------------------------------


class Gather:
    """A user's all-gather; it may be asked for equal parts only."""

    calls = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class Scatter:
    """A user's reduce-scatter."""

    calls = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def check_custom(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Users' collectives get all of a unit, padded; without them it travels unevenly again."""
    plain, model = CASE.model(), build(env, shape)
    before, params = uneven_names(model), [id(param) for param in model.parameters()]
    gather, scatter = Gather(), Scatter()
    run = lambda one, rank: [_backward(one, rank)]  # noqa: E731
    check_grads(model, plain, run, env.rank, env.world_size)
    with for_small_ones():
        for custom in ((gather, scatter), (gather, None), (None, scatter), (None, None)):
            for module in (*model.blocks, model):  # type: ignore[misc]
                module.set_custom_all_gather(custom[0])
                module.set_custom_reduce_scatter(custom[1])
            assert uneven_names(model) == (before if custom == (None, None) else set())
            calls = gather.calls, scatter.calls
            check_grads(model, plain, run, env.rank, env.world_size)
            assert (gather.calls > calls[0], scatter.calls > calls[1]) == (custom[0] is not None, custom[1] is not None)
    assert [id(param) for param in model.parameters()] == params
    check_rest(model)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_users_collectives_get_equal_parts(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_custom, shape)


def disagree(env: RankEnv, where: str) -> None:
    """One rank pads what the others do not."""
    model = CASE.model()
    policy = replace(DIRECT, fusion="packed") if env.rank == 1 else DIRECT
    sizes = (1 << 40) if env.rank == 1 else 1
    with patch.object(backends, "UNEVEN_BYTES", sizes):
        hsdp.fully_shard(model, mesh=env.mesh((4,)), comm_policy=policy if where == "policy" else DIRECT)
    _backward(model, env.rank)


@pytest.mark.parametrize("where", ["policy", "size"])
def test_ranks_that_disagree_are_told(pool4: Pool, where: str) -> None:
    found = pool4.run_raw(disagree, where, timeout=60.0)
    assert {one.error for one in found} <= {"DivergenceError", "ValueError"}, found
    assert all(one.error for one in found), found


# -- side doors ---------------------------------------------------------------------------------------------------------


def check_doors(env: RankEnv, directory: str, expected: Twin) -> None:
    """Clipping, whole parameters, checkpoints of either kind of mesh, and initialisation."""
    model = build(env, (4,))
    mse(model, CASE.batch(0, env.rank)).backward()
    norm = hsdp.clip_grad_norm_(model, 1e9)
    total = torch.stack([g.norm() for g in expected.grads.values() if g is not None]).norm()
    torch.testing.assert_close(norm, total, rtol=1e-11, atol=1e-11)
    optimizer = adamw(model.parameters())
    optimizer.step()
    want = full_params(model)
    with hsdp.full_params(model, writeback="local"), torch.no_grad():
        assert_same(dict(model.named_parameters()), want, 0, 0)
        for param in model.parameters():
            param.mul_(2)
    doubled = {name: 2 * value for name, value in want.items()}
    assert_same(full_params(model), doubled, 0, 0)
    hsdp.checkpoint.save(directory, model, optimizer, step=1)
    full_state = hsdp.checkpoint.full_state_dict(model)
    padded = build(env, (2, 2), CASE.model(1), comm_policy=CommPolicy(fusion="packed"))
    its = adamw(padded.parameters())
    hsdp.checkpoint.load(directory, padded, its)
    assert_same(full_params(padded), doubled, 0, 0)
    hsdp.checkpoint.save(directory, padded, its, step=2)
    again = build(env, (4,), CASE.model(2))
    hsdp.checkpoint.load(directory, again, adamw(again.parameters()))
    assert_same(full_params(again), doubled, 0, 0)
    other = build(env, (2, 2), CASE.model(3))
    hsdp.checkpoint.load_full_state_dict(other, full_state if env.rank == 0 else {})
    for one in (again, other):
        assert uneven_names(one)
        optimizers = adamw(one.parameters()), adamw(model.parameters())
        grads = []
        for each in (one, model):
            each.zero_grad()
            mse(each, CASE.batch(1, env.rank)).backward()
            grads.append(full_grads(each))
        assert_same(*grads)
        del optimizers


def test_uneven_parameters_go_through_full_params_and_checkpoints(pool4: Pool, tmp_path: Any) -> None:
    pool4.run(check_doors, str(tmp_path), twin(4, 1))


def fill(module: nn.Module) -> None:
    """Initialises its own parameters."""
    for param in module.parameters(recurse=False):
        nn.init.ones_(param)


def check_meta(env: RankEnv) -> None:
    """Built on the meta device, moved to another dtype: buffers are made anew."""
    with torch.device("meta"):
        model = Net()
    build(env, (4,), model)
    hsdp.init_sharded(model, fill)
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = dict(CASE.model().named_parameters())[name]
            param.copy_(distribute_tensor(whole.float(), param.device_mesh, param.placements))
    with for_small_ones():
        model.double()
        plain = CASE.model().float().double()
        check_grads(model, plain, lambda one, rank: [_backward(one, rank)], env.rank, env.world_size)
    assert uneven_names(model)


def test_meta_device_and_casts(pool4: Pool) -> None:
    pool4.run(check_meta)


def check_described(env: RankEnv) -> None:
    described = hsdp.describe(build(env, (4,)))
    lines = [line for line in described.splitlines() if " up " in f" {line} "]
    assert len(lines) == 3 and all("without padding" in line for line in lines), described


def test_describe_tells(pool4: Pool) -> None:
    pool4.run(check_described)


def check_default(env: RankEnv) -> None:
    """A large expert on four ranks goes unevenly without anybody asking for it; users see FSDP2's shards."""
    module = nn.Module()
    module.experts = nn.Parameter(torch.arange(2.0 * (1 << 19)).view(2, 1 << 10, 1 << 9))
    module.forward = lambda x: x * module.experts.square().sum()  # type: ignore[assignment]
    whole = module.experts.detach().clone()
    hsdp.fully_shard(module, mesh=env.mesh((4,)))
    assert uneven_names(module)
    experts = module.experts
    assert experts.placements == (Shard(0),) and experts.to_local().shape[0] == (1 if env.rank < 2 else 0)
    module(torch.tensor(1.0 + env.rank)).backward()
    torch.testing.assert_close(full_grads(module)["experts"], 5.0 * whole, rtol=1e-5, atol=0)


def test_experts_go_unevenly_by_default(pool4: Pool) -> None:
    pool4.run(check_default)
