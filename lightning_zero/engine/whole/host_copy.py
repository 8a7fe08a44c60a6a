"""The module whole between runs: one copy of its parameters per host, in shared memory, that every rank maps.

::

    masters of all ranks -- each rank writes its part --> memory of a file without a name (memfd), one per host
    each rank maps it    -- copy-on-write             --> parameters are plain tensors; a write is of this rank alone
    the next run         -- compared with the file    --> what was written, on all ranks alike, goes into the shards

Shards, optimizer state and units rest as they are: who goes on pays nothing, and a save reads the shards. The file has
no name, so nothing is left of it when the processes are gone, however they went.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_zero.config import AfterFit, ConfigError
from lightning_zero.engine.assembly import Assembly
from lightning_zero.engine.passes.access import checksum
from lightning_zero.engine.passes.gradient_sentinels import GradSentinel
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.home import opened
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.engine.units.unit import State
from lightning_zero.engine.whole.module_state import write_param
from lightning_zero.optimizers.state_trees import same_bits
from lightning_zero.planning.layout import round_up
from lightning_zero.planning.whole import COPY_ALIGN, copy_nbytes, no_room_for, on_the_way_nbytes
from lightning_zero.ranks.peers import machine
from lightning_zero.tiers.limits import available_host_memory

CALLS = "trainer.save_checkpoint(path) saves it, and `with lightning_zero.gather(model):`, on all ranks, shows it whole"


class _Slot(NamedTuple):
    """The place of one parameter in the file."""

    bucket: Bucket
    info: ParamInfo
    start: int  # bytes

    def of(self, memory: mmap.mmap) -> Tensor:
        """The parameter in ``memory``. A storage of its own: a view of all would be saved with all."""
        dtype = self.info.dtype
        if not self.info.numel:
            return torch.empty_strided(self.info.shape, self.info.strides, dtype=dtype)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=self.info.numel * dtype.itemsize, offset=self.start)
        return flat.view(dtype).as_strided(self.info.shape, self.info.strides)


class HostCopy:
    """The whole copy of one engine's parameters on this host, as this rank maps it.

    Attributes:
        nbytes: of the file.
        original: of each slot what was gathered, whatever this rank has written to ``values``.
        values: of each slot what the module shows.
        is_shown: the module shows it now.
    """

    def __init__(self, slots: list[_Slot], nbytes: int, fd: int) -> None:
        self.slots, self.nbytes = slots, nbytes
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        shared = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=rights)
        own = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=rights)
        with torch.inference_mode(False):
            self.original = [slot.of(shared) for slot in slots]
            self.values = [slot.of(own) for slot in slots]
        self.is_shown = False
        self.put_back: Callable[[], None] = lambda: None
        self.grads: list[tuple[nn.Parameter, Any]] = []
        self._seen: list[int] = []  # of the buckets' homes, when the file had their values

    def equals_masters(self, buckets: Sequence[Bucket]) -> None:
        """Take notice that the file has the values that the masters have now."""
        self._seen = [bucket.home.changes for bucket in buckets]

    def still_equals(self, engine: Assembly) -> bool:
        """Whether it has the values of this rank's masters. They are at rest."""
        if self._seen != [bucket.home.changes for bucket in engine.buckets]:
            return False
        # Where parameters are the masters themselves, users' code may have written to them by any way.
        for number, slot in enumerate(self.slots):
            bucket, info = slot.bucket, slot.info
            if not bucket.plan.copies_master:
                for f in bucket.owned_fragments():
                    if f.index == info.slot:
                        now = bucket.master[f.start : f.start + f.numel].to("cpu", info.dtype)
                        if not same_bits(info.flattened(self.original[number])[f.offset : f.offset + f.numel], now):
                            return False
        return True

    def written(self) -> dict[int, Tensor]:
        """What this rank has written since it was shown, by slot number, on the host in the parameters' dtype."""
        found = {}
        for number, (slot, before) in enumerate(zip(self.slots, self.original, strict=True)):
            info = slot.info
            now = info.param.data.detach().to("cpu", info.dtype)
            if now.shape != info.shape or not same_bits(info.flattened(now), info.flattened(before)):
                found[number] = now
        return found


# -- showing ----------------------------------------------------------------------------------------------------------


@outside_autograd
def show_whole(engine: Assembly) -> bool:
    """Let the module hold whole parameters on the host, if there is room. On all ranks, between runs.

    Returns:
        whether it does; where not, and ``zero.after_fit`` does not say so, a warning tells why.
    """
    copy: HostCopy | None = engine.host_copy
    if copy is not None and copy.is_shown:
        return True
    if engine.config.after_fit is AfterFit.sharded or engine.shown or engine.comm.device.type == "meta":
        return False
    engine.settle()
    engine.writes.take_all_over()
    engine.writes.confirm_if_any()
    known = copy is not None and copy.still_equals(engine)
    table = engine.comm.meet((machine(), available_host_memory(), known), "making the module whole", patient=True)
    if not all(row[2] for row in table):
        copy = engine.host_copy = None  # first: there may be no room for two
        hosts = [row[0] for row in table]
        refusal = _no_room(engine, hosts, [row[1] for row in table])
        if refusal is None:
            copy, refusal = _make(engine, hosts)
        if copy is None:
            if engine.rank == 0:
                stays = f"the module stays sharded after this run: {refusal}. {CALLS}."
                warnings.warn(f"{stays} Set zero.after_fit=sharded to have it so without this warning.", stacklevel=2)
            return False
        _fill(engine, copy, hosts)
    assert copy is not None
    _show(engine, copy)
    return True


def check_room(engine: Assembly) -> None:
    """Refuse ``zero.after_fit=whole`` at the start of a run where some host has no room for a whole copy. On all ranks.

    Raises:
        ConfigError: on all ranks, with the bytes that are needed and available.
    """
    if engine.config.after_fit is AfterFit.whole and engine.host_copy is None:
        table = engine.comm.meet((machine(), available_host_memory()), "room for the whole module")
        _refuse(_no_room(engine, [row[0] for row in table], [row[1] for row in table]))


def check_room_here(nbytes: int) -> None:
    """As :func:`check_room`, on this host alone, and before any process starts.

    Args:
        nbytes: of the copy.

    Raises:
        ConfigError: with the bytes that are needed and available.
    """
    _refuse(no_room_for(nbytes, available_host_memory(), "this host"))


def _refuse(why: str | None) -> None:
    if why is not None:
        raise ConfigError(
            f"zero.after_fit=whole: {why}. Set zero.after_fit=auto: the module then stays sharded; {CALLS}."
        )


def _lay_out(engine: Assembly) -> tuple[list[_Slot], int]:
    slots, start = [], 0
    for bucket in engine.buckets:
        for info in bucket.params:
            slots.append(_Slot(bucket, info, start))
            start = round_up(start + info.numel * info.dtype.itemsize, COPY_ALIGN)
    return slots, copy_nbytes(slot.info.numel * slot.info.dtype.itemsize for slot in slots)


def _gathers(engine: Assembly, hosts: Sequence[str]) -> bool:
    """Whether the shards of some rank are on several hosts; else each host has all values."""
    groups = engine.comm.topology.shard_groups
    return any(len({hosts[rank] for rank in group}) > 1 for group in groups)


def _no_room(engine: Assembly, hosts: Sequence[str], available: Sequence[int]) -> str | None:
    """Why some host has no room; the same on all ranks."""
    nbytes = _lay_out(engine)[1]
    gathers = engine.comm.device.type == "cpu" and _gathers(engine, hosts)
    on_the_way = on_the_way_nbytes([bucket.plan for bucket in engine.buckets], gathers=gathers)
    for host in dict.fromkeys(hosts):
        left = [free for name, free in zip(hosts, available, strict=True) if name == host]
        ranks = ", ".join(str(rank) for rank, name in enumerate(hosts) if name == host)
        found = no_room_for(nbytes + on_the_way * len(left), min(left), f"the host of ranks {ranks}")
        if found is not None:
            return found
    return None


def _make(engine: Assembly, hosts: Sequence[str]) -> tuple[HostCopy | None, str]:
    """Map new memory of this host, which the first of its ranks makes; None on all ranks, and why, if one cannot."""
    comm = engine.comm
    slots, nbytes = _lay_out(engine)
    leader = hosts.index(hosts[comm.rank])
    fd, made, copy = -1, "", None
    try:
        if comm.rank == leader:
            try:
                fd = os.memfd_create("lightning_zero", os.MFD_CLOEXEC)
                os.posix_fallocate(fd, 0, nbytes)  # no room is an error here, and not a signal at some later write
            except (OSError, AttributeError) as error:  # a system without it
                made = f"rank {comm.rank} could not have {nbytes:,} bytes of shared memory ({error})"
        places = comm.meet((os.getpid(), fd, made), "where the whole module is")
        failed = next((row[2] for row in places if row[2]), "")
        if not failed:
            try:
                copy = _mapped(slots, nbytes, places[leader], own=fd if comm.rank == leader else None)
            except OSError as error:  # processes that may not see each other
                failed = f"rank {comm.rank} could not map the memory of rank {leader} ({error})"
            failed = next((text for text in comm.meet(failed, "mapping the whole module") if text), "")
        return (None, failed) if failed else (copy, "")
    finally:
        if fd >= 0:
            os.close(fd)


def _mapped(slots: list[_Slot], nbytes: int, place: tuple[int, int, str], own: int | None) -> HostCopy:
    fd = os.open(f"/proc/{place[0]}/fd/{place[1]}", os.O_RDWR | os.O_CLOEXEC) if own is None else own
    try:
        return HostCopy(slots, nbytes, fd)
    finally:
        if own is None:
            os.close(fd)


def _fill(engine: Assembly, copy: HostCopy, hosts: Sequence[str]) -> None:
    """Write the masters into the file. Each rank of a host writes a part: what it holds, or else an equal share."""
    comm = engine.comm
    here = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
    gathers = _gathers(engine, hosts)
    group = comm.topology.shard_group_of(comm.rank)
    places = iter(copy.original)
    for bucket in engine.long_work.items(engine.buckets, "making the module whole, in buckets"):
        targets = [info.flattened(place) for info, place in zip(bucket.params, places, strict=False)]
        if bucket.plan.shards_master and not gathers:
            if here[0] in group:  # other ranks here have the same shards, under hybrid sharding
                with opened(bucket.home) as master:
                    _write(bucket, targets, master, bucket.owned_range)
            continue
        place, numel = here.index(comm.rank), bucket.layout.numel
        low, high = place * numel // len(here), (place + 1) * numel // len(here)
        full = bucket.full_master()
        _write(bucket, targets, full[low:high], (low, high))
        del full
    comm.meet(None, "the whole module is there")
    copy.equals_masters(engine.buckets)


def _write(bucket: Bucket, targets: Sequence[Tensor], values: Tensor, part: tuple[int, int]) -> None:
    """Write ``values`` of the elements ``part`` of a bucket, where they belong."""
    number = {info.slot: place for place, info in enumerate(bucket.params)}
    for f in bucket.layout.cut(*part):
        targets[number[f.index]][f.offset : f.offset + f.numel].copy_(values[f.start : f.start + f.numel])


def _show(engine: Assembly, copy: HostCopy) -> None:
    """Sends no message."""
    copy.grads = []
    for info in (slot.info for slot in copy.slots):
        if isinstance(info.param.grad, GradSentinel):
            copy.grads.append((info.param, info.param.grad))
        info.param.grad = None
    values = iter(copy.values)
    for bucket in engine.buckets:
        bucket.show_values_of(values)
    copy.put_back = engine.passes.hooks.lift_off(keep_engine=True)
    engine.passes.hooks.idle = True
    if engine.comm.device.type != "cpu":
        engine.module.to("cpu")  # buffers, as Lightning leaves them after a run
    engine.host_copy, copy.is_shown = copy, True
    weak = ref(engine)
    engine.writes.between_runs = lambda: _take_over(weak())


def show_again(engine: Assembly) -> bool:
    """Show the whole module once more, if this rank knows that it is as it was. No message: ranks may be gone."""
    copy: HostCopy | None = engine.host_copy
    if copy is None or copy.is_shown or engine.shown or not copy.still_equals(engine):
        return False
    _show(engine, copy)
    return True


# -- hiding -----------------------------------------------------------------------------------------------------------


@outside_autograd
def _take_over(engine: Assembly | None) -> None:
    """Take what was written to the whole module into the shards. On all ranks.

    Raises:
        RuntimeError: on all ranks: they have written different values, or values of another shape.
    """
    copy: HostCopy | None = engine.host_copy if engine is not None else None
    if engine is None or copy is None or not copy.is_shown:
        return
    written = copy.written()
    own = {n: (tuple(v.shape), checksum(copy.slots[n].info.flattened(v))) for n, v in written.items()}
    table = engine.comm.meet(own, "what was written to the module between runs")
    numbers = sorted({number for found in table for number in found})
    unequal = [n for n in numbers if len({found.get(n) for found in table}) > 1]
    if unequal:
        names = ", ".join(copy.slots[n].info.fqn for n in unequal)
        raise RuntimeError(
            f"{names}: written to between runs, with other values on some ranks than on others. Write the same on all "
            "ranks, or inside `with lightning_zero.gather(model, from_rank=0):`."
        )
    if not numbers:
        return
    for number in numbers:  # on all ranks alike
        copy.slots[number].info.check_shape(written[number].shape)
    _warn_of_dtypes(engine, [copy.slots[number].info for number in numbers])
    for number in numbers:
        slot = copy.slots[number]
        write_param(Place(slot.bucket, slot.info), written[number])
        copy.original[number].copy_(written[number])  # by all ranks of the host, the same
        if slot.info.param.data_ptr() != copy.values[number].data_ptr():
            copy.values[number].copy_(written[number])
    changed = {copy.slots[number].bucket for number in numbers}
    for bucket in changed:
        with opened(bucket.home) as _:
            bucket.push()
    engine.masters_changed(changed)
    engine.settle()
    copy.equals_masters(engine.buckets)


def _warn_of_dtypes(engine: Assembly, written: Sequence[ParamInfo]) -> None:
    converted = [info for info in written if info.param.dtype != info.dtype]
    if converted and engine.rank == 0:
        now, before = converted[0].param.dtype, converted[0].dtype
        warnings.warn(
            f"{converted[0].fqn} (and {len(converted) - 1} other parameters) was converted to {now} between runs: its "
            f"values are taken over, and it goes on in {before}. Trainer(precision=) chooses what to compute in.",
            stacklevel=2,
        )


@outside_autograd
def hide_whole(engine: Assembly, *, keep: bool = True) -> bool:
    """Back to shards, with what was written to the whole module in them. On all ranks. See :func:`_take_over`.

    Args:
        keep: the copy, for as long as masters stay as they are.

    Returns:
        whether the module was whole.
    """
    copy: HostCopy | None = engine.host_copy
    was_shown = copy is not None and copy.is_shown
    if copy is not None and was_shown:
        _take_over(engine)
        _hide(engine, copy)
    if not keep:
        engine.host_copy = None
    return was_shown


def _hide(engine: Assembly, copy: HostCopy) -> None:
    copy.is_shown = False
    engine.writes.between_runs = lambda: None
    copy.put_back()
    engine.passes.hooks.idle = False
    for unit in engine.units:
        for bucket in unit.buckets:
            for info in bucket.params:
                info.param.grad = None  # of the user's own backwards in between
            engine.writes.forget(bucket)
            bucket.hide_plain(gathered=not bucket.reshards or unit.state is State.GATHERED)
    for param, grad in copy.grads:
        param.grad = grad
    if engine.comm.device.type != "cpu":
        with engine.placeholders_allowed():
            engine.module.to(engine.comm.device)


@contextlib.contextmanager
def set_aside(engine: Assembly) -> Iterator[None]:
    """Inside, the module is sharded. Between runs it is whole again afterwards. On all ranks."""
    was_whole = hide_whole(engine)
    try:
        yield
    except BaseException:
        if was_whole:
            show_again(engine)  # other ranks may not have raised
        raise
    if was_whole:
        show_whole(engine)
