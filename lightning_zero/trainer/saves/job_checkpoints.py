"""Resume a restarted job from the last checkpoint that it wrote: the main job, and a job of a script of the user's own.

``submit -- python train.py`` names the job's folder in ``LIGHTNING_ZERO_RUN_DIR``. Each ``Trainer.fit`` of the script
saves on a signal and every half hour there, and resumes from there, whatever ``ckpt_path`` and ``default_root_dir``
are: what another job has left in a folder of the user's is not taken for this job's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from lightning_zero.lightning_api import TrainerFn, pl
from lightning_zero.ranks.resume import RUN_DIR_VARIABLE, checkpoint_of_job, job_name

SAVE_EVERY_S = 30 * 60.0
_fits = itertools.count(1)  # of this process. A restarted script calls them in the same order.


def newest_of_job(trainer: pl.Trainer, run_dir: str, folders: Iterable[str] = ()) -> str | None:
    """Return the newest checkpoint that an earlier start of this job wrote, equal on all ranks; None if there is none.
    If there is one, print its path, and tell the strategy. ``folders``: where to look besides ``run_dir``."""
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
    """In the body, a fit, let a job of the user's own script save in the job's folder, and resume from there."""
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
