"""Keeps what users' code writes to parameters beside the optimizer's steps, if all ranks write the same.

Compute parameters are copies. Those of a gathered unit go with it. Those of a lower dtype, and those whose masters rest
elsewhere, are replaced at the next step. So before a copy goes, the values that were written to it are taken over into
the masters of this rank's shard::

    weight.clamp_()         raises the parameter's version
    weight.data.clamp_()    raises nothing: a checksum is kept from when .data was read, and compared
    weight.data = value     is seen at once

Each rank takes its own shard from its own copy. Whether all wrote the same is checked by checksums, at the end of the
next backward, and before values are shown or saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.home import opened
from lightning_zero.engine.units.param import ParamInfo, values_changed

CHUNK = 1 << 20  # elements whose checksum is computed at a time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Key = tuple[int, int]  # bucket, slot


class _Entry(NamedTuple):
    """A write that has not been confirmed yet."""

    before: int  # checksum of this rank's part, before the first of the writes
    after: int  # checksum of the whole parameter as this rank has written it


def checksum(values: Tensor, first: int = 0) -> int:
    """A number that tells contents apart, place by place. The numbers of a tensor's parts add up to that of the whole.

    Args:
        first: index of the first value in the whole.
    """
    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
        first *= 2
    # Each value's bits, times an odd number (so that none is lost) that is its place's. All wraps around at 2**64.
    odd = torch.arange(1, 2 * min(CHUNK, flat.numel()) + 1, 2, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)  # there: the host waits for it once
    for start in range(0, flat.numel(), CHUNK):
        bits = flat[start : start + CHUNK].view(_INTEGERS[flat.element_size()]).to(torch.int64)
        total += (bits * odd[: bits.numel()]).sum() + bits.sum() * (2 * (first + start))
    return int(total) & 0xFFFFFFFFFFFFFFFF


class Writes:
    """Notices writes to the parameters of one engine, and takes them over."""

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator) -> None:
        self._buckets = buckets
        self._comm = comm
        self._number = {bucket: number for number, bucket in enumerate(buckets)}
        self._handed_out: dict[Bucket, dict[int, int]] = {}  # slot -> checksum when .data was read
        self._unconfirmed: dict[_Key, _Entry] = {}

    # -- noticing -------------------------------------------------------------------------------------------------

    def hand_out(self, place: Place) -> None:
        """Note the checksum of a present parameter whose values get into hands that may change them unseen."""
        bucket, info = place
        # Where the parameters are the masters, whole on all ranks, there is nothing to take over or to compare.
        if not bucket.plan.params_are_masters and info.gathered is not None:
            known = self._handed_out.setdefault(bucket, {})
            if info.slot not in known:
                known[info.slot] = checksum(info.flattened(info.gathered))

    def forget(self, bucket: Bucket) -> None:
        """Count all that was written so far as taken over."""
        self._handed_out.pop(bucket, None)
        for info in bucket.params:
            info.version = info.param._version

    def _written(self, bucket: Bucket) -> list[ParamInfo]:
        handed_out = self._handed_out.get(bucket, {})

        def differs(info: ParamInfo) -> bool:
            assert info.gathered is not None
            if info.param._version != info.version:
                return True
            known = handed_out.get(info.slot)
            return known is not None and checksum(info.flattened(info.gathered)) != known

        return [info for info in bucket.params if differs(info)]

    # -- taking over ----------------------------------------------------------------------------------------------

    def take_over(self, bucket: Bucket) -> None:
        """Take what was written to a bucket's copy into the masters, before the copy goes or is replaced."""
        # Inside ``gather`` the parameters show masters, which are written back when it ends. And placeholders show no
        # values: what the versions say of them is no write.
        if bucket.is_plain or not bucket.shows_values:
            return
        written = self._written(bucket)
        if written:
            self._take(bucket, written)
        if written or bucket in self._handed_out:
            self.forget(bucket)

    def take_all_over(self) -> None:
        for bucket in self._buckets:
            self.take_over(bucket)

    def _take(self, bucket: Bucket, written: Iterable[ParamInfo]) -> None:
        # Read before the masters change, from which it may follow.
        before = bucket.own_compute_params()
        with opened(bucket.home, changed=True):
            for info in written:
                assert info.gathered is not None
                self._note(bucket, info, before, info.gathered)
                if bucket.plan.copies_master:
                    bucket.write_master(info, info.gathered, before=before)
            bucket.push()

    def replace(self, place: Place, value: Tensor) -> None:
        """Take ``value``, a whole tensor of the parameter's shape, for its values; each rank its own part of it."""
        bucket, info = place
        self.take_over(bucket)
        compute = value.detach().to(bucket.comm.device, bucket.dtypes.compute)
        before = bucket.own_compute_params()
        self._note(bucket, info, before, compute)
        # The same values once more (weights that are clamped in each forward, say) leave the version as it is: open
        # graphs have saved these values, and their backward is right.
        again = bucket.shows_values and info.gathered is not None and torch.equal(info.gathered, compute)
        with opened(bucket.home, changed=True):
            bucket.write_master(info, value.detach(), before=before if value.dtype == compute.dtype else None)
            bucket.push()
        if again:
            return
        if bucket.shows_values:
            assert info.gathered is not None
            info.gathered.copy_(compute)
        values_changed([info])

    # -- do all ranks write the same? -----------------------------------------------------------------------------

    def _note(self, bucket: Bucket, info: ParamInfo, own: Tensor, whole: Tensor) -> None:
        """
        Args:
            own: compute parameters of this rank's part of the bucket, before the write.
            whole: the parameter as this rank has written it.
        """
        if self._comm.shard_size == 1 or not bucket.plan.shards_master:
            return
        key = self._number[bucket], info.slot
        known = self._unconfirmed.get(key)
        before = known.before if known is not None else self._own_checksum(bucket, info.slot, own)
        self._unconfirmed[key] = _Entry(before, checksum(info.flattened(whole)))

    @staticmethod
    def _own_checksum(bucket: Bucket, slot: int, own: Tensor) -> int:
        parts = (
            checksum(own[f.start : f.start + f.numel], f.offset) for f in bucket.owned_fragments() if f.index == slot
        )
        return sum(parts) & 0xFFFFFFFFFFFFFFFF

    @property
    def unconfirmed(self) -> bool:
        return bool(self._unconfirmed)

    def confirm(self) -> None:
        """Compare the unconfirmed writes of all ranks. All ranks call it, if any of them has unconfirmed writes.

        Raises:
            RuntimeError: ranks have written different values; the same on all ranks.
        """
        # One to three messages. Each ``if`` before one asks tables that all ranks have, and never this rank's own
        # writes: otherwise a rank would leave out a message for which the others wait.
        written = {key: entry.after for key, entry in self._unconfirmed.items()}
        table = self._comm.all_gather_objects(written, "what was written to parameters")
        keys = sorted({key for found in table for key in found})
        unequal = [key for key in keys if len({found.get(key) for found in table}) > 1]
        if any(not self._buckets[bucket].plan.copies_master for bucket, _ in unequal):
            # The masters themselves were written to, and no original is left. But each rank has all of their values, so
            # those that have noted no write tell what they have.
            table = self._comm.all_gather_objects(written | self._own_copies(unequal), "copies of parameters")
            unequal = [key for key in unequal if len({found.get(key) for found in table}) > 1]
        if unequal:
            # A rank that has noted a write may have written the same values as before. Then it agrees with a rank that
            # has not written at all.
            originals = self._originals(unequal)
            unequal = [
                k
                for k in unequal
                if not self._buckets[k[0]].plan.copies_master
                or any(found.get(k, originals[k]) != originals[k] for found in table)
            ]
        self._unconfirmed.clear()  # before the error, or it would be raised again by the next pass
        if unequal:
            names = ", ".join(self._buckets[b].params[slot].fqn for b, slot in unequal)
            raise RuntimeError(
                f"{names}: written to in a step, with other values on some ranks than on others, so that no rank's are "
                "right for all. Write the same on all ranks, or write inside `with lightning_zero.gather(module, "
                "from_rank=0):`, where one rank's values count. (An Embedding with max_norm writes to the rows of its "
                "rank's batch: drop max_norm.)"
            )

    def _own_copies(self, keys: Sequence[_Key]) -> dict[_Key, int]:
        """Checksums of whole parameters, as this rank has them, where they are not a copy of masters."""
        copies = {}
        for number, slot in keys:
            bucket = self._buckets[number]
            if not bucket.plan.copies_master:
                info = bucket.params[slot]
                assert info.gathered is not None
                copies[number, slot] = checksum(info.flattened(info.gathered))
        return copies

    def confirm_if_any(self) -> None:
        """Call :meth:`confirm` if any rank has something to confirm. On all ranks, between passes."""
        flag = torch.tensor([self.unconfirmed], dtype=torch.uint8)
        if int(self._comm.max_(flag).item()):
            self.confirm()

    def _originals(self, keys: Sequence[_Key]) -> dict[_Key, int]:
        """Checksums of whole parameters before any rank wrote to them: each rank knows that of its own part."""
        own = {}
        for key in keys:
            entry = self._unconfirmed.get(key)
            bucket = self._buckets[key[0]]
            own[key] = (
                entry.before if entry is not None else self._own_checksum(bucket, key[1], bucket.own_compute_params())
            )
        mine = self._comm.topology.shard_group_of(self._comm.rank)
        table = self._comm.all_gather_objects(own, "parameters before they were written to")
        return {key: sum(table[rank][key] for rank in mine) & 0xFFFFFFFFFFFFFFFF for key in keys}
