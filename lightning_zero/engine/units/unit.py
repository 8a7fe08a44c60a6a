"""A unit: buckets that are gathered and dropped together, and the states that they go through.

::

    SHARDED --unshard_begin--> GATHERING --unshard_wait--> GATHERED --reshard--> SHARDED

Buckets whose compute parameters are replicated (stages 1 and 2) go the same way with a different meaning: SHARDED is
never entered, and GATHERING is the time between the optimizer step, which changes this rank's slice, and the arrival
of the others' slices. At stage 0 a unit stays GATHERED.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from lightning_zero.comm.profiling import profiled
from lightning_zero.comm.reduction import Pending
from lightning_zero.engine.units.bucket import Bucket, gather_together
from lightning_zero.engine.units.param import ParamInfo


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


@dataclass(slots=True, eq=False)
class Unit:
    """Buckets that are gathered and dropped together, driven by the calls of one module.

    Reductions and offloaded steps go bucket by bucket.
    """

    name: str  # fqn of the module, "" for the root
    index: int
    buckets: list[Bucket]
    title: str = field(init=False)
    resharded: list[Bucket] = field(init=False)  # those that are dropped after use
    reshards: bool = field(init=False)  # the unit is gathered for a use and dropped after it
    gathered_nbytes: int = field(init=False)
    state: State = State.GATHERED
    pending: list[Pending] = field(default_factory=list)
    keeps: bool = False  # a pass with a backward is open: what is dropped in it is kept for the node
    comes_of_node: bool = False  # it has been gathered in it: the next gather is of what the node has kept
    before_drop: Callable[[Bucket], None] = lambda _: None  # called while the values are still there

    def __post_init__(self) -> None:
        self.title = self.name or "(root)"
        self.plans_changed()

    def plans_changed(self) -> None:
        """Take notice of the plans of the buckets."""
        self.resharded = [bucket for bucket in self.buckets if bucket.reshards]
        self.reshards = bool(self.resharded)
        self.gathered_nbytes = sum(b.full.nbytes for b in self.resharded)

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in a buffer that goes when the unit is dropped."""
        storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
        return any(storage == b.full.data.untyped_storage()._cdata for b in self.resharded)

    def infos(self) -> Iterable[ParamInfo]:
        return itertools.chain.from_iterable([bucket.params for bucket in self.buckets])

    def _enter(self, state: State) -> None:
        if (self.state, state) not in LEGAL:
            raise RuntimeError(f"unit {self.title}: illegal transition {self.state.name} -> {state.name}")
        self.state = state

    def restaged(self) -> None:
        """The buckets, at rest, have other plans."""
        self.plans_changed()
        # Set and not entered: it is no gather or drop that has led here.
        self.state = State.SHARDED if self.reshards else State.GATHERED
        for bucket in self.buckets[:1]:
            bucket.comm.streams.give_back()

    def unshard_begin(self) -> None:
        """Issue the gathers of all buckets that are dropped after use; on a device's streams as one message."""
        self._enter(State.GATHERING)
        with profiled("gather", self.title):
            self.pending = []
            self._issue(self.resharded, of_node=self.comes_of_node)
        # Told by the gathers alone, whose order is one on all ranks, and not by what this rank has done with the unit:
        # all must come to the next one as members of the same group.
        self.comes_of_node = self.keeps

    def _issue(self, buckets: Sequence[Bucket], *, of_node: bool = False) -> None:
        are_there = bool(buckets) and buckets[0].comm.streams.are_there
        together = [b for b in buckets if b.can_gather_together or (of_node and are_there)]
        if together:
            self.pending.append(gather_together(together, of_node=of_node))
        # One by one: if a bucket's gather cannot be issued, those before it are known, and ``abandon`` ends them.
        for bucket in buckets:
            if bucket not in together:
                self.pending.append(bucket.gather_begin(of_node=of_node))

    def refresh_begin(self, buckets: Sequence[Bucket]) -> None:
        """After a step: issue the gathers of replicated compute parameters.

        Until they arrive parameters show placeholders, and users' reads wait.
        """
        self.unshard_wait()  # masters were changed twice in a row
        self._enter(State.GATHERING)
        with profiled("gather", self.title):
            self._issue(buckets)
            for bucket in buckets:
                bucket.show(gathered=False)

    def unshard_wait(self) -> None:
        """Wait for the gathers that were issued, and show the values. Nothing happens where none was issued."""
        if self.state is State.GATHERING:
            with profiled("wait for", self.title):
                for pending in self.pending:
                    pending.wait()
            # All or none: if a wait raises, the unit stays GATHERING with its pending gathers, and ``abandon`` ends
            # them.
            self.pending = []
            for bucket in self.buckets:
                if bucket.reshards or bucket.gathers_after_step:
                    bucket.show(gathered=True)
            self._enter(State.GATHERED)

    def abandon(self, deadline: float) -> None:
        """Bring the unit to rest after an exception, whatever was in flight."""
        # A refresh (of a unit that is never dropped) is not abandoned: the other ranks have issued it too, and what it
        # brings is still wanted. The next pass waits for it.
        if self.reshards:
            over = [pending.abandon(deadline) for pending in self.pending]
            self.pending = []
            if not all(over):
                # A rank that comes late would write into memory that is somebody else's by then.
                for bucket in self.resharded:
                    bucket.leave_memory()
            if self.state is State.GATHERING:
                self._enter(State.GATHERED)
            if self.state is State.GATHERED:
                self.reshard()

    def reshard(self) -> None:
        """Drop the gathered parameters; autograd's saved views wait for the next gather."""
        if not self.reshards:
            return
        for bucket in self.resharded:
            self.before_drop(bucket)  # what the user wrote to the values goes into the masters now, or is lost
            if self.keeps and bucket.node_shard.values is None:  # else it follows the masters: ``Bucket.write_master``
                bucket.node_shard.keep(bucket.full.data)
        self._enter(State.SHARDED)
        # Both: a parameter that went on pointing at a storage of size 0 could crash the process when it is read. Under
        # a placeholder the engine answers.
        for bucket in self.resharded:
            bucket.show(gathered=False)
            bucket.full.release()
        self.resharded[0].comm.streams.give_back()

    def drop(self) -> None:
        """Bring the unit to rest, also from the middle of its gather. A unit that is never dropped stays as it is."""
        if self.reshards and self.state is not State.SHARDED:
            self.unshard_wait()  # a gather in flight writes to the memory that is released next
            self.reshard()

    def pass_begins(self) -> None:
        """A pass with a backward begins: keep a shard of the node of what is dropped in it."""
        self.keeps = self.reshards and self.buckets[0].comm.node_size > 0

    def pass_ends(self, deadline: float | None = None) -> None:
        """Bring the unit to rest, and keep nothing for the node any more.

        Args:
            deadline: an exception has ended the pass; see :meth:`abandon`.
        """
        self.keeps = False
        if deadline is None:
            self.drop()
        else:
            self.abandon(deadline)
        self.forget_kept()

    def forget_kept(self) -> None:
        """Masters are others now, or the pass is over: the next gather is of all ranks' shards. On all ranks."""
        self.comes_of_node = False
        for bucket in self.buckets:
            bucket.node_shard.forget()

    def serve(self) -> None:
        """Take part in a gather that other ranks need while this one has the unit gathered already, or under way."""
        # This rank's own slice may still be under way to the buffer, and would be sent before it has arrived.
        self.unshard_wait()
        # Into a copy, because the buffer is in use: kernels may be reading it, and writes of the user's that other
        # ranks have not taken over yet would be overwritten.
        for bucket in self.resharded:
            bucket.comm.all_gather(bucket.full.data.clone(), bucket.label, of_node=self.comes_of_node).wait()
        self.comes_of_node = self.keeps

    def stage_ahead(self) -> None:
        """Start reading what rests in files, because the unit will be gathered soon."""
        for bucket in self.buckets:
            bucket.param_store.stage_ahead()

    @property
    def step_done(self) -> bool:
        """Whether a gather could be issued without waiting for an offloaded step."""
        return all(b.awaited_step.is_done for b in self.buckets)

    @property
    def awaits_step(self) -> bool:
        """Whether an offloaded step was asked for that nobody has waited for; the same on all ranks."""
        return any(b.awaited_step.is_asked for b in self.buckets)
