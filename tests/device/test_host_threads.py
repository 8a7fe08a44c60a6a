"""How many threads kernels take where a thread of ours calls them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from lightning_zero.device.host_threads import set_own_threads
from lightning_zero.optimizers.low_bits import in_threads


def in_new_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_keeps_its_number_and_others_theirs() -> None:
    found: dict[str, int] = {}
    ours, set_in_main = threading.Event(), threading.Event()
    before = torch.get_num_threads()

    def work() -> None:
        set_own_threads(1)
        ours.set()
        assert set_in_main.wait(60)
        torch.ones(1 << 20).sum()  # at its first kernel a thread that never asked takes the number that was set last
        found["own"] = torch.get_num_threads()

    thread = threading.Thread(target=work)
    try:
        torch.set_num_threads(3)
        thread.start()
        assert ours.wait(60)
        in_new_thread(lambda: found.update(later=torch.get_num_threads()))
        torch.set_num_threads(2)
        set_in_main.set()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert found == {"own": 1, "later": 3}


def test_what_a_thread_sets_again_and_what_steps_pieces_leave_later_threads_as_they_are() -> None:
    found: list[int] = []
    before = torch.get_num_threads()

    def look() -> None:
        found.append(torch.get_num_threads())

    def work() -> None:
        for _ in range(2):  # the worker of a step sets it for each
            set_own_threads(2)
            in_new_thread(look)
        in_threads(lambda left, _: [None for _ in left], range(4), ["one", "two"])
        in_new_thread(look)
        look()

    try:
        torch.set_num_threads(3)
        in_new_thread(work)
    finally:
        torch.set_num_threads(before)
    assert found == [3, 3, 3, 2]
