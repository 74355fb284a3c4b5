"""Stepped shards land when somebody reads them, whoever that is; who held their memory before the step finds them there."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hsdp
from hsdp import debug
from hsdp.comm import host_memory
from hsdp.comm.collectives import Comm
from hsdp.errors import CollectiveError
from hsdp.optim import local
from hsdp.params.pending import PendingShard
from hsdp.unit.pending_shards import PendingShards
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, pool_for, shard
from tests.support.twin import full_params


class Net(nn.Module):
    """Two blocks with even and uneven rows, and a head of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _pair(env: RankEnv, shape: tuple[int, ...]) -> tuple[Any, Any, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    plain = Net().double()
    models: list[Any] = [shard(copy.deepcopy(plain), env.mesh(shape)) for _ in range(2)]
    optimizers = [local(torch.optim.SGD(m.parameters(), lr=0.1), over_replicas=m is models[0]) for m in models]
    return models[0], models[1], optimizers


def _step(env: RankEnv, models: tuple[Any, Any], optimizers: list[torch.optim.Optimizer], number: int) -> None:
    """One step of the model that shares it out, then of the one that repeats it."""
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + env.rank))
    for model, optimizer in reversed(list(zip(models, optimizers, strict=True))):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _waiting(module: Any) -> list[bool]:
    """Of each sharded parameter of a model, or of those of a unit."""
    params = [param.sharded for unit in module._units() for param in unit.params]
    return [type(param._local_tensor) is PendingShard for param in params]


def _locals(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [param.to_local() for param in model.parameters()]  # type: ignore[operator]


READERS: dict[str, Callable[[Any], list[Tensor]]] = {
    "to_local": _locals,
    "_local_tensor": lambda m: [p._local_tensor + 0.0 for p in m.parameters()],
    "out of a list": lambda m: torch._foreach_add([p._local_tensor for p in m.parameters()], 0.0),
    "numpy": lambda m: [torch.from_numpy(p._local_tensor.numpy().copy()) for p in m.parameters()],
    "pickle": lambda m: [pickle.loads(pickle.dumps(p._local_tensor)) for p in m.parameters()],
    "storage": lambda m: [torch.empty(0).double().set_(p._local_tensor.untyped_storage()) for p in m.parameters()],
    "item": lambda m: [
        torch.tensor(p._local_tensor.view(-1)[-1].item()) for p in m.parameters() if p._local_tensor.numel()
    ],
    "state_dict": lambda m: [v.to_local() for v in m.state_dict().values()],
    "deepcopy": lambda m: [copy.deepcopy(p).to_local() for p in m.parameters()],
    "full_tensor": lambda m: [p.full_tensor() for p in m.parameters()],
    "full_params": lambda m: list(full_params(m).values()),
    "norm": lambda m: [nn.utils.get_total_norm(list(m.parameters()), float("inf")).full_tensor()],  # type: ignore[attr-defined]
    "in place": lambda m: [p.detach().mul_(2.0).to_local() for p in m.parameters()],
    "penalty": lambda m: [sum(p.square().sum().full_tensor() for p in m.parameters())],
    "summon": lambda m: [m.unshard(), m.blocks[0].unshard(), m.head.weight.clone(), m.reshard()][2:3],
    "replicas": lambda m: [torch.tensor(hsdp.check_replicas(m) is None)],
    "move": lambda m: _locals(m.to(torch.float32)),
}


def _is_read(env: RankEnv, shape: tuple[int, ...]) -> None:
    mine, theirs, optimizers = _pair(env, shape)
    for number, (name, read) in enumerate(READERS.items()):
        _step(env, (mine, theirs), optimizers, number)
        assert any(_waiting(mine)), f"nothing waits before {name}"
        found, expected = read(mine), read(theirs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14, msg=f"read by {name}")
        del found, expected  # or the next step would find that somebody holds them
    assert debug.ON, "else parts that are missing would look like those of the step before"


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 1)], ids=mesh_id)
def test_whoever_reads_them_finds_them_whole(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool_for(request, shape).run(_is_read, shape)


def _lands_in_turn(env: RankEnv) -> None:
    mine, theirs, optimizers = _pair(env, (2, 1))
    _step(env, (mine, theirs), optimizers, 0)
    assert all(_waiting(mine)), "a step ends with all parts on their way"
    seen: list[tuple[bool, bool]] = []
    first, second = mine.blocks
    first.register_forward_hook(lambda *_: seen.append((any(_waiting(first)), all(_waiting(second)))))
    for module in (mine, first):
        module.set_modules_to_forward_prefetch([module])  # itself alone
    with torch.no_grad():
        mine(torch.ones(2, 8, dtype=torch.float64))
    assert seen == [(False, True)], "the second block's parts are on their way while the first computes"
    assert not any(_waiting(mine))


def test_each_unit_lands_in_its_own_forward(pool2: Pool) -> None:
    pool2.run(_lands_in_turn)


def _is_held(env: RankEnv) -> None:
    mine, theirs, optimizers = _pair(env, (2, 2))
    holds: list[Callable[[Any], list[Any]]] = [
        _locals,
        lambda m: [p._local_tensor for p in m.parameters()],
        lambda m: [p._local_tensor.numpy() for p in m.parameters()],
        lambda m: list(m.state_dict().values()),
        lambda m: [p.detach() for p in m.parameters()],
        lambda m: [p._local_tensor.view(-1)[:1] for p in m.parameters()],
    ]
    for number, hold in enumerate(holds):
        _step(env, (mine, theirs), optimizers, 2 * number)
        held, expected = hold(mine), hold(theirs)
        _step(env, (mine, theirs), optimizers, 2 * number + 1)
        values = [
            [v.to_local() if isinstance(v, DTensor) else torch.as_tensor(v) for v in some] for some in (held, expected)
        ]
        torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-14, msg=f"held since the step before: {number}")
        del held, expected, values


def test_who_held_their_memory_before_the_step_finds_the_new_values(pool4: Pool) -> None:
    pool4.run(_is_held)


def _other_steps(env: RankEnv) -> None:
    mine, theirs, optimizers = _pair(env, (2, 2))
    others = [torch.optim.SGD(m.parameters(), lr=0.05, weight_decay=0.1) for m in (mine, theirs)]
    for number in range(2):
        _step(env, (mine, theirs), optimizers, 2 * number)
        assert any(_waiting(mine))
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(env.rank))
        for model in (mine, theirs):
            model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for other in others:  # of the same gradients, straight behind it
            other.step()
            other.zero_grad()
        expected = full_params(theirs)
        for name, value in full_params(mine).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-13, msg=name)


def test_another_optimizer_steps_what_has_landed(pool4: Pool) -> None:
    pool4.run(_other_steps)


def _fails(env: RankEnv) -> None:
    mine, theirs, optimizers = _pair(env, (2, 1))
    _step(env, (mine, theirs), optimizers, 0)
    pending = mine._units()[0]._pending_shards
    with mock.patch.object(pending, "_finish", side_effect=CollectiveError("lost")):
        for _ in range(2):
            with pytest.raises(CollectiveError, match="lost"):
                mine.head.weight.to_local()
        with pytest.raises(CollectiveError, match="lost"):
            mine(torch.ones(2, 8, dtype=torch.float64))


def test_a_gather_that_fails_is_told_to_every_reader(pool2: Pool) -> None:
    pool2.run(_fails)


def _is_deleted(env: RankEnv) -> None:
    gc.disable()
    try:
        for number in range(4):
            mine, theirs, optimizers = _pair(env, (2, 1))
            _step(env, (mine, theirs), optimizers, number)
            assert any(_waiting(mine))
            units = [weakref.ref(unit) for unit in mine._units()]
            del mine, theirs, optimizers
            assert not any(unit() for unit in units), "a cycle keeps the units, and all memory of the model"
    finally:
        gc.enable()


def test_a_model_that_is_deleted_behind_a_step_is_freed_at_once(pool2: Pool) -> None:
    pool2.run(_is_deleted)


BREAKS: dict[str, tuple[Any, str]] = {
    "started": (PendingShards, "held_elsewhere"),
    "no room for rows": (torch, "zeros"),
    "no room for a gather": (Comm, "all_gather"),
    "landing": (Tensor, "reshape"),  # in a forward, which finds no memory for rows that have come
    "memory of the host": (host_memory, "_quietly"),  # in a forward, which is interrupted as it copies them
}
"""What raises, once, in a step or in the forward behind it."""


def _breaks_off(env: RankEnv, where: str) -> None:
    mine, theirs, optimizers = _pair(env, (2, 1))
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(env.rank))
    for model in (mine, theirs):
        model(x).square().mean().backward()
    optimizers[1].step()
    later = where in ("landing", "memory of the host")
    if later:
        optimizers[0].step()
    with mock.patch.object(*BREAKS[where], side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        mine(x) if later else optimizers[0].step()
    for (name, param), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(param.to_local(), other.to_local()), f"{name} has old rows"


@pytest.mark.parametrize("where", BREAKS)
def test_a_gather_that_somebody_breaks_off_is_not_lost(pool2: Pool, where: str) -> None:
    pool2.run(_breaks_off, where)
