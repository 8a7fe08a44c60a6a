"""The judge itself, by small programs: it finds each kind of race, and nothing where there is an order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine.units.param_store import FlatBuffer
from lightning_zero.tiers.extents import Wanted
from lightning_zero.tiers.host import HostTier
from tests.device.machine import Machine, Tally
from tests.device.simulate import world
from tests.device.virtual import Virtual, simulated

DEVICE = torch.device("meta")
NUMEL = 8

Program = Callable[[Virtual, bool], object]  # with the accelerator, and whether it is to keep an order


class Shown(NamedTuple):
    races: list[str]
    tally: Tally


def judged(program: Program, ordered: bool) -> Shown:
    """What the machine says of a program. Runs in a process of its own."""
    machine = Machine()
    with world(2), simulated(machine, "eager"):
        program(Virtual(DEVICE, machine), ordered)
    return Shown([race.what for race in machine.races], machine.tally)


def on_device() -> Tensor:
    return torch.zeros(NUMEL, device=DEVICE)


def another_stream_reads(gpu: Virtual, ordered: bool) -> None:
    memory = on_device()
    event, side = gpu.record(), gpu.new_stream()
    with gpu.on(side):
        if ordered:
            gpu.wait(event)
        memory.clone()


def another_stream_writes(gpu: Virtual, ordered: bool) -> None:
    memory, side = on_device(), gpu.new_stream()
    event = gpu.record()
    with gpu.on(side):
        gpu.wait(event)
        memory.add_(1)
        event = gpu.record()
    if ordered:
        gpu.wait(event)
    memory.clone()


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


def memory_that_another_stream_reads_is_freed(gpu: Virtual, ordered: bool) -> None:
    memory, side = on_device(), gpu.new_stream()
    event = gpu.record()
    with gpu.on(side):
        gpu.wait(event)
        memory.clone()
        event = gpu.record()
    del memory  # back to the pool of compute, which does not know of the other stream
    if ordered:
        gpu.wait(event)
    on_device()


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


def a_flat_buffer_is_released(gpu: Virtual, ordered: bool) -> None:
    buffer, side = FlatBuffer(NUMEL, torch.float32, DEVICE), gpu.new_stream()
    with gpu.on(side):
        buffer.data.zero_()
        event = gpu.record()
    if ordered:
        gpu.wait(event)
    buffer.release()
    buffer.allocate()
    buffer.data.zero_()


def the_host_reads_too_early(gpu: Virtual, ordered: bool) -> None:
    memory, host = on_device(), gpu.host_memory(torch.Size([NUMEL]), torch.float32)
    host.copy_(memory, non_blocking=True)
    event = gpu.record()
    if ordered:
        gpu.wait_on_host(event)
    host.sum()


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


def a_thread_reads_too_early(gpu: Virtual, ordered: bool) -> None:
    memory, host = on_device(), gpu.host_memory(torch.Size([NUMEL]), torch.float32)
    host.copy_(memory, non_blocking=True)
    event = gpu.record()

    def read() -> None:
        if ordered:
            gpu.wait_on_host(event)
        host.sum()

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()


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


def a_collective_is_not_waited_for(gpu: Virtual, ordered: bool) -> None:
    memory = on_device()
    work = dist.all_reduce(memory, async_op=True)
    if ordered:
        work.wait()
    memory.clone()


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


PROGRAMS = {
    "no order": [
        another_stream_reads,
        another_stream_writes,
        an_event_of_before,
        parts_of_one_memory,
        the_host_reads_too_early,
        the_host_writes_too_early,
        a_copy_that_torch_pins_by_itself,
        another_thread_has_waited,
        a_thread_reads_too_early,
        a_lock_orders_threads,
        a_collective_is_not_waited_for,
        a_collective_that_does_not_run_beside,
    ],
    "memory that was freed is used again": [
        memory_that_another_stream_reads_is_freed,
        new_memory_is_first_used_elsewhere,
        a_flat_buffer_is_released,
    ],
    "host memory goes": [pinned_pages_are_given_back],
}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("what", "program"),
    [pytest.param(what, program, id=program.__name__) for what, programs in PROGRAMS.items() for program in programs],
)
def test_a_race_is_found_and_an_order_is_none(
    what: str, program: Program, ordered: bool, elsewhere: Callable[..., Any]
) -> None:
    assert {*elsewhere(judged, program, ordered).races} == (set() if ordered else {what})


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
    tally = elsewhere(judged, waits, True).tally
    assert {wait.why: times for wait, times in tally.waits.items()} == {
        "a value": 2,
        "a copy": 3,
        "a copy of pageable memory": 1,
        "event": 1,
        "synchronize": 1,
    }
    assert {(copy.to_host, copy.waits): times for copy, times in tally.copies.items()} == {
        (True, False): 1,
        (False, False): 1,
        (True, True): 3,
        (False, True): 1,
    }
    assert sum(tally.copied.values()) == 6 * NUMEL * 4
