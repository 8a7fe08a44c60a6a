"""Saves by ranges: the file is the one that rank 0 would write with everything in its memory, and nobody holds that.

Saves of every form that fail: one sentence on all ranks, what had the name has it still, nothing is left, ranks go on.

Saves and loads say how far they are: on rank 0, in bytes that add up, and where the Trainer has a progress bar.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LambdaCallback, OnExceptionCheckpoint, ProgressBar
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from rich.filesize import decimal
from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import durable, verify
from lightning_zero.checkpoint.sharded import save as sharded_save
from lightning_zero.engine.passes import passes
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.ranks import progress as long_work
from lightning_zero.trainer import interruptions
from lightning_zero.trainer.saves import range_saves
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO
from tests.checkpoint.test_durable import full_disk
from tests.harness import Pool, on_ranks
from tests.trainer import toys
from tests.trainer.test_checkpoints import StateInLists
from tests.trainer.toys import Lit, Odd, files, fit, loaded_weights, loader, same, saves_at, seeded, trainer, weights

pytestmark = pytest.mark.full


def whole_on_rank_0() -> Any:
    """As before there were ranges."""
    return mock.patch.object(range_saves, "_choose", return_value=None)


def nobody_holds_the_whole() -> Any:
    refuse = mock.Mock(side_effect=AssertionError("gathered"))
    return mock.patch.multiple(Bucket, full_master=refuse, gathered=refuse)


def rank_1_sees_no_file() -> Any:
    return mock.patch.object(range_saves, "_open", return_value=None) if dist.get_rank() else nullcontext()


WAYS = ("whole.ckpt", "ranges.ckpt", "unshared.ckpt")  # by rank 0; by all; where rank 1 does not see the file


def save_in_each_way(of: Any, root: Path, weights_only: bool = False) -> None:
    for name, way in zip(WAYS, (whole_on_rank_0(), nobody_holds_the_whole(), rank_1_sees_no_file()), strict=True):
        with way:
            of.save_checkpoint(root / name, weights_only)


ROWS = ("zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_nvme")
BY_ROW = list(zip(ROWS, itertools.cycle(("32-true", "bf16-mixed", "bf16-true")), strict=False))


@pytest.mark.sample
@on_ranks(2, full=(3,))
@pytest.mark.parametrize(("row", "precision"), BY_ROW)
def test_file_by_ranges_is_that_of_rank_0_and_nobody_gathers(row: str, precision: Any, tmp_path: Path) -> None:
    module = seeded(StateInLists) if row in ("zero2", "zero3_offload") else seeded(Odd)
    of = fit(toys.strategy_of(row, tmp_path), tmp_path, module, count=12, max_epochs=1, precision=precision).trainer
    for weights_only in (False, True):
        save_in_each_way(of, tmp_path, weights_only)
        whole, *others = [torch.load(tmp_path / name, weights_only=True) for name in WAYS]
        for name, found in zip(WAYS[1:], others, strict=True):
            assert same(found, whole)
            tied = [found["state_dict"][f"blocks.{n}.up.weight"] for n in (0, 1)]
            assert (tied[0].data_ptr() == tied[1].data_ptr()) == isinstance(module, Odd)
            assert verify.check(tmp_path / name).damage == []
            assert zipfile.ZipFile(tmp_path / name).testzip() is None
        assert set(files(tmp_path)) - {"disk"} == set(WAYS)


class Edits(Odd):
    """Reads what is saved, and changes it in every way."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if dist.get_rank():
            return
        state = checkpoint["state_dict"]
        checkpoint["norm"] = torch.stack([v.double().norm() for v in state.values()]).norm()
        state["first.weight"].mul_(2)
        state["head.bias"] = torch.full_like(state["head.bias"], 7.0)
        checkpoint["optimizer_states"][0]["state"][0]["exp_avg"].zero_()
        del state["seen"]


@on_ranks(2)
@pytest.mark.parametrize("who", ["module", "callback", "callback of rank 0"])
def test_hooks_read_and_replace_values_of_the_file(who: str, tmp_path: Path) -> None:
    callback = Callback()
    callback.on_save_checkpoint = lambda of, module, checkpoint: Edits.on_save_checkpoint(module, checkpoint)
    asks = who == "callback" or (who == "callback of rank 0" and dist.get_rank() == 0)  # as of one that writes logs
    module = seeded(Edits if who == "module" else Odd)
    of = fit("zero3", tmp_path, module, max_epochs=1, callbacks=[callback] if asks else []).trainer
    before = weights(of)
    with nobody_holds_the_whole():
        of.save_checkpoint(tmp_path / "edited.ckpt")
    with whole_on_rank_0():
        of.save_checkpoint(tmp_path / "whole.ckpt")
    found, whole = (torch.load(tmp_path / f"{name}.ckpt") for name in ("edited", "whole"))
    assert same(found, whole)
    state = found["state_dict"]
    assert torch.equal(state["first.weight"], before["first.weight"] * 2) and state["head.bias"].eq(7).all()
    assert "seen" not in state and found["norm"] > 0
    assert not found["optimizer_states"][0]["state"][0]["exp_avg"].any()
    assert same(dict(weights(of)), dict(before))  # what trains on is not what was edited
    assert files(tmp_path) == ["edited.ckpt", "whole.ckpt"]


@pytest.mark.sample
@on_ranks(1)
@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_hooks_keep_the_checkpoint_that_they_were_given(row: str, tmp_path: Path) -> None:
    given: list[tuple[dict[str, Any], set[str]]] = []
    callback = Callback()
    callback.on_save_checkpoint = lambda of, module, checkpoint: given.append((checkpoint, set(checkpoint)))
    fit(row, tmp_path, max_epochs=1, callbacks=[callback, toys.saves_at(tmp_path / "a.ckpt")])
    ((kept, keys),) = given
    assert set(kept) == keys <= set(torch.load(tmp_path / "a.ckpt"))


class LeavesOut(toys.Frozen):
    """Does on all ranks what people do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.seen_there = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        for name, param in self.named_parameters():
            if not param.requires_grad:
                del state[name]
        state["more"] = torch.ones(2)
        entry = checkpoint["optimizer_states"][0]["state"][0]
        self.seen_there["exp_avg"] = tuple(entry["exp_avg"].shape), entry["exp_avg"].dtype


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("form", ["file", "another writer", "averages"])
@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_hooks_on_all_ranks_see_names_and_shapes(row: str, form: str, tmp_path: Path) -> None:
    module = seeded(LeavesOut)
    settings: dict[str, Any] = {"plugins": [AsyncCheckpointIO()]} if form == "another writer" else {}
    callbacks = [EMAWeightAveraging(use_buffers=True)] if form == "averages" else []
    saves = toys.saves_at(tmp_path / "a.ckpt")
    run = fit(row, tmp_path, module, max_epochs=1, callbacks=[*callbacks, saves], limit_val_batches=0, **settings)
    found = torch.load(tmp_path / "a.ckpt")
    own = {name: (tuple(value.shape), value.dtype) for name, value in found["state_dict"].items()}
    frozen = {name for name, param in module.named_parameters() if not param.requires_grad}
    assert own.pop("more") and frozen and not frozen & set(own)
    seen, exp_avg = module.seen_there, module.seen_there.pop("exp_avg")
    assert own == {name: value for name, value in seen.items() if name not in frozen} and frozen < set(seen)
    assert exp_avg in seen.values()
    state = run.trainer.strategy.lightning_module_state_dict()
    if dist.get_rank():
        with pytest.raises(RuntimeError, match="norm.*: rank 0 alone holds the tensors .*is_global_zero.*gather"):
            state["head.weight"].norm()


@on_ranks(2)
@pytest.mark.parametrize(("stage", "precision"), [("zero0", "32-true"), ("zero1", "bf16-mixed"), ("zero3", "32-true")])
def test_averages_are_saved_by_ranges(stage: str, precision: Any, tmp_path: Path) -> None:
    """They are one more copy of everything, and nobody holds that either."""
    saves = LambdaCallback(on_train_batch_end=lambda of, *_: of.global_step == 4 and save_in_each_way(of, tmp_path))
    callbacks = [EMAWeightAveraging(use_buffers=True), saves]
    fit(stage, tmp_path, seeded(Odd), max_epochs=1, callbacks=callbacks, precision=precision)
    whole, *others = (torch.load(tmp_path / name) for name in WAYS)
    assert "current_model_state" in whole and all(same(found, whole) for found in others)
    assert not same(whole["current_model_state"]["first.weight"], whole["state_dict"]["first.weight"])


@on_ranks(2)
def test_large_weights_are_mapped_and_what_callers_keep_is_copied(tmp_path: Path) -> None:
    big = torch.arange(1 << 19, dtype=torch.float32)
    kept, path = big * 2, tmp_path / f"{dist.get_rank()}.ckpt"
    saved = {"state_dict": {"w": big, "b": torch.ones(2)}, "kept": [{"w": kept, "w2": kept[5:], "s": torch.ones(3)}]}
    ZeroCheckpointIO().save_checkpoint(saved, path)
    found = ZeroCheckpointIO().load_checkpoint(path)
    assert same(found, saved)
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [tuple(int(n, 16) for n in line.split()[0].split("-")) for line in lines if str(path) in line]

    def mapped(tensor: Tensor) -> bool:
        return any(low <= tensor.data_ptr() < high for low, high in spans)

    here = found["kept"][0]
    assert mapped(found["state_dict"]["w"])
    assert not any(map(mapped, [found["state_dict"]["b"], *here.values()]))
    assert here["w2"].data_ptr() == here["w"].data_ptr() + 20


def raising(code: int) -> Any:
    return mock.Mock(side_effect=OSError(code, os.strerror(code)))


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
    "too large": (lambda: full_disk(1000), (0,), "File too large"),
    "read-only": (lambda: mock.patch.object(durable, "_open_part", raising(errno.EROFS)), (0, 1), "Read-only file"),
    "a file in the way": (nullcontext, (0, 1), "FileExistsError|File exists|Not a directory"),
}
# By ranges; by ranges where rank 1 does not see the file; for a hook, which is given values of a file; a folder.
FORMS = ("ranges", "unshared", "hook", "sharded")
# There rank 0 alone writes; and these files are others.
NO_CASES = {("unshared", "disk full, rank 1"), ("sharded", "read-only"), ("sharded", "too large")}
CASES = [case for case in itertools.product(FORMS, FAULTS) if case not in NO_CASES]


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("form", "fault"), CASES)
def test_failing_save_is_named_on_all_ranks_and_changes_no_file(form: str, fault: str, tmp_path: Path) -> None:
    module = seeded(Odd)
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
    left = files(tmp_path)
    breaks, ranks, says = FAULTS[fault]
    broken = breaks() if dist.get_rank() in ranks else nullcontext()
    unshared = rank_1_sees_no_file() if form == "unshared" else nullcontext()
    names = pytest.raises((OSError, RuntimeError), match=rf"a\.ckpt.* could not be written: .*({says})")
    with unshared, broken, names:
        of.save_checkpoint(path)
    assert files(tmp_path) == left
    toys.assert_weights(loaded_weights(good, "zero1", tmp_path), before, tolerance=0)
    of.save_checkpoint(tmp_path / "b.ckpt")  # and these ranks go on together
    assert fit("zero3", tmp_path, seeded(Odd), max_epochs=2, ckpt_path=tmp_path / "b.ckpt").losses


@on_ranks(2)
def test_value_that_no_rank_wrote_ends_the_save(tmp_path: Path) -> None:
    """Zeros in the place of weights would load in silence."""
    of = fit("zero3", tmp_path, seeded(Odd), max_epochs=1).trainer
    lost = mock.patch.object(range_saves, "own_ranges", lambda *a: iter(()))
    with lost if dist.get_rank() else nullcontext(), pytest.raises(RuntimeError, match=r"a\.ckpt: .*bytes .*written"):
        of.save_checkpoint(tmp_path / "a.ckpt")
    assert not files(tmp_path)


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
    assert files(tmp_path) == ["c.ckpt"]


@on_ranks(2)
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_folder_with_other_things_in_it_is_not_replaced(checkpoint: str, tmp_path: Path) -> None:
    of = fit(ZeroStrategy("zero3", checkpoint=checkpoint), tmp_path, max_epochs=1).trainer
    results = tmp_path / "results"
    for name in ("a.ckpt", "a.ckpt", "folder/b.ckpt"):  # one in the place of another; and of an empty folder
        (results / "folder" / "b.ckpt").mkdir(parents=True, exist_ok=True)
        of.save_checkpoint(results / name)
    says = r"results: .*a folder with other files \(a\.ckpt, folder\)"
    with pytest.raises((OSError, RuntimeError), match=says):
        of.save_checkpoint(results)
    assert files(results) == ["a.ckpt", "folder"] and (results / "folder/b.ckpt").exists()


def _fail_alone(stage: str, root: Path) -> str:
    """What this rank ends with; the pool does not outlive this."""
    interruptions.MEET_S, passes.ABANDON_S = 1.0, 0.5
    strategy = ZeroStrategy(stage, stall_timeout_s=3.0)
    of = trainer(strategy, root, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(root)])
    try:
        of.fit(seeded(lambda: toys.Fails(3, (1,))), loader())
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


SEEN: list[Seen] = []


class Seen:
    """One piece of work that is shown, with what it is told."""

    def __init__(self, what: str, total: int | None, *, in_bytes: bool) -> None:
        self.what, self.total, self.in_bytes, self.done, self.over = what, total, in_bytes, [0], False
        SEEN.append(self)

    def at(self, done: int) -> None:
        assert not any(other is not self and not other.over for other in SEEN), "two pieces of work at once"
        self.done.append(done)


@contextlib.contextmanager
def lines(work: long_work.LongWork, what: str, total: int | None, text: Any) -> Iterator[Callable[[int], None]]:
    """Takes the place of ``LongWork._lines``."""
    if not work.shows:
        yield lambda done: None
        return
    seen = Seen(what, total, in_bytes=text is decimal)
    yield seen.at
    seen.over = True


class Silent(ProgressBar):
    """Draws nothing."""

    def disable(self) -> None: ...

    enable = disable


def shown(root: Path, checkpoint: dict[str, Any], *, bar: bool = True, **fit: Any) -> list[Seen]:
    """What has been shown on this rank in a fit that saves."""
    SEEN.clear()
    strategy = ZeroStrategy("zero3", checkpoint=checkpoint, gather_after_fit=False)
    callbacks: list[Callback] = [saves_at(root / "a.ckpt", 3), *([Silent()] if bar else [])]
    of = trainer(strategy, root, max_epochs=1, callbacks=callbacks, enable_progress_bar=bar)
    with mock.patch.object(long_work.LongWork, "_lines", lines):
        of.fit(seeded(lambda: Lit(optimizer="adamw")), loader(), **fit)
    return list(SEEN)


@pytest.mark.sample
@pytest.mark.parametrize(("name", "background"), [("full", False), ("sharded", False), ("sharded", True)])
@on_ranks(2)
def test_saves_and_loads_count_their_bytes(name: str, background: bool, tmp_path: Path) -> None:
    ran: list[Passes] = []
    end_run = Passes.end_run
    settings = {"name": name, "background": background, "verify": True}
    with mock.patch.object(Passes, "end_run", lambda passes: (ran.append(passes), end_run(passes))):
        saved = shown(tmp_path, settings)
        loaded = shown(tmp_path, settings, ckpt_path=tmp_path / "a.ckpt")
    if dist.get_rank():
        assert not saved and not loaded
        return
    buckets = [bucket for unit in ran[-1].units for bucket in unit.buckets]
    nbytes = 4 * sum(f.numel for b in buckets for f in b.layout.fragments(b.comm.shard.index))  # of this rank's shards
    assert saved[0].what == "sharding, in units" and all(seen.over for seen in saved + loaded)
    (write,) = [seen for seen in saved if seen.what == "saving a.ckpt"]
    assert write.in_bytes
    # Step counts of parameters are tensors of a few bytes, which a folder has in files of its own.
    assert 3 * nbytes <= write.total <= 3 * nbytes + 200
    if not background:
        assert write.done == sorted(write.done) and write.done[-1] == write.total
        assert "a.ckpt, to the disk" in [seen.what for seen in saved]
    by_name = {seen.what: seen for seen in loaded}
    weights, states = by_name["loading weights"], by_name["loading optimizer state, in buckets"]
    assert weights.total == weights.done[-1] == nbytes and len(weights.done) > 5
    assert states.total == len(buckets) and states.done[-1] == states.total - 1
    checked = by_name["checksums of a.ckpt"]
    assert 0 < checked.done[-1] <= checked.total
    assert ("reading a.ckpt, in values" in by_name) == (name == "sharded")


@on_ranks(1)
def test_saves_and_loads_show_nothing_without_a_progress_bar(tmp_path: Path) -> None:
    for settings in ({}, {"ckpt_path": tmp_path / "a.ckpt"}):
        assert not shown(tmp_path, {"name": "full", "verify": True}, bar=False, **settings)
