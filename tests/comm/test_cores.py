"""Which cores a rank runs on, and how many of them are its own."""

from __future__ import annotations

import os
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm import share
from lightning_zero.comm.communicator import Communicator
from lightning_zero.device import cuda
from lightning_zero.device.host_threads import bind_to
from tests.harness import on_ranks


@on_ranks(3)
def test_ranks_bound_to_the_same_cores_divide_these_and_not_those_of_others() -> None:
    """As two of three ranks that are bound to one socket."""
    rank = dist.get_rank()
    comm = Communicator(dist.group.WORLD, torch.device("cpu"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda process: {int(rank == 2)})
            patch.setattr(share, "available_cpus", lambda: 8)
            assert share.share_of_machine(comm).cpus == (8 if rank == 2 else 4)
            patch.setenv("LOCAL_RANK", str(rank))
            patch.setenv("LOCAL_WORLD_SIZE", "6")  # the group is half of the job
            assert share.share_of_machine(comm).cpus == (8 if rank == 2 else 2)
    finally:
        comm.close()


@pytest.mark.parametrize(
    ("listed", "cores"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("\n", set()), (None, set())]
)
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
            os.sched_setaffinity(int(task), allowed)
