"""What there is to plan: units and their parameters as plain facts, from a model before or after it was sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from hsdp.api.fsdp2 import own_policy
from hsdp.api.module import HSDPModule, has_forward
from hsdp.api.select import check_param, choose_dim, collect_params, identities, stays_whole
from hsdp.api.shard_units import Pattern, choose_units
from hsdp.format import dotted
from hsdp.offload import OffloadPolicy
from hsdp.params.local import local_of
from hsdp.params.param import ParamName, PlacementFn
from hsdp.params.placement import least_padding
from hsdp.params.subclass import extends
from hsdp.policies import CommPolicy, MixedPrecisionPolicy
from hsdp.unit.lookup import class_name, unit_of_module, walk
from hsdp.unit.unit import Unit

Cut = Callable[[int], tuple[int, int]]


@dataclass(frozen=True)
class ParamFacts:
    """A parameter.

    Attributes:
        name: relative to its unit's module.
        shape: of the whole parameter.
        dtype: storage dtype.
        dim: the sharded tensor dim; None: kept whole on every rank.
        merged: how many leading dims are cut as one, as `ParamSpec` has it.
        replicated: it is one of `replicate_params`, or a scalar.
        trainable: it gets gradients.
        active: part of it that computes with a token: 1 for weights, chosen / all for experts, 0 for an embedding's lookup.
        looked_up: it is an embedding's table; tied to a layer, it is a weight as well.
        convolution: it is the kernel of a convolution, and not a stack of experts.
        extension: a tensor subclass that says itself what of it is gathered; that is counted in the compute dtype.
        behind: how many units begin before it is used, its own among them: by the order in which modules are registered, a
            head at the model's end is used behind all blocks. 0: not known, before all.
        cut: chooses `dim` and `merged` for a number of shard ranks; None: they are what they are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    dim: int | None = 0
    merged: int = 1
    replicated: bool = False
    trainable: bool = True
    active: float = 1.0
    looked_up: bool = False
    convolution: bool = False
    extension: bool = False
    behind: int = 0
    cut: Cut | None = field(default=None, compare=False, repr=False)

    def on(self, shards: int) -> ParamFacts:
        """The same on so many shard ranks."""
        if self.cut is None:
            return self
        dim, merged = self.cut(shards)
        return replace(self, dim=dim, merged=merged)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def widths(self) -> tuple[float, float]:
        """Elements that its product reads and makes per token; (0, 0) for what multiplies nothing: a vector, a table, the
        stacked biases of experts.
        """
        if len(self.shape) < 2 or not self.active or self.name.endswith("bias"):
            return 0, 0
        if self.convolution or len(self.shape) == 2:
            return self.shape[1] * self.active, self.shape[0] * self.active
        chosen = math.prod(self.shape[:-2]) * self.active
        return chosen * self.shape[-1], chosen * self.shape[-2]


@dataclass(frozen=True)
class UnitFacts:
    """A unit; a model is a sequence of them in the order in which their forwards begin, the root first.

    Attributes:
        name: qualified name of its module.
        params: its own parameters, in the order in which `fully_shard` finds them.
        parent: index of the unit around it; None for the root.
        attention: width of what its attention computes with, summed over its layers: heads times their size. A token costs
            4 flops per element of it and token that it meets. 0: no attention was recognised.
        mp_policy, comm_policy, offload_policy, reshard_after_forward: as given to `fully_shard`.
    """

    name: str
    params: tuple[ParamFacts, ...]
    parent: int | None = 0
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    comm_policy: CommPolicy = field(default_factory=CommPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    reshard_after_forward: bool | int | None = None
    attention: float = 0


def facts_of(
    model: nn.Module,
    units: Pattern | Iterable[Pattern] | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    comm_policy: CommPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    replicate_params: Iterable[nn.Parameter] | None = None,
) -> list[UnitFacts]:
    """The units of a model: those that it has, or those that `shard_units` would make of it.

    Args:
        model: the model; on the meta device it costs nothing.
        units: patterns as for `shard_units`. None: the blocks of the model, which are the elements of its outermost
            `nn.ModuleList`s and `nn.ModuleDict`s (or of the model itself, if it is an `nn.Sequential`). Elements without a
            forward, which are lists or hold some, stand for the blocks in them.
        mp_policy, comm_policy, offload_policy, reshard_after_forward: as for `fully_shard`; for a sharded model, in place
            of its own.
        shard_placement_fn, ignored_params, replicate_params: as for `fully_shard`.

    Raises:
        TypeError, ValueError: what `shard_units` and `fully_shard` refuse; `units` and the like for a sharded model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan: expected an nn.Module, not {type(model).__name__}")
    if any(isinstance(module, HSDPModule) for module in model.modules()):
        given = {"units": units, "shard_placement_fn": shard_placement_fn, "ignored_params": ignored_params}
        refused = [name for name, value in (given | {"replicate_params": replicate_params}).items() if value is not None]
        if refused:
            raise ValueError(
                f"plan({type(model).__name__}, {refused[0]}=...): the model is sharded already, so its units are what they "
                "are; leave it out, or plan the model before it is sharded"
            )
        found = _of_sharded(model)
    else:
        found = _of_plain(model, units, shard_placement_fn, ignored_params, replicate_params)
    policies: dict[str, tuple[Any, type | tuple[type, ...]]] = {
        "mp_policy": (own_policy(mp_policy), MixedPrecisionPolicy),
        "comm_policy": (comm_policy, CommPolicy),
        "offload_policy": (own_policy(offload_policy), OffloadPolicy),
        "reshard_after_forward": (reshard_after_forward, (bool, int)),
    }
    changes = {name: value for name, (value, _) in policies.items() if value is not None}
    for name, value in changes.items():
        if not isinstance(value, policies[name][1]):
            raise TypeError(f"plan({name}={value!r}): expected what fully_shard takes, not {type(value).__name__}")
    return [replace(unit, **changes) for unit in _with_attention(model, found)]


def _of_sharded(model: nn.Module) -> list[UnitFacts]:
    found: dict[Unit, UnitFacts] = {}
    order: list[Unit] = []
    begun = _units_begun(model, unit_of_module)

    def visit(item: tuple[nn.Module, str, Unit | None]) -> list[tuple[nn.Module, str, Unit | None]]:
        module, name, parent = item
        unit = unit_of_module(module)
        if unit is not None and unit is not parent:
            if unit not in found:
                order.append(unit)
                found[unit] = UnitFacts(
                    name or f"{class_name(module)} (root)",
                    tuple(_sharded_param(unit, slot, begun) for slot in range(len(unit.params))),
                    None if parent is None else order.index(parent),
                    unit.mp_policy,
                    unit.comm_policy,
                    unit.offload,
                    unit.settings.reshard_after_forward,
                )
            parent = unit
        return [(child, dotted(name, child_name), parent) for child_name, child in module.named_children()]

    root: tuple[nn.Module, str, Unit | None] = model, "", None
    walk(root, visit)
    roots = [facts.name for facts in found.values() if facts.parent is None]
    if len(roots) > 1:
        raise ValueError(
            f"plan({type(model).__name__}): its units {roots[:3]} have none around them, so each runs as a model of its "
            "own; call fully_shard on the model too, or plan each of them"
        )
    return list(found.values())


def _units_begun(model: nn.Module, unit_of_module: Callable[[nn.Module], Any]) -> dict[int, int]:
    """By the identity of each module, how many units have begun when its forward does, as modules are registered."""
    units: set[Any] = set()
    begun: dict[int, int] = {}
    for module in model.modules():
        if (unit := unit_of_module(module)) is not None:
            units.add(unit)
        begun[id(module)] = len(units)
    return begun


def _behind(places: list[ParamName], begun: dict[int, int]) -> int:
    return min(begun.get(id(place.module()), 0) for place in places)


def _sharded_param(unit: Unit, slot: int, begun: dict[int, int]) -> ParamFacts:
    param = unit.params[slot]
    spec = param.spec
    return ParamFacts(
        param.fqn,
        spec.shape,
        param.dtype,
        spec.dim,
        spec.merged,
        param.replicated,
        param.sharded.requires_grad,
        *_use(param.places),
        param.wrapper is not None,
        _behind(param.places, begun),
        # On other meshes, too, its first dims go together if they can.
        cut_by(least_padding, spec.shape, param.fqn, unit.name) if spec.merged > 1 else None,
    )


def cut_by(choose: PlacementFn, shape: tuple[int, ...], name: str, unit: str) -> Cut:
    """What a `shard_placement_fn` chooses for a parameter of this shape."""
    param = nn.Parameter(torch.empty(shape, device="meta"))
    return lambda shards: choose_dim(param, name, unit, choose, shards)


def placed(unit: UnitFacts, choose: PlacementFn) -> UnitFacts:
    """The unit with dims chosen by another `shard_placement_fn`."""
    params = [
        replace(param, cut=cut_by(choose, param.shape, param.name, unit.name)) if not param.replicated else param
        for param in unit.params
    ]
    return replace(unit, params=tuple(params))


def _of_plain(
    model: nn.Module,
    units: Pattern | Iterable[Pattern] | None,
    placement: PlacementFn | None,
    ignored_params: Iterable[nn.Parameter] | None,
    replicate_params: Iterable[nn.Parameter] | None,
) -> list[UnitFacts]:
    ignored = identities("ignored_params", ignored_params, "plan")
    replicated = identities("replicate_params", replicate_params, "plan")
    if units is None:
        blocks = {id(block) for block in _blocks(model) if any(id(param) not in ignored for param in block.parameters())}
        units = [lambda module: id(module) in blocks] if blocks else []
    chosen = {id(unit.module): unit for unit in choose_units(model, units, True, ignored)}
    begun = _units_begun(model, lambda module: id(module) if id(module) in chosen else None)
    found: list[UnitFacts] = []
    above: list[tuple[str, int]] = []  # units around the module at hand: (prefix of what is inside, index)
    for name, module in model.named_modules():
        if id(module) not in chosen:
            continue
        while above and not name.startswith(above[-1][0]):
            above.pop()
        nested = chosen.keys() - {id(module)}
        owned = collect_params([module], ignored, lambda m: id(m) in nested)
        params = tuple(
            _plain_param(param, places, name, placement, stays_whole(param, replicated), _behind(places, begun))
            for places, param in owned
        )
        shown = name or f"{type(model).__name__} (root)"
        found.append(UnitFacts(shown, params, above[-1][1] if above else None))
        above.append((f"{name}." if name else "", len(found) - 1))
    return found


def _plain_param(
    param: nn.Parameter, places: list[ParamName], unit: str, placement: PlacementFn | None, replicated: bool, behind: int
) -> ParamFacts:
    fqn = places[0].fqn
    check_param(param, places[0].module(), fqn, unit)
    active, looked_up, convolution = _use(places)
    return ParamFacts(
        fqn,
        tuple(local_of(param).shape),  # of a DTensor, what this rank has is what is sharded
        param.dtype,
        dim=None if replicated else 0,
        replicated=replicated,
        trainable=param.requires_grad,
        active=active,
        looked_up=looked_up,
        convolution=convolution,
        extension=extends(param),
        behind=behind,
        cut=None if replicated else partial(choose_dim, param, fqn, unit, placement),
    )


def _blocks(module: nn.Module) -> list[nn.Module]:
    """What people make units of: the elements of the outermost lists of modules; of lists in such lists, theirs."""
    if isinstance(module, nn.Sequential):
        return list(module)
    listed = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    blocks: list[nn.Module] = []
    for child in module.children():
        if listed and has_forward(child):
            blocks.append(child)
        elif not isinstance(child, nn.Sequential):
            blocks += _blocks(child)
    return blocks


def _use(places: list[ParamName]) -> tuple[float, bool, bool]:
    """`active`, `looked_up`, `convolution`: a table that is only looked up computes nothing; one tied to a layer does."""
    modules = [place.module() for place in places]
    tables = [isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in modules]
    return 0.0 if all(tables) else 1.0, any(tables), any(isinstance(module, _ConvNd) for module in modules)


_QUERIES = ("q_proj", "wq", "query", "to_q", "q", "q_b_proj", "q_b")
_TOGETHER = ("qkv", "qkv_proj", "c_attn", "wqkv", "Wqkv", "query_key_value")


def _attention_width(module: nn.Module) -> int:
    """Heads times their size, if the module's layers are named as attention's are; else 0."""
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    layers = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    for name in _QUERIES:
        if name in layers and len(layers) > 1:
            return layers[name].out_features
    for name in _TOGETHER:
        # Queries, keys and values in one: what leaves attention is as wide as the input of the layer behind it.
        behind = list(layers)[list(layers).index(name) + 1 :] if name in layers else []
        if behind:
            return layers[behind[0]].in_features
    return 0


def _with_attention(model: nn.Module, found: list[UnitFacts]) -> list[UnitFacts]:
    """The units with the width of the attention in them."""
    names = ["" if unit.parent is None else unit.name for unit in found]
    widths = [0] * len(found)
    for name, module in model.named_modules():
        if width := _attention_width(module):
            around = [at for at, unit in enumerate(names) if not unit or name == unit or name.startswith(f"{unit}.")]
            widths[max(around, key=lambda at: len(names[at]))] += width
    return [replace(unit, attention=width) for unit, width in zip(found, widths, strict=True)]
