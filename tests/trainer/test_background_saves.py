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
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LambdaCallback, ModelCheckpoint

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import verify
from lightning_zero.checkpoint.sharded import items
from lightning_zero.checkpoint.sharded import save as saving
from lightning_zero.checkpoint.sharded.items import Snapshot
from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.ranks.progress import Count
from lightning_zero.settings import Stage
from lightning_zero.trainer.saves.background_saves import BackgroundSaves
from lightning_zero.trainer.saves.checkpointing import Checkpoints
from tests.harness import on_ranks
from tests.selection import pairwise_places
from tests.trainer import toys
from tests.trainer.test_checkpoints import StateInLists
from tests.trainer.toys import At, Fails, Lit, Odd, files, fit, loader, odd, on_rank_0, same, saves_at, seeded, trainer

pytestmark = pytest.mark.full

ROWS = ("zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload")
PATHS = itertools.product(ROWS, ("32-true", "bf16-mixed"), ("reader", "step", "any"), (Odd, StateInLists))
ALL = [{"row": row, "precision": precision, "first": first, "kind": kind} for row, precision, first, kind in PATHS]
CASES = [ALL[place] for place in pairwise_places(ALL)]


def behind(root: Path, row: str = "zero3") -> ZeroStrategy:
    return toys.strategy_of(row, root, checkpoint={"name": "sharded", "background": True}, stall_timeout_s=30)


def at_once() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Checkpoints, "_behind", None)


def content(path: Path) -> Any:
    folder = ShardedFolder(path)
    return {key: folder.tensor(key).whole() for key in folder.keys if folder.is_tensor(key)}


def warns(text: str) -> Any:
    return on_rank_0(pytest.warns(UserWarning, match=text))


class Saves(Callback):
    """Saves the same twice after the third step: at once, and behind training."""

    def __init__(self, root: Path, then: Callable[[Any], None] = lambda _: None) -> None:
        self.root, self.then = root, then

    def on_train_batch_end(self, of: Any, *_: Any) -> None:
        if of.global_step == 3:
            with at_once():
                of.save_checkpoint(self.root / "now.ckpt")
            of.save_checkpoint(self.root / "behind.ckpt")
            self.then(of)

    def assert_same(self) -> dict[str, Any]:
        found, expected = (content(self.root / f"{name}.ckpt") for name in ("behind", "now"))
        assert same(found, expected)
        return found


class Gate:
    """Has the copies made in the thread of this rank before the next step, or when that waits for them."""

    def __init__(self, first: str) -> None:
        self.first, self.opened, self.passed = first, threading.Event(), threading.Event()
        # Lets the thread copy when the next step, which waits for it, is under way.
        self.opens = At("on_train_batch_start", {3: lambda _: self.opened.set()})

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


def writes(kind: type[Lit]) -> Lit:
    """Give a module that changes its parameters by itself before the next step, where they are whole."""

    class Writes(kind):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, *_: Any) -> None:
            if self.trainer.global_step == 3 and self.trainer.strategy.config.stage.name is Stage.zero0:
                self.first.weight.data.add_(1.0)

    return seeded(Writes)


@pytest.mark.sample
@on_ranks(2, full=(3,))
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind'].__name__}-{'-'.join(list(case.values())[:3])}")
def test_folder_written_behind_training_is_what_was_there(case: dict[str, Any], tmp_path: Path) -> None:
    """Whether the reader comes before the next step or when that has changed state, or put other tensors there."""
    gate = Gate(case["first"])
    saves = Saves(tmp_path, gate.saved)
    settings = {"max_epochs": 1, "precision": case["precision"], "limit_val_batches": 0}
    strategy, other = (behind(tmp_path, case["row"]) for _ in range(2))
    with gate.watched():
        run = fit(strategy, tmp_path, writes(case["kind"]), callbacks=[saves, gate.opens], **settings)
    assert gate.passed.is_set()
    saves.assert_same()
    assert verify.check(tmp_path / "behind.ckpt").damage == []
    tiers = held(strategy)
    plain = fit(other, tmp_path, writes(case["kind"]), **settings)
    assert run.losses == plain.losses and tiers == held(other)


def held(strategy: ZeroStrategy) -> list[int]:
    tiers = strategy.engine.tiers
    return [tier.nbytes for tier in (tiers.host, tiers.nvme) if tier is not None]


@on_ranks(2)
@pytest.mark.parametrize("why", ["there is not enough host memory for a copy", "the values to save are in files"])
def test_training_waits_for_a_save_that_finds_no_memory_for_a_copy(why: str, tmp_path: Path) -> None:
    """On all ranks, whoever lacks the memory."""
    in_files = "files" in why
    room = 1000 if dist.get_rank() and not in_files else 1 << 40
    saved: list[bool] = []
    saves = Saves(tmp_path, lambda _: saved.append((tmp_path / "behind.ckpt").exists()))
    of = trainer(behind(tmp_path, "zero3_nvme" if in_files else "zero3"), tmp_path, max_epochs=1, callbacks=[saves])
    found = mock.patch.object(saving, "available_host_memory", lambda: room)
    with found, warns(f"training waits for this save, because {why}"):
        of.fit(odd(), loader())
    assert saved == [True]
    saves.assert_same()


@on_ranks(2)
def test_the_copies_of_all_ranks_of_a_host_must_fit_into_its_memory(tmp_path: Path) -> None:
    module, saved = seeded(Lit), []
    room = int(8 * sum(p.numel() for p in module.parameters()) * 0.75)  # for any rank's masters and momentum
    saves = Saves(tmp_path, lambda _: saved.append((tmp_path / "behind.ckpt").exists()))
    of = trainer(behind(tmp_path), tmp_path, max_epochs=1, callbacks=[saves])
    with mock.patch.object(saving, "available_host_memory", lambda: room), warns("there is not enough host memory"):
        of.fit(module, loader())
    assert saved == [True]


@on_ranks(2)
def test_training_goes_on_while_the_disk_stands_still(tmp_path: Path) -> None:
    on, fsync = threading.Event(), os.fsync

    def stuck(fd: int) -> None:
        assert threading.current_thread() is threading.main_thread() or on.wait(20)
        fsync(fd)

    def ends(*_: Any) -> None:
        assert not (tmp_path / "a.ckpt").exists()
        on.set()

    with mock.patch.object(os, "fsync", stuck):
        callbacks = [saves_at(tmp_path / "a.ckpt"), LambdaCallback(on_train_end=ends)]
        run = fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=1, callbacks=callbacks)
    assert len(run.losses) == 6 and verify.check(tmp_path / "a.ckpt").damage == []
    assert files(tmp_path) == ["a.ckpt"]


@on_ranks(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_averages_written_behind_training_are_those_of_the_moment(precision: Any, tmp_path: Path) -> None:
    gate, saves = Gate("step"), Saves(tmp_path)
    callbacks = [EMAWeightAveraging(use_buffers=True), saves, gate.opens]
    with gate.watched():
        fit(behind(tmp_path), tmp_path, odd(), max_epochs=1, callbacks=callbacks, precision=precision)
    assert any("current_model_state" in key for key in saves.assert_same())


@on_ranks(2)
def test_copies_are_of_what_changes_and_used_again(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    strategy = behind(tmp_path)
    with mock.patch.object(items, "HostPages", wraps=items.HostPages) as made:
        fit(strategy, tmp_path, seeded(Lit), max_epochs=1, enable_checkpointing=True, callbacks=[saves])
    total = torch.tensor([sum(call.args[0] for call in made.call_args_list)])
    dist.all_reduce(total)
    buckets = strategy.engine.buckets
    least = 8 * sum(info.numel for bucket in buckets for info in bucket.params)  # a master, and SGD's momentum
    assert least <= total.item() <= 8 * sum(bucket.layout.numel for bucket in buckets)
    assert strategy._checkpoints.background.spare == []  # given back at the end
    assert all(verify.check(path).damage == [] for path in tmp_path.glob("*.ckpt"))


def full_disk(rank: int) -> Any:
    """The threads of one rank find the disk full."""

    def failing(original: Any) -> Any:
        def call(*args: Any) -> Any:
            if dist.get_rank() == rank and threading.current_thread() is not threading.main_thread():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args)

        return call

    return mock.patch.multiple(os, pwrite=failing(os.pwrite), fsync=failing(os.fsync))


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [2, 6])
def test_failed_write_ends_all_ranks_and_keeps_the_file_before(step: int, rank: int, tmp_path: Path) -> None:
    """At a step that follows; at the end, where none follows. What had the name has it still."""
    path = tmp_path / "a.ckpt"
    fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=1, callbacks=[saves_at(path)])
    before, module = content(path), seeded(Lit)
    says = r"a\.ckpt.* could not be written: .*No space left"
    with full_disk(rank), pytest.raises((OSError, RuntimeError), match=says):
        steps = 1000 if step == 2 else 6
        fit(behind(tmp_path), tmp_path, module, max_epochs=400, callbacks=[saves_at(path, step)], max_steps=steps)
    assert len(module.losses) < 1000
    assert same(content(path), before)
    assert files(tmp_path) == ["a.ckpt"]


@on_ranks(2)
def test_late_rank_after_a_failed_write_does_not_miss_the_part(tmp_path: Path) -> None:
    """Rank 0 fails, and its part is gone, before the thread of rank 1 begins."""
    begin = BackgroundSaves.begin

    def late(self: BackgroundSaves, waits: Any, path: Path, key: str, write: Any, *rest: Any, **settings: Any) -> None:
        def wait_and_write() -> Any:
            deadline = time.monotonic() + 60
            while dist.get_rank() == 1 and list(tmp_path.glob(".*.part")) and time.monotonic() < deadline:
                time.sleep(0.01)
            return write()

        begin(self, waits, path, key, wait_and_write, *rest, **settings)

    saves = saves_at(tmp_path / "a.ckpt")
    failed = pytest.raises(Exception, match="No space left")
    with mock.patch.object(BackgroundSaves, "begin", late), full_disk(0), failed:
        fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=400, callbacks=[saves], max_steps=6)
    assert not files(tmp_path)


@on_ranks(2)
def test_failed_save_by_the_clock_is_a_warning(tmp_path: Path) -> None:
    strategy = behind(tmp_path)
    strategy.save_every_s = 1e-9
    of, module = trainer(strategy, tmp_path, max_epochs=1), seeded(Lit)
    with full_disk(1), warns(r"hpc_ckpt_1\.ckpt.*No space left.* Training continues"):
        of.fit(module, loader())
    assert len(module.losses) == 6 and not files(tmp_path)


@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_save_after_a_failed_one_is_whole(rank: int, tmp_path: Path) -> None:
    """What ranks have told each other in the failed one counts no more."""
    saves = Saves(tmp_path)

    def loses(of: Any, *_: Any) -> None:
        checkpoints = of.strategy._checkpoints
        if of.global_step == 2:
            checkpoints.next_may_fail = True
            with full_disk(rank):
                of.save_checkpoint(tmp_path / "lost.ckpt")
                checkpoints.wait_for_writes()
            checkpoints.next_may_fail = False

    callbacks = [LambdaCallback(on_train_batch_end=loses), saves]
    fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=1, callbacks=callbacks)
    assert files(tmp_path) == ["behind.ckpt", "now.ckpt"]
    saves.assert_same()


@on_ranks(2)
def test_exception_of_training_leaves_the_save_to_its_end(tmp_path: Path) -> None:
    with Gate("any").watched(), pytest.raises(KeyError, match="planned"):
        saves = saves_at(tmp_path / "a.ckpt", 3)
        fit(behind(tmp_path), tmp_path, seeded(lambda: Fails(3)), max_epochs=1, callbacks=[saves])
    assert files(tmp_path) == ["a.ckpt"]
    assert verify.check(tmp_path / "a.ckpt").damage == []


@on_ranks(2)
def test_old_folders_go_and_links_lead_when_new_ones_are_there(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    fsync = os.fsync

    def look(fd: int) -> None:
        time.sleep(0.02)
        if threading.current_thread() is not threading.main_thread():
            seen.append([path.name for path in tmp_path.iterdir() if path.exists() and not path.name.startswith(".")])
        fsync(fd)

    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=1, filename="{step}", save_last="link")
    with mock.patch.object(os, "fsync", look):
        fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=1, callbacks=[save], enable_checkpointing=True)
    assert files(tmp_path) == ["last.ckpt", "step=6.ckpt"]
    assert (tmp_path / "last.ckpt").resolve().name == "step=6.ckpt"
    whole = [names for names in seen if names]
    assert whole and all("last.ckpt" in names for names in whole[2:])


@on_ranks(2)
def test_ended_rank_is_named_and_not_waited_for(tmp_path: Path) -> None:
    """As its process would be: nothing comes from it, and it answers no call."""
    strategy = behind(tmp_path)
    fit(strategy, tmp_path, seeded(Lit), max_epochs=1)
    waits = strategy.engine.comm.waits
    saves = BackgroundSaves()
    if dist.get_rank() == 0:
        with mock.patch.object(type(waits), "silent", lambda _: [1]):
            acts: list[Any] = [lambda: 1, lambda _: None, lambda _: None]
            saves.begin(waits, tmp_path / "a.ckpt", "key", *acts, Count(1), may_fail=False)
            with warns(r"a\.ckpt: the file could not be written: .*rank\(s\) \[1\] ended, or stopped"):
                saves.wait_alone()


@on_ranks(2)
def test_copies_that_one_rank_cannot_make_end_all(tmp_path: Path) -> None:
    """And those that were kept on other ranks are let go: no step waits for who never reads them."""
    released: list[bool] = []
    close = Snapshot.close

    def closed(snapshot: Snapshot) -> None:
        close(snapshot)
        released.append(snapshot._copied.done())

    not_here = mock.Mock(side_effect=MemoryError("no memory"))
    fails = mock.patch.object(Snapshot, "__init__", not_here) if dist.get_rank() else contextlib.nullcontext()
    ends = pytest.raises((MemoryError, RuntimeError), match="no memory")
    with fails, mock.patch.object(Snapshot, "close", closed), ends:
        fit(behind(tmp_path), tmp_path, seeded(Lit), max_epochs=1, callbacks=[saves_at(tmp_path / "a.ckpt")])
    assert released == [True] or dist.get_rank()
    assert not files(tmp_path)
