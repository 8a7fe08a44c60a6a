"""A unit and its buckets: who owns which parameter, in which state, with which memory.

::

    SHARDED --unshard_begin--> GATHERING --unshard_wait--> GATHERED --reshard--> SHARDED

Buckets whose compute parameters are replicated (stages 0 to 2) go the same way with a different meaning: SHARDED is
never entered, and GATHERING is the time between the optimizer step, which changes this rank's slice, and the arrival
of the others' slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from lightning_zero.memory.buffers import FlatBuffer
from lightning_zero.memory.collectives import Communicator, Pending
from lightning_zero.planning.layout import BucketLayout, Fragment
from lightning_zero.planning.placement import Placement, StageRow


class State(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


LEGAL = {
    (State.SHARDED, State.GATHERING),
    (State.GATHERING, State.GATHERED),
    (State.GATHERED, State.SHARDED),
    (State.GATHERED, State.GATHERING),  # replicated compute parameters after a step
}


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtype of each role of a bucket."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype


@dataclass(slots=True, eq=False)
class ParamInfo:
    """A parameter that the engine owns. Nothing is stored on the ``nn.Parameter`` itself."""

    param: nn.Parameter
    fqns: tuple[str, ...]  # every name; tied weights have several
    shape: torch.Size
    dtype: torch.dtype  # before sharding: what checkpoints hold
    slot: int = 0  # position in the bucket
    gathered: Tensor | None = None  # [shape] compute_dtype, a view of the bucket's full buffer
    placeholder: Tensor | None = None  # [shape] compute_dtype, NaN

    @property
    def fqn(self) -> str:
        return self.fqns[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Bucket:
    """Parameters of one dtype in one flat buffer, with the roles that rest beside it.

    Attributes:
        full: compute_param, [layout.numel] compute_dtype; has memory while gathered.
        master: master_param, the owned range of the bucket in master_dtype. It is the compute parameters' own memory
            where these are replicated and of the same dtype.
        grad: reduced gradient [owned numel] grad_dtype, or None.
    """

    def __init__(
        self,
        label: str,
        params: Sequence[ParamInfo],
        layout: BucketLayout,
        row: StageRow,
        dtypes: Dtypes,
        trainable: bool,
        comm: Communicator,
    ) -> None:
        self.label = label
        self.params = list(params)
        self.layout = layout
        self.row = row
        self.dtypes = dtypes
        self.trainable = trainable
        self.comm = comm
        self.resharding = row.compute_param is Placement.sharded and comm.world_size > 1
        self.refreshed = (  # compute parameters are gathered after a step
            row.compute_param is Placement.replicated and row.master is Placement.sharded and comm.world_size > 1
        )
        self.grad: Tensor | None = None
        self.shown_full = False  # inside gather(): parameters hold full masters
        self.full = FlatBuffer(layout.numel, dtypes.compute, comm.device)
        self.master: Tensor
        for info in self.params:
            info.gathered = self.full.view(layout.slots[info.slot].start, info.shape)

    # -- ranges ---------------------------------------------------------------------------------------------------

    @property
    def shard_range(self) -> tuple[int, int]:
        return self.layout.shard_range(self.comm.rank)

    @property
    def owned_range(self) -> tuple[int, int]:
        """Elements of the bucket whose master_param and optim_state this rank holds."""
        if self.row.master is Placement.sharded:
            return self.shard_range
        return 0, self.layout.numel

    @property
    def owned_numel(self) -> int:
        low, high = self.owned_range
        return high - low

    def owned_fragments(self) -> list[Fragment]:
        return list(self.layout.cut(*self.owned_range))

    @property
    def own_shard_of_owned(self) -> slice:
        """This rank's shard inside the owned range: what it alone answers for in sums over ranks."""
        low, high = self.shard_range
        base = self.owned_range[0]
        return slice(low - base, high - base)

    @property
    def has_master(self) -> bool:
        """Whether master_param is memory of its own beside the full buffer."""
        return self.resharding or (self.trainable and self.dtypes.master != self.dtypes.compute)

    # -- values ---------------------------------------------------------------------------------------------------

    def fill(self, values: Tensor) -> None:
        """Take initial values: ``values`` [layout.numel] in master_dtype, the same on every rank."""
        low, high = self.owned_range
        if self.has_master:
            dtype = self.dtypes.master if self.trainable else self.dtypes.compute
            self.master = values[low:high].to(dtype, copy=True)
        if not self.resharding:
            self.full.data.copy_(values)
        if not self.has_master:
            self.master = self.full.data[low:high]

    def make_trainable(self) -> None:
        """Give a frozen bucket the roles that it lacks."""
        self.trainable = True
        if self.has_master and self.dtypes.master != self.dtypes.compute:
            low, high = self.owned_range
            source = self.master if self.resharding else self.full.data[low:high]
            self.master = source.to(self.dtypes.master, copy=True)

    def write_slice_to_full(self) -> None:
        """Copy (and cast) this rank's master into its place of the full buffer."""
        low, high = self.owned_range
        target = self.full.data[low:high]
        if target.data_ptr() != self.master.data_ptr():
            target.copy_(self.master)

    def gather_begin(self) -> Pending:
        """Issue the gather of the compute parameters. The full buffer has memory from here on."""
        self.full.allocate()
        self.write_slice_to_full()
        return self.comm.all_gather(self.full.data, self.label)

    def full_master(self) -> Tensor:
        """Blocking, on all ranks: master_param of the whole bucket, [layout.numel], a new tensor."""
        low, high = self.owned_range
        full = self.master.new_empty(self.layout.numel)
        full[low:high].copy_(self.master)
        if self.row.master is Placement.sharded:
            self.comm.all_gather(full, f"{self.label} (values)").wait()
        return full

    def show(self, gathered: bool) -> None:
        """Point the parameters at their gathered values or placeholders; inside ``gather`` they stay as they are."""
        if self.shown_full:
            return
        for info in self.params:
            value = info.gathered if gathered else info.placeholder
            assert value is not None
            info.param.data = value


@dataclass(slots=True, eq=False)
class Unit:
    """Buckets that are gathered, reduced and stepped together, driven by the calls of one module."""

    name: str  # fqn of the module, "" for the root
    index: int
    buckets: list[Bucket]
    state: State = State.GATHERED
    pending: list[Pending] = field(default_factory=list)
    expected: int = 0  # trainable parameters whose gradients end this unit's backward
    arrived: int = 0  # of those, in this round
    calls: set[int] = field(default_factory=set)  # calls whose input gradients are still to come
    open_call: int | None = None  # the call whose forward runs now
    open_inputs: list[tuple[Tensor, int]] = field(default_factory=list)  # its inputs and their versions

    @property
    def title(self) -> str:
        return self.name or "(root)"

    @property
    def resharding(self) -> bool:
        return any(b.resharding for b in self.buckets)

    @property
    def gathered_nbytes(self) -> int:
        return sum(b.full.nbytes for b in self.buckets if b.resharding)

    def infos(self) -> Iterable[ParamInfo]:
        for bucket in self.buckets:
            yield from bucket.params

    def _enter(self, state: State) -> None:
        if (self.state, state) not in LEGAL:
            raise RuntimeError(f"unit {self.title}: illegal transition {self.state.name} -> {state.name}")
        self.state = state

    def unshard_begin(self) -> None:
        """Issue the gathers of all sharded buckets."""
        self._enter(State.GATHERING)
        self.pending = [b.gather_begin() for b in self.buckets if b.resharding]

    def refresh_begin(self, buckets: Iterable[Bucket]) -> None:
        """After a step: issue the gathers of replicated compute parameters. Until they arrive, reads give NaN."""
        self._enter(State.GATHERING)
        for bucket in buckets:
            self.pending.append(bucket.gather_begin())
            bucket.show(gathered=False)

    def unshard_wait(self) -> None:
        if self.state is State.GATHERING:
            for pending in self.pending:
                pending.wait()
            self.pending = []
            for bucket in self.buckets:
                if bucket.resharding or bucket.refreshed:
                    bucket.show(gathered=True)
            self._enter(State.GATHERED)

    def abandon(self, deadline: float) -> None:
        """After an exception: back to rest, whatever was in flight."""
        self.open_call, self.open_inputs = None, []
        self.calls.clear()
        if self.resharding:
            for pending in self.pending:
                pending.abandon(deadline)
            self.pending = []
            if self.state is State.GATHERING:
                self._enter(State.GATHERED)
            if self.state is State.GATHERED:
                self.reshard()

    def reshard(self) -> None:
        """Drop the gathered parameters; autograd's saved views wait for the next gather."""
        if not self.resharding:
            return
        self._enter(State.SHARDED)
        for bucket in self.buckets:
            if bucket.resharding:
                bucket.show(gathered=False)
                bucket.full.release()

    def serve(self) -> None:
        """Take part in a gather that other ranks need while this one has the unit gathered already."""
        for bucket in self.buckets:
            if bucket.resharding:
                bucket.comm.all_gather(bucket.full.data.clone(), bucket.label).wait()
