"""Answers users' code that touches parameters outside of the calls of their units.

::

                          inside a pass                        between passes
    w.square(), w.clamp_  the unit is gathered for it          refused, naming gather()
    w.data                ... and stays until the pass ends    refused, naming gather()
    w.data = value        taken over                           taken over

All ranks take part in a pass, so a read inside of it can have the unit gathered, in the order that all ranks share.
Parameters that are on their way after a step (stages 1 and 2) are waited for, inside a pass or not. Operations on a
module that would see placeholders are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.passes.containers import find_tensors
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.writes import Writes
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.after_step import AfterStep
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.param import own
from lightning_zero.engine.units.unit import Unit


class Fence:
    """Refuses operations on the module that would see placeholders, unless it is lowered.

    Args:
        in_pass: whether a pass is open.
    """

    def __init__(self, buckets: Sequence[Bucket], in_pass: Callable[[], bool]) -> None:
        self._buckets, self._in_pass = buckets, in_pass
        self._lowered = False

    @property
    def is_lowered(self) -> bool:
        return self._lowered

    @contextlib.contextmanager
    def lowered(self) -> Iterator[None]:
        """Inside, nothing is refused."""
        previous, self._lowered = self._lowered, True
        try:
            yield
        finally:
            self._lowered = previous

    def refuse(self, what: str) -> None:
        """Raise where ``what`` would see placeholders.

        Raises:
            RuntimeError: names the right way.
        """
        if self._lowered:
            return
        plain = (
            what == "state_dict()"
            and not self._in_pass()
            and all(bucket.plan.params_are_masters for bucket in self._buckets)
        )
        if plain or all(bucket.is_plain for bucket in self._buckets):
            return
        raise RuntimeError(
            f"{what} of a sharded module would read or write placeholders instead of parameters. Use "
            "trainer.save_checkpoint(path) and trainer.fit(model, ckpt_path=path), or fabric.save and fabric.load, or "
            "trainer.strategy.export(folder) for a model of transformers, or wrap the call in "
            "`with lightning_zero.gather(model):`, on all ranks."
        )


class Access:
    """The owner of one engine's parameters (:class:`~lightning_zero.engine.units.param.Owner`)."""

    def __init__(
        self,
        units: Sequence[Unit],
        places: Mapping[int, Place],
        *,
        passes: Passes,
        after_step: AfterStep,
        writes: Writes,
        fence: Fence,
    ) -> None:
        self._places = places
        self._passes = passes
        self._after_step = after_step
        self._writes = writes
        self._fence = fence
        self._unit_of: dict[Bucket, Unit] = {bucket: unit for unit in units for bucket in unit.buckets}
        own((info.param for unit in units for info in unit.infos()), self)

    def reads_values(self, params: Sequence[nn.Parameter], operation: str, run: Callable[[], Any]) -> Any:
        if self._fence.is_lowered:
            return run()
        brought = self._bring(params, operation)
        # Read here, outside of ``outside_autograd``: the caller's grad mode says whether autograd will save weights.
        saved, saves = self._passes.saved, bool(brought) and torch.is_grad_enabled()
        packs = saves and saved.possible and saved.alone
        with saved.packed() if packs else contextlib.nullcontext():
            result = run()
        # A unit stays until the pass ends where something points into its buffer that nobody will ask us about: weights
        # that autograd has saved without our hooks, and results that are views.
        tensors = [t for t in find_tensors(result) if not any(t is p for p in params)]
        for unit in brought:
            self._passes.borrowed(unit, keep=(saves and not packs) or any(unit.holds(t) for t in tensors))
        return result

    def strides(self, param: nn.Parameter) -> tuple[int, ...]:
        return self._places[id(param)].info.strides

    def hands_out(self, param: nn.Parameter) -> None:
        if self._fence.is_lowered:
            return
        place = self._places[id(param)]
        if not place.bucket.shows_values:
            for unit in self._bring([param], "data"):
                self._passes.borrowed(unit, keep=True)
        self._note(place)

    @outside_autograd
    def _note(self, place: Place) -> None:
        self._writes.hand_out(place)

    def replaces(self, param: nn.Parameter, value: Tensor) -> bool:
        if self._fence.is_lowered or not isinstance(value, Tensor):
            return False
        place = self._places[id(param)]
        place.info.check_shape(value.shape)
        self._replace(place, value)
        return True

    @outside_autograd
    def _replace(self, place: Place, value: Tensor) -> None:
        unit = self._unit_of[place.bucket]
        place.bucket.awaited_step.wait()
        # Another rank, whose worker was faster, may have issued the unit's refresh already: it waits for ours. And a
        # gather under way would bring the old values after the new ones are written.
        self._after_step.refresh(unit)
        unit.unshard_wait()
        self._writes.replace(place, value)

    @outside_autograd
    def _bring(self, params: Sequence[nn.Parameter], operation: str) -> list[Unit]:
        """Bring the values of ``params`` here. Returns the units that were gathered for it."""
        self._passes.forget_failed()
        brought: list[Unit] = []
        for param in params:
            place = self._places[id(param)]
            unit = self._unit_of[place.bucket]
            if not place.bucket.reshards:
                # Between passes only some ranks may come here. The others' error message then says where this one is.
                if self._passes.key is None:
                    self._passes.comm.place = f"a read of {place.info.fqn} between steps, which takes all ranks"
                self._after_step.refresh(unit)
                unit.unshard_wait()
            elif self._passes.key is None:
                raise RuntimeError(
                    f"{place.info.fqn} is sharded, and between steps its values are on no rank, so {operation!r} would "
                    "read or write a placeholder. Do this inside `with lightning_zero.gather(model):`, on all ranks, "
                    "or inside a step (training_step, or trainer.strategy.step_scope())."
                )
            elif not place.bucket.shows_values:
                self._passes.borrow(unit)
                brought.append(unit)
        return brought
