"""Mixed precision: equal to the same casts done by hand, and float32 and bfloat16 within stated bounds of float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import hsdp
from hsdp import MixedPrecisionPolicy
from tests.support.models import Batch, Case, make_case
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, check_sharded, pool_for, shard
from tests.support.twin import Twin, adamw, assert_same, full_grads, full_params, sgd, train, twin_of

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def _by_hand(plain: nn.Module, case: Case, batch: Batch) -> Tensor:
    """The loss with bfloat16 copies of the weights; autograd casts their gradients back."""
    weights = {name: param.to(BF16) for name, param in plain.named_parameters()}
    inputs = tuple(x.to(BF16) if x.is_floating_point() else x for x in batch)

    def model(x: Tensor) -> Tensor:
        return functional_call(plain, weights, (x,))

    return case.loss(model, inputs)


def _equals_casts_by_hand(env: RankEnv, name: str, shape: tuple[int, ...], how: str, fusion: Any) -> None:
    case = make_case(name, F32)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    comm = hsdp.CommPolicy(fusion=fusion)
    model, plain = shard(case.model(), env.mesh(shape), mp_policy=policy, comm_policy=comm), case.model()
    optimizers = [sgd(model.parameters()), sgd(plain.parameters())]
    for step in range(3):
        for micro in range(2):
            model.set_requires_grad_sync(how != "no-sync" or micro == 1)
            x, y = case.batch(step, env.rank, micro)
            y = y.to(BF16) if y.is_floating_point() else y
            case.loss(model, (x, y)).backward()
            for rank in range(env.world_size):
                _by_hand(plain, case, case.batch(step, rank, micro)).backward()
        for param in plain.parameters():
            param.grad /= env.world_size
        assert {param.grad.dtype for param in model.parameters()} == {F32}
        assert_same(full_grads(model), full_grads(plain), 1e-5, 1e-6)  # sums in another order, in float32
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_sharded(model)
    check_rest(model)


@pytest.mark.parametrize(("how", "fusion"), [("full", "packed"), ("full", "direct"), ("no-sync", "packed")])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_bf16_compute_and_fp32_reduction_equal_casts_by_hand(
    pool4: Pool, name: str, shape: tuple[int, ...], how: str, fusion: str
) -> None:
    pool4.run(_equals_casts_by_hand, name, shape, how, fusion)


def _train_within(env: RankEnv, dtype: torch.dtype, policy: MixedPrecisionPolicy, twin: Twin, bound: float) -> float:
    case = make_case("transformer", dtype)
    model = shard(case.model(), env.mesh((2, 2)), mp_policy=policy)
    losses = train(model, case, env.rank, 10, adamw(model.parameters()))
    error = (losses - twin.losses[:, env.rank]).abs().max().item()
    assert error <= bound, f"the losses are off by up to {error}"
    return error


@pytest.mark.parametrize(
    ("policy", "bound"),
    # Processors multiply bf16 in different ways, with sums of different lengths: 0.02 to 0.032 were seen.
    [(MixedPrecisionPolicy(), 1e-5), (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32), 6e-2)],
    ids=["fp32", "bf16-fp32"],
)
def test_ten_steps_stay_within_a_bound_of_float64(pool4: Pool, policy: MixedPrecisionPolicy, bound: float) -> None:
    errors = pool4.run(_train_within, F32, policy, twin_of(make_case("transformer"), 4, 10, adamw), bound)
    assert max(errors) > bound / 1000, "the bound is loose, or the run was not in this precision"


class _Probe(nn.Linear):
    """Tells what dtypes its forward saw."""

    def forward(self, x: Tensor, *, mask: dict[str, Tensor] | None = None) -> Tensor:
        self.seen = (x.dtype, self.weight.dtype, None if mask is None else tuple(m.dtype for m in mask.values()))
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


def _dtypes(env: RankEnv, policy: MixedPrecisionPolicy) -> tuple[Any, ...]:
    model = hsdp.fully_shard(_Probe(8, 8), mesh=env.mesh(2), mp_policy=policy)
    mask = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)}
    out = model(torch.ones(2, 8), mask=mask)
    out.float().sum().backward()
    assert mask["a"].dtype == F32, "the caller's own dict was changed"
    grad = model.weight.grad
    assert grad is not None
    rounded = torch.equal(grad.full_tensor(), grad.full_tensor().to(BF16).float())
    return (*model.seen, out.dtype, model.weight.dtype, grad.dtype, rounded)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (MixedPrecisionPolicy(), (F32, F32, (F32, torch.int64), F32)),
        (MixedPrecisionPolicy(param_dtype=BF16), (BF16, BF16, (BF16, torch.int64), BF16)),
        (MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32), (BF16, BF16, (BF16, torch.int64), F32)),
        (MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False), (F32, BF16, (F32, torch.int64), BF16)),
        (MixedPrecisionPolicy(output_dtype=F64), (F32, F32, (F32, torch.int64), F64)),
    ],
    ids=["none", "param", "param-output", "no-input-cast", "output"],
)
def test_each_setting_casts_what_it_says(pool2: Pool, policy: MixedPrecisionPolicy, expected: tuple[Any, ...]) -> None:
    for seen in pool2.run(_dtypes, policy):
        assert seen[:4] == expected
        assert seen[4:6] == (F32, F32), "master weights and gradients keep their dtype"


def _reduce_in(env: RankEnv, reduce_dtype: torch.dtype | None) -> Tensor:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    model = hsdp.fully_shard(nn.Linear(64, 64), mesh=env.mesh((2, 2)), mp_policy=policy)
    model(torch.randn(3, 64, generator=torch.Generator().manual_seed(env.rank))).float().sum().backward()
    return full_grads(model)["weight"]


def test_the_sum_is_in_the_reduce_dtype(pool4: Pool) -> None:
    half, single = pool4.run(_reduce_in, None)[0], pool4.run(_reduce_in, F32)[0]
    assert torch.equal(half, half.to(BF16).float()), "reduce_dtype=None reduces in the parameters' dtype"
    assert not torch.equal(single, single.to(BF16).float())
    torch.testing.assert_close(half, single, rtol=2**-6, atol=2**-6)


def _units_of_several_policies(env: RankEnv) -> tuple[torch.dtype, ...]:
    model = make_case("mlp", F32).model()
    blocks: Any = model.blocks
    hsdp.fully_shard(blocks[0], mesh=env.mesh(2), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F64))
    hsdp.fully_shard(blocks[1], mesh=env.mesh(2), mp_policy=MixedPrecisionPolicy(param_dtype=F64))
    seen: list[torch.dtype] = []
    for block in blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(module.weight.dtype))
    hsdp.fully_shard(model, mesh=env.mesh(2), mp_policy=MixedPrecisionPolicy(output_dtype=F32))
    blocks[2].double()  # moved after sharding: its unit is made anew
    out = model(torch.ones(2, 8))
    out.sum().backward()
    assert full_params(model).keys() == full_grads(model).keys()
    return (*seen, out.dtype, *(p.grad.dtype for p in model.parameters()))


def test_units_of_one_model_may_have_their_own_policies(pool2: Pool) -> None:
    expected = (BF16, F64, F64, F32, F32, F32, F32, F32, F64, F64)
    assert pool2.run(_units_of_several_policies) == [expected] * 2


class _Cached(nn.Linear):
    """Writes to the caches that it is handed: of what it saw, a dict in a dataclass and a list."""

    def forward(self, x: Tensor, cache: _Cache) -> Tensor:
        y = super().forward(x)
        cache.seen["x"] = torch.cat([cache.seen["x"], y]) if "x" in cache.seen else y
        cache.log.append(y)
        return torch.tanh(cache.seen["x"].sum(0, keepdim=True))


@dataclass
class _Cache:
    seen: dict[str, Tensor]
    log: list[Tensor]


def _generate_with_a_cache(env: RankEnv) -> None:
    plain = _Cached(8, 8).to(BF16)
    model = hsdp.fully_shard(copy.deepcopy(plain).float(), mesh=env.mesh(2), mp_policy=MixedPrecisionPolicy(BF16))
    outs = []
    for module in (model, plain):
        x, cache = torch.ones(1, 8, dtype=BF16), _Cache({}, [])
        with torch.inference_mode():
            for _ in range(3):
                x = module(x, cache)
        outs.append([x, cache.seen["x"], *cache.log])
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=0)


def test_caches_that_a_forward_writes_to_are_the_caller_s_own(pool2: Pool) -> None:
    pool2.run(_generate_with_a_cache)


class _Reader(nn.Module):
    """Uses `memory` twice, as cross-attention does. `grouped`: behind a node that adds the two uses' gradients up."""

    grouped = False

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory = memory.view_as(memory) if self.grouped else memory
        return x + nn.functional.scaled_dot_product_attention(self.query(x), self.key(memory), self.value(memory))


class _Readers(nn.Module):
    """An encoder whose output goes into three blocks, under non-reentrant checkpoints if asked for."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.blocks = nn.Linear(16, 16), nn.ModuleList(_Reader() for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.tanh(self.encoder(x))
        for block in self.blocks:
            x = checkpoint(block, x, memory, use_reentrant=False) if self.recomputes else block(x, memory)
        return x.float().square().mean()


def _grads_of_shared_inputs(env: RankEnv, shape: tuple[int, ...], dtype: torch.dtype, recomputes: bool) -> None:
    def grads_of(library: Any) -> dict[str, Tensor | None]:
        model = _Readers(recomputes)
        kind = fsdp.MixedPrecisionPolicy if library is torch_fully_shard else MixedPrecisionPolicy
        policy = kind(None if dtype is F32 else dtype, F32)
        for unit in (*model.blocks, model):
            library(unit, mesh=env.mesh(shape), mp_policy=policy)
        model(batches[env.rank]).backward()
        return full_grads(model)

    def grads_by_hand(grouped: bool) -> dict[str, Tensor | None]:
        plain, parts = _Readers(recomputes).to(dtype), []
        for block in plain.blocks:
            block.grouped = grouped
        for batch in batches:
            plain.zero_grad()
            plain(batch.to(dtype)).backward()
            parts.append({name: param.grad.float() for name, param in plain.named_parameters()})
        while len(parts) > 1:  # in pairs, as the mesh adds them
            parts = [{name: a[name] + b[name] for name in a} for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return {name: total / len(batches) for name, total in parts[0].items()}

    batches = torch.randn(env.world_size, 2, 6, 16, generator=torch.Generator().manual_seed(1)).unbind()
    by_hand, grouped = grads_by_hand(False), grads_by_hand(True)
    assert not torch.equal(by_hand["encoder.weight"], grouped["encoder.weight"]), "the order of the sum does not show"
    assert_same(grads_of(hsdp.fully_shard), by_hand, 0.0, 0.0)
    # docs/migrating.md says so of FSDP2.
    assert_same(grads_of(torch_fully_shard), grouped, 0.0, 0.0)


@pytest.mark.parametrize("recomputes", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_gradients_of_an_input_of_several_units_are_added_in_autograd_s_order(
    request: pytest.FixtureRequest, shape: tuple[int, ...], dtype: torch.dtype, recomputes: bool
) -> None:
    pool_for(request, shape).run(_grads_of_shared_inputs, shape, dtype, recomputes)


def _hooked_outputs(env: RankEnv) -> tuple[torch.dtype, ...]:
    """What hooks see that were registered behind `fully_shard`, and what comes out of one that returns something else."""
    model: Any = nn.Linear(8, 8)
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32)
    hsdp.fully_shard(model, mesh=env.mesh(2), mp_policy=policy)
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model.register_full_backward_pre_hook(lambda module, grads: seen.append(grads[0].dtype))
    model.register_full_backward_hook(lambda module, inputs, grads: seen.append(grads[0].dtype))
    x = torch.ones(2, 8, requires_grad=True)
    model(x).sum().backward()
    model.register_forward_hook(lambda module, args, out: out.double())
    return (*seen, model(x).dtype, model.forward(x).dtype)


def test_hooks_see_the_output_dtype(pool2: Pool) -> None:
    """As under FSDP2, whose cast is a hook itself. A forward without hooks casts, too."""
    assert pool2.run(_hooked_outputs) == [(F32, F32, F32, F64, F32)] * 2


def _beneath_autocast(env: RankEnv) -> None:
    """gloo concatenates what is all-reduced: under an autocast to another dtype of 16 bits, it must not ask that."""
    policy = MixedPrecisionPolicy(reduce_dtype=BF16)
    model = nn.Linear(8, 8)
    hsdp.fully_shard(model, mesh=env.mesh((2, 1)), mp_policy=policy, comm_policy=hsdp.CommPolicy(shared_memory=False))
    with torch.autocast("cpu", dtype=torch.float16):
        model(torch.ones(2, 8)).sum().backward()
    for grad in full_grads(model).values():
        assert grad is not None and torch.equal(grad, torch.full_like(grad, 2.0))


def test_reductions_beneath_an_autocast(pool2: Pool) -> None:
    pool2.run(_beneath_autocast)


def _grad_dtype(env: RankEnv) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(BF16)
    first, second = model[0].weight, model[1].weight
    second.grad_dtype, model[1].bias.grad_dtype = BF16, None  # as it is, and any
    first.grad_dtype = F32
    message = r"parameter '0.weight' of shape \(4, 4\) has grad_dtype torch\.float32, .*MixedPrecisionPolicy\(reduce_dtype="
    with pytest.raises(ValueError, match=message):
        shard(model, env.mesh((2,)))
    assert model[0].weight is first, "nothing has been sharded"
    first.grad_dtype = BF16
    model = shard(model, env.mesh((2,)))
    model(torch.ones(2, 4, dtype=BF16)).sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {BF16}
    # What the message says in its place.
    summed: Any = shard(nn.Linear(4, 4).to(BF16), env.mesh((2,)), mp_policy=MixedPrecisionPolicy(reduce_dtype=F32))
    kept: Any = shard(nn.Linear(4, 4), env.mesh((2,)), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    for one, dtype in ((summed, BF16), (kept, F32)):
        one(torch.ones(2, 4, dtype=BF16)).sum().backward()
        assert one.weight.grad.dtype is dtype


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="a torch without grad_dtype")
def test_a_dtype_of_gradients_alone_is_refused(pool2: Pool) -> None:
    pool2.run(_grad_dtype)
