"""Rule 15: avg or sum, scaling and divide factor are applied exactly once, on every path."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hsdp
from hsdp.comm import backends
from hsdp.comm.transports import GroupTransport
from hsdp.errors import StateError
from tests.support.deep import Deep, floats, mean_grads, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, shard
from tests.support.twin import assert_same, full_grads


def check_factors(env: RankEnv, shape: tuple[int, ...], policy: hsdp.CommPolicy) -> None:
    means = mean_grads(seeded(Deep), step, env.world_size)
    model = shard(seeded(Deep), env.mesh(shape), comm_policy=policy)
    for op, scale, divide, factor in (
        ("avg", 1.0, None, 1.0),
        (" SUM ", 1.0, None, env.world_size),
        ("avg", 0.5, None, 0.5),
        ("sum", 0.25, None, 0.25 * env.world_size),
        ("avg", 1.0, 3.0, env.world_size / 3),  # the divide factor takes the place of avg's division
        ("sum", 0.5, 5.0, 0.5 * env.world_size / 5),
    ):
        model.set_reduce_op_type(op)  # type: ignore[operator]
        model.set_gradient_scaling_factor(scale)  # type: ignore[operator]
        model.set_gradient_divide_factor(divide, recurse=True)  # type: ignore[operator]
        for micro_batches in (("full",), ("local", "scatter", "full")):
            model.zero_grad()
            for level in micro_batches:
                model.set_requires_grad_sync(level != "local")  # type: ignore[operator]
                model.set_requires_all_reduce(level != "scatter")  # type: ignore[operator]
                step(model, env.rank)
            total = factor * len(micro_batches)
            expected = {name: None if grad is None else grad * total for name, grad in means.items()}
            assert_same(full_grads(model), expected)


POLICIES = {
    "packed": hsdp.CommPolicy(fusion="packed"),
    "direct": hsdp.CommPolicy(fusion="direct"),
    "tree": hsdp.CommPolicy(reduction="tree"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_rule_15_factors_are_applied_once(pool4: Pool, shape: tuple[int, ...], policy: str) -> None:
    pool4.run(check_factors, shape, POLICIES[policy])


def check_changed_between_micro_batches(env: RankEnv, shape: tuple[int, ...], policy: hsdp.CommPolicy) -> None:
    """Gradients have the scale and the op of their own backward, and the divisor with which they were reduce-scattered."""
    means = mean_grads(seeded(Deep), step, env.world_size)
    model: Any = shard(seeded(Deep), env.mesh(shape), comm_policy=policy)
    ranks = env.world_size
    own = (("avg", 2.0, None), ("sum", 1.0, None), ("avg", -0.5, None))
    divided = (("avg", 2.0, None), ("avg", 1.0, 3.0), ("avg", -0.5, 5.0))
    for levels, settings, total in (
        (("local", "local", "full"), own, 2.0 + ranks - 0.5),
        (("local", "scatter", "full"), own, 2.0 + ranks - 0.5),
        (("scatter", "local", "flush"), own, 2.0 + ranks - 0.5),
        (("local", "local", "full"), divided, (2.0 + 1.0 - 0.5) * ranks / 5),
        (("local", "scatter", "full"), divided, (2.0 + 1.0) * ranks / 3 - 0.5 * ranks / 5),
        (("scatter", "local", "flush"), divided, 2.0 + (1.0 - 0.5) * ranks / 5),
    ):
        model.zero_grad()
        for level, (op, scale, divide) in zip(levels, settings, strict=True):
            model.set_reduce_op_type(op)
            model.set_gradient_scaling_factor(scale)
            model.set_gradient_divide_factor(divide, recurse=True)
            model.set_requires_grad_sync(level not in ("local", "flush"))
            model.set_requires_all_reduce(level not in ("scatter", "flush"))
            step(model, env.rank)
        model.set_requires_all_reduce(True)
        model.set_gradient_scaling_factor(7.0)  # of nothing: the sums below are those of before
        model.flush()
        assert_same(full_grads(model), {n: None if grad is None else grad * total for n, grad in means.items()})


@pytest.mark.parametrize("policy", [*POLICIES, "local"])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_rule_15_factors_may_change_between_micro_batches(pool4: Pool, shape: tuple[int, ...], policy: str) -> None:
    policies = POLICIES | {"local": hsdp.CommPolicy(accumulate="local")}
    pool4.run(check_changed_between_micro_batches, shape, policies[policy])


def check_refused(env: RankEnv) -> None:
    """Sums to which no one factor is right are told of where it is set, on all ranks; nothing is lost by it."""
    means = mean_grads(seeded(Deep), step, env.world_size)
    model: Any = shard(seeded(Deep), env.mesh((1, 2)))
    model.set_requires_grad_sync(False)
    step(model, env.rank)
    model.set_reduce_op_type("sum")
    for others in range(2):  # the op differs from that of the sums; it differs among them
        with pytest.raises(
            StateError, match=r"set_gradient_divide_factor: unit '.*another reduce op.*flush\(\) or zero_grad\(\)"
        ):
            model.set_gradient_divide_factor(3.0)
        if not others:
            step(model, env.rank)
    model.flush()
    assert_same(full_grads(model), {n: None if g is None else g * (1 + env.world_size) for n, g in means.items()})
    model.zero_grad()
    model.set_gradient_divide_factor(3.0, recurse=True)
    step(model, env.rank)
    with pytest.raises(StateError, match=r"set_reduce_op_type: unit '"):
        model.set_reduce_op_type("avg")
    model.zero_grad()
    model.set_reduce_op_type("avg")


def test_rule_15_ops_and_divisors_of_pending_sums_do_not_mix(pool2: Pool) -> None:
    pool2.run(check_refused)


class OneGradient(nn.Module):
    """Autograd hands both parameters the same gradient: two views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.rand(8, 4, dtype=torch.float64))
        self.second = nn.Parameter(torch.rand(8, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.first.view(-1) + self.second.view(-1))


def _step_of_one_gradient(model: nn.Module, rank: int) -> None:
    model(torch.arange(32.0, dtype=torch.float64) + rank).square().sum().backward()


def check_shared_memory(env: RankEnv, shape: tuple[int, ...]) -> None:
    policy = hsdp.CommPolicy(fusion="direct")
    model = hsdp.fully_shard(seeded(OneGradient), mesh=env.mesh(shape), comm_policy=policy)
    for last in (False, True):
        model.set_requires_grad_sync(last)  # type: ignore[operator]
        _step_of_one_gradient(model, env.rank)
    # The twin's gradients are cleared between ranks: torch itself would add the second rank's twice to memory so shared.
    means = mean_grads(seeded(OneGradient), _step_of_one_gradient, env.world_size)
    assert_same(full_grads(model), {name: None if grad is None else 2 * grad for name, grad in means.items()})


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_rule_15_gradients_that_share_memory_are_added_and_scaled_once(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_shared_memory, shape)


def check_fp16(env: RankEnv, shape: tuple[int, ...], value: float, op: str = "avg") -> None:
    """The sum over ranks would overflow fp16 (largest number 65504), the mean does not; tiny gradients survive too."""
    model = nn.Linear(4, 4, bias=False)
    half = hsdp.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    hsdp.fully_shard(model, mesh=env.mesh(shape), mp_policy=half)
    model.set_reduce_op_type(op)  # type: ignore[operator]
    model(torch.full((1, 4), value)).sum().backward()
    grad = full_grads(model)["weight"]
    assert grad is not None
    assert grad.unique().tolist() == [value * (env.world_size if op == "sum" else 1)]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_rule_15_fp16_sums_are_divided_by_nothing(pool4: Pool, shape: tuple[int, ...]) -> None:
    """The least number that fp16 has is not halved and doubled again."""
    pool4.run(check_fp16, shape, 2.0**-24, "sum")


@pytest.mark.parametrize("value", [30000.0, 2.0**-20, 2.0**-23])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=mesh_id)
def test_rule_15_fp16_divides_before_and_after_the_sum(pool4: Pool, shape: tuple[int, ...], value: float) -> None:
    pool4.run(check_fp16, shape, value)


def check_scaled_on_the_way(env: RankEnv, shape: tuple[int, ...], policy: hsdp.CommPolicy) -> None:
    """A backend that multiplies what it sums leaves hsdp no factor to apply, and gives what hsdp's own kernel gives."""
    grads: dict[bool, dict[str, torch.Tensor | None]] = {}
    for multiplies in (True, False):
        names = {"emulccl"} if multiplies else set()
        with (
            mock.patch.object(backends, "MULTIPLIES", frozenset(names)),
            mock.patch.object(GroupTransport, "_sum_of", autospec=True, side_effect=GroupTransport._sum_of) as asked,
        ):
            model = shard(seeded(Deep).to(env.device), env.mesh(shape), comm_policy=policy)
            model.set_gradient_divide_factor(3.0, recurse=True)  # type: ignore[operator]
            for level in ("local", "scatter", "full"):
                model.set_requires_grad_sync(level != "local")  # type: ignore[operator]
                model.set_requires_all_reduce(level != "scatter")  # type: ignore[operator]
                model(floats(env.rank).to(env.device)).square().sum().backward()
            grads[multiplies] = full_grads(model)
            factors = {call.args[1] for call in asked.call_args_list}
            assert factors == ({1 / 3} if multiplies else {1.0})
    assert_same(grads[True], grads[False])
    means = mean_grads(seeded(Deep), step, env.world_size)
    expected = {name: None if grad is None else grad * env.world_size for name, grad in means.items()}
    assert_same({name: None if grad is None else grad.cpu() for name, grad in grads[True].items()}, expected)


@pytest.mark.parametrize("policy", ["packed", "direct"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_rule_15_a_backend_may_multiply(device4: Pool, shape: tuple[int, ...], policy: str) -> None:
    device4.run(check_scaled_on_the_way, shape, POLICIES[policy])


def check_recursive(env: RankEnv) -> None:
    """Set on the root they reach every unit; with recurse=False the root's own only, and the divide factor always so."""
    means = mean_grads(seeded(Deep), step, env.world_size)
    model = shard(seeded(Deep), env.mesh(2))
    model.set_gradient_scaling_factor(2.0)  # type: ignore[operator]
    model.set_gradient_scaling_factor(4.0, recurse=False)  # type: ignore[operator]
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    step(model, env.rank)
    factors = {name: 4.0 * env.world_size if name.startswith("last") else 2.0 for name in means}
    assert_same(full_grads(model), {name: grad * factors[name] for name, grad in means.items() if grad is not None})


def test_rule_15_setters_reach_what_they_say(pool2: Pool) -> None:
    pool2.run(check_recursive)


def check_small_terms_in_fp16(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Terms of a mean that is near the least number of fp16 do not vanish before they are added, deferred or not."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2048))

        def forward(self, grad: Tensor) -> Tensor:
            return (self.weight * grad).sum()

    def rows(micro_batch: int) -> list[Tensor]:
        seeded = torch.Generator().manual_seed(micro_batch)
        return [2e-7 * torch.rand(2048, generator=seeded) for _ in range(env.world_size)]

    errors = []
    for deferred in (False, True):
        model = Weight()
        policy = hsdp.MixedPrecisionPolicy(reduce_dtype=torch.float16)
        hsdp.fully_shard(model, mesh=env.mesh(shape), mp_policy=policy)
        expected = torch.zeros(2048, dtype=torch.float64)
        for micro_batch in range(3):
            grads = rows(micro_batch)
            expected += sum(grad.half().double() for grad in grads) / env.world_size
            model.set_requires_all_reduce(not deferred or micro_batch == 2)  # type: ignore[operator]
            model(grads[env.rank]).backward()
        found: Any = model.weight.grad
        errors.append(((found.full_tensor().double() - expected).norm() / expected.norm()).item())
    assert errors[1] < 1.2 * errors[0] < 0.5, errors


@pytest.mark.parametrize("shape", [(4, 1), (2, 2)], ids=mesh_id)
def test_rule_15_deferred_sums_of_fp16_keep_small_terms(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_small_terms_in_fp16, shape)


def check_bf16_is_scaled_behind_the_sum(env: RankEnv, shape: tuple[int, ...], policy: hsdp.CommPolicy) -> None:
    """torch has NCCL multiply sums in bf16 with half of a float's bytes, which are 0 for a mean over two ranks."""
    precision = hsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = shard(seeded(Deep).float().to(env.device), env.mesh(shape), comm_policy=policy, mp_policy=precision)
    model(floats(env.rank).float().to(env.device)).square().sum().backward()
    means = mean_grads(seeded(Deep), step, env.world_size)
    grads = {name: None if grad is None else grad.cpu().double() for name, grad in full_grads(model).items()}
    assert_same(grads, means, 0.02, 0.02)


@pytest.mark.parametrize("policy", ["packed", "direct"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_rule_15_no_backend_multiplies_bf16(device4: Pool, shape: tuple[int, ...], policy: str) -> None:
    device4.run(check_bf16_is_scaled_behind_the_sum, shape, POLICIES[policy])
