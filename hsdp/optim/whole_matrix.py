"""Optimizers that look at matrices as a whole, with parameters sharded and replicated: each matrix is updated once.

    momentum               elementwise, on each rank's shards; with over_replicas=True on this replica's share of them
    update of a matrix     on its one owner among all ranks, replicas included (matrices.py, exchange.py)
    learning rate, decay   elementwise, on each rank's shards

While an owner computes on one bucket of parameters, the next one is on its way to the owners and the last one on its way
back. `whole_matrix` makes an optimizer of a function from matrices to updates; `hsdp.optim.Muon` is one of them.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hsdp.comm.collectives import Comm, comm_among
from hsdp.comm.mesh import device_of
from hsdp.errors import StateError
from hsdp.optim.adamw_groups import AdamWGroups
from hsdp.optim.exchange import Exchange, Label
from hsdp.optim.matrices import Bucket, Held, MatrixParam, cut, plan_buckets
from hsdp.optim.replicas import STEPPED, part_of_grad, share_gradients_of, share_of_param
from hsdp.params.dtensors import as_dtensor, with_dtype
from hsdp.params.local import local_of
from hsdp.params.tensor_parallel import same_sharding
from hsdp.unit.lookup import name_of, place_of

BUCKET_BYTES = 32 * 1024 * 1024

OPTIONAL = ("algorithm", "matrices", "split_sizes")
"""Settings of groups that only those have to whom users gave them: the others look as those of torch's optimizer do."""


class WholeMatrix(torch.optim.Optimizer):
    """Base of optimizers that update matrices as a whole; see `whole_matrix`.

    A subclass says what a matrix's update is (`transform`), and if it wants how the learning rate depends on its shape
    (`scale`), what its work is (`cost`) and in which dtype matrices travel and are computed with (`wire_dtype`).
    """

    _settings: tuple[str, ...] = ("_bucket_bytes", "_over_replicas")  # attributes that copies of the optimizer have too
    _bucket_bytes = BUCKET_BYTES
    _over_replicas = False
    _plans: dict[tuple[object, ...], list[_Plan]]
    _comms: dict[tuple[int, ...], Comm]
    _adamw: AdamWGroups | None
    _changes = 0  # how often this step has changed momenta or weights
    _stopped: int | None = None  # how often the step before had, if it raised

    def transform(self, matrices: Tensor, group: dict[str, Any]) -> Tensor:
        """Updates of whole matrices `[k, rows, cols]` of one group, of the same shape. May overwrite `matrices`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it updates a matrix: define transform()")

    def scale(self, rows: int, cols: int, group: Mapping[str, Any]) -> float:
        """By what the learning rate is multiplied for matrices of this shape."""
        return 1.0

    def cost(self, rows: int, cols: int, group: Mapping[str, Any]) -> float:
        """The work of a matrix of this shape, in any unit."""
        return float(min(rows, cols) ** 2 * max(rows, cols))

    def wire_dtype(self, param: Tensor) -> torch.dtype:
        """In which dtype the matrices of `param` travel and are computed with."""
        return param.dtype

    # -- groups and state ------------------------------------------------------------------------------------------------

    @property
    def _hsdp_steps_shares(self) -> bool:
        """For the hook before a step: whether this optimizer knows of replicas' shares of gradients."""
        return self._over_replicas

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Groups with `algorithm="adamw"` are stepped by AdamW, and have its settings and defaults.

        Args:
            param_group: its `params`, and settings that differ from the optimizer's.

        Raises:
            ValueError: a parameter cannot be read as matrices by the group's settings; or `over_replicas`, and ranks do not
                ascend along the replicate axis of a mesh.
            StateError: `over_replicas`, and sums of earlier micro-batches are pending.
        """
        algorithm = param_group.get("algorithm")
        if algorithm not in (None, "adamw"):
            raise ValueError(f"{type(self).__name__}: a group has algorithm={algorithm!r}; give 'adamw', or leave it out")
        own, taken = self.defaults, algorithm == "adamw"
        try:
            self.defaults = AdamWGroups.defaults() if taken else own
            super().add_param_group(param_group)
        finally:
            self.defaults = own
        group = self.param_groups[-1]
        try:
            for param in () if taken else group["params"]:
                self._check_fits(param, group)
            if self._over_replicas:
                share_gradients_of(group["params"], type(self).__name__)
        except BaseException:
            self.param_groups.pop()
            raise

    def _check_fits(self, param: Tensor, group: dict[str, Any]) -> None:
        try:
            if param.is_complex():
                raise ValueError("it is complex, and its matrices should be real")
            cut(param.shape, group.get("matrices", "one"), group.get("split_sizes"))
        except ValueError as error:
            raise ValueError(f"{type(self).__name__} cannot step {name_of(param)}: {error}") from None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over what was loaded; groups keep the settings that say how this optimizer reads parameters."""
        groups = self.__dict__.get("param_groups", [])
        for own, group in zip(groups, state.get("param_groups", ()), strict=False):
            group.update({key: own[key] for key in OPTIONAL if key in own and key not in group})
        super().__setstate__(state)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made of: as torch's, and this object's own settings, without plans and process groups."""
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in self._settings if key in self.__dict__}}

    def _forget(self) -> None:
        self._plans, self._comms, self._adamw, self._stopped = {}, {}, None, None

    # -- a step ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Every rank of the parameters' meshes calls it, with gradients for the same parameters.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The loss, if there is a closure.

        Raises:
            StateError: a gradient is not sharded as its parameter is.
            DivergenceError: ranks have gradients for different parameters, or the step before failed on them at different
                points: momenta of replicas may differ, and shards of a matrix be of different steps. Load a checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if "_plans" not in self.__dict__:
            self._forget()
        plans = self._planned()
        targets = [target for plan in plans for one in plan.exchanges for target in one.bucket.targets]
        for target in targets:
            self._grad(target)  # refuses before anything is changed
        self._changes = 0
        try:
            for plan in plans:
                self._run(plan)
            if any(group.get("algorithm") == "adamw" for group in self.param_groups):
                self._adamw = self._adamw or AdamWGroups(self._over_replicas)
                self._adamw.step(self)
        except BaseException:
            self._stopped = self._changes
            raise
        finally:
            increment_version([target.param for target in targets])  # which `_apply` does not touch
        self._stopped = None
        return loss

    def _planned(self) -> list[_Plan]:
        """The plans for the parameters that have gradients, looked up as long as these are the same."""
        pairs = [(p, group) for group in self.param_groups if group.get("algorithm") is None for p in group["params"]]
        cuts = repr([(g.get("matrices"), g.get("split_sizes")) for g in self.param_groups])  # a list has no hash
        # Who assigns to `.data` changes no identity, but perhaps what a plan depends on: dtype, device and shape.
        each = ((local_of(p), id(p), id(group), p.grad is not None) for p, group in pairs)
        key = (cuts, self._stopped, *((id(own), own.dtype, own.device, own.shape, *rest) for own, *rest in each))
        found: list[_Plan] | None = self._plans.get(key)
        if found is None:
            if len(self._plans) >= 16:  # who steps other parameters each time would collect plans
                self._plans.clear()
            found = self._plans[key] = self._plan(pairs)
        return found

    def _plan(self, pairs: list[tuple[Tensor, dict[str, Any]]]) -> list[_Plan]:
        known: dict[Any, Held] = {}
        by_ranks: dict[tuple[int, ...], list[MatrixParam]] = {}
        for param, group in sorted(pairs, key=lambda pair: place_of(pair[0])):
            target = MatrixParam(param, group, known, share_of_param(param) if self._over_replicas else None)
            by_ranks.setdefault(target.ranks, []).append(target)
        # Ranks of several meshes (dense layers, experts) step those in one order, or they would wait for each other.
        order = sorted(by_ranks, key=lambda ranks: (-len(ranks), ranks))
        return [self._plan_among(ranks, by_ranks[ranks]) for ranks in order]

    def _plan_among(self, ranks: tuple[int, ...], targets: list[MatrixParam]) -> _Plan:
        """The plan for the parameters that these ranks hold together; without ranks, for plain tensors."""
        if ranks not in self._comms:
            spec = targets[0].spec
            # That of the mesh, though shards may be offloaded.
            device = targets[0].block.device if spec is None else device_of(spec.mesh)
            self._comms[ranks] = comm_among(ranks or (0,), device)
        comm = self._comms[ranks]
        ranks = ranks or (0,)
        me = ranks[comm.rank]
        stepped = [target for target in targets if target.param.grad is not None]
        for target in stepped:
            target.check(me)
        buckets = plan_buckets(stepped, ranks, self.cost, lambda target: self.wire_dtype(target.param), self._bucket_bytes)
        for bucket in buckets:
            bucket.route(me)
        matrices = [(m.box, m.owner, m.target.param.shape, str(b.dtype)) for b in buckets for m in b.matrices]
        given = [(name_of(target.param), target.param.grad is not None) for target in targets]
        signature = repr((matrices, given, self._over_replicas, self._stopped))
        behind = "" if self._stopped is None else f", behind a step that failed after {self._stopped} changes"
        label = Label(f"{type(self).__name__}, {len(stepped)} of {len(targets)} matrix parameters{behind}")
        key = zlib.crc32(signature.encode()) << 16
        exchanges = [Exchange(bucket, comm, ranks, label, key + 4 * at) for at, bucket in enumerate(buckets)]
        return _Plan(comm, exchanges, label, key)

    def _run(self, plan: _Plan) -> None:
        """Steps the buckets of a plan, each a stage behind the next."""
        # The same exchanges come in each step. Without a beginning the order would be another one after every step, of
        # which ranks would ask each other.
        if (guard := plan.comm.divergence_guard) is not None:
            guard.begin_pass(STEPPED)
        if not plan.exchanges:
            plan.comm.agree(plan.label, plan.key)
        exchanges = plan.exchanges
        try:
            for at in range(len(exchanges) + 2):
                if at < len(exchanges):
                    exchanges[at].start(self._prepared(exchanges[at].bucket))
                if 0 < at <= len(exchanges):
                    exchanges[at - 1].compute(self.transform)
                if at > 1:
                    self._apply(exchanges[at - 2])
        except BaseException:  # no memory for the next ones, say: these are not to take it until the next step
            for exchange in exchanges:
                exchange.give_up()
            if guard is not None:
                guard.note_failure()  # perhaps on this rank alone: an update of a matrix runs on its owner
            raise

    def _prepared(self, bucket: Bucket) -> dict[int, Tensor]:
        """What is to become an update, by target: the gradients with momentum, of all that this rank has of them."""
        found: dict[int, Tensor] = {}
        for group, targets in _by_group(bucket.targets):
            grads = [self._grad(target) for target in targets]
            buffers = [self._buffer(target) for target in targets]
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            self._changes += 1
            values = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
            found.update((id(target), value) for target, value in zip(targets, values, strict=True))
        return found

    def _grad(self, target: MatrixParam) -> Tensor:
        grad: Any = target.param.grad
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients, as {name_of(target.param)} has one"
            )
        if target.spec is None:
            return grad  # type: ignore[no-any-return]
        part = part_of_grad(grad, target.spec, target.share)
        if part is not None:
            return part
        raise StateError(
            f"{type(self).__name__}: the gradient of {name_of(target.param)} is not sharded as the parameter is; set it to "
            f"None, or to a DTensor with placements {target.spec.placements}"
        )

    def _buffer(self, target: MatrixParam) -> Tensor:
        state, spec, share = self.state[target.param], target.state_spec, target.share
        held = state.get("momentum_buffer")
        found = getattr(held, "_spec", None)
        if held is None:
            value = torch.zeros_like(self._grad(target))
        elif spec is None or (found is not None and same_sharding(found, spec)):
            return local_of(held)
        elif share is not None and found is not None and target.spec is not None and same_sharding(found, target.spec):
            value = share.of(local_of(held)).clone()  # as it was loaded, perhaps from a run without shares
        else:
            raise StateError(
                f"{type(self).__name__}: the momentum of {name_of(target.param)} is not sharded as its gradient is "
                f"({getattr(held, 'placements', type(held).__name__)}); load it with placements {spec.placements}, "
                "as hsdp.checkpoint does"
            )
        state["momentum_buffer"] = value if spec is None else as_dtensor(value, with_dtype(spec, value.dtype))
        return value

    def _apply(self, exchange: Exchange) -> None:
        """Decay and the scaled updates, where their pieces belong."""
        kinds: dict[tuple[int, float], tuple[dict[str, Any], list[Tensor], list[Tensor]]] = {}
        locals_ = {id(target): target.local for target in exchange.bucket.targets}
        for one in exchange.finish():
            group = one.matrix.target.group
            factor = self.scale(one.matrix.rows, one.matrix.cols, group)
            _, parts, values = kinds.setdefault((id(group), factor), (group, [], []))
            parts.append(locals_[id(one.matrix.target)][one.piece.place.slices])
            values.append(one.value.to(parts[-1].device))
        for (_, factor), (group, parts, values) in kinds.items():
            lr = float(group["lr"])
            torch._foreach_mul_(parts, 1 - lr * group["weight_decay"])
            self._changes += 1
            torch._foreach_add_(parts, values, alpha=-lr * factor)
            self._changes += 1


@dataclass(frozen=True)
class _Plan:
    """How the parameters of one set of ranks are stepped.

    Attributes:
        comm: among the ranks that hold them.
        exchanges: of their buckets, in the order in which these are stepped.
        label: what it is called where ranks disagree.
        key: stands for what ranks must do alike: the same on those that step the same matrices.
    """

    comm: Comm
    exchanges: list[Exchange]
    label: Label
    key: int


def whole_matrix(update_fn: Callable[..., Tensor] | None = None, **settings: Any) -> Any:
    """Makes an optimizer class of a function from whole matrices to their updates.

        @hsdp.optim.whole_matrix
        def Polar(matrices, *, rank_eps=1e-6):
            u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
            return (u * (s > rank_eps).unsqueeze(-2)) @ vh

        optimizer = Polar(model.blocks.parameters(), lr=0.02, momentum=0.9)

    The function is called on one rank for each matrix, whatever the mesh, with a stack of matrices of equal shape
    `[k, rows, cols]` that hold the momentum (with Nesterov's look ahead), in the parameters' dtype. It returns what is
    multiplied by the learning rate and subtracted, of the same shape; weight decay is decoupled. Its keyword arguments with
    defaults are settings of the optimizer, which groups may have values of their own for. The class takes `params`, `lr`
    (1e-3), `weight_decay` (0), `momentum` (0.95), `nesterov` (True) and these settings; parameters' groups take `matrices`,
    `split_sizes` and `algorithm` as those of `hsdp.optim.Muon` do. Its `over_replicas` (False) is that of `Muon`, too.

    Args:
        update_fn: the function. It must compute the same whoever calls it, and remember nothing: owners may change.
        settings: other defaults.

    Returns:
        A subclass of `WholeMatrix` with the function's name; without `update_fn`, a decorator.
    """
    if update_fn is None:
        return lambda function: whole_matrix(function, **settings)
    function = update_fn
    own = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    if missing := [name for name, default in own.items() if default is inspect.Parameter.empty]:
        raise TypeError(f"whole_matrix({function.__name__}): give the setting {missing[0]!r} a default")
    common = {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.95, "nesterov": True}
    defaults = {**common, **own, **settings}

    def construct(self: Any, params: Iterable[Any], *, over_replicas: bool = False, **given: Any) -> None:
        if unknown := sorted(given.keys() - defaults.keys()):
            raise TypeError(f"{function.__name__}() has no setting {unknown[0]!r}; its settings are {', '.join(defaults)}")
        self._over_replicas = over_replicas
        WholeMatrix.__init__(self, params, {**defaults, **given})

    def transform(self: Any, matrices: Tensor, group: dict[str, Any]) -> Tensor:
        return function(matrices, **{name: group[name] for name in own})

    members = {
        "__init__": construct,
        "transform": transform,
        "__doc__": function.__doc__,
        "__module__": function.__module__,
    }
    return type(function.__name__, (WholeMatrix,), members)


def _by_group(targets: list[MatrixParam]) -> list[tuple[dict[str, Any], list[MatrixParam]]]:
    """Targets of one group and dtype each: foreach kernels want them alike."""
    found: dict[tuple[int, torch.dtype], list[MatrixParam]] = {}
    for target in targets:
        found.setdefault((id(target.group), target.block.dtype), []).append(target)
    return [(alike[0].group, alike) for alike in found.values()]
