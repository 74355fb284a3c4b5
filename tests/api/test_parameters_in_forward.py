"""What `parameters()` gives: unsharded parameters inside forwards and backwards, as under FSDP2, else the sharded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import hsdp
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_rest
from tests.support.twin import assert_same, full_params

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class _Asks(nn.Module):
    """A part that makes its input as wide as its own parameters, as models of transformers and diffusers do."""

    def __init__(self, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = seen

    @property
    def dtype(self) -> torch.dtype:
        return next(param.dtype for param in self.parameters() if param.is_floating_point())

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.dtype)
        out: Tensor = self.linear(x.to(self.dtype))
        return out


class _Block(_Asks):
    def __init__(self, seen: list[torch.dtype], recompute: bool) -> None:
        super().__init__(seen)
        self.inner = _Asks(seen)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)
        return out


class _Model(_Asks):
    def __init__(self, recompute: bool = False) -> None:
        torch.manual_seed(5)
        super().__init__([])
        self.blocks = nn.ModuleList(_Block(self.seen, recompute) for _ in range(2))
        self.head = _Asks(self.seen)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.seen.append(self.blocks[0].dtype)  # type: ignore[arg-type]  # of a unit that is closed: the storage dtype
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def _trained(library: Any, env: RankEnv, recompute: bool, outer: bool) -> tuple[list[torch.dtype], dict[str, Tensor]]:
    model = _Model(recompute)
    for module in (*model.blocks, model):
        library(module, mesh=env.mesh((2,)), mp_policy=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.full((3, 4), 1.0 + env.rank)
        out = checkpoint(model, x, use_reentrant=False) if outer else model(x)
        out.sum().backward()
        assert library is torch_fully_shard or all(isinstance(param, DTensor) for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return model.seen, full_params(model)


def _as_with_fsdp2(env: RankEnv, recompute: bool, outer: bool) -> None:
    theirs, ours = (_trained(library, env, recompute, outer) for library in (torch_fully_shard, hsdp.fully_shard))
    assert ours[0] == theirs[0] and torch.bfloat16 in ours[0] and torch.float32 in ours[0]
    assert_same(dict(ours[1]), theirs[1])


@pytest.mark.parametrize(("recompute", "outer"), [(False, False), (True, False), (False, True)])
def test_models_that_ask_for_their_dtype_see_what_fsdp2_shows_them(pool2: Pool, recompute: bool, outer: bool) -> None:
    pool2.run(_as_with_fsdp2, recompute, outer)


class _Calls(nn.Module):
    """A layer in whose forward something else is done with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.does: Any = lambda module: None

    def forward(self, x: Tensor) -> Tensor:
        self.does(self)
        out: Tensor = self.linear(x)
        return out


def _sharded() -> Any:
    return hsdp.fully_shard(_Calls())


def _shown(model: nn.Module) -> set[bool]:
    return {isinstance(param, DTensor) for param in model.parameters()}


def test_outside_of_forwards_and_backwards_parameters_are_sharded() -> None:
    x = torch.ones(1, 4, dtype=torch.float64)
    with fake_world(2):
        model, seen = _sharded(), []
        model.does = lambda module: seen.append(_shown(module))
        model.unshard()
        assert _shown(model) == {True}
        model(x)
        assert _shown(model) == {True}
        model.set_reshard_after_backward(False)
        out = model(x)
        out.register_hook(lambda grad: seen.append(_shown(model)))
        model.linear.register_full_backward_hook(lambda *_: seen.append(_shown(model)))
        assert _shown(model) == {True}
        model(x).sum().backward()
        assert _shown(model) == {True}
        assert seen == [{False}, {False}, {False}, {False}], "two forwards, one more, and its backward"
        model.reshard()
        check_rest(model)

        def fails(module: nn.Module) -> None:
            raise ZeroDivisionError

        model.does = fails
        with pytest.raises(ZeroDivisionError):
            model(x)
        assert _shown(model) == {True}


def test_behind_a_backward_that_failed_parameters_are_sharded() -> None:
    """Else `model.zero_grad()` would zero gradients of unsharded parameters, and those of earlier backwards would stay."""
    x = torch.ones(1, 4, dtype=torch.float64)
    with fake_world(2):
        model = _sharded()
        model(x).sum().backward()

        def fails(grad: Tensor) -> None:
            raise ZeroDivisionError

        other = x.clone().requires_grad_()
        other.register_hook(fails)
        with pytest.raises(ZeroDivisionError):
            model(other).sum().backward()
        assert _shown(model) == {True}
        model.zero_grad()
        assert all(param.grad is None for param in model.parameters())


def test_state_dicts_inside_a_forward_are_sharded() -> None:
    saved: list[Any] = []
    with fake_world(2):
        model = _sharded()

        def saves(module: nn.Module) -> None:
            saved.append(module.state_dict())
            module.load_state_dict(saved[-1])

        model.does = saves
        model(torch.ones(1, 4, dtype=torch.float64))
        assert [type(value) for value in saved[0].values()] == [DTensor, DTensor]
        assert not model._units()[0].shadows.disturbed()


def _writes(module: Any) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(2)


def _replaces(module: Any) -> None:
    module.linear.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("does", [_writes, _replaces])
def test_what_a_forward_does_to_its_parameters_is_not_lost_in_silence(does: Any) -> None:
    x = torch.ones(1, 4, dtype=torch.float64)
    with fake_world(2):
        model = _sharded()
        model.does = does
        with pytest.raises(hsdp.StateError, match=r"'linear\.(weight|bias)'"):
            for _ in range(2):
                model(x)


def test_pending_gradients_have_their_names_inside_a_forward() -> None:
    x, told = torch.ones(1, 4, dtype=torch.float64), []
    with fake_world(2):
        model = _sharded()
        with model.no_sync():
            model(x).sum().backward()
        model.does = lambda module: told.append(set(module.pending_gradients()))
        model(x)
    assert told == [{"linear.weight", "linear.bias"}]


class Mixer(nn.Module):
    """Takes the weight of a module that it does not call, as mixers of state-space models do with that of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.proj(x), self.conv.weight[:, :, 0])


@pytest.mark.parametrize("around", [None, "checkpoint", "plain module"])
def test_weights_of_a_unit_that_is_not_called_are_named(around: str | None) -> None:
    mixer = Mixer()
    model: Any = nn.Sequential(nn.Linear(4, 4), mixer)
    with fake_world(2) as env:
        hsdp.shard_units(model, [mixer.conv, *([] if around == "plain module" else [mixer])], mesh=env.mesh(2))
        if around == "checkpoint":
            forward = mixer.forward
            mixer.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
        message = r"code of Mixer computes with .* one of 'conv\.weight' \(unit '1\.conv'\), 'conv\.bias' .* Make Mixer"
        with pytest.raises(hsdp.StateError, match=message) as caught:
            model(torch.ones(2, 4))
        assert "mixed torch.Tensor and DTensor" in str(caught.value.__cause__)
        with pytest.raises(hsdp.StateError, match=message):
            model(torch.ones(2, 4))


def test_users_own_dtensors_get_the_error_of_torch() -> None:
    class Foreign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ foreign

    with fake_world(2) as env:
        foreign = distribute_tensor(torch.ones(4, 4), env.mesh(2), [Shard(0)])
        model: Any = nn.Sequential(nn.Linear(4, 4), Foreign())
        hsdp.shard_units(model, [], mesh=env.mesh(2))
        with pytest.raises(RuntimeError, match="mixed") as caught:
            model(torch.ones(2, 4))
        assert not isinstance(caught.value, hsdp.StateError)
