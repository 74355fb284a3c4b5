"""More than one model at a time, and what stays alive: gradients are plain autograd's, nothing outlives its owner."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hsdp import StateError, register_forward_method
from tests.support.deep import mean_grads
from tests.support.graphs import Chain, Net, floats, step, tokens
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, shard


def _distill(env: RankEnv) -> None:
    plain = Net().double(), Net().double()
    models = [shard(copy.deepcopy(one), env.mesh(2)) for one in plain]

    def run(student: nn.Module, teacher: nn.Module, rank: int) -> None:
        batch = tokens(rank)
        out = student(batch)
        with torch.no_grad():
            target = teacher(batch)
        (out - target).square().sum().backward()

    for _ in range(2):
        check_grads(models[0], plain[0], lambda m, r: run(m, models[1] if m is models[0] else plain[1], r), env.rank, 2)
    assert all(param.grad is None for param in models[1].parameters())
    for model in models:
        check_rest(model)


def test_teacher_and_student(pool2: Pool) -> None:
    pool2.run(_distill)


def _adversaries(env: RankEnv) -> None:
    plain = Chain().double(), Chain().double()
    ours = [shard(copy.deepcopy(one), env.mesh(2)) for one in plain]

    def run(first: nn.Module, second: nn.Module, rank: int) -> None:
        x = floats(rank)
        made = first(x)
        second(made.detach()).square().sum().backward()  # the critic's turn
        second(made).sum().backward()  # the generator's: through the critic

    for _ in range(2):
        for at in (0, 1):  # gradients of the generator, then of the critic
            for model in (*plain, *ours):
                model.zero_grad()
            check_grads(
                ours[at],
                plain[at],
                lambda m, r: run(*(ours if m is ours[at] else plain), r),
                env.rank,
                2,
            )


def test_adversaries_whose_graphs_go_through_each_other(pool2: Pool) -> None:
    pool2.run(_adversaries)


def _forward_inside_backward(env: RankEnv) -> None:
    plain = Net().double(), Chain().double()
    ours = [shard(copy.deepcopy(one), env.mesh(2)) for one in plain]

    def run(outer: nn.Module, inner: nn.Module, rank: int) -> None:
        def train_inner(grad: Tensor) -> None:
            with torch.enable_grad():
                inner(floats(rank)).sum().backward()

        blocks: Any = outer.blocks
        handle = blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(train_inner) and None)
        step(outer, rank)
        handle.remove()

    for _ in range(2):
        for at in (0, 1):
            for model in (*plain, *ours):
                model.zero_grad()
            check_grads(
                ours[at],
                plain[at],
                lambda m, r: run(*(ours if m is ours[at] else plain), r),
                env.rank,
                2,
            )


def test_a_model_trains_inside_the_backward_of_another(pool2: Pool) -> None:
    pool2.run(_forward_inside_backward)


def _delete(env: RankEnv) -> None:
    model = shard(Net().double(), env.mesh(2))
    optimizer = torch.optim.AdamW(model.parameters())
    for k in range(2):
        step(model, env.rank, k)
        optimizer.step()
        optimizer.zero_grad()
    local = model.head.weight.to_local()
    units = model._units()
    held = [param for unit in units for param in unit.params]
    watched: list[weakref.ref[Any]] = [weakref.ref(one) for one in (model, *units, *(unit.gradients for unit in units))]
    watched += [weakref.ref(tensor) for param in held for tensor in (param.sharded, param.local, param.trained)]
    del local, optimizer, units, held
    gc.collect()
    gc.disable()
    try:
        del model
        alive = [ref() for ref in watched if ref() is not None]
    finally:
        gc.enable()
    assert not alive, f"still alive without a collection: {alive}"


def test_deleting_a_model_frees_it_at_once(pool2: Pool) -> None:
    pool2.run(_delete)


def _zero_grad_frees(env: RankEnv) -> None:
    model = shard(Net().double(), env.mesh(2))
    for _ in range(2):
        step(model, env.rank)
        kept = [weakref.ref(p.grad._local_tensor.untyped_storage()) for p in model.parameters()]
        model.zero_grad()
        assert not [ref for ref in kept if ref() is not None], "gradients outlive zero_grad"


def test_zero_grad_frees_the_gradients(pool2: Pool) -> None:
    pool2.run(_zero_grad_frees)


def _train_in_backward(env: RankEnv) -> None:
    plain = Net().double()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    stepped: list[str] = []
    for name, param in model.named_parameters():

        def update(p: Tensor, name: str = name) -> None:
            stepped.append(name)
            assert p.grad is not None
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.1)
            p.grad = None

        param.register_post_accumulate_grad_hook(update)
    step(model, env.rank)
    assert sorted(stepped) == sorted(name for name, _ in model.named_parameters())
    for rank in range(env.world_size):
        step(plain, rank)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        expected = theirs.detach() - 0.1 * theirs.grad / env.world_size
        torch.testing.assert_close(ours.full_tensor(), expected, rtol=1e-11, atol=1e-11)


def test_an_optimizer_in_the_parameters_hooks(pool2: Pool) -> None:
    pool2.run(_train_in_backward)


def _run_in_hook(env: RankEnv) -> None:
    """A hook of the last gradients runs the model: refused, as it would drop what has landed."""
    plain = Net().double()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    ran: list[int] = []

    def evaluate(p: Tensor) -> None:
        if not ran:
            ran.append(1)
            with torch.no_grad():
                model(tokens(env.rank))

    handle = model.embedding.weight.register_post_accumulate_grad_hook(evaluate)
    with pytest.raises(StateError, match="after backward"):
        step(model, env.rank)
    assert ran, "the hook ran"
    handle.remove()
    model.zero_grad()
    check_grads(model, plain, step, env.rank, 2)
    check_rest(model)


def test_a_hook_that_runs_its_own_model_is_refused(pool2: Pool) -> None:
    pool2.run(_run_in_hook)


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale  # type: ignore[no-any-return]


def _delete_named(env: RankEnv) -> None:
    model = shard(_Named(), env.mesh(2))
    register_forward_method(model, "encode")
    assert list(inspect.signature(model.encode).parameters) == ["x", "scale"]
    model.encode(torch.ones(2, 4), scale=2.0).sum().backward()
    watched = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert watched() is None, "still alive without a collection"
    finally:
        gc.enable()


def test_a_registered_method_does_not_keep_its_module(pool2: Pool) -> None:
    pool2.run(_delete_named)


def _deleted(env: RankEnv, shape: tuple[int, ...]) -> None:
    """What has not landed when the model goes is for the parameters, as long as the optimizer has them."""
    plain = Net().double()
    model: Any = shard(copy.deepcopy(plain), env.mesh(shape))
    params, gone = dict(model.named_parameters()), weakref.ref(model)
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    model.set_is_last_backward(False)
    step(model, env.rank)
    del model
    gc.collect()
    assert gone() is None
    optimizer.step()
    for name, grad in mean_grads(plain, step, env.world_size).items():
        assert grad is not None
        expected = plain.get_parameter(name) - 0.1 * grad
        torch.testing.assert_close(params[name].full_tensor(), expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_reductions_that_run_on_outlive_the_model(pool2: Pool, shape: tuple[int, ...]) -> None:
    pool2.run(_deleted, shape)


def _deleted_with_sums(env: RankEnv) -> None:
    model: Any = shard(Net().double(), env.mesh(2))
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    with model.accumulate(last=False):
        step(model, env.rank)
    units = [weakref.ref(unit) for unit in model._units()]
    del model
    gc.collect()
    with pytest.raises(StateError, match="gradients that were not summed over all ranks"):
        optimizer.step()
    optimizer.zero_grad()
    del params, optimizer
    gc.collect()
    assert not [unit() for unit in units if unit() is not None], "nothing is pending any more"


def test_an_optimizer_is_refused_while_sums_of_a_deleted_model_are_pending(pool2: Pool) -> None:
    pool2.run(_deleted_with_sums)
