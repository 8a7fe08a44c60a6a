"""The module whole between runs: one copy of its parameters per host, in shared memory, that every rank maps.

::

    masters of all ranks -- gathered bucket by bucket --> one rank of each host writes them into memory of a file (memfd)
    each rank maps it    -- copy-on-write             --> parameters are plain tensors; a write is of this rank alone
    the next run         -- compared with the file    --> what was written, on all ranks alike, goes into the shards

Shards, optimizer state and units rest as they are: who goes on pays nothing, and a save reads the shards.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lightning_zero.config import AfterFit, ConfigError
from lightning_zero.engine.assembly import Assembly
from lightning_zero.engine.parameters.writes import checksum
from lightning_zero.engine.passes.gradient_sentinels import GradSentinel
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.param_info import ParamInfo
from lightning_zero.engine.units.unit import State
from lightning_zero.engine.whole.module_state import write_param
from lightning_zero.planning.layout import round_up
from lightning_zero.ranks.peers import machine
from lightning_zero.tiers.limits import available_host_memory

ALIGN = 64  # bytes
SPARE = 0.9  # of the memory that is there; the rest is for what the process does with the module


class _Slot(NamedTuple):
    bucket: Bucket
    info: ParamInfo
    start: int  # bytes

    def of(self, memory: mmap.mmap) -> Tensor:
        """The parameter in ``memory``. A storage of its own: a view of all would be saved with all."""
        flat = torch.frombuffer(memory, dtype=self.info.dtype, count=self.info.numel, offset=self.start)
        return flat.as_strided(self.info.shape, self.info.strides)


class HostCopy:
    """The whole copy of one engine's parameters on this host, shown by the module."""

    def __init__(self, slots: list[_Slot], nbytes: int, fd: int) -> None:
        self.slots = slots
        # Two maps of one file: the first is what was gathered, whatever is written to the other.
        self._original = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        own = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with torch.inference_mode(False):
            self.original = [slot.of(self._original) for slot in slots]
            self.values = [slot.of(own) for slot in slots]
        self.put_back: Callable[[], None] = lambda: None
        self.grads: list[tuple[torch.nn.Parameter, Any]] = []

    def written(self) -> dict[int, Tensor]:
        """What this rank has written since it was shown, by slot number, on the host."""
        found = {}
        for number, (slot, before) in enumerate(zip(self.slots, self.original, strict=True)):
            now = slot.info.param.data
            same = now.data_ptr() == self.values[number].data_ptr() and now.dtype == before.dtype
            if not same or not torch.equal(_bits(now), _bits(before)):
                found[number] = now.detach()
        return found


def _bits(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.dim() and value.is_contiguous() else value


@outside_autograd
def show_whole(engine: Assembly) -> bool:
    """Let the module hold whole parameters on the host, if there is room. On all ranks, between runs.

    Raises:
        ConfigError: on all ranks: there is no room, and ``zero.after_fit=whole``.
    """
    wanted = engine.config.after_fit
    if wanted is AfterFit.sharded or engine.host_copy is not None or engine.shown or engine.comm.device.type == "meta":
        return engine.host_copy is not None
    engine.settle()
    engine.writes.take_all_over()
    engine.writes.confirm_if_any()
    slots, nbytes = _lay_out(engine)
    leader = _find_leader(engine, nbytes)
    if leader is None:
        return False
    copy = _fill(engine, slots, nbytes, leader)
    _show(engine, copy)
    return True


def _lay_out(engine: Assembly) -> tuple[list[_Slot], int]:
    slots, start = [], 0
    for bucket in engine.buckets:
        for info in bucket.params:
            slots.append(_Slot(bucket, info, start))
            start = round_up(start + info.numel * info.dtype.itemsize, ALIGN)
    return slots, max(start, ALIGN)


def _find_leader(engine: Assembly, nbytes: int) -> int | None:
    """The rank of this host that writes its copy; None on all ranks where some host has no room."""
    largest = max((b.layout.numel * b.dtypes.master.itemsize for b in engine.buckets), default=0)
    on_host = engine.comm.device.type == "cpu"
    table = engine.comm.meet((machine(), available_host_memory()), "making the module whole")
    for host in dict.fromkeys(name for name, _ in table):
        left = [free for name, free in table if name == host]
        needed = nbytes + largest * (len(left) if on_host else 1)
        if needed > SPARE * min(left):
            if engine.config.after_fit is AfterFit.whole:
                raise ConfigError(
                    f"zero.after_fit: host {host} needs {needed:,} bytes for a whole copy of the module, and "
                    f"{min(left):,} are available. Set zero.after_fit=auto: the module then stays sharded, and "
                    "trainer.save_checkpoint(path) and lightning_zero.gather(model) work as they do now."
                )
            return None
    return [name for name, _ in table].index(machine())


def _fill(engine: Assembly, slots: list[_Slot], nbytes: int, leader: int) -> HostCopy:
    comm = engine.comm
    leads = comm.rank == leader

    def make() -> tuple[int, int] | None:
        if not leads:
            return None
        fd = os.memfd_create("lightning_zero", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, nbytes)
        return os.getpid(), fd

    def close(made: tuple[int, int] | None) -> None:
        if made is not None:
            os.close(made[1])

    made = comm.together("memory for the whole module", make, close)
    places = comm.meet(made, "where the whole module is")
    try:
        copy = comm.together("mapping the whole module", lambda: _mapped(slots, nbytes, places[leader], leads))
        number = 0
        for bucket in engine.buckets:
            full = bucket.full_master()
            for info in bucket.params:
                if leads:
                    copy.original[number].copy_(bucket.part_of(full, info))
                number += 1
        comm.meet(None, "the whole module is there")
    finally:
        close(made)
    return copy


def _mapped(slots: list[_Slot], nbytes: int, place: tuple[int, int], leads: bool) -> HostCopy:
    fd = place[1] if leads else os.open(f"/proc/{place[0]}/fd/{place[1]}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return HostCopy(slots, nbytes, fd)
    finally:
        if not leads:
            os.close(fd)


def _show(engine: Assembly, copy: HostCopy) -> None:
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
    engine.host_copy = copy
    weak = ref(engine)
    engine.writes.between_runs = lambda: _take_over(weak())


@outside_autograd
def _take_over(engine: Assembly | None) -> None:
    """Take what was written to the whole module into the shards. On all ranks.

    Raises:
        RuntimeError: on all ranks: they have written different values.
    """
    copy = engine.host_copy if engine is not None else None
    if copy is None or engine is None:
        return
    written = copy.written()
    own = {n: checksum(copy.slots[n].info.flattened(value.cpu())) for n, value in written.items()}
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
    engine.comm.together("taking over what was written between runs", lambda: _check(copy, written))
    for number in numbers:
        slot = copy.slots[number]
        write_param(Place(slot.bucket, slot.info), written[number].cpu())
        copy.original[number].copy_(written[number].cpu())
    engine.masters_changed()


def _check(copy: HostCopy, written: dict[int, Tensor]) -> None:
    for number in written:
        copy.slots[number].info.check_shape(written[number].shape)


@outside_autograd
def hide_whole(engine: Assembly) -> None:
    """Back to shards, with what was written to the whole module in them. On all ranks. See :func:`_take_over`."""
    copy = engine.host_copy
    if copy is None:
        return
    _take_over(engine)
    engine.host_copy = None
    engine.writes.between_runs = lambda: None
    copy.put_back()
    engine.passes.hooks.idle = False
    for unit in engine.units:
        for bucket in unit.buckets:
            engine.writes.forget(bucket)
            bucket.hide_plain(gathered=not bucket.reshards or unit.state is State.GATHERED)
    for param, grad in copy.grads:
        param.grad = grad
