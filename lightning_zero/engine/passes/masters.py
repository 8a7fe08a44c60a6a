"""Whole masters in memory that users' code sees between steps, and reads of other ranks' shards to fill this memory.

See [Note: uses of parameters between steps] and [Note: uses by some ranks alone].
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.one_sided import ANSWER_S, Counts, OneSided
from lightning_zero.engine.passes.writes import checksum
from lightning_zero.engine.units.after_step import Changes
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.master_storage import opened
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.engine.units.param_store import references


@dataclass(eq=False, slots=True)
class Memory:
    """Memory with the whole masters of one bucket. Parameters refer to this memory, and users may hold views of it."""

    bucket: Bucket
    full: Tensor  # [layout.numel] master dtype
    own: dict[int, Tensor] = field(default_factory=dict)  # slot -> values, of which users' older views are in ``full``
    handed_out: dict[int, int] = field(default_factory=dict)  # slot -> checksum when .data was read or kept
    assigned: set[int] = field(default_factory=set)  # slots whose ``.data`` was assigned
    checksums: list[int] | None = None  # of each parameter when they were hidden

    @property
    def is_held(self) -> bool:
        """Return whether users hold tensors in this memory. Call only while parameters do not refer to the memory."""
        return any(references(tensor) > 1 for tensor in (self.full, *self.own.values()))

    def value(self, info: ParamInfo) -> Tensor:
        """Return the values of one parameter: a view of this memory."""
        own = self.own.get(info.slot)
        return self.bucket.part_of(self.full, info) if own is None else own

    def values(self) -> list[Tensor]:
        return [self.value(info) for info in self.bucket.params]

    def whole(self) -> Tensor:
        """Return the current values of all parameters as one tensor [layout.numel]."""
        full = self.full.clone() if self.own else self.full
        for slot, value in self.own.items():
            self.bucket.part_of(full, self.bucket.params[slot]).copy_(value)
        return full

    def checksum(self, info: ParamInfo) -> int:
        return checksum(info.flattened(self.value(info)))

    def all_checksums(self) -> list[int]:
        return [self.checksum(info) for info in self.bucket.params]

    def written_views(self) -> list[int]:
        """Return the slots of parameters whose views users have written to while parameters did not refer to them."""
        if self.checksums is None:
            return []
        return [slot for slot, now in enumerate(self.all_checksums()) if now != self.checksums[slot]]

    def shown_again(self) -> None:
        """Record that parameters refer to this memory again."""
        self.assigned |= {*self.written_views()}
        self.checksums = None
        for slot in self.handed_out:
            self.handed_out[slot] = self.checksum(self.bucket.params[slot])

    def assign(self, info: ParamInfo, value: Tensor) -> None:
        """Copy ``value`` into the memory of a parameter for ``param.data = value``. If users hold views of the bucket's
        memory, the parameter gets other memory, so that these views keep their values. If ``value`` is itself such a
        view, the parameter uses the bucket's memory again."""
        are_held = references(self.full) > 1 + len(self.bucket.params) - len(self.own)
        first = self.bucket.part_of(self.full, info)
        if (first.data_ptr(), first.shape, first.stride()) == (value.data_ptr(), value.shape, value.stride()):
            self.own.pop(info.slot, None)
        elif are_held:
            self.own[info.slot] = torch.empty_strided(info.shape, info.strides, dtype=first.dtype, device=first.device)
        self.value(info).copy_(value)
        self.assigned.add(info.slot)


class ShardReader:
    """Reads masters from other ranks' shards, where only some ranks use parameters."""

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator, changes: Changes) -> None:
        self._buckets, self._comm, self.changes = buckets, comm, changes
        self._messages = OneSided(comm, self._copy_of_shard)
        self._stream = comm.streams.accelerator.new_stream()
        self.listen = self._messages.listen

    def all_make(self, use: str) -> bool:
        """Call :meth:`OneSided.all_make` for ``use``."""
        at = *self.changes.counts, self.changes.backwards
        return self._messages.all_make(use, at, withdraws=not self.changes.step_follows)

    def read(self, bucket: Bucket) -> Tensor:
        """Return the masters [layout.numel] of ``bucket`` on the device, from all ranks' shards. Not collective. Raises
        RuntimeError if another rank has changed its shard, or does not make the changes that this rank has made."""
        bucket.awaited_step.wait()
        shard = bucket.comm.shard
        others = {n: rank for n, rank in enumerate(shard.ranks) if n != shard.index and bucket.plan.shards_master}
        with opened(bucket.storage) as master:
            full = torch.empty(bucket.layout.numel, dtype=master.dtype, device=self._comm.device)
            full[slice(*bucket.owned_range)].copy_(master)
        if others:
            found = self._messages.ask([*others.values()], self._buckets.index(bucket), self.changes.counts)
            for index, data in zip(others, found, strict=True):
                full[slice(*bucket.plan.owned_range(index))].copy_(data.view(full.dtype))
        return full

    def _copy_of_shard(self, index: int, counts: Counts) -> Tensor:
        bucket, limit_s, changes = self._buckets[index], self._comm.waits.stall_timeout_s, self.changes
        deadline, accelerator = time.monotonic() + limit_s, self._comm.streams.accelerator
        accelerator.bind_thread()
        while changes.counts <= counts and time.monotonic() < deadline:
            if changes.counts == counts:
                if (step := bucket.awaited_step.future) is not None:
                    step.result(limit_s)
                with opened(bucket.storage) as master, accelerator.on(self._stream):
                    accelerator.wait(changes.event)
                    copied = master.to("cpu", copy=True)
                if changes.counts == counts:
                    return copied
            time.sleep(ANSWER_S)
        does = "changed them since, maybe in a step" if changes.counts > counts else "not changed them as often yet"
        raise RuntimeError(
            f"code that only some ranks run reads parameters ({bucket.params[0].fqn}, ...), but this rank has {does}. "
            "Read them on all ranks, or after the change."
        )
