"""Keeps one order of gathers on all ranks: agreed by an exchange while unknown, then followed.

Every gather of units that are dropped and needed again is issued through here, so that all ranks issue the same gathers
in the same order. Other gathers are issued elsewhere: the root's at the start of a pass, those that follow a step
(``units/after_step.py``), and those of whole masters (``Bucket.full_master``). How it works:

- *Agreeing* (the first pass of a kind, every pass under ``dynamic``, or after leaving the plan): a rank that needs a
  unit sends its number to all; every unit that any rank sent is gathered by all, in rank order. A rank that reaches the
  end of its pass sends DONE and answers the others until all are done. Under ``dynamic`` a rank that reaches the end of
  an outermost call sends CALLED and answers those that are still in theirs.
- *Following*: the compiled history of such a pass. A demand issues everything up to it, so a unit that this rank skips
  is still gathered in its place; between demands the plan is looked ahead in under the byte budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.passes.gradients import IssuedReductions
from lightning_zero.engine.units.unit import State, Unit
from lightning_zero.planning.schedule import Cursor, Plan, compile_plan, may_come_ahead

DONE = -1
CALLED = -2


class GatherOrder:
    """Issues the gathers of units that are dropped after use.

    Attributes:
        ahead, missed: units whose gather was, and was not, under way or over when they were needed.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Communicator,
        issued: IssuedReductions,
        *,
        prefetch_bytes: int,
        keep_bytes: int,
        dynamic: bool,
    ) -> None:
        self.units = units
        self.comm = comm
        self._issued = issued
        self.prefetch_bytes = prefetch_bytes
        self.keep_bytes = keep_bytes
        self.dynamic = dynamic
        self.plans: dict[str, Plan] = {}
        self._key = ""
        self._cyclic = False
        self._cursor: Cursor | None = None
        self._agreeing = False
        self._history: list[int] = []
        self._one_path = True  # all ranks have asked for the same units so far
        self._idle: deque[Unit] = deque()  # gathered ahead or for others, not used yet
        self._guess: Cursor | None = None  # dynamic: the last pass, as a hint of what comes next
        self.ahead = self.missed = 0
        self.holds_next = False  # the next gather was not issued ahead, because its unit awaits a step

    def plans_changed(self) -> None:
        """Forget the plans, because other units are dropped after use from here on."""
        self.plans = {}

    def begin(self, key: str, *, cyclic: bool) -> None:
        """A pass starts. Passes of one ``key`` are expected to take the same path."""
        self._key, self._cyclic = key, cyclic
        plan = self.plans.get(key)
        follows = plan is not None and not self.dynamic
        self._issued.pass_begins(one_path=plan is not None and follows and plan.one_path)
        self._one_path = True
        anything = any(unit.reshards for unit in self.units)  # else nothing is ever gathered along the path
        self._agreeing = not follows and anything
        self._cursor = Cursor(plan) if plan is not None and follows else None
        self._guess = Cursor(plan) if plan is not None and self.dynamic else None
        self._history = []
        self._idle.clear()

    def demand(self, unit: Unit) -> None:
        """Make sure that ``unit`` is gathered, and gather ahead."""
        self.missed += unit.state is State.SHARDED
        self.ahead += unit in self._idle
        if unit.state is State.SHARDED:
            steps = self._cursor.up_to(unit.index) if self._cursor is not None and not self._agreeing else None
            if steps is not None:
                for index in steps:
                    self._issue(index, ahead=index != unit.index)
                    self._drop_idle(unit)
            else:
                self._agree_on(unit)
        if unit in self._idle:
            self._idle.remove(unit)
        # Before the wait: the next gathers are under way while this one is waited for and used.
        self._look_ahead()
        unit.unshard_wait()

    def used(self, unit: Unit) -> bool:
        """A use of ``unit`` is over; whether it may be dropped now."""
        return self._cursor is None or self._agreeing or self._cursor.used(unit.index)

    def end(self) -> None:
        """End the pass: serve the other ranks until all are done, then learn from what happened. On all ranks."""
        # A rank that has no use for them still takes part in the gathers of the others, here and below: a collective
        # that one rank leaves out never ends for the rest, and later ones would be matched with it.
        if self._agreeing:
            while set(wants := self._exchange(DONE)) != {DONE}:
                self._serve(wants)
                self._drop_idle()  # this rank has no demand any more that would do it
            self._learn()
        elif self._cursor is not None and not (self._cyclic and self._cursor.position == 0):
            for index in self._cursor.rest():
                self._issue(index, ahead=True)
                self._drop_idle()

    def call_ends(self) -> None:
        """Under ``dynamic``: answer the ranks that are still in their call. Messages of the user's may follow, and they
        would wait for these in vain. On all ranks."""
        if self.dynamic and self._agreeing:
            while not {CALLED, DONE}.issuperset(wants := self._exchange(CALLED)):
                self._serve(wants)
                self._drop_idle()

    def abort(self) -> None:
        self._cursor, self._agreeing, self.holds_next = None, False, False
        self._idle.clear()

    # -- agreeing -------------------------------------------------------------------------------------------------

    def _agree_on(self, unit: Unit) -> None:
        self._agreeing, self._issued.one_path = True, False
        self.comm.place = f"needs unit {unit.title} next ({self._key}), which the recorded order does not have here"
        self._serve(self._exchange(unit.index), own=unit)

    def _exchange(self, want: int) -> list[int]:
        """Tell all ranks what this one wants next. Returns what each rank wants, in rank order."""
        wants, issued = self.comm.exchange(want, self._issued.here)
        self._issued.everywhere = min(issued)
        self._one_path &= len(set(wants)) == 1
        return wants

    def _serve(self, wants: Sequence[int], own: Unit | None = None) -> None:
        wanted = list(dict.fromkeys(want for want in wants if want not in (CALLED, DONE)))
        if wanted and self._guess is not None:
            wanted += self._guessed(wanted)
        for index in wanted:
            self._history.append(index)
            self._issue(index, ahead=own is None or index != own.index)

    def _guessed(self, wanted: Sequence[int]) -> list[int]:
        """The unit that followed last time, if any. It follows from what all ranks know, so that all guess the same."""
        assert self._guess is not None
        for index in wanted:
            if self._guess.up_to(index) is None:
                return []
        following = self._guess.peek()
        return [] if following is None or following in wanted else [following]

    def _learn(self) -> None:
        if self._key in self.plans and not self.dynamic:
            del self.plans[self._key]  # the next pass is recorded as a whole: this one knows only what it gathered
            return
        nbytes = [unit.gathered_nbytes for unit in self.units]
        keep = 0 if self.dynamic else self.keep_bytes
        plan = compile_plan(self._history, nbytes, keep, cyclic=self._cyclic)
        self.plans[self._key] = plan._replace(one_path=self._one_path)

    # -- issuing --------------------------------------------------------------------------------------------------

    def _issue(self, index: int, *, ahead: bool) -> None:
        unit = self.units[index]
        # Another rank has dropped the unit and needs it again, while it is still here: this rank has to send its slice.
        if unit.state is not State.SHARDED:
            unit.serve()
            return
        if not self._agreeing:
            self._history.append(index)
        unit.unshard_begin()
        if ahead:
            self._idle.append(unit)

    def _look_ahead(self) -> None:
        self._drop_idle()
        self.holds_next = False
        if self._cursor is None or self._agreeing:
            return

        def admit(index: int) -> bool:
            unit = self.units[index]
            if unit.state is not State.SHARDED or not self._may_come_early(unit):
                return False
            if not may_come_ahead(unit.gathered_nbytes, [u.gathered_nbytes for u in self._idle], self.prefetch_bytes):
                return False
            self._issue(index, ahead=True)
            return True

        self._cursor.ahead(admit)
        if (following := self._cursor.peek()) is not None and self.prefetch_bytes:
            unit = self.units[following]
            if unit.state is State.SHARDED:
                self.holds_next = not self._may_come_early(unit)
                if unit.step_done:
                    unit.stage_ahead()

    def _may_come_early(self, unit: Unit) -> bool:
        """Whether ``unit`` may be gathered ahead. One that awaits its offloaded step is gathered when it is needed."""
        # ``awaits_step`` is the same on all ranks; ``step_done`` depends on how far this rank's worker has got. Decided
        # by that, an exception that ends the pass on all ranks would find different numbers of gathers issued.
        return not unit.awaits_step if self.comm.shard_size > 1 else unit.step_done

    def _drop_idle(self, wanted: Unit | None = None) -> None:
        """Drop units that were gathered for others, or by a wrong guess, before they pile up. ``wanted`` stays."""
        budget = max(self.prefetch_bytes, max((u.gathered_nbytes for u in self._idle), default=0))
        while len(self._idle) > 1 and sum([u.gathered_nbytes for u in self._idle]) > budget:
            unit = self._idle.popleft()
            if unit is wanted:
                continue
            unit.drop()
