"""Send messages to rank 0 without waiting: threads write the messages to the store while ranks train. Also print once
what all ranks would print."""

from __future__ import annotations

import contextlib
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_zero.ranks.messages import dumps, loads
from lightning_zero.ranks.watchdog import connection_of_its_own, within

EVERY_S = 0.05
SAID_S = 2.0


class Mailbox:
    """Holds one message from each rank to rank 0. ``key`` names the mailbox; it is unique, and equal on all ranks."""

    def __init__(self, key: str, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._store = None
        if world_size > 1:
            self._store = connection_of_its_own(dist.distributed_c10d._get_default_store())
        self._prefix = f"lightning_zero/mail/{key}"
        self._own: Any = None

    def post(self, value: Any) -> None:
        if self._rank == 0:
            self._own = value
        elif self._store is not None:
            self._store.set(f"{self._prefix}/{self._rank}", dumps(value))

    def collect(self, give_up: Callable[[list[int], float], str]) -> list[Any]:
        """On rank 0, wait for the messages of all ranks and return them in rank order. Meanwhile poll ``give_up(missing
        ranks, seconds since the last message)``; if it returns a text, raise a RuntimeError with this text."""
        found: dict[int, Any] = {0: self._own}
        missing = list(range(1, self._world_size))
        news = time.monotonic()
        while missing:
            assert self._store is not None
            for rank in [rank for rank in missing if self._store.check([f"{self._prefix}/{rank}"])]:
                found[rank] = loads(self._store.get(f"{self._prefix}/{rank}"))
                self._store.delete_key(f"{self._prefix}/{rank}")
                missing.remove(rank)
                news = time.monotonic()
            if missing and (why := give_up(missing, time.monotonic() - news)):
                raise RuntimeError(why)
            if missing:
                time.sleep(EVERY_S)
        return [found[rank] for rank in range(self._world_size)]


def say_once(text: str) -> None:
    """Print ``text`` on stderr: on rank 0 if all ranks call this within :data:`SAID_S` seconds, else on each rank."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    key = f"lightning_zero/said/{zlib.crc32(text.encode())}"
    wait_s = SAID_S if rank else 2 * SAID_S  # rank 0 ends last: a launcher may end the others with it

    def meet() -> bool:
        until = time.monotonic() + wait_s
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, and its store
            store = connection_of_its_own(dist.distributed_c10d._get_default_store())
            if not rank:
                store.set(key, "")
            while not store.check([key if rank else f"{key}/all"]):  # get would keep the watchdog from asking
                if time.monotonic() > until:
                    return False
                time.sleep(EVERY_S)
            if rank and store.add(f"{key}/heard", 1) == ranks - 1:
                store.set(f"{key}/all", "")
            return True
        return False

    if not rank:
        print(text, file=sys.stderr, flush=True)
    if ranks > 1 and not within(2 * wait_s, meet, False) and rank:
        print(text, file=sys.stderr, flush=True)
