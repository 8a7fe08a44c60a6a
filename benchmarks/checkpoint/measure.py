"""What one turn of a side does, on each rank.

::

    steps                                   how long one takes with nothing beside it, and the peak of its memory
    for each save:
        plain writes of as many bytes       large, in order, each rank a file of its own, fsynced: the disk's rate
        save                                the call; of one in the background also the steps until it is durable
        steps, load                         what was loaded must be what was saved, to the bit
        plain writes                        again: the disk's rate drifts

The first save of a process makes what later ones use again (plans, groups, imports): it counts for memory, and its
seconds are a figure of their own. Files are read into the page cache before they are loaded, on all sides. All that is
written is fsynced, so nothing waits for the disk when the next thing begins.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import bench
from benchmarks.checkpoint.ranks import Window, is_there, trim
from benchmarks.checkpoint.sides import Dcp, DcpAsync, DcpStager, DdpFile, Side
from lightning_zero.models.gpt import GPT

WARM_UP = 2  # steps
BLOCK_NBYTES = 16 << 20  # of a plain write
LIMIT_S = 120.0  # for a write in the background


def _ours(checkpoint: Any) -> Callable[[Any], Side]:
    def make(model: Any) -> Side:
        from benchmarks.checkpoint.ours import Ours

        return Ours(model, checkpoint)

    return make


SIDES: dict[str, Callable[[Any], Side]] = {
    "full": _ours("full"),
    "sharded": _ours("sharded"),
    "sharded, background": _ours({"name": "sharded", "background": True}),
    "dcp.save": Dcp,
    "dcp.async_save": DcpAsync,
    "dcp.async_save, DefaultStager": DcpStager,
    "ddp, torch.save": DdpFile,
}


class Job(NamedTuple):
    """One turn.

    Attributes:
        side: of :data:`SIDES`.
        saves: how many; the first warms up.
        steps: with nothing beside them.
    """

    side: str
    folder: str
    saves: int
    steps: int

    @property
    def paths(self) -> list[str]:
        return [str(Path(self.folder, f"{number}.ckpt")) for number in range(self.saves)]


@dataclass
class Save:
    """Seconds on one rank, and moments of the common clock."""

    path: str
    started: float
    call_s: float = 0.0
    waited_s: float = 0.0  # by steps beside the write
    ended: float = 0.0  # of the call, and of the steps beside the write
    steps: list[tuple[float, float]] = field(default_factory=list)  # beside the write: start and end of each
    load_s: float = 0.0
    nbytes: int = 0
    plain_s: list[float] = field(default_factory=list)
    error: str = ""


@dataclass
class Found:
    """What one rank has found in a turn."""

    side: str
    background: bool
    numel: int
    unit_nbytes: int
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)


def turn(rank: int, world: int, job: Job) -> Found:
    """One turn, as a rank of it."""
    torch.manual_seed(0)
    model = GPT(**bench.MODEL)
    found = Found(job.side, False, sum(p.numel() for p in model.parameters()), _largest_unit(model))
    side = SIDES[job.side](model)
    del model
    found.background = side.background
    side.run(_program(side, job, found, rank, world))
    found.losses = side.losses[: WARM_UP + job.steps]
    return found


def _largest_unit(model: GPT) -> int:
    """Bytes of the largest unit: a block, or what belongs to none."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    rest = sum(p.numel() for p in model.parameters()) - sum(blocks)
    return 4 * max(rest, *blocks)


def _program(side: Side, job: Job, found: Found, rank: int, world: int) -> Iterator[None]:
    for _ in range(WARM_UP):
        yield
    trim()
    begun = time.perf_counter()
    for _ in range(job.steps):
        started = time.perf_counter()
        yield
        found.step_s.append(time.perf_counter() - started)
    found.windows.append(Window("steps", begun, time.perf_counter()))
    nbytes = 12 * found.numel
    for path in job.paths:
        plain_s = [plain_write(job.folder, nbytes, rank, world)]
        held = side.fingerprint()
        rest()
        save = Save(path, time.perf_counter())
        found.saves.append(save)
        waited_s = side.waited_s
        side.save(path)
        save.call_s = time.perf_counter() - save.started
        found.windows.append(Window("save", save.started, save.started + save.call_s))
        if side.background:
            yield from _steps_until_durable(save, rank)
            save.waited_s = side.waited_s - waited_s
            found.windows.append(Window("steps beside a save", save.started + save.call_s, save.ended))
            side.finish()
        yield  # or values would be those of the save anyway
        if side.fingerprint() == held:
            save.error = "a step has changed nothing"
        if rank == 0:
            warm(path)
        rest()
        started = time.perf_counter()
        side.load(path)
        save.load_s = time.perf_counter() - started
        found.windows.append(Window("load", started, started + save.load_s))
        if side.fingerprint() != held:
            save.error = "what was loaded is not what was saved"
        save.nbytes = size_of(path)
        dist.barrier()
        if rank == 0:
            remove(path)
        plain_s.append(plain_write(job.folder, nbytes, rank, world))
        save.plain_s = plain_s


def _steps_until_durable(save: Save, rank: int) -> Iterator[None]:
    """Steps, as many on all ranks, until the checkpoint has its name."""
    there = torch.zeros(1)
    while not there.item():
        started = time.perf_counter()
        yield
        save.steps.append((started, time.perf_counter()))
        if rank == 0:
            there.fill_(float(is_there(save.path)))
        dist.broadcast(there, 0)
        if save.steps[-1][1] - save.started > LIMIT_S:
            raise RuntimeError(f"{save.path} is not there after {LIMIT_S:g} s")
    save.ended = time.perf_counter()


def warm(path: str) -> None:
    """Have a file, or a folder's, in the page cache, which some writes go past."""
    for file in [f for f in Path(path).rglob("*") if f.is_file()] or [Path(path)]:
        with file.open("rb", buffering=0) as opened:
            while opened.read(BLOCK_NBYTES):
                pass


def rest() -> None:
    """Let memory come to rest, on all ranks, which go on together."""
    trim()
    dist.barrier()


def plain_write(folder: str, nbytes: int, rank: int, world: int) -> float:
    """Seconds that all ranks together take for large writes of ``nbytes`` and their fsync."""
    path = Path(folder, f"plain-{rank}")
    block = memoryview(os.urandom(min(BLOCK_NBYTES, max(1, nbytes // world))))
    rest()
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left = nbytes // world
        while left > 0:
            left -= file.write(block[: min(left, len(block))])
        os.fsync(file.fileno())
    dist.barrier()
    taken = time.perf_counter() - started
    path.unlink()
    return taken


def size_of(path: str) -> int:
    """Bytes of a file, or of all files of a folder."""
    files = [Path(path)] if os.path.isfile(path) else [p for p in Path(path).rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files)


def remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
