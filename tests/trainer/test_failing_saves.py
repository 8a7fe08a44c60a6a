"""Saves that fail: one sentence on all ranks, what had the name has it still, nothing is left, and ranks go on."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import durable
from lightning_zero.checkpoint.sharded import save as sharded_save
from lightning_zero.engine.passes import passes
from lightning_zero.trainer import interruptions
from lightning_zero.trainer.saves import range_saves
from tests.harness import Pool, on_ranks
from tests.trainer.toys import Fails, assert_weights, fit, loader, odd, other_weights, seeded, trainer, weights

pytestmark = pytest.mark.full


def raising(code: int) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fails


@contextlib.contextmanager
def files_stay_small(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def disk_is_full() -> Iterator[None]:
    fails = raising(errno.ENOSPC)
    with mock.patch.object(os, "pwrite", fails), mock.patch.object(sharded_save._RankFile, "_write", fails):
        yield


# What fails, on which ranks, and what is said.
FAULTS: dict[str, tuple[Callable[[], Any], tuple[int, ...], str]] = {
    "disk full, rank 0": (disk_is_full, (0,), "No space left"),
    "disk full, rank 1": (disk_is_full, (1,), "No space left"),
    "disk full at fsync": (lambda: mock.patch.object(os, "fsync", raising(errno.ENOSPC)), (0, 1), "No space left"),
    "too large": (lambda: files_stay_small(1000), (0,), "File too large"),
    "read-only": (lambda: mock.patch.object(durable, "_open_part", raising(errno.EROFS)), (0, 1), "Read-only file"),
    "a file in the way": (nullcontext, (0, 1), "FileExistsError|File exists|Not a directory"),
}
_open = range_saves._open


def _not_seen(place: Any) -> int | None:
    return None if dist.get_rank() else _open(place)


# By ranges; by ranges where rank 1 does not see the file; for a hook, which is given values of a file; a folder.
FORMS = ("ranges", "unshared", "hook", "sharded")


def can_be(form: str, fault: str) -> bool:
    if form == "unshared":  # rank 0 alone writes
        return fault != "disk full, rank 1"
    return form != "sharded" or fault not in ("read-only", "too large")  # whose files are others


CASES = [(form, fault) for form in FORMS for fault in FAULTS if can_be(form, fault)]


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("form", "fault"), CASES)
def test_failing_save_is_named_on_all_ranks_and_changes_no_file(form: str, fault: str, tmp_path: Path) -> None:
    module = odd()
    if form == "hook":
        module.on_save_checkpoint = lambda checkpoint: None
    strategy = ZeroStrategy("zero3", checkpoint="sharded" if form == "sharded" else "full")
    of = fit(strategy, tmp_path, module, max_epochs=1, count=12, limit_val_batches=0).trainer
    path = good = tmp_path / "a.ckpt"
    of.save_checkpoint(path)
    before = weights(of)
    if fault == "a file in the way":
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "a.ckpt"
    dist.barrier()
    left = sorted(p.name for p in tmp_path.iterdir())
    breaks, ranks, says = FAULTS[fault]
    broken = breaks() if dist.get_rank() in ranks else nullcontext()
    unshared = mock.patch.object(range_saves, "_open", _not_seen) if form == "unshared" else nullcontext()
    names = pytest.raises((OSError, RuntimeError), match=rf"a\.ckpt.* could not be written: .*({says})")
    with unshared, broken, names:
        of.save_checkpoint(path)
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    test = trainer("zero1", tmp_path)
    test.test(other_weights(), loader(), ckpt_path=good, verbose=False)
    assert_weights(weights(test), before, tolerance=0)
    of.save_checkpoint(tmp_path / "b.ckpt")  # and these ranks go on together
    assert fit("zero3", tmp_path, odd(), max_epochs=2, ckpt_path=tmp_path / "b.ckpt").losses


@on_ranks(2)
def test_value_that_no_rank_wrote_ends_the_save(tmp_path: Path) -> None:
    """Zeros in the place of weights would load in silence."""
    of = fit("zero3", tmp_path, odd(), max_epochs=1).trainer
    lost = mock.patch.object(range_saves, "own_ranges", lambda *a: iter(()))
    with lost if dist.get_rank() else nullcontext(), pytest.raises(RuntimeError, match=r"a\.ckpt: .*bytes .*written"):
        of.save_checkpoint(tmp_path / "a.ckpt")
    dist.barrier()
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_failed_write_behind_training_is_said_once_and_the_next_is_tried(tmp_path: Path) -> None:
    plugin, has_returned = AsyncCheckpointIO(), threading.Event()
    of = fit("zero3", tmp_path, plugins=[plugin], max_epochs=1).trainer

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


@on_ranks(2)
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_folder_with_other_things_in_it_is_not_replaced(checkpoint: str, tmp_path: Path) -> None:
    of = fit(ZeroStrategy("zero3", checkpoint=checkpoint), tmp_path, max_epochs=1).trainer
    results = tmp_path / "results"
    for name in ("a.ckpt", "a.ckpt", "folder/b.ckpt"):  # one in the place of another; and of an empty folder
        (results / "folder" / "b.ckpt").mkdir(parents=True, exist_ok=True)
        of.save_checkpoint(results / name)
    says = r"results: .*a folder with other things in it \(a\.ckpt, folder\)"
    with pytest.raises((OSError, RuntimeError), match=says):
        of.save_checkpoint(results)
    dist.barrier()
    assert sorted(p.name for p in results.iterdir()) == ["a.ckpt", "folder"] and (results / "folder/b.ckpt").exists()


@on_ranks(2)
def test_small_disk_keeps_the_file_before(tmp_path: Path) -> None:
    """A real one, where this process may mount it."""
    disk = tmp_path / "disk"
    disk.mkdir(exist_ok=True)
    dist.barrier()
    mounted = dist.get_rank() == 0 and os.system(f"mount -t tmpfs -o size=70k tmpfs {disk} 2>/dev/null") == 0
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mounted)
    if not any(found):
        return
    try:
        of = fit("zero3", tmp_path, odd(), max_epochs=1).trainer
        of.save_checkpoint(disk / "a.ckpt", weights_only=True)
        kept = (disk / "a.ckpt").read_bytes()
        with pytest.raises((OSError, RuntimeError), match=r"a\.ckpt: the file could not be written: .*No space left"):
            of.save_checkpoint(disk / "a.ckpt")
        dist.barrier()
        assert (disk / "a.ckpt").read_bytes() == kept and [p.name for p in disk.iterdir()] == ["a.ckpt"]
    finally:
        dist.barrier()
        if mounted:
            os.system(f"umount {disk}")


def _fail_alone(stage: str, root: Path) -> str:
    """What this rank ends with; the pool does not outlive this."""
    interruptions.MEET_S, passes.ABANDON_S = 1.0, 0.5
    strategy = ZeroStrategy(stage, stall_timeout_s=3.0)
    of = trainer(strategy, root, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(root)])
    try:
        of.fit(seeded(lambda: Fails(3, (1,))), loader())
    except Exception as error:
        return f"{type(error).__name__}: {error} {error.__context__!r}"
    return "no error"


@pytest.mark.sample
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_exception_of_one_rank_saves_nothing_and_leaves_nobody_waiting(stage: str, tmp_path: Path) -> None:
    """The rank that failed says why nothing is saved; the other one finds out by itself."""
    pool = Pool(2)
    try:
        waits, failed = pool.run(pickle.dumps((_fail_alone, (stage, tmp_path), {})), 60)
    finally:
        pool.kill()
    assert "no checkpoint is saved" in failed and "rank(s) [0]" in failed and "planned" in failed
    assert "no checkpoint is saved" in waits and "StallError" in waits
    assert not list(tmp_path.glob("*.ckpt"))
