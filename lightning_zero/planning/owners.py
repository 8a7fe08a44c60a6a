"""Choose for each tensor the rank that steps it whole (its owner), and plan the messages of such a step.

::

    shards    rank 0 | p0 p0 p0 p1 |   rank 1 | p1 p2 p2 p2 |      masters and gradients, flat
    owners    rank 0 | p0 p2       |   rank 1 | p1          |      whole tensors, during the step

Optimizers such as Muon need whole tensors. The ranks of a shard group divide the tensors. For each run of adjacent
units, up to a limit of bytes, one message sends the tensors' shards to the owners, and another returns new masters.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_zero.planning.layout import BucketLayout, round_up

MESSAGE_ALIGN = 16  # bytes; every dtype can be read at such an offset


def matrix_work(shape: Sequence[int]) -> int:
    """Estimate the cost of stepping a tensor: ``max(m, n) * min(m, n)**2`` for a matrix [m, n]. The cost of an
    orthogonalisation grows like this. A tensor of more dimensions counts as a matrix [shape[0], product of the rest].
    The result for a vector is its number of elements."""
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return max(rows, columns) * min(rows, columns) ** 2


def split_messages(nbytes: Sequence[int], units: Sequence[int], limit: int) -> list[list[int]]:
    """Group tensors into messages. Return each message's tensor indices. A message holds whole adjacent units of up to
    ``limit`` bytes in total, or one unit that is larger. ``nbytes``, ``units``: the size and unit of each tensor."""
    messages: list[list[int]] = []
    room = 0
    for _, places in itertools.groupby(sorted(range(len(units)), key=units.__getitem__), units.__getitem__):
        unit = list(places)
        size = sum(nbytes[place] for place in unit)
        if not messages or size > room:
            messages.append([])
            room = limit
        messages[-1] += unit
        room -= size
    return messages


def choose_owners(costs: Sequence[int], ranks: int, kept: Sequence[int | None]) -> list[int]:
    """Return each tensor's owner: the least loaded rank, chosen for the most expensive tensor first. The largest load
    is at most 4/3 of the optimum (LPT; Graham 1969). ``kept``: each tensor's owner if it has the state, or None."""
    owners = [0 if owner is None else owner for owner in kept]
    total = [0] * ranks
    for cost, owner in zip(costs, kept, strict=True):
        if owner is not None:
            total[owner] += cost
    # A heap, because a plan may cover thousands of ranks.
    heap = [(work, rank) for rank, work in enumerate(total)]
    heapq.heapify(heap)
    for place in sorted((p for p, owner in enumerate(kept) if owner is None), key=lambda p: (-costs[p], p)):
        work, owners[place] = heap[0]
        heapq.heapreplace(heap, (work + costs[place], owners[place]))
    return owners


class Transfer(NamedTuple):
    """A tensor whose shards are sent to its owner in a message."""

    bucket: int  # index of its layout
    slot: int
    owner: int
    itemsize: int  # bytes per element of the master
    grad_itemsize: int  # bytes per element of the gradient; 0: no gradient


class Piece(NamedTuple):
    """Adjacent elements of a tensor: their offsets in the tensor, in a shard and in messages to and from the owner."""

    transfer: int  # index among the message's tensors
    offset: int  # first element, from the tensor's start
    numel: int
    start: int  # first element, from the shard's start
    value: int  # first byte of the masters in the message to the owner
    grad: int  # first byte of the gradient in that message
    back: int  # first byte in the message from the owner


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends and gets back, and what it gets and sends back as an owner. Sizes are bytes by peer rank."""

    own: tuple[Piece, ...]  # pieces of this rank's shard in the message to their owners
    owned: tuple[Piece, ...]  # pieces of tensors that this rank owns, in the message that it receives
    kept: tuple[Piece, ...]  # pieces of this rank's shard of tensors that it owns; they are not sent
    own_sizes: tuple[int, ...]  # sent to the owners
    owned_sizes: tuple[int, ...]  # received as the owner
    own_back: tuple[int, ...]  # received back from the owners
    owned_back: tuple[int, ...]  # sent back as the owner


def find_route(transfers: Sequence[Transfer], layouts: Sequence[BucketLayout], rank: int) -> Route:
    """Plan what ``rank`` sends and receives for the ``transfers`` of one message. ``layouts``: of all buckets."""
    ranks = layouts[transfers[0].bucket].world_size if transfers else 1
    others = [other for other in range(ranks) if other != rank]
    own, own_sizes, own_back = _lay_out(transfers, layouts, [(other, rank, other) for other in others], ranks)
    owned, owned_sizes, owned_back = _lay_out(transfers, layouts, [(other, other, rank) for other in others], ranks)
    kept, _, _ = _lay_out(transfers, layouts, [(rank, rank, rank)], ranks)
    return Route(own, owned, kept, own_sizes, owned_sizes, own_back, owned_back)


def _lay_out(
    transfers: Sequence[Transfer], layouts: Sequence[BucketLayout], pairs: Sequence[tuple[int, int, int]], ranks: int
) -> tuple[tuple[Piece, ...], tuple[int, ...], tuple[int, ...]]:
    """Lay out pieces of tensors in the messages between a rank and its peers. ``pairs``: (peer, rank with the shard,
    owner). Returns the pieces, and for each peer the bytes of the message to the owner and of the message back."""
    pieces: list[Piece] = []
    sizes, backs = [0] * ranks, [0] * ranks
    there = back = 0
    for other, source, owner in pairs:
        first_there, first_back = there, back
        for index, transfer in enumerate(transfers):
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


class MessageBytes(NamedTuple):
    """Bytes of one message on one rank, and of the message's tensors that this rank steps."""

    there: int = 0  # to the owners, sent and received
    arriving: int = 0  # received for the tensors that this rank owns
    back: int = 0  # from the owners, sent and received
    values: int = 0  # masters beside the shards, and state that is off the device between steps
    grads: int = 0


def message_bytes(route: Route) -> MessageBytes:
    there, back = sum(route.own_sizes) + sum(route.owned_sizes), sum(route.own_back) + sum(route.owned_back)
    return MessageBytes(there, sum(route.owned_sizes), back)


def step_peak(messages: Sequence[MessageBytes]) -> int:
    """Compute the most bytes that one rank holds beside its shards during a step.

    ::

        send 1 | -> tensors | send 2 | -> tensors | step all | drop gradients | return 1 | -> shards | return 2 | ...
    """
    most = held = 0
    for message in messages:
        tensors = message.values + message.grads
        most = max(most, held + message.there, held + message.arriving + tensors)
        held += tensors
    held = sum(message.values for message in messages)
    for message in messages:
        most = max(most, held + message.back)
        held -= message.values
    return most
