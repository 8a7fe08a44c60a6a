"""``make bench-offload``: every row of ``zero/offload`` beside none, in one run, and the disk's share of it.

Step time, CPU seconds and peak memory of the rows are measured as in ``benchmarks.bench``. For the NVMe optimizer a
second part does nothing but optimizer steps: its bound is ``12 P (1/R + 1/W)`` seconds for P parameters of a rank and
the read and write rates R and W of the disk, which are measured first, through the same file access; phi is bound over
measured.

    python -m benchmarks.bench_offload --nvme /path/on/a/local/disk
    python -m benchmarks.bench_offload --states    # steps with state in fp32 and bf16, by turns
    python -m benchmarks.bench_offload --batches   # the same samples in a step, in one batch and in several
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from datetime import date
from typing import Any

import torch
from torch import nn

from benchmarks import bench
from benchmarks.rates import disk_rates
from benchmarks.sides.side import loss_of, make_adamw
from lightning_zero.planning.placement import OFFLOADS
from lightning_zero.settings import Offload

ROWS = [row.name for row in OFFLOADS if row is not Offload.none]
LARGE = {"vocab_size": 8192, "n_layer": 22, "n_head": 16, "d_model": 1024, "block_size": 256}  # 294 M parameters


WIDTH, BLOCKS = 2048, 12  # of the model whose optimizer alone is stepped: 50 M parameters
STATES = ("fp32", "bf16")

WIDE = {"vocab_size": 8192, "n_layer": 10, "n_head": 12, "d_model": 768}  # 77 M parameters
SAMPLES = 8  # of a step
BATCHINGS: dict[str, tuple[int, Any]] = {  # samples of a backward, and zero.activation_checkpointing
    "8 of 1": (1, "blocks"),
    "2 of 4": (4, "blocks"),
    "1 of 8": (8, "blocks"),
    "1 of 8, inputs of blocks on the host": (8, "offload"),
}


class InFiles:
    """AdamW with its state in files, to be stepped on gradients that are there already."""

    def __init__(self, folder: str, state_dtype: str = "fp32", row: str = "optimizer_nvme") -> None:
        import lightning_zero

        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity()) for _ in range(BLOCKS)))
        self.numel = sum(p.numel() for p in self.model.parameters())
        self.engine = lightning_zero.shard(
            self.model,
            stage=3,
            offload={"name": row, "nvme_path": folder},
            device="cpu",
            unit={"classes": ["Linear"]},
            optimizer={"state_dtype": state_dtype},
        )
        self.optimizer = make_adamw(self.model)
        self.engine.add_optimizer(self.optimizer)

    def step(self) -> float:
        """Seconds of one."""
        self.model(torch.ones(1, WIDTH)).sum().backward()
        started = time.perf_counter()
        self.optimizer.step()
        self.engine.passes.wait_for_all()
        seconds = time.perf_counter() - started
        self.optimizer.zero_grad()
        return seconds


def optimizer_only(rank: int, world: int, store: str, folder: str, queue: Any, steps: int = 4) -> None:
    """phi of AdamW with its state in files: steps on gradients that are there already, one rank.

    In a process of its own: one that has used torch's threads cannot be forked for the races that follow.
    """
    side = InFiles(folder)
    times = [side.step() for _ in range(2 + steps)][2:]
    side.engine.release()
    read, write = disk_rates(folder)
    bound = 12 * side.numel * (1 / read + 1 / write)
    found = {
        "optimizer_only_s": round(statistics.median(times), 3),
        "parameters": side.numel,
        "read_gb_s": round(read / 1e9, 2),
        "write_gb_s": round(write / 1e9, 2),
        "bound_s": round(bound, 3),
        "phi": round(bound / statistics.median(times), 3),
    }
    queue.put(found)


def states_in_turn(rank: int, world: int, store: str, folder: str, row: str, queue: Any, steps: int = 8) -> None:
    """The same with every ``zero.optimizer.state_dtype``, by turns: what the disk does meanwhile all of them have."""
    sides = {dtype: InFiles(folder, dtype, row) for dtype in STATES}
    times: dict[str, list[float]] = {dtype: [] for dtype in STATES}
    for _ in range(2 + steps):
        for dtype, side in sides.items():
            times[dtype].append(side.step())
    for side in sides.values():
        side.engine.release()
    found: dict[str, Any] = {"row": row}
    found |= {f"{d}_s": round(statistics.median(times[d][2:]), 3) for d in STATES}
    for dtype in STATES[1:]:
        by_turn = [one / other for one, other in zip(times["fp32"][2:], times[dtype][2:], strict=True)]
        found[f"{dtype}_speed"] = round(statistics.median(by_turn), 2)
    queue.put(found)


def one_batching(rank: int, world: int, store: str, folder: str, way: str, length: int, queue: Any) -> None:
    """Steps on the same samples with everything in files: seconds of a step, and this process's peak of memory."""
    import lightning_zero
    from lightning_zero.models.gpt import GPT

    micro_batch, checkpointing = BATCHINGS[way]
    model = GPT(**WIDE, block_size=length)
    offload = {"name": "nvme", "nvme_path": folder}
    engine = lightning_zero.shard(
        model,
        stage=3,
        offload=offload,
        activation_checkpointing=checkpointing,
        device="cpu",
        unit={"classes": ["Block"]},
    )
    optimizer = make_adamw(model)
    engine.add_optimizer(optimizer)
    tokens = torch.randint(WIDE["vocab_size"], (SAMPLES, length + 1), generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(4):
        started = time.perf_counter()
        for part in tokens.split(micro_batch):
            (loss_of(model, part, False) * (len(part) / SAMPLES)).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.passes.wait_for_all()
        times.append(time.perf_counter() - started)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # before the optimizer state is gathered
    engine.release()
    queue.put({"way": way, "length": length, "step_s": round(min(times[1:]), 2), "peak_mib": round(peak_mib)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on a local disk")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--large", action="store_true", help="the 294 M model too")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--states", action="store_true", help="nothing but zero.optimizer.state_dtype, by turns")
    parser.add_argument("--batches", action="store_true", help="nothing but a step of 8 samples in 1 to 8 batches")
    args = parser.parse_args()
    print(f"{date.today()}, {os.cpu_count()} CPU cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="lightning_zero_bench_", dir=args.nvme) as folder:
        if args.states:
            for row in ("optimizer_nvme", "nvme"):
                print(json.dumps(bench.launch(states_in_turn, 1, folder, row)), flush=True)
        elif args.batches:
            for length in (128, 256):
                for way in BATCHINGS:
                    print(json.dumps(bench.launch(one_batching, 1, folder, way, length)), flush=True)
        else:
            rows_in_turn(args, folder)


def rows_in_turn(args: argparse.Namespace, folder: str) -> None:
    """The rows of ``zero/offload`` beside ``none``."""
    print(json.dumps(bench.launch(optimizer_only, 1, folder)), flush=True)
    rows: list[dict[str, Any]] = []
    sides = ["zero3", *(f"zero3+{row}" for row in ROWS)]
    for ranks in args.ranks:
        for model in [bench.MODEL, LARGE] if args.large else [bench.MODEL]:
            bench.MODEL = model
            pairs = [(sides[0], side) for side in sides[1:]]
            rows += race_rows(pairs, ranks, args.rounds, folder, memory=not args.no_memory)
    print(bench.table(rows))


def race_rows(
    pairs: list[tuple[str, str]], ranks: int, rounds: int, folder: str, *, memory: bool
) -> list[dict[str, Any]]:
    """Pair by pair: the files of several rows would wait for each other's disk."""
    rows = []
    for pair in pairs:
        os.environ["LIGHTNING_ZERO_NVME_PATH"] = folder
        rows += bench.report("4:fp32", list(pair), rounds, ranks, memory)
    return rows


if __name__ == "__main__":
    main()
