"""The judge itself, by small programs, where the engine has no such race to find (``test_waits.py``)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.tiers.extents import Wanted
from lightning_zero.tiers.host import HostTier
from tests.device.machine import Tally
from tests.device.simulate import on_paper
from tests.device.virtual import Virtual

DEVICE = torch.device("meta")
NUMEL = 8

Program = Callable[[Virtual, bool], object]  # with the accelerator, and whether it is to keep an order


def judged(program: Program, ordered: bool = True) -> tuple[set[str], Tally]:
    """Races of a program, and what is counted. Runs in a process of its own."""
    with on_paper(2, (), "eager") as (machine, _):
        program(Virtual(DEVICE, machine), ordered)
    return {race.what for race in machine.races}, machine.tally


def on_device() -> Tensor:
    return torch.zeros(NUMEL, device=DEVICE)


def an_event_of_before(gpu: Virtual, ordered: bool) -> None:
    """An event says nothing of what comes behind it."""
    event = None if ordered else gpu.record()
    memory, side = on_device(), gpu.new_stream()
    event = event or gpu.record()
    with gpu.on(side):
        gpu.wait(event)
        memory.clone()


def parts_of_one_memory(gpu: Virtual, ordered: bool) -> None:
    memory, side = on_device(), gpu.new_stream()
    event = gpu.record()
    memory[: NUMEL // 2].add_(1)
    with gpu.on(side):
        gpu.wait(event)
        memory[NUMEL // 2 :].add_(1) if ordered else memory[NUMEL // 2 - 1 :].add_(1)


def new_memory_is_first_used_elsewhere(gpu: Virtual, ordered: bool) -> None:
    """It may be memory that kernels of its own stream still read."""
    old = on_device()
    before, side = gpu.record(), gpu.new_stream()
    old.clone()
    del old
    memory = torch.empty(NUMEL, device=DEVICE)
    event = gpu.record() if ordered else before
    with gpu.on(side):
        gpu.wait(event)
        memory.zero_()


def the_host_writes_too_early(gpu: Virtual, ordered: bool) -> None:
    memory, host = on_device(), gpu.host_memory(torch.Size([NUMEL]), torch.float32)
    host.fill_(1)
    memory.copy_(host, non_blocking=not ordered)
    host.fill_(2)


def a_copy_that_torch_pins_by_itself(gpu: Virtual, ordered: bool) -> None:
    host = on_device().to("cpu", non_blocking=not ordered)
    host.sum()


def pinned_pages_are_given_back(gpu: Virtual, ordered: bool) -> None:
    tier = HostTier(gpu)
    (extent,) = tier.reserve([Wanted("some", NUMEL, torch.float32)])
    on_device().copy_(tier.resident(extent), non_blocking=True)
    with contextlib.nullcontext() if ordered else mock.patch.object(Virtual, "synchronize", lambda self: None):
        tier.close()


def another_thread_has_waited(gpu: Virtual, ordered: bool) -> None:
    """What one thread of the host has waited for, another knows when it hears of it."""
    memory, host = on_device(), gpu.host_memory(torch.Size([NUMEL]), torch.float32)
    host.copy_(memory, non_blocking=True)
    event = gpu.record()
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(gpu.wait_on_host, event)
        while waited._state != "FINISHED":  # seen, but not by a way that tells the thread to look at memory
            pass
        if ordered:
            waited.result()
        host.sum()


def a_lock_orders_threads(gpu: Virtual, ordered: bool) -> None:
    host = gpu.host_memory(torch.Size([NUMEL]), torch.float32)
    lock = threading.Lock()

    def write() -> None:
        with lock:
            host.fill_(1)

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        pass
    if ordered:
        lock.acquire()
    host.fill_(2)
    thread.join()


def a_collective_that_does_not_run_beside(gpu: Virtual, ordered: bool) -> None:
    """Without async_op it is queued on the stream that is current."""
    memory, side = on_device(), gpu.new_stream()
    event = gpu.record()
    with gpu.on(side):
        gpu.wait(event)
        dist.all_reduce(memory)
        event = gpu.record()
    if ordered:
        gpu.wait(event)
    memory.clone()


NO_ORDER = (an_event_of_before, parts_of_one_memory, the_host_writes_too_early, a_copy_that_torch_pins_by_itself)
NO_ORDER += (another_thread_has_waited, a_lock_orders_threads, a_collective_that_does_not_run_beside)
PROGRAMS = dict.fromkeys(NO_ORDER, "no order") | {
    new_memory_is_first_used_elsewhere: "memory that was freed is used again",
    pinned_pages_are_given_back: "host memory goes",
}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_race_is_found_and_an_order_is_none(program: Program, ordered: bool, elsewhere: Callable[..., Any]) -> None:
    assert elsewhere(judged, program, ordered)[0] == (set() if ordered else {PROGRAMS[program]})


def waits(gpu: Virtual, ordered: bool) -> None:
    memory, pinned = on_device(), gpu.host_memory(torch.Size([NUMEL]), torch.float32)
    pinned.copy_(memory, non_blocking=True)
    memory.copy_(pinned, non_blocking=True)
    memory.sum()  # until here the host goes on
    memory.sum().item()
    bool(memory.sum() > 0)
    memory.tolist()
    memory.cpu()
    pinned.copy_(memory)
    torch.zeros(NUMEL).to(DEVICE, non_blocking=True)
    gpu.wait_on_host(gpu.record())
    gpu.synchronize()


def test_host_waits_and_copies_are_counted(elsewhere: Callable[..., Any]) -> None:
    _, tally = elsewhere(judged, waits)
    whys = {"a value": 2, "a copy": 3, "a copy of pageable memory": 1, "event": 1, "synchronize": 1}
    assert {wait.why: times for wait, times in tally.waits.items()} == whys
    copies = {(True, False): 1, (False, False): 1, (True, True): 3, (False, True): 1}
    assert {(copy.to_host, copy.waits): times for copy, times in tally.copies.items()} == copies
    assert sum(tally.copied.values()) == 6 * NUMEL * 4
