"""Manage the files of ModelCheckpoint: ``last.ckpt``, and files that a killed run has left. A restarted job, also one
that runs the user's own script, resumes from the last checkpoint that it wrote.

``submit -- python train.py`` names the job's folder in ``LIGHTNING_ZERO_RUN_DIR``. Each ``Trainer.fit`` of the script
saves there on a signal and every half hour, and resumes from there, whatever ``ckpt_path`` and ``default_root_dir``
are. So it never resumes from a checkpoint that another job has left in one of the user's folders.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

from lightning_zero.checkpoint.durable import link, naming, remove_leftovers, written_aside
from lightning_zero.lightning_api import Callback, ModelCheckpoint, TrainerFn, pl
from lightning_zero.ranks.resume import (
    FILES,
    RUN_DIR_VARIABLE,
    checkpoint_of_job,
    files_of_job,
    job_name,
    note_file,
    note_job,
)
from lightning_zero.trainer.adapted import is_ours

# Checkpoints to remove once last.ckpt links to a newer one.
_held: WeakKeyDictionary[ModelCheckpoint, list[str]] = WeakKeyDictionary()


def _of(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


class KeepsFiles(ModelCheckpoint):
    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        _note(self, trainer, filepath)
        super()._save_checkpoint(trainer, filepath)

    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        """Remove ``filepath`` now or, if ``last.ckpt`` links to it, once the link leads to a newer checkpoint."""
        last = self.last_model_path
        leads_to_it = os.path.islink(last) and os.path.realpath(last) == os.path.realpath(filepath)
        if is_ours(trainer) and trainer.is_global_zero and leads_to_it:
            _held.setdefault(self, []).append(filepath)
        else:
            super()._remove_checkpoint(trainer, filepath)

    def _link_checkpoint(self, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:  # type: ignore[override]
        """Replace the link ``last.ckpt`` atomically, after background writes. (Lightning would remove it first.)"""
        if not is_ours(trainer):
            super()._link_checkpoint(trainer, filepath, linkpath)
            return
        strategy: Any = trainer.strategy
        _note(self, trainer, linkpath)

        def act() -> None:
            if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
                strategy._checkpoints.after_writes(partial(_link, linkpath, filepath))

        strategy._together(f"linking {linkpath}", act)
        for path in _held.pop(self, []):
            strategy.remove_checkpoint(path)

    def _should_remove_checkpoint(self, trainer: pl.Trainer, previous: str, current: str) -> bool:
        """Return True also for the checkpoint that this job wrote and resumed from. (Lightning would keep it.)"""
        run_dir, start = _noted_in(trainer), trainer.ckpt_path
        started_from = start is not None and os.path.realpath(start) == os.path.realpath(previous)
        if run_dir is not None and started_from and previous != current and self.dirpath is not None:
            path = Path(previous).absolute()
            if path in files_of_job(run_dir).get(self.state_key, set()):
                return Path(self.dirpath).absolute() in path.parents
        return super()._should_remove_checkpoint(trainer, previous, current)


def _link(path: str, target: str) -> None:
    try:
        link(path, target)
    except OSError:
        if not os.path.isfile(target):
            raise
        with written_aside(path) as part, open(target, "rb") as source, open(part.path, "wb") as copy:
            shutil.copyfileobj(source, copy)  # for a file system without links


class NoteJob(Callback):
    """Notes in the run folder which job trains there, and which checkpoints the job writes.

    A restarted job resumes from the newest of these checkpoints. It removes what its killed process has left:
    unfinished files, and checkpoints that no ModelCheckpoint lists.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._folders: dict[str, Any] = {}  # folder of each ModelCheckpoint, from the loaded checkpoint

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folders = {}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states: Mapping[str, Any] = checkpoint.get("callbacks") or {}
        self._folders = {key: state.get("dirpath") for key, state in states.items() if isinstance(state, Mapping)}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        again = trainer.is_global_zero and note_job(self._run_dir)  # by now all ranks have read the old note
        known = trainer.strategy.broadcast(self._links(trainer) if again else {})
        for callback in _of(trainer):
            callback.last_model_path = callback.last_model_path or known.get(callback.state_key, "")
        if again:
            paths = {Path(path).resolve() for path in (self._run_dir, *(c.dirpath for c in _of(trainer))) if path}
            removed = [name for folder in paths if folder.is_dir() for name in remove_leftovers(folder)]
            removed += self._remove_unknown(trainer)
            if removed:
                print(f"removed files that an earlier start of {job_name()} left: {', '.join(removed)}", flush=True)

    def _links(self, trainer: pl.Trainer) -> dict[str, str]:
        """Return, by callback key, the path of each ``last.ckpt`` that this job wrote and that still exists. A callback
        that does not know this path would write ``last-v1.ckpt``."""
        written, found = files_of_job(self._run_dir), {}
        for callback in _of(trainer):
            path = os.path.join(callback.dirpath or "", f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}")
            last = path if "://" in path else Path(path).absolute()
            if last in written.get(callback.state_key, ()) and (isinstance(last, str) or os.path.lexists(last)):
                found[callback.state_key] = path
        return found

    def _remove_unknown(self, trainer: pl.Trainer) -> list[str]:
        written = files_of_job(self._run_dir)
        removed = []
        for callback in _of(trainer):
            # A callback that keeps all files does not list them; one whose folder changed has lost its list.
            if callback.save_top_k == -1 or self._folders.get(callback.state_key, 0) != callback.dirpath:
                continue
            known = {callback.best_model_path, callback.kth_best_model_path, *callback.best_k_models, trainer.ckpt_path}
            kept = {os.path.realpath(path) for path in known if path}
            last, files = callback.last_model_path, written.get(callback.state_key, set())
            lead = os.path.realpath(last)
            if os.path.islink(last) and lead not in kept:
                # Checkpoints that the killed run kept because ``last.ckpt`` links to them are kept again.
                linked = [str(path) for path in files if not os.path.islink(path) and os.path.realpath(path) == lead]
                _held.setdefault(callback, []).extend(linked)
            kept |= {lead} if last else set()
            for url in files - {last, *known}:
                if isinstance(url, str):
                    trainer.strategy.remove_checkpoint(url)
            for path in sorted(path for path in files if isinstance(path, Path)):
                if path.is_symlink() and str(path) != os.path.abspath(last):
                    path.unlink()
                elif path.exists() and not path.is_symlink() and os.path.realpath(path) not in kept:
                    trainer.strategy.remove_checkpoint(str(path))
                else:
                    continue
                removed.append(path.name)
        return removed


def _noted_in(trainer: pl.Trainer) -> str | None:
    """Return the run folder in which NoteJob notes this job's files; None without NoteJob or outside of a job."""
    folders = [c._run_dir for c in trainer.callbacks if isinstance(c, NoteJob)]  # type: ignore[attr-defined]
    return folders[0] if folders and job_name() is not None else None


def _note(callback: ModelCheckpoint, trainer: pl.Trainer, path: str) -> None:
    """Note in the run folder that this job writes the checkpoint ``path``. All ranks raise on failure. Collective."""
    run_dir = _noted_in(trainer)
    if run_dir is None:
        return

    def act() -> None:
        if trainer.is_global_zero:
            with naming(Path(run_dir) / FILES):
                note_file(run_dir, callback.state_key, path)

    strategy: Any = trainer.strategy
    strategy._together("noting the name of a checkpoint", act)


SAVE_EVERY_S = 30 * 60.0
_fits = itertools.count(1)  # of this process. A restarted script calls them in the same order.


def newest_of_job(trainer: pl.Trainer, run_dir: str, folders: Iterable[str] = ()) -> str | None:
    """Return the newest checkpoint that an earlier start of this job wrote in ``run_dir`` or ``folders``, or None. All
    ranks return the same. If there is one, print its path, and set ``run_plan.resumes_job``."""
    found = checkpoint_of_job(run_dir, folders)
    if found is None:
        return None
    if trainer.is_global_zero:
        shown = os.path.relpath(found) if isinstance(found, Path) else found  # else in a remote folder
        print(f"{job_name()} has started again: it resumes from {shown}", flush=True)
    trainer.strategy.run_plan.resumes_job = True  # type: ignore[attr-defined]
    return str(found)


@contextlib.contextmanager
def in_own_job(trainer: pl.Trainer) -> Iterator[None]:
    """If this job runs the user's own script, let a fit in the body save in the job's folder and resume from there.
    Otherwise do nothing."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if not run_dir or job_name() is None or trainer.state.fn != TrainerFn.FITTING:
        yield
        return
    number, strategy = next(_fits), cast(Any, trainer.strategy)
    folder = Path(run_dir) if number == 1 else Path(run_dir, f"fit-{number}")
    folder.mkdir(parents=True, exist_ok=True)
    strategy.run_plan.folder = str(folder)
    if strategy.save_every_s is None and trainer.checkpoint_callbacks:
        strategy.save_every_s = SAVE_EVERY_S
    found, connector = newest_of_job(trainer, str(folder)), cast(Any, trainer._checkpoint_connector)
    select = connector._select_ckpt_path

    def selected(fn: TrainerFn, given: Any, **more: Any) -> Any:
        if found is not None or (given is None and not connector._user_managed):
            return found  # else Lightning would look in the Trainer's folder
        return select(fn, given, **more)

    connector._select_ckpt_path = selected
    try:
        yield
    finally:
        del connector._select_ckpt_path
