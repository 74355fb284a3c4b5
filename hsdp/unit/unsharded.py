"""The unsharded parameters of a unit: gathered, shown to forwards, freed, and guarded against users' writes.

    SHARDED --launch--> GATHERING --finish--> UNSHARDED --reshard--> SHARDED

A unit is *open* when attributes of its modules give unsharded parameters. From the begin of its forward until it
is closed, modules have these registered in the place of the sharded ones.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hsdp import debug
from hsdp.comm.collectives import Comm
from hsdp.comm.mesh import MeshAxes
from hsdp.comm.observer import CommContext
from hsdp.comm.uneven import Uneven
from hsdp.comm.work import CommWork, abandon
from hsdp.errors import DivergenceError, ExtensionError, StateError
from hsdp.params.param import ManagedParam
from hsdp.torch_private import outside_transforms, plain_access
from hsdp.unit.dtype_group import DtypeGroup
from hsdp.unit.pending_shards import PendingShards
from hsdp.unit.readers import Readers
from hsdp.unit.settings import UnitSettings
from hsdp.unit.shadows import Shadows
from hsdp.unit.state import written
from hsdp.unit.write_guard import WriteGuard

Version = tuple[int, int]
"""See `Unit.version`."""
NO_VERSION: Version = (-1, -1)
_version_of = attrgetter("_version")


class Residency(enum.Enum):
    """Where a unit's unsharded parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


# Python finds a module's names in a tenth of the time that those of an `Enum` take; a unit's step asks for forty.
SHARDED, GATHERING, UNSHARDED = Residency


class UnshardedParams:
    """The unsharded parameters of one unit, which `Unit` builds.

    Attributes:
        residency: where they are; `pinned`: an asynchronous `unshard` of the user's keeps them; `sought`: from then until
            the next backward that waits for all reductions, even if they were resharded in between; `retained`: a graph of
            gradients (`create_graph=True`) may read their memory, which stays when they are resharded. Gathers do not
            depend on it: garbage collection decides when a graph goes, on each rank by itself.
        weights_version: raised whenever the sharded parameters change in a way that is known (optimizer step, load, move).
        gathered_version: `version` at the last gather, which is valid for that version.
        whole_bytes: their bytes, as the layout says, by which gathers ahead are bounded.
        unpacks_first: packed ones are unpacked before gathers ahead start, which find the memory of staging free.
        part_comm: the smaller group over which they stay sharded after forward, if any; `readers`: a device's streams.
    """

    # Set by `Unit`: its name, and what its dtype groups, made last by `Unit._arrange`, consist of.
    name: str
    params: list[ManagedParam]
    axes: MeshAxes
    settings: UnitSettings[Any]
    key: int
    context: CommContext
    shard_comm: Comm
    part_comm: Comm | None
    _parts: int
    _columns: list[Tensor]
    _wire_signature: int
    _reads_host: bool
    _on_meta: bool
    unpacks_first: bool

    def __init__(self) -> None:
        self.dtype_groups: list[DtypeGroup] = []
        self.residency = SHARDED
        self.open = self.pinned = self.sought = self.retained = False
        self.whole_bytes = self.weights_version = self._fillings = 0
        self.gathered_version = self.forward_version = self._filled_version = NO_VERSION
        self._written: str | None = None
        self._part_version: Version | None = None
        self._versioned: list[Tensor] = []
        self._shard_prints: list[Tensor] | None = None
        self.guard = WriteGuard((), 0)
        self._gather_work: CommWork | None = None
        self.readers: Readers | None = None
        self._pending_shards: PendingShards | None = None
        self.shadows = Shadows(())

    def rebuild(self, loses_sums: bool = False) -> None:
        """Makes the buffers anew around sharded parameters that were moved, cast, replaced or materialised."""
        raise AssertionError("a unit says how")

    def launch(self, version: Version | None = None, looked: bool = False) -> None:
        """Starts the gather of the unsharded parameters: SHARDED -> GATHERING.

        Args:
            version: `version`, if the caller has just asked for it; None: ahead of use, before which shards may be written.
            looked: the caller has checked `disturbed()`, or does before the first use.

        Raises:
            StateError: a parameter was replaced by something that is not its equal, is still on the meta device, or was
                written to by a forward that failed.
        """
        assert self.residency is SHARDED, f"unit {self.name!r} is {self.residency.value}, expected sharded"
        if self._written is not None:
            name, self._written = self._written, None
            raise written(self.name, name)
        observer = self.context.observer
        if observer is not None:
            observer.begins("launch", self)
        ahead = version is None
        try:
            version = version or self.version
            if not looked and self.disturbed():
                self.rebuild()
                version = self.version
            if self._on_meta:
                raise StateError(
                    f"unit {self.name!r}: its parameters ({self.params[0].fqn!r}, ...) are still on the meta device; call "
                    "hsdp.init_sharded(model), or model.to_empty(device=...) and load_state_dict, before the first forward "
                    f"(this is rank {self.shard_comm.rank} of its shards)"
                )
            parts = self._part_version == version and self.shards_unchanged()
            if self._part_version is not None and not parts:
                self._drop_parts()
            transfers: list[tuple[Tensor, Tensor]] = []
            try:
                # On the compute stream: the gather's stream joins it next, behind earlier uses of that memory.
                for group in self.dtype_groups:
                    if parts:
                        transfers += group.prepare_parts()
                    else:
                        group.prepare_gather()
            except BaseException:  # no room for all of it, say: the user may go on with a smaller batch
                self._release()
                raise
            if parts:
                self._gather_work = self._start_parts(transfers)
            elif self.context.streams.active:
                with self.context.streams.on("gather"):
                    self._gather_work = self._start_whole()
            else:
                self._gather_work = self._start_whole()
        except (ExtensionError, DivergenceError):  # no collective was started
            self._release()
            raise
        finally:
            if observer is not None:
                observer.ends("launch", self)
        if self.readers is not None:
            self.readers.begin(self.context.streams)
        self.residency, self.gathered_version = GATHERING, version
        if ahead:
            self.note_shards()
        if self.retained:
            # The graph of gradients that reads this memory runs without calling hsdp: wait for the gather now.
            self.join_gather()

    def gather(self, version: Version, looked: bool = False) -> None:
        """Starts the gather of weights of `version`, if needed; ends it if it `unpacks_first`. Arguments as in `launch`."""
        if not self.open and self.residency is not SHARDED:
            if self.gathered_version != version:
                self.reshard()
            elif not looked and not self.shards_unchanged():  # written to since the gather: a momentum encoder, say
                self.let_go()
                self.reshard()
        if self.residency is SHARDED:
            self.launch(version, looked)
        if self.unpacks_first and self.residency is GATHERING:
            self.finish()

    def _start_whole(self) -> CommWork:
        outputs: list[Tensor] = []
        inputs: list[Tensor] = []
        uneven: list[Uneven] = []
        for group in self.dtype_groups:
            group.fill_gather()
            outputs += group.outputs
            inputs += group.inputs
            uneven += group.uneven
        if self._reads_host:
            self.context.streams.note_host_read()
        if inputs or uneven:
            return self.shard_comm.all_gather(self, self.key ^ self._wire_signature, outputs, inputs, None, uneven)
        return self.shard_comm.local("cast", self)

    def _start_parts(self, transfers: list[tuple[Tensor, Tensor]]) -> CommWork:
        """The gather for backward, from the smaller group that the unsharded parameters stayed sharded over."""
        assert self.part_comm is not None, f"unit {self.name!r} kept parts without a group"
        with self.context.streams.on("gather"):
            if self._reads_host:
                self.context.streams.note_host_read()
            outputs, inputs = [t[0] for t in transfers], [t[1] for t in transfers]
            return self.part_comm.all_gather(self, self.key, outputs, inputs, None)

    def pin(self) -> None:
        """Starts the gather, if there is none; its result stays until `reshard`, or until the shards change."""
        if self.residency is SHARDED:
            self.launch()
        self.pinned = self.sought = True

    def end_search(self) -> None:
        """A pipeline schedule has all gradients of weights: `parameters()` gives sharded parameters again."""
        self.shadows.unregister()
        self.sought = self.pinned

    def retain(self) -> None:
        """A graph of gradients may read unsharded memory from now on."""
        self.retained = True

    def keep_part(self) -> None:
        """Closes the unit after forward; its parameters stay, sharded over the smaller group, for the backward."""
        if self.part_comm is None or self.residency is not UNSHARDED:
            self.reshard()
            return
        self.hide()
        for group in self.dtype_groups:
            group.keep_part(self.axes.shard_rank % self._parts)
        self._part_version = self.gathered_version
        self.note_shards()  # a write to `p.data` before the next gather changes these alone
        self.residency = SHARDED
        self._free()
        if self.context.observer is not None:
            self.context.observer.allocates(self)

    @property
    def holds_unsharded(self) -> bool:
        """Whether unsharded parameters, or parts of them, are there or on their way."""
        return self.residency is not SHARDED or self._part_version is not None

    def finish(self) -> None:
        """Waits for the gather: GATHERING -> UNSHARDED."""
        assert self._gather_work is not None and self.residency is GATHERING, f"unit {self.name!r} is not gathering"
        try:
            self._gather_work.wait()
        except BaseException:
            if self._gather_work.broken:  # else the backend may still write: the unit keeps the gather
                self.discard_gather()
            raise
        self.residency = SHARDED  # first: a KeyboardInterrupt must not leave GATHERING without a work
        self._gather_work = None
        if self.readers is not None:
            self.readers.add(self.context.streams, self.dtype_groups)
        observer = self.context.observer
        if observer is not None:
            observer.begins("copy", self)
        try:
            for group in self.dtype_groups:
                group.assemble()  # packed parameters go to their places, on the compute stream
            # The same weights, gathered again, have the same number: a backward of the forward that read them may go on.
            if self._filled_version != self.gathered_version:
                self._filled_version = self.gathered_version
                self._fillings += 1
            self.guard.opened(self._fillings)
        except BaseException:
            self._release()
            raise
        finally:
            if observer is not None:
                observer.ends("copy", self)
        self.residency = UNSHARDED
        if observer is not None:
            observer.allocates(self)

    def discard_gather(self) -> None:
        """Gives up a gather whose wait failed. While the backend may still write to its memory, new memory is made."""
        comm_work, self.residency, self._gather_work = self._gather_work, SHARDED, None  # in this order, as in `finish`
        self.hide()
        if comm_work is not None and not comm_work.done():
            abandon(comm_work)
            self.rebuild(loses_sums=True)
            return
        self._release()

    def join_gather(self) -> None:
        """Orders the current stream behind a gather under way, which reads the shards, before it writes to them."""
        if self._gather_work is not None:
            self.context.streams.join(self._gather_work.event)

    def _release(self) -> None:
        """Frees what a failed gather allocated."""
        self.retained = self.pinned = False
        for group in self.dtype_groups:
            group.release_transients()
        self._free()
        if self.context.observer is not None:
            self.context.observer.allocates(self)

    def show(self, registered: bool = False) -> None:
        """Opens the unit: attributes give its unsharded parameters, gathered first if they are not whole.

        If they are to be `registered`, `parameters()` of its modules gives them too, until the unit is closed.
        """
        if self.residency is SHARDED:
            self.launch()
        if self.residency is GATHERING:
            self.finish()
        elif self.readers is not None:
            self.readers.add(self.context.streams, self.dtype_groups)
        if not self.open or registered:
            self.shadows.show(registered)
            self.open = True

    @property
    def version(self) -> Version:
        """Tells the sharded parameters' values from earlier ones: changes that hsdp made or was told of, and those that
        autograd's version counters saw (`p.mul_()`). Writes to `p.data` pass by both.

        The caller is about to read the shards: they land first, if parts of them are on their way.
        """
        if self._pending_shards is not None:
            self.land_shards()
        with plain_access():
            return self.weights_version, sum(map(_version_of, self._versioned))

    def check_unwritten(self) -> None:
        """Raises StateError if the unsharded parameters were written to since they were gathered."""
        if self.residency is UNSHARDED and (name := self.guard.written()) is not None:
            self.retained = False  # a graph of gradients would read the written values: they are freed, and gathered anew
            raise written(self.name, name)

    def undo_writes(self) -> bool:
        """Gives unsharded parameters their memory back that a failed forward replaced; returns whether one was written to.

        With one shard rank, and of `replicate_params`, they are the shards themselves, and the next gather raises, because
        ranks may hold different values. Users' writes to such shards behind the gather do not count.
        """
        aliases = {param.fqn for group in self.dtype_groups if group.is_shard for param in group.params}
        looks = not aliases or self.gathered_version == self.version
        name = self.guard.written(content=looks) if self.residency is UNSHARDED else None
        if name in aliases:
            self._written = name
        return name is not None

    def reshard(self) -> None:
        """Closes the unit and frees the unsharded parameters: -> SHARDED. A gather under way is waited for first."""
        self.pinned = False
        if not self.open:  # a pipeline schedule may have registered them all the same
            self.shadows.unregister()
        if self.residency is GATHERING:
            self.finish()
        if not self.retained:  # else a graph of gradients reads on what was gathered: its backward calls `shards_unchanged`
            self._shard_prints = None
        if self.residency is UNSHARDED:
            self.residency = SHARDED
            self._free()
        if self.open:
            self.shadows.hide()
            self.open = False
        if self._part_version is not None:
            self._drop_parts()
        if self.context.observer is not None:
            self.context.observer.allocates(self)

    def _drop_parts(self) -> None:
        """Frees the parts that a smaller group kept."""
        self._part_version = None
        for group in self.dtype_groups:
            group.drop_part()

    def _free(self) -> None:
        if not self.retained:
            # Counters before memory: from here on autograd refuses a backward that would read what is about to go.
            self.guard.freed()
            for group in self.dtype_groups:
                group.free_unsharded()

    def let_go(self) -> None:
        """Frees the memory that was retained for graphs of gradients, which are gone, or must not run."""
        if self.retained:
            self.retained = False
            if self.residency is SHARDED:
                self._shard_prints = None
                self._free()

    def reshard_stale(self) -> None:
        """Frees unsharded parameters if the shards have changed since: the next opening of the unit gathers it anew."""
        if (self.holds_unsharded or self.retained) and self.is_stale():
            self.let_go()
            self.reshard()

    def is_stale(self) -> bool:
        """Whether the shards have other values than when they were gathered last, as far as versions show."""
        return self.gathered_version != self.version or not self.shards_unchanged()

    def keep(self) -> None:
        """Closes the unit after forward; its unsharded parameters stay where they are for the backward."""
        self.hide()
        self.note_shards()

    def note_shards(self) -> None:
        """Notes the values of the shards that were gathered, for `shards_unchanged`."""
        if self._shard_prints is None and (debug.ON or not self.context.streams.active):
            with outside_transforms():  # the prints outlive a transform of torch.func, whose tensors end with it
                self._shard_prints = [part.sum(0) if part.ndim > 1 else part.clone() for part in self._columns]

    def shards_unchanged(self) -> bool:
        """Whether the shards behind kept unsharded parameters have the values that were gathered.

        Versions do not show writes to `p.data`. On a device the host would have to wait for the comparison: there it is
        made in debug mode only.
        """
        kept, now = self._shard_prints, self._columns
        with outside_transforms():
            return kept is None or all(map(torch.equal, [part.sum(0) if part.ndim > 1 else part for part in now], kept))

    def hide(self) -> None:
        """Closes the unit; unsharded parameters stay where they are."""
        self.shadows.hide()
        self.open = False

    def await_shards(self, pending: PendingShards) -> None:
        """Parts of the shards are on their way; they land with the first read."""
        self._pending_shards = pending
        pending.stand_in()

    def land_shards(self) -> None:
        """The shards are whole, as they must be before they are read. Raises what their gather does."""
        if self._pending_shards is not None:
            self._pending_shards.land()
            self._pending_shards = None

    def disturbed(self) -> bool:
        """Whether a parameter was replaced or moved since its buffers were made."""
        if self._pending_shards is not None:
            self.land_shards()
        return self.shadows.disturbed()

    def weights_changed(self) -> None:
        """Notes that the shards have new values: gathered ones, and forwards that wait for a backward, are stale."""
        self.weights_version += 1


def launch_ahead(units: Iterable[UnshardedParams]) -> None:
    """Starts gathers for backwards, each as in the unit's forward: entering a unit compares its version then."""
    for unit in units:
        if unit.residency is SHARDED and unit.settings.unshard_in_backward:
            unit.launch(unit.forward_version, looked=True)
