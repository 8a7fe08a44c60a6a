"""Shows masters to users' code between steps.

[Note: uses of parameters between steps]
Under DDP parameters have their values in every hook. At stage 3 they are placeholders between steps. If all ranks use
a parameter at the same point, the first use gathers the masters of the parameter's unit::

    use of a unit      ranks find that all use this unit; its masters are gathered into separate memory
    use by some ranks  these ranks read the other ranks' shards, into memory of their own
    use of another     the same; uses of earlier units end if all together exceed ``zero.prefetch_bytes``
    a state dict       a use of all units; tensors are copied to the host if only the host has room for all
    a copy in a step   all units of the module show masters until the call returns (a state dict, a load)
    next step, save    written values are compared between ranks and copied to the masters; all uses end
    an exception       all uses end without messages; written values are compared later

Views that users keep (``p.detach()``, ``.data``, a state dict) share this memory, so writes to views are noticed. As
under DDP, views follow the parameter: while any rank holds views, each step is followed by a use of the views' units,
which copies new values to the same memory. After ``p.data = value`` earlier views keep the old values, and the
parameter uses other memory.

See [Note: version counters] and [Note: checksums of writes]: how writes to shown masters are noticed.
See [Note: uses by some ranks alone]: how a rank finds out whether all ranks use a unit, and reads shards alone.
See [Note: masters during an offloaded step]: the first use waits for offloaded steps.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.passes.masters import Memory, ShardReader
from lightning_zero.engine.passes.writes import Writes, refuse_unequal, unequal_error
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place, Shown
from lightning_zero.engine.units.unit import Unit
from lightning_zero.planning.memory import reason_not_to_fit
from lightning_zero.ranks.posts import machine
from lightning_zero.tiers.limits import available_host_memory


class Between:
    """Makes masters the values of parameters that users' code uses between steps, until the next step begins.
    See [Note: uses of parameters between steps].

    Attributes:
        in_run: Whether all ranks run the same code (of a Trainer's run or of Fabric), so that uses are allowed.
        shown: The units that all ranks use, in the order of their first use.
        memory: The whole masters of buckets in these units, and of buckets of which users on any rank hold views.
        alone: The whole masters of each unit that this rank uses alone, in the order of first use.
        kept: Those of units that this rank has used alone before, if users hold views.
        rounds: Whether a run is open whose passes compute in another dtype than that of some masters.
        rounded: In a run, the buckets whose parameters stay gathered in a dtype with fewer bits than their masters.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Communicator,
        writes: Writes,
        reader: ShardReader,
        *,
        most_bytes: int,
        settle: Callable[[], None],
    ) -> None:
        self._units, self._comm, self._writes, self._reader = units, comm, writes, reader
        self._most_bytes, self._settle = most_bytes, settle
        self.shown: list[Unit] = []
        self.memory: dict[Bucket, Memory] = {}
        self.alone: dict[Unit, dict[Bucket, Memory]] = {}
        self._in_trainer = False
        self._calls_alone = False  # only some ranks make the outermost call that is under way
        self.kept: dict[Unit, dict[Bucket, Memory]] = {}
        self._kept_at = reader.changes.counts  # changes of masters when ``kept`` had their values
        self._unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self.rounded: list[Bucket] = []
        self.in_run = self.rounds = False
        self._thread = 0  # number of the thread that runs hooks

    def begin_run(self, *, in_trainer: bool = False) -> None:
        """Allow users' code, the same on all ranks, to use parameters between steps from now on. Sends no message.
        ``in_trainer``: calls of the module outside of a scope do not train, so that ranks may make some of them alone.
        """
        self.in_run, self._thread, self._in_trainer = True, threading.get_ident(), in_trainer
        self.plans_changed()
        self.pass_ends()

    def end_run(self) -> None:
        """Refuse uses between steps from now on, because ranks may run different code. Call :meth:`close` first."""
        self.forget()
        self.pass_begins()
        self.in_run = False
        self.plans_changed()

    @property
    def runs_here(self) -> bool:
        return self.in_run and threading.get_ident() == self._thread

    def shows_for_call(self, unit: Unit, running: Sequence[Unit]) -> bool:
        """Return whether a call of ``unit`` between steps must compute with masters, after the unit's parameters show
        masters. This is so in two cases. Passes compute in another dtype and the call is outside of autocast, because
        inputs then have the masters' dtype. Or only some ranks make the outermost call. ``running``: the units whose
        calls are under way."""
        in_masters_dtype = self.rounds and not torch.is_autocast_enabled(self._comm.device.type)
        if not running:
            # In loops of Fabric a call with gradients trains, and a message before each one would cost time.
            asks = (self._in_trainer or not torch.is_grad_enabled()) and any(unit.reshards for unit in self._units)
            asks = asks and not in_masters_dtype
            self._calls_alone = asks and not self._reader.all_make("a call of the module between steps")
        if not in_masters_dtype and not self._calls_alone:
            return False
        if unit not in self.shown and unit not in self.alone:
            self.use(unit, "a call", running, alone=self._calls_alone)
        return True

    def plans_changed(self) -> None:
        self.rounds = self.in_run and any(b.dtypes.compute != b.dtypes.master for b in self._unit_of)
        self.rounded = [bucket for bucket in self._unit_of if bucket.rounds] if self.in_run else []
        if self.rounded or (self.in_run and any(bucket.plan.reshards for bucket in self._unit_of)):
            self._reader.listen()

    def pass_begins(self) -> None:
        """When a pass begins, let users' code see the compute parameters in :attr:`rounded` buckets."""
        for bucket in self.rounded:
            bucket.hide_rounded(False)

    def pass_ends(self) -> None:
        """When a pass ends, make uses of parameters in :attr:`rounded` buckets call the engine, which shows masters."""
        for bucket in self.rounded:
            bucket.hide_rounded(True)

    # -- uses -----------------------------------------------------------------------------------------------------

    @outside_autograd
    def use(self, unit: Unit, what: str, beside: Collection[Unit], *, alone: bool = False) -> None:
        """Make the masters of ``unit`` the values of its parameters. Gather the masters if all ranks make this use;
        otherwise read the other ranks' shards.

        Args:
            what: A name of the use, for error messages.
            beside: The units of all parameters that the same operation uses. Units already in use stay in use.
            alone: Whether this rank knows that the other ranks do not make this use.
        """
        if threading.get_ident() != self._thread and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"{what} between steps in a thread of its own: ranks' messages for it would cross those of their main "
                "threads. Copy what the thread needs in a hook (weight.detach().clone())."
            )
        with self._comm.set_place(f"{what} between steps"):
            alone = alone or not self.alone.keys().isdisjoint(beside)  # else the operation would need both kinds
            if alone or not self._reader.all_make(f"{what} in unit {unit.title}"):
                self._use_alone(unit, beside)
                return
            if self.alone:
                self._close_alone()
            self._make_room(unit, beside)
            if not self.shown:
                self._take_written()
            self._show(unit)

    def _use_alone(self, unit: Unit, beside: Collection[Unit]) -> None:
        """Read the masters of ``unit``, and make the masters the values of its parameters on this rank."""
        self._writes.take_all_over()
        left = _nbytes(unit) + sum(map(_nbytes, self.alone))
        for known in [known for known in self.alone if known not in beside and not self._written_alone(known)]:
            if left > self._most_bytes:
                left -= _nbytes(known)
                self.hide_alone(known)
        found = {}
        for bucket in unit.buckets:
            if bucket.shown is Shown.PLAIN or not _needs_masters(bucket):
                continue
            if (memory := self.memory.get(bucket)) is not None:
                memory.shown_again()
            found[bucket] = memory or self._kept_of(bucket) or self._read(bucket)
        self.alone[unit] = found
        for bucket, memory in found.items():
            bucket.show_whole(Shown.MASTERS, memory.values())

    def _read(self, bucket: Bucket) -> Memory:
        return Memory(bucket, self._reader.read(bucket).to(bucket.dtypes.master))

    def _kept_of(self, bucket: Bucket) -> Memory | None:
        """Return the memory of ``bucket`` that is in :attr:`kept`, to which parameters are about to refer again, and
        remove the memory there."""
        memory = self.kept.get(self._unit_of[bucket], {}).pop(bucket, None)
        if memory is not None:
            memory.shown_again()
        return memory

    def _written_alone(self, unit: Unit) -> dict[Bucket, list[int]]:
        """Return the slots of parameters that users have written to while this rank used ``unit`` alone."""
        for bucket, memory in self.alone[unit].items():
            memory.assigned = {*self._written(bucket)}  # remembered: the next call must find them too
        return {bucket: sorted(memory.assigned) for bucket, memory in self.alone[unit].items() if memory.assigned}

    def hide_alone(self, *units: Unit) -> None:
        """Undo :meth:`use` of ``units``, or of all units, that this rank uses alone. Sends no message."""
        for unit in units or [*self.alone]:
            for bucket, memory in self.alone.pop(unit).items():
                bucket.hide_whole()
                if bucket in self.memory or memory.is_held:
                    memory.checksums = memory.all_checksums()
                if bucket not in self.memory and memory.is_held:
                    self.kept.setdefault(unit, {})[bucket] = memory

    def _memory_of(self, bucket: Bucket) -> Memory:
        return self.alone.get(self._unit_of[bucket], self.memory).get(bucket) or self.memory[bucket]

    def _take_written(self) -> None:
        self._settle()
        self._writes.take_all_over()
        self._writes.confirm_if_any()

    @outside_autograd
    def show_in_pass(self, params: Iterable[nn.Parameter]) -> None:
        """Make the masters the values of ``params`` in the open pass, until :meth:`hide_in_pass`. All ranks must have
        issued the same gathers. Collective."""
        self._take_written()
        self.pass_ends()
        for unit in dict.fromkeys(self._unit_of[bucket] for bucket in self._buckets_of(params)):
            self._show(unit)

    @outside_autograd
    def hide_in_pass(self) -> None:
        """Undo :meth:`show_in_pass`: update masters with users' writes, then show compute parameters. Collective."""
        self.close()
        self.pass_begins()

    def _buckets_of(self, params: Iterable[nn.Parameter]) -> list[Bucket]:
        wanted = set(map(id, params))
        return [bucket for bucket in self._unit_of if any(id(info.param) in wanted for info in bucket.params)]

    def check_room(self, params: Iterable[nn.Parameter], what: str, *, or_on_host: bool = False) -> bool:
        """Raise RuntimeError on all ranks if the masters of ``params`` do not fit into free device memory. With
        ``or_on_host``, first try free host memory, and return True if the masters fit only there. ``what``: the
        operation's name. Collective, unless only some ranks call this: each of them then looks at its own memory."""
        nbytes = sum(
            bucket.layout.numel * bucket.dtypes.master.itemsize
            for bucket in self._buckets_of(params)
            if bucket.plan.reshards and bucket not in self.memory
        )
        if not nbytes:
            return False
        accelerator, on_device = self._comm.streams.accelerator, self._comm.device.type != "cpu"
        if on_device and accelerator.free_nbytes() < 2 * nbytes:  # else there is room without what the allocator keeps
            accelerator.release_cached()
        own = machine(), available_host_memory(), accelerator.free_nbytes()
        numbered = [(self._comm.rank, own)]
        if self._reader.all_make(what):
            numbered = [*enumerate(self._comm.gather_checked(own, f"{what}, which all ranks must call"))]
        places = [place for _, (place, *_) in numbered]
        hosts = [
            reason_not_to_fit(nbytes, free // places.count(place), f"the host of rank {rank}, for each of its ranks")
            for rank, (place, free, _) in numbered
        ]
        devices = [reason_not_to_fit(nbytes, free, f"the device of rank {rank}") for rank, (*_, free) in numbered]
        why = next(filter(None, devices if on_device else hosts), None)
        if why and on_device and or_on_host and not any(hosts):
            if self._comm.rank == 0:
                warnings.warn(
                    f"{what}: {why}. Its tensors are copies on the host: writes to them do not change parameters, and "
                    "they do not follow later steps.",
                    stacklevel=2,
                )
            return True
        if why:
            raise RuntimeError(
                f"{what}: {why}. Call it on one part of the module after another, or save by "
                "trainer.save_checkpoint(path) (fabric.save), which gathers no more than a bucket at a time."
            )
        return False

    def _show(self, unit: Unit) -> None:
        self.shown.append(unit)
        for bucket in unit.buckets:
            if bucket.shown is Shown.PLAIN or not (_needs_masters(bucket) or bucket in self.memory):
                continue
            full = bucket.full_master().to(bucket.dtypes.master)  # frozen parameters rest in the compute dtype
            if (memory := self.memory.get(bucket)) is None:
                memory = self.memory[bucket] = self._kept_of(bucket) or Memory(bucket, full)
            else:
                self._fill(memory, full)
                memory.shown_again()
            bucket.show_whole(Shown.MASTERS, memory.values())

    def _fill(self, memory: Memory, full: Tensor) -> None:
        """Copy the masters ``full`` to ``memory``, of which users hold views. Raises RuntimeError if users have written
        to views in a step."""
        bucket = memory.bucket
        if memory.written_views():
            raise RuntimeError(
                f"unit {self._unit_of[bucket].title}: a view of a parameter that was read between steps "
                f"({bucket.params[0].fqn} or another one of the unit) was written to in a step, and the write would be "
                "lost. Write to the parameter itself, or write to the view between steps."
            )
        torch._foreach_copy_(memory.values(), [bucket.part_of(full, info) for info in bucket.params])
        memory.checksums = None

    def _make_room(self, unit: Unit, beside: Collection[Unit]) -> None:
        """Undo :meth:`use` for the units used first, until ``unit`` and the remaining units take at most
        ``most_bytes``. Skip the units in ``beside``."""
        left = sum(map(_nbytes, self.shown)) + _nbytes(unit)
        oldest = []
        for known in self.shown:
            if left <= self._most_bytes:
                break
            if known in beside:
                continue
            oldest.append(known)
            left -= _nbytes(known)
        if oldest:
            self._hide(oldest, f"room for unit {unit.title} between steps")

    def hand_out(self, place: Place, values: Tensor) -> None:
        """Record that users' code has read ``.data`` of the parameter at ``place``. Save a checksum of its values,
        because writes to ``.data`` do not increment the version counter."""
        memory = self._memory_of(place.bucket)
        if place.info.slot not in memory.handed_out:
            memory.handed_out[place.info.slot] = memory.checksum(place.info)

    @outside_autograd
    def replace(self, place: Place, value: Tensor) -> None:
        """Perform ``param.data = value`` for the parameter at ``place``, which shows its master now."""
        memory = self._memory_of(place.bucket)
        memory.assign(place.info, value)
        place.bucket.show_whole(Shown.MASTERS, memory.values())

    # -- the end --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Update the masters with users' writes to parameters. Raise RuntimeError on all ranks if ranks have written
        different values. Collective."""
        self._close_alone()
        if self.shown:
            self._take_over(list(self.memory), [], "writes to parameters between steps")

    def close(self) -> None:
        """Update the masters with users' writes, and undo :meth:`use` for all units. Collective, unless this rank uses
        units alone and has written to none of their parameters."""
        if self.alone or self.kept:
            self._close_alone()
        if self.shown:
            self._hide(list(self.shown), "the end of uses of parameters between steps")

    @outside_autograd
    def _close_alone(self) -> None:
        """Undo :meth:`use` for units that this rank uses alone. If users have written to their parameters, first update
        the masters: collective, because all ranks have to write the same values."""
        written = [item for unit in self.alone for item in self._written_alone(unit).items()]
        memory = {bucket: self._memory_of(bucket) for bucket, _ in written}
        for one in memory.values():
            one.assigned = set()
        for unit in self._still_kept():
            for bucket, kept in self.kept[unit].items():
                if slots := kept.written_views():
                    written.append((bucket, slots))
                    memory[bucket] = kept
                    kept.checksums = kept.all_checksums()
        self.hide_alone()
        if not written:
            return
        places = [Place(bucket, bucket.params[slot]) for bucket, slots in written for slot in slots]
        names = sorted(place.info.fqn for place in places)
        with self._comm.set_place(f"the end of writes to {', '.join(names[:3])} between steps"):
            table = self._comm.gather_checked(names, "writes to parameters between steps, which all ranks must make")
        if any(other != names for other in table):
            names = sorted({name for other in table for name in other})
            raise unequal_error(names, "written to between steps, on some ranks only")
        places.sort(key=lambda place: place.info.fqn)
        refuse_unequal(
            self._comm, [(place, memory[place.bucket].value(place.info)) for place in places], "between steps"
        )
        for bucket, slots in written:
            self._write(bucket, slots, memory[bucket])
        self._reader.changes.were_made()
        self._kept_at = self._reader.changes.counts

    def _still_kept(self) -> list[Unit]:
        """Drop memory of :attr:`kept` that users do not hold any more. Return the units that have some."""
        held = {u: {b: memory for b, memory in kept.items() if memory.is_held} for u, kept in self.kept.items()}
        self.kept = {unit: kept for unit, kept in held.items() if kept}
        return list(self.kept)

    def _write(self, bucket: Bucket, slots: Sequence[int], memory: Memory) -> None:
        """Update the masters of ``bucket`` after users' writes to the parameters at ``slots``."""
        for slot in slots if not bucket.plan.trainable else ():
            self._writes.note_rounded(bucket, bucket.params[slot])
        with self._reader.changes.writing():
            bucket.write_whole(memory.whole())

    @outside_autograd
    def refresh(self) -> None:
        """After a change of masters, copy the new values into parameters that show masters, and into views of
        parameters that users hold on any rank. Collective if :attr:`memory` has any."""
        if self.memory:
            self._settle()
            self.shown = []
            for unit in dict.fromkeys(self._unit_of[bucket] for bucket in self.memory):
                self._show(unit)
        # Between a backward and its step another rank may step already; the views are refreshed after the step.
        if self._kept_at != self._reader.changes.counts and not self._reader.changes.step_follows:
            for unit in self._still_kept():
                for bucket, memory in self.kept[unit].items():
                    self._fill(memory, self._read(bucket).full)
                    memory.checksums = memory.all_checksums()
            self._kept_at = self._reader.changes.counts

    def abort(self) -> None:
        """After an exception, undo :meth:`use` for all units. Store values that users have written, to be compared
        between ranks and copied to the masters later. Sends no message."""
        written = [
            (Place(bucket, bucket.params[slot]), memory.value(bucket.params[slot]))
            for bucket, memory in self._all_memory()
            if bucket.shown is Shown.MASTERS
            for slot in self._written(bucket)
        ]
        self.forget()
        for place, value in written:
            with contextlib.suppress(RuntimeError):  # of frozen parameters, whose masters would be rounded
                self._writes.replace(place, value)

    def forget(self) -> None:
        """Undo :meth:`use` for all units, and discard values that users have written. Sends no message."""
        for bucket, _ in self._all_memory():
            if bucket.shown is Shown.MASTERS:
                bucket.hide_whole()
        self.shown.clear()
        self.memory.clear()
        self.alone.clear()
        self.kept.clear()

    def _all_memory(self) -> list[tuple[Bucket, Memory]]:
        alone = [item for memory in self.alone.values() for item in memory.items()]
        return [*alone, *(item for item in self.memory.items() if item[0] not in dict(alone))]

    @outside_autograd
    def _hide(self, units: Sequence[Unit], what: str) -> None:
        hidden = [bucket for unit in units for bucket in unit.buckets if bucket.shown is Shown.MASTERS]
        self.shown = [unit for unit in self.shown if unit not in units]
        # Users may hold views of units that were hidden before, too, and may have written to these views. Look at them
        # when all units are hidden, or when the views are gone.
        gone = [b for b in self.memory if b.shown is not Shown.MASTERS and not self.memory[b].is_held]
        looked_at = [b for b in self.memory if b in hidden or b in gone or not self.shown]
        self._take_over(looked_at, hidden, what)

    def _take_over(self, buckets: Sequence[Bucket], hidden: Sequence[Bucket], what: str) -> None:
        """Update the masters with users' writes to parameters of ``buckets``, and undo :meth:`use` for the buckets in
        ``hidden``. ``what``: the operation's name. Collective."""
        number_of = {bucket: number for number, bucket in enumerate(self.memory)}
        written = {number_of[bucket]: slots for bucket in buckets if (slots := self._written(bucket))}
        for bucket in hidden:
            bucket.hide_whole()
        left = [b for b in self.memory if b.shown is not Shown.MASTERS]
        table = self._comm.gather_checked((written, [number_of[b] for b in left if self.memory[b].is_held]), what)
        slots_of = {
            bucket: sorted({slot for found, _ in table for slot in found.get(number, ())})
            for bucket, number in number_of.items()
        }
        try:
            places = [Place(bucket, bucket.params[slot]) for bucket, slots in slots_of.items() for slot in slots]
            compared = [(place, self.memory[place.bucket].value(place.info)) for place in places]
            refuse_unequal(self._comm, compared, "between steps")
            for bucket, slots in slots_of.items():
                if slots:
                    self._write(bucket, slots, self.memory[bucket])
            self._reader.changes.were_made()
        except BaseException:
            self.forget()
            raise
        held = {number for _, numbers in table for number in numbers}
        for bucket in left:
            if number_of[bucket] not in held:
                del self.memory[bucket]
            elif bucket in buckets:
                self.memory[bucket].checksums = self.memory[bucket].all_checksums()

    def _written(self, bucket: Bucket) -> list[int]:
        """Return the slots of parameters that users may have written to on this rank since the last call."""
        memory = self._memory_of(bucket)
        if memory.checksums is not None:  # views alone are left
            return memory.written_views()
        found, memory.assigned = memory.assigned, set()
        for info in bucket.params:
            if info.param._version != info.version:
                found.add(info.slot)
                info.version = info.param._version
            if info.slot in memory.handed_out:
                before, memory.handed_out[info.slot] = memory.handed_out[info.slot], memory.checksum(info)
                if memory.handed_out[info.slot] != before:
                    found.add(info.slot)
        return sorted(found)


def _needs_masters(bucket: Bucket) -> bool:
    return bucket.plan.reshards or bucket.hides_rounded


def _nbytes(unit: Unit) -> int:
    return sum(b.layout.numel * b.dtypes.master.itemsize for b in unit.buckets if _needs_masters(b))
