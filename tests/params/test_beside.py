"""What tensor subclasses keep beside their data, a scale say: equal on all ranks, and saved, as the data is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import hsdp
from hsdp.elastic.healing import HealedState
from hsdp.examples.int8_gather import Int8Weight
from hsdp.params.subclass import around_other
from tests.support.rig import Pool, RankEnv

SHAPES = [(2, 1), (1, 2)]
X = torch.ones(2, 8)


class Scaled(Int8Weight):
    """Rows, and a scale that is a 0-dim tensor; the whole weight is their product."""

    @staticmethod
    def __new__(cls, rows: Tensor, scale: Any = None) -> Any:
        return Int8Weight.__new__(cls, rows)

    def __init__(self, rows: Tensor, scale: Any = None) -> None:
        super().__init__(rows)
        self.scale = torch.ones(()) if scale is None else scale

    def __tensor_flatten__(self) -> Any:
        return ["rows", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["rows"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        own = args[0]
        return tree_map_only(cls, lambda w: w if w is own else cls(w.rows, own.scale), result)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.rows,), None

    def fsdp_post_all_gather(  # type: ignore[override]
        self, gathered: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        whole = gathered[0] * float(self.scale)
        if out is None:
            return whole, (whole,)
        out.data.copy_(whole[: len(out)])
        return None


@dataclass
class Made:
    """A context as libraries have it: numbers, and objects whose `repr` tells an address."""

    scale: float
    other: object


class InContext(Scaled):
    """The same with a scale that is a number of the context."""

    def __init__(self, rows: Tensor, scale: Any = None) -> None:
        Int8Weight.__init__(self, rows)
        self.scale = 1.0 if scale is None else scale

    def __tensor_flatten__(self) -> Any:
        return ["rows"], {"made": Made(self.scale, object())}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["rows"], context["made"].scale)


class SetLater(Int8Weight):
    """The same with a factor that somebody sets later, and that rebuilding loses: torchao's precomputed scales are so."""

    factor: Any = None

    def __init__(self, rows: Tensor, _: Any = None) -> None:
        super().__init__(rows)
        self.count, self.alias = len(rows), rows.view(-1)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        assert self.count == len(self.rows) == len(self.alias) // 8, "what is made of the data is that of these rows"
        return (self.rows if self.factor is None else self.rows * self.factor,), None

    def fsdp_post_all_gather(  # type: ignore[override]
        self, gathered: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        if out is None:
            whole = gathered[0].clone()
            return whole, (whole,)
        out.data.copy_(gathered[0][: len(out)])
        return None


def _model(env: RankEnv, shape: tuple[int, int], kind: Any, scale: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3))
    model[0].weight = nn.Parameter(kind(model[0].weight.detach(), scale))  # type: ignore[assignment]
    return hsdp.fully_shard(model, mesh=env.mesh(shape), **options)


def _told(model: nn.Module) -> list[float]:
    """What each rank computes."""
    with torch.no_grad():
        found = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(found, model(X).sum())
    return [float(one) for one in found]


def _scale(model: Any) -> Any:
    return model[0].weight.to_local().scale


def check_scalars(env: RankEnv, shape: tuple[int, int]) -> None:
    """They differ at the start, and later: they are made equal, or told."""
    model = _model(env, shape, Scaled, torch.tensor(2.0 + env.rank))
    expected = _told(_model(env, shape, Scaled, torch.tensor(2.0)))
    assert _told(model) == expected == [expected[0]] * 2
    with pytest.raises(hsdp.DivergenceError, match=r"values differ .*'0\.weight' on ranks \[1\]"):
        _model(env, shape, Scaled, torch.tensor(2.0 + env.rank), replica_policy="check")
    hsdp.check_replicas(model)
    _scale(model).add_(env.rank)
    with pytest.raises(hsdp.DivergenceError, match=r"'scale of 0\.weight' between ranks"):
        hsdp.check_replicas(model)
    hsdp.sync_module_states(model)
    hsdp.check_replicas(model)
    assert float(_scale(model)) == 2 and _told(model) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=["replicas", "shards"])
def test_scalars_beside_the_data_are_equal_on_all_ranks(pool2: Pool, shape: tuple[int, int]) -> None:
    pool2.run(check_scalars, shape)


def check_contexts(env: RankEnv) -> None:
    """Numbers that are no tensors cannot be sent: the parameter is named."""
    model = _model(env, (2, 1), InContext, 2.0)
    hsdp.check_replicas(hsdp.sync_module_states(model))
    with pytest.raises(hsdp.DivergenceError, match=r"'0\.weight'.*'scale': 2\.0.*first rank.*'scale': 3\.0.* \[1\]"):
        _model(env, (2, 1), InContext, 2.0 + env.rank)
    if env.rank == 1:
        model[0].weight._local_tensor.scale = 5.0
    with pytest.raises(hsdp.DivergenceError, match=r"'what is around 0\.weight' between ranks"):
        hsdp.check_replicas(model)
    with pytest.raises(hsdp.DivergenceError, match=r"'0\.weight' differ between replicas in what __tensor_flatten__ tells"):
        hsdp.sync_module_states(model)


def test_numbers_in_the_context_are_compared(pool2: Pool) -> None:
    pool2.run(check_contexts)


def check_saved(env: RankEnv, path: Path) -> None:
    """A scale comes back into a model that has one, and goes along with the data that it belongs to."""
    model = _model(env, (1, 2), Scaled)
    _scale(model).fill_(2.0)
    expected = _told(model)
    hsdp.checkpoint.save(path, model, step=1)
    fresh = _model(env, (2, 1), Scaled)
    assert _told(fresh) != expected
    assert "0.weight.scale" in hsdp.checkpoint.load(path, fresh, include=["0.weight"]).report.loaded
    assert float(_scale(fresh)) == 2
    hooked, seen = _model(env, (2, 1), Scaled), []
    hooked.register_load_state_dict_post_hook(lambda _, keys: seen.append(list(keys.unexpected_keys)))
    hsdp.checkpoint.resume(path, hooked)
    assert _told(hooked) == pytest.approx(expected) and seen == [[]]
    plain = _model(env, (2, 1), lambda rows, _: rows)
    assert hsdp.checkpoint.load(path, plain).report.left == ("0.weight.scale",)
    hsdp.checkpoint.save(path, plain, step=2)
    with pytest.raises(hsdp.CheckpointError, match=r"the model has '0\.weight\.scale', which the checkpoint does not have"):
        hsdp.checkpoint.resume(path, fresh)


def test_checkpoints_have_scalars_beside_the_data(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(check_saved, tmp_path)


def check_given(env: RankEnv) -> None:
    models = [_model(env, (1, 2), Scaled, torch.tensor(scale)) for scale in (3.0, 1.0)]
    giver, taker = (HealedState(model, torch.optim.SGD(model.parameters())) for model in models)
    giver.note()
    taker.note()
    assert giver.digest() != taker.digest()
    taker.give(giver.take())
    assert giver.digest() == taker.digest() and _told(models[0]) == _told(models[1])


def test_a_replica_that_joins_gets_them(pool2: Pool) -> None:
    pool2.run(check_given)


def check_set_later(env: RankEnv) -> None:
    """Ranks with fewer rows than the first, whose tensor is rebuilt before it is asked, compute as the others do."""
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 3, bias=False)
    weight = model.weight.detach().clone()
    model.weight = nn.Parameter(SetLater(weight))
    hsdp.fully_shard(model, mesh=env.mesh((1, 2)))
    local = model.weight._local_tensor
    for factor in (2.0, torch.tensor(3.0)):
        local.factor = factor
        with torch.no_grad():
            torch.testing.assert_close(model(X), X @ (weight * factor).T)


def test_what_is_set_later_stays_where_rows_are_uneven(pool2: Pool) -> None:
    pool2.run(check_set_later)


def test_what_is_set_later_goes_along_to_another_device() -> None:
    tensor: Any = SetLater(torch.ones(1, 8))
    tensor.factor = torch.tensor(3.0)
    made: Any = around_other(tensor, torch.ones(2, 8, device="meta"))
    assert made.factor.is_meta and made.count == 2 and made.alias.shape == (16,)
