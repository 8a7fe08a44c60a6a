"""Who writes checkpoints, when old ones go, and what ranks do when a write fails."""

from __future__ import annotations

import os
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
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO
from tests.harness import on_ranks
from tests.trainer.toys import fit, trainer

pytestmark = pytest.mark.full


@on_ranks(1)
def test_checkpoint_io_is_ours_unless_the_user_gives_one(tmp_path: Path) -> None:
    theirs, wrapper = TorchCheckpointIO(), AsyncCheckpointIO()
    assert isinstance(trainer("zero3", tmp_path).strategy.checkpoint_io, ZeroCheckpointIO)
    assert trainer("zero3", tmp_path, plugins=[theirs]).strategy.checkpoint_io is theirs
    assert trainer(ZeroStrategy("zero3", checkpoint_io=theirs), tmp_path).strategy.checkpoint_io is theirs
    assert trainer("zero3", tmp_path, plugins=[wrapper]).strategy.checkpoint_io is wrapper
    assert isinstance(wrapper.checkpoint_io, ZeroCheckpointIO)
    wrapper = AsyncCheckpointIO(theirs)
    assert trainer("zero3", tmp_path, plugins=[wrapper]).strategy.checkpoint_io is wrapper
    assert wrapper.checkpoint_io is theirs


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
        self.io, self.folder, self.seen, self.links = io, folder, list[str](), dict[str, bool]()
        self.first_is_there = False

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.checkpoint_callback.best_model_path:
            while not self.first_is_there:
                time.sleep(0.01)
                self.first_is_there = any(self.folder.glob("*.ckpt"))
        if trainer.global_step == 5:
            self.on_train_end()

    def on_train_end(self, *_: Any) -> None:
        if not self.seen:
            self.seen = sorted(p.name for p in self.folder.glob("*.ckpt"))
            self.links = {p.name: p.exists() for p in self.folder.glob("*.ckpt") if p.is_symlink()}
        self.io.open.set()


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_old_file_goes_when_the_new_one_is_there(wrapped: bool, tmp_path: Path) -> None:
    for n, io in enumerate([Gated(), Gated()]):
        folder = tmp_path / str(n)
        plugin: Any = AsyncCheckpointIO(io)
        plugin = _WrappingCheckpointIO(plugin) if wrapped else plugin
        save = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, filename="{step}", save_last="link")
        opens = Opens(io, folder)
        if n == 0:  # nothing waits
            io.open.set()
        fit("zero3", tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[save, opens], plugins=[plugin])
        dist.barrier()
        assert sorted(p.name for p in folder.iterdir()) == ["last.ckpt", "step=6.ckpt"]
        assert os.readlink(folder / "last.ckpt") == "step=6.ckpt"
    if dist.get_rank() == 0:
        assert opens.seen == ["last.ckpt", "step=2.ckpt"]  # nothing had gone yet that was there
        assert opens.links == {"last.ckpt": True}  # it leads to what is there
        assert io.count == 3


@on_ranks(2)
def test_link_last_leads_to_a_file_at_every_moment(tmp_path: Path) -> None:
    """Lightning removes the link before it makes the new one."""
    there: list[bool] = []

    def noted(act: Any) -> Any:
        def acts(*args: Any) -> None:
            act(*args)
            there.append((tmp_path / "last.ckpt").exists())

        return acts

    save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1, filename="{step}", save_last="link")
    with mock.patch.multiple(os, remove=noted(os.remove), replace=noted(os.replace)):
        fit("zero3", tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[save])
    assert there == sorted(there)  # once it is there, it stays
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "step=6.ckpt"]


@on_ranks(2)
def test_old_file_stays_when_the_new_one_fails(tmp_path: Path) -> None:
    """And all ranks end with what has failed, here at the end of the run."""
    io = Gated(MemoryError)
    save = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=1, filename="{step}")
    settings: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 0}
    settings |= {"enable_checkpointing": True, "plugins": [AsyncCheckpointIO(io)]}
    with pytest.raises(Exception, match="planned"):
        fit("zero3", tmp_path, callbacks=[save, Opens(io, tmp_path)], **settings)
    dist.barrier()
    assert [p.name for p in tmp_path.glob("*.ckpt")] == ["step=4.ckpt"]
    assert fit("zero3", tmp_path).losses  # these processes can train again
