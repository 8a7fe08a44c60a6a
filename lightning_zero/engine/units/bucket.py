"""A bucket: which parameters share one flat buffer, and where each of its roles rests.

::

    full    compute_param  [numel]        memory while gathered; parameters are views of it
    home    master_param   [owned numel]  and optimizer state: home.py
    rest    compute_param  [owned numel]  between uses: param_store.py
    grad    grad           [owned numel]  from a backward until it is cleared: grad_store.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _unsafe_set_version_counter
from torch.autograd.graph import increment_version

from lightning_zero.comm.communicator import Communicator, Sends
from lightning_zero.comm.profiling import profiled
from lightning_zero.comm.reduction import Pending
from lightning_zero.config import StateDtype
from lightning_zero.device import recording
from lightning_zero.engine.units.flat_buffer import FlatBuffer, NodeShard, placeholders
from lightning_zero.engine.units.grad_store import GradStore, make_grad_store
from lightning_zero.engine.units.home import Home, ResidentHome, Tiers, make_home, opened
from lightning_zero.engine.units.param import ParamInfo, set_values, values_changed
from lightning_zero.engine.units.param_store import ParamStore, make_param_store
from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.layout import Fragment
from lightning_zero.planning.placement import Tier
from lightning_zero.pretrained.stored import StoredTensor


class AwaitedStep:
    """The offloaded step of a bucket: asked for, and not waited for yet.

    Between ``ask`` and ``wait`` the masters of the bucket belong to the step.

    Attributes:
        event: on a GPU, recorded when the step was asked for: behind it nothing reads what the results overwrite.
    """

    def __init__(self) -> None:
        self.event: Any = None
        self._future: Future[None] | None = None

    def ask(self, event: Any) -> Future[None]:
        """Ask for a step. Whoever runs it ends the future."""
        self.event = event
        self._future = Future()
        return self._future

    def nothing_to_do(self) -> None:
        """Ask for a step in which this rank has nothing to do."""
        # Not left out: :attr:`is_asked` decides what is gathered ahead, and that must not differ between ranks.
        self.ask(None).set_result(None)

    @property
    def is_asked(self) -> bool:
        """Whether a step was asked for that nobody has waited for; the same on all ranks."""
        return self._future is not None

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._future is None or self._future.done()

    def wait(self) -> None:
        """Wait for the step; its error is raised here."""
        if self._future is not None:
            # A step that failed raises here and so stays: every later wait raises too. Otherwise a caller that has
            # caught the error once would go on with masters that are half stepped.
            if self._future.done():
                self._future.result()
            else:
                with recording.stands("step", "offloaded step", on_host=True):
                    self._future.result()
            self._future = self.event = None


_AT_ONCE = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtype of each role of a bucket.

    Attributes:
        reduce: gradients are summed in it.
        wire: they travel in it: ``reduce``, or that of ``compute`` where no bit is lost.
        exchanged: they travel by an all-to-all, after which each rank adds, whatever ``wire`` is: the sum of the same
            values is the same in both.
    """

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    wire: torch.dtype
    exchanged: bool = False
    state: StateDtype = StateDtype.fp32


class GradFragment(NamedTuple):
    offset: int  # of its first element, in the parameter
    values: Tensor


class Bucket:
    """Parameters of one dtype in one flat buffer, with the roles that rest beside it.

    Attributes:
        plan: what rests where. It changes when a frozen bucket is made trainable, and when the module is restaged.
        full: compute_param, [layout.numel] compute_dtype; has memory while gathered.
        home: of master_param, the owned range of the bucket in master_dtype, and of its optimizer state. A view of the
            full buffer where ``plan`` says that both are one memory.
        param_store: the compute parameters between uses.
        grad_store: the reduced gradient.
        node_shard: what is kept of gathered values for the node.
        awaited_step: the offloaded step that was asked for.
        reshards: see :attr:`BucketPlan.reshards`, of which this is a copy, like ``gathers_after_step``.
        owned_range: elements of the bucket whose master_param and optim_state this rank holds.
        gaps: element ranges of the bucket that belong to no parameter.
    """

    home: Home
    grad_store: GradStore
    param_store: ParamStore

    def __init__(
        self,
        label: str,
        params: Sequence[ParamInfo],
        plan: BucketPlan,
        dtypes: Dtypes,
        comm: Communicator,
        tiers: Tiers,
    ) -> None:
        self.label = label
        self.params = list(params)
        self.plan = plan
        self.dtypes = dtypes
        self.comm = comm
        self._tiers = tiers
        self.awaited_step = AwaitedStep()
        self.shows_values = False  # parameters show their gathered values
        self.is_plain = False  # inside gather(): parameters hold full masters
        self._values_here = True
        self._pushed: Any = None  # the end of the way of what the last step has changed
        self.layout = plan.layout
        self.node_shard = NodeShard(plan.layout.numel, comm.node_rank, comm.node_size)
        self.gaps = self.layout.gaps()
        self._placeholders: list[Tensor] = []
        self._follow(plan)
        self.full = FlatBuffer(self.layout.numel, dtypes.compute, comm.device)
        self._make_views()

    def _follow(self, plan: BucketPlan) -> None:
        """Keep the properties of ``plan`` that every pass asks for."""
        self.plan = plan
        self.reshards, self.gathers_after_step = plan.reshards, plan.gathers_after_step
        self.trainable = plan.trainable
        self._is_elsewhere = plan.tiers.leaves_device
        self.owned_range = plan.owned_range(self.comm.shard_rank)
        if (self.reshards or self.gathers_after_step) and not self._placeholders:
            shapes = [info.shape for info in self.params]
            self._placeholders = placeholders(shapes, self.dtypes.compute, self.comm.device)

    def _make_views(self) -> None:
        # All views of the buffer are made here, while it has memory. They stay valid when the memory goes and comes
        # back, because that happens under the same storage object (``flat_buffer.py``).
        low, high = self.owned_range
        self._own_part = self.full.data[low:high]  # [owned numel]
        for info in self.params:
            info.gathered = self.full.view(self.layout.slots[info.slot].start, info.shape, info.strides)

    @property
    def sends(self) -> Sends:
        """What passes send of it."""
        gathered = self.dtypes.compute if self.reshards or self.gathers_after_step else None
        reduced = self.dtypes.reduce if self.trainable else None
        exchanged = self.dtypes.wire if self.trainable and self.dtypes.exchanged else None
        return Sends(self.layout.numel, gathered, reduced, exchanged, self.plan.shards_master)

    # -- ranges ---------------------------------------------------------------------------------------------------

    @property
    def owned_numel(self) -> int:
        low, high = self.owned_range
        return high - low

    def owned_fragments(self) -> list[Fragment]:
        return list(self.layout.cut(*self.owned_range))

    def part_of(self, full: Tensor, info: ParamInfo) -> Tensor:
        """The part of ``full`` [layout.numel] that belongs to one parameter: a view of the parameter's shape."""
        start = self.layout.slots[info.slot].start
        return full.as_strided(info.shape, info.strides, full.storage_offset() + start)

    @property
    def own_shard_of_owned(self) -> slice:
        """This rank's shard inside the owned range. In sums over ranks, no other rank counts these elements."""
        low, high = self.layout.shard_range(self.comm.shard_rank)
        base = self.owned_range[0]
        return slice(low - base, high - base)

    # -- values at rest -------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Tensor | None:
        """Reduced gradient [owned numel] in grad_dtype. The host waits for one that is on its way to host memory."""
        return self.grad_store.value

    def grad_fragment(self, slot: int) -> GradFragment | None:
        """This rank's part of one parameter's reduced gradient, as a view; None where it has none."""
        place, (low, high) = self.layout.slots[slot], self.owned_range
        first, last = max(low, place.start), min(high, place.start + place.numel)
        if first >= last or (grad := self.grad) is None:
            return None
        return GradFragment(first - place.start, grad[first - low : last - low])

    @property
    def master(self) -> Tensor:
        """master_param [owned numel]; readable while the home is open (always, on the device and the host)."""
        return self.home.master

    def share(self, values: Tensor) -> None:
        """Bring initial values of all ranks, ``values`` [owned numel] of this one, into the full buffer if they rest
        there. On all ranks, blocking."""
        if not self.reshards:
            self._own_part.copy_(values)
            if self.plan.shards_master:
                self.comm.all_gather(self.full.data, f"{self.label} (first values)").wait()

    def fill(self, values: Tensor) -> None:
        """Take initial values: ``values`` [owned numel] in master_dtype, which nobody else has."""
        self._settle_in(values, taken=True)

    def _settle_in(self, values: Tensor, *, taken: bool = False) -> None:
        """Make the masters' home and the compute parameters' store, as the plan says, from ``values`` [owned numel].

        Args:
            taken: they may be the masters from now on.
        """
        self.comm.streams.change()
        self._make_home(values, taken=taken)
        self._make_grad_store()
        self._make_param_store(values)

    def _make_home(self, values: Tensor, *, taken: bool = False) -> None:
        plan, dtype = self.plan, self.dtypes.master if self.trainable else self.dtypes.compute
        if plan.copies_master:
            home = make_home(plan.home_tier, self._tiers, self.label, values, dtype, taken=taken)
            self.home = home  # a copy in it is complete
        else:
            self.home = ResidentHome(self._own_part, is_exposed=True)

    def _make_param_store(self, values: Tensor) -> None:
        self.param_store = make_param_store(
            self.plan, self.label, self.home, self._own_part, values, self._send, self._tiers, self.comm.streams
        )

    def _make_grad_store(self) -> None:
        self.grad_store = make_grad_store(
            self.plan, self.label, self.owned_numel, self.dtypes.grad, self._tiers, self.comm.streams
        )

    def make_trainable(self) -> None:
        """Give a frozen bucket the roles that it lacks."""
        before, self.plan = self.plan, replace(self.plan, trainable=True)
        if self.plan.rests_as(before):
            self._make_grad_store()
            return
        # A copy: the old home's memory is given back before the new home is made, so that both are not held at a time.
        with opened(self.home) as master:
            values = master.clone()
        self.home.free()
        self._settle_in(values)

    def is_on(self, tier: Tier, tiers: Tiers) -> bool:
        """Whether what it has on ``tier`` is there among ``tiers`` too."""
        return tier is Tier.device or getattr(self._tiers, tier.name) is getattr(tiers, tier.name)

    def rest_as(
        self, plan: BucketPlan, tiers: Tiers, values: Tensor, *, keeps_home: bool, grad: Tensor | None, keeps_grad: bool
    ) -> None:
        """Rest as another ``plan`` of the same layout says. Sends no message: :meth:`show_at_rest` is to follow.

        The home of before, which is open, is left to the caller, and so is the state of optimizers.

        Args:
            tiers: those that ``plan`` asks for.
            values: of the masters, in the range that is owned under ``plan``.
            keeps_home: it is in its place already.
            grad: the reduced gradient of that range, if there is one. [owned numel]
            keeps_grad: it is in its place already.
        """
        self._tiers = tiers
        if self.reshards and not plan.reshards:
            self.full.allocate()
        range_before = self.owned_range
        self._follow(plan)
        if self.owned_range != range_before:  # one of the two plans does not reshard: the buffer has memory
            self._own_part = self.full.data[slice(*self.owned_range)]
        self.comm.streams.change()
        self._pushed = None
        if not keeps_home:
            self._make_home(values.to(self.comm.device) if plan.home_tier is Tier.device else values)
        self.param_store.free()  # first: its place may be the new one's
        self._make_param_store(values)
        if not keeps_grad:
            before = self.grad_store
            self._make_grad_store()
            if grad is not None:
                self.grad_store.add(grad.to(self.comm.device))
            before.free()

    def show_at_rest(self, values: Tensor, *, came_whole: bool) -> None:
        """Show what rests after :meth:`rest_as`. On all ranks.

        Args:
            values: as there.
            came_whole: the full buffer has held all compute parameters since before it.
        """
        if not self.reshards and not came_whole:
            self.share(values)
        self.show(gathered=not self.reshards)
        if self.reshards:
            self.full.release()

    def push(self) -> None:
        """Bring the compute parameters at rest up to date with the master, whose home is open."""
        self.param_store.update(self.master)
        if not self.plan.steps_on_host:  # what a step on the host has sent has an event of its own
            self.comm.streams.change()

    def _send(self, target: Tensor) -> None:
        """Cast the master into ``target`` [owned numel] on the device, behind what may still read ``target``."""
        if not self.plan.steps_on_host:
            self.home.copy_to(target)
            return
        # The step's thread comes here while the main thread queues the next forward. So it does not wait for what the
        # current stream has queued by now, but for the event of when the step was asked for. And on another stream:
        # gathers of other buckets, which may be needed sooner, would queue behind it.
        streams = self.comm.streams
        with streams.on("push", after=self.awaited_step.event), self._moves("h2d", target):
            self.home.copy_to(target)
            self._pushed = streams.mark()
        self.home.read_until(self._pushed)

    @contextlib.contextmanager
    def _moves(self, lane: str, target: Tensor) -> Iterator[None]:
        """Around the queueing of a copy between the tiers, to ``target``. Off a device the host makes it, and waits."""
        recording.moved(lane, target.nbytes)
        waits = not self.comm.streams.are_there
        with recording.span(lane, self.label), recording.stands("transfer", self.label) if waits else _AT_ONCE:
            yield

    def own_compute_params(self) -> Tensor:
        """Compute parameters of the owned range as they rest, which a gather takes from this rank. [owned numel]"""
        own = torch.empty(self.owned_numel, dtype=self.dtypes.compute, device=self.comm.device)
        with self._transfers(into_free_memory=False):
            self.param_store.read(own)
            event = self.comm.streams.mark()
        self.comm.streams.wait(event)
        self.home.read_until(event)
        return own

    @contextlib.contextmanager
    def _transfers(self, *, into_free_memory: bool) -> Iterator[None]:
        """Inside, what rests elsewhere is brought to the device, behind what the last step has sent.

        Args:
            into_free_memory: of gathered parameters; else behind all that the current stream has queued.
        """
        streams = self.comm.streams
        with streams.on_free_memory("h2d") if into_free_memory else streams.on("h2d"):
            streams.wait(self._pushed)
            yield

    def write_master(self, info: ParamInfo, value: Tensor, *, before: Tensor | None = None) -> None:
        """Set one parameter in the masters, from a full value of its shape: every rank takes its own part; and in what
        is kept for the node.

        Args:
            before: compute parameters of the owned range. Where ``value`` equals them, masters keep their digits.
        """
        self.node_shard.write(info, self.layout.slots[info.slot].start, value)
        with opened(self.home, changed=True) as master:
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
        """Set one parameter from a full value of its shape; every rank takes its own part."""
        self.write_master(info, value.detach())
        if not self.reshards and not isinstance(value, StoredTensor):  # else by the push and the gather that follow
            assert info.gathered is not None
            info.gathered.copy_(value.detach().reshape(info.shape))
        values_changed([info])

    # -- gathered values ------------------------------------------------------------------------------------------

    @property
    def can_gather_together(self) -> bool:
        """Whether its gather may be a part of one message: the device has streams, and what it sends is there."""
        return self.comm.streams.are_there and not self._is_elsewhere

    def gather_begin(self, *, of_node: bool = False) -> Pending:
        """Issue the gather of the compute parameters. The full buffer has memory from here on.

        Args:
            of_node: of what the ranks of this node have kept.
        """
        if self.comm.streams.are_there and (of_node or not self._is_elsewhere):
            return gather_together([self], of_node=of_node)
        if of_node:
            data, label = self.prepare_gather(of_node=True)
            return self.comm.all_gather(data, label, of_node=True)
        # Until the step is over the masters, and the shard that follows from them, belong to the step's thread.
        self.awaited_step.wait()
        with self.comm.streams.pool_of("gather"):
            self.full.allocate()
        if not self._is_elsewhere:
            self.param_store.prepare(self._own_part)
            return self.comm.all_gather(self.full.data, self.label)
        # The gather is issued from the stream of copies to the device, and so waits for the copies of the last step and
        # for those of ``prepare``. Issued from compute it would send the shard before these have arrived.
        with profiled("transfer", self.label), self._transfers(into_free_memory=self.reshards):
            with self._moves("h2d", self._own_part):
                self.param_store.prepare(self._own_part)
            self.home.read_until(self.comm.streams.mark())
            return self.comm.all_gather(self.full.data, self.label)

    def prepare_gather(self, *, of_node: bool = False) -> tuple[Tensor, str]:
        """Take memory and fill this rank's slice, on the gather stream. Returns what is to be gathered."""
        self.awaited_step.wait()
        self.full.allocate()
        if of_node:
            self.node_shard.put_into(self.full.data)
        else:
            self.param_store.prepare(self._own_part)
        return self.full.data, self.label

    def leave_memory(self) -> None:
        """Leave the full buffer's memory to a gather that was given up before its end. Values are not shown."""
        # No gather may be waited for instead: where ranks go on with other groups (``Communicator.resume``), one that
        # only some ranks have issued never ends.
        assert self.reshards and not self.shows_values
        self.full.renew()
        self._make_views()

    def full_master(self) -> Tensor:
        """Gather the masters of the whole bucket: a new tensor [layout.numel] on the device. Blocking, collective."""
        with opened(self.home) as master:
            return self.gathered([(0, master)], master.dtype, "values")

    def gathered(self, own: Iterable[tuple[int, Tensor]], dtype: torch.dtype, what: str) -> Tensor:
        """Gather values of the whole bucket: a new tensor [layout.numel] on the device. Blocking, collective.

        Args:
            own: the parts that this rank has, each with its start in the owned range; what no rank has is zero.
        """
        low, _ = self.owned_range
        full = torch.zeros(self.layout.numel, dtype=dtype, device=self.comm.device)
        for start, values in own:
            full[low + start : low + start + values.numel()].copy_(values)
        if self.plan.shards_master:
            self.comm.all_gather(full, f"{self.label} ({what})").wait()
        return full

    def show(self, gathered: bool) -> None:
        """Point the parameters at their gathered values or placeholders; inside ``gather`` they stay as they are."""
        self.shows_values = gathered
        # What users write inside ``gather`` is in the shown tensors alone until it ends. Other tensors now would lose
        # it.
        if self.is_plain:
            return
        self._values_are(here=gathered)
        for info in self.params:
            value = info.gathered if gathered else self._placeholders[info.slot]
            assert value is not None
            set_values(info.param, value, info.classes.present if gathered else info.classes.absent, info.classes)

    def show_plain(self, values: Iterable[Tensor]) -> None:
        """Have the parameters hold ``values``, one for each, as plain parameters, until ``hide_plain``."""
        self.is_plain = True
        self._values_are(here=True)
        for info, value in zip(self.params, values, strict=True):
            set_values(info.param, value, info.classes.plain, info.classes)

    def hide_plain(self, *, gathered: bool) -> None:
        """Back to gathered values or placeholders."""
        self.is_plain = False
        self.show(gathered)

    def _values_are(self, *, here: bool) -> None:
        """Set the parameters' versions for values that go or come back.

        ``.data =`` does not change a version. A graph that has saved a parameter itself (not a view, which
        ``saved_weights.py`` packs) would read the placeholder, and torch would not notice. So the version rises when
        values go: torch then refuses the backward. It gets its old number back with the values, and the same graph is
        valid again.
        """
        if here is self._values_here:
            return  # raised twice, the version would be another one than was saved, also after the values are back
        self._values_here = here
        params = tuple([info.param for info in self.params])
        if here:
            _unsafe_set_version_counter(params, tuple([info.version for info in self.params]))
        else:
            increment_version(params)


def gather_together(buckets: Sequence[Bucket], *, of_node: bool = False) -> Pending:
    """Issue the gathers of buckets of which each :attr:`~Bucket.can_gather_together`, as one message.

    Either all are dropped after use, or none is.

    Args:
        of_node: of what the ranks of this node have kept.
    """
    comm = buckets[0].comm
    # Where memory comes and goes, nothing here waits for what compute has queued beyond the last use of the memory and
    # the last change of the values: the message, and the casts before it, run beside what computes now. Values that
    # stay are in use, until a step has replaced this rank's part of them.
    waits = comm.streams.on_free_memory if buckets[0].reshards else comm.streams.on
    with waits("gather"):
        prepared = [bucket.prepare_gather(of_node=of_node) for bucket in buckets]
        return comm.all_gather_together(prepared, of_node=of_node)


class Place(NamedTuple):
    """Where a parameter lives."""

    bucket: Bucket
    info: ParamInfo

    @property
    def slices(self) -> list[int]:
        """How many elements of the parameter each rank's shard has, of the ranks that have any."""
        layout = self.bucket.layout
        parts = (part for rank in range(layout.world_size) for part in layout.fragments(rank))
        return [part.numel for part in parts if part.index == self.info.slot] or [0]
