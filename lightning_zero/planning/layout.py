"""Lay out the parameters of a bucket in one flat buffer, and cut the buffer into shards. Arithmetic on integers.

::

    bucket   | p0 ....... gap | p1 ............ gap | p2 .. gap | padding |
    shards   |      rank 0      |      rank 1      |      rank 2         |
    fragments| p0[0:a]          | p0[a:] p1[0:b]   | p1[b:] p2           |

Parameters start at multiples of ``PARAM_ALIGN`` elements: torch's fused optimizers step 64 bytes at a time and treat a
tail differently, so other starts would change the last bits of results. Shards are cut at multiples of ``SHARD_ALIGN``
elements, also inside parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PARAM_ALIGN = 32  # elements; 64 bytes of bf16, the narrowest master
SHARD_ALIGN = 256  # elements


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter inside a bucket: elements ``[start, start + numel)``, then zeros as padding up to ``stop``."""

    index: int  # position of the parameter in the bucket
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """Return the end of the padding behind the parameter, where the next slot begins."""
        return round_up(self.start + self.numel, PARAM_ALIGN)


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of one parameter inside one shard."""

    index: int  # position of the parameter in the bucket
    offset: int  # first element, from the parameter's start
    numel: int
    start: int  # first element, from the shard's start
    stop: int  # end, from the shard's start, with the part of the gap behind the parameter that is in the shard

    def within(self, keep: slice) -> tuple[int, int, int] | None:
        """Intersect this fragment with the range ``keep`` of the shard. Return the first common element, counted from
        the parameter's start, and both ends of the common range, counted from the fragment's start; None if empty."""
        low, high = max(self.start, keep.start) - self.start, min(self.start + self.numel, keep.stop) - self.start
        return (self.offset + low, low, high) if low < high else None


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The positions of the parameters and shards of a bucket, in elements."""

    slots: tuple[Slot, ...]
    numel: int  # padded: world_size * shard_numel
    world_size: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    @property
    def used_numel(self) -> int:
        """Return the number of elements before the padding at the bucket's end, with the gaps between parameters."""
        return self.slots[-1].stop if self.slots else 0

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """List the parts of the bucket's parameters that are inside the shard of ``rank``, in order."""
        low, high = self.shard_range(rank)
        return tuple(self.cut(low, high))

    def cut(self, low: int, high: int) -> Iterator[Fragment]:
        """Yield the parts of the bucket's parameters that are inside its elements ``[low, high)``."""
        for slot in self.slots:
            first = max(low, slot.start)
            last = min(high, slot.start + slot.numel)
            if first < last:
                yield Fragment(slot.index, first - slot.start, last - first, first - low, min(high, slot.stop) - low)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the bucket's elements that belong to no parameter, and always hold zeros."""
        found: list[tuple[int, int]] = []
        end = 0
        for slot in self.slots:
            if slot.start > end:
                found.append((end, slot.start))
            end = slot.start + slot.numel
        if self.numel > end:
            found.append((end, self.numel))
        return tuple(found)


def lay_out(numels: Sequence[int], world_size: int) -> BucketLayout:
    """Lay out non-empty parameters in order, each at a multiple of ``PARAM_ALIGN``, in ``world_size`` equal shards."""
    slots: list[Slot] = []
    position = 0
    for index, numel in enumerate(numels):
        slot = Slot(index, position, numel)
        slots.append(slot)
        position = slot.stop
    shard = round_up(max(position, 1), world_size * SHARD_ALIGN) // world_size
    return BucketLayout(tuple(slots), shard * world_size, world_size)


def split_by_bytes(nbytes: Sequence[int], limit: int) -> list[list[int]]:
    """Divide items into groups of at most ``limit`` bytes. ``nbytes``: the size of each item. Return each group as a
    list of item indices. Each item goes to the first group with enough room, so that small items (biases) share a
    group. An item above ``limit`` is alone in a group."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index, size in enumerate(nbytes):
        place = next((n for n, left in enumerate(room) if size <= left), None)
        if place is None:
            groups.append([index])
            room.append(limit - size)
        else:
            groups[place].append(index)
            room[place] -= size
    return groups


class Run(NamedTuple):
    """Adjacent fragments of a shard that an optimizer steps as one tensor: elements ``[start, stop)`` of the shard."""

    start: int
    stop: int
    fragments: tuple[Fragment, ...]


def cut_runs(fragments: Sequence[Fragment], keys: Sequence[object]) -> list[tuple[object, Run]]:
    """Join adjacent fragments with equal ``keys`` into runs. Return (key, run) pairs, without fragments of key None."""
    runs: list[tuple[object, Run]] = []
    previous: object = None
    for fragment, key in zip(fragments, keys, strict=True):
        if key is None:
            pass
        elif runs and previous == key and runs[-1][1].stop == fragment.start:
            last = runs[-1][1]
            runs[-1] = (key, Run(last.start, fragment.stop, (*last.fragments, fragment)))
        else:
            runs.append((key, Run(fragment.start, fragment.stop, (fragment,))))
        previous = key
    return runs
