"""Saves behind training: what is written is what was there when the save began, whoever comes first."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import verify
from lightning_zero.checkpoint.sharded import save as saving
from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.config import ConfigError, Stage
from lightning_zero.engine.whole import snapshot as snapshots
from lightning_zero.engine.whole.snapshot import Snapshot
from lightning_zero.ranks.progress import Count
from lightning_zero.trainer.saves.background_saves import BackgroundSaves
from lightning_zero.trainer.saves.checkpointing import Checkpoints
from tests.harness import on_ranks
from tests.selection import pairwise_places
from tests.trainer.test_range_saves import Model, same
from tests.trainer.toys import Lit, fit, loader, seeded, trainer

pytestmark = pytest.mark.full

CASES = [
    {"stage": stage, "offload": offload, "precision": precision, "first": first}
    for stage, offload, precision, first in itertools.product(
        ("zero0", "zero1", "zero2", "zero3"),
        ("none", "optimizer_cpu", "cpu"),
        ("32-true", "bf16-mixed"),
        ("reader", "step", "any"),
    )
    if (offload == "none" or stage != "zero0") and (stage == "zero3" or offload in ("none", "optimizer_cpu"))
]
CASES = [CASES[place] for place in pairwise_places(CASES)]


def behind(root: Path, stage: str = "zero3", offload: Any = "none") -> ZeroStrategy:
    if offload == "nvme":
        (root / "nvme").mkdir(exist_ok=True)
        offload = {"name": "nvme", "nvme_path": str(root / "nvme")}
    saves = {"name": "sharded", "background": True}
    return ZeroStrategy(stage, offload=offload, checkpoint=saves, stall_timeout_s=30)


def at_once() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Checkpoints, "_behind", None)


def content(path: Path) -> Any:
    folder = ShardedFolder(path)
    return {key: folder.tensor(key).whole() for key in folder.keys if folder.is_tensor(key)}


class Saves(Callback):
    """Saves the same twice after a step: at once, and behind training."""

    def __init__(self, root: Path, then: Callable[[Any], None] = lambda _: None) -> None:
        self.root, self.then = root, then
        self.step = 3

    def on_train_batch_end(self, of: Any, *_: Any) -> None:
        if of.global_step == self.step:
            with at_once():
                of.save_checkpoint(self.root / "now.ckpt")
            of.save_checkpoint(self.root / "behind.ckpt")
            self.then(of)


class Gate:
    """Has the copies made in the thread of this rank before the next step, or when that waits for them."""

    def __init__(self, first: str) -> None:
        self.first, self.opened, self.passed = first, threading.Event(), threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        stage, close = Snapshot.stage, Snapshot.close

        def staged(snapshot: Snapshot) -> None:
            if self.first == "step":
                assert self.opened.wait(20)
                time.sleep(0.3)
            stage(snapshot)

        def closed(snapshot: Snapshot) -> None:
            close(snapshot)
            self.passed.set()

        with mock.patch.object(Snapshot, "stage", staged), mock.patch.object(Snapshot, "close", closed):
            yield

    def saved(self, of: Any) -> None:
        if self.first == "reader":
            assert self.passed.wait(20)


class Opens(Callback):
    """Lets the thread copy when the next step is under way, which comes to what is copied before it is."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_train_batch_start(self, of: Any, *_: Any) -> None:
        if of.global_step == 3:
            self.gate.opened.set()


class Writes(Model):
    """Changes its parameters by itself, before the next step."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == 3 and self.trainer.strategy.config.stage.name is Stage.zero0:
            self.first.weight.data.add_(1.0)


@pytest.mark.sample
@on_ranks(2, full=(1, 3))
@pytest.mark.mainly(lambda case: CASES.index(case) % 2 == 0)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_it_is_what_was_there(case: dict[str, Any], tmp_path: Path) -> None:
    gate = Gate(case["first"])
    settings = {"max_epochs": 1, "precision": case["precision"]}
    strategy = behind(tmp_path, case["stage"], case["offload"])
    with gate.watched():
        callbacks = [Saves(tmp_path, gate.saved), Opens(gate)]
        run = fit(strategy, tmp_path, seeded(Writes), callbacks=callbacks, **settings)
    assert gate.passed.is_set()
    found, expected = (content(tmp_path / f"{name}.ckpt") for name in ("behind", "now"))
    assert same(found, expected)
    assert verify.check(tmp_path / "behind.ckpt").damage == []
    tiers = held(strategy)
    with at_once():
        other = behind(tmp_path, case["stage"], case["offload"])
        plain = fit(other, tmp_path, seeded(Writes), **settings)
    assert run.losses == plain.losses and tiers == held(other)


def held(strategy: ZeroStrategy) -> list[int]:
    tiers = strategy.engine.tiers
    return [tier.nbytes for tier in (tiers.host, tiers.nvme) if tier is not None]


@on_ranks(2)
@pytest.mark.parametrize("why", ["there is no host memory for a copy", "what is saved rests in files"])
def test_where_nothing_can_be_copied_training_waits_for_the_save(why: str, tmp_path: Path) -> None:
    """On all ranks, whoever lacks the memory."""
    room = 0 if dist.get_rank() else 1 << 40
    no_room = mock.patch.object(saving, "available_host_memory", lambda: room)
    files = "files" in why
    saved: list[bool] = []
    there = Saves(tmp_path, lambda _: saved.append((tmp_path / "behind.ckpt").exists()))
    strategy = behind(tmp_path, offload="nvme" if files else "none")
    of = trainer(strategy, tmp_path, max_epochs=1, callbacks=[there])
    with contextlib.nullcontext() if files else no_room, says(f"training waits for this save, because {why}"):
        of.fit(seeded(Model), loader())
    assert saved == [True]
    assert same(*(content(tmp_path / f"{name}.ckpt") for name in ("behind", "now")))


@on_ranks(2)
def test_training_goes_on_while_the_disk_stands_still(tmp_path: Path) -> None:
    on, fsync = threading.Event(), os.fsync

    def stuck(fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert on.wait(20)
        fsync(fd)

    class Ends(Callback):
        def on_train_end(self, of: Any, *_: Any) -> None:
            assert not (tmp_path / "a.ckpt").exists()
            on.set()

    class Begins(Callback):
        def on_train_batch_end(self, of: Any, *_: Any) -> None:
            if of.global_step == 2:
                of.save_checkpoint(tmp_path / "a.ckpt")

    with mock.patch.object(os, "fsync", stuck):
        run = fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=1, callbacks=[Begins(), Ends()])
    assert len(run.losses) == 6 and verify.check(tmp_path / "a.ckpt").damage == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt"]


@on_ranks(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_averages(precision: Any, tmp_path: Path) -> None:
    gate = Gate("step")
    callbacks = [EMAWeightAveraging(use_buffers=True), Saves(tmp_path), Opens(gate)]
    with gate.watched():
        strategy = behind(tmp_path)
        fit(strategy, tmp_path, seeded(Model), max_epochs=1, callbacks=callbacks, precision=precision)
    found, expected = (content(tmp_path / f"{name}.ckpt") for name in ("behind", "now"))
    assert same(found, expected) and any("current_model_state" in key for key in found)


@on_ranks(2)
def test_copies_take_what_changes_and_are_used_again(tmp_path: Path) -> None:
    made: list[int] = []
    pages = snapshots.HostPages

    def counted(nbytes: int) -> Any:
        made.append(nbytes)
        return pages(nbytes)

    class SavesOften(Callback):
        def on_train_batch_end(self, of: Any, *_: Any) -> None:
            of.save_checkpoint(tmp_path / f"{of.global_step}.ckpt")

    strategy = behind(tmp_path)
    with mock.patch.object(snapshots, "HostPages", counted):
        fit(strategy, tmp_path, seeded(Lit), max_epochs=1, callbacks=[SavesOften()])
    total = torch.tensor([sum(made)])
    dist.all_reduce(total)
    buckets = strategy.engine.buckets
    least = 8 * sum(info.numel for bucket in buckets for info in bucket.params)  # a master, and SGD's momentum
    assert least <= total.item() <= 8 * sum(bucket.layout.numel for bucket in buckets)
    assert len({verify.check(path).damage == [] for path in tmp_path.glob("*.ckpt")}) == 1


# -- what goes wrong --------------------------------------------------------------------------------------------------


def full_disk(thread: int) -> Any:
    """The threads of one rank find the disk full."""
    pwrite, fsync = os.pwrite, os.fsync

    def failing(original: Any) -> Any:
        def call(*args: Any) -> Any:
            if dist.get_rank() == thread and threading.current_thread() is not threading.main_thread():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args)

        return call

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(os, "pwrite", failing(pwrite)))
    stack.enter_context(mock.patch.object(os, "fsync", failing(fsync)))
    return stack


class SavesOnce(Callback):
    def __init__(self, path: Path, step: int = 2) -> None:
        self.path, self.step, self.steps = path, step, 0

    def on_train_batch_end(self, of: Any, *_: Any) -> None:
        self.steps = of.global_step
        if of.global_step == self.step:
            of.save_checkpoint(self.path)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [2, 6])
def test_a_failure_reaches_all_ranks(step: int, rank: int, tmp_path: Path) -> None:
    """At a step that follows; at the end, where none follows. What had the name has it still."""
    path = tmp_path / "a.ckpt"
    fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=1, callbacks=[SavesOnce(path)])
    before = content(path)
    saves = SavesOnce(path, step)
    with (
        full_disk(rank),
        pytest.raises((OSError, RuntimeError), match=r"a\.ckpt.* could not be written: .*No space left"),
    ):
        fit(
            behind(tmp_path),
            tmp_path,
            seeded(Lit),
            max_epochs=400,
            callbacks=[saves],
            max_steps=1000 if step == 2 else 6,
        )
    assert saves.steps < 1000
    assert same(content(path), before)
    dist.barrier()
    assert [found.name for found in tmp_path.iterdir()] == ["a.ckpt"]


@on_ranks(2)
def test_a_rank_that_comes_late_does_not_look_for_what_another_has_taken_away(tmp_path: Path) -> None:
    """Rank 0 fails, and its part is gone, before the thread of rank 1 begins."""
    begin = BackgroundSaves.begin

    def late(self: BackgroundSaves, waits: Any, path: Path, key: str, write: Any, *rest: Any, **settings: Any) -> None:
        def wait_and_write() -> Any:
            deadline = time.monotonic() + 60
            while dist.get_rank() == 1 and list(tmp_path.glob(".*.part")) and time.monotonic() < deadline:
                time.sleep(0.01)
            return write()

        begin(self, waits, path, key, wait_and_write, *rest, **settings)

    with (
        mock.patch.object(BackgroundSaves, "begin", late),
        full_disk(0),
        pytest.raises(Exception, match="No space left"),
    ):
        saves = SavesOnce(tmp_path / "a.ckpt")
        fit(
            behind(tmp_path),
            tmp_path,
            seeded(Lit),
            max_epochs=400,
            callbacks=[saves],
            max_steps=6,
        )
    dist.barrier()
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_one_by_the_clock_may_fail(tmp_path: Path) -> None:
    strategy = behind(tmp_path)
    strategy.save_every_s = 1e-9
    of, module = trainer(strategy, tmp_path, max_epochs=1), seeded(Lit)
    with full_disk(1), says(r"hpc_ckpt_1\.ckpt.*No space left.* Training goes on"):
        of.fit(module, loader())
    assert len(module.losses) == 6 and not list(tmp_path.iterdir())


@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_after_one_that_failed_is_whole(rank: int, tmp_path: Path) -> None:
    """What ranks have told each other in the failed one counts no more."""
    with contextlib.ExitStack() as full:
        full.enter_context(full_disk(rank))

        class Empties(Callback):
            def on_train_batch_end(self, of: Any, *_: Any) -> None:
                if of.global_step == 2:
                    of.strategy._checkpoints.next_may_fail = True
                    of.save_checkpoint(tmp_path / "lost.ckpt")
                    of.strategy._checkpoints.next_may_fail = False
                if of.global_step == 3:
                    of.strategy._checkpoints.wait_for_writes()
                    full.close()

        callbacks = [Empties(), SavesOnce(tmp_path / "a.ckpt", 5)]
        fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=1, callbacks=callbacks)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    assert verify.check(tmp_path / "a.ckpt").damage == []
    callbacks = [SavesOnce(tmp_path / "b.ckpt", 5)]
    with at_once():
        fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=1, callbacks=callbacks)
    assert same(content(tmp_path / "a.ckpt"), content(tmp_path / "b.ckpt"))


def says(text: str) -> contextlib.AbstractContextManager[Any]:
    """Rank 0 warns inside."""
    return pytest.warns(UserWarning, match=text) if dist.get_rank() == 0 else contextlib.nullcontext()


@on_ranks(2)
def test_an_exception_of_training_ends_no_save(tmp_path: Path) -> None:
    class Fails(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise ValueError("mine")
            return super().training_step(batch, batch_idx)

    gate = Gate("any")
    with gate.watched(), pytest.raises(ValueError, match="mine"):
        fit(
            behind(tmp_path),
            tmp_path,
            seeded(Fails),
            max_epochs=1,
            callbacks=[SavesOnce(tmp_path / "a.ckpt", 3)],
        )
    dist.barrier()
    assert verify.check(tmp_path / "a.ckpt").damage == []
    assert [found.name for found in tmp_path.iterdir()] == ["a.ckpt"]


@on_ranks(2)
def test_old_ones_go_and_links_lead_when_new_ones_are_there(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    fsync = os.fsync

    def look(fd: int) -> None:
        time.sleep(0.02)
        if threading.current_thread() is not threading.main_thread():
            seen.append(
                sorted(path.name for path in tmp_path.iterdir() if path.exists() and not path.name.startswith("."))
            )
        fsync(fd)

    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=1, filename="{step}", save_last="link")
    with mock.patch.object(os, "fsync", look):
        fit(
            behind(tmp_path),
            tmp_path,
            seeded(Lit),
            max_epochs=1,
            callbacks=[save],
            enable_checkpointing=True,
        )
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=6.ckpt"]
    assert (tmp_path / "last.ckpt").resolve().name == "step=6.ckpt"
    whole = [names for names in seen if names]
    assert whole and all("last.ckpt" in names for names in whole[2:])


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero/checkpoint=sharded: expected no CheckpointIO, got AsyncChe"):
        ZeroStrategy("zero3", checkpoint={"name": "sharded", "background": True}, checkpoint_io=AsyncCheckpointIO())
    with pytest.raises(ConfigError, match=r"zero\.checkpoint\.background: expected false with zero/checkpoint=full"):
        ZeroStrategy("zero3", checkpoint={"background": True})


@on_ranks(2)
def test_a_rank_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    """As its process would be: nothing comes from it, and it answers no call."""
    strategy = behind(tmp_path)
    fit(strategy, tmp_path, seeded(Lit), max_epochs=1)
    waits = strategy.engine.comm.waits
    saves = BackgroundSaves()
    if dist.get_rank() == 0:
        with mock.patch.object(type(waits), "silent", lambda _: [1]):
            acts: list[Any] = [lambda: 1, lambda _: None, lambda _: None]
            saves.begin(waits, tmp_path / "a.ckpt", "key", *acts, Count(1), may_fail=False)
            with says(r"a\.ckpt: the file could not be written: .*rank\(s\) \[1\] have ended"):
                saves.wait_alone()


@on_ranks(2)
def test_values_that_cannot_be_kept_fail_on_all_ranks(tmp_path: Path) -> None:
    """And those that were kept on other ranks are let go: no step waits for who never reads them."""
    released: list[int] = []
    close = Snapshot.close

    def not_here(*_: Any) -> Any:
        raise MemoryError("no memory")

    def closed(snapshot: Snapshot) -> None:
        released.append(1)
        close(snapshot)

    fails = mock.patch.object(Snapshot, "__init__", not_here) if dist.get_rank() else contextlib.nullcontext()
    callbacks = [SavesOnce(tmp_path / "a.ckpt")]
    with (
        fails,
        mock.patch.object(Snapshot, "close", closed),
        pytest.raises((MemoryError, RuntimeError), match="no memory"),
    ):
        fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=1, callbacks=callbacks)
    assert released or dist.get_rank()
    dist.barrier()
    assert not list(tmp_path.iterdir())
