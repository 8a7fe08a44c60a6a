"""What ranks of one machine share, which cores a rank runs on, and how many threads its kernels take."""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm import share as module
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.share import Share, available_cpus, own_path, ranks_on_disk, share_of_machine
from lightning_zero.device import cuda
from lightning_zero.device.host_threads import bind_to, set_own_threads
from lightning_zero.optimizers.low_bits import in_threads
from lightning_zero.settings import ConfigError
from tests.comm.test_communicator import communicator
from tests.harness import on_ranks


@on_ranks(3)
def test_ranks_find_those_of_their_machine() -> None:
    rank, cores = dist.get_rank(), available_cpus()
    with communicator() as comm, pytest.MonkeyPatch.context() as patch:
        assert share_of_machine(comm) == Share(rank, 3, max(1, cores // 3))
        patch.setattr(module, "machine", lambda: "a" if rank in (0, 2) else "b")
        found = share_of_machine(comm)
        assert found[:2] == [(0, 2), (0, 1), (1, 2)][rank]
        assert found.cpus == max(1, cores // [2, 1, 2][rank])
        assert ranks_on_disk(comm, "/") == [2, 1, 2][rank]


@on_ranks(3)
def test_ranks_bound_to_the_same_cores_divide_these_and_not_those_of_others() -> None:
    """As two of three ranks that are bound to one socket."""
    rank = dist.get_rank()
    with communicator() as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {int(rank == 2)})
        patch.setattr(module, "available_cpus", lambda: 8)
        assert share_of_machine(comm) == Share(rank, 3, 8 if rank == 2 else 4)
        patch.setenv("LOCAL_RANK", str(rank))
        patch.setenv("LOCAL_WORLD_SIZE", "6")  # the group is half of the job
        assert share_of_machine(comm) == Share(rank, 6, 8 if rank == 2 else 2)


def test_one_process_shares_with_nobody() -> None:
    comm = Communicator(None, torch.device("cpu"))
    assert share_of_machine(comm)[:2] == (0, 1)


def test_the_quota_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/task\n")
    for folder, text in (("job/task", "max 100000"), ("job", "150000 100000"), ("", "400000 100000")):
        level = tmp_path / "sys/fs/cgroup" / folder
        level.mkdir(parents=True, exist_ok=True)
        (level / "cpu.max").write_text(text + "\n")
    assert available_cpus(tmp_path) == min(2, len(os.sched_getaffinity(0)))
    assert available_cpus(tmp_path / "nothing") == len(os.sched_getaffinity(0))


def test_a_path_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/17")
    share = Share(local_rank=1, local_ranks=2)
    assert own_path("/nvme$LOCAL_RANK/${RANK}", share, 5) == "/nvme1/5"
    assert own_path("$SCRATCH/zero", share, 5) == "/scratch/17/zero"
    assert own_path("/nvme", share, 5) == "/nvme"
    with pytest.raises(ConfigError, match=r"zero\.offload\.nvme_path: .* got \$NO_SUCH_FOLDER in .* rank 5"):
        own_path("/a/$NO_SUCH_FOLDER", share, 5)


# -- cores near a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed, cores", [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("\n", set()), (None, set())])
def test_the_cores_near_a_gpu_are_those_of_its_numa_node(
    listed: str | None, cores: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    if listed is not None:
        folder = tmp_path / "bus/pci/devices/0000:3b:01.0"
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(listed)
    assert cuda.near_cores(torch.device("cuda", 0), tmp_path) == cores


@pytest.mark.parametrize(("second", "expected"), [({1, 3}, {0, 2}), ({1}, set()), (set(), set())])
def test_a_rank_is_bound_near_its_gpu_if_no_core_is_left_over(
    second: set[int], expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    near = {torch.device("cuda", 0): {0, 2}, torch.device("cuda", 1): second}
    bound: set[int] = set()
    monkeypatch.setattr(cuda, "near_cores", near.__getitem__)
    monkeypatch.setattr(cuda, "allowed_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(cuda, "bind_to", bound.update)
    cuda.bind_near(torch.device("cuda", 0), near)
    assert bound == expected


@on_ranks(1)
def test_a_process_is_bound_with_its_threads_to_those_of_its_cores_that_are_near() -> None:
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    waits, ids = threading.Event(), list[int]()
    thread = threading.Thread(target=lambda: (ids.append(threading.get_native_id()), waits.wait()))
    thread.start()
    try:
        bind_to({10**6})
        assert os.sched_getaffinity(0) == allowed
        bind_to({first, 10**6})
        assert os.sched_getaffinity(0) == os.sched_getaffinity(ids[0]) == {first}
    finally:
        waits.set()
        thread.join()
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
                os.sched_setaffinity(int(task), allowed)


# -- threads of kernels -----------------------------------------------------------------------------------------------


def in_new_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_keeps_its_number_and_others_theirs() -> None:
    """Also where it sets it again, as the worker of a step does for each, and where it steps pieces in threads."""
    found: dict[str, int] = {}
    ours, set_in_main = threading.Event(), threading.Event()
    before = torch.get_num_threads()

    def look(who: str) -> None:
        found[who] = torch.get_num_threads()

    def work() -> None:
        set_own_threads(2)
        in_new_thread(lambda: look("its own"))
        set_own_threads(1)
        in_threads(lambda left, _: [None for _ in left], range(4), ["one", "two"])
        in_new_thread(lambda: look("its own later"))
        ours.set()
        assert set_in_main.wait(60)
        torch.ones(1 << 20).sum()  # at its first kernel a thread that never asked takes the number that was set last
        look("ours")

    thread = threading.Thread(target=work)
    try:
        torch.set_num_threads(3)
        thread.start()
        assert ours.wait(60)
        in_new_thread(lambda: look("later"))
        torch.set_num_threads(4)
        set_in_main.set()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert found == {"its own": 3, "its own later": 3, "later": 3, "ours": 1}
