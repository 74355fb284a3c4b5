"""`state_dict()` is sharded and under its own names at every moment; PyTorch's checkpoints go from one mesh to another."""

from __future__ import annotations

import copy
import io
import math
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import hsdp
from tests.support.graphs import Net, loss, step, tokens
from tests.support.models import Case, make_case
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_sharded, mesh_id, pool_for, shard
from tests.support.twin import Twin, adamw, full_params, sgd, train, twin_of

FIRST_STEPS, NEXT_STEPS = 3, 5
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
REST = ("at rest", "between forward and backward", "after backward")


# -- at any moment --------------------------------------------------------------------------------------------------


class _Sentinel:
    """Looks at a model's parameters and state_dict whenever something happens in it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.params = dict(model.named_parameters())
        self.values = full_params(model)
        self.moments: list[str] = []
        blocks: Any = model.blocks
        model.register_forward_pre_hook(lambda *_: self.look("before forward"))
        blocks[0].register_forward_pre_hook(lambda *_: self.look("inside the root's forward"))
        blocks[1].norm.register_forward_hook(lambda *_: self.look("inside a unit's forward"))
        blocks[1].register_forward_hook(lambda module, args, out: self._hook(out, "before a unit's backward"))
        blocks[1].norm.register_forward_hook(lambda module, args, out: self._hook(out, "inside a unit's backward"))
        blocks[0].norm.weight.register_post_accumulate_grad_hook(lambda _: self.look("when a gradient lands"))
        model.register_forward_hook(lambda *_: self.look("after forward"))

    def _hook(self, out: Tensor, moment: str) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: self.look(moment))

    def look(self, moment: str) -> None:
        """Everything is as it was; only values are compared at the end, for that takes collectives.

        Inside of a forward or a backward `parameters()` may be unsharded; the state dict is not.
        """
        self.moments.append(moment)
        assert [name for name, _ in self.model.named_parameters()] == self.names, moment
        if moment in REST:
            assert all(param is self.params[name] for name, param in self.model.named_parameters()), moment
        state = self.model.state_dict()
        assert list(state) == self.names, moment
        for name, value in state.items():
            assert isinstance(value, DTensor), f"{moment}: {name} is a {type(value).__name__}"
            assert value.shape == self.values[name].shape, moment
            assert torch.equal(value.to_local(), self.params[name].to_local()), moment
        if moment in REST:
            check_sharded(self.model)

    def compare(self) -> None:
        """Every rank calls it."""
        for name, value in self.model.state_dict().items():
            assert torch.equal(value.full_tensor(), self.values[name]), name


def _look_all_the_time(env: RankEnv, shape: tuple[int, ...], keep: bool | None) -> list[str]:
    model = shard(Net().double(), env.mesh(shape), reshard_after_forward=keep)
    sentinel = _Sentinel(model)
    for k in range(2):
        sentinel.look("at rest")
        value = loss(model, env.rank, k)
        sentinel.look("between forward and backward")
        value.backward()
        sentinel.look("after backward")
        sentinel.compare()
    with torch.no_grad():
        model(tokens(env.rank))
    sentinel.compare()
    return sentinel.moments


@pytest.mark.parametrize(
    ("shape", "keep"),
    [((2,), None), ((2,), True), ((2,), False), ((2, 1), None), ((2, 2), None)],
    ids=lambda value: mesh_id(value) if isinstance(value, tuple) else str(value),
)
def test_state_dict_is_sharded_at_every_moment(
    request: pytest.FixtureRequest, shape: tuple[int, ...], keep: bool | None
) -> None:
    for moments in pool_for(request, shape).run(_look_all_the_time, shape, keep):
        assert len(set(moments)) == 10, moments


def _state_dict_is_a_view(env: RankEnv) -> None:
    plain = Net().double()
    model = shard(copy.deepcopy(plain), env.mesh(2))
    state = model.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, env.rank)
    optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(state[name].to_local(), param.to_local()), f"{name} is a copy"
    with torch.no_grad():
        for value in state.values():
            value.mul_(0)
    assert model(tokens(env.rank)).abs().max() == 0


def test_state_dict_shares_memory_with_the_parameters(pool2: Pool) -> None:
    pool2.run(_state_dict_is_a_view)


def _strict(env: RankEnv) -> None:
    model = shard(Net().double(), env.mesh(2))
    state = model.state_dict()
    del state["head.bias"]
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        model.load_state_dict(state)
    state["stranger"] = torch.zeros(1)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["head.bias"], ["stranger"])


def test_load_state_dict_tells_missing_and_unexpected_names(pool2: Pool) -> None:
    pool2.run(_strict)


# -- from one mesh to another ---------------------------------------------------------------------------------------


@cache
def _twin(name: str, optimizer: Literal["sgd", "adamw"]) -> Twin:
    return twin_of(make_case(name), 4, FIRST_STEPS + NEXT_STEPS, OPTIMIZERS[optimizer])


def _build(env: RankEnv, case: Case, shape: tuple[int, ...], optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shard(case.model(seed=env.world_size), env.mesh(shape))  # a start of its own: all must come from the file
    return model, OPTIMIZERS[optimizer](model.parameters())


def _save(env: RankEnv, name: str, optimizer_name: str, path: str) -> Tensor:
    case = make_case(name)
    model = shard(case.model(), env.mesh((2, 2)))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    losses = train(model, case, env.rank, FIRST_STEPS, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    return losses[:, 0]


def _load(env: RankEnv, name: str, optimizer_name: str, path: str, shape: tuple[int, ...]) -> Tensor:
    """Goes on from the file; the batches of four ranks are shared out among those that there are."""
    case = make_case(name)
    model, optimizer = _build(env, case, shape, optimizer_name)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    share = 4 // env.world_size
    losses = torch.zeros(NEXT_STEPS, share, dtype=torch.float64)
    for at in range(NEXT_STEPS):
        optimizer.zero_grad()
        batches = [case.batch(FIRST_STEPS + at, env.rank * share + i) for i in range(share)]
        values = torch.stack([case.loss(model, batch) for batch in batches])
        values.mean().backward()
        losses[at] = values.detach()
        optimizer.step()
    check_sharded(model)
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["odd", "tied", "scalar"])
def test_the_next_steps_are_the_same_on_other_meshes(
    pool4: Pool, pool2: Pool, tmp_path: Path, name: str, optimizer: Literal["sgd", "adamw"]
) -> None:
    path = str(tmp_path / "checkpoint")
    twin = _twin(name, optimizer)
    first = torch.stack(pool4.run(_save, name, optimizer, path))  # [ranks, steps]
    torch.testing.assert_close(first.T, twin.losses[:FIRST_STEPS, :, 0], rtol=1e-11, atol=1e-11)
    for shape in [(2, 2), (4, 1), (2,), (2, 1)]:
        pool = pool4 if math.prod(shape) == 4 else pool2
        losses = torch.cat(pool.run(_load, name, optimizer, path, shape), dim=1)  # [steps, batches]
        torch.testing.assert_close(losses, twin.losses[FIRST_STEPS:, :, 0], rtol=1e-11, atol=1e-11)


def _save_plainly(env: RankEnv, path: str) -> dict[str, Tensor]:
    model = shard(make_case("odd").model(), env.mesh((2, 2)))
    dcp.save(model.state_dict(), checkpoint_id=path)
    return full_params(model)


def _load_plainly(env: RankEnv, path: str) -> dict[str, Tensor]:
    model = shard(make_case("odd").model(seed=1), env.mesh(2))
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)  # into the parameters' own memory
    return full_params(model)


def test_a_plain_state_dict_is_loaded_in_place(pool4: Pool, pool2: Pool, tmp_path: Path) -> None:
    saved = pool4.run(_save_plainly, str(tmp_path))[0]
    for loaded in pool2.run(_load_plainly, str(tmp_path)):
        for name, value in saved.items():
            assert torch.equal(loaded[name], value), name


def _empty_shards(env: RankEnv) -> None:
    """On rank 1 the weight and the bias have no rows, and do not lie first in their buffer."""
    model = hsdp.fully_shard(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1)), mesh=env.mesh(2))
    state = model.state_dict()
    for value in (copy.deepcopy(state), _through_a_file(state)):
        for name, tensor in value.items():
            assert torch.equal(tensor.to_local(), state[name].to_local())


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def test_state_dicts_of_ranks_without_rows_are_copied_and_saved(pool2: Pool) -> None:
    pool2.run(_empty_shards)
