"""A test per row of the feature table that a training loop meets: rows 3-5, 16-18, 21-24, 28 and 29, named after them.

The other tests of a feature are in the file of its theme; here is what the row says, in one check on ranks, of which
`tests/mutants/loops.py` shows that it fails when the feature's guard is gone. Row 18: `tests/unit/test_training_state.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from hsdp import MixedPrecisionPolicy
from tests.soak.random_models import Part, Subject, run
from tests.support.counting import CollectiveCounter, by_sockets
from tests.support.deep import DIM, Deep, collectives, floats, mean_into, of_kind, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, mesh_id, pool_for, shard
from tests.support.twin import assert_same, full_grads, full_params

# -- row 3: FSDP on a 1-D mesh, HSDP on a 2-D mesh, S=1 and R=1 without copies --------------------------------------

VERBS: dict[tuple[int, ...], set[str]] = {
    (4,): {"all_gather", "reduce_scatter"},
    (2, 2): {"all_gather", "reduce_scatter", "all_reduce"},
    (4, 1): {"all_reduce"},
    (1, 4): {"all_gather", "reduce_scatter"},
}


def check_mesh(env: RankEnv, shape: tuple[int, ...]) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape))
    with collectives() as log:
        check_grads(model, plain, step, env.rank, env.world_size)
    assert {entry.partition(" ")[0] for entry in log} == VERBS[shape]
    model.unshard()  # type: ignore[operator]
    whole, local = model.last.weight, dict(model.named_parameters())["last.weight"].to_local()  # type: ignore
    assert (whole.data_ptr() == local.data_ptr()) == (shape[-1] == 1), "with one shard the whole is the shard, no copy"
    model.reshard()  # type: ignore[operator]


@pytest.mark.parametrize("shape", VERBS, ids=mesh_id)
def test_row_03_meshes_and_their_degenerate_cases(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_mesh, shape)


# -- row 4: reshard after forward: always, never, by the root, to a smaller group -----------------------------------

# Group sizes of the gathers in backward: blocks 3 to 0; the root, which is whole unless told otherwise.
RESHARDS: dict[Any, list[int]] = {True: [4] * 5, False: [], None: [4] * 3, 2: [2] * 5}
"""Gathers of a backward of five units. With None the root is kept, and once the order is known the last unit, too."""


@by_sockets
def check_reshard(env: RankEnv, reshard: bool | int | None) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(4), reshard_after_forward=reshard)
    step(model, env.rank)
    for _ in range(2):
        loss = model(floats(env.rank)).square().sum()
        held = [unit.residency.value for unit in model._units()]  # type: ignore[operator]
        assert held.count("unsharded") == {True: 0, False: 5, None: 2, 2: 0}[reshard], held
        with CollectiveCounter() as counter:
            loss.backward()
        assert [call.size for call in counter.select("all_gather")] == RESHARDS[reshard]
    check_grads(model, plain, step, env.rank, env.world_size)
    check_rest(model)


@pytest.mark.parametrize("reshard", RESHARDS)
def test_row_04_what_is_freed_after_forward(pool4: Pool, reshard: bool | int | None) -> None:
    pool4.run(check_reshard, reshard)


# -- row 5: mixed precision -----------------------------------------------------------------------------------------


class Seen(nn.Module):
    """Notes the dtypes that its forward meets; two storage dtypes in a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.shift = nn.Parameter(torch.rand(DIM, dtype=torch.float64))
        self.register_buffer("offset", torch.rand(DIM))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes = [x.dtype, self.linear.weight.dtype, self.shift.dtype, self.offset.dtype]
        return self.linear(x) * self.shift + self.offset


def check_precision(env: RankEnv, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = Seen()
    model = Seen()
    model.load_state_dict(plain.state_dict())
    policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float64, buffer_dtype=dtype)
    hsdp.fully_shard(model, mesh=env.mesh(2), mp_policy=policy)
    out = model(floats(env.rank).float())
    out.square().sum().backward()
    assert model.dtypes == [dtype] * 4
    assert out.dtype == torch.float64
    plain.to(dtype)
    grads: dict[str, Tensor] = {}
    for rank in range(env.world_size):
        plain.zero_grad()
        plain(floats(rank).to(dtype)).double().square().sum().backward()
        for name, param in plain.named_parameters():
            assert param.grad is not None
            grads[name] = grads.get(name, torch.zeros(())) + param.grad.float() / env.world_size
    found = {name: param.grad for name, param in model.named_parameters()}
    assert {name: grad.dtype for name, grad in found.items() if grad is not None} == {
        "linear.weight": torch.float32,
        "linear.bias": torch.float32,
        "shift": torch.float64,
    }
    assert_same(full_grads(model), dict(grads), 1e-6, 1e-6)  # the sum was not in the compute dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_row_05_dtypes_of_compute_reduction_output_and_buffers(pool2: Pool, dtype: torch.dtype) -> None:
    pool2.run(check_precision, dtype)


# -- row 16: frozen, toggled, tied inside a unit, unused ------------------------------------------------------------

FROZEN = (
    Part("mlp", frozen="weight", extra=True),
    Part("tied mlp", extra=True),
    Part("attention", frozen="all"),
    Part("experts", hidden=5),
    Part("norm", dropped=True),
)
TWICE = (("micro", "full", None, 1, "together"), ("step",), ("micro", "local", None, 2, "reversed"), ("flush",))


def check_kinds(env: RankEnv, parts: tuple[Part, ...], schedule: tuple[Any, ...]) -> None:
    run(env, [Subject((2,), 3, parts, tied_head=True, reshard=reshard, schedule=schedule) for reshard in (True, None)])


def test_row_16_frozen_tied_and_unused_parameters_in_one_model(pool2: Pool) -> None:
    pool2.run(check_kinds, FROZEN, TWICE)


# -- row 17: several forwards and backwards, schedules of pipelines, activation checkpointing -----------------------


def _one_forward_one_backward(model: nn.Module, rank: int) -> None:
    """Warm-up of two, then one forward and one backward in turn; gradients are communicated with the last."""
    losses: list[Tensor] = []
    for k in range(4):
        losses.append(model(floats(rank, k)).square().sum())
        if k > 0:
            _part(model, last=False, loss=losses.pop(0))
    _part(model, last=True, loss=losses.pop())


def _part(model: Any, last: bool, loss: Tensor) -> None:
    with model.accumulate(last=last) if isinstance(model, hsdp.HSDPModule) else nullcontext():
        loss.backward()


def check_pipeline(env: RankEnv, recompute: bool | None, shape: tuple[int, ...]) -> None:
    plain, model = (seeded(lambda: Deep(recompute=recompute)) for _ in range(2))
    shard(model, env.mesh(shape), comm_policy=hsdp.CommPolicy(prefetch=2))
    for _ in range(2):
        with collectives() as log:
            check_grads(model, plain, _one_forward_one_backward, env.rank, env.world_size)
        assert len(of_kind(log, "all_reduce")) == 5 * (len(shape) - 1), "once per step"
        check_rest(model)


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=mesh_id)
def test_row_17_pipeline_schedules_and_checkpointing(
    request: pytest.FixtureRequest, recompute: bool | None, shape: tuple[int, ...]
) -> None:
    pool_for(request, shape).run(check_pipeline, recompute, shape)


# -- row 21: whole parameters for a while ---------------------------------------------------------------------------


def check_full_params(env: RankEnv) -> None:
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh((2, 2)))
    blocks: Any = model.blocks
    expected = dict(full_params(plain))
    with hsdp.full_params(model, writeback="rank0"):
        assert_same({name: param.detach() for name, param in model.named_parameters()}, expected, 0.0, 0.0)
        blocks[0].weight.data.fill_(float(env.rank))
    with hsdp.full_params(model, writeback="local"):
        blocks[0].bias.data.fill_(3.0)
    with hsdp.full_params(model):
        blocks[1].weight.data.zero_()
    with hsdp.full_params(blocks[2], recurse=False, cast=torch.float16):
        assert blocks[2].weight.dtype == torch.float16
        assert isinstance(model.get_parameter("last.weight"), torch.distributed.tensor.DTensor)
    with hsdp.full_params(model, rank0_only=True):
        assert isinstance(blocks[1].weight, torch.distributed.tensor.DTensor) == (env.rank > 0)
    expected["blocks.0.weight"] = torch.zeros(DIM, DIM)
    expected["blocks.0.bias"] = torch.full((DIM,), 3.0)
    assert_same(dict(full_params(model)), dict(expected), 0.0, 0.0)


def test_row_21_whole_parameters_for_a_while(pool4: Pool) -> None:
    pool4.run(check_full_params)


# -- row 22: initialise from meta per unit, apply with whole parameters, replicas made equal ------------------------


def _draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.normal_(module.bias)


def check_init(env: RankEnv, root: bool) -> None:
    torch.manual_seed(3)
    plain = Deep().apply(_draw)
    on_meta = Deep().to("meta")
    model = Deep()
    for one in (on_meta, model):
        for block in one.blocks:
            hsdp.fully_shard(block, mesh=env.mesh((2, 2)))
        if root:
            hsdp.fully_shard(one, mesh=env.mesh((2, 2)))
    torch.manual_seed(3 + env.rank)  # that of the first rank counts
    Deep()
    if root:
        model.apply(_draw)
    else:  # the plain root's own layer is drawn by each rank for itself
        model.blocks.apply(_draw)
    expected = {name: value for name, value in full_params(plain).items() if root or name.startswith("blocks")}
    found = {name: value for name, value in full_params(model).items() if name in expected}
    assert_same(dict(found), dict(expected), 0.0, 0.0)
    if root:
        torch.manual_seed(3 + env.rank)
        Deep()
        hsdp.init_sharded(on_meta, _draw)
        assert_same(dict(full_params(on_meta)), dict(expected), 0.0, 0.0)


@pytest.mark.parametrize("root", [True, False])
def test_row_22_init_functions_see_whole_parameters(pool4: Pool, root: bool) -> None:
    pool4.run(check_init, root)


# -- row 23: clipping over mixed meshes: one reduction, no host synchronisation: test_clip.py, rule 17 --------------


def check_one_reduction(env: RankEnv) -> None:
    model = shard(seeded(Deep), env.mesh((2, 2)))
    step(model, env.rank)
    with CollectiveCounter() as counter:
        norm = hsdp.clip_grad_norm_(model, 0.1, torch.inf)
    assert counter.counts() == {"all_reduce": 1}, "one reduction for the whole norm"
    plain = seeded(Deep)
    mean_into(plain, step, env.world_size)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1, torch.inf))
    assert_same(full_grads(model), full_grads(plain))


def test_row_23_clipping_takes_one_reduction(pool4: Pool) -> None:
    pool4.run(check_one_reduction)


# -- row 24: pick units by glob, type, instance, predicate, size ----------------------------------------------------


def check_patterns(env: RankEnv) -> None:
    blocks = [f"blocks.{i}" for i in range(4)]
    picks: list[tuple[Callable[[Deep], Any], list[str]]] = [
        (lambda model: "blocks.*", [*blocks, ""]),
        (lambda model: nn.Linear, [*blocks, "last", ""]),
        (lambda model: [model.blocks[1], model.last], ["blocks.1", "last", ""]),
        (lambda model: lambda module: getattr(module, "out_features", 0) == DIM, [*blocks, "last", ""]),
        (lambda model: hsdp.by_numel(2 * DIM * (DIM + 1)), [""]),
    ]
    plain = seeded(Deep)
    for pick, names in picks:
        model: Any = seeded(Deep)
        assert hsdp.shard_units(model, pick(model), mesh=env.mesh(2)) == names
        assert [name for name, module in model.named_modules() if isinstance(module, hsdp.HSDPModule)] == sorted(names)
        check_grads(model, plain, step, env.rank, env.world_size)
    model = seeded(Deep)
    with pytest.raises(ValueError, match=r"pattern 'layers\.\*' matches nothing"):
        hsdp.shard_units(model, ["blocks.*", "layers.*"], mesh=env.mesh(2))
    assert not any(isinstance(module, hsdp.HSDPModule) for module in model.modules()), "left half sharded"


def test_row_24_units_are_picked_by_patterns(pool2: Pool) -> None:
    pool2.run(check_patterns)


# -- row 28: gradient scaler over the mesh --------------------------------------------------------------------------


def check_scaler(env: RankEnv, shape: tuple[int, ...]) -> None:
    """An overflow in one rank's shard makes all ranks skip that step and no other, and halves the scale."""
    half = MixedPrecisionPolicy(torch.float16, torch.float32)
    model = shard(seeded(Deep).float(), env.mesh(shape), mp_policy=half)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    scales = []
    for k in range(4):
        before = full_params(model)
        scaler.scale(model(floats(env.rank, k)).float().square().mean()).backward()
        if k == 1 and env.mesh(shape).get_coordinate()[-1] == 0:  # type: ignore[index]
            model.last.weight.grad.to_local()[0, 0] = torch.inf  # type: ignore[union-attr,operator]
        scaler.unscale_(optimizer)
        hsdp.clip_grad_norm_(model, 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        changed = [name for name, value in full_params(model).items() if not torch.equal(value, before[name])]
        assert bool(changed) == (k != 1), f"step {k} changed {changed}"
    assert scales == [1024.0, 512.0, 512.0, 512.0], scales
    assert all(value.isfinite().all() for value in full_params(model).values())


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_row_28_a_gradient_scaler_skips_on_all_ranks_or_on_none(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_scaler, shape)


def check_scaler_beside(env: RankEnv) -> None:
    """Parameters that are left alone are stepped beside sharded ones, and their overflows count, too."""
    model = seeded(Deep).float()
    shard(model, env.mesh((2,)), ignored_params=[model.last.weight])  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for k, overflows in enumerate((False, True)):
        before = full_params(model)
        scaler.scale(model(floats(env.rank, k).float()).square().mean()).backward()
        if overflows:
            model.last.weight.grad[0, 0] = torch.inf  # type: ignore[union-attr,index]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before["last.weight"], full_params(model)["last.weight"]) == overflows


def test_row_28_a_gradient_scaler_sees_parameters_that_are_left_alone(pool2: Pool) -> None:
    pool2.run(check_scaler_beside)


# -- row 29: other entry points than forward; hooks on parameters, optimizer in backward ----------------------------


class Entrances(Deep):
    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Another way in."""
        return {"code": torch.tanh(self.last(torch.tanh(self.blocks[0](x))))}


def check_entrance(env: RankEnv) -> None:
    plain, model = seeded(Entrances), shard(seeded(Entrances), env.mesh(2))
    hsdp.register_forward_method(model, "encode")

    def both(one: Any, rank: int) -> None:
        (one.encode(floats(rank))["code"].square().sum() + one(floats(rank, 1)).sum()).backward()

    for _ in range(2):
        check_grads(model, plain, both, env.rank, env.world_size)
        check_rest(model)


def check_optimizer_in_backward(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there, and drops it."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape))
    optimizers = {param: torch.optim.AdamW([param], lr=0.01, foreach=False) for param in model.parameters()}
    seen: list[int] = []

    def step_now(param: Tensor) -> None:
        assert param.grad is not None and isinstance(param.grad, torch.distributed.tensor.DTensor)
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]
        seen.append(id(param))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_now)
    whole = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    for _ in range(3):
        step(model, env.rank)
        assert all(param.grad is None for param in model.parameters())
        mean_into(plain, step, env.world_size)
        whole.step()
        assert len(seen) == len(set(seen)) == 10, "each hook once per backward"
        seen.clear()
    assert_same(dict(full_params(model)), dict(full_params(plain)))


def check_gradient_hooks(env: RankEnv, shape: tuple[int, ...]) -> None:
    """`register_hook` on a sharded parameter sees each backward's reduced gradient, before it is added."""
    plain, model = seeded(Deep), shard(seeded(Deep), env.mesh(shape))
    params = dict(model.named_parameters())
    seen: list[Tensor] = []  # local tensors: when hooks run depends on a rank's timing, so they must not communicate
    params["blocks.1.weight"].register_hook(lambda grad: grad * 3)
    params["last.bias"].register_hook(lambda grad: seen.append(grad.to_local().clone()))  # type: ignore[attr-defined]
    step(model, env.rank)
    step(model, env.rank)
    mean_into(plain, step, env.world_size)
    expected = {name: 2 * grad for name, grad in full_grads(plain).items() if grad is not None}
    expected["blocks.1.weight"] *= 3
    assert_same(full_grads(model), dict(expected))
    assert len(seen) == 2
    torch.testing.assert_close(seen, [params["last.bias"].grad.to_local() / 2] * 2)  # type: ignore[union-attr,operator]
    if len(shape) == 2:
        return  # an error in a hook comes when this rank's all-reduce is done: elsewhere than on the others
    handle = params["blocks.0.bias"].register_hook(lambda grad: torch.zeros(DIM))
    with pytest.raises(hsdp.StateError, match=r"a hook of parameter 'bias' returned Tensor instead of"):
        step(model, env.rank)
    handle.remove()
    with pytest.warns(UserWarning, match="gradients of that iteration are dropped"):
        step(model, env.rank)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_row_29_hooks_on_gradients(pool2: Pool, shape: tuple[int, ...]) -> None:
    pool2.run(check_gradient_hooks, shape)


def test_row_29_other_entry_points_than_forward(pool2: Pool) -> None:
    pool2.run(check_entrance)


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_row_29_an_optimizer_in_backward(pool2: Pool, shape: tuple[int, ...]) -> None:
    pool2.run(check_optimizer_in_backward, shape)
