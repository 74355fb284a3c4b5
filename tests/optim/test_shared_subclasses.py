"""Shares over replicas of parameters that are tensor subclasses: a step reaches what is inside of them, on all replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import hsdp
from hsdp.optim import Muon, local
from tests.support.rig import RankEnv
from tests.support.sharded import mesh_id, pool_for

_aten = torch.ops.aten
_STAYS = {_aten.detach.default, _aten.clone.default, _aten.split.Tensor, _aten.slice.Tensor, _aten.new_zeros.default}
_STAYS |= {_aten.view.default, _aten.as_strided.default, _aten.empty_like.default, _aten.alias.default, _aten.copy_.default}


class Inside(Tensor):
    """Around tensors whose sum is the weight. What is no view or copy computes with the sum: a tensor of its own."""

    names: tuple[str, ...]

    @staticmethod
    def __new__(cls, *inner: Tensor) -> Any:
        first = inner[0]
        made: Any = Tensor._make_wrapper_subclass(cls, first.shape, first.stride(), dtype=first.dtype, device=first.device)
        for name, tensor in zip(cls.names, inner, strict=True):
            setattr(made, name, tensor)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.names), None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Any:
        return cls(*(inner[name] for name in cls.names))

    def summed(self) -> Tensor:
        return sum(getattr(self, name) for name in self.names)  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.add_.Tensor, _aten.sub_.Tensor):
            other = args[1].summed() if isinstance(args[1], cls) else args[1]
            func(getattr(args[0], cls.names[0]), other, **kwargs)
            return args[0]
        if func not in _STAYS:
            return func(*tree_map_only(cls, cls.summed, args), **tree_map_only(cls, cls.summed, kwargs))
        found = []
        for name in cls.names:

            def inner(tensor: Tensor, name: str = name) -> Tensor:
                return getattr(tensor, name)  # type: ignore[no-any-return]

            of_scalar = not getattr(args[0], name).ndim
            if of_scalar:  # every rank keeps it
                value = getattr(args[0], name)
                found.append([value] * 8 if func is _aten.split.Tensor else value)
            else:
                found.append(func(*tree_map_only(cls, inner, args), **tree_map_only(cls, inner, kwargs)))
        if func._schema.is_mutable:
            return args[0]
        return [cls(*one) for one in zip(*found, strict=False)] if isinstance(found[0], (list, tuple)) else cls(*found)

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[Any, None]:
        return tuple(getattr(self, name) for name in self.names if getattr(self, name).ndim), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        whole = outputs[0] + outputs[1] if len(outputs) == 2 else outputs[0].clone()
        if out is None:
            return whole, (whole,)
        out.copy_(whole[: len(out)])  # arrives with the rows that fill up the shards


class WithScalar(Inside):
    """Around its data, which hsdp steps, and a scalar beside it."""

    names = ("rows", "nothing")


class Halves(Inside):
    """A composite: only itself knows what a step is to it."""

    names = ("a", "b")


def _made(kind: Any, rows: int) -> tuple[Tensor, Any]:
    torch.manual_seed(0)
    linear = nn.Linear(8, rows, bias=False).double()
    weight = linear.weight.detach().clone()
    inside = (
        (weight.clone(), torch.zeros((), dtype=torch.float64)) if kind is WithScalar else (weight - 1.0, weight * 0 + 1.0)
    )
    linear.weight = nn.Parameter(kind(*inside))
    return weight, linear


def _steps(env: RankEnv, shape: tuple[int, ...], kind: Any, rows: int, how: str) -> None:
    weight, model = _made(kind, rows)
    hsdp.fully_shard(model, mesh=env.mesh(shape))
    if how == "muon beside":
        optimizer: Any = Muon([{"params": list(model.parameters()), "algorithm": "adamw", "lr": 0.0}], over_replicas=True)
    else:
        optimizer = local(
            torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), over_replicas=True, flat=how == "flat"
        )
    alias = model.weight.detach().to_local()
    alias = alias.rows if kind is WithScalar else alias
    each, at = -(-rows // shape[-1]), env.mesh(shape)["shard"].get_local_rank()
    for step in range(2):
        model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = (weight - (0.0 if how == "muon beside" else 0.2 * (step + 1)))[at * each : (at + 1) * each]
        found = alias.summed() if kind is Halves else alias  # who holds it sees the step, before anybody asks the parameter
        torch.testing.assert_close(found[: len(expected)], expected)
        now = model.weight.detach().to_local().summed()
        torch.testing.assert_close(now[: len(expected)], expected)
    hsdp.check_replicas(model)


@pytest.mark.parametrize("how", ["each", "flat", "muon beside"])
@pytest.mark.parametrize("rows", [8, 3])
@pytest.mark.parametrize("kind", [WithScalar, Halves])
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=mesh_id)
def test_every_replica_has_the_step(
    request: pytest.FixtureRequest, shape: tuple[int, ...], kind: Any, rows: int, how: str
) -> None:
    pool_for(request, shape).run(_steps, shape, kind, rows, how)
