"""`clip_grad_norm_`: equal to torch's on one device, on any mixture of meshes, with one reduction and no host sync."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_ as torch_clip
from torch.utils._python_dispatch import TorchDispatchMode

import hsdp
from hsdp.clip import clip_grad_norm_
from hsdp.errors import StateError
from tests.support.counting import CollectiveCounter
from tests.support.models import Case, make_case
from tests.support.rig import Pool, RankEnv, RemoteError
from tests.support.sharded import MESHES, mesh_id, pool_for, shard
from tests.support.twin import assert_same, full_grads

ORDERS = (2.0, math.inf, 1.0, 3.5)


def _backward(case: Case, model: nn.Module, ranks: list[int]) -> None:
    """The mean gradient over the batches of some ranks."""
    for rank in ranks:
        (case.loss(model, case.batch(0, rank)) / len(ranks)).backward()


def _both(env: RankEnv, name: str, shape: tuple[int, ...]) -> tuple[nn.Module, nn.Module]:
    """A sharded model and a plain one with equal gradients."""
    case = make_case(name)
    model, plain = case.model(), case.model()
    shard(model, env.mesh(shape), replicate_params=[p for n, p in model.named_parameters() if "norm" in n])
    _backward(case, model, [env.rank])
    _backward(case, plain, list(range(env.world_size)))
    return model, plain


def _check_orders(env: RankEnv, names: list[str], shape: tuple[int, ...], by_torch: bool) -> None:
    for name in names:
        model, plain = _both(env, name, shape)
        plain_params = [p for p in plain.parameters() if p.numel()]  # torch refuses the others with order inf
        for step, order in enumerate(ORDERS):
            expected = torch_clip(plain_params, 1e9, order)
            limit = 2 * expected.item() if step == 1 else expected.item() / 3  # once there is nothing to clip
            torch_clip(plain_params, limit, order)
            norm: Any
            if by_torch:
                norm = torch_clip(model.parameters(), limit, order)
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            else:
                norm = clip_grad_norm_(model if step % 2 else model.parameters(), limit, order)
                assert type(norm) is Tensor
                assert norm.shape == ()
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0, msg=lambda m: f"{name}, {order}: {m}")
            assert_same(full_grads(model), full_grads(plain), 1e-11, 0.0)


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_17_norm_and_gradients_are_those_of_one_device(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    # "scalar" has empty shards and parameters that every rank holds whole, "partly_used" has gradients that are None.
    pool_for(request, shape).run(_check_orders, ["transformer", "scalar", "partly_used", "tied"], shape, False)


def test_rule_17_clipping_of_torch_works_too(pool4: Pool) -> None:
    pool4.run(_check_orders, ["transformer"], (2, 2), True)


class _NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in func._schema.name, "the host reads a tensor"
        return func(*args, **kwargs or {})


def _count_reductions(env: RankEnv) -> None:
    model, _ = _both(env, "scalar", (2, 2))
    for order in (2.0, math.inf):
        with CollectiveCounter() as counter, _NoHostSync():
            clip_grad_norm_(model, 1e-3, order)
        assert counter.counts() == {"all_reduce": 1}
        assert counter.calls[0].bytes_in <= 16


def test_one_reduction_and_no_host_synchronisation(pool4: Pool) -> None:
    pool4.run(_count_reductions)


def _mixed(env: RankEnv) -> None:
    torch.manual_seed(0)  # the same values on all ranks
    wide = env.mesh((2, 2), ("data", "model"))
    flat = env.mesh(4)
    model, plain = _both(env, "mlp", (2, 2))
    others = {
        "both axes": (torch.randn(6, 5).double(), wide, [Shard(0), Shard(1)]),
        "one axis": (torch.randn(7, 3).double(), wide, [Replicate(), Shard(1)]),
        "another mesh, empty shards": (torch.randn(2, 3).double(), flat, [Shard(0)]),
        "replicated": (torch.randn(5).double(), flat, [Replicate()]),
        "single precision": (torch.randn(5), flat, [Shard(0)]),
        "plain": (torch.randn(3).double(), None, []),
    }
    sharded: list[Tensor] = list(model.parameters())
    whole: list[Tensor] = list(plain.parameters())
    grad: Any
    for grad, mesh, placements in others.values():
        for params, value in (
            (whole, grad.clone()),
            (sharded, distribute_tensor(grad.clone(), mesh, placements) if mesh is not None else grad.clone()),
        ):
            params.append(nn.Parameter(torch.zeros_like(value)))
            params[-1].grad = value
    for order in ORDERS:
        expected = torch_clip(whole, 0.5, order)
        with CollectiveCounter() as counter:
            norm = clip_grad_norm_([*sharded, sharded[-1]], 0.5, order)  # given twice, counted once
        # One for each of: the shard axis of the model's mesh, the two axes of `wide`, `flat`. And over both axes of the
        # model's mesh ranks compare norms, as one of the parameters is plain and in no unit.
        assert counter.counts() == {"all_reduce": 4 + 2}
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0, check_dtype=False)
        for mine, theirs in zip(sharded, whole, strict=True):
            grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            torch.testing.assert_close(grad, theirs.grad, rtol=1e-6, atol=0)
    assert clip_grad_norm_(sharded, math.inf).dtype == torch.float64


def test_rule_17_mixed_meshes_and_replicas_counted_once(pool4: Pool) -> None:
    pool4.run(_mixed)


def _low_precision(env: RankEnv) -> None:
    params: list[Any] = []
    for _ in range(2):
        # The norm of each rank's piece is a float32, the sum of the squares of all is none.
        grad = torch.full((6,), 7e18, dtype=torch.bfloat16)
        params.append(nn.Parameter(distribute_tensor(torch.zeros_like(grad), env.mesh(2), [Shard(0)])))
        params[-1].grad = distribute_tensor(grad, env.mesh(2), [Shard(0)])
    norm = clip_grad_norm_(params, 1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, (grad.double().norm() * math.sqrt(2)).float())
    for param in params:
        assert param.grad.dtype == torch.bfloat16
        torch.testing.assert_close(param.grad.full_tensor().float(), torch.full((6,), 12**-0.5), rtol=4e-3, atol=0)


def test_powers_do_not_overflow(pool2: Pool) -> None:
    pool2.run(_low_precision)


def _not_finite(env: RankEnv, bad: float) -> None:
    model, _ = _both(env, "mlp", (2,))
    grad: Any = next(model.parameters()).grad
    if env.rank == 1:  # one rank has it, all must know
        grad._local_tensor.view(-1)[0] = bad
    before = full_grads(model)
    for order in ORDERS:
        norm = clip_grad_norm_(model, math.inf, order)
        assert not norm.isfinite()
        assert norm.isnan().item() == math.isnan(bad)
        with pytest.raises(RuntimeError, match=r"norm of order .* is (nan|inf), so they cannot be clipped"):
            clip_grad_norm_(model, 1.0, order, error_if_nonfinite=True)
    for name, now in full_grads(model).items():
        torch.testing.assert_close(now, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_known_on_all_ranks(pool2: Pool, bad: float) -> None:
    pool2.run(_not_finite, bad)


def _accumulating(env: RankEnv) -> None:
    case = make_case("mlp")
    model, plain = shard(case.model(), env.mesh((2, 2))), case.model()
    with model.no_sync():  # type: ignore[operator]
        _backward(case, model, [env.rank])
        with pytest.raises(StateError, match="not summed over all ranks"):
            clip_grad_norm_(model, 1.0)
    _backward(case, model, [env.rank])
    model.set_is_last_backward(False)  # type: ignore[operator]
    _backward(case, model, [env.rank])  # its reductions may still run
    for _ in range(3):
        _backward(case, plain, list(range(env.world_size)))
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), torch_clip(plain.parameters(), 0.1), rtol=1e-12, atol=0)
    assert_same(full_grads(model), full_grads(plain))


def test_sums_that_wait_are_refused_and_reductions_that_run_are_joined(pool4: Pool) -> None:
    pool4.run(_accumulating)


class ClipsItself(nn.Module):
    """A training step that is a forward, of a root with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.ones(4))
        self.norm: Tensor | None = None
        self.clip: Any = torch_clip

    def forward(self, x: Tensor) -> None:
        (self.inner(x) * self.own).square().mean().backward()
        self.norm = self.clip(self.parameters(), 0.01)


def _in_a_forward(env: RankEnv, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = ClipsItself().double()
    model = copy.deepcopy(plain)
    hsdp.fully_shard(model.inner, mesh=env.mesh(shape))
    hsdp.fully_shard(model, mesh=env.mesh(shape))
    model.clip = clip_grad_norm_
    x = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(3, 4)
    plain(x)
    model(x)
    torch.testing.assert_close(model.norm, plain.norm, rtol=1e-12, atol=0)
    assert_same(full_grads(model), full_grads(plain))


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=mesh_id)
def test_a_root_clips_its_own_gradients_in_its_forward(pool2: Pool, shape: tuple[int, ...]) -> None:
    pool2.run(_in_a_forward, shape)


def _partial_sums(env: RankEnv) -> None:
    holder: Any = nn.Parameter(DTensor.from_local(torch.zeros(4), env.mesh(2), [Replicate()]))
    holder.grad = DTensor.from_local(torch.ones(4), env.mesh(2), [Partial()])
    clip_grad_norm_([holder], 1.0)


def test_partial_sums_are_refused(pool2: Pool) -> None:
    with pytest.raises(RemoteError, match="partial sums, whose norm says nothing"):
        pool2.run(_partial_sums)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0.0


@pytest.mark.parametrize(
    ("parameters", "max_norm", "norm_type", "error", "message"),
    [
        (nn.Linear(2, 2), -1.0, 2.0, ValueError, "max_norm of at least 0"),
        (nn.Linear(2, 2), math.nan, 2.0, ValueError, "max_norm of at least 0"),
        (nn.Linear(2, 2), 1.0, 0.0, ValueError, "norm_type greater than 0"),
        (nn.Linear(2, 2), 1.0, "two", ValueError, "norm_type greater than 0"),
        (3, 1.0, 2.0, TypeError, "not int"),
        (["weight"], 1.0, 2.0, TypeError, "of type str"),
    ],
)
def test_bad_arguments_are_refused(
    parameters: Any, max_norm: float, norm_type: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        clip_grad_norm_(parameters, max_norm, norm_type)


def test_complex_gradients_count_by_their_magnitude() -> None:
    params = [nn.Parameter(torch.zeros(2, dtype=torch.complex128)), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    params[0].grad = torch.tensor([3.0j, 0.0], dtype=torch.complex128)
    params[1].grad = torch.tensor([4.0], dtype=torch.float64)
    assert clip_grad_norm_(params, 1.0).item() == pytest.approx(5.0)
    assert params[0].grad[0].imag.item() == pytest.approx(0.6, rel=1e-5)


def _complex_in_tree(env: RankEnv) -> None:
    model = hsdp.fully_shard(nn.Linear(4, 4), mesh=env.mesh(2), comm_policy=hsdp.CommPolicy(reduction="tree"))
    model(torch.ones(2, 4)).sum().backward()
    beside = nn.Parameter(torch.zeros(3, dtype=torch.complex64))  # left alone, and equal on all ranks
    beside.grad = torch.tensor([3.0 + 4.0j, 1.0j, -2.0])
    for order in (1.0, 2.0, math.inf):
        whole = [beside.grad, *(grad for grad in full_grads(model).values() if grad is not None)]
        expected = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x, order) for x in whole]), order)
        norm = clip_grad_norm_([*model.parameters(), beside], math.inf, order)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


def test_complex_gradients_beside_a_tree_count_by_their_magnitude(pool2: Pool) -> None:
    pool2.run(_complex_in_tree)
