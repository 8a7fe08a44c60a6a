"""A bucket: parameters that share one flat buffer, with the memory of their masters, gradient and compute parameters.

::

    full         compute_param  [numel]        memory while gathered; parameters are views of it
    storage      master_param   [owned numel]  with the optimizer state: master_storage.py
    param_store  compute_param  [owned numel]  between uses: param_store.py
    grad_store   grad           [owned numel]  from a backward until gradients are cleared: grad_store.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _unsafe_set_version_counter
from torch.autograd.graph import increment_version

from lightning_zero.comm.communicator import Communicator, Sends
from lightning_zero.comm.reduction import Pending
from lightning_zero.device import recording
from lightning_zero.device.accelerator import Event
from lightning_zero.engine.units.grad_store import GradStore, OnHost
from lightning_zero.engine.units.master_storage import MasterStorage, ResidentStorage, Tiers, make_storage, opened
from lightning_zero.engine.units.param import ParamInfo, set_values, values_changed
from lightning_zero.engine.units.param_store import (
    DeviceShard,
    FileShard,
    FlatBuffer,
    FullCopy,
    FullIsMaster,
    InMasterStorage,
    NodeShard,
    ParamStore,
    placeholders,
)
from lightning_zero.planning.buckets import BucketPlan, ParamsRest
from lightning_zero.planning.layout import Fragment
from lightning_zero.planning.placement import Tier
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.settings import StateDtype


class AwaitedStep:
    """Tracks whether a bucket's offloaded step has ended. See [Note: masters during an offloaded step]."""

    def __init__(self) -> None:
        self.event: Event = None
        self.future: Future[None] | None = None  # of the submitted step; on all ranks or on none

    def announce(self, event: Event) -> Future[None]:
        """Record that the bucket's step is queued. Return a future that the thread which runs the step must complete.
        `event`: the step writes to the device only after this event."""
        self.event = event
        self.future = Future()
        return self.future

    @property
    def is_done(self) -> bool:
        return self.future is None or self.future.done()

    @property
    def has_failed(self) -> bool:
        return self.future is not None and self.future.done() and self.future.exception() is not None

    def wait(self) -> None:
        """Wait for the bucket's queued step, if any. If it has failed, raise its error in this call and later ones."""
        if self.future is not None:
            # The future of a failed step stays, so that later waits raise too: masters are half stepped.
            waits = not self.future.done()
            with recording.waiting("step", "offloaded step", on_host=True) if waits else _AT_ONCE:
                self.future.result()
            self.future = self.event = None


_AT_ONCE = contextlib.nullcontext()


class Dtypes(NamedTuple):
    """The dtypes of a bucket's compute parameters, masters, gradients and optimizer state. Ranks send gradients in
    `wire`, sum them in `reduce` and hold the sum in `grad`. `wire` is `reduce`, or `compute` where that loses no bit.
    With `exchanged`, ranks send gradients by an all-to-all, and each rank adds up what it receives."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    wire: torch.dtype
    exchanged: bool = False
    state: StateDtype = StateDtype.fp32


class Shown(Enum):
    """Which values the parameters of a bucket (their `.data`) have at present.

    ::

        PLACEHOLDERS, GATHERED    set by show()
        MASTERS, PLAIN            set by show_whole(), until hide_whole()
    """

    PLACEHOLDERS = "the values are on their way, or dropped"
    GATHERED = "views of the full buffer"
    MASTERS = "whole masters, between steps"
    PLAIN = "whole masters in plain parameters, inside gather() and between runs"


class GradFragment(NamedTuple):
    offset: int  # of the first element, in the parameter
    values: Tensor


@dataclass(eq=False, repr=False)
class Bucket:
    """Holds parameters of one dtype in one flat buffer, with their masters, optimizer state and reduced gradient.

    Attributes:
        full: compute_param [layout.numel] in compute_dtype, which has memory only while the bucket is gathered.
        owned_range: Elements whose master_param and optimizer state this rank holds.
    """

    label: str
    params: list[ParamInfo]
    plan: BucketPlan  # changes when a frozen bucket becomes trainable and when the module is restaged
    dtypes: Dtypes
    comm: Communicator
    _tiers: Tiers
    storage: MasterStorage = field(init=False)  # of the owned range; a view of `full` where `plan` says so
    grad_store: GradStore = field(init=False)
    param_store: ParamStore = field(init=False)

    def __post_init__(self) -> None:
        plan, dtypes, comm = self.plan, self.dtypes, self.comm
        self.awaited_step = AwaitedStep()
        self.shown = Shown.GATHERED
        self.assigned: dict[int, Tensor] = {}  # slot -> values that users' code has assigned in the open pass
        self._gathered = True  # the last argument of `show`, to which `hide_whole` returns
        self.hides_rounded = False  # between steps: a use of the gathered values, which are rounded, needs masters
        self._copied: Event = None  # event after the last copy that an offloaded step made to the device
        self.layout = plan.layout
        self.node_shard = NodeShard(plan.layout.numel, comm.ranks.node)
        self.gaps = self.layout.gaps()
        self._tensors = tuple(info.param for info in self.params)
        self._placeholders: list[Tensor] = []
        self.owned_range = plan.owned_range(comm.shard.index)
        self.full = FlatBuffer(self.layout.numel, dtypes.compute, comm.device)
        self._make_views()

    def _make_views(self) -> None:
        # Made while the buffer has memory. See [Note: freed storage and autograd's views].
        low, high = self.owned_range
        self._own_part = self.full.data[low:high]  # [owned numel]
        self._views = [self.part_of(self.full.data, info) for info in self.params]
        for info, view in zip(self.params, self._views, strict=True):
            info.gathered = view

    @property
    def sends(self) -> Sends:
        gathered = self.dtypes.compute if self.plan.reshards or self.plan.gathers_after_step else None
        reduced = self.dtypes.reduce if self.plan.trainable else None
        exchanged = self.dtypes.wire if self.plan.trainable and self.dtypes.exchanged else None
        return Sends(self.layout.numel, gathered, reduced, exchanged, self.plan.shards_master)

    # -- ranges ---------------------------------------------------------------------------------------------------

    def owned_fragments(self) -> list[Fragment]:
        return list(self.layout.cut(*self.owned_range))

    def part_of(self, full: Tensor, info: ParamInfo) -> Tensor:
        """Return a view of the parameter's elements in `full` [layout.numel], in the parameter's shape."""
        start = self.layout.slots[info.slot].start
        return full.as_strided(info.shape, info.strides, full.storage_offset() + start)

    @property
    def own_shard_of_owned(self) -> slice:
        """Return this rank's shard as a slice of its owned range: the whole range or, if masters are replicated, a
        part. Shards of the ranks that share shards are disjoint, and together they are the whole bucket."""
        low, high = self.layout.shard_range(self.comm.shard.index)
        base = self.owned_range[0]
        return slice(low - base, high - base)

    # -- values at rest -------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Tensor | None:
        """Return the reduced gradient [owned numel] in grad_dtype, or None. Wait for a copy to the host in flight."""
        return self.grad_store.value

    def grad_fragment(self, slot: int) -> GradFragment | None:
        """Return this rank's elements of the reduced gradient of the parameter at index `slot` in the bucket. Return
        None if this rank owns no element of the parameter or the bucket has no gradient."""
        place, (low, high) = self.layout.slots[slot], self.owned_range
        first, last = max(low, place.start), min(high, place.start + place.numel)
        if first >= last or (grad := self.grad) is None:
            return None
        return GradFragment(first - place.start, grad[first - low : last - low])

    @property
    def master(self) -> Tensor:
        """Return the masters [owned numel]. Masters in files are readable only while the storage is open."""
        return self.storage.master

    def share(self, values: Tensor) -> None:
        """If the bucket stays gathered, fill its full buffer with all ranks' `values` [owned numel]. Collective."""
        if not self.plan.reshards:
            self._own_part.copy_(values)
            if self.plan.shards_master:
                self.comm.all_gather(self.full.data, f"{self.label} (first values)").wait()

    def fill(self, values: Tensor) -> None:
        """Make the master storage, the gradient store and the parameter store. `values` [owned numel]: the masters. The
        storage may use the memory of `values`."""
        self.comm.streams.change()
        self._make_storage(values, taken=True)
        self._make_grad_store()
        self._make_param_store(values)

    def _make_storage(self, values: Tensor, *, taken: bool = False) -> None:
        plan, dtype = self.plan, self.dtypes.master if self.plan.trainable else self.dtypes.compute
        if plan.copies_master:
            storage = make_storage(plan.storage_tier, self._tiers, self.label, values, dtype, taken=taken)
            self.storage = storage  # set when the copy into the storage is complete
        else:
            self.storage = ResidentStorage(self._own_part, is_exposed=True)

    def _make_param_store(self, values: Tensor) -> None:
        """Make the store named by `plan.params_rest`. `values` [owned numel]: this rank's parameters, in any dtype."""
        own, dtype, tiers = self._own_part, self.dtypes.compute, self._tiers
        match self.plan.params_rest:
            case ParamsRest.full_is_master:
                self.param_store = FullIsMaster(self.storage)
            case ParamsRest.full:
                self.param_store = FullCopy(self.storage, own, self._send)
            case ParamsRest.storage:
                self.param_store = InMasterStorage(self.storage)
            case ParamsRest.shard if self.plan.tiers.compute_param is Tier.nvme:
                on_host = values.to("cpu", dtype)
                self.param_store = FileShard(tiers, self.storage, self.comm.streams, self.label, on_host)
            case ParamsRest.shard:
                self.param_store = DeviceShard(values.to(own.device, dtype, copy=True), self._send)

    def _make_grad_store(self) -> None:
        plan, tiers, dtype = self.plan, self._tiers, self.dtypes.grad
        if plan.trainable and plan.grads_on_host:
            assert tiers.host is not None and tiers.landing is not None
            assert plan.shards_master, "else norms taken before the copy would count elements that other ranks count"
            self.grad_store = OnHost(tiers.host, self.label, plan.owned_numel, dtype, tiers.landing)
        else:
            self.grad_store = GradStore(dtype, self.comm.streams)

    def make_trainable(self) -> None:
        before, self.plan = self.plan, replace(self.plan, trainable=True)
        # Whether parameters and masters stay in the same buffers, tier and dtypes.
        old, new = ((plan.params_rest, plan.storage_tier, plan.storage_itemsize) for plan in (before, self.plan))
        if old == new:
            self._make_grad_store()
            return
        # A clone: the old storage's memory is freed before the new storage takes memory.
        with opened(self.storage) as master:
            values = master.clone()
        self.storage.free()
        self.fill(values)

    def is_on(self, tier: Tier, tiers: Tiers) -> bool:
        return tier is Tier.device or getattr(self._tiers, tier.name) is getattr(tiers, tier.name)

    def rest_as(
        self,
        plan: BucketPlan,
        tiers: Tiers,
        values: Tensor,
        *,
        keeps_storage: bool,
        grad: Tensor | None,
        keeps_grad: bool,
    ) -> None:
        """Move the bucket to `plan`, which has the same layout, in a restage. Sends no message. Then call
        :meth:`show_at_rest`.

        The old storage must be open. The caller frees the old storage afterwards, and moves the optimizer state.

        Args:
            values: Masters of the range that this rank owns under `plan`.
            keeps_storage, keeps_grad: Whether the present storage, and gradient store, stay in use under `plan`.
            grad: The reduced gradient of the range that this rank owns under `plan`, or None.
        """
        self._tiers = tiers
        if self.plan.reshards and not plan.reshards:
            self.full.allocate()
        range_before = self.owned_range
        self.plan, self.owned_range = plan, plan.owned_range(self.comm.shard.index)
        if self.owned_range != range_before:  # the buffer has memory: one of the two plans does not reshard
            self._own_part = self.full.data[slice(*self.owned_range)]
        self.comm.streams.change()
        self._copied = None
        if not keeps_storage:
            self._make_storage(values.to(self.comm.device) if plan.storage_tier is Tier.device else values)
        self.param_store.free()  # first: the new store may take its place on the tier
        self._make_param_store(values)
        if not keeps_grad:
            before = self.grad_store
            self._make_grad_store()
            if grad is not None:
                self.grad_store.add(grad.to(self.comm.device))
            before.free()

    def show_at_rest(self, values: Tensor, *, came_whole: bool) -> None:
        """After :meth:`rest_as` with the same `values`, point the parameters at gathered values or placeholders.
        Collective. `came_whole`: the full buffer had all compute parameters already before `rest_as`, so that no
        gather is needed."""
        if not self.plan.reshards and not came_whole:
            self.share(values)
        self.show(gathered=not self.plan.reshards)
        if self.plan.reshards:
            self.full.release()

    def copy_master_to_params(self) -> None:
        """After masters have changed, update this rank's part of the compute parameters. The storage must be open."""
        self.param_store.update(self.storage.master)
        if not self.plan.steps_on_host:  # copies of a step on the host have an event of their own, `_copied`
            self.comm.streams.change()

    def _send(self, target: Tensor) -> None:
        """Copy and cast the masters to `target` [owned numel] on the device, after the kernels that read `target`."""
        if not self.plan.steps_on_host:
            self.storage.copy_to(target)
            return
        # The step's thread runs this while the main thread queues the next forward. So the copy waits only for the
        # event of when the step was asked for, and uses its own stream: gathers of other buckets, which may be needed
        # sooner, would queue behind it.
        streams = self.comm.streams
        with (
            streams.on("push", after=self.awaited_step.event),
            self._moves("h2d", target.numel() * self.plan.sent_itemsize),
        ):
            self.storage.copy_to(target)
            self._copied = streams.mark()
        self.storage.read_until(self._copied)

    @contextlib.contextmanager
    def _moves(self, lane: str, nbytes: int) -> Iterator[None]:
        """Context manager that records its body as a copy of `nbytes` between tiers on the timeline's `lane` and,
        without streams, also as a wait of the host."""
        recording.moved(lane, nbytes)
        waits = not self.comm.streams.are_there
        with recording.span(lane, self.label), recording.waiting("transfer", self.label) if waits else _AT_ONCE:
            yield

    def own_compute_params(self) -> Tensor:
        own = torch.empty(self.plan.owned_numel, dtype=self.dtypes.compute, device=self.comm.device)
        with self._transfers(into_free_memory=False):
            self.param_store.read(own)
            event = self.comm.streams.mark()
        self.comm.streams.wait(event)
        self.storage.read_until(event)
        return own

    @contextlib.contextmanager
    def _transfers(self, *, into_free_memory: bool) -> Iterator[None]:
        """Context manager that runs its body on the host-to-device stream, after the copies of the last offloaded step
        and, unless `into_free_memory`, after all work queued on the current stream."""
        streams = self.comm.streams
        with streams.on_free_memory("h2d") if into_free_memory else streams.on("h2d"):
            streams.wait(self._copied)
            yield

    def write_master(self, info: ParamInfo, value: Tensor, *, before: Tensor | None = None) -> None:
        """Write this rank's elements of `value`, a whole parameter, to the masters and to the slice kept for the node.
        `before` [owned numel]: this rank's compute parameters before the write. Masters do not change where `value`
        equals `before`, because `before` has rounded values, which are less precise."""
        self.node_shard.write(info, self.layout.slots[info.slot].start, value)
        with opened(self.storage, changed=True) as master:
            for fragment in self.owned_fragments():
                if fragment.index != info.slot:
                    continue
                own = slice(fragment.start, fragment.start + fragment.numel)
                if before is None:
                    info.copy_part(value, fragment.offset, master[own])
                    continue
                new = info.flattened(value)[fragment.offset : fragment.offset + fragment.numel].to(master.device)
                same = new == before[own].to(master.device)
                master[own].copy_(torch.where(same, master[own], new.to(master.dtype)))

    def write(self, info: ParamInfo, value: Tensor) -> None:
        """Write `value`, a whole parameter: this rank's elements to the masters and, if the bucket stays gathered, all
        elements to `full`."""
        self.write_master(info, value.detach())
        if not self.plan.reshards and not isinstance(value, StoredTensor):  # else the next gather brings the value
            assert info.gathered is not None
            info.gathered.copy_(value.detach().reshape(info.shape))
        values_changed([info])

    def write_whole(self, full: Tensor, *, masters: bool = True) -> None:
        """Write the masters `full` [layout.numel], which are equal on all ranks, to the master storage, the compute
        parameters and the slice kept for the node. `masters`: False if the storage has these values already."""
        if masters:
            with opened(self.storage, changed=True) as master:
                master.copy_(full[slice(*self.owned_range)])
                if self.plan.reshards:
                    self.copy_master_to_params()
        # Update the compute parameters completely: no gather follows that would bring the other ranks' slices.
        if not self.plan.reshards or self.full.allocated:
            self.full.data.copy_(full)
        self.node_shard.update(full)

    # -- gathered values ------------------------------------------------------------------------------------------

    def gather_begin(self, *, of_node: bool = False) -> Pending:
        """Issue the gather of compute parameters from the shards or, with `of_node`, from the slices that this node's
        ranks keep. Collective. On a GPU, call this only for shards on the host; otherwise :func:`gather_together`."""
        if of_node:
            data, label = self.prepare_gather(of_node=True)
            return self.comm.all_gather(data, label, of_node=True)
        self.awaited_step.wait()  # see [Note: masters during an offloaded step]
        with self.comm.streams.pool_of("gather"):
            self.full.allocate()
        if not self.plan.gathers_from_host:
            self.param_store.prepare(self._own_part)
            return self.comm.all_gather(self.full.data, self.label)
        # Issued from the host-to-device stream, the gather waits for the copies of the last step and of `prepare`. From
        # the compute stream it would send the shard before these copies have arrived.
        with recording.profiled("transfer", self.label), self._transfers(into_free_memory=self.plan.reshards):
            with self._moves("h2d", self.plan.brought_to_gather):
                self.param_store.prepare(self._own_part)
            self.storage.read_until(self.comm.streams.mark())
            return self.comm.all_gather(self.full.data, self.label)

    def prepare_gather(self, *, of_node: bool = False) -> tuple[Tensor, str]:
        """Allocate the full buffer and fill this rank's slice, on the current (gather) stream. Return the buffer and
        the label. `of_node`: fill from the slice kept for the node."""
        self.awaited_step.wait()
        self.full.allocate()
        if of_node:
            self.node_shard.copy_to(self.full.data)
        else:
            self.param_store.prepare(self._own_part)
        return self.full.data, self.label

    def leave_memory(self) -> None:
        """Give the full buffer new memory, because an abandoned gather may still write to the old memory."""
        # A wait for the gather could hang: a gather that only some ranks have issued never ends (`resume`).
        assert self.plan.reshards and not self._gathered
        with torch.inference_mode(False):
            self.full.data = torch.empty_like(self.full.data)
        self._make_views()

    def full_master(self) -> Tensor:
        """Gather the masters of the whole bucket. Return a new tensor [layout.numel] on the device. Collective."""
        with opened(self.storage) as master:
            return self.gathered([(0, master)], master.dtype, "values")

    def gathered(self, own: Iterable[tuple[int, Tensor]], dtype: torch.dtype, what: str) -> Tensor:
        """Gather values of all ranks into a new tensor [layout.numel] of `dtype` on the device. Blocks. Collective.
        `own`: pairs (start in the owned range, values) of this rank. Elements for which no rank has values are zero.
        `what`: names the values in the label of the message."""
        low, _ = self.owned_range
        full = torch.zeros(self.layout.numel, dtype=dtype, device=self.comm.device)
        for start, values in own:
            full[low + start : low + start + values.numel()].copy_(values)
        if self.plan.shards_master:
            self.comm.all_gather(full, f"{self.label} ({what})").wait()
        return full

    def show(self, gathered: bool) -> None:
        """Point the parameters at gathered values or placeholders. While the parameters show whole masters, which may
        have users' writes, only record `gathered` for :meth:`hide_whole`."""
        self._gathered = gathered
        if self.shown is Shown.MASTERS or self.shown is Shown.PLAIN:
            return
        if gathered:
            self._enter(Shown.GATHERED)
            values = [*(dict(enumerate(self._views)) | self.assigned).values()] if self.assigned else self._views
            set_values(self.params, values, "absent" if self.hides_rounded else "present")
            return
        if not self._placeholders:
            shapes = [info.shape for info in self.params]
            self._placeholders = placeholders(shapes, self.dtypes.compute, self.comm.device)
        self._enter(Shown.PLACEHOLDERS)
        set_values(self.params, self._placeholders, "absent")

    def show_whole(self, shown: Shown, values: Iterable[Tensor]) -> None:
        """Point each parameter at its tensor in `values`, until :meth:`hide_whole`. `shown`: MASTERS or PLAIN."""
        self._enter(shown)
        set_values(self.params, values, "plain" if shown is Shown.PLAIN else "present")

    def hide_whole(self) -> None:
        self.shown = Shown.GATHERED  # values are present, so `show` raises versions if placeholders follow
        self.show(self._gathered)

    def _enter(self, shown: Shown) -> None:
        """Set `self.shown`. Increment the parameters' versions when placeholders replace values, and reset the versions
        when values return. See [Note: version counters]."""
        before, self.shown = self.shown, shown
        # Raising twice would leave another version than the graph has saved.
        if shown is Shown.PLACEHOLDERS and before is not shown:
            increment_version(self._tensors)
        elif before is Shown.PLACEHOLDERS and shown is not before:
            _unsafe_set_version_counter(self._tensors, tuple([info.version for info in self.params]))

    @property
    def rounds(self) -> bool:
        """Return whether the parameters stay gathered between uses and are in another dtype than their masters."""
        return not self.plan.reshards and self.dtypes.compute != self.dtypes.master

    def hide_rounded(self, hides: bool) -> None:
        self.hides_rounded = hides
        self.show(self._gathered)


def gather_together(buckets: Sequence[Bucket], *, of_node: bool = False) -> Pending:
    """Issue the gathers of several buckets as one message, on a device with streams. Collective. The buckets must have
    the same communicator, and all or none of them must reshard. `of_node`: gather the slices kept for the node."""
    comm = buckets[0].comm
    # Buckets that reshard: message and casts wait only for the last use of free memory and the last change of values,
    # and run beside compute. Other buckets' values are in use until the current stream has replaced this rank's slice.
    waits = comm.streams.on_free_memory if buckets[0].plan.reshards else comm.streams.on
    with waits("gather"):
        prepared = [bucket.prepare_gather(of_node=of_node) for bucket in buckets]
        return comm.all_gather_together(prepared, of_node=of_node)


def joined(comm: Communicator, info: ParamInfo, part: Tensor) -> Tensor:
    """Return the whole tensor of a parameter. If tensor or expert parallelism splits the parameter, ``part`` is this
    rank's part, and the call is collective; otherwise return ``part``. ``comm``: the engine's communicator."""
    split = info.split
    if split is None:
        return part
    parts = [part.contiguous() if n == split.part else part.new_empty(split.shape_of(n)) for n in range(split.parts)]
    for rank, values in enumerate(parts):
        comm.broadcast(values, rank)
    return split.join(parts)


class Place(NamedTuple):
    bucket: Bucket
    info: ParamInfo

    @property
    def slices(self) -> list[int]:
        """Return how many of the parameter's elements each shard has, without shards that have none; [0] if empty."""
        layout = self.bucket.layout
        parts = (part for rank in range(layout.world_size) for part in layout.fragments(rank))
        return [part.numel for part in parts if part.index == self.info.slot] or [0]
