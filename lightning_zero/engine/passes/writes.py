"""Notices users' writes to gathered parameters and to buffers, and refuses calls that would see placeholders.

See [Note: version counters] and [Note: checksums of writes]: how writes are noticed.
See [Note: masters during an offloaded step]: a write is copied to the masters after the offloaded step.

[Note: assignments in a pass]
Under torch ``param.data = value`` between a forward and its backward gives the parameter other memory and does not
increment its version. The backward then uses the new values where autograd has saved the parameter itself (a
convolution), and the old values where autograd has saved a view (``weight.t()`` of a linear layer). So the engine, too,
gives the parameter memory of its own until the pass ends. The full buffer and the masters keep the old values until
then. If autograd can have saved nothing of the unit (a teacher without gradients), the masters get the new values at
once, and the parameter needs no such memory.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_zero.comm.agreements import digest_of, is_same
from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.after_step import Changes
from lightning_zero.engine.units.bucket import Bucket, Place, Shown
from lightning_zero.engine.units.build import kinds_of
from lightning_zero.engine.units.master_storage import opened
from lightning_zero.engine.units.param import ParamInfo, give_own_memory, values_changed
from lightning_zero.engine.units.param_store import placeholders
from lightning_zero.mesh.split import Split
from lightning_zero.settings import ZeroConfig

CHUNK = 1 << 14  # elements per step of a checksum on a CPU, whose cache holds them; 64 times as many on a device
SMALL_NBYTES = 1 << 22  # of buffers that are compared in every step
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Key = tuple[int, int]  # bucket, slot


def checksum(values: Tensor, first: int = 0) -> int:
    """Return the checksum of ``values`` as an int below 2**64: see :func:`checksum_on_device`."""
    return int(checksum_on_device(values, first)) & 0xFFFFFFFFFFFFFFFF


def checksum_on_device(values: Tensor, first: int = 0, split: Split | None = None) -> Tensor:
    """Return a checksum [0-d, int64] of ``values`` and their positions. The checksums of a tensor's parts add up to the
    checksum of the whole tensor, mod 2**64. ``first``: the position of ``values[0]`` in the whole tensor or, with
    ``split``, in this rank's part of the tensor."""
    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
        first *= 2
    # Each value's bits times an odd number for its place, so that no bit is lost.
    on_cpu = flat.device.type == "cpu"
    chunk = min(CHUNK if on_cpu else 64 * CHUNK, flat.numel())
    odd = torch.arange(1, 2 * chunk + 1, 2, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), chunk or 1):
        bits = flat[start : start + chunk].view(_INTEGERS[flat.element_size()]).to(torch.int64)
        odds = odd[: bits.numel()]
        if split is not None:
            odds = 2 * split.positions(first + start, first + start + bits.numel(), bits.device) + 1
        # On a GPU torch.dot takes no integers.
        total += torch.dot(bits, odds) if on_cpu else (bits * odds).sum()
        if split is None:
            total += bits.sum() * (2 * (first + start))
    return total


def checksum_of_buffer(buffer: Tensor) -> int:
    """Return a checksum of a flat ``buffer`` of 8 * n bytes. It is faster and differs from that of :func:`checksum`."""
    return checksum(buffer.detach().view(torch.int64))


def unequal_error(names: Iterable[str], what: str, also: str = "") -> RuntimeError:
    return RuntimeError(
        f"{', '.join(names)}: {what}, so that no rank's values are right for all. Write the same values on all ranks, "
        f"or write inside `with lightning_zero.gather(module, from_rank=0):`, where one rank's values count.{also}"
    )


def refuse_unequal(comm: Communicator, written: Sequence[tuple[Place, Tensor]], where: str) -> None:
    """Raise RuntimeError on all ranks if ranks have different values of a parameter. Collective. ``written``: pairs
    (place of a written parameter, values on this rank), for the same parameters on all ranks. ``where``: where users
    have written, for the error."""
    if not written or comm.world_size == 1:
        return
    sums = [checksum(place.info.flattened(values)) for place, values in written]
    table = comm.gather_checked(sums, f"{where}: what was written")
    unequal = dict.fromkeys(
        place.info.fqn
        for number, (place, _) in enumerate(written)
        if any(
            len({table[rank][number] for rank in ranks}) > 1 for ranks in place.bucket.comm.ranks.topology.same_params
        )
    )
    if unequal:
        raise unequal_error(unequal, f"written to {where}, with other values on some ranks than on others")


class Writes:
    """Copies users' writes to gathered parameters into the masters, and checks that all ranks wrote the same values.

    Gathered parameters are copies, which are freed or replaced later. Before that, each rank copies written values into
    its shard of the masters. The ranks compare checksums at the end of the next backward, and before values are shown
    or saved. How writes are noticed::

        weight.clamp_()         increments the parameter's ``_version``
        weight.data.clamp_()    does not: the checksum differs from one taken when ``.data`` was read
        weight.data = value     calls :meth:`replace`"""

    def __init__(
        self, module: nn.Module, buckets: Sequence[Bucket], comm: Communicator, config: ZeroConfig, changes: Changes
    ) -> None:
        self._buckets, self._comm, self.changes = buckets, comm, changes
        self._root, self._fp32_modules = type(module).__name__, config.precision.fp32_modules
        self._number = {bucket: number for number, bucket in enumerate(buckets)}
        self._handed_out: dict[Bucket, dict[int, int]] = {}  # slot -> checksum when .data was read
        self._read: dict[_Key, list[ReferenceType[Tensor]]] = {}  # results of ``.data``, which users may still hold
        # Of each parameter that this rank has written: checksums of its own part before, and of the whole one after.
        self.unconfirmed: dict[_Key, tuple[int, int]] = {}
        self.write_backs: list[Callable[[], None]] = []  # what each open gather() does at its end
        self._unrounded: dict[_Key, Tensor] = {}  # of what was assigned in the open pass, in another dtype
        self._warned = False  # of a write that was rounded
        self._warned_of_views = False

    # -- noticing -------------------------------------------------------------------------------------------------

    @outside_autograd
    def hand_out(self, place: Place, values: Tensor) -> None:
        """Record that users' code has got ``values`` as ``.data`` of the parameter at ``place``. Save a checksum of the
        values, to notice later writes."""
        bucket, info = place
        key = self._number[bucket], info.slot
        self._read[key] = [ref(values), *[known for known in self._read.get(key, ()) if known() is not None]]
        # Parameters that are whole masters need no copy and no comparison.
        if not bucket.plan.params_are_masters and info.gathered is not None:
            known = self._handed_out.setdefault(bucket, {})
            if info.slot not in known:
                known[info.slot] = checksum(info.flattened(info.gathered))

    def forget(self, bucket: Bucket) -> None:
        """Let :meth:`take_over` ignore all writes to the bucket's parameters before this call."""
        self._handed_out.pop(bucket, None)
        for info in bucket.params:
            info.version = info.param._version

    # -- taking over ----------------------------------------------------------------------------------------------

    def take_over(self, bucket: Bucket, *, drops: bool = False) -> None:
        """Copy values that users have written to a bucket's parameters into the masters, before gathered values are
        freed (``drops``) or replaced. With ``drops``, tensors from ``.data`` that users hold become placeholders, so
        that writes to such tensors raise."""
        # Whole masters are written back by whoever shows them. Placeholders show no values.
        if bucket.shown is not Shown.GATHERED:
            return
        written = [info for info in bucket.params if info.param._version != info.version]
        for slot, known in self._handed_out.get(bucket, {}).items():
            info = bucket.params[slot]
            assert info.gathered is not None
            if info not in written and checksum(info.flattened(info.gathered)) != known:
                written.append(info)
        if self._read and not (bucket.plan.reshards or bucket.plan.params_are_masters):
            written += [info for info in self._written_late(bucket) if info not in written]
        if written or bucket in self._handed_out:
            self.forget(bucket)
        if written := [info for info in written if info.slot not in bucket.assigned]:
            for info in written:
                self.note_rounded(bucket, info)
            self._copy_to_masters(bucket, written)
        if drops and self._read:
            for info in bucket.params:
                for values in self._still_held(bucket, info):
                    if values._use_count() > 1:  # type: ignore[attr-defined]  # views of it, which keep its object
                        self._lend(bucket, info, values)
                    values.data = placeholders([values.shape], values.dtype, values.device)[0]

    def _lend(self, bucket: Bucket, info: ParamInfo, values: Tensor) -> None:
        """Do not free the memory of ``values``, a result of ``.data``, because users hold views of it. Warn once."""
        bucket.full.is_lent = True
        self._read[self._number[bucket], info.slot] = [ref(values)]
        warned, self._warned_of_views = self._warned_of_views, True
        if self._comm.rank == 0 and not warned:
            warnings.warn(
                f"{info.fqn}: expected that views of its .data (weight.data[0]) end with the step that made them, got "
                "one that is kept: it does not follow the parameter, and what is written to it is lost. Keep the "
                "parameter, and make the view where it is used.",
                stacklevel=2,
            )

    def _written_late(self, bucket: Bucket) -> list[ParamInfo]:
        """Return the parameters that users have written to between steps, through a tensor that ``.data`` returned in a
        step. Their gathered values differ from values that are cast from the masters."""
        known = {info: self._read.get((self._number[bucket], info.slot), ()) for info in bucket.params}
        held = [info for info, read in known.items() if any(reference() is not None for reference in read)]
        if not held:
            return []
        low, high = bucket.owned_range
        own, there = bucket.own_compute_params(), bucket.full.data[low:high]
        sums = [[self.own_checksum(bucket, info.slot, values) for info in held] for values in (own, there)]
        return [info for info, before, now in zip(held, *sums, strict=True) if before != now]

    def _still_held(self, bucket: Bucket, info: ParamInfo) -> list[Tensor]:
        """Return the tensors that users got from ``.data`` of the parameter and still hold. Forget all such tensors."""
        known = [reference() for reference in self._read.pop((self._number[bucket], info.slot), ())]
        return [values for values in known if values is not None]

    def take_all_over(self) -> None:
        self.take_assigned()
        for bucket in self._buckets:
            self.take_over(bucket)

    def _copy_to_masters(self, bucket: Bucket, written: Iterable[ParamInfo]) -> None:
        # Read before the masters change, because compute parameters may be computed from them.
        before = bucket.own_compute_params()
        with self.changes.writing(), opened(bucket.storage, changed=True):
            for info in written:
                assert info.gathered is not None
                self._note(bucket, info, before, info.gathered)
                if bucket.plan.copies_master:
                    bucket.write_master(info, info.gathered, before=before)
            bucket.copy_master_to_params()

    def note_rounded(self, bucket: Bucket, info: ParamInfo, *, in_gather: bool = False) -> None:
        """If a written parameter's compute dtype has fewer bits than its original dtype, warn once that small changes
        were lost. If the parameter is also frozen, it has no fp32 master: raise RuntimeError instead, unless users
        wrote inside gather() (``in_gather``)."""
        if bucket.dtypes.compute.itemsize >= info.dtype.itemsize:
            return
        used, lost = bucket.dtypes.compute, round(4 / torch.finfo(bucket.dtypes.compute).eps)
        owner = f"{info.fqn.partition('.')[0]}.*" if "." in info.fqn else self._root
        says = (
            f"{info.fqn}: expected a write to fp32 values, got one to values in {used}, which loses changes below "
            f"1/{lost} of a value. Set zero.precision.fp32_modules={[*self._fp32_modules, owner]}"
        )
        if not (bucket.plan.trainable or in_gather):
            raise RuntimeError(f"{says}.")
        warned, self._warned = self._warned, True
        if self._comm.rank == 0 and not warned:
            warnings.warn(f"{says}{'' if in_gather else ', or write inside lightning_zero.gather()'}.", stacklevel=2)

    def replace(self, place: Place, value: Tensor, *, at_end: bool = False) -> None:
        """Perform ``param.data = value`` for the parameter at ``place``. ``at_end``: give the parameter memory of its
        own until :meth:`take_assigned`. See [Note: assignments in a pass]."""
        bucket, info = place
        self.take_over(bucket)
        if not bucket.plan.trainable or value.dtype == bucket.dtypes.compute:
            self.note_rounded(bucket, info)
        value = value.detach()
        if not at_end:
            self._replace(place, value)
            return
        own = torch.empty_strided(info.shape, info.strides, dtype=bucket.dtypes.compute, device=bucket.comm.device)
        bucket.assigned[info.slot] = own.copy_(value)
        self._unrounded[self._number[bucket], info.slot] = own if value.dtype == own.dtype else value.clone()
        if bucket.shown is Shown.GATHERED:
            bucket.show(gathered=True)

    def take_assigned(self) -> None:
        """At the end of a pass, update the masters with the values that users have assigned to ``.data`` in the pass.
        Point the parameters at the full buffer again."""
        for bucket in self._buckets:
            if not bucket.assigned:
                continue
            self.take_over(bucket)
            assigned, bucket.assigned = bucket.assigned, {}
            if bucket.shown is Shown.GATHERED:
                bucket.show(gathered=True)
            for slot, own in assigned.items():
                # Users may have written to the rounded values since.
                value = self._unrounded.pop((self._number[bucket], slot))
                self._replace(
                    Place(bucket, bucket.params[slot]),
                    own if value is own else torch.where(own == value.to(own), value.to(own.device), own),
                    own,
                )

    def _replace(self, place: Place, value: Tensor, own: Tensor | None = None) -> None:
        """Write this rank's elements of ``value`` to the masters and, if gathered, all elements to the parameter. As in
        torch, results of ``.data`` from before the assignment keep their values. Results from after the assignment,
        which are in the memory ``own``, follow the parameter."""
        bucket, info = place
        compute = value.to(bucket.comm.device, bucket.dtypes.compute)
        before = bucket.own_compute_params()
        self._note(bucket, info, before, compute)
        shown = info.gathered if bucket.shown is Shown.GATHERED else None
        held = self._still_held(bucket, info)
        later = [values for values in held if own is not None and values.data_ptr() == own.data_ptr()]
        for values in held if shown is not None else ():
            give_own_memory(values)
        with self.changes.writing(), opened(bucket.storage, changed=True):
            bucket.write_master(info, value, before=before if value.dtype == compute.dtype else None)
            bucket.copy_master_to_params()
        if shown is not None:
            shown.copy_(compute)
        values_changed([info])
        for values in later:
            values.data = placeholders([info.shape], compute.dtype, compute.device)[0] if shown is None else shown
            self.hand_out(place, values)

    # -- do all ranks write the same? -----------------------------------------------------------------------------

    def _note(self, bucket: Bucket, info: ParamInfo, own: Tensor, whole: Tensor) -> None:
        """Save checksums of a user's write to a gathered parameter, to compare ranks later. ``whole``: the parameter
        after the write. ``own`` [owned numel]: this rank's compute parameters before the write."""
        if self._comm.world_size == 1:
            return
        key = self._number[bucket], info.slot
        before, after = self.unconfirmed.get(key) or (self.own_checksum(bucket, info.slot, own), 0)
        # Where each rank has all masters, ranks may have values of their own, as under DDP.
        if bucket.comm.shard.size > 1 and bucket.plan.shards_master:
            after = checksum(info.flattened(whole))
        self.unconfirmed[key] = before, after

    @staticmethod
    def own_checksum(bucket: Bucket, slot: int, own: Tensor) -> int:
        parts = (
            checksum(own[f.start : f.start + f.numel], f.offset) for f in bucket.owned_fragments() if f.index == slot
        )
        return sum(parts) & 0xFFFFFFFFFFFFFFFF

    def confirm(self) -> None:
        """Compare the values that ranks have written to parameters. Raise RuntimeError on all ranks if values differ.
        If only other ranks have noticed a write to a parameter, first copy this rank's values of the parameter to the
        masters. Collective."""
        written = self._comm.all_gather_objects(list(self.unconfirmed), "what was written to parameters")
        keys = sorted({key for found in written for key in found})
        # A message of the user's own (``dist.broadcast(weight, 0)``) changes no version: take over what it has written
        # to this rank's copies, where they are still there.
        for number, slot in [key for key in keys if key not in self.unconfirmed]:
            bucket = self._buckets[number]
            if bucket.shown is Shown.GATHERED:
                bucket.awaited_step.wait()
                self._copy_to_masters(bucket, [bucket.params[slot]])

        def checksums(number: int, slot: int) -> tuple[int, int | None]:
            """Return (checksum of this rank's part of a parameter before the write, checksum of the whole parameter
            after the write or None if this rank has not written to it)."""
            bucket = self._buckets[number]
            known = self.unconfirmed.get((number, slot))
            return known or (self.own_checksum(bucket, slot, bucket.own_compute_params()), None)

        table = self._comm.all_gather_objects([checksums(*key) for key in keys], "values of what was written")
        self.unconfirmed.clear()  # before the error, or the next pass would raise the error again
        self.changes.were_made()
        unequal = []
        for number, (at, slot) in enumerate(keys):
            topology = self._buckets[at].comm.ranks.topology
            for ranks, group in zip(topology.same_params, topology.shard_groups, strict=False):
                # A rank may have written the old values. Then it agrees with ranks that did not write.
                original = sum(table[rank][number][0] for rank in group) & 0xFFFFFFFFFFFFFFFF
                found = {table[rank][number][1] for rank in ranks}
                if len({original if whole is None else whole for whole in found}) > 1:
                    unequal.append(self._buckets[at].params[slot].fqn)
        if unequal:
            also = " (An Embedding with max_norm writes to the rows of its rank's batch: drop max_norm.)"
            what = "written to in a step, with other values on some ranks than on others"
            raise unequal_error(unequal, what, also)

    def confirm_if_any(self) -> None:
        """Call :meth:`confirm` if any rank has writes that were not compared yet. Call between passes. Collective."""
        flag = torch.tensor([bool(self.unconfirmed)], dtype=torch.uint8)
        if int(self._comm.max_(flag).item()):
            self.confirm()


class BufferSync:
    """Detects changes of a module's buffers on any rank, and sends rank 0's buffers after a change. A write through
    ``.data`` does not increment the version, so checksums are compared too: of buffers up to 4 MiB before every step,
    of larger buffers before training steps 1, 2, 4, 8, ... and evaluations. After checksums have differed once, buffers
    are sent every time. A buffer whose shape or dtype differs between ranks is not sent."""

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        self._module, self._comm = ref(module), comm
        self._seen: list[tuple[str, Tensor, int]] = []  # nothing: the first call sends, as no checksums are known yet
        self._steps = 0
        self._sums: dict[int, tuple[Tensor, int, int]] = {}  # buffers, versions and checksums when last compared, by id
        self._always = False  # this rank has seen values that changed while their versions did not
        # Whether any rank has buffers. Never this rank's alone: the others would wait for it, or it for them.
        self.are_there = bool(comm.max_(torch.tensor([bool(self._now(module))], dtype=torch.uint8)).item())

    @staticmethod
    def _now(module: nn.Module) -> list[tuple[str, Tensor, int]]:
        """Return (name, buffer, version) of each buffer with elements. In-place writes increment the version; inference
        tensors have version -1."""
        return [(n, b, -1 if b.is_inference() else b._version) for n, b in module.named_buffers() if b.numel()]

    @outside_autograd
    def sync(self, *, evaluates: bool = False) -> None:
        """Send rank 0's buffers to all ranks if any rank has changed its buffers since the last call. Collective.
        ``evaluates``: an evaluation follows, not a training step."""
        module = self._module()
        assert module is not None
        if not self.are_there or self._comm.world_size == 1:
            return
        now = self._now(module)
        same = len(now) == len(self._seen) and all(
            b is old and version == before != -1
            for (_, b, version), (_, old, before) in zip(now, self._seen, strict=True)
        )
        self._steps += not evaluates
        looks = evaluates or not self._steps & (self._steps - 1)
        looked_at = [
            (b, version)
            for _, b, version in now
            if version != -1 and b.layout is torch.strided and (looks or b.nbytes <= SMALL_NBYTES)
        ]
        if not self._always:
            known = [(b, version) for b, version in looked_at if self._sums.get(id(b), (b, -1, 0))[1] == version]
            self._always = any(
                self._sums[id(b)][2] != total for (b, _), total in zip(known, _checksums(known), strict=True)
            )
        kinds = kinds_of((name, b) for name, b, _ in now)
        # All ranks agree first, because a rank that broadcast alone would wait for the others for ever.
        flags = [self._always or not same, *digest_of(kinds)]
        changed, *maxima = self._comm.max_(torch.tensor(flags, dtype=torch.uint8)).tolist()
        if changed:
            if not is_same(maxima):
                table = self._comm.all_gather_objects(kinds, "which buffers ranks have")
                everywhere = set(table[0]).intersection(*table)
                now = [entry for entry, kind in zip(now, kinds, strict=True) if kind in everywhere]
            for dtype in sorted({b.dtype for _, b, _ in now}, key=str):
                self._send([b for _, b, _ in now if b.dtype == dtype])
        self._seen = self._now(module)
        if not self._always:
            present = {id(b) for _, b, _ in now}
            self._sums = {key: entry for key, entry in self._sums.items() if key in present}
            new = [(b, b._version) for b, _ in looked_at if changed or id(b) not in self._sums]
            self._sums |= {id(b): (b, version, n) for (b, version), n in zip(new, _checksums(new), strict=True)}

    def _send(self, buffers: list[Tensor]) -> None:
        flat = torch.cat([b.detach().reshape(-1) for b in buffers])
        self._comm.broadcast(flat, among="reduce")  # not between gathers that a step left in flight
        if self._comm.rank == 0:
            increment_version(buffers)  # as copies do elsewhere: all ranks refuse a graph that saved them
        else:
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))


def _checksums(buffers: Sequence[tuple[Tensor, int]]) -> list[int]:
    """Return the checksum of the buffer in each (buffer, version) pair, with one wait for the device."""
    found: list[int] = torch.stack([checksum_on_device(b) for b, _ in buffers]).tolist() if buffers else []
    return found


class Fence:
    """Raises errors for uses of a module that would see placeholders instead of parameters. ``in_pass()``: whether a
    pass is open; ``in_run()``: whether parameters can be used between passes."""

    def __init__(self, buckets: Sequence[Bucket], in_pass: Callable[[], bool], in_run: Callable[[], bool]) -> None:
        self._buckets, self._in_pass, self._in_run = buckets, in_pass, in_run
        self.is_lowered = False
        self.passing_on = ""  # the call whose code may pass parameters on, but not use their values; empty: none

    @property
    def is_plain(self) -> bool:
        return all(bucket.shown is Shown.PLAIN for bucket in self._buckets)

    @property
    def lacks_masters(self) -> bool:
        """Return whether, in a pass, some parameters are sharded or have fewer bits than their masters."""
        return any(bucket.plan.reshards or bucket.rounds for bucket in self._buckets)

    @contextlib.contextmanager
    def lowered(self, passing_on: str = "") -> Iterator[None]:
        previous = self.is_lowered, self.passing_on
        # Rounded values give way to placeholders, so that a parameter tells if code that passes them on uses them.
        gathered = [b for b in self._buckets if passing_on and b.shown is Shown.GATHERED]
        hidden = [b for b in gathered if b.dtypes.compute != b.dtypes.master]
        for bucket in hidden:
            bucket.show(gathered=False)
        self.is_lowered, self.passing_on = True, passing_on
        try:
            yield
        finally:
            self.is_lowered, self.passing_on = previous
            for bucket in hidden:
                bucket.show(gathered=True)

    def refuse_use(self, info: ParamInfo, operation: str) -> None:
        """Raise a RuntimeError if users' code runs ``operation``, which needs the parameter's values, in a call that
        may only pass parameters on (``passing_on``, such as ``state_dict()``). Elsewhere, do nothing."""
        if self.passing_on:
            raise RuntimeError(
                f"{info.fqn}: expected that code in {self.passing_on} of a sharded module passes parameters on, or "
                f"their detach(), got {operation!r}, which would use a placeholder. Change the tensors of the state "
                "dict instead; or save and load the module's own state_dict() inside `with "
                "lightning_zero.gather(module):`, on all ranks, where parameters have their values."
            )

    def refuse(self, what: str, *, converts: bool = False) -> None:
        """Raise a RuntimeError if ``what``, a use of the module (such as ``state_dict()``), would see placeholders.
        ``converts``: the use changes parameters' dtype, device or identity."""
        if self.is_lowered or self.is_plain:
            return
        in_pass = self._in_pass()
        if not converts and self._in_run() and not (in_pass and self.lacks_masters):
            return
        if what == "state_dict()" and not in_pass and all(b.plan.params_are_masters for b in self._buckets):
            return
        raise RuntimeError(
            f"{what} of a sharded module would read or write placeholders instead of parameters. Use "
            "trainer.save_checkpoint(path) and trainer.fit(model, ckpt_path=path), or fabric.save and fabric.load, or "
            "trainer.strategy.export(folder) for a model of transformers, or wrap the call in "
            "`with lightning_zero.gather(model):`, on all ranks."
        )
