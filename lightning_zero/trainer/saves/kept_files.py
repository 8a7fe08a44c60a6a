"""The files of ModelCheckpoint: ``last.ckpt``, and those that a dead run has left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.durable import link, naming, remove_leftovers, written_aside
from lightning_zero.lightning_api import Callback, ModelCheckpoint, pl
from lightning_zero.ranks.resume import FILES, files_of_job, job_name, note_file, note_job

_LINK, _REMOVE, _SAVE = "_link_checkpoint", "_remove_checkpoint", "_save_checkpoint"
_SHOULD_REMOVE = "_should_remove_checkpoint"
_HELD = "_lightning_zero_held"  # checkpoints that go when last.ckpt leads on
_PATCHED = (_LINK, _REMOVE, _SAVE, _SHOULD_REMOVE)


def attach(trainer: pl.Trainer) -> None:
    """Have ``last.ckpt`` lead to a checkpoint that is there, at every moment."""
    for callback in _of(trainer):
        held: list[str] = []
        callback.__dict__[_HELD] = held
        _put(callback, _LINK, partial(_link_behind_writes, held))
        _put(callback, _REMOVE, partial(_remove_behind_link, callback, held))


def _put(callback: ModelCheckpoint, name: str, function: Any) -> None:
    """Replace a method, where the user has put nothing in its place: theirs is called then."""
    callback.__dict__.setdefault(name, function)


def let_go(trainer: pl.Trainer) -> None:
    for callback in _of(trainer):
        callback.__dict__.pop(_HELD, None)
        for name in _PATCHED:
            ours = getattr(vars(callback).get(name), "func", None)
            if getattr(ours, "__module__", None) == __name__:
                del callback.__dict__[name]


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
            strategy.after_writes(partial(_link, linkpath, filepath))

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
                _put(callback, _SAVE, partial(_save_noted, callback, self._run_dir))
                link = getattr(callback, _LINK)
                callback.__dict__[_LINK] = partial(_link_noted, callback, self._run_dir, link)
                _put(callback, _SHOULD_REMOVE, partial(_should_remove, callback, self._run_dir))

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states: Mapping[str, Any] = checkpoint.get("callbacks") or {}
        self._folders = {key: state.get("dirpath") for key, state in states.items() if isinstance(state, Mapping)}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        again = trainer.is_global_zero and note_job(self._run_dir)  # all ranks are here, and have looked for the note
        known = trainer.strategy.broadcast(self._links(trainer) if again else {})
        for callback in _of(trainer):
            callback.last_model_path = callback.last_model_path or known.get(callback.state_key, "")
        if again:
            removed = [name for folder in self._all_folders(trainer) for name in remove_leftovers(folder)]
            removed += self._remove_unknown(trainer)
            if removed:
                print(f"removed what an earlier start of {job_name()} has left: {', '.join(removed)}", flush=True)

    def _links(self, trainer: pl.Trainer) -> dict[str, str]:
        """``last.ckpt`` of each ModelCheckpoint, which is saved before it makes that, and so may not know of it.

        It would take it for somebody else's then, and make a ``last-v1.ckpt``.
        """
        written, found = files_of_job(self._run_dir), {}
        for callback in _of(trainer):
            last = Path(callback.dirpath or "").absolute() / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
            if last in written.get(callback.state_key, ()) and os.path.lexists(last):
                found[callback.state_key] = os.path.join(callback.dirpath or "", last.name)
        return found

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
            last = os.path.abspath(callback.last_model_path)
            # What the start before it held for the link, and was killed before that led on: held again.
            callback.__dict__.setdefault(_HELD, []).extend(
                self._held_by_link(callback, trainer, written.get(callback.state_key, set()))
            )
            for path in sorted(written.get(callback.state_key, ())):
                if path.is_symlink() and str(path) != last:
                    path.unlink()
                elif path.exists() and not path.is_symlink() and os.path.realpath(path) not in kept:
                    trainer.strategy.remove_checkpoint(str(path))
                else:
                    continue
                removed.append(path.name)
        return removed

    @staticmethod
    def _held_by_link(callback: ModelCheckpoint, trainer: pl.Trainer, written: Iterable[Path]) -> list[str]:
        if not os.path.islink(callback.last_model_path):
            return []
        others = {callback.best_model_path, callback.kth_best_model_path, *callback.best_k_models, trainer.ckpt_path}
        known = {os.path.realpath(path) for path in others if path}
        lead = os.path.realpath(callback.last_model_path)
        return [str(p) for p in written if not p.is_symlink() and os.path.realpath(p) == lead and lead not in known]


def _save_noted(callback: ModelCheckpoint, run_dir: str, trainer: pl.Trainer, filepath: str) -> None:
    _note(callback, run_dir, trainer, filepath)
    type(callback)._save_checkpoint(callback, trainer, filepath)


def _link_noted(
    callback: ModelCheckpoint, run_dir: str, link: Any, trainer: pl.Trainer, filepath: str, linkpath: str
) -> None:
    _note(callback, run_dir, trainer, linkpath)
    link(trainer, filepath, linkpath)


def _note(callback: ModelCheckpoint, run_dir: str, trainer: pl.Trainer, path: str) -> None:
    """On all ranks, which raise together where the disk is full."""

    def act() -> None:
        if trainer.is_global_zero:
            with naming(Path(run_dir) / FILES):
                note_file(run_dir, callback.state_key, path)

    strategy: Any = trainer.strategy
    strategy.together("noting the name of a checkpoint", act)


def _should_remove(callback: ModelCheckpoint, run_dir: str, trainer: pl.Trainer, previous: str, current: str) -> bool:
    """Lightning keeps the checkpoint that a run goes on from: it may be the user's. One of this job's own is one
    like the others."""
    started_from = trainer.ckpt_path is not None and os.path.realpath(trainer.ckpt_path) == os.path.realpath(previous)
    written = files_of_job(run_dir).get(callback.state_key, set())
    if started_from and previous != current and Path(previous).absolute() in written and callback.dirpath is not None:
        return Path(callback.dirpath).absolute() in Path(previous).absolute().parents
    return type(callback)._should_remove_checkpoint(callback, trainer, previous, current)
