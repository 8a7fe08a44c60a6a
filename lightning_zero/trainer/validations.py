"""Leaving inside a validation of a fit, and going on from what was saved there.

A validation changes nothing of training, so the checkpoint is that of the moment before it, and says that a validation
was begun: the run that goes on from it, under any strategy, does all of this validation and then trains on.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl

from lightning_zero.checkpoint.rng import Generators
from lightning_zero.trainer import averaging

_RUN, _LOADER_IS_OVER = "run", "_store_dataloader_outputs"


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
        self._run, self._loader_is_over = self._loop.run, self._loop._store_dataloader_outputs
        self._loop.__dict__.update({_RUN: self._validate, _LOADER_IS_OVER: self._wait_for_others})

    def _validate(self) -> Any:
        if not self._trainer.sanity_checking:  # whose counts are Lightning's business
            self._loop.batch_progress.total.reset_on_restart()  # of a validation that was begun and never finished
        self._before = copy.deepcopy(self._loop.batch_progress)
        self._random = Generators.now(self._trainer.strategy.root_device)
        self._loop.setup_data()
        if self._loop.skip and self._loop._combined_loader is not None:  # others may have batches
            for _ in range(self._loop.num_dataloaders if self._loop._is_sequential else 1):
                self._wait_for_others(store=False)
        return self._run()

    def _wait_for_others(self, store: bool = True) -> None:
        """This rank has no more batches of a loader. What comes next takes all ranks."""
        while self._agree(False):
            pass
        if store:
            self._loader_is_over()

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, between two batches: the state before this validation, and counts that say that it was begun."""
        loop, device = self._loop, self._trainer.strategy.root_device
        progress, random = loop.batch_progress, Generators.now(device)
        begun = copy.deepcopy(self._before)
        begun.reset_on_run()
        begun.increment_ready()
        begun.increment_started()  # and not processed: Lightning's sign of an evaluation to go back to
        begun.is_last_batch = False
        loop.batch_progress = begun
        self._random.restore(device)
        try:
            with averaging.as_trained(self._trainer):
                yield
        finally:
            loop.batch_progress = progress
            random.restore(device)

    def can_be_done_anew(self) -> bool:
        """Whether a run can go on before this validation: gradients of a window are in no checkpoint, nor is a metric
        of training by which a scheduler goes after the validation."""
        names = {result.meta.name for result in self._trainer.fit_loop.epoch_loop._results.values()}
        names |= {f"{name}{end}" for name in names for end in ("_step", "_epoch")}
        by_training = any(c.reduce_on_plateau and c.monitor in names for c in self._trainer.lr_scheduler_configs)
        return not by_training and not self._trainer.fit_loop._should_accumulate()

    def let_go(self) -> None:
        for name in (_RUN, _LOADER_IS_OVER):
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
