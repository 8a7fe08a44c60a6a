"""Passes through the units of a sharded module: which unit is gathered when, and dropped when.

A *pass* is a forward with its backward, or one evaluation step. It opens the root unit, which stays gathered until the
pass ends; the other units come and go with the calls of their modules. A pass is opened by :meth:`Passes.scope` (the
strategy does) or by the first call of a unit's module, and ends with its backward, or, where none follows, with the
call or the scope that opened it.

A backward is *explicit* where the engine is told of it (:meth:`Passes.backward_scope`): its end reduces what is left.
A plain ``loss.backward()`` is noticed by the first hook that fires and ends with autograd's graph task; it reduces only
if a gradient arrived, because ``torch.autograd.grad`` looks the same and brings none.
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
    """A function that calls ``method`` as long as its object lives, and returns false afterwards."""
    reference = WeakMethod(method)

    def call(unit: Unit) -> bool:
        alive = reference()
        return alive is not None and alive(unit)

    return call


def _graph_task_gone(passes_ref: ReferenceType[Passes]) -> None:
    """A graph task is over. If nothing has told the pass of its end, an exception has ended it: its gradients show that
    they are there from now on, so that ``zero_grad`` is seen."""
    passes = passes_ref()
    if passes is not None and passes.phase is Phase.NOTICED:
        passes.sharded_grads.place_used()


class Passes:
    """The passes of one engine, one at a time: its hooks and its scopes come here.

    Attributes:
        hooks: the hooks that call the events below.
        saved: tells which weights a backward reads.
        phase: where the open pass is.
        progress: what units wait for in the open pass; stays: has them gathered and dropped in it.
        lane: what is computed, for who records it.
        explicit_backwards: how many backwards the engine has been told of so far.
        aborted: an exception has ended a pass, and none has begun since.
        calls_meet: steps are told by scopes. A call of a module outside of them may be one rank's alone, and its
            gathers would be matched with others of ranks that are in a step; so all come together before it.
        sums: takes gradients that arrive inside of :meth:`adding_up`.
        look: is given the gradients of backwards, which nothing keeps; see :meth:`looking`.
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
        # Weakly: a graph holds the functions that unpack its tensors, and Python's garbage collector does not see
        # through a graph. Anything that keeps a graph (a loss in a list) would keep the engine and all its shards.
        self.saved = SavedWeights(units, _weakly(self.weights_needed))
        self.lane = ComputeLane()
        self.phase = Phase.BETWEEN
        self.progress = Progress(units)
        self.stays = Stays(order, self.progress, after_step)
        self.explicit_backwards = 0
        self._open = OpenPass(None)
        self._scope: Scope | None = None
        self._ordinal = 0
        self._noticed: GraphTask | None = None  # of the backward that was noticed last
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
        """Of the open pass; passes of one key are expected to take the same path. None between passes."""
        return self._open.key

    @property
    def in_backward(self) -> bool:
        return self.phase in (Phase.TOLD, Phase.NOTICED)

    @property
    def explicit(self) -> bool:
        """A backward is running whose end will be told."""
        return self.phase is Phase.TOLD

    def _enter(self, phase: Phase) -> None:
        if (self.phase, phase) not in LEGAL:
            raise RuntimeError(f"pass {self.key}: illegal transition {self.phase.name} -> {phase.name}")
        self.phase = phase

    def watch_trainable(self) -> None:
        """Put hooks on the parameters that require a gradient now; some may have been unfrozen since the last call."""
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
        """Open a pass, and with it the root unit."""
        self.recover()
        self.watch_trainable()
        # Training passes that follow one another in a step may take different paths, so each place in the step has a
        # plan of its own. Evaluations repeat one path, and do not count.
        full_key = f"{key}, evaluating {owner.title if owner else ''}" if evaluation else f"{key}/{self._ordinal}"
        self._enter(Phase.FORWARD)
        self._open = OpenPass(full_key, evaluates=evaluation, ends_with_call=owner is not None)
        self.comm.place = f"pass {full_key}"
        self.order.begin(full_key, cyclic=evaluation)
        if not evaluation:
            for unit in self.units[1:]:  # the root stays until the pass ends
                unit.pass_begins()
        self.after_step.refresh(self.root)
        if self.root.state is State.SHARDED:
            self.root.unshard_begin()
        self.root.unshard_wait()

    def recover(self, what: str = "going on after an exception") -> None:
        """Go on after an exception has ended a pass, if it has. On all ranks.

        Args:
            what: the purpose, in words.
        """
        if self.aborted:
            # How many refreshes a rank has issued by now depends on its worker. ``resume`` compares the numbers of
            # operations, so each rank issues all of its refreshes first: equal numbers must mean equal operations.
            self.after_step.flush()
            self.comm.resume(what)
            self.aborted = False  # last: where ranks have come to different calls, the next one has to agree again

    @outside_autograd
    def end(self) -> None:
        """End the open pass: drop the root and all else that is gathered. No-op outside of a pass."""
        if self.key is not None:
            if self._open.unused:
                self.after_step.refresh()  # steps that are not over yet go on behind the next pass
            else:
                # Another rank may have used units that this one has not. It waits for their refreshes, which are
                # gathers and need this rank too.
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
        """See ``Engine.step_scope``."""
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
        """See ``Engine.abort``."""
        # One deadline for all that is in flight: with one for each message a rank would wait for hours for a dead peer.
        deadline = time.monotonic() + ABANDON_S
        self.aborted = True
        self.lane.ends()
        if self.in_backward and self.look is None:
            self.reducer.abort(deadline)
            # The backward has taken them away. Without them nobody could tell later what the user has cleared since.
            self.sharded_grads.place_used()
        self.order.abort()
        self.hooks.forget_calls()
        self.hooks.forget_inputs()
        self.progress.pass_ends()
        for unit in self.units:
            unit.pass_ends(deadline)
        self.saved.plans_changed()  # buffers may have other memory
        # Set and not entered: an exception comes in any phase, between two passes too.
        self.phase, self._open = Phase.BETWEEN, OpenPass(None)
        self.stays.pass_ends()

    @outside_autograd
    def leave(self) -> None:
        """End the pass that no backward has ended: that of a step without one, or what follows a step's last backward.

        All ranks come here and end the pass together. They may have issued different parts of its plan.
        """
        self.forget_failed()
        if self.in_backward:
            self.abort()  # an exception in a backward that the engine was not told of
        else:
            self.end()

    def under_way(self) -> str | None:
        """What is going on, in words, if a step is; None between steps."""
        self.forget_failed()
        if self._scope is not None:
            return "inside a step (training_step, validation_step, or engine.step_scope())"
        if self.in_backward:
            return "inside a backward"
        if self.key is not None and not self._open.unused:
            return "between a forward and its backward"
        return None

    def plans_changed(self) -> None:
        """Forget what was learned of passes: buckets have other plans."""
        self.order.plans_changed()
        self.reducer.plans_changed()
        self.saved.plans_changed()

    def stepped(self) -> None:
        """Count passes anew after a step of the optimizer: the next pass is the first of its step."""
        if self._scope is None:
            self._ordinal = 0

    # -- forward ------------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """The module of ``unit`` is called."""
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
        """The module of ``unit`` returned.

        Args:
            outermost: no call of another unit is around it.
            awaits_backward: whether a backward is to be expected from it.
        """
        self.lane.leaves()
        if unit.index and not self.in_backward:
            self.stays.end(unit)
        if outermost and self._open.ends_with_call and not self.in_backward:
            self._open.ends_with_call = False
            if not awaits_backward():
                self.end()

    @outside_autograd
    def call_ends(self) -> None:
        """The outermost call of a module that holds units returned."""
        if self.key is not None and not self.in_backward:
            self.comm.place = f"end of a call in pass {self.key}"
            self.order.call_ends()

    def forward_raised(self) -> None:
        """The outermost call of a module ended with an exception."""
        if self._scope is None:
            self.abort()

    # -- parameters that are touched outside of the calls of their units ----------------------------------------------

    def borrow(self, unit: Unit) -> None:
        """Gather ``unit`` inside a pass, because its parameters are read."""
        self._demand(unit, "a read of parameters")

    def borrowed(self, unit: Unit, *, keep: bool) -> None:
        """A read of parameters of ``unit`` is over.

        Args:
            keep: somebody holds values of the unit, which then stay until the pass ends.
        """
        if keep:
            self.progress.hold(unit)
        elif not self.in_backward:
            self.stays.end(unit)

    @outside_autograd
    def recomputes(self, unit: Unit) -> None:
        """The forward of ``unit`` is computed again in a backward."""
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
        """A backward starts; ``explicit``: its end will be told."""
        if self.key is None:
            key, evaluation = self._scope or Scope("call", False)
            self.begin(key, evaluation=evaluation)
        else:
            self.watch_trainable()  # some may have been unfrozen since the pass began, by a forward that led nowhere
        self.hooks.come_last()
        self.lane.backward_begins()
        self._enter(Phase.TOLD if explicit else Phase.NOTICED)
        self.explicit_backwards += explicit and self.look is None
        # Steps under way still read the gradients that this backward replaces or adds to.
        self.after_step.flush()
        # Before ``remove``, which sets ``grad`` to None. To ``forget_cleared`` a None says that users have cleared it,
        # and that would drop what earlier backwards have accumulated.
        self.sharded_grads.forget_cleared()
        if self.look is None:
            self.reducer.begin(str(self.key), lambda b: sum([info.param.requires_grad for info in b.params]))
        self.sharded_grads.remove([info for unit in self.units for info in unit.infos()])
        self.progress.backward_begins()
        self._needed = None

    def backward_begins(self) -> None:
        """Begin a backward that the engine was not told of; each event of a backward comes here first.

        It is not ``outside_autograd``: grad mode is on in a backward with ``create_graph``, and is asked for below.
        """
        if self.phase is not Phase.TOLD:
            self.forget_failed()
        if not self.in_backward:
            self._begin_backward(explicit=False)
            passes_ref = ref(self)
            self._noticed = GraphTask(self._graph_task_ended, lambda: _graph_task_gone(passes_ref))
        if torch.is_grad_enabled():
            # create_graph: the new graph needs weights again, at moments that no hook tells. So units stay gathered.
            self._open.second_order = True

    @contextlib.contextmanager
    def looking(self, look: Look) -> Iterator[None]:
        """Inside, ``look(info, grad)`` is given each gradient as autograd has made it, and nothing keeps it.

        Gradients that are there stay as they are, and steps and clipping do nothing. Around whole steps, on all ranks.
        """
        self.leave()
        with self.sharded_grads.set_aside(info for unit in self.units for info in unit.infos()):
            self.look = look
            try:
                yield
                self.leave()
            finally:
                self.look = None

    def forget_failed(self) -> None:
        """Abort the pass of a backward that an exception has ended, if the engine was never told of that backward."""
        if self.phase is Phase.NOTICED and (self._noticed is None or self._noticed.is_over):
            self.sharded_grads.forget_cleared()  # placed when it failed: the user may have cleared some since
            self.abort()

    def weights_needed(self, unit: Unit) -> bool:
        """Have the weights of ``unit`` gathered for a kernel of a backward; returns whether they are there."""
        # Outside of a backward somebody only looks at a graph (a drawing, a debugger), maybe on one rank alone: a
        # gather here would wait for ranks that never come.
        if torch._C._current_graph_task_id() == -1:
            return unit.state is State.GATHERED
        self.backward_begins()
        self.lane.needs(f"{unit.title} backward")
        if unit is not self._needed or unit.state is not State.GATHERED:
            self._needed = unit
            self._demand(unit, "backward")
        return True

    def input_grads_arrived(self, unit: Unit, call: int) -> None:
        """The gradients of the inputs of one call are complete."""
        self.progress.inputs_arrived(unit, call)
        self._maybe_reshard(unit)

    def grad_arrived(self, unit: Unit, bucket: Bucket, slot: int, grad: Tensor, *, shown: bool = False) -> None:
        """Autograd accumulated the gradient of one parameter; ``shown``: a hook of the user's has seen it.

        Raises:
            RuntimeError: that hook would have seen the sum of several in torch, and saw one of them here.
        """
        # Not ``outside_autograd`` as a whole: it comes for every parameter, and what it calls is so where that matters.
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
        """Add up the gradients that arrive inside, in fp32, and take them at the end as those of one backward."""
        self.backward_begins()
        before, self.sums = self.sums, GradSums()
        try:
            yield
            sums = self.sums
        finally:
            self.sums = before
        for unit, bucket, slot, total in sums.take():  # inside of another such call they go on to its sums
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
        # This was torch.autograd.grad: it brings no gradient to parameters, so nothing may be reduced, as other ranks
        # may not have called it. The forward goes on, or another backward follows.
        self._enter(Phase.FORWARD)
        self.sharded_grads.place_used()
        if not self._open.second_order:
            for unit in self.units[1:]:
                self.stays.end(unit)

    @outside_autograd
    def _end_backward(self) -> None:
        """End a backward on all ranks: reduce what is left, in order, and close the pass."""
        self.comm.place = f"end of backward in pass {self.key}"
        self.lane.ends()
        # The reductions first: a rank that is still in its backward may wait for one of them (``Reducer._issue``), and
        # as long as it waits it does not come to the gathers that ``order.end`` may wait for.
        if self.look is None:
            self.reducer.flush()
        # Before ``reducer.end``, which waits for all ranks: one that is still on its way may need these gathers first.
        self.order.end()
        # Before ``reducer.end`` too, whose message tells the others whether this rank has written to parameters.
        self.writes.take_all_over()
        written = self.look is None and self.reducer.end(self.writes.unconfirmed)
        self.sharded_grads.place_used()
        self._close()
        # After the pass is closed: ``confirm`` may raise, on all ranks, and the engine must be at rest by then.
        if written:
            for unit in self.units:
                if not unit.reshards:
                    unit.unshard_wait()  # a copy whose refresh is under way would look like a write that differs
            self.writes.confirm()
        if self._scope is not None:
            self.begin(self._scope.key, evaluation=self._scope.evaluation)
            self._open.unused = True
