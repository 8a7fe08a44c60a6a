"""The files of ModelCheckpoint: ``last.ckpt``, and those that a dead run has left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_zero.checkpoint.durable import link, remove_leftovers, written_aside
from lightning_zero.ranks.resume import files_of_job, job_name, note_file, note_job
from lightning_zero.trainer.checkpoint_io import after_writes

_LINK, _REMOVE, _SAVE = "_link_checkpoint", "_remove_checkpoint", "_save_checkpoint"
_PATCHED = (_LINK, _REMOVE, _SAVE)


def attach(trainer: pl.Trainer) -> None:
    """Have ``last.ckpt`` lead to a checkpoint that is there, at every moment."""
    for callback in _of(trainer):
        held: list[str] = []
        callback.__dict__[_LINK] = partial(_link_behind_writes, held)
        callback.__dict__[_REMOVE] = partial(_remove_behind_link, callback, held)


def let_go(trainer: pl.Trainer) -> None:
    for callback in _of(trainer):
        for name in _PATCHED:
            callback.__dict__.pop(name, None)


def _of(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


def _remove_behind_link(callback: ModelCheckpoint, held: list[str], trainer: pl.Trainer, filepath: str) -> None:
    """Hold a checkpoint to which ``last.ckpt`` leads, until that leads to the next one."""
    last = callback.last_model_path
    if trainer.is_global_zero and os.path.islink(last) and os.path.realpath(last) == os.path.realpath(filepath):
        held.append(filepath)
    else:
        type(callback)._remove_checkpoint(callback, trainer, filepath)


def _link_behind_writes(held: list[str], trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
    """What Lightning does by removing the old link first, and before a writer in the background is done."""
    strategy: Any = trainer.strategy

    def act() -> None:
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            after_writes(strategy.checkpoint_io, partial(_link, linkpath, filepath))

    strategy.together(f"linking {linkpath}", act)
    while held:
        strategy.remove_checkpoint(held.pop())


def _link(path: str, target: str) -> None:
    try:
        link(path, target)
    except OSError:
        if not os.path.isfile(target):
            raise
        with written_aside(path) as part, open(target, "rb") as source, open(part.path, "wb") as copy:
            shutil.copyfileobj(source, copy)  # a file system without links


class NoteJob(Callback):
    """Notes in the run folder which job trains there, and the checkpoints that it writes.

    A job that starts again goes on from the last of them. What the start before it has left is removed: files that were
    never finished, and checkpoints that their ModelCheckpoint does not know, because the process was killed before it
    could remove them.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._folders: dict[str, Any] = {}  # of each ModelCheckpoint, in the checkpoint that the run goes on from

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folders = {}
        if job_name() is not None:
            for callback in _of(trainer):
                callback.__dict__[_SAVE] = partial(_save_noted, callback, self._run_dir)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states: Mapping[str, Any] = checkpoint.get("callbacks") or {}
        self._folders = {key: state.get("dirpath") for key, state in states.items() if isinstance(state, Mapping)}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if note_job(self._run_dir):  # all ranks are here, and have looked for the note
            removed = [name for folder in self._all_folders(trainer) for name in remove_leftovers(folder)]
            removed += self._remove_unknown(trainer)
            if removed:
                print(f"removed what an earlier start of {job_name()} has left: {', '.join(removed)}", flush=True)

    def _all_folders(self, trainer: pl.Trainer) -> set[Path]:
        folders = [self._run_dir, *(c.dirpath for c in _of(trainer))]
        return {Path(folder).resolve() for folder in folders if folder is not None and Path(folder).is_dir()}

    def _remove_unknown(self, trainer: pl.Trainer) -> list[str]:
        written = files_of_job(self._run_dir)
        removed = []
        for callback in _of(trainer):
            # One that keeps all does not know them all; one with another folder has forgotten what it knew.
            if callback.save_top_k == -1 or self._folders.get(callback.state_key, 0) != callback.dirpath:
                continue
            known = {callback.best_model_path, callback.last_model_path, callback.kth_best_model_path}
            kept = {
                os.path.realpath(path) for path in {*known, *callback.best_k_models, trainer.ckpt_path or ""} if path
            }
            for path in sorted(written.get(callback.state_key, ())):
                if path.exists() and not path.is_symlink() and os.path.realpath(path) not in kept:
                    trainer.strategy.remove_checkpoint(str(path))
                    removed.append(path.name)
        return removed


def _save_noted(callback: ModelCheckpoint, run_dir: str, trainer: pl.Trainer, filepath: str) -> None:
    if trainer.is_global_zero:
        note_file(run_dir, callback.state_key, filepath)
    type(callback)._save_checkpoint(callback, trainer, filepath)
