"""Leaving inside a validation of a fit, and going on from what was saved there.

A validation changes nothing of training, so the checkpoint is that of the moment before it, and says that a validation
was begun: the run that goes on from it, under any strategy, does all of this validation and then trains on.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from lightning_zero.checkpoint.rng import Generators
from lightning_zero.lightning_api import pl
from lightning_zero.trainer.callbacks import averaging

_RUN, _LOADER_IS_OVER, _STEP, _END = "run", "_store_dataloader_outputs", "_evaluation_step", "on_run_end"


class Validations:
    """The validations of one fit. Ranks may have more or fewer batches, and agree at each batch that any of them has.

    Args:
        agree: on all ranks, with whether this one has a batch; returns whether any has. It may raise, on all ranks.
    """

    def __init__(self, trainer: pl.Trainer, agree: Callable[[bool], bool]) -> None:
        self._trainer = trainer
        self._agree = agree
        self._loop = trainer.fit_loop.epoch_loop.val_loop
        self._before = copy.deepcopy(self._loop.batch_progress)
        self._random = Generators.now(trainer.strategy.root_device)
        self._waited = 0  # loaders of this validation that are over on all ranks
        ours = {_RUN: self._validate, _LOADER_IS_OVER: self._end_loader, _STEP: self._step, _END: self._end}
        self._theirs = {name: getattr(self._loop, name) for name in ours}
        self._loop.__dict__.update(ours)

    def _validate(self) -> Any:
        if not self._trainer.sanity_checking:  # whose counts are Lightning's business
            self._loop.batch_progress.total.reset_on_restart()  # of a validation that was begun and never finished
        self._before = copy.deepcopy(self._loop.batch_progress)
        self._random = Generators.now(self._trainer.strategy.root_device)
        self._waited = 0
        outputs = self._theirs[_RUN]()
        self._wait_for_others(self._loaders)  # where there was nothing to do here, others may have batches
        return outputs

    def _end_loader(self) -> None:
        """This rank has no more batches of a loader. What comes next takes all ranks."""
        self._wait_for_others(self._waited + 1)
        self._theirs[_LOADER_IS_OVER]()

    def _step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        self._wait_for_others(dataloader_idx)  # of loaders that are empty here, which Lightning passes over
        self._theirs[_STEP](batch, batch_idx, dataloader_idx, dataloader_iter)

    def _end(self) -> Any:
        self._wait_for_others(self._loaders)
        return self._theirs[_END]()

    @property
    def _loaders(self) -> int:
        """That follow each other."""
        if self._loop._combined_loader is None:
            return 0
        return self._loop.num_dataloaders if self._loop._is_sequential else 1

    def _wait_for_others(self, loaders: int) -> None:
        """Until no rank has batches of the first ``loaders``."""
        while self._waited < loaders:
            while self._agree(False):
                pass
            self._waited += 1

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, between two batches: the state before this validation, and counts that say that it was begun.

        An exception leaves things so: callbacks that save on exceptions find what was saved here.
        """
        loop, device = self._loop, self._trainer.strategy.root_device
        progress, random = loop.batch_progress, Generators.now(device)
        before = copy.deepcopy(self._before)
        if not self._trainer.sanity_checking:
            before.reset_on_run()
            before.increment_ready()
            before.increment_started()  # and not processed: Lightning's sign of an evaluation to go back to
            before.is_last_batch = False
        loop.batch_progress = before
        self._random.restore(device)
        with averaging.as_trained(self._trainer):
            yield
        loop.batch_progress = progress
        random.restore(device)

    def can_be_done_anew(self) -> bool:
        """Whether a run can go on before this validation, as far as this rank knows. No checkpoint holds the gradients
        of a window, a metric of training by which a scheduler or a callback goes after the validation, a save that
        waits for it, a stop that was asked for, or the time since the last validation."""
        trainer = self._trainer
        names = {result.meta.name for result in trainer.fit_loop.epoch_loop._results.values()}
        names |= {f"{name}{end}" for name in names for end in ("_step", "_epoch")}
        followed = [c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau]
        followed += [getattr(c, "monitor", None) for c in trainer.callbacks]  # type: ignore[attr-defined]
        return not (
            any(isinstance(monitor, str) and monitor in names for monitor in followed)
            or any(getattr(c, "_defer_save_until_validation", False) for c in trainer.callbacks)  # type: ignore[attr-defined]
            or trainer.should_stop
            or getattr(trainer, "_val_check_time_interval", None) is not None
            or trainer.fit_loop._should_accumulate()
        )

    def let_go(self) -> None:
        for name in self._theirs:
            self._loop.__dict__.pop(name, None)


def repair_counts(trainer: pl.Trainer) -> None:
    """A batch that was fetched and never trained is not counted: validations every so many batches go by this."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    if total.ready == total.started + 1 == total.completed + 1:  # type: ignore[attr-defined]
        total.ready -= 1


def step_plateau_schedulers(trainer: pl.Trainer) -> None:
    """After a validation: at the end of an epoch that was resumed, schedulers that have their metric step.

    Lightning lets them out there, because metrics of before are in no checkpoint. These are of now.
    """
    loop = trainer.fit_loop
    monitors = [c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "epoch"]
    if loop.restarting and monitors and all(monitor in trainer.callback_metrics for monitor in monitors):
        loop._restarting = False
