"""Runs passes: gathers units when they are needed, drops them after use, and follows forwards and backwards.

A *pass* is a forward with its backward, or one evaluation step. A backward is *explicit* if the engine is told of it
(:meth:`Passes.backward_scope`). A plain ``loss.backward()`` is noticed by its first hook, and ends with autograd's
graph task.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from weakref import ReferenceType, WeakMethod, ref

import torch
from torch import Tensor

from lightning_zero.comm.communicator import ABANDON_S, Communicator
from lightning_zero.config import Precision
from lightning_zero.engine.passes.access import Writes
from lightning_zero.engine.passes.gather_order import GatherOrder
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.passes.hooks import Hooks
from lightning_zero.engine.passes.open_pass import LEGAL, GradSums, GraphTask, OpenPass, Phase, Progress, Scope, Stays
from lightning_zero.engine.passes.saved_weights import SavedWeights, explain_weights
from lightning_zero.engine.passes.sharded_grad import ShardedGrads
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.after_step import AfterStep
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.engine.units.unit import State, Unit
from lightning_zero.timeline.compute_lane import ComputeLane

Look = Callable[[ParamInfo, Tensor], object]


def _weakly(method: Callable[[Unit], bool]) -> Callable[[Unit], bool]:
    """Wrap ``method`` without keeping its object alive. The wrapper returns false once the object is gone."""
    reference = WeakMethod(method)

    def call(unit: Unit) -> bool:
        alive = reference()
        return alive is not None and alive(unit)

    return call


def _graph_task_gone(passes_ref: ReferenceType[Passes]) -> None:
    """Show existing gradients again after an exception ended a graph task, so that ``zero_grad`` is noticed."""
    passes = passes_ref()
    if passes is not None and passes.phase is Phase.NOTICED:
        passes.sharded_grads.place_used()


class Passes:
    """Runs the passes of one engine, one at a time. The engine's hooks and scopes call its methods.

    Attributes:
        explicit_backwards: number of backwards that the engine was told of so far.
        aborted: an exception has ended a pass, and no pass has begun since.
        calls_meet: make all ranks agree before a module call outside of a scope. Otherwise a rank that calls alone
            would have its gathers matched with those of other ranks' steps.
        sums: takes the gradients that arrive inside :meth:`adding_up`.
        look: gets each gradient inside :meth:`looking`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Communicator,
        *,
        order: GatherOrder,
        reducer: Reducer,
        after_step: AfterStep,
        writes: Writes,
        precision: Precision,
    ) -> None:
        self.units = units
        self.comm = comm
        self.order = order
        self.reducer = reducer
        self.after_step = after_step
        self.sharded_grads = ShardedGrads(reducer, after_step, self.forget_failed)
        self.writes = writes
        self.hooks = Hooks(self, precision)
        # Weakly: a graph holds the functions that unpack its tensors, and the garbage collector does not see through a
        # graph. Whatever keeps a graph (a list of losses) would keep the engine and all its shards.
        self.saved = SavedWeights(units, _weakly(self.weights_needed))
        self.lane = ComputeLane()
        self.phase = Phase.BETWEEN
        self.progress = Progress(units)
        self.stays = Stays(order, self.progress, after_step)
        self.explicit_backwards = 0
        self._open = OpenPass(None)
        self._scope: Scope | None = None
        self._ordinal = 0
        self._noticed: GraphTask | None = None  # the backward that was noticed last
        self._needed: Unit | None = None  # the last unit whose weights a backward has read
        self.aborted = False
        self.calls_meet = False
        self.sums: GradSums | None = None
        self.look: Look | None = None

    @property
    def root(self) -> Unit:
        return self.units[0]

    @property
    def key(self) -> str | None:
        """Return the kind of the open pass; None between passes. Passes of one kind should take the same path."""
        return self._open.key

    @property
    def in_backward(self) -> bool:
        return self.phase in (Phase.TOLD, Phase.NOTICED)

    @property
    def explicit(self) -> bool:
        """Return whether a backward is running whose end the engine will be told."""
        return self.phase is Phase.TOLD

    def _enter(self, phase: Phase) -> None:
        if (self.phase, phase) not in LEGAL:
            raise RuntimeError(f"pass {self.key}: illegal transition {self.phase.name} -> {phase.name}")
        self.phase = phase

    def watch_trainable(self) -> None:
        """Hook parameters that require a gradient now. Users may have unfrozen some since the last call."""
        for unit in self.units:
            for bucket in unit.buckets:
                for info in bucket.params:
                    if info.param.requires_grad:
                        if not bucket.trainable:
                            bucket.make_trainable()
                        self.hooks.watch_grad(unit, bucket, info.slot)

    # -- begin and end ------------------------------------------------------------------------------------------------

    @outside_autograd
    def begin(self, key: str, *, evaluation: bool, owner: Unit | None = None) -> None:
        """Open a pass, and gather the root unit. Collective."""
        self.recover()
        self.watch_trainable()
        # Training passes in one step may take different paths, so each gets its own plan by its number in the step.
        # Evaluations repeat one path and are not numbered.
        full_key = f"{key}, evaluating {owner.title if owner else ''}" if evaluation else f"{key}/{self._ordinal}"
        self._enter(Phase.FORWARD)
        self._open = OpenPass(full_key, evaluates=evaluation, ends_with_call=owner is not None)
        self.comm.place = f"pass {full_key}"
        self.order.begin(full_key, cyclic=evaluation)
        if not evaluation:
            for unit in self.units[1:]:
                unit.pass_begins()
        self.after_step.refresh(self.root)
        if self.root.state is State.SHARDED:
            self.root.unshard_begin()
        self.root.unshard_wait()

    def recover(self, what: str = "going on after an exception") -> None:
        """Resynchronize the ranks if an exception has ended a pass. ``what``: the purpose, for errors. Collective."""
        if self.aborted:
            # ``resume`` compares the ranks' numbers of operations. How many refreshes a rank has issued depends on its
            # worker thread, so each rank issues all refreshes first: equal numbers then mean equal operations.
            self.after_step.flush()
            self.comm.resume(what)
            self.aborted = False  # last: after a failed agreement the next call must agree again

    @outside_autograd
    def end(self) -> None:
        """End the open pass and drop all gathered units. Does nothing between passes. Collective."""
        if self.key is not None:
            if self._open.unused:
                self.after_step.refresh()  # unfinished steps may go on during the next pass
            else:
                # Another rank may use units that this rank does not use. Their refreshes need this rank, too.
                self.after_step.refresh_all()
            self.order.end()
            self._close()

    def _close(self) -> None:
        self.hooks.forget_inputs()
        self.progress.pass_ends()
        for unit in self.units:
            unit.pass_ends()
        self._ordinal += not self._open.evaluates
        self._enter(Phase.BETWEEN)
        self._open = OpenPass(None)
        self.stays.pass_ends()
        self.comm.place = "between passes"

    @contextlib.contextmanager
    def scope(self, key: str, *, evaluation: bool) -> Iterator[None]:
        self.leave()
        self._ordinal = 0
        self._scope = Scope(key, evaluation)
        try:
            self.begin(key, evaluation=evaluation)
            yield
            self._scope = None
            if evaluation:
                self.end()
        except BaseException:
            self._scope = None
            self.abort()
            raise

    @outside_autograd
    def abort(self) -> None:
        # One deadline for all messages: one deadline each would add up to hours if a peer is dead.
        deadline = time.monotonic() + ABANDON_S
        self.aborted = True
        self.lane.ends()
        if self.in_backward and self.look is None:
            self.reducer.abort(deadline)
            # The backward set ``param.grad`` to None, so the engine would not see what users clear later.
            self.sharded_grads.place_used()
        self.order.abort()
        self.hooks.forget_calls()
        self.hooks.forget_inputs()
        self.progress.pass_ends()
        for unit in self.units:
            unit.pass_ends(deadline)
        self.saved.plans_changed()
        # not ``_enter``: an exception may come in any phase
        self.phase, self._open = Phase.BETWEEN, OpenPass(None)
        self.stays.pass_ends()

    @outside_autograd
    def leave(self) -> None:
        """End the pass of a step without a backward, or the pass opened after a step's last backward. Collective."""
        self.forget_failed()
        if self.in_backward:
            self.abort()  # an exception has ended a plain ``loss.backward()``
        else:
            self.end()

    def under_way(self) -> str | None:
        """Describe the running step, for error messages. Returns None between steps."""
        self.forget_failed()
        if self._scope is not None:
            return "inside a step (training_step, validation_step, or engine.step_scope())"
        if self.in_backward:
            return "inside a backward"
        if self.key is not None and not self._open.unused:
            return "between a forward and its backward"
        return None

    def plans_changed(self) -> None:
        """Forget what was learned of passes, after buckets got new plans."""
        self.order.plans_changed()
        self.reducer.plans_changed()
        self.saved.plans_changed()

    def stepped(self) -> None:
        """Restart the numbering of passes after an optimizer step, unless a scope is open."""
        if self._scope is None:
            self._ordinal = 0

    # -- forward ------------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """Open a pass if none is open, and gather ``unit`` before its module's forward."""
        self.forget_failed()
        if self.key is None:
            if self._scope is None and self.calls_meet and any(unit.reshards for unit in self.units):
                self.comm.meet(None, "a call of the module outside of a step, which all ranks must make")
            key, evaluation = self._scope or Scope("call", not torch.is_grad_enabled())
            self.begin(key, evaluation=evaluation, owner=None if self._scope else unit)
        if unit.index:
            self._demand(unit, "forward")
        else:
            unit.unshard_wait()
        self.lane.enters(f"{unit.title} {'recompute' if self.in_backward else 'forward'}")

    @outside_autograd
    def _demand(self, unit: Unit, what: str) -> None:
        self._open.unused = False
        self.comm.place = f"{what} of unit {unit.title} in pass {self.key}"
        self.stays.begin(unit)

    def post_forward(self, unit: Unit, *, outermost: bool, awaits_backward: Callable[[], bool]) -> None:
        """Drop ``unit`` after its module's forward, if allowed, and end the pass if the call opened it."""
        self.lane.leaves()
        if unit.index and not self.in_backward:
            self.stays.end(unit)
        if outermost and self._open.ends_with_call and not self.in_backward:
            self._open.ends_with_call = False
            if not awaits_backward():
                self.end()

    @outside_autograd
    def call_ends(self) -> None:
        """Answer other ranks' gathers after the outermost call of a module that holds units. Collective."""
        if self.key is not None and not self.in_backward:
            self.comm.place = f"end of a call in pass {self.key}"
            self.order.call_ends()

    def forward_raised(self) -> None:
        """Abort the pass after the outermost module call has raised, unless the scope will."""
        if self._scope is None:
            self.abort()

    # -- parameters that are touched outside of the calls of their units ----------------------------------------------

    def borrow(self, unit: Unit) -> None:
        self._demand(unit, "a read of parameters")

    def borrowed(self, unit: Unit, *, keep: bool) -> None:
        """Drop ``unit`` after a read of its parameters; with ``keep``, hold it until the pass ends."""
        if keep:
            self.progress.hold(unit)
        elif not self.in_backward:
            self.stays.end(unit)

    @outside_autograd
    def recomputes(self, unit: Unit) -> None:
        """Gather ``unit`` before its forward is computed again in a backward."""
        self.backward_begins()
        if unit.index and unit.reshards:
            self._demand(unit, "recomputation")

    # -- backward -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward_scope(self) -> Iterator[None]:
        """See ``Engine.backward_scope``."""
        self.forget_failed()
        try:
            self._begin_backward(explicit=True)
            yield
            self._end_backward()
        except BaseException as error:
            self.abort()
            explain_weights(error, self.units, self.progress)
            raise

    @outside_autograd
    def _begin_backward(self, *, explicit: bool) -> None:
        """Prepare units, gradients and the reducer for a backward. ``explicit``: the engine is told of its end."""
        if self.key is None:
            key, evaluation = self._scope or Scope("call", False)
            self.begin(key, evaluation=evaluation)
        else:
            self.watch_trainable()
        self.hooks.come_last()
        self.lane.backward_begins()
        self._enter(Phase.TOLD if explicit else Phase.NOTICED)
        self.explicit_backwards += explicit and self.look is None
        # Steps under way still read the gradients that this backward replaces or adds to.
        self.after_step.flush()
        # Before ``remove``, which sets ``grad`` to None: ``forget_cleared`` would take that for a clear by the user.
        self.sharded_grads.forget_cleared()
        if self.look is None:
            self.reducer.begin(str(self.key), lambda b: sum([info.param.requires_grad for info in b.params]))
        self.sharded_grads.remove([info for unit in self.units for info in unit.infos()])
        self.progress.backward_begins()
        self._needed = None

    def backward_begins(self) -> None:
        """Begin a backward at its first event, if the engine was not told of it. All backward events call this."""
        if self.phase is not Phase.TOLD:
            self.forget_failed()
        if not self.in_backward:
            self._begin_backward(explicit=False)
            passes_ref = ref(self)
            self._noticed = GraphTask(self._graph_task_ended, lambda: _graph_task_gone(passes_ref))
        if torch.is_grad_enabled():
            # create_graph: the new graph reads weights at moments that no hook reports. So units stay gathered. This
            # method is not ``outside_autograd``, so that it sees the grad mode.
            self._open.second_order = True

    @contextlib.contextmanager
    def looking(self, look: Look) -> Iterator[None]:
        """Give each gradient inside to ``look(info, grad)`` and store none. Steps do nothing inside. Collective."""
        self.leave()
        with self.sharded_grads.set_aside(info for unit in self.units for info in unit.infos()):
            self.look = look
            try:
                yield
                self.leave()
            finally:
                self.look = None

    def forget_failed(self) -> None:
        """Abort the open pass if an exception has ended a plain ``loss.backward()``."""
        if self.phase is Phase.NOTICED and (self._noticed is None or self._noticed.is_over):
            self.sharded_grads.forget_cleared()  # the user may have cleared gradients since the failure
            self.abort()

    def weights_needed(self, unit: Unit) -> bool:
        """Gather ``unit`` before a kernel of a backward reads its weights. Returns whether the weights are gathered."""
        # Outside of a backward someone only draws the graph, maybe on one rank: a gather would never end.
        if torch._C._current_graph_task_id() == -1:
            return unit.state is State.GATHERED
        self.backward_begins()
        self.lane.needs(f"{unit.title} backward")
        if unit is not self._needed or unit.state is not State.GATHERED:
            self._needed = unit
            self._demand(unit, "backward")
        return True

    def input_grads_arrived(self, unit: Unit, call: int) -> None:
        """Drop ``unit`` if it has all gradients, after the gradients of one call's inputs are complete."""
        self.progress.inputs_arrived(unit, call)
        self._maybe_reshard(unit)

    def grad_arrived(self, unit: Unit, bucket: Bucket, slot: int, grad: Tensor, *, shown: bool = False) -> None:
        """Pass one gradient to the reducer, and drop ``unit`` after its last one. ``shown``: a user's hook has seen it.

        Raises:
            RuntimeError: the user's hook should have seen the sum with an earlier gradient, but saw this part only.
        """
        # Not ``outside_autograd``: this runs for every parameter, and the callees use it where it matters.
        sums = self.sums
        if sums is None:
            self.backward_begins()
        if shown and (slot in self.reducer.grads[bucket].used or (sums is not None and (bucket, slot) in sums)):
            raise RuntimeError(
                f"a hook (register_post_accumulate_grad_hook) on {bucket.params[slot].fqn} was called for a second "
                "gradient before the first was cleared. torch shows such hooks the sum, which is in slices here. Take "
                "param.register_hook, which is given each gradient by itself, or look at the sum before the step: "
                "lightning_zero.gather(module, grads=True). Between steps, clear gradients by zero_grad()."
            )
        if sums is not None:
            sums.add(unit, bucket, slot, grad)
            return
        self.lane.arrived(f"{unit.title} backward")
        if self.look is None:
            self.reducer.take(bucket, slot, grad)
        else:
            self.look(bucket.params[slot], grad)
        if self.progress.grad_arrived(unit):
            self._maybe_reshard(unit)

    @contextlib.contextmanager
    def adding_up(self) -> Iterator[None]:
        """Sum the gradients that arrive inside in fp32, and reduce the sums as the gradients of one backward."""
        self.backward_begins()
        before, self.sums = self.sums, GradSums()
        try:
            yield
            sums = self.sums
        finally:
            self.sums = before
        for unit, bucket, slot, total in sums.take():  # nested calls pass their sums to the outer call
            self.grad_arrived(unit, bucket, slot, total)

    def _maybe_reshard(self, unit: Unit) -> None:
        may_go = self.in_backward and unit.index and not self._open.second_order
        if may_go and self.progress.is_over(unit):
            self.stays.end(unit)

    @outside_autograd
    def _graph_task_ended(self) -> None:
        if self.phase is not Phase.NOTICED:
            return
        if self.look is not None or self.reducer.has_arrivals:
            self._end_backward()
            return
        # This was torch.autograd.grad. Other ranks may not have called it, so nothing may be reduced.
        self._enter(Phase.FORWARD)
        self.sharded_grads.place_used()
        if not self._open.second_order:
            for unit in self.units[1:]:
                self.stays.end(unit)

    @outside_autograd
    def _end_backward(self) -> None:
        """Reduce the remaining gradients in order and close the pass, at the end of a backward. Collective."""
        self.comm.place = f"end of backward in pass {self.key}"
        self.lane.ends()
        # First: before a rank in its backward can issue gathers for ``order.end``, it may wait for these reductions.
        if self.look is None:
            self.reducer.flush()
        # Before ``reducer.end``, which waits for all ranks: another rank may need these gathers first.
        self.order.end()
        # Before ``reducer.end`` too, whose message says whether this rank has written to parameters.
        self.writes.take_all_over()
        written = self.look is None and self.reducer.end(self.writes.unconfirmed)
        self.sharded_grads.place_used()
        self._close()
        # After ``_close``: ``confirm`` may raise on all ranks, and no pass may be open then.
        if written:
            for unit in self.units:
                if not unit.reshards:
                    unit.unshard_wait()  # a copy whose refresh is under way would look like a different write
            self.writes.confirm()
        if self._scope is not None:
            self.begin(self._scope.key, evaluation=self._scope.evaluation)
            self._open.unused = True
