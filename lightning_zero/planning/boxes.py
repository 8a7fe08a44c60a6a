"""Convert a range of a flattened tensor to boxes in the tensor's coordinates, which PyTorch's checkpoints store.

A range of a row-major matrix is the end of a row, whole rows, and the beginning of a row::

    . . . # #        elements [3, 13) of a [4, 5] matrix are the boxes
    # # # # #        [0:1, 3:5], [1:2, 0:5] and [2:3, 0:3]
    # # # . .
    . . . . .

A range in ``n`` dimensions gives at most ``2 * n - 1`` boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor. ``start``: index of its first element in the tensor, flattened in memory order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor sorted by stride, largest first: ``(0, 1, ...)`` if row-major."""
    return tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))


def boxes(shape: Sequence[int], start: int, stop: int, order: Sequence[int] | None = None) -> list[Box]:
    """Divide elements ``[start, stop)`` of a tensor of shape ``shape``, flattened in memory order, into boxes, and
    return the boxes. ``order``: the tensor's dimensions by falling stride; None: row-major."""
    if order is None or list(order) == sorted(order):
        return _row_major(tuple(shape), start, stop)
    found = _row_major(tuple(shape[d] for d in order), start, stop)
    places = [list(order).index(d) for d in range(len(shape))]
    return [Box(tuple(b.offsets[p] for p in places), tuple(b.sizes[p] for p in places), b.start) for b in found]


def _row_major(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), 0)]
    if len(shape) == 1:
        return [Box((start,), (stop - start,), start)]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside of one row
        return _in_row(shape, last, start, stop)
    found = _in_row(shape, first - 1, start, first * row)
    if last > first:
        found.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]), first * row))
    return found + _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    base = row * math.prod(shape[1:])
    inner = _row_major(shape[1:], start - base, stop - base)
    return [Box((row, *box.offsets), (1, *box.sizes), base + box.start) for box in inner]
