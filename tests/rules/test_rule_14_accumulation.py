"""Rule 14: any interleaving of sync levels, parameters and `zero_grad`: never a lost, doubled or leaked sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsdp
from tests.support.deep import DIM, Deep, collectives, floats, mean_grads, never_done, of_kind, only_sharded, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, shard
from tests.support.twin import assert_same, full_grads

TREE = hsdp.CommPolicy(reduction="tree")
LEVELS = {"local": (False, True), "scatter": (True, False), "full": (True, True)}
"""What is communicated: (`set_requires_grad_sync`, `set_requires_all_reduce`)."""


class Choosy(nn.Module):
    """Units a, b, c; a micro-batch runs the ones it names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, names: str = "abc") -> Tensor:
        for name in names:
            x = torch.tanh(self.blocks["abc".index(name)](x))
        return self.last(x)


def play(script: str, model: nn.Module, rank: int) -> None:
    """Runs a script on a sharded model or on its twin.

    Words: `level:units` is a micro-batch, with `+zero` behind it gradients are zeroed between its forward and backward;
    `zero` and `zeros` are the two kinds of `zero_grad`; behind `async` the end of backward does not wait, until `drain`.
    """
    for k, word in enumerate(script.split()):
        what, _, units = word.partition(":")
        if what in ("zero", "zeros"):
            model.zero_grad(set_to_none=what == "zero")
        elif what in ("async", "drain"):
            only_sharded(model, "set_is_last_backward", what == "drain")
        else:
            sync, all_reduce = LEVELS[what]
            only_sharded(model, "set_requires_grad_sync", sync)
            only_sharded(model, "set_requires_all_reduce", all_reduce)
            loss = model(floats(rank, k), units.removesuffix("+zero")).square().sum()
            if units.endswith("+zero"):
                model.zero_grad()
            loss.backward()


SCRIPTS = [
    "full:abc full:abc",
    "local:abc scatter:abc full:abc",
    "scatter:abc local:abc scatter:abc full:abc",
    "full:abc local:abc full:abc scatter:abc full:abc",
    # other parameters in each micro-batch; a group unused in the last one
    "local:a scatter:b full:c",
    "scatter:ab local:bc full:c",
    "full:ab scatter:bc local:a full:b",
    # zero_grad of both kinds, at any point
    "local:abc zero full:abc",
    "local:abc zeros full:abc",
    "scatter:abc zero full:ab",
    "scatter:abc zeros full:abc",
    "full:abc scatter:abc zeros local:a full:bc",
    "local:abc scatter:abc zero local:b full:a",
    "local:abc scatter:abc+zero full:abc",
    "full:abc full:abc+zero",
    # reductions still under way when the next micro-batch begins
    "async full:abc local:abc scatter:abc drain full:abc",
    "async full:abc zero drain full:abc",
    "async full:abc zeros drain full:abc",
    "async scatter:abc zero drain full:abc",
]


def check_script(env: RankEnv, script: str, shapes: Sequence[tuple[int, ...]], policy: hsdp.CommPolicy | None) -> None:
    run = partial(play, script)
    expected = mean_grads(seeded(Choosy), run, env.world_size)
    zeros = {name: torch.zeros_like(param) for name, param in seeded(Choosy).named_parameters()}
    for shape in shapes:
        model = shard(seeded(Choosy), env.mesh(shape), comm_policy=policy)
        model(floats(env.rank)).sum().backward()  # so that there is a root, and an order
        model.zero_grad()
        with never_done():
            run(model, env.rank)
        grads = full_grads(model)
        if "zeros" in script:  # behind zero_grad(set_to_none=False) no gradient and zeros are the same
            grads = {name: zeros[name] if grad is None else grad for name, grad in grads.items()}
            assert_same(grads, {name: zeros[name] if grad is None else grad for name, grad in expected.items()})
        else:
            assert_same(grads, expected)
        check_rest(model)


@pytest.mark.parametrize("script", SCRIPTS)
def test_rule_14_accumulation_equals_the_twin(pool4: Pool, script: str) -> None:
    pool4.run(check_script, script, [(4,), (2, 2)], None)
    pool4.run(check_script, script, [(2, 2), (4, 1)], TREE)


def test_rule_14_accumulation_in_buckets(pool4: Pool) -> None:
    policy = hsdp.CommPolicy(reduce_scatter_bucket_bytes=1 << 20, all_reduce_bucket_bytes=1 << 20)
    pool4.run(check_script, "local:a scatter:abc full:bc full:ab", [(2, 2)], policy)


def check_replicated(env: RankEnv, script: str, shape: tuple[int, ...], policy: hsdp.CommPolicy | None) -> None:
    """Parameters that every rank keeps whole are summed over all ranks in the same pipeline, and pending as the others."""
    run = partial(play, script)
    model: Any = seeded(Choosy)
    options: dict[str, Any] = {"mesh": env.mesh(shape), "comm_policy": policy}
    for block in model.blocks:
        hsdp.fully_shard(block, replicate_params=[block.bias], **options)
    hsdp.fully_shard(model, replicate_params=[model.last.weight], **options)
    run(model, env.rank)
    assert_same(full_grads(model), mean_grads(seeded(Choosy), run, env.world_size))
    check_rest(model)


@pytest.mark.parametrize("policy", [None, TREE], ids=["any", "tree"])
@pytest.mark.parametrize("script", ["full:abc", "local:ab scatter:abc zero local:c scatter:ab full:a"])
def test_rule_14_accumulation_of_replicated_parameters(pool4: Pool, script: str, policy: hsdp.CommPolicy | None) -> None:
    pool4.run(check_replicated, script, (2, 2), policy)


def check_wide_sums(env: RankEnv, level: str, shape: tuple[int, ...]) -> None:
    """One gradient of 1, then 32 of 2**-8: in bf16 the small ones would vanish one by one."""
    model = nn.Linear(4, 4, bias=False)
    half = hsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    hsdp.fully_shard(model, mesh=env.mesh(shape), mp_policy=half)
    for k in range(33):
        sync, all_reduce = LEVELS["full" if k == 32 else level]
        only_sharded(model, "set_requires_grad_sync", sync)
        only_sharded(model, "set_requires_all_reduce", all_reduce)
        model(torch.full((1, 4), 1.0 if k == 0 else 2.0**-8)).sum().backward()
    grad = full_grads(model)["weight"]
    assert grad is not None
    assert (grad.dtype, grad.unique().tolist()) == (torch.float32, [1.125])


@pytest.mark.parametrize("level", ["local", "scatter"])
def test_rule_14_partial_sums_are_fp32(pool2: Pool, level: str) -> None:
    pool2.run(check_wide_sums, level, (2, 1) if level == "scatter" else (2,))


def check_toggled(env: RankEnv, level: str, shape: tuple[int, ...]) -> None:
    """Which parameters want gradients changes while others' sums are pending: added, or refused, but not mixed up."""

    def run(model: nn.Module, rank: int) -> None:
        first, second = model.blocks[0], model.blocks[1]  # type: ignore[index]
        second.bias.requires_grad_(False)
        play(f"{level}:abc", model, rank)
        first.bias.requires_grad_(False)
        second.bias.requires_grad_(True)
        play("full:abc", model, rank)
        first.bias.requires_grad_(True)

    expected = mean_grads(seeded(Choosy), run, env.world_size)
    model = shard(seeded(Choosy), env.mesh(shape))
    try:
        run(model, env.rank)
    except hsdp.StateError:  # a refusal is right too
        return
    assert_same(full_grads(model), expected)


@pytest.mark.parametrize("level", ["local", "scatter"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_rule_14_requires_grad_changes_while_sums_are_pending(pool2: Pool, level: str, shape: tuple[int, ...]) -> None:
    pool2.run(check_toggled, level, shape)


def check_frozen_then_thawed(env: RankEnv) -> None:
    def run(model: nn.Module, rank: int) -> None:
        bias = model.blocks[0].bias  # type: ignore[index,union-attr]
        bias.requires_grad_(False)
        play("full:abc", model, rank)
        assert bias.grad is None
        bias.requires_grad_(True)
        play("full:abc", model, rank)

    expected = mean_grads(seeded(Choosy), run, env.world_size)
    model = shard(seeded(Choosy), env.mesh(2))
    run(model, env.rank)
    assert_same(full_grads(model), expected)


def test_rule_14_requires_grad_changes_between_micro_batches(pool2: Pool) -> None:
    pool2.run(check_frozen_then_thawed)


def check_one_all_reduce(env: RankEnv) -> None:
    """`accumulate` sums over replicas once, at the last micro-batch; pending sums are seen, refused by a step, flushed."""
    model = shard(seeded(Choosy), env.mesh((2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with collectives() as log:
        for k in range(4):
            with model.accumulate(last=k == 3):  # type: ignore[operator]
                play_loss = model(floats(env.rank, k)).square().sum()
                play_loss.backward()
            assert len(of_kind(log, "all_reduce")) == (4 if k == 3 else 0)
    optimizer.step()
    model.zero_grad()
    play("scatter:abc", model, env.rank)
    assert set(model.pending_gradients()) == {name for name, _ in model.named_parameters()}  # type: ignore[operator]
    with pytest.raises(hsdp.StateError, match=r"not summed over all ranks"):
        optimizer.step()
    model.flush()  # type: ignore[operator]
    assert not model.pending_gradients()  # type: ignore[operator]
    optimizer.step()


def test_rule_14_the_all_reduce_runs_once_per_step(pool2: Pool) -> None:
    pool2.run(check_one_all_reduce)


def check_hooked(env: RankEnv, level: str) -> None:
    """A hook sees the sum of micro-batches once, which is told to whoever put it there."""
    model: Any = shard(seeded(Deep), env.mesh((2, 1)))
    seen: list[float] = []
    model.blocks[0].weight.register_hook(lambda grad: seen.append(1.0))
    setter = "set_requires_gradient_sync" if level == "stash" else "set_requires_all_reduce"
    getattr(model, setter)(False)
    with pytest.warns(UserWarning, match="'weight' has a gradient hook, and sums of gradients are held back"):
        step(model, env.rank)
    getattr(model, setter)(True)
    step(model, env.rank)
    assert len(seen) == 1


@pytest.mark.parametrize("level", ["stash", "defer"])
def test_rule_14_hooks_beside_sums_that_are_held_back_are_warned_of(pool2: Pool, level: str) -> None:
    pool2.run(check_hooked, level)
