"""The processes of one turn. Their memory is read from outside, so that nothing in them is in the way.

Memory is anonymous and shared memory that is resident (``RssAnon + RssShmem`` of /proc/PID/status). Pages of a mapped
file are not in it: the system can drop them at any time, and they would be read again. What an operation adds is the
peak while it runs over what was there before. Before it, memory that the C library only keeps for later is given back
(``malloc_trim``): an operation that uses it again would look as if it took none.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.multiprocessing as mp

from benchmarks.bench import start_process, stop_process

SAMPLE_S = 0.004
SETTLE_S = 0.1  # in which a busy machine takes a sample too
INDEX = ".metadata"  # which DCP writes last
# Once, and not by every rank when it first uses them.
IMPORTED = (
    "benchmarks.checkpoint.ours",
    "lightning_zero.checkpoint.hugging_face.export",
    "lightning_zero.trainer.strategy",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
)


class Window(NamedTuple):
    """What a rank did from ``start`` to ``end``, by the clock that all processes have in common (``perf_counter``)."""

    what: str
    start: float
    end: float


class Memory:
    """Samples of a process's memory.

    Attributes:
        times, nbytes: of each sample, in order.
    """

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/status"
        self.times: list[float] = []
        self.nbytes: list[int] = []

    def sample(self) -> None:
        """Nothing where the process has ended."""
        try:
            with open(self._path) as file:
                lines = dict(line.split(":", 1) for line in file)
            found = sum(int(lines[key].split()[0]) for key in ("RssAnon", "RssShmem"))
        except (OSError, KeyError):
            return
        self.times.append(time.perf_counter())
        self.nbytes.append(found << 10)

    def before(self, moment: float) -> int:
        """The last sample up to ``moment``."""
        return self.nbytes[max(0, bisect_right(self.times, moment) - 1)]

    def peak(self, window: Window) -> int:
        low, high = bisect_left(self.times, window.start), bisect_right(self.times, window.end)
        return max([self.before(window.start), *self.nbytes[low:high]])


class Turn(NamedTuple):
    """What came of one turn.

    Attributes:
        found: what each rank has returned.
        memory: of each rank.
        durable: when each of the checkpoints that were looked for had its name.
    """

    found: list[Any]
    memory: list[Memory]
    durable: dict[str, float]


def take_turn(function: Callable[..., Any], world: int, *args: Any, looked_for: Sequence[str] = ()) -> Turn:
    """Run ``function(rank, world, *args)`` on ``world`` new ranks over gloo.

    Raises:
        Exception: what one of them has raised.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, f"{folder}/store", function, args, queue)
        running = mp.start_processes(_rank, arguments, world, start_method="fork", join=False)
        memory = [Memory(pid) for pid in running.pids()]
        durable: dict[str, float] = {}
        found: dict[int, Any] = {}
        while len(found) < world:
            for process in memory:
                process.sample()
            for path in looked_for:
                if path not in durable and is_there(path):
                    durable[path] = time.perf_counter()
            while not queue.empty():
                rank, value = queue.get()
                found[rank] = value
            running.join(timeout=SAMPLE_S)
        while not running.join():
            pass
    return Turn([found[rank] for rank in range(world)], memory, durable)


def _rank(rank: int, world: int, store: str, function: Callable[..., Any], args: Any, queue: Any) -> None:
    # As a launcher sets them: Lightning takes the ranks that are there.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    start_process(rank, world, store)
    found = function(rank, world, *args)
    stop_process(world)
    queue.put((rank, found))


def is_there(path: str | Path) -> bool:
    """Whether a checkpoint has its name: a file, or a folder with its index."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, INDEX))


def trim() -> None:
    """Give back what the C library keeps of freed memory, and wait until a sample has seen that."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    time.sleep(SETTLE_S)
