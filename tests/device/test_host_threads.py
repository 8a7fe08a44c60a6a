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
