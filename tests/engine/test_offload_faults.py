"""What rests in files is not in memory, transfers overlap the step, and a failing disk is named and does not hang."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.device.streams import Streams
from lightning_zero.engine import Engine
from lightning_zero.engine.units.after_step import StepJob, StepWorker, threads_of_steps
from lightning_zero.engine.units.bucket import AwaitedStep
from lightning_zero.engine.units.master_storage import FileStorage, MasterStorage, Tiers, make_storage, opened
from lightning_zero.engine.units.param_store import FileShard
from lightning_zero.engine.whole import state_dicts
from lightning_zero.planning.placement import Tier
from lightning_zero.ranks import watchdog
from lightning_zero.tiers.aio import DiskError, Syscalls
from lightning_zero.tiers.host import HostTier
from lightning_zero.tiers.nvme import NvmeTier
from lightning_zero.tiers.pages import HOST
from lightning_zero.tiers.pinned import READ_AHEAD, ReadAhead
from tests.engine.sides import Sharded, step_and_clear
from tests.engine.test_offload import compare, late_steps, offload, slow_steps, train
from tests.engine.works import accumulate, floats, mean_square_of, tokens
from tests.harness import assert_gone, on_ranks, run
from tests.models import Clamped, Model, linear
from tests.rows import IN_FILES, PLACES, STATE_IN_FILES

pytestmark = [pytest.mark.sample, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]


def file_storages(engine: Engine) -> list[FileStorage]:
    return [b.storage for b in engine.buckets if isinstance(b.storage, FileStorage)]


def nbytes_in_memory(storage: FileStorage) -> int:
    return sum(t.untyped_storage().nbytes() for t in storage._tensors)


def assert_at_rest(engine: Engine) -> None:
    """Nothing that rests in files, and no gathered parameter, has memory."""
    storages = file_storages(engine)
    assert sum(nbytes_in_memory(storage) for storage in storages) == 0
    for bucket in engine.buckets:
        if isinstance(bucket.param_store, FileShard):
            assert bucket.param_store._staged is None
        if bucket.plan.reshards:
            assert bucket.full.data.untyped_storage().nbytes() == 0


# -- memory -----------------------------------------------------------------------------------------------------------


@on_ranks(2, full=(1,))
@pytest.mark.parametrize(("row", "stage"), PLACES, ids=str)
def test_at_rest_nothing_of_it_is_in_memory(row: str, stage: int, tmp_path: Path) -> None:
    def evaluate() -> None:
        with torch.no_grad():
            side.module(tokens(9))

    def save_and_load() -> None:
        state = state_dicts.optimizer_state(engine, side.optimizer, only_rank_0=False)
        state_dicts.load_optimizer_state(engine, side.optimizer, state)
        assert_at_rest(engine)
        engine.load_state_dict(engine.state_dict(only_rank_0=False))

    with Sharded(Model(), stage=stage, precision="bf16", **offload(row, tmp_path)) as side:
        engine = side.engine
        storages = file_storages(engine)
        sharded = [bucket for bucket in engine.buckets if not bucket.plan.whole]  # norms stay on the device
        assert (len(storages) == len(sharded)) == (row in STATE_IN_FILES)
        assert_at_rest(engine)
        for act in (lambda: train(side, 2), evaluate, save_and_load):
            act()
            engine.passes.wait_for_all()
            assert_at_rest(engine)
        if engine.tiers.nvme is not None:  # no holes
            assert os.path.getsize(next(tmp_path.rglob(f"*{engine.comm.rank}.bin"))) == engine.tiers.nvme.nbytes
        if storages:  # with two of Adam's; on two ranks there are shards of nothing but padding
            assert 3 in (counts := {len(storage._tensors) for storage in storages}) and counts <= {1, 3}
        with lightning_zero.gather(side.module):
            assert sum(nbytes_in_memory(storage) for storage in storages) == 0
        assert_at_rest(engine)


# -- order ------------------------------------------------------------------------------------------------------------


@on_ranks(2, full=(1,))
@pytest.mark.parametrize(("row", "stage"), PLACES, ids=str)
def test_a_unit_waits_for_its_own_step_only(row: str, stage: int, tmp_path: Path) -> None:
    """The first block has run while the last one is still to be stepped."""
    ran: list[str] = []

    def wait(job: StepJob) -> None:
        deadline = time.monotonic() + 20
        while job.bucket.label.startswith("blocks.4") and "blocks.0" not in ran:
            assert time.monotonic() < deadline, "the forward waits for steps that it does not need"
            time.sleep(0.001)

    with Sharded(Model(depth=5), stage=stage, **offload(row, tmp_path)) as side:
        train(side, 2)
        side.engine.passes.wait_for_all()
        side.module.blocks[0].register_forward_hook(lambda *_: ran.append("blocks.0"))
        mean_square_of(side, tokens(3))
        ran.clear()
        with late_steps(wait):
            step_and_clear(side)
        mean_square_of(side, tokens(4))


@contextlib.contextmanager
def shard_in_file(
    folder: Path, rests: Tier, pwritev: Callable[[FileShard, int], None] = lambda *_: None
) -> Iterator[tuple[FileShard, MasterStorage]]:
    """A shard of 2000 zeros in a file, whose masters rest elsewhere; ``pwritev`` is called before it is written to."""
    shards: list[FileShard] = []

    def write(fd: int, pieces: list[memoryview], offset: int) -> int:
        if shards and 0 <= offset - shards[0]._extent.offset < shards[0]._extent.nbytes:
            pwritev(shards[0], offset)
        return os.pwritev(fd, pieces, offset)

    tier, host = NvmeTier(folder, rank=0, syscalls=Syscalls(pwritev=write)), HostTier()
    read_ahead, streams = ReadAhead(HOST, 8000), Streams(HOST)
    try:
        tiers = Tiers(host, tier, read_ahead=read_ahead)
        storage = make_storage(rests, tiers, "unit", torch.zeros(2000), torch.float32)
        shards.append(FileShard(tiers, storage, streams, "unit", torch.zeros(2000)))
        yield shards[0], storage
        assert len(read_ahead._free) == READ_AHEAD
        shards[0].free()
        storage.free()
    finally:
        tier.close()
        host.close()
        read_ahead.close()


@on_ranks(1)
def test_parameters_read_ahead_are_read_again_after_a_write(tmp_path: Path) -> None:
    with shard_in_file(tmp_path, Tier.device) as (file, _):
        out = torch.empty(2000)
        file.stage_ahead()
        file.update(torch.ones(2000))
        file.read(out)
        assert out.eq(1).all()
        assert file._staged is None


@on_ranks(1)
@pytest.mark.parametrize("rests", list(Tier))
def test_a_step_goes_on_while_parameters_are_written_and_the_next_one_waits(rests: Tier, tmp_path: Path) -> None:
    may_write, changes, changed = threading.Event(), threading.Event(), threading.Event()

    def step(value: float) -> None:
        storage.open(to_write=True)
        changes.set()
        storage.master.fill_(value)
        file.update(storage.master)
        storage.close(changed=True)
        storage.wait_for_rest()
        changed.set()

    with shard_in_file(tmp_path, rests, lambda *_: assert_set(may_write)) as (file, storage):
        storage.open(to_write=True)
        storage.master.fill_(1)
        file.update(storage.master)
        storage.close(changed=True)  # nothing has been written yet
        thread = threading.Thread(target=step, args=(2,))
        thread.start()
        assert not changes.wait(0.3), "what is being written was changed"
        out = torch.empty(2000)
        may_write.set()
        thread.join(20)
        assert changed.is_set()
        file.read(out)
        assert out.eq(2).all()


@on_ranks(1)
def test_masters_in_files_stay_in_memory_until_they_are_written_as_parameters(tmp_path: Path) -> None:
    """They have not changed, so the storage has nothing to write itself: averages are transferred so, and whole
    copies."""
    may_copy, rests, start = threading.Event(), threading.Event(), NvmeTier._start

    def late(tier: NvmeTier, job: Any, piece: range) -> None:
        assert_set(may_copy)
        start(tier, job, piece)

    def close() -> None:
        storage.close(changed=False)
        rests.set()

    with shard_in_file(tmp_path, Tier.nvme) as (file, storage):
        with opened(storage, changed=True) as master:
            master.fill_(1)
        storage.open()
        with mock.patch.object(NvmeTier, "_start", late):
            file.update(storage.master)
            thread = threading.Thread(target=close)
            thread.start()
            assert not rests.wait(0.3), "what is being written has no memory"
            may_copy.set()
            thread.join(20)
        assert rests.is_set()
        out = torch.empty(2000)
        file.read(out)
        assert out.eq(1).all()


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


@on_ranks(1)
def test_a_write_behind_that_fails_is_told_by_the_next_read(tmp_path: Path) -> None:
    with shard_in_file(tmp_path, Tier.nvme, _broken) as (file, storage):
        for _ in range(2):  # the write after it says nothing of it either
            with opened(storage, changed=True):
                file.update(storage.master)
        for hears in (lambda: file.read(torch.empty(2000)), file.wait_for_rest):
            with pytest.raises(DiskError, match=r"writing .* failed for 'unit \(parameters\)'"):
                hears()
        file._drop()


@on_ranks(1)
def test_parameters_that_could_not_be_written_after_the_last_step_are_told(tmp_path: Path) -> None:
    failed: Future[None] = Future()
    failed.set_exception(DiskError(errno.EIO, "writing failed"))
    side = Sharded(Model(), stage=3, **offload("nvme", tmp_path))
    train(side, 1)
    mean_square_of(side, tokens(3))
    with mock.patch.object(NvmeTier, "write_behind", return_value=failed):
        side.step()
        with pytest.raises(DiskError, match="writing failed"):
            side.engine.passes.wait_for_all()
    close_all(side.engine)


# -- a disk that fails ------------------------------------------------------------------------------------------------


def close_all(engine: Engine) -> None:
    engine.passes.after_step.close()
    engine.tiers.close()
    engine.comm.waits.close()


def failing(call: Callable[..., int], code: int, when: Callable[[], bool]) -> Callable[..., int]:
    def moved(*args: Any) -> int:
        if when():
            raise OSError(code, os.strerror(code))
        return call(*args)

    return moved


ERRORS = {"read": "reading", "write": "writing", "cut": "the file ends here"}


@on_ranks(1)
@pytest.mark.parametrize(
    ("row", "stage", "kind"),
    [(*place, kind) for place in PLACES if place[0] in IN_FILES for kind in ("read", "write")]
    + [(*place, "cut") for place in PLACES if place[0] in STATE_IN_FILES],
)
def test_an_error_of_the_disk(row: str, stage: int, kind: str, tmp_path: Path) -> None:
    engine = meets_an_error(row, stage, kind, tmp_path)
    train(Sharded(Model(), stage=0), 2)  # whose waits call what the failed engine has left to do
    assert_gone([engine])


def meets_an_error(row: str, stage: int, kind: str, tmp_path: Path) -> weakref.ref[Engine]:
    broken = False
    side = Sharded(Model(), stage=stage, **offload(row, tmp_path))
    engine = side.engine
    calls = engine.tiers.nvme._file.syscalls
    if kind == "read":
        calls.preadv = failing(calls.preadv, errno.EIO, lambda: broken)
    elif kind == "write":
        calls.pwritev = failing(calls.pwritev, errno.ENOSPC, lambda: broken)
    train(side, 2)
    engine.passes.wait_for_all()
    if not (row == "optimizer_cpu_param_nvme" and kind == "read"):
        accumulate(side, 2, 1)
    broken = True
    if kind == "cut":
        os.truncate(next(tmp_path.rglob("*.bin")), 4096)
    with pytest.raises(DiskError) as caught:
        side.step()  # the worker finds it, perhaps before this has returned
        accumulate(side, 3, 1)
    assert all(word in str(caught.value) for word in (str(tmp_path), ".bin", "byte offset", "#0", ERRORS[kind]))
    engine.passes.abort()
    broken = False
    if kind != "read" or "optimizer_nvme" in row:  # what was lost stays lost
        forwards = [lambda: accumulate(side, 3, 1)] * 10  # more often than there are units
        saves = lambda: state_dicts.optimizer_state(engine, side.optimizer)  # noqa: E731
        for look in (*forwards, engine.state_dict, engine.passes.wait_for_all, saves):
            with pytest.raises(DiskError):
                look()
            engine.passes.abort()
    close_all(engine)
    return weakref.ref(engine)


@on_ranks(1)
def test_a_failed_step_is_not_raised_in_the_waits_of_others() -> None:
    side = Sharded(Model(), stage=1)
    unit, error = side.engine.units[0], RuntimeError("a step has failed")
    unit.buckets[0].awaited_step.announce(None).set_exception(error)
    side.engine.passes.after_step._pending_syncs.append((unit, unit.buckets[:1]))
    assert not side.engine.passes.after_step.go_on()
    assert error.__traceback__ is None


def test_cores_are_left_beside_the_step() -> None:
    assert [threads_of_steps(cores, beside_device=False) for cores in (1, 2, 3, 16)] == [1, 2, 2, 15]
    assert [threads_of_steps(cores, beside_device=True) for cores in (1, 2, 3, 6, 7, 16)] == [1, 2, 2, 5, 4, 13]


class _OfBucket:
    """What the worker asks of a bucket."""

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        self.awaited_step = AwaitedStep()
        self.storage = mock.Mock(wait_for_rest=settle)
        self.copy_master_to_params = lambda **_: None

    def job(self, run: Callable[[], None] = lambda: None) -> StepJob:
        return StepJob(self, run)  # type: ignore[arg-type]


def _broken(*_: object) -> None:
    raise OSError(errno.EIO, "the disk")


class _Unbound(Accelerator):
    def bind_thread(self) -> None:
        _broken()


@pytest.mark.parametrize("where", ["step", "last write", "start of the thread", "no thread"])
def test_whoever_waits_for_the_worker_gets_its_error(where: str) -> None:
    """Also those who come later. Nobody waits for ever."""
    kind = _Unbound if where == "start of the thread" else Accelerator
    worker = StepWorker(1, kind(torch.device("cpu")))
    worker.submit([], None)  # which is no end of it
    stepped, later = _OfBucket(_broken if where == "last write" else lambda: None), _OfBucket()
    if where == "no thread":
        worker._pool.submit = mock.Mock(side_effect=OSError(errno.EIO, "the disk"))  # type: ignore[method-assign]
    worker.submit([stepped.job(_broken if where == "step" else lambda: None)], None)
    if where == "last write":
        stepped.awaited_step.future.result(5)  # type: ignore[union-attr]  # the step itself went well
        with pytest.raises(OSError, match="the disk"):
            worker._last.result(5)  # type: ignore[union-attr]
    for _ in range(2):
        worker.submit([later.job()], None)
        with pytest.raises(OSError, match="the disk"):
            later.awaited_step.future.result(5)  # type: ignore[union-attr]
        with pytest.raises(OSError, match="the disk"):
            worker.wait()
    worker.close()


def _fail_on_one_rank(folder: Path) -> None:
    watchdog.EVERY_S = 0.05
    side = Sharded(Model(), stall_timeout_s=2.0, **offload("nvme", folder))
    train(side, 2)
    side.engine.passes.wait_for_all()
    accumulate(side, 2, 1)
    if dist.get_rank() == 0:
        os.truncate(next(folder.rglob("rank00000.bin")), 4096)
    side.step()
    with pytest.raises((DiskError, RuntimeError)) as caught:
        for step in range(3, 5):
            accumulate(side, step, 1)
    # The pool has lost messages of a group: it ends here.
    raise RuntimeError(f"{type(caught.value).__name__}: {caught.value}")


def test_the_other_rank_does_not_hang(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        run(2, _fail_on_one_rank, tmp_path, timeout=40)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "DiskError" in text and "the file ends here" in text and "on rank" in text


@on_ranks(1)
def test_files_of_a_forgotten_model_go_with_it(tmp_path: Path) -> None:
    for _ in range(3):
        with slow_steps():
            side = Sharded(Model(), **offload("nvme", tmp_path))
            train(side, 2)
        del side
        deadline = time.monotonic() + 10
        while list(tmp_path.rglob("rank*")):  # as soon as its last step is over
            assert time.monotonic() < deadline
            gc.collect()
            time.sleep(0.01)


@on_ranks(2)
@pytest.mark.parametrize("row", ["cpu", "nvme"])
def test_how_far_a_worker_has_got_decides_no_gather(row: str, tmp_path: Path) -> None:
    """One rank's steps are slow. When both raise in the same place, they have issued the same gathers."""
    with Sharded(Model(depth=4), stage=3, **offload(row, tmp_path)) as side:
        train(side, 2)
        module, comm = side.module, side.engine.comm
        for fails_in in range(4):
            with slow_steps(0.03 if dist.get_rank() else 0.0):
                train(side, 1)
                hook = module.blocks[fails_in].register_forward_hook(lambda *_: 1 / 0)
                with hook, pytest.raises(ZeroDivisionError):
                    module(tokens(9))
                side.engine.passes.abort()
            gathers = [label for kind, label in comm.counts.elements() if kind == "all_gather"]
            issued = comm.all_gather_objects(gathers, "a test")
            assert issued[0] == issued[1], f"block {fails_in}"
        side.engine.passes.wait_for_all()
        train(side, 1)


# -- two threads ------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["clamp", "assign"])
def test_a_write_comes_while_the_worker_brings_the_stepped_masters_to_rest(
    stage: int, how: str, tmp_path: Path
) -> None:
    """The step of a bucket is over before its masters are in their file again."""

    def slow(*args: Any) -> int:
        time.sleep(0.02)
        return os.pwritev(*args)

    def build() -> nn.Module:
        clamps = how == "clamp"
        return nn.Sequential(*(Clamped("in place", 64) if clamps else nn.Sequential(linear(64)) for _ in range(4)))

    def body(side: Sharded) -> list[Tensor]:
        if side.engine.tiers.nvme is not None:
            side.engine.tiers.nvme._file.syscalls.pwritev = slow
        for step in range(4):
            if how == "assign" and step:
                for param in side.module.parameters():
                    param.data = torch.full(param.shape, 0.01 * step)
            mean_square_of(side, floats(step, 4, 64))
            step_and_clear(side)
        return []

    unit = {"classes": ["Clamped" if how == "clamp" else "Sequential"]}
    compare("optimizer_nvme", stage, tmp_path, body, build, unit=unit)
