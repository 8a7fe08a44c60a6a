"""Runs passes: follows forwards and backwards, gathers each unit before a use, and reshards the unit afterwards.

A *pass* is a forward with its backward, or one evaluation step. A backward is *explicit* inside of
:meth:`Passes.backward_scope`. A plain ``loss.backward()`` is noticed when its first hook is called, and ends with
autograd's graph task.

See [Note: weak references and graphs]: objects that autograd holds refer to the passes weakly.
See [Note: one order of collectives]: passes begin, meet and end on all ranks, or raise on all.
See [Note: what resume may trust]: after an exception all gathers that follow steps are issued before ranks compare
counts of messages.
See [Note: masters during an offloaded step]: a backward, and every read of masters, first waits for the steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_zero.comm.agreements import digest_of, is_same
from lightning_zero.comm.communicator import ABANDON_S, Communicator
from lightning_zero.device import recording
from lightning_zero.engine.passes.between import Between
from lightning_zero.engine.passes.gather_order import GatherOrder
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.passes.masters import ShardReader
from lightning_zero.engine.passes.phases import LEGAL, Hooks, OpenPass, Phase, Scope, Stepper
from lightning_zero.engine.passes.saved_weights import SavedWeights, explain_weights, weakly
from lightning_zero.engine.passes.sharded_grads import ShardedGrads
from lightning_zero.engine.passes.writes import BufferSync, Fence, Writes
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.after_step import AfterStep
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.engine.units.unit import State, Unit, Units
from lightning_zero.optimizers.refused import refuse_unequal
from lightning_zero.settings import Precision, ZeroConfig
from lightning_zero.timeline.compute_lane import ComputeLane
from lightning_zero.timeline.record import Timeline

MOST_PLANS = 16  # passes of one step with a plan each; later ones, of a loop without steps, share one
Look = Callable[[ParamInfo, Tensor], object]


class Passes:
    """Runs the passes of one engine, one at a time. The engine's hooks and context managers call the methods."""

    hooks: Hooks  # made after the passes

    def __init__(self, module: nn.Module, units: Units, comm: Communicator, config: ZeroConfig, cores: int) -> None:
        """Make the parts of the passes. Collective. ``cores``: number of cores for this rank's offloaded steps."""
        self.units, self.comm, self.config = units, comm, config
        self.precision = config.precision.name or Precision.fp32
        self.after_step = AfterStep(units, comm.streams, cores)
        self.reducer = Reducer(units.buckets, comm, config.reduce_bucket_bytes)
        self.order = GatherOrder(units, comm, self.reducer, self.after_step, config)
        changes = self.after_step.changes
        self.writes = Writes(module, units.buckets, comm, config, changes)
        self.buffers, self.reader = BufferSync(module, comm), ShardReader(units.buckets, comm, changes)
        most = config.optimizer.skip_nonfinite
        self.sharded_grads = ShardedGrads(self.reducer, self.after_step, self.forget_failed, most_overflows=most)
        most_bytes = config.prefetch_bytes
        self.between = Between(units, comm, self.writes, self.reader, most_bytes=most_bytes, settle=self._settle)
        self.fence = Fence(units.buckets, in_pass=self._in_pass, in_run=lambda: self.between.in_run)
        self.timeline = Timeline(config.timeline, comm, self.wait_for_all)
        self.saved = SavedWeights(units, weakly(self.weights_needed, False))
        self.lane = ComputeLane()
        self.phase = Phase.BETWEEN
        self._open = OpenPass(None)
        self._scope: Scope | None = None
        self._ordinal = 0
        self._noticed: Callable[[], object | None] = lambda: None  # gives None when the noticed backward is over
        self._needed: Unit | None = None  # the last unit whose weights a backward has read
        self.aborted = False  # an exception has ended a pass, and no pass has begun since
        # In a step that computes in fewer bits than masters have: no module was called since an optimizer's step.
        self._stepped = False
        self.look: Look | None = None  # gets each gradient inside :meth:`looking`
        self.steppers: Sequence[Stepper] = ()
        self.on_grad: Callable[[ParamInfo, Tensor], None] | None = None  # sees each gradient of this rank

    @property
    def key(self) -> str | None:
        """Return the kind of the open pass; None between passes. Passes of one kind should use units in one order."""
        return self._open.key

    @property
    def in_backward(self) -> bool:
        return self.phase in (Phase.BACKWARD, Phase.IMPLICIT_BACKWARD)

    def _enter(self, phase: Phase) -> None:
        if (self.phase, phase) not in LEGAL:
            raise RuntimeError(f"pass {self.key}: illegal transition {self.phase.name} -> {phase.name}")
        self.phase = phase

    # -- begin and end ------------------------------------------------------------------------------------------------

    @outside_autograd
    def begin(self, key: str, *, evaluation: bool, owner: Unit | None = None) -> None:
        """Open a pass of kind ``key``, and gather the root. Collective. ``evaluation``: the pass has no backward.
        ``owner``: the unit whose call opens the pass, outside of a step; None: a step opens the pass."""
        if self.between.shown or self.between.alone or self.between.kept:
            self.between.close()
        if self.between.rounded:
            self.between.pass_begins()
        self._stepped = False
        self.recover()
        self.hooks.watch_trainable()
        # Training passes in one step may take different paths, so each gets its own plan by its number in the step.
        # Evaluations repeat one path and are not numbered.
        full_key = f"{key}, evaluating {owner.title if owner else ''}" if evaluation else f"{key}/{self._ordinal}"
        self._enter(Phase.FORWARD)
        self._open = OpenPass(full_key, evaluates=evaluation, ends_with_call=owner is not None)
        self.comm.waits.place = f"pass {full_key}"
        self.order.begin(full_key, cyclic=evaluation)
        if not evaluation:
            for unit in self.units[1:]:
                unit.pass_begins()
        root = self.units[0]
        self.after_step.sync_params(root)
        if root.state is State.SHARDED:
            root.unshard_begin()
        root.unshard_wait()

    def shows_masters(self, *, saves: bool) -> bool:
        """Return whether users' code that uses a parameter outside of module calls must see the master: True between
        steps and, in a step with manual optimization, between an optimizer's step and the next module call. ``saves``:
        autograd will save the values for a backward, which needs a pass. Collective."""
        if self._stepped and saves:
            self._set_stepped(False)
        elif self._stepped:
            self.end()
        if self.key is None and self._scope is not None and not self._stepped:
            # A backward has raised inside of a step that goes on.
            self.begin(self._scope.key, evaluation=self._scope.evaluation)
        return self.key is None

    def meet(self, what: str) -> None:
        """Wait until all ranks call this for the operation ``what``, which gathers masters. Collective."""
        if self.key is None or self.in_backward:
            self.comm.gather_checked(None, what)
        else:
            self.order.meet(what)

    def check_room(self, module: nn.Module, what: str, *, or_on_host: bool = False) -> bool:
        """Call :meth:`Between.check_room` for the parameters of ``module`` if the operation ``what`` shows their
        masters between steps; otherwise return False. Collective."""
        between_steps = self.key is None and self.between.in_run and not (self.fence.is_lowered or self.fence.is_plain)
        return between_steps and self.between.check_room(module.parameters(), what, or_on_host=or_on_host)

    def _set_stepped(self, stepped: bool) -> None:
        """If ``stepped`` (an optimizer has stepped), point parameters at placeholders, so that users' uses call the
        engine, which shows masters. Otherwise point parameters at the compute parameters again."""
        self._stepped = stepped
        for bucket in self.units[0].resharded:
            bucket.show(gathered=not stepped)
        if stepped:
            self.between.pass_ends()
        else:
            self.between.pass_begins()

    def recover(self, what: str = "going on after an exception") -> None:
        """Resynchronize the ranks if an exception has ended a pass. ``what``: the next operation. Collective."""
        if self.aborted:
            # ``resume`` compares the ranks' numbers of operations. How many param syncs a rank has issued depends on
            # its worker thread, so each rank issues all param syncs first: equal numbers then mean equal operations.
            self.after_step.flush()
            self.comm.resume(what)
            self.aborted = False  # last: after a failed agreement the next call must agree again

    @outside_autograd
    def end(self) -> None:
        """End the open pass and reshard all gathered units. Does nothing between passes. Collective."""
        if self.key is not None:
            if self._open.unused:
                self.after_step.sync_params()  # unfinished steps may go on during the next pass
            else:
                # Another rank may use units that this rank does not use. Their param syncs need this rank, too.
                self.after_step.sync_all_params()
            self.writes.take_assigned()
            self.order.end()
            self._close()

    def _close(self) -> None:
        self.hooks.forget_inputs()
        for unit in self.units:
            unit.pass_ends()
        self._ordinal = min(self._ordinal + (not self._open.evaluates), MOST_PLANS)
        self._enter(Phase.BETWEEN)
        if self.between.rounded:
            self.between.pass_ends()
        self._open = OpenPass(None)
        self.comm.waits.place = "between passes"

    @contextlib.contextmanager
    def scope(self, key: str, *, evaluation: bool) -> Iterator[None]:
        """Context manager that runs its body as a step of kind ``key``; see ``Engine.step_scope``. Collective."""
        self.leave()
        self._ordinal = 0
        self._scope = Scope(key, evaluation)
        try:
            self.begin(key, evaluation=evaluation)
            yield
            self._scope, self._stepped = None, False
            self.after_step.changes.step_follows = False  # a step by hand was made inside, if at all
            if evaluation or (self.between.in_run and (self.key is None or self._open.unused)):
                self.end()
                self.between.close()
                if self.between.memory or self.between.kept:
                    self.between.refresh()
        except BaseException:
            self._scope = None
            self.abort()
            raise

    @outside_autograd
    def abort(self) -> None:
        """Close the pass after an exception. Sends no message. Waits up to 10 s for messages in flight."""
        # One deadline for all messages: one deadline each would add up to hours if a peer is dead.
        deadline = time.monotonic() + ABANDON_S
        self.aborted = True
        if recording.recorder is not None:
            self.lane.ends()
        if self.in_backward and self.look is None:
            self.reducer.abort(deadline)
            # The backward set ``param.grad`` to None, so the engine would not see what users clear later.
            self.sharded_grads.place_used()
        self.between.abort()
        self.order.abort()
        self.hooks.forget_calls()
        self.hooks.forget_inputs()
        for unit in self.units:
            unit.pass_ends(deadline)
        self.saved.plans_changed()
        self.between.pass_ends()
        # not ``_enter``: an exception may come in any phase
        self.phase, self._open, self._stepped = Phase.BETWEEN, OpenPass(None), False
        self.writes.take_assigned()

    @outside_autograd
    def leave(self) -> None:
        """End the open pass, if any; abort the pass if an exception has ended its backward. Collective."""
        if self.between.shown or self.between.alone or self.between.kept:
            self.between.close()
        self.forget_failed()
        if self.in_backward:
            self.abort()  # an exception has ended a plain ``loss.backward()``
        else:
            self.end()

    @outside_autograd
    def wait_for_all(self) -> None:
        """Wait for optimizer steps and the gathers that follow steps, so that masters can be read and changed. After an
        exception, ranks first replace process groups if necessary. Collective."""
        if self.between.shown or self.between.alone or self.between.kept:
            self.between.flush()
        self._settle()

    def _settle(self) -> None:
        self.forget_failed()
        self.recover()
        self.after_step.wait_for_all()

    def end_run(self) -> None:
        """End the open pass, and wait for optimizer steps and gathers in flight, when a run ends. Collective."""
        self.leave()
        whole = self.after_step.failed is None  # if a step has failed, its error was raised before
        if whole:
            self.after_step.wait_for_all()  # not self.wait_for_all(): after an exception other ranks may be gone
        self.timeline.run_ends(together=whole and not self.aborted)

    def masters_changed(self, changed: set[Bucket]) -> None:
        """After masters of the ``changed`` buckets have changed, gather these buckets' replicated parameters unit by
        unit. The next forward waits for the gathers. In an open pass wait for the root's gather now. Collective."""
        if self.between.alone:
            self.between.hide_alone()
        self.after_step.masters_changed(changed)
        if self.key is not None:
            self.after_step.sync_params(self.units[0])
            self.units[0].unshard_wait()
        self.refresh()

    def refresh(self) -> None:
        """Copy new masters into the views of parameters, if any, that users' code keeps between steps. Collective."""
        if (self.between.memory or self.between.kept) and not self.in_backward:
            if self.key is not None and self.between.memory:
                self.order.meet("new values of parameters of which views are kept")
            self.between.refresh()
            if self.key is not None:
                self.between.close()

    def under_way(self) -> str | None:
        """Return a phrase for error messages that names the step, backward or pass under way; None if there is none."""
        self.forget_failed()
        if self._scope is not None:
            return "inside a step (training_step, validation_step, or engine.step_scope())"
        if self.in_backward:
            return "inside a backward"
        if self.key is not None and not self._open.unused:
            return "between a forward and its backward"
        return None

    def plans_changed(self, config: ZeroConfig) -> None:
        """Forget the recorded orders of gathers and reductions, because buckets have new plans for ``config``."""
        self.config = config
        self.order.plans_changed()
        self.between.plans_changed()
        self.after_step.count_references()
        self.reducer.plans_changed()
        self.saved.plans_changed()

    def stepped(self) -> None:
        """Called after an optimizer's step. Outside of :meth:`scope` the numbering of passes restarts at 0."""
        if self._scope is None:
            self._ordinal = 0
        elif self._open.unused and self.between.rounds:
            self._set_stepped(True)

    # -- forward ------------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """Open a pass if none is open, and gather ``unit`` before its module's forward."""
        self.forget_failed()
        if self._open.key is None:
            if self._scope is None and self.between.in_run and self.between.shows_for_call(unit, self.hooks.running):
                return
            key, evaluation = self._scope or Scope("call", not torch.is_grad_enabled())
            self.begin(key, evaluation=evaluation, owner=None if self._scope else unit)
        elif self._stepped:
            self._set_stepped(False)
        if unit.index:  # :meth:`begin` and :meth:`masters_changed` wait for the root
            self.demand(unit, "forward")
        if recording.recorder is not None:
            self.lane.enters(f"{unit.title} {'recompute' if self.in_backward else 'forward'}")

    def demand(self, unit: Unit, what: str) -> None:
        """Gather ``unit``, which is not the root, for a use in the open pass. ``what``: the use, for errors."""
        self._open.unused = False
        self.order.unshard(unit, what)

    def post_forward(self, unit: Unit, *, outermost: bool, awaits_backward: Callable[[], bool]) -> None:
        """Reshard ``unit`` after its module's forward, unless the unit must stay gathered. End the pass if this call
        opened the pass and no backward follows. ``outermost``: no other unit's call is open. ``awaits_backward()``:
        whether a backward can follow."""
        if recording.recorder is not None:
            self.lane.leaves()
        if unit.index and not self.in_backward:
            self.order.reshard(unit)
        if outermost and self._open.ends_with_call and not self.in_backward:
            self._open.ends_with_call = False
            if not awaits_backward():
                self.end()

    @outside_autograd
    def call_ends(self) -> None:
        """Take part in other ranks' gathers after the outermost call of a module that holds units. Collective."""
        if self.key is not None and not self.in_backward:
            self.comm.waits.place = f"end of a call in pass {self.key}"
            self.order.call_ends()

    def forward_raised(self) -> None:
        """Abort the pass after the outermost call has raised. Inside :meth:`scope` leave this to the scope."""
        if self._scope is None:
            self.abort()

    # -- parameters that are touched outside of the calls of their units ----------------------------------------------

    def borrowed(self, unit: Unit, *, keep: bool) -> None:
        """Reshard ``unit``, which users' code has read, now or, with ``keep``, when the pass ends."""
        if keep:
            unit.is_held = True
        elif not self.in_backward:
            self.order.reshard(unit)

    @outside_autograd
    def recomputes(self, unit: Unit) -> None:
        """Gather ``unit`` before its forward is computed again in a backward."""
        self.backward_begins()
        if unit.index and unit.reshards:
            self.demand(unit, "recomputation")

    # -- backward -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Context manager that treats its body as one backward, and reduces all gradients at the end. Collective."""
        self.forget_failed()
        try:
            self._begin_backward(explicit=True)
            yield
            self._end_backward()
        except BaseException as error:
            self.abort()
            explain_weights(error, self.units)
            raise

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward()`` inside :meth:`backward_scope`. Collective."""
        with self.backward_scope():
            loss.backward(**kwargs)

    @outside_autograd
    def _begin_backward(self, *, explicit: bool) -> None:
        """Prepare units, gradients and the reducer for a backward. ``explicit``: the caller will end the backward."""
        if self.key is None:
            key, evaluation = self._scope or Scope("call", False)
            self.begin(key, evaluation=evaluation)
        else:
            self.hooks.watch_trainable()
        self.hooks.come_last()
        if recording.recorder is not None:
            self.lane.backward_begins()
        self._enter(Phase.BACKWARD if explicit else Phase.IMPLICIT_BACKWARD)
        # Steps under way still read the gradients that this backward replaces or adds to.
        self.after_step.flush()
        # Before ``remove``, which sets ``grad`` to None: ``forget_cleared`` would take that for a clear by the user.
        self.sharded_grads.forget_cleared()
        if self.look is None:
            self.reducer.begin(str(self.key))
        for unit in self.units:
            self.sharded_grads.remove(unit.infos)
            unit.expected, unit.arrived = sum([info.param.requires_grad for info in unit.infos]), 0
        self._needed = None

    def backward_begins(self) -> None:
        """Start a backward, unless one is running. Called first by every hook that autograd calls in a backward."""
        if self.phase is Phase.IMPLICIT_BACKWARD and self._noticed() is None:
            self.forget_failed()
        if self.phase is not Phase.BACKWARD and self.phase is not Phase.IMPLICIT_BACKWARD:
            self._begin_backward(explicit=False)
            # Only autograd references ``end``, which therefore dies when the graph task ends, also by an exception. A
            # strong reference would keep this object alive, and the pass in its backward.
            end, gone = partial(self._graph_task_ended), weakly(self._graph_task_gone, None)
            self._noticed = ref(end, lambda _: gone())
            torch.autograd.Variable._execution_engine.queue_callback(end)
        if torch.is_grad_enabled():
            # create_graph: the new graph reads weights at moments that no hook reports. So units stay gathered. This
            # method is not ``outside_autograd``, so that it sees the grad mode.
            self._open.second_order = True

    @contextlib.contextmanager
    def looking(self, look: Look) -> Iterator[None]:
        """Context manager in which gradients are passed to ``look(info, grad)`` and not stored. Collective."""
        self.leave()
        with self.sharded_grads.set_aside(info for unit in self.units for info in unit.infos):
            self.look = look
            try:
                yield
                self.leave()
            finally:
                self.look = None

    def _in_pass(self) -> bool:
        """Return whether a pass is open in which the values of parameters are not the masters. Between steps of a run,
        first end a pass that waits for its backward. A later backward then opens another pass. Collective."""
        self.forget_failed()
        waits = self.phase is Phase.FORWARD and self._scope is None and not self.hooks.running
        # Views of gathered values (which autograd has saved, maybe) must keep their memory.
        if waits and self.between.in_run and not (self.between.shown or any(unit.is_held for unit in self.units)):
            self.end()
        return self.key is not None and not self._stepped and not self.between.shown

    @contextlib.contextmanager
    def copying(self, module: nn.Module, what: str) -> Iterator[None]:
        """Context manager in which parameters of ``module`` have the masters as values. Does nothing unless a pass of a
        run is open in which compute parameters are dropped after use or differ in dtype from masters. Does nothing in a
        backward or a call of a unit, where :class:`Fence` raises. ``what``: the body's operation. Collective."""
        fence, runs = self.fence, self.between.runs_here and not (self.in_backward or self.hooks.running)
        if fence.is_lowered or fence.is_plain or not (runs and fence.lacks_masters and self._in_pass()):
            yield
            return
        self.order.meet(f"{what} inside a step, which all ranks must call")
        self.between.check_room(module.parameters(), what)
        try:
            self.between.show_in_pass(module.parameters())
            yield
        finally:
            self.between.hide_in_pass()

    def forget_failed(self) -> None:
        """Abort the open pass if an exception has ended a plain ``loss.backward()``."""
        if self.phase is Phase.IMPLICIT_BACKWARD and self._noticed() is None:
            self.sharded_grads.forget_cleared()  # the user may have cleared gradients since the failure
            self.abort()

    def weights_needed(self, unit: Unit) -> bool:
        """Gather ``unit`` before a kernel of a backward reads its weights. Return whether the weights are gathered. Do
        not gather outside of a backward, because there a single rank may read saved tensors of a graph."""
        if torch._C._current_graph_task_id() == -1:
            return unit.state is State.GATHERED
        self.backward_begins()
        if recording.recorder is not None:
            self.lane.needs(f"{unit.title} backward")
        if unit is not self._needed or unit.state is not State.GATHERED:
            self._needed = unit
            self.demand(unit, "backward")
        return True

    def input_grads_arrived(self, unit: Unit, call: int) -> None:
        """Called when the gradients of all inputs of call number ``call`` of ``unit`` have arrived. Reshard the unit if
        no other gradient needs its weights."""
        unit.calls.discard(call)
        self._maybe_reshard(unit)

    def grad_arrived(self, unit: Unit, bucket: Bucket, slot: int, grad: Tensor, *, shown: bool = False) -> None:
        """Pass the gradient of the parameter at ``slot`` to the reducer, and reshard ``unit`` after its last gradient.
        ``shown``: users have hooks that got ``grad``. Raises RuntimeError if these hooks would, without the engine,
        have got the sum of ``grad`` and an earlier gradient."""
        # Not ``outside_autograd``: this runs for every parameter, and the callees use it where it matters.
        self.backward_begins()
        if shown and slot in self.reducer.grads[bucket].used:
            raise RuntimeError(
                f"a hook (register_post_accumulate_grad_hook) on {bucket.params[slot].fqn} was called for a second "
                "gradient before the first was cleared. torch shows such hooks the sum, which is in slices here. Take "
                "param.register_hook, which is given each gradient by itself, or look at the sum before the step: "
                "lightning_zero.gather(module, grads=True). Between steps, clear gradients by zero_grad()."
            )
        if recording.recorder is not None:
            self.lane.arrived(f"{unit.title} backward")
        if self.on_grad is not None:
            self.on_grad(bucket.params[slot], grad)
        if self.look is None:
            self.reducer.accept_grad(bucket, slot, grad)
        else:
            self.look(bucket.params[slot], grad)
        unit.arrived += 1
        if unit.arrived >= unit.expected:
            self._maybe_reshard(unit)

    def _maybe_reshard(self, unit: Unit) -> None:
        """Reshard ``unit`` in a backward if all gradients that are computed with its weights have arrived."""
        may_go = self.in_backward and unit.index and not self._open.second_order
        if may_go and not unit.calls and unit.arrived >= unit.expected:
            unit.arrived = 0  # for a second backward
            self.order.reshard(unit)

    def _graph_task_gone(self) -> None:
        """Set ``param.grad`` again after ``loss.backward()`` raised, so that a later ``zero_grad()`` is noticed."""
        if self.phase is Phase.IMPLICIT_BACKWARD:
            self.sharded_grads.place_used()

    @outside_autograd
    def _graph_task_ended(self) -> None:
        if self.phase is not Phase.IMPLICIT_BACKWARD:
            return
        if self.look is not None or any(grads.arrived for grads in self.reducer.grads.values()):
            self._end_backward()
            return
        # This was torch.autograd.grad. Other ranks may not have called it, so nothing may be reduced.
        self._enter(Phase.FORWARD)
        self.sharded_grads.place_used()
        if not self._open.second_order:
            for unit in self.units[1:]:
                self.order.reshard(unit)

    @outside_autograd
    def _end_backward(self) -> None:
        """End a backward: reduce the remaining gradients in order, and close the pass. Collective."""
        self.comm.waits.place = f"end of backward in pass {self.key}"
        if recording.recorder is not None:
            self.lane.ends()
        # First: before a rank in its backward can issue gathers for ``order.end``, it may wait for these reductions.
        if self.look is None:
            self.reducer.flush()
        # Before ``reducer.end``, which waits for all ranks: another rank may need these gathers first.
        self.order.end()
        # Before ``reducer.end`` too, whose message says whether this rank has written to parameters.
        self.writes.take_all_over()
        # What ranks must agree on rides on the message of ``reducer.end``.
        settings = digest_of([stepper.settings() for stepper in self.steppers])
        told = [bool(self.writes.unconfirmed), self.buffers.are_there, *settings]
        written, buffers, *settings = (() if self.look is not None else self.reducer.end(told)) or (0, 0)
        self.buffers.are_there |= bool(buffers)
        self.sharded_grads.place_used()
        self.sharded_grads.backwards += self.look is None
        self.after_step.changes.backward_ended(step_follows=self.look is None and not self.reducer.unreduced)
        try:
            if written:
                for unit in self.units:
                    unit.unshard_wait()  # a copy whose param sync is under way would look like a different write
                self.writes.confirm()
        finally:
            self._close()
        if not is_same(settings):  # after ``_close``: it raises on all ranks, and no pass may be open then
            found = self.comm.all_gather_objects([s.settings() for s in self.steppers], "settings of param groups")
            refuse_unequal(found)
        if self._scope is None and (self.between.memory or self.between.kept):
            self.between.refresh()
        if self._scope is not None:
            self.begin(self._scope.key, evaluation=self._scope.evaluation)
            self._open.unused = True
