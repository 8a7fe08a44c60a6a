"""What the emulated CUDA finds: it is as late, and as strict, as a GPU may be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import on_ranks, run


def said(tmp_path: Path) -> Path:
    """Where the emulation tells from here on what a test is to provoke."""
    log = tmp_path / f"said{os.environ['RANK']}"
    os.environ["LATE_CUDA_LOG"] = str(log)
    log.touch()
    return log


@on_ranks(1)
@pytest.mark.parametrize("kind", ["kernel", "copy to the device", "copy to the host"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_does_not_wait_reads_what_is_not_there_yet(kind: str, waits: bool) -> None:
    target: Any = torch.zeros(8, device="cpu" if kind == "copy to the host" else "cuda")
    target = target.pin_memory() if target.device.type == "cpu" else target
    source = torch.ones(8).pin_memory() if kind == "copy to the device" else torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        if kind == "kernel":
            target.add_(source)
        else:
            target.copy_(source, non_blocking=True)
    if kind == "copy to the host":
        if waits:
            side.synchronize()
        found = target.tolist()
    else:
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        found = (target * 2).tolist()
    torch.cuda.synchronize()  # before memory that the other stream writes is freed
    assert (found == [1.0 if kind == "copy to the host" else 2.0] * 8) == waits


@on_ranks(2)
def test_messages_of_two_groups_may_be_issued_in_any_order() -> None:
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    sums = [torch.ones(3, device="cuda"), torch.ones(3, device="cuda")]
    for group, tensor in zip(groups, sums, strict=True):
        dist.all_reduce(tensor, group=group)
    order = [0, 1] if dist.get_rank() else [1, 0]
    works = [dist.all_reduce(sums[place], group=groups[place], async_op=True) for place in order]
    for work in works:
        work.wait()
    assert [tensor.tolist() for tensor in sums] == [[4.0] * 3] * 2


def issue_other_messages(folder: Path) -> str:
    log = said(folder)
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3, device="cuda"), group=group)
    dist.all_reduce(torch.ones(3 + dist.get_rank(), device="cuda"), group=group, async_op=True)
    torch.cuda.synchronize()
    return log.read_text()


def test_ranks_that_issue_other_messages_are_told(tmp_path: Path) -> None:
    found = run(2, issue_other_messages, tmp_path)
    harness._POOLS.pop(2).kill()  # torch ends a process whose communicator has failed
    assert "ERROR rank" in "".join(found)


@on_ranks(2)
def test_a_thread_on_another_ranks_gpu_is_told(tmp_path: Path) -> None:
    log = said(tmp_path)
    torch.ones(1, device=f"cuda:{1 - dist.get_rank()}")
    assert "FOREIGN" in log.read_text()
