"""Describe which part of a tensor a rank has if tensor or expert parallelism splits the tensor along one dimension.

A part has one run of indices, or several runs if the tensor joins several matrices (``gate`` and ``up``)::

    whole  [8, 4]  g g g g u u u u        part 0 of 2: rows 0 1 4 5, runs (0, 2) and (4, 2)

Both whole and part are row-major in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.planning.boxes import Box, boxes


class Run(NamedTuple):
    first: int  # index in the whole tensor
    size: int


class Piece(NamedTuple):
    """A range of elements that is contiguous both in the flattened part and in the flattened whole tensor."""

    start: int  # in the part
    whole_start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Split:
    """Describes how a tensor of ``shape`` is split along ``dim``. ``runs``: the runs of indices of each part. ``part``:
    the index of this rank's part. ``by``: the setting that causes the split. Optimizer state with the shape of the
    parameter is split in the same way."""

    shape: tuple[int, ...]
    dim: int
    runs: tuple[tuple[Run, ...], ...]
    part: int
    by: str

    @property
    def parts(self) -> int:
        return len(self.runs)

    def shape_of(self, part: int) -> tuple[int, ...]:
        count = sum(run.size for run in self.runs[part])
        return (*self.shape[: self.dim], count, *self.shape[self.dim + 1 :])

    @property
    def _inner(self) -> int:
        return math.prod(self.shape[self.dim + 1 :])

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield where elements ``[start, stop)`` of this rank's flattened part are in the flattened whole tensor."""
        whole_row = self.shape[self.dim] * self._inner
        row = sum(run.size for run in self.runs[self.part]) * self._inner
        for outer in range(start // row if row else 0, -(-stop // row) if row else 0):
            at = outer * row
            for run in self.runs[self.part]:
                low, high = max(start, at), min(stop, at + run.size * self._inner)
                if low < high:
                    yield Piece(low, outer * whole_row + run.first * self._inner + low - at, high - low)
                at += run.size * self._inner

    def boxes(self, start: int, stop: int) -> Iterator[tuple[Box, int]]:
        """Yield (box, index of its first element in this rank's flattened part) for boxes of the whole tensor that
        together have elements ``[start, stop)`` of the part. ``Box.start`` is an index in the flat whole tensor."""
        shape = self.shape_of(self.part)
        if len(self.runs[self.part]) == 1:  # a box of the part is a box of the whole tensor
            first = self.runs[self.part][0].first
            for box in boxes(shape, start, stop):
                offsets = tuple(o + first * (d == self.dim) for d, o in enumerate(box.offsets))
                yield Box(offsets, box.sizes, self._flat(offsets)), box.start
            return
        for piece in self.pieces(start, stop):
            for box in boxes(self.shape, piece.whole_start, piece.whole_start + piece.numel):
                yield box, piece.start + box.start - piece.whole_start

    def _flat(self, offsets: Sequence[int]) -> int:
        place = 0
        for offset, size in zip(offsets, self.shape, strict=True):
            place = place * size + offset
        return place

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of ``whole``."""
        found = [whole.narrow(self.dim, run.first, run.size) for run in self.runs[self.part]]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def read(self, read: Callable[[int, int], Tensor], start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of this rank's flattened part. ``read(start, stop)`` is called for ranges
        of the flattened whole tensor and returns their elements."""
        pieces = list(self.pieces(start, stop))
        if not pieces:
            return read(0, 0)
        # Rows of a part are read with what lies between them: one read of a file in the place of one for each row.
        first, last = pieces[0].whole_start, pieces[-1].whole_start + pieces[-1].numel
        if last - first > 2 * self.parts * (stop - start):
            return torch.cat([read(p.whole_start, p.whole_start + p.numel) for p in pieces])
        found = read(first, last)
        return torch.cat([found[p.whole_start - first :][: p.numel] for p in pieces])

    def positions(self, start: int, stop: int, device: torch.device) -> Tensor:
        """For the elements ``[start, stop)`` of this rank's flattened part, return their indices in the flattened whole
        tensor: ``[stop - start] int64``."""
        runs = self.runs[self.part]
        indices = torch.cat([torch.arange(run.first, run.first + run.size, device=device) for run in runs])
        row = len(indices) * self._inner
        places = torch.arange(start, stop, device=device)
        outer, rest = places // row, places % row
        return (outer * self.shape[self.dim] + indices[rest // self._inner]) * self._inner + rest % self._inner

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, joined from ``parts``, the parts of all ranks in order."""
        whole = parts[0].new_empty(self.shape)
        for runs, part in zip(self.runs, parts, strict=True):
            for run, values in zip(runs, part.split([run.size for run in runs], self.dim), strict=True):
                whole.narrow(self.dim, run.first, run.size).copy_(values)
        return whole
