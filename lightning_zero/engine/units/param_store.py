"""Stores of a bucket's compute parameters between uses: one class for each :class:`ParamsRest`.

::

                     prepare: before a gather          update: after a step
    FullIsMaster     nothing                           nothing
    FullCopy         nothing                           home -> own slice of the full buffer
    InHome           home -> own slice, cast           nothing
    DeviceShard      shard -> own slice                home -> shard, cast
    FileShard        file -> own slice                 home -> file, cast
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from lightning_zero.comm.streams import Streams
from lightning_zero.device import recording
from lightning_zero.device.accelerator import Event
from lightning_zero.engine.units.home import Home, Tiers, opened
from lightning_zero.planning.buckets import BucketPlan, ParamsRest
from lightning_zero.planning.placement import Tier
from lightning_zero.tiers.extents import Wanted
from lightning_zero.tiers.nvme import NvmeTier
from lightning_zero.tiers.pinned import ReadAhead
from lightning_zero.tiers.write_behind import WriteBehind


class ParamStore:
    """Compute parameters of the range that a rank owns: tensors are [owned numel] in compute_dtype.

    `memory` is device memory for the parameters beside full buffer and home, or None.
    """

    memory: Tensor | None = None

    def stage_ahead(self) -> None:
        """Start to read from files, before the parameters are needed."""

    def prepare(self, own: Tensor) -> None:
        """Fill `own`, this rank's slice of the full buffer, before a gather."""
        self.read(own)

    def read(self, target: Tensor) -> None:
        """Copy the parameters, as cast from the masters, into `target`."""
        raise NotImplementedError

    def update(self, master: Tensor) -> None:
        """Take new values from `master` after a step. `master` is readable."""

    def settle(self) -> None:
        """Wait until all parameters are in their place, and raise the error of a failed write."""

    def free(self) -> None:
        """Free the store's place on a tier. The store is not used after that."""


class FullIsMaster(ParamStore):
    def __init__(self, own: Tensor) -> None:
        self._own = own

    def prepare(self, own: Tensor) -> None:
        """Do nothing: the slice is the master."""

    def read(self, target: Tensor) -> None:
        target.copy_(self._own)


class InHome(ParamStore):
    """The parameters are cast from the masters for each use. Frozen parameters are in the home themselves."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def stage_ahead(self) -> None:
        self._home.begin_open()

    def read(self, target: Tensor) -> None:
        with opened(self._home):
            self._home.copy_to(target)


class FullCopy(ParamStore):
    """The full buffer is a copy of the masters. Users' code may write to the buffer, so reads use the home."""

    def __init__(self, home: Home, own: Tensor, send: Callable[[Tensor], None]) -> None:
        self._home, self._own, self._send = home, own, send

    def prepare(self, own: Tensor) -> None:
        """Do nothing: `update` has filled the slice."""

    def read(self, target: Tensor) -> None:
        with opened(self._home):
            self._home.copy_to(target)

    def update(self, master: Tensor) -> None:
        self._send(self._own)


class DeviceShard(ParamStore):
    memory: Tensor

    def __init__(self, values: Tensor, send: Callable[[Tensor], None]) -> None:
        self.memory, self._send = values, send

    def read(self, target: Tensor) -> None:
        target.copy_(self.memory)

    def update(self, master: Tensor) -> None:
        self._send(self.memory)


class FileShard(ParamStore):
    def __init__(
        self,
        tier: NvmeTier,
        home: Home,
        read_ahead: ReadAhead,
        write_behind: WriteBehind,
        streams: Streams,
        label: str,
        values: Tensor,
    ) -> None:
        self._tier, self._home, self._streams = tier, home, streams
        self._read_ahead, self._write_behind = read_ahead, write_behind
        self._extent = tier.reserve([Wanted(f"{label} (parameters)", values.numel(), values.dtype)])[0]
        self._staged: Tensor | None = None
        self._give_back: Callable[[Event], None] | None = None
        self._reading: Future[None] | None = None
        self._writing = tier.stage_out(self._extent, values)
        self._writing.result()  # the caller goes on to use the memory of `values`

    def stage_ahead(self) -> None:
        if self._reading is None:
            self._staged, self._give_back = self._read_ahead.take(self._extent.dtype, self._extent.numel)
            self._reading = self._tier.stage_in(self._extent, self._staged)

    def read(self, target: Tensor) -> None:
        self.stage_ahead()
        assert self._reading is not None and self._staged is not None
        with recording.stands("disk", self._extent.label, on_host=True):
            self._reading.result()
        target.copy_(self._staged, non_blocking=True)
        self._drop()

    def update(self, master: Tensor) -> None:
        self._drop()  # values that were read ahead are stale now
        value = master.to("cpu", self._extent.dtype)
        self._writing = self._write_behind.put(self._extent, value)
        if value is master:  # not converted: the next step must wait for the write before it changes the master
            self._home.lend(self._writing)

    def settle(self) -> None:
        self._writing.result()

    def free(self) -> None:
        self._drop()
        self._tier.free([self._extent])

    def _drop(self) -> None:
        """Drop values that were read ahead, because the file may change."""
        if self._reading is not None:
            # `exception` waits without raising: the tier's threads write to the staged memory until then.
            self._reading.exception()
        if self._give_back is not None:
            self._give_back(self._streams.mark())
        self._reading, self._staged, self._give_back = None, None, None


def make_param_store(
    plan: BucketPlan,
    label: str,
    home: Home,
    own: Tensor,
    values: Tensor,
    send: Callable[[Tensor], None],
    tiers: Tiers,
    streams: Streams,
) -> ParamStore:
    """Make the store that `plan` asks for, from the compute parameters `values` [owned numel] in any dtype.

    `own` is this rank's slice of the full buffer. `send` casts the masters into a tensor on the device.
    """
    match plan.params_rest:
        case ParamsRest.full_is_master:
            return FullIsMaster(own)
        case ParamsRest.full:
            return FullCopy(home, own, send)
        case ParamsRest.home:
            return InHome(home)
        case ParamsRest.shard if plan.tiers.compute_param is Tier.nvme:
            assert tiers.nvme is not None and tiers.read_ahead is not None and tiers.write_behind is not None
            values = values.to("cpu", own.dtype)
            return FileShard(tiers.nvme, home, tiers.read_ahead, tiers.write_behind, streams, label, values)
        case ParamsRest.shard:
            return DeviceShard(values.to(own.device, own.dtype, copy=True), send)
