"""Logical operations on whole buckets, their order and their counts.

The engine asks for *logical* operations on whole buckets: ``all_gather``, ``reduce_scatter``, ``all_reduce`` (which is
the two of them, so that all stages add in the same order); and for ``exchange_parts``, of a step of whole tensors. A
:class:`Transport` turns each into messages.

Topology. Shards are divided among all ranks, or among those of a node (``planning/topology.py``). Then a reduced shard
is summed over the nodes by a second message, and agreements still go over all ranks, so that all keep one order.

Groups. Gathers and reductions each have a process group of their own, because operations on one group must be issued
in the same order on every rank and the two kinds interleave freely. Where the host waits for messages, the gather half
of an all-reduce is issued when the first half is found complete, at moments that differ between ranks, so it has a
third. Small host-side agreements run on a gloo group.

CUDA. Each kind runs on a stream of its own (``streams.py`` draws the order of events), by calls that queue on the
current stream (``async_op=False``): so it has the stream's priority. With ``async_op=True`` NCCL takes a stream of its
own, whose priority is that of compute. The host waits in neither case. An operation waits for what the stream that
issues it has queued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.agreements import collect_objects, gather_objects, gather_on, open_waits, together
from lightning_zero.comm.groups import GROUP_POOL, GroupKind, Groups, backend_for
from lightning_zero.comm.reduction import LATE, Pending, Reduction
from lightning_zero.comm.streams import Streams
from lightning_zero.comm.transports import Members, all_gather_single, choose_transport
from lightning_zero.config import Transport as TransportName
from lightning_zero.device import accelerator_of, recording
from lightning_zero.planning.topology import Topology, flat
from lightning_zero.ranks.waits import Waits

T = TypeVar("T")

ABANDON_S = 10.0  # after an exception: how long messages in flight may take to arrive


class Communicator:
    """Collectives of one engine over one group of ranks.

    Attributes:
        rank, world_size: place among all ranks of the group.
        shard_rank, shard_size: place among the ranks that share shards; all of them, or those of this node.
        node_rank, node_size: place among the ranks of the node that share what units keep for the backward; a size of
            0: they keep nothing.
        replica: which copy of the shards this rank has a part of.
        counts: logical operations asked for, by kind and bucket: ``counts["all_gather", label]``.
        observers: called with (kind, label) when an operation is issued.
        waits: for the other ranks.
        place: what this rank is doing, in words; posted for the others' error messages.
        streams: of the device, for every kind of transfer.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        *,
        transport: TransportName = TransportName.auto,
        stall_timeout_s: float = 300.0,
        topology: Topology | None = None,
        waits: Waits | None = None,
        even_alone: bool = False,
    ) -> None:
        """
        Args:
            topology: default: one node, all ranks share shards.
            waits: of this rank, where there is something that waits for the group already.
            even_alone: send the messages of a group of one rank, too.
        """
        self.device = device
        self._parent = group
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.topology = topology if topology is not None else flat(self.world_size)
        self._shards = self.topology.shard_group_of(self.rank)
        self.shard_rank, self.shard_size = self._shards.index(self.rank), self.topology.shard_size
        neighbours = self.topology.node_group_of(self.rank)
        self.node_rank, self.node_size = (neighbours.index(self.rank), len(neighbours)) if neighbours else (0, 0)
        self.replica = self.topology.shard_groups.index(self._shards)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.observers: list[Callable[[str, str], None]] = []
        self._groups: Groups | None = None
        self._transport: Any = None
        self.waits = waits if waits is not None else open_waits(group, device, stall_timeout_s)
        self.waits.all_take_part = len(self.topology.shard_groups) == 1 and not self.node_size
        self.streams = Streams(accelerator_of(device))
        if self.world_size > 1 or (even_alone and group is not None):
            backend = backend_for(group, device)
            self._transport = choose_transport(transport, backend, self.shard_size, device)
            self._kind = GroupKind(self.topology, backend, self.queues, even_alone)
            self._groups = GROUP_POOL.take(group, self, self._kind, self.waits)
            self._meet()

    def _meet(self) -> None:
        """Have NCCL make its communicators now, where all ranks come: at the first message of a group the host waits
        for the others, and in the middle of a pass these may be waiting for another message of this rank."""
        assert self._groups is not None
        if self.queues:
            for kind, group in (
                ("gather", self._groups.gather),
                ("gather", self._groups.node_gather),
                ("reduce", self._groups.reduce),
                ("reduce", self._groups.replicate),
            ):
                if group is not None:
                    number = torch.zeros(1, device=self.device)
                    self._run(partial(dist.all_reduce, number, group=group), number, kind, "groups")
            if self.exchanges:
                # NCCL connects each pair of ranks at the first message between the two.
                numbers, own = torch.zeros(2, self.shard_size, device=self.device)
                send = partial(dist.all_to_all_single, numbers, own, group=self._groups.reduce)
                self._run(send, numbers, "reduce", "groups")

    @property
    def exchanges(self) -> bool:
        """Whether a reduction can be an all-to-all, whose parts may be narrower than their sum."""
        return self._groups is not None and self._groups.reduce is not None and self._transport.exchanges

    @property
    def queues(self) -> bool:
        """Whether messages are queued on streams of the device, so that the host waits for none."""
        return self.streams.are_there and (self._transport is None or not self._transport.waits_on_host)

    @property
    def issued(self) -> list[int]:
        """See :attr:`Groups.all_issued`."""
        return self._groups.all_issued if self._groups is not None else []

    @property
    def place(self) -> str:
        return self.waits.place

    @place.setter
    def place(self, place: str) -> None:
        self.waits.place = place

    # -- logical operations -------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, label: str, *, of_node: bool = False) -> Pending:
        """Fill ``full`` [shard_size * n] with every rank's slice, in place; this rank's slice is filled already.

        Args:
            of_node: with the slices of the ranks of this node, [node_size * n]. All nodes do so.
        """
        self._count("all_gather", label, full, of_node=of_node)
        return self._gather(full, label, "node_gather" if of_node else "gather")

    def all_gather_together(self, fulls: Sequence[tuple[Tensor, str]], *, of_node: bool = False) -> Pending:
        """Several :meth:`all_gather` at once, each with its label: one message where the device has streams."""
        for full, label in fulls:
            self._count("all_gather", label, full, of_node=of_node)
        label = fulls[0][1]
        if self._groups is None or self._groups.gather is None:
            return Pending(self, label, [], lambda: fulls[0][0], kind="transfer", event=self.streams.mark())
        with self.streams.on("gather") as stream:
            span = recording.begin("gather", label, on_host=not self.queues)
            among = self._members("node_gather" if of_node else "gather")
            sent = self._transport.gather_all([full for full, _ in fulls], among)
            return self._pending("gather", label, sent.works, sent.finish, stream, span)

    def reduce_scatter(
        self, full: Tensor, label: str, *, factor: float = 1.0, total_dtype: torch.dtype | None = None
    ) -> Reduction:
        """Sum ``full`` [shard_size * n] over all ranks, which gives this rank's slice [n]; ``full`` is used up.

        Args:
            factor: the sum is multiplied by it.
            total_dtype: of the sum, which is then made by an all-to-all (:attr:`exchanges`): parts of a narrower dtype
                are added in this one, in an order that does not depend on their dtype. None: that of ``full``.
        """
        self._count("reduce_scatter", label, full, total_dtype)
        return Reduction(self._reduce(full, label, factor, total_dtype), *self._over_replicas(label))

    def all_reduce(
        self, full: Tensor, label: str, *, factor: float = 1.0, total_dtype: torch.dtype | None = None
    ) -> Reduction:
        """Sum ``full`` over all ranks, which gives ``full``, or another tensor in ``total_dtype``. See
        :meth:`reduce_scatter`."""
        self._count("all_reduce", label, full, total_dtype)
        first = self._reduce(full, label, factor, total_dtype, whole=True)
        if self._groups is None or self.queues:
            return Reduction(first)

        def gather(shard: Tensor) -> Pending:
            # ``full`` held what was to be summed. The sum is complete here, so nothing reads its old contents any more.
            return self._gather(self._spread(shard, full), label, "second_half")

        return Reduction(first, *self._over_replicas(label), gather)

    def _spread(self, shard: Tensor, full: Tensor) -> Tensor:
        """``full``, or a tensor like it in the dtype of ``shard``, with ``shard`` at the place of this rank."""
        if shard.dtype != full.dtype:
            full = torch.empty_like(full, dtype=shard.dtype)
        own = full.view(self.shard_size, -1)[self.shard_rank]
        if own.untyped_storage()._cdata != shard.untyped_storage()._cdata:  # else it was summed there
            own.copy_(shard)
        return full

    def exchange_parts(self, data: Tensor, sizes: Sequence[int], out_sizes: Sequence[int], label: str) -> Pending:
        """Send parts of ``data`` [bytes] to the ranks that share shards, which gives what these have sent here.

        Ordered with reductions.

        Args:
            sizes: bytes for each rank, which lie in ``data`` in rank order.
            out_sizes: bytes from each rank, in rank order; each is what that rank has in ``sizes`` for this one.
        """
        assert self._groups is not None and self._groups.reduce is not None, "there is nobody else"
        out = torch.empty(sum(out_sizes), dtype=torch.uint8, device=data.device)
        self.counts["all_to_all", label] += 1
        self.waits.note(label)
        recording.moved("reduce", out.nbytes - out_sizes[self.shard_rank])
        self._note("all_to_all", label)
        with self.streams.on("reduce") as stream:
            span = recording.begin("reduce", label, on_host=not self.queues)
            sent = self._transport.exchange(out, data, out_sizes, sizes, self._groups.reduce)
            return self._pending("reduce", label, sent.works, sent.finish, stream, span, keep=data)

    def broadcast(self, tensor: Tensor, src: int = 0, *, among: Literal["gather", "reduce"] = "gather") -> None:
        """Blocking: every rank gets ``tensor`` of rank ``src``: first one rank of each replica, then the others.

        Args:
            among: which operations it is ordered with. Gathers that follow steps are issued by each rank as far as its
                worker has got: a message that comes while these are going on belongs among the reductions.
        """
        if self._groups is None:
            return
        host = self._transport.waits_on_host
        data = (tensor.cpu() if host else tensor).contiguous()
        flat_bytes = data.view(-1).view(torch.uint8)  # backends do not know every integer type
        group = self.topology.shard_group_of(src)
        place = group.index(src)
        if self._groups.replicate is not None and self.shard_rank == place:
            replica = self.topology.shard_groups.index(group)
            self._wait_broadcast(flat_bytes, replica, self._groups.replicate, "reduce")
        if (shards := getattr(self._groups, among)) is not None:
            self._wait_broadcast(flat_bytes, place, shards, among)
        if data is not tensor:  # a contiguous copy, or one on the host
            tensor.copy_(data)

    def _wait_broadcast(self, tensor: Tensor, src: int, group: Any, among: str) -> None:
        self._run(partial(dist.broadcast, tensor, group_src=src, group=group), tensor, among, "values of rank 0")

    def _run(self, send: Callable[..., Any], tensor: Tensor, kind: str, label: str) -> None:
        """Send a message and have its result in ``tensor``, on the current stream.

        Args:
            kind: of the operations that it is ordered with: a group's messages all run on one stream.
        """
        if tensor.device.type == "cpu":
            self._agree(send(async_op=True), label)
            return
        with self.streams.on(kind):
            send(async_op=False)
            event = self.streams.mark()
        self.streams.wait(event)

    def broadcast_small(self, tensor: Tensor) -> None:
        """Send a small host tensor of rank 0 to every rank. Blocking. It does not wait behind gathers in flight."""
        if self._groups is not None:
            work = dist.broadcast(tensor, group_src=0, group=self._groups.control, async_op=True)
            self._agree(work, "a small reduction")

    def all_gather_objects(self, value: Any, what: str) -> list[Any]:
        """Blocking: a small picklable object from each rank, in rank order.

        Args:
            what: for, in words; the same on all ranks.
        """
        if self._groups is None:
            return [value]
        return gather_on(self._groups.control, value, self.waits, what)

    def meet(self, value: Any, what: str, *, patient: bool = False) -> list[Any]:
        """As :meth:`all_gather_objects`, where other ranks may be at any other call: see :func:`gather_objects`."""
        return gather_objects(self._parent, value, self.waits, what, patient=patient)

    def collect(self, value: Any, what: str) -> list[Any] | None:
        """As :meth:`meet`, for objects that are large: on rank 0 alone; others get None."""
        if self.world_size == 1:
            return [value]
        return collect_objects(self._parent, value, self.waits, what)

    def together(
        self, what: str, act: Callable[[], T], undo: Callable[[T], Any] = lambda _: None, *, patient: bool = False
    ) -> T:
        """See :func:`together`."""
        return together(self._parent, self.waits, what, act, undo, patient=patient)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Blocking: sum a small tensor on its device over ranks, in place."""
        return self._small(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Blocking: the maximum of a small tensor over ranks, in place; host tensors go by the host-side group."""
        return self._small(tensor, dist.ReduceOp.MAX)

    def exchange(self, *values: int) -> list[list[int]]:
        """Blocking: some integers from each rank; for each, all ranks' in rank order."""
        if self._groups is None:
            return [[value] for value in values]
        self._note("exchange", str(values[0]))
        own = torch.tensor(values, dtype=torch.int64)
        table = torch.empty(self.world_size * len(values), dtype=torch.int64)
        work = all_gather_single(table, own, group=self._groups.control, async_op=True)
        self._agree(work, "the agreement on the next gather")
        return table.view(self.world_size, -1).t().tolist()  # type: ignore[no-any-return]

    def resume(self, what: str = "going on after an exception") -> None:
        """Replace the groups if ranks have issued different operations on them. Blocking, on all ranks.

        It is called after an exception has ended a pass. A rank issues the later half of a reduction when it finds the
        first half complete, so ranks that raised in the same place may have issued different later halves. On groups
        that were used so, the next message of one rank would be matched with an older message of another.

        Messages that were abandoned are not waited for: on groups that are replaced they may never end. On groups that
        stay, each is matched with its own and ends late, in the memory that it was issued with (``LATE``).

        Args:
            what: the purpose, in words.
        """
        if self._groups is not None and not _alike(self.meet(self.issued, what)):
            # Given back before the pool is asked: the pool then sees that the counts differ, and leaves these alone.
            self._groups.user = lambda: None
            self._groups = GROUP_POOL.take(self._parent, self, self._kind, self.waits)
        self.waits.count_anew()

    def close(self) -> None:
        """End the threads and give the groups back."""
        self.waits.close()
        if self._groups is not None:
            self._groups.user = lambda: None
            self._groups = None

    # -- messages -----------------------------------------------------------------------------------------------

    def _gather(self, full: Tensor, label: str, group: str) -> Pending:
        """Issue a gather of ``full`` on the group of that name."""
        if self._groups is None or self._groups.gather is None:
            # The current stream may be one that still brings the bytes.
            return Pending(self, label, [], lambda: full, kind="transfer", event=self.streams.mark())
        # Counted apart from the all-reduce that it ends: ranks come here at different moments, see :meth:`resume`.
        self._groups.issued["second_half"] += group == "second_half"
        kind = "reduce" if group == "second_half" else "gather"
        with self.streams.on("gather") as stream:
            span = recording.begin(kind, label, on_host=not self.queues)
            sent = self._transport.gather(full, self._members(group))
            return self._pending(kind, label, sent.works, sent.finish, stream, span)

    def _members(self, group: str) -> Members:
        """Who takes part in messages of the group of that name."""
        assert self._groups is not None
        if group == "node_gather":
            return Members(self.node_rank, self.node_size, self._groups.node_gather)
        return Members(self.shard_rank, self.shard_size, getattr(self._groups, group))

    def _reduce(
        self, full: Tensor, label: str, factor: float, total_dtype: torch.dtype | None, *, whole: bool = False
    ) -> Pending:
        """Issue the sum over the ranks that share shards. On a stream also issue the messages that follow it.

        On a stream nobody waits in between. So all messages are issued in the order of reductions, which is the same on
        all ranks.

        Args:
            factor: the slice's sum is multiplied by it.
            whole: the sum of every slice is to come to all ranks, into ``full``. On a stream it does.
        """
        if self._groups is None:
            return Pending(self, label, [], lambda: full if factor == 1.0 else full.mul_(factor), kind="reduce")
        with self.streams.on("reduce") as stream:
            span = recording.begin("reduce", label, on_host=not self.queues)
            works: list[Any] = []
            total: Callable[[], Tensor] = lambda: full  # noqa: E731
            if self._groups.reduce is not None:
                works, total = self._transport.reduce(
                    full, self._members("reduce"), in_place=whole, total_dtype=total_dtype
                )
            if factor != 1.0:
                total = _multiplied(total, factor)
            # Where nothing is queued, the messages that follow need a complete first sum, which the host finds when it
            # lands it. Issued from here they would make the host wait for the first sum now.
            finish = (lambda: self._rest_in_stream(total(), full, label, whole)) if self.queues else total
            # The reduce stream reads ``full``, whose block belongs to the compute stream's pool. Freed now, compute
            # would get the block for its next tensor and overwrite it. :meth:`Pending.wait` frees it behind the event.
            return self._pending("reduce", label, works, finish, stream, span, keep=full)

    def _rest_in_stream(self, shard: Tensor, full: Tensor, label: str, whole: bool) -> Tensor:
        """Issue, on the reduce stream, the messages that follow the sum of this rank's slice, ``shard``."""
        assert self._groups is not None
        if self._groups.replicate is not None:
            self._issue_sum(shard, async_op=False)
        if not whole:
            return shard
        # On the reductions' own group: each reduction is issued with all of its messages, so one order holds for all.
        if self._groups.reduce is not None:
            full = self._spread(shard, full)
            self._wait_in_stream(self._transport.gather(full, self._members("reduce")).works)
        return full

    @staticmethod
    def _wait_in_stream(works: list[Any]) -> None:
        """Make the current stream wait for messages that a backend has not queued on it."""
        for work in works:
            work.wait()

    def _over_replicas(self, label: str) -> list[Callable[[Tensor], Pending]]:
        """What to issue after :meth:`_reduce`: the sum over the nodes, where the host has to issue it."""
        if self._groups is None or self._groups.replicate is None or self.queues:
            return []
        return [partial(self._sum_replicas, label)]

    def _sum_replicas(self, label: str, shard: Tensor) -> Pending:
        data = shard.cpu()  # itself, on the host
        return Pending(self, label, [self._issue_sum(data)], lambda: data.to(shard.device), kind="reduce")

    def _issue_sum(self, shard: Tensor, *, async_op: bool = True) -> Any:
        """Sum ``shard`` over the nodes, in place."""
        assert self._groups is not None
        self._groups.issued["replicate"] += 1
        replicas = self.world_size // self.shard_size
        recording.moved("reduce", 2 * (shard.nbytes - shard.nbytes // replicas))
        return dist.all_reduce(shard, group=self._groups.replicate, async_op=async_op)

    def _pending(
        self,
        kind: str,
        label: str,
        works: list[Any],
        finish: Callable[[], Tensor],
        stream: Any,
        span: recording.Open | None,
        *,
        keep: Tensor | None = None,
    ) -> Pending:
        """The handle of ``works``. On CUDA it is called inside ``streams.on``, with ``stream`` as the current one.

        Args:
            span: of these messages, where somebody records.
        """
        if stream is None or not self.queues:
            if span is not None:
                end_with(works, span)
            return Pending(self, label, works, finish, kind=kind, keep=keep)
        self._wait_in_stream(works)
        # The event comes last: whoever waits for it also waits for what ``finish`` has queued behind them.
        result = finish()
        if span is not None:
            span.end()
        return Pending(self, label, [], lambda: result, kind=kind, event=self.streams.mark(), keep=keep)

    def _small(self, tensor: Tensor, op: Any) -> Tensor:
        if self._groups is None:
            return tensor
        host = tensor.device.type == "cpu"
        self._note("control", str(op), issued="control" if host else "control on the device")
        if not host and self._transport.waits_on_host:
            return tensor.copy_(self._small(tensor.cpu(), op))
        groups = (self._groups.control,) if host else (self._groups.reduce, self._groups.replicate)
        # On a device in the queue of the reductions, whose order is one on all ranks; never in that of the gathers.
        for group in groups:
            if group is not None:
                self._run(partial(dist.all_reduce, tensor, op=op, group=group), tensor, "reduce", "a small reduction")
        return tensor

    # -- waiting, counting ----------------------------------------------------------------------------------------

    def _agree(self, work: Any, label: str) -> None:
        """Wait for a small message."""
        with recording.stands("agree", label, on_host=True):
            self.wait_work(work, label)

    def wait_work(self, work: Any, label: str) -> None:
        """See :meth:`Waits.wait_work`."""
        self.waits.wait_work(work, label)

    def _count(
        self,
        kind: str,
        label: str,
        full: Tensor,
        total_dtype: torch.dtype | None = None,
        *,
        of_node: bool = False,
    ) -> None:
        if self._groups is not None:
            self.counts[kind, label] += 1
            self.waits.note(label)
            # What one rank receives, by whatever messages: every slice but its own, once for each half.
            others = full.numel() - full.numel() // (self.node_size if of_node else self.shard_size)
            if kind != "all_gather":
                recording.moved("reduce", others * full.itemsize)
            if kind != "reduce_scatter":
                itemsize = (total_dtype or full.dtype).itemsize
                recording.moved("gather" if kind == "all_gather" else "reduce", others * itemsize)
            self._note(kind, label, issued="node_gather" if of_node else kind)

    def _note(self, kind: str, label: str, *, issued: str | None = None) -> None:
        if self._groups is not None:
            if LATE:
                LATE.forget()
            self._groups.issued[issued or kind] += 1
            self.waits.issued += 1
        for observer in self.observers:
            observer(kind, label)


def end_with(works: Sequence[Any], span: recording.Open) -> None:
    """End ``span`` when the last of ``works`` is over, in a thread of the backend."""
    left = len(works)
    if not left:
        span.end()

    def over(_: Any) -> None:
        nonlocal left
        left -= 1  # under the GIL; a thread of the backend's calls it, maybe several
        if left == 0:
            span.end()

    for work in works:
        work.get_future().add_done_callback(over)


def _alike(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _multiplied(total: Callable[[], Tensor], factor: float) -> Callable[[], Tensor]:
    return lambda: total().mul_(factor)
