"""Who writes checkpoints, when old ones go, what ranks do when a write fails, and what a dead run has left."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import durable
from lightning_zero.ranks import resume
from lightning_zero.trainer.saves import kept_files
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO
from lightning_zero.trainer.saves.kept_files import NoteJob
from tests.harness import on_ranks
from tests.trainer.toys import files, fit, once, trainer

pytestmark = pytest.mark.full


@on_ranks(1)
def test_checkpoint_io_is_ours_unless_the_user_gives_one(tmp_path: Path) -> None:
    def taken(*plugins: Any, **settings: Any) -> Any:
        return trainer(ZeroStrategy("zero3", **settings), tmp_path, plugins=[*plugins]).strategy.checkpoint_io

    theirs, wrapper = TorchCheckpointIO(), AsyncCheckpointIO()
    around_theirs = AsyncCheckpointIO(theirs)
    assert taken(theirs) is taken(checkpoint_io=theirs) is theirs
    assert taken(wrapper) is wrapper and taken(around_theirs) is around_theirs
    assert isinstance(taken(), ZeroCheckpointIO) and isinstance(wrapper.checkpoint_io, ZeroCheckpointIO)
    assert around_theirs.checkpoint_io is theirs


class Gated(ZeroCheckpointIO):
    """Writes the first file at once, and the others when it is told to."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.open, self.count, self.error = threading.Event(), 0, error

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        if self.count > 1:
            assert self.open.wait(30)
            if self.error is not None:
                raise self.error("planned")
        super().save_checkpoint(*args, **kwargs)


class Opens(Callback):
    """Before the third save, or when all steps are done, notes which files there are, and lets the writer go on.

    Before that it waits for the first file, so that it is there when it is to go.
    """

    def __init__(self, io: Gated, folder: Path) -> None:
        self.io, self.folder, self.seen = io, folder, dict[str, bool]()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.checkpoint_callback.best_model_path:
            while not any(self.folder.glob("*.ckpt")):
                time.sleep(0.01)
        if trainer.global_step == 5:
            self.on_train_end()

    def on_train_end(self, *_: Any) -> None:
        if not self.seen:
            self.seen = {path.name: path.exists() for path in self.folder.glob("*.ckpt")}
        self.io.open.set()


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_old_file_goes_when_the_new_one_is_there(wrapped: bool, tmp_path: Path) -> None:
    for n, writer in enumerate([Gated(), Gated()]):
        folder = tmp_path / str(n)
        plugin: Any = AsyncCheckpointIO(writer)
        plugin = _WrappingCheckpointIO(plugin) if wrapped else plugin
        save = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, filename="{step}", save_last="link")
        opens = Opens(writer, folder)
        if n == 0:  # nothing waits
            writer.open.set()
        fit("zero3", tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[save, opens], plugins=[plugin])
        assert files(folder) == ["last.ckpt", "step=6.ckpt"]
        assert os.readlink(folder / "last.ckpt") == "step=6.ckpt"
    if dist.get_rank() == 0:
        # Nothing had gone yet that was there, and the link leads to it.
        assert opens.seen == {"last.ckpt": True, "step=2.ckpt": True}
        assert writer.count == 3


@on_ranks(2)
def test_link_last_leads_to_a_file_at_every_moment(tmp_path: Path) -> None:
    """Lightning removes the link before it makes the new one."""
    broken: list[str] = []

    def checked(act: Any) -> Any:
        def acts(*args: Any) -> None:
            act(*args)
            if seen and not (tmp_path / "last.ckpt").exists():
                broken.append(str(args))
            seen.append((tmp_path / "last.ckpt").exists())

        seen: list[bool] = []
        return acts

    save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1, filename="{step}", save_last="link")
    with mock.patch.multiple(os, remove=checked(os.remove), replace=checked(os.replace)):
        fit("zero3", tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[save])
    assert not broken
    assert files(tmp_path) == ["last.ckpt", "step=6.ckpt"]


@on_ranks(2)
def test_old_file_stays_when_the_new_one_fails(tmp_path: Path) -> None:
    """And all ranks end with what has failed, here at the end of the run."""
    io = Gated(MemoryError)
    save = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=1, filename="{step}")
    settings: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 0}
    settings |= {"enable_checkpointing": True, "plugins": [AsyncCheckpointIO(io)]}
    with pytest.raises(Exception, match="planned"):
        fit("zero3", tmp_path, callbacks=[save, Opens(io, tmp_path)], **settings)
    assert files(tmp_path, "*.ckpt") == ["step=4.ckpt"]
    assert fit("zero3", tmp_path).losses  # these processes can train again


# -- what a dead run of a job has left goes with the next start of that job -------------------------------------------

TOP: dict[str, dict[str, Any]] = {
    "1": {"save_top_k": 1},
    "2 by metric": {"save_top_k": 2, "monitor": "step", "mode": "max"},
    "all": {"save_top_k": -1},
}


@contextlib.contextmanager
def job_named(name: str) -> Any:
    with (
        mock.patch.object(resume, "job_name", lambda *_: name),
        mock.patch.object(kept_files, "job_name", lambda: name),
    ):
        yield


def train(root: Path, top: str, folder: str = "checkpoints", **settings: Any) -> tuple[Any, str]:
    save = ModelCheckpoint(root / folder, every_n_train_steps=2, filename="{step}", save_last="link", **TOP[top])
    settings = {"enable_checkpointing": True, "callbacks": [save, NoteJob(str(root))], **settings}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fit("zero3", root, **settings)
    dist.barrier()
    return save, out.getvalue()


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("top", TOP)
def test_checkpoints_left_by_a_killed_start_are_removed_by_the_next(top: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with job_named("one"):
        _, said = train(tmp_path, top, max_epochs=1)
    kept = set(files(folder))
    assert "removed" not in said
    gone = {"step=2.ckpt", "step=4.ckpt", "step=6.ckpt"} - kept
    assert len(gone) == {"1": 2, "2 by metric": 1, "all": 0}[top], kept
    part = folder / durable.part_name("last.ckpt")
    if dist.get_rank() == 0:  # the process was killed between a save and the removal of what it replaces
        for name in gone:
            shutil.copy(folder / "last.ckpt", folder / name)
        shutil.copy(folder / "last.ckpt", folder / "mine.ckpt")
        shutil.copy(folder / "last.ckpt", tmp_path / "step=2.ckpt")
        part.touch()
    dist.barrier()
    newest = (folder / "last.ckpt").resolve()
    with job_named("one"):
        _, said = train(tmp_path, top, max_epochs=2, max_steps=int(newest.stem[-1]) + 1, ckpt_path=newest)
    assert (kept | {"mine.ckpt"}) - {"last.ckpt"} <= set(files(folder))
    assert not gone & set(files(folder)) and (tmp_path / "step=2.ckpt").exists() and not part.exists()
    if dist.get_rank() == 0:
        removed = said.partition("removed files that an earlier start of one left: ")[2].strip()
        assert set(removed.split(", ")) == {part.name, *gone}


@on_ranks(2)
@pytest.mark.parametrize("other", ["job", "folder", "no checkpoint"])
def test_checkpoints_of_other_jobs_folders_and_runs_stay(other: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with job_named("one"):
        train(tmp_path, "1", max_epochs=1)
    once(lambda: shutil.copy(folder / "last.ckpt", folder / "step=2.ckpt"))
    settings: dict[str, Any] = {"max_epochs": 2, "max_steps": 7, "ckpt_path": folder / "step=6.ckpt"}
    if other == "no checkpoint":
        settings |= {"max_steps": 1, "ckpt_path": None}
    with job_named("two" if other == "job" else "one"):
        train(tmp_path, "1", folder="others" if other == "folder" else "checkpoints", **settings)
    assert {"step=2.ckpt", "step=6.ckpt"} <= set(files(folder))


@on_ranks(2)
def test_note_that_cannot_be_written_is_named_on_all_ranks(tmp_path: Path) -> None:
    full = mock.patch.object(kept_files, "note_file", side_effect=OSError(errno.ENOSPC, "No space left"))
    says = r"job_checkpoints\.jsonl: the file could not be written: .*No space left"
    with job_named("one"), full, pytest.raises((OSError, RuntimeError), match=says):
        train(tmp_path, "1")
    assert not files(tmp_path, "**/*.ckpt")


@on_ranks(2)
def test_link_of_an_earlier_start_is_taken_over(tmp_path: Path) -> None:
    """The first checkpoint is saved before there is a link, and so does not know of it; nor is it kept for ever."""
    folder = tmp_path / "checkpoints"
    with job_named("one"):
        train(tmp_path, "1", max_epochs=1, max_steps=2)
        assert files(folder) == ["last.ckpt", "step=2.ckpt"]
        train(tmp_path, "1", max_epochs=1, max_steps=4, ckpt_path=folder / "step=2.ckpt")
    assert files(folder) == ["last.ckpt", "step=4.ckpt"]
    assert (folder / "last.ckpt").resolve() == folder / "step=4.ckpt"


def test_note_that_was_cut_off_hides_no_other(tmp_path: Path) -> None:
    resume.note_file(tmp_path, "a", "/one.ckpt")
    with (tmp_path / resume.FILES).open("a") as file:
        file.write('["a", "/tw')
    resume.note_file(tmp_path, "a", "/three.ckpt")
    assert resume.files_of_job(tmp_path) == {"a": {Path("/one.ckpt"), Path("/three.ckpt")}}
