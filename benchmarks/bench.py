"""``make bench``: our stages beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed, in one run.

Every round gives each side a turn of a few steps on the same batches, so that a machine whose speed drifts treats all
alike; medians of rounds are compared. The first step of a turn is not timed: what a step leaves running (the gathers of
stages 1 and 2) then falls on the same side's next step, as it does in training. Peak memory is measured in processes of
its own, one pair for each side. Losses are printed beside the times and compared with those of the first side, step by
step: a fast wrong answer does not count. A side that cannot run here is left out, with the reason. CPU seconds of a
side whose blocks are compiled are compared with those of the same side without (``cpu_vs_eager``): at most 1 is wanted.

    python -m benchmarks.bench                                # the table of docs/benchmarks.md
    python -m benchmarks.bench --case 4:fp32 --rounds 20      # one case
    python -m benchmarks.bench --one-rank                     # the engine against the bare module, one process
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.sides import build, is_peer, why_not
from benchmarks.sides.side import COMPILED, Side
from lightning_zero.models.gpt import GPT

MODEL = {"vocab_size": 8192, "n_layer": 8, "n_head": 8, "d_model": 512, "block_size": 256}  # 33.7 M parameters
TINY = {"vocab_size": 64, "n_layer": 2, "n_head": 2, "d_model": 32, "block_size": 16}
CASES = ("4:fp32", "4:bf16", "1:fp32", "1:bf16")
SIDES = "ddp,ddp+zero1,fsdp2,deepspeed1,deepspeed2,deepspeed3,deepspeed2+cpu"
SIDES += ",zero0,zero1,zero2,zero3,zero3+keep,zero2+optimizer_cpu,zero0+compiled,zero3+compiled"
ONE_RANK = "bare,zero0,zero3,bare+compiled,zero3+compiled"
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}  # of losses, relative: sums have other orders, and bf16 is not used alike
WARM_UP = 1  # turns
TIMED_STEPS = 2  # of each turn, after one that is not timed


def batch(rank: int, world: int, step: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, MODEL["vocab_size"], (world * micro_batch, MODEL["block_size"] + 1), generator=generator)
    return tokens[rank * micro_batch : (rank + 1) * micro_batch]


def race(rank: int, world: int, store: str, names: list[str], case: str, rounds: int, queue: Any) -> None:
    """All sides in turn, ``rounds`` times; rank 0 reports medians."""
    start_process(rank, world, store)
    micro_batch, precision = int(case.split(":")[0]), case.split(":")[1]
    torch.manual_seed(0)
    seed_model = GPT(**MODEL)
    sides = [build(name, copy.deepcopy(seed_model), precision) for name in names]
    for turn in range(WARM_UP + rounds):
        batches = [batch(rank, world, turn * (1 + TIMED_STEPS) + i, micro_batch) for i in range(1 + TIMED_STEPS)]
        # Each round starts with another side: none always runs on the caches that the same other left behind.
        for i in range(len(sides)):
            take_turn(sides[(i + turn) % len(sides)], batches, timed=turn >= WARM_UP)
    if rank == 0:
        queue.put([(s.name, s.wall_s, s.cpu_s, s.losses) for s in sides])
    stop_process(world)


def take_turn(side: Side, batches: list[Tensor], *, timed: bool) -> None:
    if dist.get_world_size() > 1:
        dist.barrier()
    side.losses.append(side.step(batches[0]))
    wall, cpu = time.perf_counter(), time.process_time()
    for tokens in batches[1:]:
        side.losses.append(side.step(tokens))
    if timed:
        side.wall_s.append((time.perf_counter() - wall) / TIMED_STEPS)
        side.cpu_s.append((time.process_time() - cpu) / TIMED_STEPS)


def peak(rank: int, world: int, store: str, name: str, case: str, queue: Any) -> None:
    """Peak resident memory of one side above the imported libraries, in processes of its own."""
    start_process(rank, world, store)
    torch.manual_seed(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    side = build(name, GPT(**MODEL), case.split(":")[1])
    for step in range(4):
        side.step(batch(rank, world, step, int(case.split(":")[0])))
    if rank == 0:
        queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    stop_process(world)


def start_process(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def stop_process(world: int) -> None:
    if world > 1:
        dist.barrier()
    dist.destroy_process_group()


def launch(function: Callable[..., None], world: int, *args: Any) -> Any:
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        running = mp.start_processes(
            function, (world, f"{folder}/store", *args, queue), world, start_method="fork", join=False
        )
        result = queue.get()
        while not running.join():
            pass
    return result


def report(case: str, names: list[str], rounds: int, world: int, memory: bool) -> list[dict[str, Any]]:
    results = launch(race, world, names, case, rounds)
    tokens = int(case.split(":")[0]) * MODEL["block_size"] * world
    walls = {name: wall for name, wall, _, _ in results}
    cpus = {name: cpu for name, _, cpu, _ in results}
    expected, tolerance = results[0][3], TOLERANCE[case.split(":")[1]]
    rows = []
    for name, wall, cpu, losses in results:
        row = {
            "case": case,
            "side": name,
            "ranks": world,
            "tokens_per_s": round(tokens / statistics.median(wall), 1),
            "step_s": round(statistics.median(wall), 4),
            "cpu_s": round(statistics.median(cpu), 4),
            "loss_first": round(losses[0], 5),
            "loss_last": round(losses[-1], 5),
            "loss_differs_by": float(f"{max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)):.2g}"),
        }
        if not row["loss_differs_by"] <= tolerance:  # also where it is NaN
            row["error"] = f"losses are not those of {names[0]}"
        for other in walls:
            if (is_peer(other) or other == "zero3") and not other.endswith(COMPILED):
                ratios = [b / a for a, b in zip(wall, walls[other], strict=True)]  # pair by pair, round by round
                row[f"vs_{other}"] = round(statistics.median(ratios), 3)
        if name.endswith(COMPILED) and (eager := cpus.get(name.removesuffix(COMPILED))):
            row["cpu_vs_eager"] = round(statistics.median(a / b for a, b in zip(cpu, eager, strict=True)), 3)
        if memory:
            row["peak_mib"] = round(launch(peak, world, name, case))
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="micro-batch:precision; default: " + " ".join(CASES))
    parser.add_argument("--sides", help=f"default: {SIDES}; losses are compared with those of the first")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--one-rank", action="store_true", help="the engine against the bare module")
    parser.add_argument("--tiny", action="store_true", help="a model of 30 k parameters: that all of it runs")
    args = parser.parse_args()
    if args.tiny:
        MODEL.update(TINY)
    ranks = 1 if args.one_rank else args.ranks
    asked = (args.sides or (ONE_RANK if args.one_rank else SIDES)).split(",")
    print(f"{date.today()}, {os.cpu_count()} CPU cores, torch {torch.__version__}")
    skipped = {side: why for side in asked if (why := why_not(side)) is not None}
    for side, why in skipped.items():
        print(json.dumps({"side": side, "skipped": why}), flush=True)
    rows = []
    for case in args.case or CASES:
        rows += report(case, [s for s in asked if s not in skipped], args.rounds, ranks, memory=not args.no_memory)
    print(table(rows))
    if wrong := [f"{row['side']} ({row['case']})" for row in rows if "error" in row]:
        sys.exit(f"losses differ: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
