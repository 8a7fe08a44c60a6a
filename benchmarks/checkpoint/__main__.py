"""``make bench-checkpoint``: saves and loads of all sides beside each other, in one run.

Each side takes its turn in fresh processes, and in each round all sides do, so that a machine whose speed drifts treats
them alike. Seconds are those of the slowest rank, medians over the rounds; memory is that of the rank with the most.
What was saved is loaded after further steps and compared with what was saved, bit by bit: a save that is not right has
no figures, and the exit status is 1.

    python -m benchmarks.checkpoint                            # the tables of docs/benchmarks.md
    python -m benchmarks.checkpoint --ranks 2 --rounds 5 --sides full,dcp.save
    python -m benchmarks.checkpoint --only hugging-face        # folders of Hugging Face, in and out

| column | meaning |
|---|---|
| stall s | the call, and what steps wait for copies of what they change |
| durable s | from the call until the checkpoint has its name and is on the disk |
| x DCP | of ``durable s`` of ``dcp.save``, or in the background of ``dcp.async_save``; median of the rounds' ratios |
| first s | the stall of the first save of a process |
| of disk | bytes per second of the file over those of plain large writes beside it, by as many processes |
| MiB, B/param | memory beyond what was held before, of the rank that took most; per parameter of the model |
| steps beside | mean speed of the steps that begin and end beside a write and its copies, of that without one |
| unit + 64 MiB | what a save or load is to take at most: the largest unit in fp32, and 64 MiB |
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench
from benchmarks.checkpoint import hugging_face
from benchmarks.checkpoint.measure import SIDES, Job, turn
from benchmarks.checkpoint.ranks import Turn, take_turn
from benchmarks.checkpoint.tables import SAVE_COLUMNS, compare, markdown, row_of

SIZES = {
    "98m": {"vocab_size": 8192, "n_layer": 12, "n_head": 12, "d_model": 768, "block_size": 64},  # 97.7 M parameters
    "34m": {"vocab_size": 8192, "n_layer": 8, "n_head": 8, "d_model": 512, "block_size": 64},
    "tiny": bench.TINY,
}
PARTS = ("saves", "hugging-face")


def saves(args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Rows of all sides with each number of ranks."""
    turns: dict[tuple[int, str], list[Turn]] = defaultdict(list)
    rows = []
    for ranks in args.ranks:
        for number in range(args.rounds):
            # Each round begins with another side.
            for side in (args.sides[(n + number) % len(args.sides)] for n in range(len(args.sides))):
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    job = Job(side, own, 1 + args.saves, args.steps)
                    turns[ranks, side].append(take_turn(turn, ranks, job, looked_for=job.paths))
                print(json.dumps({"turn": number} | row_of(turns[ranks, side][-1:])), file=sys.stderr, flush=True)
        own_rows = [row_of(turns[ranks, side]) for side in args.sides]
        compare(own_rows, turns)
        for row in own_rows:
            print(json.dumps(row), flush=True)
        rows += own_rows
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="98m", help="of the model (98m: 97.7 M parameters)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--sides", type=lambda text: text.split(";"), default=list(SIDES), help=";".join(SIDES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=1, help="timed ones in a turn, behind one that warms up")
    parser.add_argument("--steps", type=int, default=12, help="with nothing beside them; fewer show less of their peak")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that is to be measured")
    parser.add_argument("--only", choices=PARTS, help="default: both")
    parser.add_argument("--out", type=Path, help="a file for the lines of JSON")
    args = parser.parse_args(arguments)
    if unknown := [side for side in args.sides if side not in SIDES]:
        parser.error(f"--sides: expected some of {';'.join(SIDES)}, got {';'.join(unknown)}")
    bench.MODEL = SIZES[args.size]
    load = os.getloadavg()[0]
    print(f"{date.today()}, {os.cpu_count()} CPU cores, load {load:.1f}, torch {torch.__version__}, {args.size}, gloo")
    rows: list[dict[str, Any]] = []
    texts = []
    if args.only != "hugging-face":
        rows += (found := saves(args, args.folder))
        texts.append(markdown(found, SAVE_COLUMNS))
    if args.only != "saves":
        rows += (found := hugging_face.rows(args.ranks, args.rounds, args.folder, tiny=args.size == "tiny"))
        texts.append(markdown(found, hugging_face.COLUMNS))
    print("\n" + "\n\n".join(texts))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if wrong := [f"{row['side']} ({row['ranks']} ranks): {row['error']}" for row in rows if "error" in row]:
        sys.exit("wrong: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
