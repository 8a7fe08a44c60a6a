"""Times the small agreements of a step: in rounds among few ranks, and in one ring of all, by turns.

    python -m benchmarks.bench_agreements                # 8, 16 and 32 processes on this host
    python -m benchmarks.bench_agreements --ranks 8,64

With more processes than cores this counts wakings of processes rather than hops of a network; both fall alike.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.bench import table
from lightning_zero.comm.communicator import Communicator

TURNS, EACH = 5, 20


def measure(rank: int, ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, ranks), rank=rank, world_size=ranks)
    comm = Communicator(dist.group.WORLD, torch.device("cpu"))
    flags, control = torch.zeros(64, dtype=torch.uint8), comm._groups.control  # type: ignore[union-attr]
    sides = {
        "rounds": lambda: comm.max_(flags),
        "ring": lambda: dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=control),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(TURNS + 1):
        for name, act in sides.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(EACH):
                act()
            if turn:  # the first connects
                found[name].append((time.perf_counter() - started) / EACH * 1e3)
    if rank == 0:
        rounds, ring = (statistics.median(found[name]) for name in sides)
        with open(f"{folder}/row", "w") as file:
            file.write(f"{rounds:.2f} {ring:.2f} {ring / rounds:.1f}")
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16,32", help="numbers of processes, with commas")
    rows = []
    for ranks in map(int, parser.parse_args().ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            mp.start_processes(measure, (ranks, store.port, folder), nprocs=ranks, start_method="fork")
            with open(f"{folder}/row") as file:
                found = file.read().split()
            rows.append({"ranks": ranks, **dict(zip(("rounds, ms", "ring, ms", "ratio"), found, strict=True))})
    print(table(rows))


if __name__ == "__main__":
    main()
