"""Handles parameters that users' code reads or writes outside of the calls of their units.

::

                          inside a pass                        between passes
    w.square(), w.clamp_  gathers the unit                     shows masters: between.py
    w.data                gathers the unit until the pass ends shows masters: between.py
    w.data = value        writes to the masters                writes to the masters

Reads at stages 1 and 2 never raise; they wait for the gather that follows a step.

See [Note: placeholders]: a parameter that holds a placeholder calls this file before its values are used.
See [Note: uses of parameters between steps]: outside of passes a use shows masters, on all ranks.
See [Note: freed storage and autograd's views]: a unit stays gathered if users keep views of its values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.engine.passes.containers import find_tensors
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.saved_weights import hooks_allowed
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place, Shown
from lightning_zero.engine.units.param import own
from lightning_zero.engine.units.unit import Unit, Units


class Access:
    """Handles users' reads and writes of parameters; parameters call it as their ``Owner`` (``units/param.py``)."""

    def __init__(self, units: Units, passes: Passes) -> None:
        self._place_of = units.place_of
        self._passes, self._between, self._fence = passes, passes.between, passes.fence
        self._unit_of: dict[Bucket, Unit] = {bucket: unit for unit in units for bucket in unit.buckets}
        own((info.param for unit in units for info in unit.infos), self)

    def reads_values(self, params: Sequence[nn.Parameter], operation: str, run: Callable[[], object]) -> object:
        if self._fence.is_lowered:
            if self._fence.passing_on and operation == "detach":
                return params[0]  # the parameter itself, so that a use of the result is seen too
            self._fence.refuse_use(self._place_of(params[0]).info, operation)
            return run()
        brought = self._bring(params, operation, saves=torch.is_grad_enabled() and operation != "detach")
        # Outside of ``outside_autograd``: the caller's grad mode says whether autograd will save weights.
        saved, saves = self._passes.saved, bool(brought) and torch.is_grad_enabled()
        hooked = saves and hooks_allowed() and saved.alone
        with saved.hooked() if hooked else contextlib.nullcontext():
            result = run()
        # Our hooks miss some uses of a buffer: weights that autograd saved without them, and results that are views.
        tensors = [t for t in find_tensors(result) if not any(t is p for p in params)]
        for unit in brought:
            unit.in_graph |= saves
            keep = (saves and not hooked) or any(saved.owner_of(t) is unit for t in tensors)
            self._passes.borrowed(unit, keep=keep)
        return result

    def strides(self, param: nn.Parameter) -> tuple[int, ...]:
        return self._place_of(param).info.strides

    def hands_out(self, param: nn.Parameter, read: Callable[[], Tensor]) -> Tensor:
        place = self._place_of(param)
        if self._fence.is_lowered:
            is_master = place.bucket.plan.params_are_masters and place.bucket.shown is not Shown.PLACEHOLDERS
            return param if self._fence.passing_on and not is_master else read()  # a use of it is seen then
        if place.bucket.shown is Shown.PLACEHOLDERS or place.bucket.hides_rounded:
            for unit in self._bring([param], "data"):
                self._passes.borrowed(unit, keep=True)
        values = read()
        (self._between if place.bucket.shown is Shown.MASTERS else self._passes.writes).hand_out(place, values)
        return values

    def takes_grad(self, param: nn.Parameter, value: Tensor) -> bool:
        place = self._place_of(param)
        takes = value.dtype == place.bucket.dtypes.master and torch._C._current_graph_task_id() == -1
        if takes:
            place.info.check_shape(value.shape)
            self._passes.sharded_grads.take_assigned([(place, value)])
        return takes

    def replaces(self, param: nn.Parameter, value: Tensor) -> bool:
        place = self._place_of(param)
        if self._fence.is_lowered:
            self._fence.refuse_use(place.info, "data")
        elif isinstance(value, Tensor):
            place.info.check_shape(value.shape)
            self._replace(place, value)
            return True
        return False

    @outside_autograd
    def _replace(self, place: Place, value: Tensor) -> None:
        unit = self._unit_of[place.bucket]
        # Users hold views of values; or other ranks, which this rank does not wait for, may still read its masters.
        kept = place.bucket in self._between.memory or self._between.alone or self._between.kept
        if kept and place.bucket.shown is not Shown.MASTERS and self._passes.shows_masters(saves=False):
            self._between.use(unit, f"an assignment to {place.info.fqn}.data", beside=[unit])
        if place.bucket.shown is Shown.MASTERS:
            self._between.replace(place, value)
            return
        place.bucket.awaited_step.wait()
        # Another rank may wait for this unit's param sync. And a gather under way would overwrite the new values.
        self._passes.after_step.sync_params(unit)
        unit.unshard_wait()
        # The engine does not see which weights autograd saves of units that stay gathered.
        may_be_saved = unit.in_graph or not (unit.index and place.bucket.plan.reshards)
        self._passes.writes.replace(place, value, at_end=self._passes.key is not None and may_be_saved)

    @outside_autograd
    def _bring(self, params: Sequence[nn.Parameter], operation: str, *, saves: bool = False) -> list[Unit]:
        """Gather the units of ``params`` for the user's ``operation``. Return the units to reshard after the operation.
        Between the passes of a run, show the parameters' masters instead and return no units. ``saves``: autograd will
        save the values. Raises RuntimeError if parameters are sharded and neither a pass nor a run is open."""
        self._passes.forget_failed()
        brought: list[Unit] = []
        places = [self._place_of(param) for param in params]
        units = [self._unit_of[place.bucket] for place in places]
        for place, unit in zip(places, units, strict=True):
            bucket = place.bucket
            if bucket.shown is Shown.MASTERS:
                continue
            if not bucket.plan.reshards and not bucket.hides_rounded:
                # Between passes maybe only some ranks come here: tell the others where, for their error message.
                read = f"a read of {place.info.fqn} between steps, which takes all ranks"
                with self._passes.comm.set_place(read if self._passes.key is None else self._passes.comm.waits.place):
                    self._passes.after_step.sync_params(unit)
                    unit.unshard_wait()
                continue
            if self._passes.shows_masters(saves=saves):
                if not self._between.in_run:
                    raise RuntimeError(
                        f"{place.info.fqn} is sharded, and its values are on no rank now, so {operation!r} would read "
                        "or write a placeholder. Do this inside `with lightning_zero.gather(model):`, on all ranks."
                    )
                self._between.use(unit, f"{operation!r} of {place.info.fqn}", beside=units)
            elif bucket.shown is Shown.PLACEHOLDERS:
                self._passes.demand(unit, "a read of parameters")
                brought.append(unit)
        return brought
