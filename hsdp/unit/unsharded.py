"""The whole parameters of a unit: gathered, shown to forwards, freed, and guarded against writes of others.

    SHARDED --launch--> GATHERING --finish--> WHOLE --reshard--> SHARDED

A unit is *open* when its whole parameters lie in front of the sharded ones in their modules.
"""

from __future__ import annotations

import enum
from operator import attrgetter

import torch
from torch import Tensor

from hsdp import debug
from hsdp.comm.collectives import Comm
from hsdp.comm.mesh import MeshAxes
from hsdp.comm.streams import Streams
from hsdp.comm.work import Flight, abandon
from hsdp.errors import DivergenceError, ExtensionError, StateError
from hsdp.params.install import Shadows
from hsdp.params.param import ManagedParam
from hsdp.unit.dtype_group import Lane
from hsdp.unit.state import written
from hsdp.unit.write_guard import WholeGuard

Version = tuple[int, int]
"""See `Unit.version`."""
NO_VERSION: Version = (-1, -1)
_version_of = attrgetter("_version")


class Residency(enum.Enum):
    """Where a unit's whole parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"


class WholeParams:
    """The whole parameters of one unit, which `Unit` builds.

    Attributes:
        residency: where they are; `pinned`: a user's asynchronous `unshard` asked to keep them; `retained`: a graph of
            gradients (`create_graph=True`) reads them.
        epoch: raised whenever the sharded parameters change in a way that is known (optimizer step, load, move).
        gathered_version: `version` at the last gather, which is valid for that version.
        part_comm: the smaller group over which whole parameters stay sharded after forward, if any.
    """

    name: str
    params: list[ManagedParam]
    axes: MeshAxes
    lanes: list[Lane]
    residency: Residency
    open: bool
    pinned: bool
    retained: bool
    epoch: int
    gathered_version: Version
    op: int
    streams: Streams
    shard_comm: Comm
    part_comm: Comm | None
    _kept_version: Version | None
    _filled_version: Version
    _fillings: int
    _kept_shards: list[int] | None
    _versioned: list[Tensor]
    _flight: Flight | None
    _shadows: Shadows
    _guard: WholeGuard
    _parts: int
    _variant: int
    _reads_host: bool

    def rebuild(self, loses_sums: bool = False) -> None:
        """Makes the buffers anew around sharded parameters that were moved, cast, replaced or materialised."""
        raise AssertionError("a unit says how")

    def launch(self, version: Version | None = None) -> None:
        """Starts the gather of the whole parameters: SHARDED -> GATHERING.

        Args:
            version: `version`, if the caller has just asked for it.

        Raises:
            StateError: a parameter was replaced by something that is not its equal, or is still on the meta device.
        """
        assert self.residency is Residency.SHARDED, f"unit {self.name!r} is {self.residency.value}, expected sharded"
        if self.disturbed():
            self.rebuild()
            version = None
        self._check_materialised()
        version = version or self.version
        if self._kept_version == version:
            self._launch_parts(version)
            return
        try:
            for lane in self.lanes:
                lane.prepare_gather()
            self._flight = self._start_gather()
        except (ExtensionError, DivergenceError):  # nothing is on its way
            self._release()
            raise
        self.residency = Residency.GATHERING
        self.gathered_version = version

    def _start_gather(self) -> Flight:
        with self.streams.on("gather"):
            for lane in self.lanes:
                lane.fill_gather()
            if self._reads_host:
                self.streams.note_host_read()
            outputs = [tensor for lane in self.lanes for tensor in lane.outputs]
            inputs = [tensor for lane in self.lanes for tensor in lane.inputs]
            if inputs:
                return self.shard_comm.all_gather(self, self.op ^ self._variant, outputs, inputs, self._unpack)
            return self.shard_comm.local("cast", self)

    def _launch_parts(self, version: Version) -> None:
        """The gather for backward, from the smaller group that the whole parameters stayed sharded over."""
        assert self.part_comm is not None, f"unit {self.name!r} kept parts without a group"
        transfers = [transfer for lane in self.lanes for transfer in lane.prepare_parts()]
        with self.streams.on("gather"):
            if self._reads_host:
                self.streams.note_host_read()
            outputs, inputs = [t[0] for t in transfers], [t[1] for t in transfers]
            self._flight = self.part_comm.all_gather(self, self.op, outputs, inputs, None)
        self.residency = Residency.GATHERING
        self.gathered_version = version

    def keep_part(self) -> None:
        """Closes the unit after forward; its whole parameters stay, sharded over the smaller group, for the backward."""
        if self.part_comm is None or self.residency is not Residency.WHOLE:
            self.reshard()
            return
        if self.open:
            self.hide()
        for lane in self.lanes:
            lane.keep_part(self.axes.shard_rank % self._parts)
        self._guard.freed()
        self._kept_version = self.gathered_version
        self.residency = Residency.SHARDED

    @property
    def holds_whole(self) -> bool:
        """Whether whole parameters, or parts of them, are there or on their way."""
        return self.residency is not Residency.SHARDED or self._kept_version is not None

    def _unpack(self) -> None:
        with torch.no_grad():
            for lane in self.lanes:
                lane.unpack()

    def finish(self) -> None:
        """Waits for the gather: GATHERING -> WHOLE."""
        assert self._flight is not None and self.residency is Residency.GATHERING, f"unit {self.name!r} is not gathering"
        # If this raises, the gather may still be writing: the unit keeps the flight, and nothing is freed.
        self._flight.wait()
        self._flight = None
        self.residency = Residency.SHARDED
        try:
            for lane in self.lanes:
                lane.assemble()
        except BaseException:
            self._release()
            raise
        for lane in self.lanes:
            lane.release_transients()
        self.residency = Residency.WHOLE
        if self._filled_version != self.gathered_version:
            self._filled_version = self.gathered_version
            self._fillings += 1
        self._guard.opened(self._fillings)

    def discard_gather(self) -> None:
        """Gives up a gather whose waiting failed. While it may still write, its memory is left to it and made anew."""
        flight, self._flight = self._flight, None
        self.hide()
        self.residency = Residency.SHARDED
        if flight is not None and not flight.done():
            abandon(flight)
            self.rebuild(loses_sums=True)
            return
        self._release()

    def _release(self) -> None:
        """Frees what a gather that came to nothing allocated."""
        for lane in self.lanes:
            lane.release_transients()
            lane.release_whole()

    def show(self) -> None:
        """Opens the unit: whole parameters in front of the sharded ones, gathered first if they are not whole."""
        if self.residency is Residency.SHARDED:
            self.launch()
        if self.residency is Residency.GATHERING:
            self.finish()
        if self.open:
            return
        self._shadows.show()
        self.open = True

    @property
    def version(self) -> Version:
        """Tells the sharded parameters' values from earlier ones: changes that hsdp made or was told of, and those that
        autograd's version counters saw (`p.mul_()`). Writes to `p.data` and foreach operations pass by both."""
        return self.epoch, sum(map(_version_of, self._versioned))

    def check_unwritten(self) -> None:
        """Raises StateError if somebody wrote to the whole parameters since they were gathered."""
        if self.residency is Residency.WHOLE and (name := self._guard.written()) is not None:
            raise written(self.name, name)

    def undo_writes(self) -> None:
        """Whole parameters that somebody gave other memory have theirs again; of an iteration that failed anyway."""
        if self.residency is Residency.WHOLE:
            self._guard.written()

    def reshard(self) -> None:
        """Closes the unit and frees the whole parameters: -> SHARDED. A gather under way is waited for first."""
        self.pinned = self.retained = False
        if self.open:
            self.hide()
        if self.residency is Residency.GATHERING:
            self.finish()
        self._kept_shards = None
        if self.residency is Residency.WHOLE:
            self._guard.freed()
            for lane in self.lanes:
                lane.release_whole()
            self.residency = Residency.SHARDED
        if self._kept_version is not None:
            self._kept_version = None
            for lane in self.lanes:
                lane.drop_part()

    def keep(self) -> None:
        """Closes the unit after forward; its whole parameters stay where they are for the backward."""
        self.hide()
        self.note_shards()

    def note_shards(self) -> None:
        """Notes the values of the shards behind whole parameters that stay, for `as_kept`."""
        if self.axes.device.type == "cpu" or debug.ON:
            self._kept_shards = [lane.fingerprint() for lane in self.lanes]

    def as_kept(self) -> bool:
        """Whether the shards behind whole parameters that were kept have their values of then.

        Writes to `p.data` show in nothing else. On a device the host would have to wait for the answer: there it is given
        in debug mode only.
        """
        kept = self._kept_shards
        return kept is None or self.open or kept == [lane.fingerprint() for lane in self.lanes]

    def hide(self) -> None:
        """Closes the unit; whole parameters stay where they are."""
        self._shadows.hide()
        self.open = False

    def name_of_whole(self, tensor: Tensor) -> str | None:
        """The parameter whose whole tensor `tensor` is, or looks into."""
        return self._shadows.name_of(tensor)

    def disturbed(self) -> bool:
        """Whether somebody replaced or moved a parameter since hsdp last looked."""
        return self._shadows.disturbed()

    def assigned(self) -> str | None:
        """The name of a sharded parameter whose `.data` somebody assigned to since hsdp last looked."""
        return self._shadows.assigned()

    def weights_changed(self) -> None:
        """Says that the sharded parameters have new values: what was gathered, and a forward that waits, are stale."""
        self.epoch += 1

    def _check_materialised(self) -> None:
        if self.lanes and self.lanes[0].shard.is_meta:
            raise StateError(
                f"unit {self.name!r}: its parameters ({self.params[0].fqn!r}, ...) are still on the meta device; call "
                "hsdp.init_sharded(model), or model.to_empty(device=...) and load_state_dict, before the first forward"
            )
