"""A unit: buckets that are gathered and dropped together, and the states of a unit.

docs/architecture.md has a diagram of the states. At stages 1 and 2 compute parameters are replicated, and a unit is
never SHARDED: it is GATHERING from the optimizer step, which changes this rank's slice, until the other ranks' slices
have arrived. At stage 0 a unit stays GATHERED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import nn

from lightning_zero.comm.reduction import Pending
from lightning_zero.device import recording
from lightning_zero.engine.units.bucket import Bucket, Place, gather_together
from lightning_zero.engine.units.packed import is_packed
from lightning_zero.settings import ConfigError


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


@dataclass(eq=False)
class Unit:
    """The buckets of one submodule or the root, which are gathered together and dropped (gathered values freed)
    together. Gradients are reduced, and parameters stepped, bucket by bucket."""

    name: str  # fqn of the module, "" for the root
    index: int
    buckets: list[Bucket]
    state: State = State.GATHERED
    pending: list[Pending] = field(default_factory=list)
    expected: int = 0  # number of gradients that this backward brings for the unit's parameters
    arrived: int = 0  # number of these gradients that have arrived since the unit was last dropped
    calls: set[int] = field(default_factory=set)  # open calls: they need frozen weights for gradients of their inputs
    saved: int = 0  # number of times that `passes/saved_weights.py` has seen autograd save one of its weights
    in_graph: bool = False  # autograd may have saved weights in the open pass, or views of weights
    is_held: bool = False  # stays gathered until the pass ends: users' code or autograd may hold views of the values
    keeps_node_slices: bool = False  # in a pass with a backward: each drop keeps a slice for the node (NodeShard)
    gathers_in_node: bool = False  # the next gather takes the slices that this node's ranks have kept in this pass
    before_drop: Callable[[Bucket], None] = lambda _: None  # called before the memory of gathered values is freed

    def __post_init__(self) -> None:
        self.title = self.name or "(root)"
        self.infos = [info for bucket in self.buckets for info in bucket.params]
        self.has_packed = any(is_packed(info.param) for info in self.infos)  # 4-bit parameters
        # The parameters are those of the module itself, not of modules inside.
        self.is_leaf = all(info.fqn.rpartition(".")[0] == self.name for info in self.infos)
        self.plans_changed()

    def plans_changed(self) -> None:
        self.resharded = [bucket for bucket in self.buckets if bucket.plan.reshards]
        self.reshards = bool(self.resharded)  # the unit is gathered for a use and dropped after it
        self.gathered_nbytes = sum(b.full.nbytes for b in self.resharded)

    def _enter(self, state: State) -> None:
        if (self.state, state) not in LEGAL:
            raise RuntimeError(f"unit {self.title}: illegal transition {self.state.name} -> {state.name}")
        self.state = state

    def restaged(self) -> None:
        """Update the unit's state after a restage has moved its buckets. Call only if no gather is in flight."""
        self.plans_changed()
        # Assigned without `_enter`, because no gather or drop leads to this state.
        self.state = State.SHARDED if self.reshards else State.GATHERED
        for bucket in self.buckets[:1]:
            bucket.comm.streams.give_back()

    def unshard_begin(self) -> None:
        """Issue the gathers of all buckets whose values are dropped between uses, as one message where possible, and do
        not wait. Collective."""
        self._enter(State.GATHERING)
        with recording.profiled("gather", self.title):
            self.pending = []
            self._issue(self.resharded, of_node=self.gathers_in_node)
        # Set at a gather, because gathers have one order on all ranks, and all must use one group for the next gather.
        self.gathers_in_node = self.keeps_node_slices

    def _issue(self, buckets: Sequence[Bucket], *, of_node: bool = False) -> None:
        together: list[Bucket] = []
        if buckets and buckets[0].comm.streams.are_there:
            together = [b for b in buckets if of_node or not b.plan.gathers_from_host]
        for comm in dict.fromkeys(bucket.comm for bucket in together):
            self.pending.append(gather_together([b for b in together if b.comm is comm], of_node=of_node))
        # One by one, so that `abandon` can end the earlier gathers if a later one cannot be issued.
        for bucket in buckets:
            if bucket not in together:
                self.pending.append(bucket.gather_begin(of_node=of_node))

    def begin_param_sync(self, buckets: Sequence[Bucket]) -> None:
        """Issue gathers, without a wait, of the changed masters of `buckets` into their replicated compute parameters.
        Parameters have placeholders as values until :meth:`unshard_wait`. Collective."""
        self.unshard_wait()  # for an earlier param sync, if masters changed twice in a row
        self._enter(State.GATHERING)
        with recording.profiled("gather", self.title):
            self._issue(buckets)
            for bucket in buckets:
                bucket.show(gathered=False)

    def unshard_wait(self) -> None:
        """Wait for the unit's gathers in flight, if any, then point the parameters at the gathered values."""
        if self.state is State.GATHERING:
            with recording.profiled("wait for", self.title):
                for pending in self.pending:
                    pending.wait()
            # Cleared after all waits: if one raises, the unit stays GATHERING, and `abandon` ends the pending gathers.
            self.pending = []
            for bucket in self.buckets:
                if bucket.plan.reshards or bucket.plan.gathers_after_step:
                    bucket.show(gathered=True)
            self._enter(State.GATHERED)

    def abandon(self, deadline: float) -> None:
        """Free gathered values after an exception. Wait for gathers in flight only until `deadline`, a time of
        `time.monotonic()`: other ranks may never issue these gathers."""
        # A param sync is not abandoned: other ranks have issued it too, and the next pass needs its values.
        if self.reshards:
            over = [pending.abandon(deadline) for pending in self.pending]
            self.pending = []
            if not all(over):
                # A late rank would otherwise write into memory that has another use by then.
                for bucket in self.resharded:
                    bucket.leave_memory()
            if self.state is State.GATHERING:
                self._enter(State.GATHERED)
            if self.state is State.GATHERED:
                self.reshard()

    def reshard(self, *, free: bool = True) -> None:
        """Point the parameters at placeholders and free the gathered values. Without `free`, the caller frees them by
        :meth:`free` later. Does nothing if the unit stays gathered between uses."""
        if not self.reshards:
            return
        for bucket in self.resharded:
            self.before_drop(bucket)  # last chance to copy users' writes to the values into the masters
            # `Bucket.write_master` updates a slice that is kept already.
            if self.keeps_node_slices and bucket.node_shard.values is None:
                bucket.node_shard.keep_slice(bucket.full.data)
        self._enter(State.SHARDED)
        # Placeholders first: see [Note: freed storage and autograd's views].
        for bucket in self.resharded:
            bucket.show(gathered=False)
        if free:
            self.free()

    def free(self) -> None:
        """Free the memory of gathered values, after ``reshard(free=False)``."""
        for bucket in self.resharded:
            bucket.full.release()
        self.resharded[0].comm.streams.give_back()

    def drop(self) -> None:
        """Wait for a gather in flight, then free the gathered values. Does nothing if the unit stays gathered."""
        if self.reshards and self.state is not State.SHARDED:
            self.unshard_wait()  # a gather in flight still writes to the memory
            self.reshard()

    def pass_begins(self) -> None:
        """Begin a pass with a backward. Under `hybrid_shard=node_backward`, drops in this pass keep slices, from which
        the backward gathers within the node (see `NodeShard`)."""
        self.keeps_node_slices = self.reshards and self.buckets[0].comm.ranks.node.size > 0

    def pass_ends(self, deadline: float | None = None) -> None:
        """End a pass: free gathered values and the slices kept for the node. After an exception callers give a
        `deadline`, which :meth:`abandon` explains."""
        self.keeps_node_slices = self.is_held = self.in_graph = False
        self.calls.clear()
        if deadline is None:
            self.drop()
        else:
            self.abandon(deadline)
        self.forget_node_slices()

    def forget_node_slices(self) -> None:
        """Free the slices that buckets keep for the node, because masters have changed or the pass has ended. All ranks
        must call this at the same point in the order of gathers."""
        self.gathers_in_node = False
        for bucket in self.buckets:
            bucket.node_shard.values = None

    def serve(self) -> None:
        """Take part in a gather that other ranks need, although this rank has the unit gathered. Collective."""
        # Wait, because this rank's own slice may not have arrived in the buffer yet.
        self.unshard_wait()
        # Gather into a copy: kernels may be reading the buffer, and users' writes in it would be lost.
        for bucket in self.resharded:
            bucket.comm.all_gather(bucket.full.data.clone(), bucket.label, of_node=self.gathers_in_node).wait()
        self.gathers_in_node = self.keeps_node_slices

    def stage_ahead(self) -> None:
        for bucket in self.buckets:
            bucket.param_store.stage_ahead()

    @property
    def step_done(self) -> bool:
        """Return whether the offloaded steps of all buckets have ended, so that a gather would not wait for a step."""
        return all(b.awaited_step.is_done for b in self.buckets)


class Units(list[Unit]):
    """The units of one module: first the root, then the others in the order of ``named_modules``."""

    def __init__(self, units: Iterable[Unit]) -> None:
        super().__init__(units)
        self.places = {id(info.param): Place(b, info) for b in self.buckets for info in b.params}

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for unit in self for bucket in unit.buckets]

    def connect(self) -> None:
        """Send each kind of message that passes send once, to connect ranks: see `Communicator.connect`. Collective."""
        for comm in dict.fromkeys(bucket.comm for bucket in self.buckets):
            comm.connect([bucket.sends for bucket in unit.buckets if bucket.comm is comm] for unit in self)

    def owns(self, param: nn.Parameter) -> bool:
        return id(param) in self.places

    def place_of(self, param: nn.Parameter) -> Place:
        """Return the bucket and the `ParamInfo` of ``param``. Raise ConfigError if no unit owns the parameter."""
        place = self.places.get(id(param))
        if place is None:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is not part of the sharded module, so ranks would step it "
                "apart. Register it on the module before it is sharded (in __init__ or configure_model)."
            )
        return place
