"""Tiers: values rest to the bit on each, bytes are accounted, what cannot work is refused with the key to change."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zero.device import accelerator_of
from lightning_zero.settings import MIB, ConfigError
from lightning_zero.tiers import claims
from lightning_zero.tiers.aio import DiskError, Syscalls
from lightning_zero.tiers.extents import Extent, Wanted
from lightning_zero.tiers.host import HostTier
from lightning_zero.tiers.limits import available_host_memory
from lightning_zero.tiers.nvme import NvmeTier, Regions
from lightning_zero.tiers.pages import PAGE

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")

FEW = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64]
NAMES = ["host", "nvme"]


def noise(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, NaNs with payloads included (booleans: 0 and 1)."""
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def unaligned(value: Tensor) -> Tensor:
    """The same values in memory that is never page-aligned: what is so by chance would pass by the ring."""
    return value.new_empty(value.numel() + 1)[1:].copy_(value.view(-1))


def put(tier: NvmeTier, extent: Extent, value: Tensor) -> None:
    tier.stage_out(extent, unaligned(value)).result()


def get(tier: NvmeTier, extent: Extent) -> Tensor:
    out = unaligned(noise(extent.numel, extent.dtype, 99))
    tier.stage_in(extent, out).result()
    return out


@contextmanager
def nvme(path: Path, *wanted: Wanted, **kwargs: Any) -> Iterator[tuple[NvmeTier, list[Extent]]]:
    with closing(NvmeTier(path, **{"rank": 0, "ring_count": 2, "ring_nbytes": 2 * PAGE, **kwargs})) as tier:
        yield tier, tier.reserve(wanted)


def late(seconds: Callable[[], float], call: Callable[..., int]) -> Callable[..., int]:
    """``call`` after a pause."""

    def paused(*args: Any) -> int:
        time.sleep(seconds())
        return call(*args)

    return paused


def refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), caught.value


# -- all tiers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(data=st.data())
def test_values_come_back_to_the_bit(name: str, tmp_path: Path, data: st.DataObject) -> None:
    sizes = st.tuples(st.integers(0, 9000), st.sampled_from(DTYPES))
    batches = data.draw(st.lists(st.lists(sizes, max_size=4), min_size=1, max_size=3))
    ring_count, pages = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    in_files = partial(NvmeTier, tmp_path, rank=0, ring_count=ring_count, ring_nbytes=PAGE * pages)
    with closing(HostTier() if name == "host" else in_files()) as tier:
        wanted = [[Wanted(f"e{i}", *size) for i, size in enumerate(batch)] for batch in batches]
        extents = [extent for batch in wanted for extent in tier.reserve(batch)]
        assert [(e.numel, e.dtype) for e in extents] == [size for batch in batches for size in batch]
        values = [noise(e.numel, e.dtype, seed) for seed, e in enumerate(extents)]
        outs = [noise(e.numel, e.dtype, 99) for e in extents]
        if isinstance(tier, HostTier):
            outs = [tier.resident(e).copy_(value) for e, value in zip(extents, values, strict=True)]
        else:
            for stage, tensors in ((tier.stage_out, values), (tier.stage_in, outs)):
                for future in [stage(e, tensor) for e, tensor in zip(extents, tensors, strict=True)]:
                    future.result()
        assert all(same_bits(out, value) for out, value in zip(outs, values, strict=True))
        tier.free(extents)
        assert tier.nbytes == 0
    assert list(tmp_path.iterdir()) == []


# -- host -------------------------------------------------------------------------------------------------------------


def test_extents_reserved_under_inference_mode_can_train() -> None:
    with closing(HostTier()) as tier, torch.inference_mode():
        (extent,) = tier.reserve([Wanted("w", 8, torch.float32)])
        assert not tier.resident(extent).is_inference()


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_slab_takes_its_bytes_at_once_and_frees_them_with_its_last_extent() -> None:
    start, tier = rss(), HostTier()
    sizes = {"a": (8 * MIB, torch.float32), "b": (16 * MIB - 3, torch.bfloat16), "c": (3, torch.bool)}
    wanted = [Wanted(name, *size) for name, size in sizes.items()]
    extents = tier.reserve(wanted)
    assert tier.nbytes == 64 * MIB + 64  # each at a multiple of 64 bytes, and no power of two on top
    assert all(tier.resident(e).data_ptr() % 64 == 0 for e in extents)
    assert rss() - start == pytest.approx(tier.nbytes, rel=0.1)  # taken now, not when it is first used
    pages = tier._held[extents[0]][0].pages
    tier.free(extents[:2])
    assert tier.nbytes == 64 * MIB + 64
    tier.free(extents[2:])
    assert pages.bytes.numel() == 0  # closed, which unpins them on a GPU's host
    assert tier.nbytes == 0 and rss() - start < 0.1 * 64 * MIB
    tier.reserve(wanted)
    tier.close()
    tier.close()
    assert tier.nbytes == 0 and rss() - start < 0.1 * 64 * MIB


def test_a_host_budget_that_is_too_small_is_refused_with_the_bytes() -> None:
    tier = HostTier(budget=1000)
    extents = tier.reserve([Wanted("a", 100, torch.float32)])
    assert tier.nbytes == 448
    refused(lambda: tier.reserve([Wanted("b", 200, torch.float32)]), "832", "552 of 1000", "zero.offload.host_budget")
    assert tier.nbytes == 448
    tier.free(extents)
    tier.reserve([Wanted("b", 200, torch.float32)])
    tier.close()


def test_memory_that_is_not_there_is_refused_before_it_is_taken() -> None:
    tier = HostTier(available=lambda: 640)
    refused(
        lambda: tier.reserve([Wanted("a", 161, torch.float32)]),
        "expected 704 more bytes", "640 are available", "zero.offload:", "zero.offload.host_budget",
    )  # fmt: skip
    tier.free(tier.reserve([Wanted("a", 160, torch.float32)]))
    grows = HostTier(budget=704, available=lambda: 640)  # a machine that gets more memory as it is used
    grows.free(grows.reserve([Wanted("a", 161, torch.float32)]))
    refused(lambda: HostTier().reserve([Wanted("a", 1 << 50, torch.float32)]), "are available", str(1 << 52))
    refused(lambda: HostTier(available=lambda: 1 << 62).reserve([Wanted("a", 1 << 50, torch.float32)]), "refused it")


def cgroup(kind: int, limit: object, usage: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kind == 1 else ("memory.max", "memory.current")
    prefix = "total_" if kind == 1 else ""
    stat = f"anon 7\nfile 9999999\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}\n"
    return {names[0]: f"{limit}\n", names[1]: f"{usage}\n", "memory.stat": stat}


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
V2_PARENT = under(f"{V2}/job", cgroup(2, 80_000, 70_000))  # one above has less left
V1_SELF = "11:cpu,cpuacct:/x\n4:hugetlb,memory:/job/a\n0::/\n"


@pytest.mark.parametrize(("files", "expected"), [
    ({}, 1_024_000),  # no cgroup: the machine's
    ({"proc/self/cgroup": "0::/job\n", **under(f"{V2}/job", cgroup(2, 90_000, 60_000, 700, 5000))}, 35_700),
    ({"proc/self/cgroup": "0::/job\n", **under(f"{V2}/job", cgroup(2, "max", 60_000))}, 1_024_000),
    ({"proc/self/cgroup": "0::/job/a\n", **V2_PARENT, **under(f"{V2}/job/a", cgroup(2, 90_000, 60_000))}, 10_000),
    # in a container the path is the host's, the mount our own
    ({"proc/self/cgroup": "0::/docker/0ab1\n", **under(V2, cgroup(2, 90_000, 50_000))}, 40_000),
    ({"proc/self/cgroup": V1_SELF, **under(f"{V1}/job/a", cgroup(1, 90_000, 60_000, 500, 20))}, 30_520),
    ({"proc/self/cgroup": V1_SELF, **under(V1, cgroup(1, 90_000, 55_000))}, 35_000),
    ({"proc/self/cgroup": V1_SELF, **under(f"{V1}/job/a", cgroup(1, 9223372036854771712, 60_000))}, 1_024_000),
    ({"proc/self/cgroup": "0::/job\n", **under(f"{V2}/job", cgroup(2, 90_000, 95_000))}, 0),
])  # fmt: skip
def test_available_memory_is_the_cgroups(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in {"proc/meminfo": "MemTotal: 5000 kB\nMemAvailable: 1000 kB\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_host_memory(tmp_path) == expected


# -- nvme -------------------------------------------------------------------------------------------------------------


def test_one_preallocated_file_of_whole_pages_and_no_more_than_the_ring(tmp_path: Path) -> None:
    lent: list[int] = []

    def pause() -> float:
        lent.append(len(tier.ring._lent))
        return 0.002

    wanted = [Wanted("a", 5000, torch.float32), Wanted("b", 1, torch.bfloat16)]
    calls = Syscalls(preadv=late(pause, os.preadv))
    with nvme(tmp_path, *wanted, rank=3, syscalls=calls) as (tier, extents):
        assert tier.nbytes == 5 * PAGE + PAGE and tier.ring.nbytes == 4 * PAGE
        (file,) = tmp_path.rglob("*.bin")
        assert file.name == "rank00003.bin" and file.stat().st_size == 6 * PAGE
        assert file.stat().st_blocks * 512 >= 6 * PAGE
        put(tier, extents[0], noise(5000, torch.float32, 1))
        outs = [noise(5000, torch.float32, 0) for _ in range(4)]
        for future in [tier.stage_in(extents[0], out) for out in outs]:
            future.result()
        assert max(lent) == 2 and not tier.ring._lent


@pytest.mark.parametrize("seed", range(5))
def test_operations_on_an_extent_keep_their_order_under_random_delays(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    def pause() -> float:
        return rng.random() * 0.004

    calls = Syscalls(preadv=late(pause, os.preadv), pwritev=late(pause, os.pwritev))
    wanted = [Wanted(f"e{i}", 3000, torch.float32) for i in range(4)]
    with nvme(tmp_path, *wanted, syscalls=calls) as (tier, extents):
        seen: list[tuple[Tensor, float]] = []
        futures: list[Future[Any]] = []
        for step in range(24):
            extent, value = rng.choice(extents), float(step)
            out = torch.empty(3000)
            futures += [tier.stage_out(extent, torch.full((3000,), value)), tier.stage_in(extent, out)]
            seen.append((out, value))
        for future in futures:
            future.result(timeout=10)
        assert [(out.min().item(), out.max().item()) for out, _ in seen] == [(v, v) for _, v in seen]


def test_freed_places_are_used_again_and_free_waits(tmp_path: Path) -> None:
    calls = Syscalls(pwritev=late(lambda: 0.05, os.pwritev))
    with nvme(tmp_path, Wanted("a", 3000, torch.float32), syscalls=calls) as (tier, extents):
        for _ in range(3):
            future = tier.stage_out(extents[0], torch.ones(3000))
            tier.free(extents)
            assert future.done() and tier.nbytes == 0
            extents = tier.reserve([Wanted("b", 3000, torch.float32)])
        assert tier.nbytes == next(tmp_path.rglob("*.bin")).stat().st_size == 3 * PAGE


def test_an_nvme_budget_and_a_full_disk_are_refused_before_training(tmp_path: Path) -> None:
    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        os.posix_fallocate(fd, offset, nbytes // 2)  # as file systems do: some of it is there
        raise OSError(errno.ENOSPC, "no space")

    big = [Wanted("b", 4096, torch.float32)]
    with nvme(tmp_path, Wanted("a", 1024, torch.float32), budget=4 * PAGE) as (tier, (extent,)):
        refused(lambda: tier.reserve(big), f"{4 * PAGE} more", f"{3 * PAGE} of {4 * PAGE}", "zero.offload.nvme_budget")
    with nvme(tmp_path, Wanted("a", 1024, torch.float32)) as (tier, (extent,)):
        tier._file.syscalls.fallocate = fallocate
        free = f"needed {4 * PAGE} more bytes"
        refused(lambda: tier.reserve(big), "zero.offload.nvme_path", str(tmp_path), free, "are free", "nvme_budget")
        assert tier.nbytes == os.stat(tier._file.path).st_size == PAGE
        put(tier, extent, torch.ones(1024))  # what was there before still works
        assert get(tier, extent).tolist() == [1] * 1024


def test_paths_that_cannot_work_are_refused(tmp_path: Path) -> None:
    read_only = mock.Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))

    def read_only_data(path: str, flags: int, mode: int) -> int:
        return os.open(path, flags, mode) if path.endswith(".lock") else read_only(path, flags, mode)

    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    key = "zero.offload.nvme_path: expected"
    refused(lambda: NvmeTier(tmp_path / "no", rank=0), key, f"{tmp_path}/no", "does not exist", "NVME_PATH")
    refused(lambda: NvmeTier(tmp_path / "file", rank=0), key, f"{tmp_path}/file", "not a folder")
    for calls in (Syscalls(open=read_only), Syscalls(open=read_only_data)):
        make_tier = partial(NvmeTier, folder, rank=0, syscalls=calls)
        refused(make_tier, key, str(folder), "Read-only file system")
    (folder / "lightning_zero").write_text("mine")
    refused(lambda: NvmeTier(folder, rank=0), key, "nothing can be written or locked (File exists)")
    assert (tmp_path / "file").read_text() == (folder / "lightning_zero").read_text() == "mine"


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    """What it leads to would be emptied."""
    mine, folder = tmp_path / "mine", tmp_path / "lightning_zero"
    mine.write_text("mine")
    folder.mkdir()
    for link, why in ((os.symlink, "Too many levels of symbolic links"), (os.link, "rank00000.lock has other names")):
        link(mine, folder / "rank00000.lock")
        refused(lambda: NvmeTier(tmp_path, rank=0), "zero.offload.nvme_path", why)
        (folder / "rank00000.lock").unlink()
    (folder / "rank00000.bin").symlink_to(mine)
    with nvme(tmp_path):
        assert not (folder / "rank00000.bin").is_symlink()
    assert mine.read_text() == "mine"
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    refused(lambda: NvmeTier(tmp_path, rank=0), "zero.offload.nvme_path", "nothing can be written or locked (Not a dir")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_of_files_is_for_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lightning_zero"
    folder.mkdir(0o777)
    with nvme(tmp_path):
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    refused(lambda: NvmeTier(tmp_path, rank=0), f"lightning_zero is of user {os.getuid()}, and this is user 12345")


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_is_not_forgotten_until_it_is_made_good(tmp_path: Path) -> None:
    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= PAGE < offset + len(buffers[0]):
            raise OSError(errno.EIO, "broken")
        return os.pwritev(fd, buffers, offset)

    calls = Syscalls(pwritev=broken, sleep=lambda _: None)
    with nvme(tmp_path, Wanted("layers.0/master", 5120, torch.float32), syscalls=calls) as (tier, (extent,)):
        written = tier.stage_out(extent, unaligned(torch.ones(5120)))
        read = tier.stage_in(extent, torch.empty(5120))  # asked for before the write has failed
        for wait in (written.result, read.result, lambda: get(tier, extent)):
            with pytest.raises(DiskError, match=r"writing .*'layers.0/master'"):
                wait()
        assert not tier.ring._lent
        calls.pwritev = os.pwritev
        put(tier, extent, torch.ones(5120))
        assert get(tier, extent).tolist() == [1] * 5120


def test_close_waits_and_leaves_no_file_thread_or_descriptor(tmp_path: Path) -> None:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    (tmp_path / "users.txt").write_text("mine")
    tier = NvmeTier(
        tmp_path, rank=0, ring_count=1, ring_nbytes=PAGE, syscalls=Syscalls(pwritev=late(lambda: 0.03, os.pwritev))
    )
    (extent,) = tier.reserve([Wanted("a", 4096, torch.float32)])
    future = tier.stage_out(extent, unaligned(torch.ones(4096)))
    tier.close()
    assert future.done() and future.exception() is None
    assert set(threading.enumerate()) <= threads and len(os.listdir("/proc/self/fd")) == descriptors
    assert [p.name for p in tmp_path.iterdir()] == ["users.txt"]
    tier.close()
    with pytest.raises((RuntimeError, KeyError)):
        tier.stage_out(extent, torch.ones(4096))


# -- other jobs -------------------------------------------------------------------------------------------------------


@contextmanager
def forked(body: Callable[[], object]) -> Iterator[int]:
    """A child that runs ``body``, says when it is done, and waits to be killed. Gives its process id."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            held = body()  # kept alive
            os.write(writable, b"ok")
            signal.pause()
            del held
        finally:
            os._exit(1)
    os.close(writable)
    try:
        assert os.read(readable, 2) == b"ok", "the child failed"
        yield pid
    finally:
        os.close(readable)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def write_for_ever(path: Path, rank: int) -> object:
    """A rank in the middle of a write."""
    started = threading.Event()

    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset:
            started.set()
            time.sleep(60)
        return os.pwritev(fd, buffers, offset)

    tier = NvmeTier(path, rank=rank, ring_nbytes=PAGE, syscalls=Syscalls(pwritev=pwritev))
    (extent,) = tier.reserve([Wanted("a", 4096, torch.float32)])
    future = tier.stage_out(extent, unaligned(torch.ones(4096)))
    started.wait(10)
    return tier, future


def test_a_live_job_is_refused_by_pid_and_a_dead_ones_files_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CLAIM_WAIT_S", 0.1)
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "lightning_zero"
    with forked(lambda: (write_for_ever(tmp_path, 0), write_for_ever(tmp_path, 1))) as pid:
        assert sorted(p.name for p in folder.glob("*.bin")) == ["rank00000.bin", "rank00001.bin"]
        refused(lambda: NvmeTier(tmp_path, rank=0), "zero.offload.nvme_path", "another job", f"pid {pid} on")
        with nvme(tmp_path, rank=2):  # a peer
            assert len(list(folder.glob("*.bin"))) == 3
    assert not caplog.records
    (folder / "notes.bin").write_text("not ours")
    with nvme(tmp_path, Wanted("a", 1024, torch.float32), rank=0) as (tier, (extent,)):
        assert sorted(p.name for p in folder.glob("*.bin")) == ["notes.bin", "rank00000.bin"]
        assert len(caplog.records) == 1
        assert f"removed 2 file(s), {8 * PAGE} bytes" in caplog.text and str(folder) in caplog.text
        put(tier, extent, torch.ones(1024))
        assert get(tier, extent).tolist() == [1] * 1024
    assert [p.name for p in folder.iterdir()] == ["notes.bin"]


def test_a_worker_that_outlives_its_trainer_does_not_hold_the_path(tmp_path: Path) -> None:
    def trainer() -> object:
        tier = NvmeTier(tmp_path, rank=0)
        worker = os.fork()
        if worker == 0:
            time.sleep(30)
            os._exit(0)
        (tmp_path / "worker").write_text(str(worker))
        return tier

    try:
        with forked(trainer):
            pass
        with nvme(tmp_path):
            pass
    finally:
        os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


def test_a_second_tier_of_this_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "CLAIM_WAIT_S", 0.1)
    with nvme(tmp_path):
        refused(lambda: NvmeTier(tmp_path, rank=0), "this process", f"pid {os.getpid()}", "close")
    with nvme(tmp_path), nvme(tmp_path, instance=1):  # of another model
        assert {file.name for file in tmp_path.rglob("*.bin")} == {"rank00000.bin", "rank00000.1.bin"}
        refused(lambda: NvmeTier(tmp_path, rank=0, instance=1), "this process")


def test_a_lock_on_a_file_that_was_just_removed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "CLAIM_WAIT_S", 0.1)
    opened: list[str] = []

    def open_(path: str, flags: int, mode: int) -> int:
        fd = os.open(path, flags, mode)
        if not opened:
            os.unlink(path)  # its last holder ends now
        opened.append(path)
        return fd

    with nvme(tmp_path, syscalls=Syscalls(open=open_)):
        refused(lambda: NvmeTier(tmp_path, rank=0), "this process")


def test_ranks_that_start_and_end_together_do_not_disturb_each_other(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        for _ in range(5):
            with nvme(tmp_path, Wanted("a", 1024, torch.float32), rank=number) as (tier, (extent,)):
                put(tier, extent, torch.full((1024,), float(number)))
                assert get(tier, extent).tolist() == [number] * 1024

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(rank, range(6)))
    assert list(tmp_path.iterdir()) == []


# -- a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_host_memory_is_pinned_for_a_gpu() -> None:
    with closing(HostTier(accelerator_of(torch.device("cuda", 0)))) as tier:
        (extent,) = tier.reserve([Wanted("e", 3 * MIB // 4, torch.float32)])
        assert tier.resident(extent).is_pinned()


# -- regions of a file ------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=40))
def test_regions_do_not_overlap_and_holes_are_whole(steps: list[tuple[int, int]]) -> None:
    regions, taken, length = Regions(), list[tuple[int, int]](), 0

    def ensure(nbytes: int) -> None:
        nonlocal length
        length = max(length, nbytes)

    for nbytes, choice in steps:
        if nbytes:
            holes = [high - low for low, high in regions.holes]
            before = regions.end
            low = regions.reserve(nbytes, ensure)
            assert (regions.end == before) == (max(holes, default=0) >= nbytes)
            taken.append((low, low + nbytes))
        elif taken:
            regions.give_back(*taken.pop(choice % len(taken)))
        everything = sorted([*taken, *regions.holes])
        assert everything == sorted({*taken, *regions.holes})
        ends = [0, *(high for _, high in everything)]
        assert ends[:-1] == [low for low, _ in everything] and ends[-1] == regions.end <= length
        touching = zip(regions.holes, regions.holes[1:], strict=False)
        assert all(first[1] < second[0] for first, second in touching)
        assert all(high < regions.end for _, high in regions.holes)
    for region in taken:
        regions.give_back(*region)
    assert regions.end == 0 and not regions.holes
