"""`ElasticOptimizer`: an optimizer whose steps are taken by all replicas that take part, or dropped without a trace."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hsdp.api.module import HSDPModule
from hsdp.comm.streams import Streams
from hsdp.elastic.buffers import KeptBuffers
from hsdp.elastic.healing import HealedState, Shards
from hsdp.elastic.manager import Manager
from hsdp.elastic.reduce import replicas
from hsdp.errors import StateError
from hsdp.format import listing
from hsdp.policies import ReduceOp
from hsdp.schedule.optimizer_hooks import check_communicated
from hsdp.unit.lookup import unit_of, units_below


class ElasticOptimizer:
    """Wraps an optimizer: `zero_grad` begins a step over replicas that come and go, `step` takes or drops it.

    It makes the manager's all-reduce the all-reduce stage of the model (see `replicas`), and has replicas that join healed:
    parameters, buffers, optimizer states and settings. Schedulers belong to the inner optimizer, and are stepped if `step`
    returned True; register them with `manager.register_state_dict_fn`, so that a replica that joins gets their state too.

    Args:
        manager: torchft's manager of this rank, made with `load_state_dict=None, state_dict=None`.
        model: the sharded model, over a mesh of this job's ranks, or a module that holds several.
        optimizer: the optimizer of its parameters.
        reduce_op: see `replicas`.

    Attributes:
        manager, model, optimizer: as given.

    Raises:
        TypeError: `model` is no module, or `optimizer` no optimizer.
        ValueError: no parameter of the model is sharded, one that trains is in no unit, the mesh has replicas, or the
            manager has such an optimizer.
    """

    def __init__(self, manager: Manager, model: nn.Module, optimizer: Optimizer, reduce_op: ReduceOp = "avg") -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"ElasticOptimizer: expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self.manager = manager
        self.model = model
        self.optimizer = optimizer
        self._units = units_below(model, what="ElasticOptimizer")
        outside = [name for name, param in model.named_parameters() if param.requires_grad and unit_of(param) is None]
        if outside:
            raise ValueError(
                f"ElasticOptimizer: in no unit are {listing(outside, 3)} (ignored_params, or outside of every sharded "
                "module): nobody sums their gradients over the replicas, which would drift apart. Call fully_shard on the "
                "module that holds them, or requires_grad_(False) on them"
            )
        stage = replicas(manager, reduce_op)
        for module in model.modules():
            if isinstance(module, HSDPModule):
                module.set_replica_reduce(stage, recurse=False)
        self._stage = stage
        self._streams = Streams(self._units[0].axes.device)
        self._settled: Any = None
        self._begun = False
        self._joins = True
        # Steps that the script skipped, before this one and in it; and what had been sent when gradients were zeroed.
        self._skipped = self._skips = self._sent = 0
        self._healed = HealedState(model, optimizer)
        self._buffers = KeptBuffers(model)
        try:
            manager.register_state_dict_fn("hsdp", self._give, self._take)
        except AssertionError as error:
            raise ValueError(
                "ElasticOptimizer: the manager has one already, and counts its steps; put several models into one "
                "nn.ModuleDict, and their parameters into groups of one optimizer, or make a manager for each"
            ) from error

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups. Change their settings before `zero_grad`."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begins a step, once: asks the manager who takes part, which is answered beside the forward. Zeroes gradients.

        Every rank calls it before the forward of the step's first micro-batch. With a manager that has
        `use_async_quorum=False`, it waits, and a replica that is behind is healed here.
        """
        if not self._begun:
            self._healed.note()
            self._stage.begin()
            # Behind all that this thread did to the state since the last step, averages of weights among it.
            self._settled = self._streams.mark()
            self.manager.start_quorum()
            self._buffers.keep()  # behind the healing of a manager that waits for it
            self._begun = True
            self._sent = 0
        elif self._sent != self._stage.sent and not self._stage.drops:
            self._skips += 1  # gradients are zeroed that no `step` was called with
            self._sent = self._stage.sent
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> bool:
        """Takes the step, or drops it: then gradients, pending sums and reductions are gone, and weights and buffers as
        before it.

        A replica that is healed has the others' state before it steps. Every rank calls it, behind the last backward.

        Returns:
            Whether the step was taken: the same on all ranks of the replica. Other replicas may have taken a step that
            this one dropped; then it is healed in the next one.

        Raises:
            StateError: `zero_grad` did not begin a step, gradients were not communicated, settings of the optimizer were
                changed since, this replica begins with other weights than others have at the same step, or replicas have
                skipped different steps.
            CheckpointError, TypeError: behind the first step: the optimizer's states could not be given to others.
            RuntimeError: no quorum was found in time, or the manager gave up.
        """
        if not self._begun:
            raise StateError("ElasticOptimizer.step: no step has begun; call zero_grad() before the forward, in each step")
        for unit in self._units:
            if unit.settings.replica_reduce is not self._stage:
                raise StateError(
                    f"ElasticOptimizer.step: the all-reduce stage of unit {unit.name!r} is not that of this optimizer; "
                    "make the optimizer after all fully_shard calls, and leave set_replica_reduce to it"
                )
            check_communicated(unit, "ElasticOptimizer.step", may_drop=True)
        self._healed.check_settings()
        self.manager.wait_quorum()
        self._stage.give_up()
        step = self.manager.current_step()
        skipped = self._skipped + self._skips
        same = self._stage.compare(self._joins, skipped, self._healed.digest, self._units[0].axes.device)
        takes = self.manager.should_commit()
        self._begun = False
        self._skipped, self._skips = self._skipped + self._skips, 0  # the others' before this step, if it was healed in it
        if self._stage.skipped_apart:
            self._drop()
            raise StateError(
                f"ElasticOptimizer.step: this replica has skipped {skipped} step(s), and others have not skipped as many: "
                "zero_grad() was called behind a backward, and step() was not. A GradScaler does so, and its scales differ "
                "by now: docs/elastic.md tells how to scale a loss instead. Start again from a checkpoint"
            )
        if not same:
            self._refuse_other_weights(step)
        if takes:
            if self._stage.joined:
                self._skipped = 0
            joins, self._joins = (
                self._joins,
                True,
            )  # if it raises: the others have taken this step, and the next one compares
            self.optimizer.step()
            if joins:
                self._healed.take()  # what cannot be sent is an error now, and not when the first replica joins
            self._joins = False
        else:
            self._drop()
        return takes

    def _refuse_other_weights(self, step: int) -> None:
        """Ends a replica that joins with other weights than others have at the same step; those drop the step."""
        if self._joins:
            raise StateError(
                f"ElasticOptimizer.step: replicas have different weights at step {step}, and this one has just begun, "
                "or its optimizer raised in a step that others took (start it again then); seed them alike, load one "
                "checkpoint, or none if others are further (they heal this one then), or make the manager with "
                "use_async_quorum=False and init_sync=True, which heals them before"
            )
        warnings.warn(
            f"hsdp: a replica that joins has other weights than this one at step {step}; the step is dropped", stacklevel=3
        )

    def _drop(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        for unit in self._units:
            unit.gradients.heed_zero_grad()
        self._buffers.put_back()

    def _take(self) -> Shards:
        """From the manager's thread: a device's streams do not order what that copies behind what came before this step."""
        if self._settled is not None:
            self._settled.synchronize()
        return {**self._healed.take(), "skipped": self._skipped}

    def _give(self, shards: Shards) -> None:
        self._healed.give(shards)
        self._skipped = shards["skipped"]
        self._buffers.forget()
