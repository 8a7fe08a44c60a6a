"""Choose for each tensor the rank that steps it whole (its owner), and plan the messages of such a step.

::

    shards    rank 0 | p0 p0 p0 p1 |   rank 1 | p1 p2 p2 p2 |      masters and gradients, flat
    owners    rank 0 | p0 p2       |   rank 1 | p1          |      whole tensors, during the step

Optimizers such as Muon need whole tensors. The step goes window by window. A *window* is a run of adjacent units, up to
a limit of bytes; the ranks of a shard group divide its tensors. While it is stepped, the next window is sent.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_zero.planning.layout import BucketLayout, round_up

MESSAGE_ALIGN = 16  # bytes; every dtype can be read at such an offset


def matrix_work(shape: Sequence[int]) -> int:
    """Estimate the cost of stepping a tensor: ``max(m, n) * min(m, n)**2`` for a matrix [m, n].

    An orthogonalisation grows like this, and so do the eigenvectors of the shorter side. A tensor of more dimensions
    counts as [shape[0], the rest]; a vector counts its elements.
    """
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return max(rows, columns) * min(rows, columns) ** 2


def split_windows(nbytes: Sequence[int], units: Sequence[int], limit: int) -> list[list[int]]:
    """Group tensors into windows, and return each as a list of tensor indices. A window has the tensors of adjacent
    units, up to ``limit`` bytes, or a part of a larger unit. ``nbytes``, ``units``: bytes and unit of each tensor."""
    by_unit: dict[int, list[int]] = {}
    for place, unit in enumerate(units):
        by_unit.setdefault(unit, []).append(place)
    windows: list[list[int]] = []
    room = 0
    for _, places in sorted(by_unit.items()):
        fits = sum(nbytes[place] for place in places) <= room
        for place in places:
            if not windows or (not fits and (place == places[0] or nbytes[place] > room)):
                windows.append([])
                room = limit
            windows[-1].append(place)
            room -= nbytes[place]
    return windows


def choose_owners(
    costs: Sequence[int], windows: Sequence[Sequence[int]], ranks: int, kept: Sequence[int | None]
) -> list[int]:
    """Choose the owner of each tensor: the largest tensor first, each to the least loaded rank (LPT; Graham 1969).

    The result is within 4/3 of the optimum. Ties go to the rank with the least work in the tensor's window, because
    ranks wait for each other at each window. ``kept``: the owner that has a tensor's state already; ``None``: choose.
    """
    owners: list[int] = [0] * len(costs)
    window_of = {place: number for number, window in enumerate(windows) for place in window}
    total = [0] * ranks
    load: list[Counter[int]] = [Counter() for _ in windows]
    for place, owner in enumerate(kept):
        if owner is not None:
            owners[place] = owner
            total[owner] += costs[place]
            load[window_of[place]][owner] += costs[place]
    # A heap, because a plan may cover thousands of ranks.
    heap = [(work, rank) for rank, work in enumerate(total)]
    heapq.heapify(heap)
    for place in sorted((p for p, owner in enumerate(kept) if owner is None), key=lambda p: (-costs[p], p)):
        own, equal = load[window_of[place]], [heapq.heappop(heap)]
        while own[equal[-1][1]] and heap and heap[0][0] == equal[0][0]:
            equal.append(heapq.heappop(heap))
        chosen = min(equal, key=lambda item: (own[item[1]], item[1]))
        work, owner = chosen
        for item in equal:
            heapq.heappush(heap, item if item is not chosen else (work + costs[place], owner))
        owners[place] = owner
        own[owner] += costs[place]
    return owners


class Transfer(NamedTuple):
    """A tensor whose shards are sent to its owner in a window."""

    bucket: int  # index of its layout
    slot: int
    owner: int
    itemsize: int  # bytes per element of the master
    grad_itemsize: int  # bytes per element of the gradient; 0: no gradient


class Piece(NamedTuple):
    """Adjacent elements of a tensor: where they are in it, in a rank's shard, in the messages to and from its owner."""

    transfer: int  # index in the window
    offset: int  # first element, from the tensor's start
    numel: int
    start: int  # first element, from the shard's start
    value: int  # first byte of the masters in the message to the owner
    grad: int  # first byte of the gradient in that message
    back: int  # first byte in the message from the owner


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends and receives in one window. ``*_sizes`` and ``*_back`` are bytes by peer rank."""

    own: tuple[Piece, ...]  # pieces of this rank's shard in the message to their owners
    owned: tuple[Piece, ...]  # pieces of tensors that this rank owns, in the message that it receives
    kept: tuple[Piece, ...]  # pieces of this rank's shard of tensors that it owns; they are not sent
    own_sizes: tuple[int, ...]  # sent to the owners
    owned_sizes: tuple[int, ...]  # received as the owner
    own_back: tuple[int, ...]  # received back from the owners
    owned_back: tuple[int, ...]  # sent back as the owner


def find_route(window: Sequence[Transfer], layouts: Sequence[BucketLayout], rank: int) -> Route:
    """Plan what ``rank`` sends and receives in a window. ``layouts``: those of all buckets, over the same ranks."""
    ranks = layouts[window[0].bucket].world_size if window else 1
    others = [other for other in range(ranks) if other != rank]
    own, own_sizes, own_back = _lay_out(window, layouts, [(other, rank, other) for other in others], ranks)
    owned, owned_sizes, owned_back = _lay_out(window, layouts, [(other, other, rank) for other in others], ranks)
    kept, _, _ = _lay_out(window, layouts, [(rank, rank, rank)], ranks)
    return Route(own, owned, kept, own_sizes, owned_sizes, own_back, owned_back)


def _lay_out(
    window: Sequence[Transfer], layouts: Sequence[BucketLayout], pairs: Sequence[tuple[int, int, int]], ranks: int
) -> tuple[tuple[Piece, ...], tuple[int, ...], tuple[int, ...]]:
    """Lay out pieces of tensors in the messages between a rank and its peers.
    ``pairs``: (peer, rank with the shard, owner).

    Returns the pieces, and by peer the bytes of the messages to the owners and of the messages back.
    """
    pieces: list[Piece] = []
    sizes, backs = [0] * ranks, [0] * ranks
    there = back = 0
    for other, source, owner in pairs:
        first_there, first_back = there, back
        for index, transfer in enumerate(window):
            if transfer.owner != owner:
                continue
            slot = layouts[transfer.bucket].slots[transfer.slot]
            low, high = layouts[transfer.bucket].shard_range(source)
            first, last = max(low, slot.start), min(high, slot.start + slot.numel)
            if first >= last:
                continue
            value = round_up((last - first) * transfer.itemsize, MESSAGE_ALIGN)
            grad = round_up((last - first) * transfer.grad_itemsize, MESSAGE_ALIGN)
            pieces.append(Piece(index, first - slot.start, last - first, first - low, there, there + value, back))
            there += value + grad
            back += value
        sizes[other], backs[other] = there - first_there, back - first_back
    return tuple(pieces), tuple(sizes), tuple(backs)


def step_peak(routes: Sequence[Route], values: Sequence[int], grads: Sequence[int]) -> int:
    """Compute the most bytes that one rank holds beside its shards while it steps window by window.

    ::

        window 1    send  | -> tensors | step ........ | return . | -> shards
        window 2                       | send ........ | -> tensors | step ...

    The peak is at most two and a half windows of masters and gradients. ``values`` and ``grads``: bytes of masters and
    of gradients of the tensors that the rank owns, by window.
    """
    return peak_of_windows(
        [
            WindowBytes(
                sum(route.own_sizes) + sum(route.owned_sizes),
                sum(route.owned_sizes),
                sum(route.own_back) + sum(route.owned_back),
                value + grad,
                value,
            )
            for route, value, grad in zip(routes, values, grads, strict=True)
        ]
    )


class WindowBytes(NamedTuple):
    """Bytes of one window on one rank."""

    there: int  # messages to the owners, sent and received
    arriving: int  # received for the tensors that this rank owns
    back: int  # messages from the owners, sent and received
    tensors: int  # masters and gradients of the tensors that this rank owns
    values: int  # the masters alone


def peak_of_windows(windows: Sequence[WindowBytes]) -> int:
    most = 0
    for place, window in enumerate(windows):
        before = windows[place - 1].back if place else 0
        following = windows[place + 1].there if place + 1 < len(windows) else 0
        arriving = window.arriving + window.tensors + before
        leaving = window.values + following + window.back
        most = max(most, window.there, arriving, window.tensors + following, leaving)
    return most
