"""``make bench-whole``: the step of an optimizer that needs whole tensors, replicated and divided among owners.

A stack of blocks of matrices, as a GPT has them, is stepped by ``torch.optim.Muon`` at stage 0, where every rank does
all of the work, and at stages 1 and 3, where each rank steps the tensors that it owns. What is counted is the CPU time
of a rank's process in ``step()``, its messages' threads included: cores are not shared fairly on a small machine, and
CPU seconds do not depend on who waits for whom. The table has the least of several rounds, of the rank that needs most.

    python -m benchmarks.bench_whole                     # 1, 2 and 4 ranks
    python -m benchmarks.bench_whole --ranks 4 --check   # fails where a rank needs more than 0.35 of it

``--check`` is for four ranks: a quarter of the work, and a tenth of all of it for the way there and back.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from benchmarks.bench import launch, start_process, stop_process, table

FLOOR = 0.35  # of the replicated step's CPU seconds, on each of four ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.qkv(x).chunk(3, -1)[0])
        result: Tensor = x + self.down(self.up(x))
        return result


def cpu_seconds(rank: int, world: int, store: str, stage: int, width: int, depth: int, rounds: int, queue: Any) -> None:
    """Put the least CPU seconds of a step of each rank into ``queue``."""
    start_process(rank, world, store)
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(width) for _ in range(depth)))
    settings: dict[str, Any] = {"device": "cpu", "reduce_bucket_bytes": 1 << 25}
    engine = lightning_zero.shard(module, stage=stage, **settings)
    optimizer = torch.optim.Muon(module.parameters(), lr=0.001)
    engine.add_optimizer(optimizer)
    engine.passes.backward(module(torch.randn(4, width)).square().mean())
    optimizer.step()
    found = []
    for _ in range(rounds):
        dist.barrier()
        began = time.process_time()
        optimizer.step()
        engine.passes.wait_for_all()
        found.append(time.process_time() - began)
    least = torch.tensor([min(found)])
    parts = [torch.empty_like(least) for _ in range(world)]
    dist.all_gather(parts, least)
    if rank == 0:
        queue.put([part.item() for part in parts])
    engine.release()
    stop_process(world)


def measure(ranks: int, stage: int, width: int, depth: int, rounds: int) -> list[float]:
    """CPU seconds of a step, of each rank."""
    found: list[float] = launch(cpu_seconds, ranks, stage, width, depth, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help=f"fail above {FLOOR} of the replicated step on 4 ranks")
    given = parser.parse_args()
    rows, worst = [], 0.0
    for ranks in given.ranks:
        sizes = given.width, given.depth, given.rounds
        replicated = measure(ranks, 0, *sizes)
        for stage in given.stages:
            divided = measure(ranks, stage, *sizes)
            part = max(divided) / min(replicated)
            rows.append(
                {
                    "ranks": ranks,
                    "stage": stage,
                    "replicated, ms": f"{1000 * min(replicated):.1f}",
                    "divided, ms": f"{1000 * max(divided):.1f}",
                    "part": f"{part:.2f}",
                }
            )
            worst = max(worst, part if ranks == 4 else 0.0)
    print(table(rows))
    if given.check and worst > FLOOR:
        sys.exit(f"a rank of 4 needs {worst:.2f} of the replicated step's CPU seconds; {FLOOR} is the floor")


if __name__ == "__main__":
    main()
