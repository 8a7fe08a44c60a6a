"""Small messages for which the host waits: agreements, sums of a few numbers, and broadcasts.

They use the host-side group. Sums of device tensors and large values are ordered with the reductions or the gathers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.agreements import collect_objects, gather_objects, gather_on, open_waits, together
from lightning_zero.comm.groups import Groups
from lightning_zero.comm.streams import Streams
from lightning_zero.comm.transports import all_gather_single
from lightning_zero.device import accelerator_of, recording
from lightning_zero.planning.topology import Topology, flat
from lightning_zero.ranks.waits import Waits

T = TypeVar("T")


class SmallMessages:
    """The ranks of one communicator, and their small messages.

    Attributes:
        shard_rank, shard_size: place among the ranks that share shards: all ranks, or those of this node.
        node_rank, node_size: place among the node's ranks that share what units keep until the backward; size 0: none.
        replica: index of the copy of the shards that this rank is a part of.
        observers: called with (kind, label) when an operation is issued.
        place: what this rank is doing, in words, for other ranks' error messages.
    """

    _groups: Groups | None = None
    _transport: Any = None

    def __init__(
        self,
        group: Any,
        device: torch.device,
        topology: Topology | None,
        waits: Waits | None,
        stall_timeout_s: float,
    ) -> None:
        self.device = device
        self._parent = group
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.topology = topology if topology is not None else flat(self.world_size)
        shards = self.topology.shard_group_of(self.rank)
        self.shard_rank, self.shard_size = shards.index(self.rank), self.topology.shard_size
        neighbours = self.topology.node_group_of(self.rank)
        self.node_rank, self.node_size = (neighbours.index(self.rank), len(neighbours)) if neighbours else (0, 0)
        self.replica = self.topology.shard_groups.index(shards)
        self.observers: list[Callable[[str, str], None]] = []
        self.waits = waits if waits is not None else open_waits(group, device, stall_timeout_s)
        self.waits.all_take_part = len(self.topology.shard_groups) == 1 and not self.node_size
        self.streams = Streams(accelerator_of(device))

    @property
    def queues(self) -> bool:
        """Whether messages are queued on streams of the device, so that the host waits for none."""
        return self.streams.are_there and (self._transport is None or not self._transport.waits_on_host)

    @property
    def place(self) -> str:
        return self.waits.place

    @place.setter
    def place(self, place: str) -> None:
        self.waits.place = place

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Set :attr:`place` inside. It stays after an exception, to tell other ranks where this one stopped."""
        before, self.place = self.place, place
        yield
        self.place = before

    # -- values of one rank, agreements, sums ------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int = 0, *, among: Literal["gather", "reduce"] = "gather") -> None:
        """Send ``tensor`` of rank ``src`` to one rank of each replica, then to the others. Blocks. Collective.

        ``among``: which operations it is ordered with. Use the reductions while gathers after a step may be in
        progress, because each rank issues these as far as its worker thread has got."""
        if self._groups is None:
            return
        host = self._transport.waits_on_host
        data = (tensor.cpu() if host else tensor).contiguous()
        flat_bytes = data.view(-1).view(torch.uint8)  # backends do not support every integer type
        group = self.topology.shard_group_of(src)
        place = group.index(src)
        if self._groups.replicate is not None and self.shard_rank == place:
            replica = self.topology.shard_groups.index(group)
            self._wait_broadcast(flat_bytes, replica, self._groups.replicate, "reduce")
        if (shards := getattr(self._groups, among)) is not None:
            self._wait_broadcast(flat_bytes, place, shards, among)
        if data is not tensor:
            tensor.copy_(data)

    def _wait_broadcast(self, tensor: Tensor, src: int, group: Any, among: str) -> None:
        self._run(partial(dist.broadcast, tensor, group_src=src, group=group), tensor, among, "values of rank 0")

    def _run(self, send: Callable[..., Any], tensor: Tensor, kind: str, label: str) -> None:
        """Send a message and wait for its result in ``tensor``, on the current stream. ``kind`` selects the stream."""
        if tensor.device.type == "cpu":
            self._agree(send(async_op=True), label)
            return
        with self.streams.on(kind):
            send(async_op=False)
            event = self.streams.mark()
        self.streams.wait(event)

    def broadcast_small(self, tensor: Tensor) -> None:
        """Send a small host tensor of rank 0 to every rank. Blocks, but not behind gathers in flight. Collective."""
        if self._groups is not None:
            work = dist.broadcast(tensor, group_src=0, group=self._groups.control, async_op=True)
            self._agree(work, "a small reduction")

    def all_gather_objects(self, value: Any, what: str) -> list[Any]:
        """Gather a small object from each rank, in rank order. Blocks. Collective.

        ``what``: the purpose, in words; the same on all ranks."""
        if self._groups is None:
            return [value]
        return gather_on(self._groups.control, value, self.waits, what)

    def meet(self, value: Any, what: str, *, patient: bool = False) -> list[Any]:
        """Like :meth:`all_gather_objects`, but other ranks may be at any other call. Collective."""
        return gather_objects(self._parent, value, self.waits, what, patient=patient)

    def collect(self, value: Any, what: str) -> list[Any] | None:
        """Like :meth:`meet` for large objects, on rank 0 alone. Other ranks get None. Collective."""
        if self.world_size == 1:
            return [value]
        return collect_objects(self._parent, value, self.waits, what)

    def together(
        self, what: str, act: Callable[[], T], undo: Callable[[T], Any] = lambda _: None, *, patient: bool = False
    ) -> T:
        """See :func:`together`. Collective."""
        return together(self._parent, self.waits, what, act, undo, patient=patient)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor over ranks, in place on its device. Blocks. Collective."""
        return self._small(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Take the maximum of a small tensor over ranks, in place. Blocks. Collective."""
        return self._small(tensor, dist.ReduceOp.MAX)

    def exchange(self, *values: int) -> list[list[int]]:
        """Gather integers: for each argument, the values of all ranks in rank order. Blocks. Collective."""
        if self._groups is None:
            return [[value] for value in values]
        self._note("exchange", str(values[0]))
        own = torch.tensor(values, dtype=torch.int64)
        table = torch.empty(self.world_size * len(values), dtype=torch.int64)
        work = all_gather_single(table, own, group=self._groups.control, async_op=True)
        self._agree(work, "the agreement on the next gather")
        return table.view(self.world_size, -1).t().tolist()  # type: ignore[no-any-return]

    # -- waiting, counting ----------------------------------------------------------------------------------------

    def _small(self, tensor: Tensor, op: Any) -> Tensor:
        if self._groups is None:
            return tensor
        host = tensor.device.type == "cpu"
        self._note("control", str(op), issued="control" if host else "control on the device")
        if not host and self._transport.waits_on_host:
            return tensor.copy_(self._small(tensor.cpu(), op))
        groups = (self._groups.control,) if host else (self._groups.reduce, self._groups.replicate)
        # On a device use the queue of the reductions, whose order is equal on all ranks; never that of the gathers.
        for group in groups:
            if group is not None:
                self._run(partial(dist.all_reduce, tensor, op=op, group=group), tensor, "reduce", "a small reduction")
        return tensor

    def _agree(self, work: Any, label: str) -> None:
        with recording.stands("agree", label, on_host=True):
            self.waits.wait_work(work, label)

    def wait_work(self, work: Any, label: str) -> None:
        """Wait for a message that is no agreement."""
        self.waits.wait_work(work, label, agrees=False)

    def _note(self, kind: str, label: str, *, issued: str | None = None) -> None:
        if self._groups is not None:
            self._groups.issued[issued or kind] += 1
            self.waits.issued += 1
        for observer in self.observers:
            observer(kind, label)
