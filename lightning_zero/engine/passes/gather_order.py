"""Issues the gathers of units in a pass, in one order on all ranks. Other files gather the root and whole masters, and
update gathered parameters after a step.

In the first pass of each kind ranks agree on each gather by a message; later passes follow the recorded order
(docs/architecture.md). While ranks agree, a rank at the end of its pass sends DONE, and takes part in other ranks'
gathers until all ranks have sent DONE. Under ``dynamic_graph``, a rank sends CALLED at the end of an outermost module
call, and takes part until all have sent CALLED, DONE or MEETS. Before gathers of masters, which do not belong to the
pass, a rank sends MEETS until all ranks have sent MEETS. The recorded order contains this point."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_zero.comm.agreements import ApartError
from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.after_step import AfterStep
from lightning_zero.engine.units.unit import State, Unit
from lightning_zero.planning.schedule import Cursor, Plan, compile_plan, may_come_ahead
from lightning_zero.settings import ZeroConfig

DONE = -1
CALLED = -2
MEETS = -3


@dataclass(eq=False, repr=False)
class GatherOrder:
    """Gathers each unit before a use and reshards it afterwards. The root stays gathered until the pass ends."""

    units: Sequence[Unit]
    comm: Communicator
    _reducer: Reducer
    _after_step: AfterStep
    _config: ZeroConfig
    plans: dict[str, Plan] = field(default_factory=dict)
    ahead: int = 0  # number of uses whose gather had been issued before
    missed: int = 0  # number of uses that had to issue their gather
    holds_next: bool = False  # the next gather was not issued ahead, because its unit awaits a step
    apart: bool = False  # not all ranks have a batch: no recorded order holds
    _key: str = ""
    _cyclic: bool = False
    _cursor: Cursor | None = None
    _agreeing: bool = False
    _history: list[int] = field(default_factory=list)
    _one_path: bool = True  # all ranks have asked for the same units so far
    _idle: deque[Unit] = field(default_factory=deque)  # units that were gathered and not used yet
    _leaving: Unit | None = None  # a resharded unit, whose memory is freed after the next gather is issued

    def plans_changed(self) -> None:
        """Forget the recorded orders of gathers, because buckets have new plans."""
        self.plans = {}

    def begin(self, key: str, *, cyclic: bool) -> None:
        """Start a pass. All passes with the same ``key`` should use units in the same order. ``cyclic``: one pass can
        repeat this order several times."""
        self._key, self._cyclic = key, cyclic
        plan = None if self.apart else self.plans.get(key)
        self._reducer.pass_begins(one_path=plan is not None and plan.one_path)
        self._one_path = True
        anything = any(unit.reshards for unit in self.units)  # else a pass has no gathers
        self._agreeing = plan is None and anything
        self._cursor = Cursor(plan) if plan is not None else None
        self._history = []
        self._idle.clear()

    @outside_autograd
    def unshard(self, unit: Unit, what: str) -> None:
        """Gather ``unit`` (not the root), and wait for the gather. ``what``: the kind of use, for error messages."""
        self.comm.waits.place = f"{what} of unit {unit.title} in pass {self._key}"
        self._after_step.sync_params(unit)
        if not unit.reshards:
            unit.unshard_wait()
            return
        self._demand(unit)
        if self._leaving is not None:
            self._free_leaving()

    @outside_autograd
    def reshard(self, unit: Unit) -> None:
        """Reshard ``unit`` after a use, unless the plan or users' code still needs its parameters gathered."""
        if not unit.reshards or unit.state is not State.GATHERED:
            return
        if (self._cursor is None or self._agreeing or self._cursor.used(unit.index)) and not unit.is_held:
            if self._leaving is not None:
                self._free_leaving()
            # A gather waits for all uses of memory freed before the gather was issued. So free this unit's later. Its
            # parameters show placeholders already: every further use must come to the engine.
            unit.reshard(free=not self.holds_next)
            self._leaving = unit if self.holds_next else None

    def _free_leaving(self) -> None:
        """Free the gathered memory of the last unit that :meth:`reshard` resharded, unless it is free already."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.free()

    def _demand(self, unit: Unit) -> None:
        """Issue the gather of ``unit`` if necessary, prefetch the next units, and wait for the gather of ``unit``."""
        self.missed += unit.state is State.SHARDED
        self.ahead += unit in self._idle
        if unit.state is State.SHARDED:
            steps = self._cursor.up_to(unit.index) if self._cursor is not None and not self._agreeing else None
            if steps is not None:
                for index in steps:
                    self._issue(index, ahead=index != unit.index)
                    self._drop_idle(unit)
            else:
                self._agreeing, self._reducer.one_path = True, False
                needs = f"needs unit {unit.title} next ({self._key})"
                self.comm.waits.place = f"{needs}, which the recorded order does not have here"
                self._serve(self._exchange(unit.index), own=unit)
        if unit in self._idle:
            self._idle.remove(unit)
        # Before the wait, so that the next gathers run while this one is awaited and used.
        self._look_ahead()
        unit.unshard_wait()

    @outside_autograd
    def meet(self, what: str) -> None:
        """Wait until all ranks have called this method for the same operation ``what``, and have issued the same
        gathers of the open pass. Necessary before gathers that do not belong to the pass. Collective."""
        with self.comm.set_place(what):
            cursor = None if self._agreeing else self._cursor
            if self._agreeing:
                self._serve_until(MEETS)
                self._history.append(MEETS)
            elif cursor is not None:
                self._issue_ahead(cursor.up_to(MEETS) or ())
            places = self.comm.gather_checked(0 if cursor is None else cursor.taken, what)
            if cursor is not None:  # the plan may not have this place, to which some ranks come sooner than others
                self._issue_ahead(cursor.up_to_number(max(places)))

    def _issue_ahead(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._issue(index, ahead=True)
            self._drop_idle()

    def end(self) -> None:
        """End the pass: issue the gathers that other ranks still need, and record the order if new. Collective."""
        if self._agreeing:
            self._serve_until(DONE)
            if not self._config.dynamic_graph:
                self._learn()
        elif self._cursor is not None and not (self._cyclic and self._cursor.position == 0):
            self._issue_ahead(self._cursor.rest())
        self._free_leaving()

    def call_ends(self) -> None:
        """Under ``dynamic_graph``, take part in gathers until all ranks have left their outermost call. Collective."""
        # Users' own messages may follow the call, so every rank must have its units by then.
        if self._config.dynamic_graph and self._agreeing:
            self._serve_until(CALLED, DONE, MEETS)

    def abort(self) -> None:
        self._cursor, self._agreeing, self.holds_next, self.apart = None, False, False, False
        self._free_leaving()
        self._idle.clear()

    # -- agreeing -------------------------------------------------------------------------------------------------

    def _exchange(self, want: int) -> list[int]:
        """Send ``want`` (index of a unit, DONE, CALLED or MEETS) to all ranks. Return the value of each rank, in rank
        order. Raises ApartError if some ranks send MEETS and others DONE. Collective."""
        taken = self._cursor.taken if self._cursor is not None else 0
        wants, issued, places = self.comm.exchange(want, self._reducer.issued, taken)
        self._reducer.issued_everywhere = min(issued)
        self._one_path &= len(set(wants)) == 1
        if {MEETS, DONE}.issubset(wants):
            ranks = [rank for rank, other in enumerate(wants) if other == MEETS]
            raise ApartError(
                f"ranks {ranks} alone: state_dict(), a copy or gather() inside a step, while others have come to the "
                f"end of pass {self._key}. All ranks must make these calls."
            )
        if self._cursor is not None:  # ranks have left the plan, maybe some sooner than others
            self._issue_ahead(self._cursor.up_to_number(max(places)))
        return wants

    def _serve_until(self, sent: int, *also: int) -> None:
        """Send ``sent`` repeatedly, and take part in gathers that other ranks need, until all ranks have sent ``sent``
        or a value in ``also``. Collective."""
        while not {sent, *also}.issuperset(wants := self._exchange(sent)):
            self._serve(wants)
            self._drop_idle()

    def _serve(self, wants: Sequence[int], own: Unit | None = None) -> None:
        wanted = list(dict.fromkeys(want for want in wants if want >= 0))
        for index in wanted:
            self._history.append(index)
            self._issue(index, ahead=own is None or index != own.index)

    def _learn(self) -> None:
        if self.apart:
            return
        if self._key in self.plans:
            del self.plans[self._key]  # incomplete; the next pass records a whole one
            return
        nbytes = [unit.gathered_nbytes for unit in self.units]
        plan = compile_plan(self._history, nbytes, self._config.keep_gathered_bytes, cyclic=self._cyclic)
        self.plans[self._key] = plan._replace(one_path=self._one_path)

    # -- issuing --------------------------------------------------------------------------------------------------

    def _issue(self, index: int, *, ahead: bool) -> None:
        if index == MEETS:
            return
        unit = self.units[index]
        # Another rank needs a unit again that this rank has not dropped: this rank has to send its slice.
        if unit.state is not State.SHARDED:
            unit.serve()
            return
        if not self._agreeing:
            self._history.append(index)
        if unit is self._leaving:
            self._free_leaving()  # the gather takes the memory again, after the uses so far
        unit.unshard_begin()
        if ahead:
            self._idle.append(unit)

    def _look_ahead(self) -> None:
        self._drop_idle()
        self.holds_next = False
        if self._cursor is None or self._agreeing:
            return
        most = self._config.prefetch_bytes

        def admit(index: int) -> bool:
            if index == MEETS:
                return False
            unit = self.units[index]
            if unit.state is not State.SHARDED or not self._may_come_early(unit):
                return False
            if not may_come_ahead(unit.gathered_nbytes, [u.gathered_nbytes for u in self._idle], most):
                return False
            self._issue(index, ahead=True)
            return True

        self._cursor.ahead(admit)
        if (following := self._cursor.peek()) is not None and following != MEETS and most:
            unit = self.units[following]
            if unit.state is State.SHARDED:
                self.holds_next = not self._may_come_early(unit)
                if unit.step_done:
                    unit.stage_ahead()

    def _may_come_early(self, unit: Unit) -> bool:
        """Return whether ``unit`` can be prefetched: False while an offloaded step of its masters is not finished."""
        if self.comm.shard.size == 1:
            return unit.step_done
        # Not by ``step_done``, which depends on this rank's worker: see [Note: one order of collectives].
        return all(bucket.awaited_step.future is None for bucket in unit.buckets)

    def _drop_idle(self, wanted: Unit | None = None) -> None:
        """Reshard prefetched units that were not used, oldest first, until the other prefetched units fit the prefetch
        budget. Do not reshard ``wanted``."""
        if len(self._idle) < 2:
            return
        budget = max(self._config.prefetch_bytes, *[u.gathered_nbytes for u in self._idle])
        while len(self._idle) > 1 and sum([u.gathered_nbytes for u in self._idle]) > budget:
            unit = self._idle.popleft()
            if unit is wanted:
                continue
            unit.drop()
