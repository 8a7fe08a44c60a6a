"""Who writes checkpoints, when old ones go, and what ranks do when a write fails."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_zero import ZeroStrategy
from lightning_zero.app.train import refusals
from lightning_zero.checkpoint.archive import records_of
from lightning_zero.config import ConfigError
from lightning_zero.ranks.resume import VERDICT_VARIABLE
from lightning_zero.trainer.saves.checkpoint_files import check_sums
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO, load
from tests.harness import on_ranks
from tests.trainer.toys import Lit, assert_weights, fit, loader, seeded, trainer, weights

pytestmark = pytest.mark.full


@on_ranks(1)
def test_ours_is_the_default_and_the_users_counts(tmp_path: Path) -> None:
    theirs, wrapper = TorchCheckpointIO(), AsyncCheckpointIO()
    assert isinstance(trainer("zero3", tmp_path).strategy.checkpoint_io, ZeroCheckpointIO)
    assert trainer("zero3", tmp_path, plugins=[theirs]).strategy.checkpoint_io is theirs
    assert trainer(ZeroStrategy("zero3", checkpoint_io=theirs), tmp_path).strategy.checkpoint_io is theirs
    assert trainer("zero3", tmp_path, plugins=[wrapper]).strategy.checkpoint_io is wrapper
    assert isinstance(wrapper.checkpoint_io, ZeroCheckpointIO)
    wrapper = AsyncCheckpointIO(theirs)
    assert trainer("zero3", tmp_path, plugins=[wrapper]).strategy.checkpoint_io is wrapper
    assert wrapper.checkpoint_io is theirs


@on_ranks(2)
def test_training_needs_no_temporary_folder(tmp_path: Path) -> None:
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path / "missing")
    try:
        save = ModelCheckpoint(tmp_path, save_last=True)
        of = fit("zero3", tmp_path, enable_checkpointing=True, callbacks=[save]).trainer
    finally:
        tempfile.tempdir = before
    found = torch.load(tmp_path / "last.ckpt")
    assert_weights(found["state_dict"], weights(of), tolerance=0)


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


class Wrapper(_WrappingCheckpointIO):
    """Adds nothing."""


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_old_one_goes_when_the_new_one_is_there(wrapped: bool, tmp_path: Path) -> None:
    for n, io in enumerate([Gated(), Gated()]):
        folder = tmp_path / str(n)
        plugin: Any = AsyncCheckpointIO(io)
        plugin = Wrapper(plugin) if wrapped else plugin
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
def test_one_save_at_a_time_is_in_flight(tmp_path: Path) -> None:
    """Each in the queue holds a whole checkpoint."""
    at_work: list[int] = []
    most: list[int] = []

    class Slow(ZeroCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.1)
            super().save_checkpoint(*args, **kwargs)
            at_work.pop()

    class Counted(AsyncCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            at_work.append(1)
            most.append(len(at_work))
            super().save_checkpoint(*args, **kwargs)

    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit("zero3", tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[save], plugins=[Counted(Slow())])
    if dist.get_rank() == 0:
        assert most == [1] * 6


@on_ranks(2)
def test_last_leads_somewhere_at_every_moment(tmp_path: Path) -> None:
    """Lightning removes the link before it makes the new one."""
    broken: list[str] = []
    remove, replace = os.remove, os.replace

    def checked(act: Any) -> Any:
        def acts(*args: Any) -> None:
            act(*args)
            if seen and not (tmp_path / "last.ckpt").exists():
                broken.append(str(args))
            seen.append((tmp_path / "last.ckpt").exists())

        seen: list[bool] = []
        return acts

    save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1, filename="{step}", save_last="link")
    os.remove, os.replace = checked(remove), checked(replace)
    try:
        fit("zero3", tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[save])
    finally:
        os.remove, os.replace = remove, replace
    assert not broken
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "step=6.ckpt"]


def test_no_flipped_bit_of_a_file_loads_other_values(tmp_path: Path) -> None:
    """Not in the zip file's table either, which says what lies where; and each damage is said in words."""
    path, generator = tmp_path / "a.ckpt", random.Random(4)
    state = {"state_dict": {str(n): torch.arange(float(n * 9)) for n in range(1, 6)}, "x": {"a": 1, "b": "hello"}}
    ZeroCheckpointIO().save_checkpoint(state, path)
    data, refused = path.read_bytes(), 0
    table = data.index(b"PK\x01\x02")
    for at in [*range(table, len(data)), *generator.sample(range(table), 300)]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :])
        try:
            check_sums(str(path))
            found = load(ZeroCheckpointIO(), path, None)
        except ConfigError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert repr(found) == repr(state), at
    assert refused > 200


@on_ranks(1)
def test_a_removal_waits_for_the_writes_before_it(tmp_path: Path) -> None:
    io = Gated()
    of = trainer("zero3", tmp_path, plugins=[AsyncCheckpointIO(io)])
    strategy = of.strategy
    for n in (1, 2):
        strategy.save_checkpoint({"n": n}, tmp_path / f"{n}.ckpt")
    strategy.remove_checkpoint(tmp_path / "1.ckpt")
    while not (tmp_path / "1.ckpt").exists():
        pass
    assert not (tmp_path / "2.ckpt").exists()
    io.open.set()
    strategy.checkpoint_io.teardown()
    assert [p.name for p in tmp_path.iterdir()] == ["2.ckpt"]


@on_ranks(2)
def test_the_old_one_stays_when_the_new_one_fails(tmp_path: Path) -> None:
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


@on_ranks(2)
def test_a_write_behind_training_that_failed_is_said_once(tmp_path: Path) -> None:
    """The next save is tried again, as without the plugin."""
    plugin, has_returned = AsyncCheckpointIO(), threading.Event()
    of = fit("zero3", tmp_path, plugins=[plugin]).trainer

    def full(*_: Any) -> int:
        has_returned.wait(60)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(os, "pwrite", full):
        of.save_checkpoint(tmp_path / "a.ckpt")
        has_returned.set()
        while dist.get_rank() == 0 and plugin._error is None:
            time.sleep(0.01)
        with pytest.raises((OSError, RuntimeError), match=r"a\.ckpt: the file could not be written: .*No space left"):
            of.save_checkpoint(tmp_path / "b.ckpt")
    of.save_checkpoint(tmp_path / "c.ckpt")
    of.strategy.finish_writes()
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["c.ckpt"]


@pytest.mark.sample
@on_ranks(2)
def test_a_write_that_fails_fails_on_all_ranks(tmp_path: Path) -> None:
    of = fit("zero3", tmp_path).trainer
    of.save_checkpoint(tmp_path / "a.ckpt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises((OSError, RuntimeError), match=r"a\.ckpt: .*File too large"):
            of.save_checkpoint(tmp_path / "a.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_weights(torch.load(tmp_path / "a.ckpt")["state_dict"], weights(of), tolerance=0)
    of.save_checkpoint(tmp_path / "b.ckpt")
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt"]


@on_ranks(2)
def test_what_cannot_be_removed_does_not_end_training(tmp_path: Path) -> None:
    class Stays(ZeroCheckpointIO):
        def remove_checkpoint(self, path: Any) -> None:
            raise PermissionError("planned")

    save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1, filename="{step}")
    module = seeded(Lit)
    of = trainer("zero3", tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[save], plugins=[Stays()])
    warned = pytest.warns(UserWarning, match=r"step=2\.ckpt: .*planned")
    with warned if dist.get_rank() == 0 else contextlib.nullcontext():
        of.fit(module, loader(), loader())
    assert of.global_step == 6


class Stale(ZeroCheckpointIO):
    """On the last rank the file system fails."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().load_checkpoint(*args, **kwargs)


@on_ranks(1, 2)
def test_a_read_that_the_system_fails_can_be_tried_again(tmp_path: Path) -> None:
    """It is no mistake of the user's, and the script of a job starts it again; on no rank."""
    fit("zero3", tmp_path).trainer.save_checkpoint(tmp_path / "a.ckpt")
    os.environ[VERDICT_VARIABLE] = str(tmp_path / "verdict")
    with pytest.raises((OSError, RuntimeError), match=r"a\.ckpt: .*Stale file handle"), refusals():
        fit("zero3", tmp_path, plugins=[Stale()], ckpt_path=tmp_path / "a.ckpt")
    dist.barrier()
    assert not (tmp_path / "verdict").exists()


# What is in a file that is no checkpoint.
NONE: dict[str, bytes] = {
    "nothing": b"",
    "a page": b"<html>not found</html>",
    "a text": b"hello world",
    "zeros": bytes(1000),
    "a pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.sample
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("weights_only", [None, False])
@pytest.mark.parametrize("case", [*NONE, "half of one", "a folder"])
def test_what_is_no_checkpoint(case: str, weights_only: bool | None, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    if case == "a folder":
        path.mkdir()
    elif case == "half of one":
        torch.save(torch.ones(5000), path)
        path.write_bytes(path.read_bytes()[: 5000 * 2])
    else:
        path.write_bytes(NONE[case])
    says = r"expected a whole checkpoint, got .*a\.ckpt.*\. Give another one\."
    with pytest.raises(ConfigError, match=says) as refused:
        load(ZeroCheckpointIO(), path, weights_only)
    assert "weights_only` set to" not in str(refused.value)


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_what_comes_from_elsewhere_runs_only_by_the_users_word(weights_only: bool | None) -> None:
    """Lightning alone runs what is at an address of http unless it is told not to."""
    io = mock.Mock()
    load(io, "http://somewhere/a.ckpt", weights_only)
    assert io.load_checkpoint.call_args.kwargs["weights_only"] is (weights_only is not False)


def flip(path: Path, name: str = "data/", depth: int = 3) -> None:
    """Change a bit of a tensor in a file."""
    with path.open("rb+") as file:
        record = max((r for r in records_of(file) if r.name.startswith(name)), key=lambda r: r.nbytes)
        file.seek(record.start + depth)
        byte = file.read(1)[0]
        file.seek(record.start + depth)
        file.write(bytes([byte ^ 16]))


@pytest.mark.sample
@on_ranks(2, 3)
def test_a_flipped_bit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    fit("zero3", tmp_path, seeded(lambda: Lit(width=40))).trainer.save_checkpoint(tmp_path / "a.ckpt")
    checked = ZeroStrategy("zero3", checkpoint={"verify": True})
    assert fit(checked, tmp_path, seeded(lambda: Lit(width=40)), max_epochs=3, ckpt_path=tmp_path / "a.ckpt").losses
    dist.barrier()
    if dist.get_rank() == 0:
        flip(tmp_path / "a.ckpt")
    dist.barrier()
    for resumes, verify in ((False, True), (True, None)):
        strategy = ZeroStrategy("zero3", checkpoint={"verify": verify})
        strategy.run_plan.resumes_job = resumes
        module = seeded(lambda: Lit(width=40), seed=9)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        of = trainer(strategy, tmp_path, max_epochs=3)
        with pytest.raises(ConfigError, match=r"expected .*a\.ckpt as it was written, got other values in bytes \d+"):
            of.fit(module, loader(), ckpt_path=tmp_path / "a.ckpt")
        assert_weights(module.state_dict(), before, tolerance=0)
    for resumes, verify in ((False, None), (True, False)):  # as torch loads it
        strategy = ZeroStrategy("zero3", checkpoint={"verify": verify})
        strategy.run_plan.resumes_job = resumes
        fit(strategy, tmp_path, seeded(lambda: Lit(width=40)), max_epochs=3, ckpt_path=tmp_path / "a.ckpt")


@on_ranks(2)
def test_what_can_be_checked(tmp_path: Path) -> None:
    """A file of DDP's has checksums too; one in torch's old format has none, and one elsewhere is refused."""
    path = tmp_path / "a.ckpt"
    fit("ddp", tmp_path).trainer.save_checkpoint(path)
    settings: dict[str, Any] = {"max_epochs": 3, "ckpt_path": path}
    fit(ZeroStrategy("zero3", checkpoint={"verify": True}), tmp_path, **settings)
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(torch.load(path), tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
        flip(path)
    dist.barrier()
    with pytest.raises(ConfigError, match="as it was written"):
        fit(ZeroStrategy("zero3", checkpoint={"verify": True}), tmp_path, **settings)
    warned = pytest.warns(UserWarning, match="no checksums") if dist.get_rank() == 0 else contextlib.nullcontext()
    of = trainer(ZeroStrategy("zero3", checkpoint={"verify": True}), tmp_path, max_epochs=3)
    with warned:
        of.fit(seeded(Lit), loader(), ckpt_path=tmp_path / "old.ckpt")
    of = trainer(ZeroStrategy("zero3", checkpoint={"verify": True}), tmp_path, max_epochs=3)
    with pytest.raises(ConfigError, match=r"zero\.checkpoint\.verify: expected false for .*no local file"):
        of.fit(seeded(Lit), loader(), ckpt_path="memory://a.ckpt")
