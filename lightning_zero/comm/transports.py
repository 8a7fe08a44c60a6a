"""Sends logical operations (gather, reduce, exchange) as messages of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from lightning_zero.planning.topology import EXCHANGE_MAX_RANKS

# torch 2.13 still has the older names but warns at every call.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DIRECT_MAX_RANKS = 8
SUM_CHUNK = 1 << 18


class Members(NamedTuple):
    """The ranks that take part in a message: the ``size`` ranks of ``group``. ``rank``: this rank's index there."""

    rank: int
    size: int
    group: Any


class Sent(NamedTuple):
    """Messages in flight. ``works``: handles for which the host must wait; empty if messages are queued on the current
    stream. ``finish``: returns the result; call it once, after the waits, on the stream that uses the result."""

    works: list[Any]
    finish: Callable[[], Tensor]


class Transport(Protocol):
    """Sends gathers, reductions and exchanges as messages of a backend. All methods are asynchronous and collective;
    tensors must be contiguous. ``exchanges``: whether reductions can use :func:`exchange`. ``waits_on_host``: whether
    the host waits for messages even if their tensors are on a device."""

    exchanges: bool
    waits_on_host: bool = False

    def gather(self, full: Tensor, among: Members) -> Sent:
        """Fill ``full`` [size * n], which has this rank's slice [n], with the slices of all ranks. Collective."""
        ...

    def gather_all(self, fulls: Sequence[Tensor], among: Members) -> Sent:
        """Fill several tensors as :meth:`gather` does. The result is the first tensor. Collective."""
        sent = [self.gather(full, among) for full in fulls]

        def finish() -> Tensor:
            first, *_ = [each.finish() for each in sent]
            return first

        return Sent([work for each in sent for work in each.works], finish)

    def reduce(
        self, full: Tensor, among: Members, *, in_place: bool = False, total_dtype: torch.dtype | None = None
    ) -> Sent:
        """Sum ``full`` [size * n] over ranks. The result is this rank's slice [n] of the sum. Collective. ``in_place``:
        the sum may overwrite ``full``. ``total_dtype``: sum in this dtype, by :func:`exchange`; None: in
        ``full.dtype``."""
        ...

    def exchange(self, out: Tensor, data: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], group: Any) -> Sent:
        """Send a part of ``data`` [sum(sizes)] to each rank, and receive a part from each rank in ``out``
        [sum(out_sizes)], which is the result. Sizes are in elements, by rank. Collective."""
        work = dist.all_to_all_single(out, data, list(out_sizes), list(sizes), group=group, async_op=not _queues(data))
        return Sent(_works(work), lambda: out)


class PlainTransport(Transport):
    """Sends each logical operation by one collective of the backend; a sum with ``total_dtype`` by :func:`exchange`."""

    def __init__(self, *, exchanges: bool) -> None:
        self.exchanges = exchanges

    def gather(self, full: Tensor, among: Members) -> Sent:
        work = all_gather_single(full, _own(full, among), group=among.group, async_op=not _queues(full))
        return Sent(_works(work), lambda: full)

    def gather_all(self, fulls: Sequence[Tensor], among: Members) -> Sent:
        if len(fulls) == 1 or not _queues(fulls[0]):
            return super().gather_all(fulls, among)
        # As bytes: torch does not promise that tensors of several dtypes may go together.
        data = [full.view(torch.uint8) for full in fulls]
        # Before torch 2.13 ``_coalescing_manager`` drops the options, and NCCL would use another stream.
        options = AllgatherOptions()
        options.asyncOp = False
        gather = getattr(among.group, "all_gather_single_coalesced", among.group.allgather_into_tensor_coalesced)
        return Sent(_works(gather(data, [_own(full, among) for full in data], options)), lambda: fulls[0])

    def reduce(
        self, full: Tensor, among: Members, *, in_place: bool = False, total_dtype: torch.dtype | None = None
    ) -> Sent:
        if total_dtype is not None:
            return exchange(full, among, total_dtype, in_place=in_place)
        out = full.new_empty(full.numel() // among.size)
        return Sent(
            _works(_reduce_scatter_single(out, full, group=among.group, async_op=not _queues(full))), lambda: out
        )


def _own(full: Tensor, among: Members) -> Tensor:
    # A view of ``full`` at this rank's place: NCCL then gathers in place and copies nothing.
    return full.view(among.size, -1)[among.rank]


def _queues(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on a device, so that its messages are queued and the host need not wait."""
    return tensor.device.type != "cpu"


def _works(work: Any) -> list[Any]:
    return [] if work is None else [work]


class DirectTransport(Transport):
    """Gathers by broadcasts in place; reduces by an all-to-all and a local sum in rank order. With two ranks and 64 MiB
    on gloo, gathers take a sixth and reductions a quarter of the time that gloo's all-gather and reduce-scatter take.
    Issuing these messages does not block."""

    exchanges = True

    def gather(self, full: Tensor, among: Members) -> Sent:
        # In rank order on every rank: gloo matches messages of one group by the order of issue.
        on_host = not _queues(full)
        sent = [
            dist.broadcast(part, group_src=rank, group=among.group, async_op=on_host)
            for rank, part in enumerate(full.view(among.size, -1))
        ]
        return Sent(sent if on_host else [], lambda: full)

    def reduce(
        self, full: Tensor, among: Members, *, in_place: bool = False, total_dtype: torch.dtype | None = None
    ) -> Sent:
        return exchange(full, among, total_dtype or full.dtype, in_place=in_place)


def exchange(full: Tensor, among: Members, total_dtype: torch.dtype, *, in_place: bool = False) -> Sent:
    """Sum ``full`` [size * n] over ranks by an all-to-all. The result is this rank's slice of the sum [n], in
    ``total_dtype``. Collective. On the host, slices are added in rank order; on a device, in an order that depends only
    on the number of ranks, not on the dtype."""
    rank, world_size, group = among
    if _queues(full):
        received = torch.empty_like(full)
        dist.all_to_all_single(received, full, group=group, async_op=False)
        return Sent([], lambda: torch.sum(received.view(world_size, -1), 0, dtype=total_dtype))
    parts = full.view(world_size, -1)
    # This rank's part needs no copy. On middle ranks the rest is not contiguous, so they also send to themselves.
    low, high = (1, world_size) if rank == 0 else (0, rank) if rank == world_size - 1 else (0, world_size)
    received = torch.empty_like(parts[low:high])
    counts = [full.numel() // world_size if low <= r < high else 0 for r in range(world_size)]
    work = dist.all_to_all_single(
        received.view(-1), parts[low:high].view(-1), counts, counts, group=group, async_op=True
    )

    def total() -> Tensor:
        # In rank order, because floating-point sums depend on it and all stages must agree to the bit.
        first, *others = [received[r - low] if low <= r < high else parts[r] for r in range(world_size)]
        if total_dtype != full.dtype:
            return _sum_wide([first, *others], total_dtype)
        if not others:
            return first
        for other in others[:-1]:
            first.add_(other)
        # Unless in place, the sum shares no memory, so keeping it keeps no other part alive.
        into = parts[rank] if in_place else received[0] if len(received) == 1 else torch.empty_like(first)
        return torch.add(first, others[-1], out=into)

    return Sent(_works(work), total)


def _sum_wide(terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of ``terms``, each [n], added in order and in ``dtype``. Works on chunks of :data:`SUM_CHUNK`
    elements, to stay in the CPU's cache and to need little memory for casts."""
    first, *others = terms
    total = torch.empty_like(first, dtype=dtype)
    converted = torch.empty(min(SUM_CHUNK, len(total)), dtype=dtype)
    for low in range(0, len(total), SUM_CHUNK):
        piece = total[low : low + SUM_CHUNK].copy_(first[low : low + SUM_CHUNK])
        for other in others:
            piece.add_(converted[: len(piece)].copy_(other[low : low + SUM_CHUNK]))
    return total


class HostTransport(Transport):
    """Sends device tensors over a host-side backend (gloo) by copies through host memory: correct, not fast. The host
    waits for the device when a message is issued, and for other ranks when the result is used. Ranks issue some
    messages at different moments, so an earlier wait could delay a message for which another rank waits."""

    waits_on_host = True

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.exchanges = inner.exchanges

    def gather(self, full: Tensor, among: Members) -> Sent:
        host = torch.empty_like(full, device="cpu")
        _own(host, among).copy_(_own(full, among))  # waits for the device, so the slice is complete before it is sent
        sent = self._inner.gather(host, among)
        return Sent(sent.works, lambda: full.copy_(sent.finish()))

    def reduce(
        self, full: Tensor, among: Members, *, in_place: bool = False, total_dtype: torch.dtype | None = None
    ) -> Sent:
        sent = self._inner.reduce(full.cpu(), among, total_dtype=total_dtype)
        return Sent(sent.works, lambda: sent.finish().to(full.device))

    def exchange(self, out: Tensor, data: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], group: Any) -> Sent:
        sent = self._inner.exchange(torch.empty_like(out, device="cpu"), data.cpu(), out_sizes, sizes, group)
        return Sent(sent.works, lambda: out.copy_(sent.finish()))


def choose_transport(backend: str, world_size: int, device: torch.device) -> Transport:
    """Return a :class:`DirectTransport` for gloo with up to :data:`DIRECT_MAX_RANKS` ranks, else a
    :class:`PlainTransport`, whose reductions can use an all-to-all with up to :data:`EXCHANGE_MAX_RANKS` ranks. For a
    GPU over gloo, return a :class:`HostTransport` around the chosen transport."""
    host_side = backend == "gloo"
    transport: Transport = PlainTransport(exchanges=world_size <= EXCHANGE_MAX_RANKS)
    if host_side and world_size <= DIRECT_MAX_RANKS:
        transport = DirectTransport()
    return HostTransport(transport) if host_side and device.type != "cpu" else transport
