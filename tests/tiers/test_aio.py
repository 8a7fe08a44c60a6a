"""Disk files, page-aligned memory and the staging ring: bits come back, faults are named, nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lightning_zero.device import accelerator_of
from lightning_zero.settings import MIB, ConfigError
from lightning_zero.tiers import aio
from lightning_zero.tiers.aio import RETRY_PAUSES_S, DiskError, DiskFile, Syscalls
from lightning_zero.tiers.pages import PAGE, HostPages, StagingRing, byte_view

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")


def memory_of(nbytes: int, seed: int = 0) -> memoryview:
    """Page-aligned memory full of noise; nothing else may know it, so it lives as long as its view."""
    pages = HostPages(nbytes)
    pages.bytes.copy_(torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed)))
    return byte_view(pages.bytes)


@contextmanager
def disk_file(path: Path, nbytes: int = 0, **kwargs: Any) -> Iterator[DiskFile]:
    file = DiskFile(path / "data", **kwargs)
    try:
        file.grow(nbytes)
        yield file
    finally:
        file.close()


def write_and_read(file: DiskFile) -> bool:
    """Whether noise of the file's size comes back."""
    data, out = memory_of(file.nbytes, 1), memory_of(file.nbytes, 2)
    file.write(0, data, "w").result(timeout=20)
    file.read(0, out, "r").result(timeout=20)
    return out == data


def descriptors() -> set[Path]:
    return {path.readlink() for path in Path("/proc/self/fd").iterdir() if path.exists()}


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_short_reads_and_writes_are_continued(tmp_path: Path, threads: int) -> None:
    called: list[str] = []
    own = threading.local()  # a thread's calls: it must not be cut short often enough in a row to give up

    def short(name: str) -> Callable[[int, list[memoryview], int], int]:
        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            called.append(name)
            own.calls = n = getattr(own, "calls", 0) + 1
            moved: int = getattr(os, name)(fd, [buffers[0][: max(PAGE, len(buffers[0]) // 2 // PAGE * PAGE)]], offset)
            return moved if n % 3 else min(moved, moved - PAGE + 100)  # not even whole pages, now and then

        return call

    calls = Syscalls(preadv=short("preadv"), pwritev=short("pwritev"), sleep=lambda _: None)
    with disk_file(tmp_path, 4 * MIB, threads=threads, syscalls=calls) as file:
        assert write_and_read(file)
    assert called.count("preadv") > 8 and called.count("pwritev") > 8


def failing(code: int, times: int, name: str = "preadv", at: int = 0) -> tuple[Callable[..., int], list[int]]:
    """A call that fails ``times`` times when it covers byte ``at``, and the offsets at which it did."""
    failed: list[int] = []

    def call(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= at < offset + len(buffers[0]) and len(failed) < times:
            failed.append(offset)
            raise OSError(code, os.strerror(code))
        result: int = getattr(os, name)(fd, buffers, offset)
        return result

    return call, failed


@pytest.mark.parametrize("code", [errno.EIO, errno.EAGAIN])
def test_errors_that_pass_are_retried_after_pauses(tmp_path: Path, code: int) -> None:
    pauses: list[float] = []
    preadv, failed = failing(code, len(RETRY_PAUSES_S))
    calls = Syscalls(preadv=preadv, sleep=pauses.append)
    with disk_file(tmp_path, 2 * PAGE, syscalls=calls) as file:
        assert write_and_read(file)
    assert failed == [0] * len(RETRY_PAUSES_S) and tuple(pauses) == RETRY_PAUSES_S


@pytest.mark.parametrize(
    ("name", "code", "attempts"),
    [("preadv", errno.EIO, 4), ("pwritev", errno.EIO, 4), ("pwritev", errno.ENOSPC, 1)],  # a full disk stays full
)
def test_errors_that_stay_name_file_offset_bytes_and_label(tmp_path: Path, name: str, code: int, attempts: int) -> None:
    call, failed = failing(code, 1000, name, at=3 * MIB)
    with disk_file(tmp_path, 4 * MIB, threads=4, syscalls=Syscalls(sleep=lambda _: None)) as file:
        setattr(file.syscalls, name, call)
        request, verb = (file.read, "reading") if name == "preadv" else (file.write, "writing")
        with pytest.raises(DiskError) as caught:
            request(0, memory_of(4 * MIB), "layers.7/optim_state").result(timeout=10)
        request(0, memory_of(2 * MIB), "fine").result(timeout=10)  # the file is still usable
    assert len(failed) == attempts and caught.value.errno == code
    parts = (verb, str(tmp_path / "data"), f"offset {3 * MIB}", "'layers.7/optim_state'", os.strerror(code))
    of_code = ("nvme_budget",) if attempts == 1 else (f"wanted {MIB} bytes", "got 0", "4 attempts", "nvme_path")
    assert all(part in str(caught.value) for part in (*parts, *of_code)), caught.value
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # ranks send it to each other


def test_a_file_that_was_cut_is_an_error_not_old_bytes(tmp_path: Path) -> None:
    with disk_file(tmp_path, 4 * PAGE) as file:
        os.truncate(file.path, 2 * PAGE)
        with pytest.raises(DiskError, match=r"wanted 16384 bytes, got 8192: the file ends here"):
            file.read(0, memory_of(4 * PAGE), "r").result(timeout=10)


def test_a_failed_future_is_done_only_when_nothing_uses_the_buffer_any_more(tmp_path: Path) -> None:
    slow_done = threading.Event()

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0:
            raise OSError(errno.ENXIO, "gone")
        time.sleep(0.2)
        slow_done.set()
        return os.preadv(fd, buffers, offset)

    with disk_file(tmp_path, 2 * MIB, threads=2, syscalls=Syscalls(preadv=preadv)) as file:
        future = file.read(0, memory_of(2 * MIB), "r")
        assert not future.cancel()
        assert isinstance(future.exception(timeout=10), DiskError)
        assert slow_done.is_set()


def refusing(call: str) -> Syscalls:
    """A file system without O_DIRECT: it says so when a file is opened, or only at the first write."""

    def open_(path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return os.open(path, flags, mode)

    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return os.pwritev(fd, buffers, offset)

    return Syscalls(open=open_) if call == "open" else Syscalls(pwritev=pwritev)


@pytest.mark.parametrize("call", ["open", "pwritev"])
def test_without_o_direct_it_warns_once_and_works(tmp_path: Path, call: str) -> None:
    aio._warn_once.cache_clear()
    before = descriptors()
    with pytest.warns(RuntimeWarning, match=f"{tmp_path} has no O_DIRECT.*nvme_path") as caught:
        for _ in range(2):
            with disk_file(tmp_path, 2 * MIB, syscalls=refusing(call)) as file:
                assert write_and_read(file)
    assert len(caught) == 1
    assert descriptors() == before


@pytest.mark.parametrize(("offset", "nbytes"), [(100, PAGE), (0, 100), (PAGE, 4 * PAGE), (-PAGE, PAGE)])
def test_requests_that_are_not_whole_pages_of_the_file_are_refused(tmp_path: Path, offset: int, nbytes: int) -> None:
    with disk_file(tmp_path, 4 * PAGE) as file, pytest.raises(ValueError, match="'mine': expected whole pages"):
        file.read(offset, memory_of(nbytes), "mine")


# -- memory -----------------------------------------------------------------------------------------------------------


def test_pages_are_aligned_and_not_shared_with_forked_children() -> None:
    pages = HostPages(5 * PAGE + 3)
    address = pages.bytes.data_ptr()
    assert address % mmap.PAGESIZE == 0 and pages.bytes.numel() == pages.nbytes == 5 * PAGE + 3
    pages.bytes[:100].fill_(7)
    if (pid := os.fork()) == 0:
        os._exit(int(pages.bytes[0].item()))
    assert os.waitpid(pid, 0)[1] == 0
    assert pages.bytes[0].item() == 7


class Runtime(TorchFunctionMode):
    """CUDA's: an error stays its last until torch finds it behind a kernel, and raises it there."""

    def __init__(self, **codes: int) -> None:
        super().__init__()
        self.codes, self.last = codes, 0
        self.called: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: int) -> int:
            self.called.append((name, *arguments))
            self.last = self.codes.get(name, 0) or self.last
            return self.codes.get(name, 0)

        return call

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.device((kwargs or {}).get("device") or "cpu").type != "cuda":
            return function(*args, **(kwargs or {}))
        last, self.last = self.last, 0
        if last:
            raise RuntimeError(f"CUDA error {last}")
        return None


@contextmanager
def cuda(**codes: int) -> Iterator[Runtime]:
    with Runtime(**codes) as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "synchronize", lambda device: runtime.called.append(("synchronize",)))
        yield runtime


def test_pages_for_cuda_are_pinned_and_unpinned() -> None:
    with cuda() as runtime:
        pages = HostPages(2 * PAGE, accelerator_of(torch.device("cuda", 0)))
        address = pages.bytes.data_ptr()
        for _ in range(2):
            pages.close()
    synchronized = ("synchronize",)  # for the copies that still use the pages
    pinned, unpinned = ("cudaHostRegister", address, 2 * PAGE, 0), ("cudaHostUnregister", address)
    assert runtime.called == [pinned, synchronized, unpinned]


def test_one_queue_for_all_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ConfigError, match=r"^CUDA_DEVICE_MAX_CONNECTIONS: expected no value, or a larger one, got 1"):
        accelerator_of(torch.device("cuda", 0))


def test_pages_that_cuda_does_not_pin_break_no_kernel_of_others() -> None:
    with cuda(cudaHostRegister=2) as runtime:
        with pytest.raises(ConfigError, match=r"pin 8192 bytes.*CUDA error 2.*zero.offload.host_budget"):
            HostPages(2 * PAGE, accelerator_of(torch.device("cuda", 0)))
        assert runtime.last == 0
    assert [name for name, *_ in runtime.called] == ["cudaHostRegister"]
    with cuda(cudaHostUnregister=713) as runtime:
        HostPages(PAGE, accelerator_of(torch.device("cuda", 0))).close()
        assert runtime.last == 0


def test_buffers_are_aligned_apart_and_seen_as_tensors() -> None:
    ring = StagingRing(3, PAGE + 1)
    assert ring.buffer_nbytes == 2 * PAGE and ring.nbytes == 6 * PAGE
    buffers = [ring.acquire(str(i)) for i in range(3)]
    tensors = [buffer.tensor(torch.bfloat16, PAGE).fill_(i) for i, buffer in enumerate(buffers)]
    for buffer, tensor in zip(buffers, tensors, strict=True):
        assert tensor.data_ptr() % PAGE == 0 and buffer.memory == bytes(tensor.view(torch.uint8).numpy())
    assert [tensor.unique().tolist() for tensor in tensors] == [[0], [1], [2]]
    with pytest.raises(ValueError, match="do not fit"):
        buffers[0].tensor(torch.float32, 2 * PAGE // 4 + 1)
    with pytest.raises(RuntimeError, match="still held by"):
        ring.close()
    for buffer in buffers:
        buffer.release()
    with pytest.raises(RuntimeError, match="twice"):
        buffers[0].release()
    ring.close()


def test_a_ring_that_is_too_small_is_an_error_that_names_the_holders() -> None:
    ring = StagingRing(1, PAGE, timeout_s=0.05)
    held = ring.acquire("layers.1/master")
    with pytest.raises(RuntimeError, match=r"'layers.2/master'.*all 1 are held by 'layers.1/master'.*too small"):
        ring.acquire("layers.2/master")
    held.release()
    ring.acquire("again")
    with pytest.raises(ValueError, match="at least one"):
        StagingRing(0, PAGE)
