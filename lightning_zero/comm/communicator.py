"""Runs collectives on whole buckets, in one order on all ranks, and counts them.

The engine asks for *logical* operations: ``all_gather``, ``reduce`` (a reduce-scatter or, with ``whole``, an all-reduce
that adds in the same order) and ``exchange_parts`` (for steps of whole tensors). A :class:`Transport` sends messages
for each.

Shards are divided among all ranks or among the ranks of a node (``planning/topology.py``). If among a node's ranks,
another message sums a reduced shard over the nodes. If among all ranks, gradients that an all-to-all exchanges can be
summed in two levels: in each node, then over nodes. Agreements always go over all ranks.

[Note: one order of collectives]
All ranks must issue the operations of one group in the same order. Gathers and reductions interleave, so gathers have
one group and reductions another. Where the host waits for messages, a rank issues the gather half of an all-reduce when
the rank finds the first half complete, at a moment that differs between ranks. So this half has a third group. Whether
and when a collective is issued may depend only on values that are equal on all ranks (a plan, an agreement, rank 0's
order), never on the progress of this rank's threads.

On CUDA each kind has a stream (``device/streams.py``). With ``async_op=False`` NCCL queues messages on the stream of
their kind; otherwise NCCL would use its own stream, with compute's priority. The host never waits. An operation
waits for all work queued earlier on the stream that issues the operation.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.agreements import collect_objects, gather_objects, gather_on, open_waits, together
from lightning_zero.comm.groups import GROUP_POOL, GroupKind, Groups, backend_for, even_alone
from lightning_zero.comm.reduction import Pending, Reduction
from lightning_zero.comm.transports import Members, Sent, all_gather_single, choose_transport
from lightning_zero.device import accelerator_of, recording
from lightning_zero.device.streams import Streams
from lightning_zero.planning.topology import Ranks, Topology, flat
from lightning_zero.ranks.progress import SILENT, LongWork
from lightning_zero.ranks.waits import Waits

ABANDON_S = 10.0  # seconds that messages in flight may take to arrive after an exception
_FIRST = "first messages"
T = TypeVar("T")


class Sends(NamedTuple):
    """Describes the messages that a pass sends for one bucket. A dtype is None if no message of that kind is sent."""

    numel: int
    gathered: torch.dtype | None  # of the gathered parameters
    reduced: torch.dtype | None  # of the summed gradients
    exchanged: torch.dtype | None  # of gradients that are sent by an all-to-all where the transport can
    sharded: bool  # each rank gets only its slice of the sum


class Communicator:
    """Runs the collectives of one engine over one group.

    Attributes:
        ranks: this rank's index in each group of ranks, and the divisor of gradients.
        shard, replicate: the group of ranks that share shards, and the group of ranks with the same shards.
        queues: whether messages are queued on streams of the device, so that the host waits for none.
    """

    _groups: Groups | None = None
    _transport: Any = None

    def __init__(
        self,
        group: Any,
        device: torch.device,
        *,
        stall_timeout_s: float = 300.0,
        ranks: Ranks | None = None,
        waits: Waits | None = None,
        long_work: LongWork = SILENT,
        beside: Communicator | None = None,
    ) -> None:
        """Take process groups from the pool of groups for reuse, or make new ones. Collective.

        Args:
            beside: a communicator of the same engine, whose streams and counts this one shares; see :meth:`with_ranks`.
            ranks: default: one node, shards divided among all ranks.
            waits: bounds this rank's waits for other ranks; None: make a :class:`Waits`.
            long_work: shows the user the progress of work that keeps ranks waiting for a long time.
        """
        self.device = device
        self._parent = group
        self.waits = waits if waits is not None else open_waits(group, device, stall_timeout_s)
        ranks = ranks if ranks is not None else Ranks.locate(self.waits.rank, flat(self.waits.world_size))
        self.rank, self.world_size, self.ranks = ranks.rank, ranks.world_size, ranks
        self.shard, self.replicate = ranks.shard, ranks.replicate
        self.waits.all_take_part = ranks.shard.size == ranks.world_size and not (ranks.node.size or ranks.sum.size)
        self.streams: Streams = beside.streams if beside is not None else Streams(accelerator_of(device))
        self._handle = partial(Pending, self.streams, self.waits)  # a handle of an operation
        self.queues = self.streams.are_there
        self.long_work = long_work
        # Logical operations by kind and bucket, and functions that are called with these when one is issued.
        self.counts: Counter[tuple[str, str]] = beside.counts if beside is not None else Counter()
        self.observers: list[Callable[[str, str], None]] = beside.observers if beside is not None else []
        self._beside: dict[Topology, Communicator] = {}
        self._units: list[tuple[Sends, ...]] = []
        self.even_alone = group is not None and even_alone()
        if self.world_size > 1 or self.even_alone:
            backend = backend_for(group, device)
            self._transport = choose_transport(backend, self.shard.size, device)
            self.queues = self.streams.are_there and not self._transport.waits_on_host
            self._kind = GroupKind(ranks.topology, backend, self.queues, self.even_alone, self.waits.stall_timeout_s)
            self._groups = GROUP_POOL.take_groups(group, self, ranks, self._kind, self.waits)

    def with_ranks(self, ranks: Ranks) -> Communicator:
        """Return the communicator for buckets whose shards are divided by the topology of ``ranks``; make one if there
        is none. Collective. Only its gathers and reductions differ: agreements and small messages go over all ranks."""
        if ranks.topology not in self._beside:
            self._beside[ranks.topology] = Communicator(
                self._parent, self.device, ranks=ranks, waits=self.waits, long_work=self.long_work, beside=self
            )
        return self._beside[ranks.topology]

    def connect(self, units: Iterable[Sequence[Sends]]) -> None:
        """Send one message of each kind that passes will send for ``units`` (the buckets of each unit), and drop the
        results. Collective. NCCL connects ranks at the first message of each group and algorithm, and the host waits
        meanwhile. In a pass this could hang, because other ranks may wait for another message of this rank."""
        self._units = [*dict.fromkeys(tuple(unit) for unit in units)]
        if self._groups is None or not self.queues:
            return
        number = torch.zeros(1, device=self.device)
        self.sum_(number)
        self.broadcast(number, among="gather")
        self.broadcast(number, among="reduce")
        if self.exchanges:  # each pair of ranks is connected at its first message
            ones = [1] * self.shard.size
            self.exchange_parts(self._zeros(self.shard.size, torch.uint8), ones, ones, _FIRST).wait()
        for unit in self._units:
            gathered = [(one.numel, one.gathered) for one in unit if one.gathered is not None]
            for of_node in (False, True) if self.ranks.node.size else (False,):
                if gathered:
                    fulls = [(self._zeros(*one), _FIRST) for one in gathered]
                    self.all_gather_together(fulls, of_node=of_node).wait()
            for one in unit:
                reduce = partial(self.reduce, label=_FIRST, whole=not one.sharded)
                if one.reduced is not None:
                    reduce(self._zeros(one.numel, one.reduced)).finish()
                if one.exchanged is not None and self.exchanges:
                    reduce(self._zeros(one.numel, one.exchanged), total_dtype=one.reduced).finish()
        self.streams.accelerator.release_cached()

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    @property
    def uses_group(self) -> Any:
        """Return the group of all ranks for [Note: uses by some ranks alone]; None if no other rank exists."""
        if self.world_size == 1 or dist.get_backend(self._parent) == "fake":
            return None
        return GROUP_POOL.parent(self._parent).uses

    @property
    def exchanges(self) -> bool:
        """Return whether reductions can use an all-to-all, whose messages can be narrower than the sum's dtype."""
        return self._groups is not None and self._groups.reduce is not None and self._transport.exchanges

    # -- logical operations -------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, label: str, *, of_node: bool = False) -> Pending:
        """Fill ``full`` [shard.size * n] in place with the slices [n] of all ranks that share shards. The caller has
        filled this rank's slice. Collective. ``of_node``: gather the slices of this node's ranks, [node.size * n]."""
        self._count("all_gather", label, full, of_node=of_node)
        return self._gather(full, label, "node_gather" if of_node else "gather")

    def all_gather_together(self, fulls: Sequence[tuple[Tensor, str]], *, of_node: bool = False) -> Pending:
        """Start :meth:`all_gather` of several (tensor, label) pairs, by one message if the device has streams. The
        result of the returned handle is the first tensor. Collective."""
        for full, label in fulls:
            self._count("all_gather", label, full, of_node=of_node)
        return self._gather(*fulls[0], "node_gather" if of_node else "gather", together=[full for full, _ in fulls])

    def reduce(
        self,
        full: Tensor,
        label: str,
        *,
        whole: bool = False,
        factor: float = 1.0,
        total_dtype: torch.dtype | None = None,
    ) -> Reduction:
        """Sum ``full`` [shard.size * n] over all ranks and multiply by ``factor``. Collective. Overwrites ``full``. The
        result of the returned handle is this rank's slice of the sum [n] or, with ``whole``, all of the sum, in the
        memory of ``full`` if dtypes are equal. With ``total_dtype``, an all-to-all (:attr:`exchanges`) sends slices in
        the dtype of ``full``, and each rank adds slices in ``total_dtype``, in an order that does not depend on dtypes.
        With streams this method also issues the messages that follow the sum over the ranks that share shards: a sum
        over nodes or replicas and, with ``whole``, a gather of all slices. The host does not wait for the first sum, so
        all ranks issue all messages in the order of reductions."""
        self._count("all_reduce" if whole else "reduce_scatter", label, full, total_dtype)
        in_levels = total_dtype is not None and self.ranks.sum.size > 0
        if self._groups is None:
            same = lambda: full if factor == 1.0 else full.mul_(factor)  # noqa: E731
            return Reduction(self._handle(label, [], same, kind="reduce"))
        with self.streams.on("reduce") as stream:
            span = recording.begin("reduce", label, on_host=not self.queues)
            works: list[Any] = []
            total: Callable[[], Tensor] = lambda: full  # noqa: E731
            if in_levels:
                works, total = self._sum_in_node(full, total_dtype)
            elif self._groups.reduce is not None:
                works, total = self._transport.reduce(
                    full, self._members("reduce"), in_place=whole, total_dtype=total_dtype
                )

            def finish() -> Tensor:
                shard = total() if factor == 1.0 else total().mul_(factor)
                # Without streams the next messages need a complete first sum. Issued now, the host would wait for it.
                return self._rest_in_stream(shard, full, in_levels, whole) if self.queues else shard

            # The reduce stream reads ``full``, which lies in compute's pool. Freed now, compute would overwrite it.
            # :meth:`Pending.wait` frees it.
            first = self._pending("reduce", label, works, finish, stream, span, keep=full)
        if self.queues:
            return Reduction(first)
        later: list[Callable[[Tensor], Pending]] = []
        if in_levels:
            later.append(lambda sums: self._handle(label, *self._sum_nodes(sums), kind="reduce"))
        if self._groups.replicate is not None:
            later.append(partial(self._sum_replicas, label))
        if whole:  # the sum is complete then, so nothing reads the old contents of ``full`` any more
            later.append(lambda shard: self._gather(self._spread(shard, full), label, "second_half"))
        return Reduction(first, *later)

    def _spread(self, shard: Tensor, full: Tensor) -> Tensor:
        """Copy ``shard`` to this rank's slice of ``full``, or of a new buffer if dtypes differ. Return the buffer."""
        if shard.dtype != full.dtype:
            full = torch.empty_like(full, dtype=shard.dtype)
        own = full.view(self.shard.size, -1)[self.shard.index]
        if own.untyped_storage()._cdata != shard.untyped_storage()._cdata:  # else the sum was written there
            own.copy_(shard)
        return full

    def exchange_parts(self, data: Tensor, sizes: Sequence[int], out_sizes: Sequence[int], label: str) -> Pending:
        """Send a part of ``data`` [bytes] to each rank that shares shards. The result of the returned handle is the
        bytes received, in rank order. ``sizes``: bytes sent to each rank. ``out_sizes``: bytes received from each rank.
        All ranks must issue exchanges and reductions in the same order. Collective."""
        assert self._groups is not None and self._groups.reduce is not None, "there is nobody else"
        out = torch.empty(sum(out_sizes), dtype=torch.uint8, device=data.device)
        self.counts["all_to_all", label] += 1
        self.waits.asked[label] += 1
        recording.moved("reduce", out.nbytes - out_sizes[self.shard.index])
        self._note("all_to_all", label)
        with self.streams.on("reduce") as stream:
            span = recording.begin("reduce", label, on_host=not self.queues)
            sent = self._transport.exchange(out, data, out_sizes, sizes, self._groups.reduce)
            return self._pending("reduce", label, sent.works, sent.finish, stream, span, keep=data)

    @contextlib.contextmanager
    def set_place(self, place: str) -> Iterator[None]:
        """Context manager that sets ``waits.place``, for error messages, to ``place``. It stays set after an error."""
        before, self.waits.place = self.waits.place, place
        yield
        self.waits.place = before

    def resume(self, what: str = "going on after an exception") -> None:
        """Replace the process groups after an exception if ranks have issued different operations on the groups.
        Blocks. Collective. See [Note: what resume may trust] in ``groups.py``."""
        if self._groups is not None:
            self.gather_checked(None, what)
            for comm in (self, *self._beside.values()):
                comm._renew_groups()
        self.waits.asked.clear()  # some ranks may have asked for more

    def _renew_groups(self) -> None:
        before = self._groups
        assert before is not None
        before.user = lambda: None
        self._groups = GROUP_POOL.take_groups(self._parent, self, self.ranks, self._kind, self.waits)
        if self._groups is not before:
            self.connect(self._units)

    def close(self) -> None:
        self.waits.close()
        for comm in (self, *self._beside.values()):
            if comm._groups is not None:
                comm._groups.user = lambda: None
                comm._groups = None

    # -- small messages, for which the host waits ---------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int = 0, *, among: Literal["gather", "reduce"] = "gather") -> None:
        """Overwrite ``tensor`` on all ranks with that of rank ``src``, sent to one rank of each replica and from there
        to the replica's other ranks. Blocks. Collective. ``among``: send over the group of gathers or of reductions.
        Use ``reduce`` while updated parameters may be gathered: ranks issue those gathers at different moments."""
        if self._groups is None:
            return
        host = self._transport.waits_on_host
        data = (tensor.cpu() if host else tensor).contiguous()
        flat_bytes = data.view(-1).view(torch.uint8)  # backends do not support every integer type
        replica, place = self.ranks.topology.place_of(src)
        replicas = self._groups.replicate if self.shard.index == place else None
        for group, root, kind in ((replicas, replica, "reduce"), (getattr(self._groups, among), place, among)):
            if group is not None:
                send = partial(dist.broadcast, flat_bytes, group_src=root, group=group)
                self._run(send, flat_bytes, kind, "values of rank 0")
        if data is not tensor:
            tensor.copy_(data)

    def _run(self, send: Callable[..., Any], tensor: Tensor, kind: str, label: str) -> None:
        """Call ``send`` on the stream of ``kind`` and wait until ``tensor`` has arrived: the host waits if ``tensor``
        is in host memory, else the current stream waits."""
        if tensor.device.type == "cpu":
            self._agree(send(async_op=True), label)
            return
        with self.streams.on(kind):
            send(async_op=False)
            event = self.streams.mark()
        self.streams.wait(event)

    def all_gather_objects(self, value: Any, what: str) -> list[Any]:
        """Gather a small object from each rank, in rank order. Blocks. Collective. ``what``: the purpose, in words."""
        if self._groups is None:
            return [value]
        with self._noting_exceptions():
            return gather_on(self._groups.control, value, self.waits, what)

    def gather_checked(self, value: Any, what: str, *, patient: bool = False) -> list[Any]:
        """Gather a small object from each rank, in rank order, over the agreement group, which also works after
        exceptions. Blocks. Collective. ``what``, ``patient``: see :func:`gather_objects`."""
        return gather_objects(self._parent, value, self.waits, what, patient=patient)

    def collect(self, value: Any, what: str) -> list[Any] | None:
        """Gather on rank 0 an object of any size from each rank, in rank order. Other ranks get None. Blocks.
        Collective. ``what``: the purpose, in words."""
        if self.world_size == 1:
            return [value]
        return collect_objects(self._parent, value, self.waits, what)

    def together(
        self, what: str, act: Callable[[], T], undo: Callable[[T], Any] = lambda _: None, *, patient: bool = False
    ) -> T:
        """Run ``act`` and return its result; see :func:`together`. If it fails on one rank, all raise. Collective."""
        return together(self._parent, self.waits, what, act, undo, patient=patient)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor over all ranks, in place, and return the tensor. Blocks. Collective."""
        return self._small(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Take the maximum of each element over all ranks, in place, and return the tensor. Blocks. Collective."""
        return self._small(tensor, dist.ReduceOp.MAX)

    def exchange(self, *values: int) -> list[list[int]]:
        """Return, for each argument, a list of all ranks' values in rank order. Blocks. Collective."""
        if self._groups is None:
            return [[value] for value in values]
        self._note("exchange", str(values[0]))
        own = torch.tensor(values, dtype=torch.int64)
        table = torch.empty(self.world_size * len(values), dtype=torch.int64)
        work = all_gather_single(table, own, group=self._groups.control, async_op=True)
        self._agree(work, "the agreement on the next gather")
        return table.view(self.world_size, -1).t().tolist()  # type: ignore[no-any-return]

    # -- messages -----------------------------------------------------------------------------------------------

    def _gather(self, full: Tensor, label: str, group: str, *, together: Sequence[Tensor] | None = None) -> Pending:
        """Issue the gather of ``full`` over the process group in field ``group`` of :class:`Groups`, and return its
        handle. ``together``: all tensors to gather in one operation, ``full`` first."""
        if self._groups is None or self._groups.gather is None:
            # The current stream may still be copying the bytes.
            return self._handle(label, [], lambda: full, kind="transfer", event=self.streams.mark())
        # Counted apart from its all-reduce: see [Note: what resume may trust].
        self._groups.issued["second_half"] += group == "second_half"
        kind = "reduce" if group == "second_half" else "gather"
        with self.streams.on("gather") as stream:
            span = recording.begin(kind, label, on_host=not self.queues)
            among = self._members(group)
            sent = self._transport.gather_all(together, among) if together else self._transport.gather(full, among)
            return self._pending(kind, label, sent.works, sent.finish, stream, span)

    def _members(self, group: str) -> Members:
        of_node = {"node_gather": self.ranks.node, "node_sum": self.ranks.sum, "across": self.ranks.across}
        ranks = of_node.get(group, self.shard)
        return Members(ranks.index, ranks.size, getattr(self._groups, group))

    def _sum_in_node(self, full: Tensor, total_dtype: torch.dtype | None) -> Sent:
        """Issue the first level of a sum in two levels: sum ``full`` over the ranks of this node that share shards, by
        one message for each node's slices. The result [nodes * n] has, per node, this node's sum of a slice [n]."""
        slices, among = full.chunk(self.ranks.across.size), self._members("node_sum")
        send = partial(self._transport.reduce, total_dtype=total_dtype)
        if self.queues:  # sum at once, so that the next message is received in the same memory
            sums = torch.cat([self._finish_in_stream(send(of_node, among)) for of_node in slices])
            return Sent([], lambda: sums)
        sent = [send(of_node, among) for of_node in slices]
        return Sent([work for one in sent for work in one.works], lambda: torch.cat([one.finish() for one in sent]))

    def _sum_nodes(self, sums: Tensor) -> Sent:
        """Issue the second level of a sum in two levels: add ``sums`` [nodes * n], from :meth:`_sum_in_node`, over
        nodes. The result is this rank's slice [n] of the complete sum."""
        assert self._groups is not None
        self._groups.issued["across"] += 1
        return self._transport.reduce(sums, self._members("across"), total_dtype=sums.dtype)

    def _rest_in_stream(self, shard: Tensor, full: Tensor, in_levels: bool, whole: bool) -> Tensor:
        """Queue the messages that follow the first sum, whose result is ``shard``: the sum over nodes or replicas and,
        if ``whole``, the gather of all slices. Return this rank's slice of the sum or, if ``whole``, all slices."""
        assert self._groups is not None
        if in_levels:
            shard = self._finish_in_stream(self._sum_nodes(shard))
        if self._groups.replicate is not None:
            self._issue_sum(shard, async_op=False)
        if not whole:
            return shard
        # On the reductions' group: each reduction issues all of its messages together.
        if self._groups.reduce is not None:
            full = self._spread(shard, full)
            self._wait_in_stream(self._transport.gather(full, self._members("reduce")).works)
        return full

    def _finish_in_stream(self, sent: Sent) -> Tensor:
        self._wait_in_stream(sent.works)
        return sent.finish()

    @staticmethod
    def _wait_in_stream(works: list[Any]) -> None:
        """Make the current stream wait for messages that the backend has not queued on it."""
        for work in works:
            work.wait()

    def _sum_replicas(self, label: str, shard: Tensor) -> Pending:
        data = shard.cpu()  # no copy if on the host
        return self._handle(label, [self._issue_sum(data)], lambda: data.to(shard.device), kind="reduce")

    def _issue_sum(self, shard: Tensor, *, async_op: bool = True) -> Any:
        assert self._groups is not None
        self._groups.issued["replicate"] += 1
        recording.moved("reduce", 2 * (shard.nbytes - shard.nbytes // self.replicate.size))
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
        """Return a handle of the messages ``works``. On CUDA, the current stream must be ``stream``, on which the
        messages were queued. ``finish``, ``keep``: see :class:`Pending`."""
        if stream is None or not self.queues:
            if span is not None:
                end_with(works, span)
            return self._handle(label, works, finish, kind=kind, keep=keep)
        self._wait_in_stream(works)
        # Last: whoever waits for the event must also wait for what ``finish`` has queued.
        result = finish()
        if span is not None:
            span.end()
        return self._handle(label, [], lambda: result, kind=kind, event=self.streams.mark(), keep=keep)

    # -- waiting, counting ----------------------------------------------------------------------------------------

    def _small(self, tensor: Tensor, op: Any) -> Tensor:
        if self._groups is None:
            return tensor
        host = tensor.device.type == "cpu"
        self._note("control", str(op), issued="control" if host else "control on the device")
        if not host and self._transport.waits_on_host:
            return tensor.copy_(self._small(tensor.cpu(), op))
        if host:
            for group in self._groups.rounds:
                # Each rank sends to all others at once: one hop, where the ring of an all-reduce takes many.
                found = tensor.expand(group.size(), *tensor.shape).contiguous()
                work = dist.all_to_all_single(found, found.clone(), group=group, async_op=True)
                self._agree(work, "a small reduction")
                tensor.copy_(found.amax(0) if op == dist.ReduceOp.MAX else found.sum(0))
            return tensor
        # On a device use the queue of the reductions, never that of the gathers: [Note: one order of collectives].
        for group in (self._groups.reduce, self._groups.replicate):
            if group is not None:
                self._run(partial(dist.all_reduce, tensor, op=op, group=group), tensor, "reduce", "a small reduction")
        return tensor

    def _agree(self, work: Any, label: str) -> None:
        with recording.waiting("agree", label, on_host=True), self._noting_exceptions():
            self.waits.wait_work(work, label)

    @contextlib.contextmanager
    def _noting_exceptions(self) -> Iterator[None]:
        """If the body raises, make this rank's operation counts differ from those of all other ranks, so that
        :meth:`resume` replaces the process groups. See [Note: what resume may trust] in ``groups.py``."""
        try:
            yield
        except BaseException:
            if self._groups is not None:
                self._groups.issued["control"] += (1 + self.rank) << 20
            raise

    def _count(
        self, kind: str, label: str, full: Tensor, total_dtype: torch.dtype | None = None, *, of_node: bool = False
    ) -> None:
        if self._groups is not None:
            self.counts[kind, label] += 1
            self.waits.asked[label] += 1
            # Bytes that one rank receives: every slice but its own, once for each half.
            others = full.numel() - full.numel() // (self.ranks.node if of_node else self.shard).size
            if kind != "all_gather":
                recording.moved("reduce", self._summed_nbytes(full, total_dtype))
            if kind != "reduce_scatter":
                itemsize = (total_dtype or full.dtype).itemsize
                recording.moved("gather" if kind == "all_gather" else "reduce", others * itemsize)
            self._note(kind, label, issued="node_gather" if of_node else kind)

    def _summed_nbytes(self, full: Tensor, total_dtype: torch.dtype | None) -> int:
        """Return the bytes that this rank receives for its slice of a sum, without messages between replicas."""
        if total_dtype is None or not self.ranks.sum.size:
            return full.nbytes - full.nbytes // self.shard.size
        column = full.numel() // self.ranks.sum.size
        across = column - full.numel() // self.shard.size
        return (full.numel() - column) * full.itemsize + across * total_dtype.itemsize

    def _note(self, kind: str, label: str, *, issued: str | None = None) -> None:
        if self._groups is not None:
            self._groups.issued[issued or kind] += 1
            self.waits.issued += 1
        for observer in self.observers:
            observer(kind, label)


def end_with(works: Sequence[Any], span: recording.Open) -> None:
    """Let a thread of the backend end the recorded ``span`` when all messages ``works`` have ended."""
    left = len(works)
    if not left:
        span.end()

    def over(_: Any) -> None:
        nonlocal left
        left -= 1  # under the GIL: several threads of the backend may call this
        if left == 0:
            span.end()

    for work in works:
        work.get_future().add_done_callback(over)
