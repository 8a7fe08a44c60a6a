"""The layout of a bucket: where each parameter lies in one flat buffer, and how ranks share it.

::

    bucket   | p0 ....... gap | p1 ............ gap | p2 .. gap | padding |
    shards   |      rank 0      |      rank 1      |      rank 2         |
    fragments| p0[0:a]          | p0[a:] p1[0:b]   | p1[b:] p2           |

Every parameter starts at a multiple of ``PARAM_ALIGN`` elements: torch's fused optimizers walk a tensor in units of
64 bytes and treat a tail differently, so cuts anywhere else would change last bits. (Under 8-bit optimizer state it is
a multiple of a block of that: ``state_dtype.py``.) Shards are cut at multiples of
``SHARD_ALIGN`` elements, wherever that falls inside a parameter. Everything here is arithmetic on integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PARAM_ALIGN = 32  # elements; 64 bytes of the narrowest master, bf16
SHARD_ALIGN = 256  # elements


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter inside a bucket: elements ``[start, start + numel)``, followed by a gap of zeros up to ``stop``."""

    index: int  # position of the parameter in the bucket
    start: int
    numel: int
    align: int = PARAM_ALIGN

    @property
    def stop(self) -> int:
        """End of the slot, its gap included: where the next slot may start."""
        return round_up(self.start + self.numel, self.align)


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of one parameter inside one shard."""

    index: int  # position of the parameter in the bucket
    offset: int  # first element, counted from the parameter's start
    numel: int
    start: int  # first element, counted from the shard's start
    stop: int  # end inside the shard, the gap behind the parameter included if it belongs to the shard

    def within(self, keep: slice) -> tuple[int, int, int] | None:
        """The part inside a range of the shard: first element of the parameter; range inside the fragment."""
        low, high = max(self.start, keep.start) - self.start, min(self.start + self.numel, keep.stop) - self.start
        return (self.offset + low, low, high) if low < high else None


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Where parameters and shards of a bucket lie, in elements."""

    slots: tuple[Slot, ...]
    numel: int  # padded: world_size * shard_numel
    world_size: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    @property
    def used_numel(self) -> int:
        """Elements before the padding (gaps between parameters included)."""
        return self.slots[-1].stop if self.slots else 0

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """The parts of parameters inside the shard of ``rank``, in order. They tile it up to gaps and padding."""
        low, high = self.shard_range(rank)
        return tuple(self.cut(low, high))

    def cut(self, low: int, high: int) -> Iterator[Fragment]:
        """The parts of parameters inside elements ``[low, high)`` of the bucket."""
        for slot in self.slots:
            first = max(low, slot.start)
            last = min(high, slot.start + slot.numel)
            if first < last:
                yield Fragment(slot.index, first - slot.start, last - first, first - low, min(high, slot.stop) - low)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Element ranges of the bucket that belong to no parameter. They always hold zeros."""
        found: list[tuple[int, int]] = []
        end = 0
        for slot in self.slots:
            if slot.start > end:
                found.append((end, slot.start))
            end = slot.start + slot.numel
        if self.numel > end:
            found.append((end, self.numel))
        return tuple(found)


def lay_out(numels: Sequence[int], world_size: int, align: int = PARAM_ALIGN) -> BucketLayout:
    """Lay parameters of the given sizes out, one behind the other, for ``world_size`` equal shards.

    Args:
        numels: elements of each parameter; none may be empty.
        world_size: ranks that share the bucket.
        align: each begins at a multiple of it, of :data:`PARAM_ALIGN` and up to :data:`SHARD_ALIGN`.
    """
    slots: list[Slot] = []
    position = 0
    for index, numel in enumerate(numels):
        slot = Slot(index, position, numel, align)
        slots.append(slot)
        position = slot.stop
    shard = round_up(max(position, 1), world_size * SHARD_ALIGN) // world_size
    return BucketLayout(tuple(slots), shard * world_size, world_size)


def split_by_bytes(nbytes: Sequence[int], limit: int) -> list[list[int]]:
    """Group items so that each group holds at most ``limit`` bytes; a larger item stands alone.

    Each goes to the first group with room, so that small ones (the biases between weights that fill a group each)
    travel together. Groups, and items inside them, are in order.
    """
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
    """Join neighbouring fragments with equal keys into runs.

    Args:
        fragments: a shard's fragments in order.
        keys: for each fragment what must be equal inside a run (param group, step count); ``None`` leaves it out.
    """
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
