"""Models and optimizers with hooks on their state dicts, or with methods that override them.

What is loaded is what `load_state_dict` of the plain model would make of it, and an optimizer gets back what it adds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hsdp import checkpoint, fully_shard
from hsdp.checkpoint import CheckpointError
from tests.support.rig import Pool
from tests.support.twin import full
from tests.support.worker import RankEnv


class Block(nn.Module):
    """An embedding and a head that are tied, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(tokens) * self.scale)
        return out


class Doubling(Block):
    """What is loaded is changed by a method."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "scale"] = state_dict[prefix + "scale"] * 2
        super()._load_from_state_dict(state_dict, prefix, *args)


class Copied(Block):
    """State dicts have copies in the place of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update(copies(state)))


class Watched(Block):
    """What a state dict does not have is initialised behind the load."""

    def __init__(self) -> None:
        super().__init__()

        def initialise(module: nn.Module, keys: Any) -> None:
            if "scale" in keys.missing_keys:
                nn.init.ones_(self.scale)

        self.register_load_state_dict_post_hook(initialise)


class Valued(Block):
    """State dicts have values that are no tensors, and are no extra state either."""

    def __init__(self, values: tuple[Any, ...] = (0, [], {})) -> None:
        super().__init__()
        self.values = values

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in zip(("scale.version", "history", "table"), self.values, strict=True):
            destination[prefix + name] = value

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.values = tuple(state_dict.pop(prefix + name) for name in ("scale.version", "history", "table"))
        super()._load_from_state_dict(state_dict, prefix, *args)


def copies(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def _saved_and_loaded(call: str, directory: str, source: nn.Module, model: nn.Module) -> None:
    if call == "load":
        checkpoint.load(checkpoint.save(directory, source, step=1).path, model)
    elif call == "load_full_state_dict":
        checkpoint.load_full_state_dict(model, checkpoint.full_state_dict(source))
    else:
        checkpoint.save_safetensors(directory, source)
        checkpoint.load_safetensors(directory, model)


def _as_torch_loads(env: RankEnv | None, kind: Callable[[], nn.Module], call: str, directory: str) -> None:
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(kind())
        with torch.no_grad():
            models[-1].scale.fill_(seed + 3.0)
    source, model, twin = models
    twin.load_state_dict(copies(source.state_dict()))
    if env is not None:
        source, model = (fully_shard(one, mesh=env.mesh((1, 2))) for one in (source, model))
    _saved_and_loaded(call, directory, source, model)
    for (name, value), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(full(value), expected), name


KINDS = pytest.mark.parametrize("kind", [Doubling, Copied, Watched])
CALLS = pytest.mark.parametrize("call", ["load", "load_full_state_dict", "load_safetensors"])


@CALLS
@KINDS
def test_hooks_see_and_change_what_is_loaded(tmp_path: Path, kind: Any, call: str) -> None:
    _as_torch_loads(None, kind, call, str(tmp_path))


@CALLS
@KINDS
def test_hooks_of_a_sharded_model_see_and_change_what_is_loaded(pool2: Pool, tmp_path: Path, kind: Any, call: str) -> None:
    pool2.run(_as_torch_loads, kind, call, str(tmp_path))


def _values_come_back(env: RankEnv | None, directory: str) -> None:
    source, model = Valued((7, [torch.ones(2), (3, "x")], {1: {}, "a": torch.zeros(1)})), Valued()
    if env is not None:
        source, model = (fully_shard(one, mesh=env.mesh((1, 2))) for one in (source, model))
    checkpoint.load(checkpoint.save(directory, source, step=1).path, model)
    assert repr(model.values) == repr(source.values)
    assert torch.equal(full(model.scale), full(source.scale))


def test_values_in_a_state_dict_come_back(pool2: Pool, tmp_path: Path) -> None:
    """They were saved, and refused by every load."""
    _values_come_back(None, str(tmp_path / "alone"))
    pool2.run(_values_come_back, str(tmp_path / "both"))


class Averaging(torch.optim.SGD):
    """An optimizer that keeps something of its own beside its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.mean: dict[Any, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mean": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean = state_dict["mean"]
        super().load_state_dict(state_dict)


def _hooked(params: Any) -> Any:
    """The same by hooks."""
    optimizer: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    optimizer.mean = {}
    optimizer.register_state_dict_post_hook(lambda one, state: {**state, "mean": one.mean})
    optimizer.register_load_state_dict_pre_hook(lambda one, state: setattr(one, "mean", state["mean"]))
    return optimizer


def _additions_come_back(env: RankEnv | None, make: Callable[[Any], Any], directory: str, whole: bool) -> None:
    model = Block() if env is None else fully_shard(Block(), mesh=env.mesh((1, 2)))
    optimizer, fresh = make(model.parameters()), make(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizer.mean = {"of": torch.ones(3), 2: [(1, "x"), {}]}
    if whole:
        state = checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        optimizer.mean["of"].fill_(2.0)
        checkpoint.load_full_optimizer_state_dict(model, fresh, state)
    else:
        checkpoint.load(checkpoint.save(directory, model, optimizer, step=1).path, model, fresh)
    assert repr(fresh.mean) == repr({"of": torch.ones(3), 2: [(1, "x"), {}]})
    assert torch.equal(full(fresh.state[model.scale]["momentum_buffer"]), full(model.scale.grad))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("make", [Averaging, _hooked])
def test_what_an_optimizer_adds_to_its_state_dict_comes_back(pool2: Pool, tmp_path: Path, make: Any, whole: bool) -> None:
    """It was left out without a word."""
    _additions_come_back(None, make, str(tmp_path / "alone"), whole)
    pool2.run(_additions_come_back, make, str(tmp_path / "both"), whole)


def _additions_with_shards_are_refused(env: RankEnv, directory: str) -> None:
    model = fully_shard(Block(), mesh=env.mesh((1, 2)))
    optimizer = Averaging(model.parameters())
    optimizer.mean = {"of": model.scale.detach()}
    with pytest.raises(CheckpointError, match=r"'mean' of the optimizer's state_dict.* has a sharded tensor"):
        checkpoint.save(directory, model, optimizer, step=1)
    optimizer.mean = {"of": object()}
    with pytest.raises(CheckpointError, match=r"'mean'.* is a builtins.object, which cannot be saved"):
        checkpoint.save(directory, model, optimizer, step=1)


def test_what_an_optimizer_adds_and_no_checkpoint_can_hold_is_refused(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(_additions_with_shards_are_refused, str(tmp_path))
