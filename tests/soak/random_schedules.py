"""Random training schedules, run on a sharded model and on its twin: what `test_schedules.py` draws and soaks.

A schedule is a list of plain tuples, so that hypothesis can shrink it and it travels to the workers:

    ("micro", level, uses, forwards, backwards)   one micro-batch; level: "full", "running", "scatter" or "local"
    ("zero", who, to_none)                         zero_grad of the "module" or the "optimizer"
    ("flush",)                                     communicate what is pending
    ("eval",)                                      a forward without gradients
    ("freeze", block, name, frozen)                flush, then change requires_grad of a block's parameter on both
    ("step",)                                      flush what is pending, then an optimizer step on both

`uses` says what a forward is to use; what it means is the model's affair.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp import CommPolicy, fully_shard
from hsdp.optim import local
from tests.support.rig import RankEnv

WIDTH = 4
POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "fusion": st.sampled_from(["packed", "direct"]),
        "prefetch": st.integers(0, 2),
        "max_inflight_reduce_scatters": st.integers(1, 2),
        "max_inflight_all_reduces": st.integers(1, 2),
        "reduce_scatter_bucket_bytes": st.just(1 << 20),
        "all_reduce_bucket_bytes": st.just(1 << 20),
        "reduction": st.just("tree"),
        "shared_memory": st.just(False),
    },
)
"""Arguments of `CommPolicy` that random tests draw."""

NUM_BLOCKS = 3
FREEZABLE = ("left.bias", "left.weight", "right")
"""Parameters of a block. With `right` frozen, a rank that uses that branch alone trains nothing of the block."""

Action = tuple[Any, ...]
MakeLoss = Callable[[nn.Module, int, int, Any], Tensor]
"""(model, seed, rank, uses) -> a loss, the same on the sharded model as on its twin."""


class Choosy(nn.Module):
    """A block of which a micro-batch may use one branch, the other, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Parameter(torch.randn(WIDTH + 1, WIDTH))

    def forward(self, x: Tensor, use: int) -> Tensor:
        y = x
        if use != 1:
            y = y + torch.tanh(self.left(x))
        if use != 2:
            y = y + torch.tanh(x @ self.right[:WIDTH] + self.right[WIDTH])
        return y


class Net(nn.Module):
    """Blocks between an embedding-like input weight and a head, both the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Parameter(torch.randn(3, WIDTH))
        self.blocks = nn.ModuleList(Choosy() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, uses: tuple[int, ...]) -> Tensor:
        """`uses`: for each block 0 (both branches), 1 or 2 (one), 3 (the block runs, its output is dropped)."""
        y = x @ self.inlet
        for block, use in zip(self.blocks, uses, strict=True):
            out = block(y, use % 3)
            y = y if use == 3 else out
        return self.head(y)


def run_schedule(
    env: RankEnv,
    shape: tuple[int, ...],
    policy: dict[str, Any],
    reshard: bool | None,
    factors: tuple[str, float],
    schedule: list[Action],
) -> None:
    """Runs a schedule on this rank; raises AssertionError where the sharded model differs from its twin.

    Args:
        env, shape: the rank, and the shape of its mesh.
        policy: arguments of `CommPolicy`.
        reshard: `reshard_after_forward`.
        factors: reduce op and gradient scaling factor.
        schedule: what to do.
    """
    torch.manual_seed(7)
    twin = Net().double()
    model = copy.deepcopy(twin)
    kwargs: dict[str, Any] = {"mesh": env.mesh(shape), "comm_policy": CommPolicy(**policy)}
    kwargs["reshard_after_forward"] = reshard
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    reduce_op, scale = factors
    model.set_reduce_op_type(reduce_op)
    model.set_gradient_scaling_factor(scale)
    scale /= env.world_size if reduce_op == "avg" else 1
    play(env, model, twin, schedule, _loss, [(0,) * NUM_BLOCKS], scale)


def play(
    env: RankEnv,
    model: Any,
    twin: nn.Module,
    schedule: list[Action],
    make_loss: MakeLoss,
    eval_uses: Any,
    scale: float | None = None,
    over_replicas: bool = False,
) -> None:
    """Plays a schedule on a sharded model and on its twin; raises AssertionError where they differ.

    Args:
        env, schedule: the rank, and what to do.
        model, twin: the two models.
        make_loss: makes a micro-batch's loss.
        eval_uses: what forwards without gradients use.
        scale: what the gradients' sum over ranks is multiplied with; None: their mean is taken.
        over_replicas: the optimizer's step is shared out among replicas.
    """
    scale = 1.0 / env.world_size if scale is None else scale
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin)]
    if over_replicas:
        local(optimizers[0], over_replicas=True)
    zeroed = owes = False
    for number, action in enumerate(schedule):
        kind = action[0]
        if kind == "micro":
            _, level, uses, forwards, backwards = action
            seeds = [100 * number + k for k in range(forwards)]
            with _level(model, level):
                _backward([make_loss(model, seed, env.rank, uses) for seed in seeds], backwards)
            owes = level in ("scatter", "local")
            for rank in range(env.world_size):
                _backward([make_loss(twin, seed, rank, uses) * scale for seed in seeds], backwards)
        elif kind == "zero":
            _, who, to_none = action
            zeroed = zeroed or not to_none
            (model if who == "module" else optimizers[0]).zero_grad(set_to_none=to_none)
            twin.zero_grad(set_to_none=to_none)
        elif kind == "eval":
            with torch.no_grad():
                values = [make_loss(m, 100 * number, env.rank, eval_uses) for m in (model, twin)]
            assert torch.allclose(*values, rtol=0, atol=1e-11), f"losses differ in action {number}"
        else:
            if kind != "step" or owes:  # a step joins what runs by itself
                model.flush()
                owes = False
                _compare(model, twin, zeroed, f"after action {number} {action}")
            if kind == "step":
                for optimizer in optimizers:
                    optimizer.step()
            elif kind == "freeze":
                _, block, name, frozen = action
                for net in (model, twin):
                    net.blocks[block].get_parameter(name).requires_grad_(not frozen)
    model.flush()
    _compare(model, twin, zeroed, "at the end")


def _loss(model: nn.Module, seed: int, rank: int, uses: list[Any]) -> Tensor:
    """Each rank its own choice of branches; the dropped block (3) is the same everywhere, as it is a branch."""
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))
    loss: Tensor = (model(x, tuple(uses[rank % len(uses)])) ** 2).mean()
    return loss


def _backward(losses: list[Tensor], backwards: str) -> None:
    if backwards == "together":
        torch.stack(losses).sum().backward()
    elif backwards == "twice":
        total = torch.stack(losses).sum()
        total.backward(retain_graph=True)
        total.backward()
    else:  # last forward first, as pipeline schedules do
        for loss in reversed(losses):
            loss.backward()


@contextmanager
def _level(model: Any, level: str) -> Iterator[None]:
    model.set_requires_all_reduce(level != "scatter")
    model.set_is_last_backward(level != "running")
    try:
        with model.no_sync() if level == "local" else nullcontext():
            yield
    finally:
        model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)


def _compare(model: nn.Module, twin: nn.Module, zeroed: bool, when: str) -> None:
    for (name, param), mine in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert isinstance(param, DTensor), f"{name} is a {type(param).__name__} {when}"
        assert torch.allclose(param.full_tensor(), mine, rtol=0, atol=1e-11), f"value of {name} differs {when}"
        ours = None if param.grad is None else param.grad.full_tensor()
        if zeroed:  # a zero gradient and none are the same after zero_grad(set_to_none=False)
            ours = torch.zeros_like(mine) if ours is None else ours
            theirs = torch.zeros_like(mine) if mine.grad is None else mine.grad
        else:
            assert (ours is None) == (mine.grad is None), f"gradient of {name} is {ours}, twin's {mine.grad} {when}"
            theirs = mine.grad
        if ours is not None:
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-11), f"gradient of {name} differs {when}"
