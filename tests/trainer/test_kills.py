"""Jobs that are killed again and again, at random instants, mostly of their saves: nothing is lost, nothing is left.

A job is a chain of starts: all but the last are killed, on one rank or on all, and each goes on from the newest
checkpoint. ``$TMPDIR`` is on another file system.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import re
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from lightning_zero.checkpoint import verify
from lightning_zero.checkpoint.sharded.index import EXTRA
from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.data.resumable import ResumableLoader
from lightning_zero.ranks import resume
from lightning_zero.trainer import interruptions
from lightning_zero.trainer.saves.kept_files import NoteJob
from tests.harness import Pool
from tests.trainer.test_checkpoint_io import job_named
from tests.trainer.toys import Dropping, Samples, seeded, strategy_of, trainer

pytestmark = pytest.mark.full

# Of the operating system, between which it is killed.
CALLS = ("pwrite", "fsync", "replace", "unlink", "symlink", "open", "mkdir", "rename", "rmdir")
OTHER_DISK = "/dev/shm" if os.path.isdir("/dev/shm") else None


class Kill(NamedTuple):
    """When a start is killed: before one of its calls that change files, or so many seconds after its first step."""

    call: int | None
    seconds: float | None
    rank: int  # that counts the calls, and is killed
    everybody: bool

    def die(self, pids: list[int]) -> None:
        for pid in pids if self.everybody else [os.getpid()]:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class Job(NamedTuple):
    stage: str
    offload: str
    writer: str  # training waits; async: AsyncCheckpointIO; behind: zero.checkpoint.background
    every_s: float | None  # save_minutes
    checkpoint: str = "full"
    steps: int = 18


class Notes(Callback):
    """Writes down each step's loss, and has a start killed some time after its first step."""

    def __init__(self, root: Path, kill: Kill | None, pids: list[int]) -> None:
        self.root, self.kill, self.pids = root, kill, pids

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if dist.get_rank() == 0:
            with (self.root / "losses").open("a") as file:
                file.write(f"{trainer.global_step} {float(pl_module.losses[-1]).hex()}\n")
        kill, self.kill = self.kill, None
        if kill is not None and kill.seconds is not None and dist.get_rank() == kill.rank:
            threading.Timer(kill.seconds, kill.die, (self.pids,)).start()


@contextlib.contextmanager
def killed_at_call(kill: Kill | None, pids: list[int], root: Path) -> Any:
    """Count the calls that concern the job's files, and die before one of them."""
    if kill is None or kill.call is None or kill.rank != dist.get_rank():
        yield
        return
    left = itertools.count(kill.call, -1)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if (isinstance(args[0], int) or str(root) in str(args[0])) and next(left) == 0:
                kill.die(pids)
            return original(*args, **kwargs)

        return call

    with mock.patch.multiple(os, **{name: counted(getattr(os, name)) for name in CALLS}):
        yield


def start(root: Path, job: Job, kill: Kill | None) -> None:
    """One start of the job on this rank."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    tempfile.tempdir = os.environ["TMPDIR"] = OTHER_DISK or tempfile.gettempdir()
    with job_named("job"), killed_at_call(kill, pids, root):
        newest = resume.checkpoint_of_job(root, [root / "checkpoints"])
        save = ModelCheckpoint(root / "checkpoints", "{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
        saves = {"name": job.checkpoint, "background": job.writer == "behind"}
        strategy = strategy_of(f"{job.stage} {job.offload}", root.parent, checkpoint=saves, stall_timeout_s=20.0)
        strategy.run_plan.resumes_job, strategy.save_every_s = newest is not None, job.every_s
        callbacks = [save, NoteJob(str(root)), Notes(root, kill, pids)]
        settings: dict[str, Any] = {"max_steps": job.steps, "max_epochs": -1, "enable_checkpointing": True}
        settings["plugins"] = [AsyncCheckpointIO()] if job.writer == "async" else []
        of = trainer(strategy, root, callbacks=callbacks, **settings)
        with mock.patch.object(interruptions, "SAVING_SHARE", 1e9):
            module = seeded(lambda: Dropping(optimizer="adamw", scheduler="step"))
            of.fit(module, ResumableLoader(Samples(), 2, trainer=of), ckpt_path=newest)
    dist.barrier()


def run_chain(root: Path, job: Job, kills: list[Kill]) -> dict[str, list[str]]:
    """All starts of a job; the losses of each step."""
    root.mkdir()
    found: dict[str, list[str]] = {}
    before, deaths = 0, 0
    for kill in [*kills, None]:
        pool = Pool(2)
        try:
            pool.run(pickle.dumps((start, (root, job, kill), {})), 60)
            died = False
        except Exception as error:
            assert kill is not None, error
            assert "exit code -9" in str(error) + "".join(getattr(error, "__notes__", [])), error
            died, deaths = True, deaths + 1
        finally:
            pool.kill()
        safe = check_what_is_there(root, before)
        before = safe if died else 0
        if not died:
            break  # it was over before it was to be killed
    assert deaths >= len(kills) - 1
    for line in (root / "losses").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(step, []).append(loss)
    return found


def check_what_is_there(root: Path, before: int) -> int:
    """The step of the newest checkpoint, which is whole, and not older than any that was safe."""
    newest = resume.newest_checkpoint([root, root / "checkpoints"])
    if newest is None:
        assert not before
        return 0
    assert verify.check(newest).damage == []
    step: int = torch.load(newest / EXTRA if newest.is_dir() else newest)["global_step"]
    assert step >= before
    for path in (root / "checkpoints").glob("*.ckpt"):
        assert path.exists(), "a link that leads nowhere"
        assert verify.check(path).damage == []
    return step


def names(root: Path) -> set[str]:
    return {re.sub(r"hpc_ckpt_\d+", "hpc_ckpt", str(path.relative_to(root))) for path in root.rglob("*")}


def kills_of(job: Job, count: int, seed: int) -> list[Kill]:
    generator = random.Random(seed)
    kills = []
    for _ in range(count):
        rank, everybody = generator.randrange(2), generator.random() < 0.5
        if generator.random() < 0.75 and not (job.writer == "async" and rank):  # there rank 0 alone writes
            few = job.checkpoint == "sharded" and rank  # that rank makes one such call in a save
            kills.append(Kill(generator.randrange(*((1, 8) if few else (5, 60))), None, rank, everybody))
        else:
            kills.append(Kill(None, generator.uniform(0, 0.2), rank, everybody))
    return kills


# Some kills in the default run, a hundred in all.
CHAINS = [
    (Job("zero3", "none", "training", None, steps=12), 2, 1),
    (Job("zero2", "optimizer_cpu", "async", 1e-9, steps=12), 2, 2),
    (Job("zero3", "none", "training", 1e-9, "sharded", steps=12), 3, 3),
    (Job("zero3", "none", "behind", 1e-9, "sharded", steps=12), 3, 4),
    (Job("zero3", "optimizer_cpu", "behind", None, "sharded", steps=8), 2, 5),
    (Job("zero3", "nvme", "training", 1e-9), 5, 11),
    (Job("zero3", "none", "async", None), 5, 12),
    (Job("zero1", "none", "async", 1e-9), 5, 14),
    (Job("zero2", "optimizer_cpu", "training", None), 5, 15),
    (Job("zero3", "nvme", "training", 1e-9, "sharded"), 5, 20),
    (Job("zero0", "none", "training", None, "sharded"), 5, 21),
    (Job("zero1", "optimizer_cpu", "training", 1e-9, "sharded"), 5, 22),
    (Job("zero1", "none", "behind", 1e-9, "sharded"), 5, 24),
    (Job("zero3", "cpu", "behind", 1e-9, "sharded"), 5, 26),
    (Job("zero0", "none", "behind", None, "sharded"), 5, 27),
]


@pytest.mark.parametrize(("job", "count", "seed"), CHAINS)
def test_killed_job_loses_nothing_and_leaves_nothing(job: Job, count: int, seed: int, tmp_path: Path) -> None:
    before = set(os.listdir(OTHER_DISK)) if OTHER_DISK else set()
    expected = run_chain(tmp_path / "undisturbed", job, [])
    assert list(expected) == [str(step) for step in range(1, job.steps + 1)]
    found = run_chain(tmp_path / "killed", job, kills_of(job, count, seed))
    assert sorted(found, key=int) == list(expected)
    for step, losses in found.items():
        assert set(losses) == set(expected[step]), step
    assert names(tmp_path / "killed") == names(tmp_path / "undisturbed")
    assert len(list((tmp_path / "killed").glob("*.ckpt"))) <= 1
    assert not any((tmp_path / "disk").rglob("*"))
    if OTHER_DISK:
        assert not [name for name in set(os.listdir(OTHER_DISK)) - before if "ckpt" in name]
    weights = [loaded(tmp_path / run / "checkpoints" / "last.ckpt") for run in ("undisturbed", "killed")]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def loaded(path: Path) -> dict[str, Tensor]:
    if not path.is_dir():
        return torch.load(path)["state_dict"]
    folder = ShardedFolder(path)
    return {key: folder.tensor(key).whole() for key in folder.keys if key.startswith("state_dict.")}
