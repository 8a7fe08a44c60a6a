"""Start processes: by running the script again, or by fork in a notebook. A notebook that trains in its own process
starts none.

Forked processes get copies of the notebook's objects, train the copies, and end. Rank 0 sends the Trainer's results and
the weights back to the notebook. Some states of a process do not survive a fork::

    CUDA in use            refused before the fork
    a process group        refused before the fork
    autograd's threads     refused before the fork
    a sharded module       unsharded first: its shards are for another number of ranks
    a pool of OpenMP       a child would wait forever for the pool's threads, so it computes on one thread
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.device.cuda import is_in_use
from lightning_zero.engine import engine_of
from lightning_zero.lightning_api import (
    ClusterEnvironment,
    ForkedResult,
    ForkingLauncher,
    ModelCheckpoint,
    ScriptLauncher,
    TrainerFn,
    checkpoint_folder,
    pl,
    rank_zero_only,
)
from lightning_zero.ranks.resume import damage, newest_checkpoint, refusal
from lightning_zero.settings import CheckpointFormat, ConfigError, names_arguments
from lightning_zero.tiers.remote import RemotePath, place
from lightning_zero.trainer.saves.checkpoint_io import writes_files
from lightning_zero.trainer.saves.kept_files import in_own_job

PROBE_S = 3.0
_THREADS = "OMP_NUM_THREADS"


def threads_of(processes: int) -> int:
    """Return how many threads Lightning gives each of ``processes`` processes on this host: its share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def in_one_process(environment: ClusterEnvironment, processes: int) -> bool:
    """Return whether this process is a notebook that trains without other processes. Raise ConfigError if this is a
    notebook and ``processes`` > 1, because a notebook has no script that other processes could run."""
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if not is_interactive or environment.creates_processes_externally:
        return False
    if processes > 1:
        raise ConfigError(
            f"strategy: expected one process in a notebook, which has no script that other processes could run, got "
            f"{processes} processes. Set strategy='zero3_notebook' (or another preset that ends in _notebook, or "
            "start_method='fork') to fork processes, set devices=1, or run a script."
        )
    return True


class Forking:
    """Mixin for Lightning's fork launchers (Trainer, Fabric): checks that forks can work, and ends forked processes."""

    _strategy: Any

    @contextlib.contextmanager
    def _fit_to_fork(self, trains: bool = True) -> Iterator[None]:
        """Raise ConfigError if processes forked in the body could not work. If they would hang with several threads,
        let each of them use one thread. ``trains``: whether the processes run backwards."""
        _refuse_fork(trains)
        wanted = os.environ.get(_THREADS)
        planned = int(wanted) if wanted else threads_of(self._strategy.num_processes)
        if planned > 1 and not _threads_survive():
            rank_zero_warn(
                "this notebook has computed on several threads, which a forked process cannot use, so each process "
                "computes on one thread. To use more threads, restart the kernel, and train before you compute "
                "anything."
            )
            os.environ[_THREADS] = "1"
        try:
            yield
        finally:
            os.environ.pop(_THREADS, None)
            if wanted is not None:
                os.environ[_THREADS] = wanted

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        """Run Lightning's function in the forked process; then close the process's files and its process group."""
        if os.environ.get(_THREADS, "").isdigit():  # torch read the variable before it was changed
            torch.set_num_threads(int(os.environ[_THREADS]))
        try:
            with names_arguments(self._strategy._given_config):
                super()._wrapping_function(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._strategy._end_forked(failed=True)
            raise
        self._strategy._end_forked(failed=False)


class StartLauncher(ScriptLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None:
            with _names_as_given(trainer):
                _check_folders(trainer)
            if not self.cluster_environment.creates_processes_externally:
                _check_checkpoint(trainer, function, args, kwargs)
            args, kwargs = _with_last(trainer, function, args, kwargs)
        with _names_as_given(trainer), in_own_job(trainer) if trainer is not None else contextlib.nullcontext():
            return super().launch(function, *args, trainer=trainer, **kwargs)


class ForkLauncher(Forking, ForkingLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None:
            _check_folders(trainer)
            _check_checkpoint(trainer, function, args, kwargs)
            args, kwargs = _with_last(trainer, function, args, kwargs)
        module = trainer.lightning_module if trainer is not None else None
        engine = engine_of(module) if module is not None else None
        if engine is not None:
            engine.release()
        trains = trainer is None or trainer.state.fn == TrainerFn.FITTING
        with _names_as_given(trainer), self._fit_to_fork(trains):
            return super().launch(function, *args, trainer=trainer, **kwargs)

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> ForkedResult | None:
        """Return rank 0's results; None on other ranks. After a fit, also write the whole model's weights to a file,
        whose path is in the results. Collective."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        engine = engine_of(trainer.lightning_module)
        first = self._strategy.local_rank == 0
        state = engine.state_dict(only_rank_0=not first) if engine is not None and fitting else None
        if not first:
            return None
        callback: Any = trainer.checkpoint_callback
        path = None
        if fitting:
            path = os.path.join(tempfile.mkdtemp(), "weights.ckpt")
            self._strategy.checkpoint_io.save_checkpoint(state or trainer.lightning_module.state_dict(), path)
        best = getattr(callback, "best_model_path", None)
        return ForkedResult(best, path, trainer.state, results, self.get_extra_results(trainer))


TRAINERS = (StartLauncher, ForkLauncher)


def _names_as_given(trainer: pl.Trainer | None) -> contextlib.AbstractContextManager[None]:
    strategy: Any = None if trainer is None else trainer.strategy
    return names_arguments(getattr(strategy, "_given_config", None))


class NoCheckpointError(ConfigError, FileNotFoundError):
    """Raised if the checkpoint to load does not exist. It is also a FileNotFoundError, like Lightning's error."""


def _check_folders(trainer: pl.Trainer) -> None:
    """Check that a fit can save to its folders in an object store. Raise ConfigError if this process cannot write
    there, or if a ModelCheckpoint with ``save_last="link"`` would create links there."""
    strategy: Any = trainer.strategy
    writes = strategy.config.checkpoint.name is CheckpointFormat.sharded or rank_zero_only.rank == 0  # type: ignore[attr-defined]
    if trainer.state.fn != TrainerFn.FITTING or not writes:
        return
    default = trainer.loggers[0].save_dir if trainer.loggers else None
    default = str(default if default is not None else trainer.default_root_dir)
    folders = [getattr(callback, "dirpath", None) or default for callback in trainer.checkpoint_callbacks]
    if strategy.saves_on_sigterm or strategy.save_every_s is not None:
        folders.append(trainer.default_root_dir)
    for callback, folder in zip(trainer.checkpoint_callbacks, folders, strict=False):
        if getattr(callback, "save_last", None) == "link" and isinstance(place(folder), RemotePath):
            raise ConfigError(
                f"ModelCheckpoint(save_last=): expected true or false with a folder in an object store, which cannot "
                f"hold links, got 'link' with {folder}. Change save_last."
            )
    for folder in dict.fromkeys(folders):
        if isinstance(found := place(folder), RemotePath):
            try:
                tried = found / f".{uuid.uuid4().hex}.part"
                tried.write_bytes(b"")
                tried.unlink()
            except Exception as error:  # a missing package, no such bucket, no rights
                raise ConfigError(
                    "ModelCheckpoint(dirpath=), default_root_dir: expected a folder in which this process can write, "
                    f"got {folder}: {type(error).__name__}: {error}. Change the folder, or correct the cause."
                ) from error


def _check_checkpoint(trainer: pl.Trainer, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise ConfigError if ``function`` (such as the body of ``Trainer.fit``), called with ``args`` and ``kwargs``,
    would load a local checkpoint that is damaged or (NoCheckpointError) does not exist."""
    path = inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path")
    if path is None or str(path) in ("best", "last", "hpc") or "registry" in str(path).lower():
        return
    found = place(path)
    if not isinstance(found, Path) or not writes_files(trainer.strategy.checkpoint_io):
        return
    if not found.exists():
        raise NoCheckpointError(
            f"ckpt_path: expected a checkpoint, got {str(path)!r}, which does not exist. Change ckpt_path, or write "
            "the file before this call, not in prepare_data or setup."
        )
    with contextlib.suppress(OSError):
        if cause := damage(found):
            raise ConfigError(refusal(path, cause))


def _with_last(trainer: pl.Trainer, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return ``args`` and ``kwargs`` for ``function``. If a ModelCheckpoint saves to an object store, replace
    ``ckpt_path="last"`` by the last checkpoint's URL, because Lightning would find none and begin a new run."""
    given = inspect.signature(function).bind(*args, **kwargs)
    if given.arguments.get("ckpt_path") == "last":
        saves = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        folders = [checkpoint_folder(callback, trainer) for callback in saves]
        if any(isinstance(place(folder), RemotePath) for folder in folders):
            names = f"{saves[0].CHECKPOINT_NAME_LAST}*{saves[0].FILE_EXTENSION}"
            given.arguments["ckpt_path"] = str(newest_checkpoint(folders, names=names) or "last")
    return given.args, given.kwargs


def _refuse_fork(trains: bool) -> None:
    """Raise ConfigError if this process uses something that does not work after a fork: CUDA, a process group or, if
    ``trains``, autograd's threads. A backward starts these threads if torch sees a GPU or has computed on meta
    tensors."""
    for is_there, expected, got in (
        (
            is_in_use(),
            "no use of CUDA before the run",
            "CUDA initialized in this process (by a tensor or a module on a GPU, or a call of torch.cuda), which a "
            "forked process cannot use",
        ),
        (
            dist.is_available() and dist.is_initialized(),
            "no process group before the run",
            "one, whose connections forked processes would share. Call torch.distributed.destroy_process_group()",
        ),
        (
            trains and any(name.startswith("pt_autograd") for name in _thread_names()),
            "no backward before training",
            "one in this process (lightning_zero.plan_memory computes one too), after which torch refuses a backward "
            "in a forked process",
        ),
    ):
        if is_there:
            raise ConfigError(
                f"start_method='fork' (a preset that ends in _notebook): expected {expected}, got {got}. Restart the "
                "kernel and train first, or run a script with strategy='zero3'."
            )


def _thread_names() -> Iterator[str]:
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has ended by now
            yield file.read_text()


def _threads_survive() -> bool:
    """Fork a process that computes on several threads, and return whether it succeeds."""

    def compute() -> None:
        torch.set_num_threads(2)
        torch.ones(2**18).add_(1)

    probe = multiprocessing.get_context("fork").Process(target=compute, daemon=True)
    probe.start()
    probe.join(PROBE_S)
    found = probe.exitcode == 0
    if not found:
        probe.kill()
        probe.join()
    probe.close()
    return found
