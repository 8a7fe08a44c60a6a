"""How many threads kernels take where a thread of ours calls them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from lightning_zero.device.host_threads import set_own_threads


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
