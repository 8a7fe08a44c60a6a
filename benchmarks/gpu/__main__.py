"""The command of ``make gpu-check``.

    python -m benchmarks.gpu                                # all parts, the most worth first, in 520 s
    python -m benchmarks.gpu --only rates,7b --budget 540   # some of them, in one call of their own
    python -m benchmarks.gpu --rest FOLDER/results.jsonl    # what an earlier call had no time for
    python -m benchmarks.gpu --tiny                         # on a CPU, in seconds: that it runs at all

Parts are the main job (``job``), the Trainer under ZeRO beside the Trainer alone (``trainer``), whether all stages and
rows end with the same bits (``bits``, also while streams are late), both also on two ranks that share the GPU
(``ranks``), the tests marked ``gpu``, the rates of compute, memory, link and disk, torch's ``sanitizer``, and rows: one
way to train one size of a GPT, each in a fresh process, so that its memory and its crash are its own. Where they fit
side by side, the bare module and FSDP2 stay in their processes and take turns with each row on the same batches. A part
that the rest of the budget does not hold is listed as not run; one that fails is a line with its error.

The folder gets ``results.jsonl`` (a line for each part), ``table.md``, ``job.txt``, ``tests.txt`` and ``traces-*.tar``:
a timeline for each row, to be opened in Perfetto or chrome://tracing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import Check
from benchmarks.gpu.output import Output
from benchmarks.gpu.plan import Part, parts, tiny_parts

BUDGET_S = 520.0


def chosen(args: argparse.Namespace) -> list[Part]:
    """The parts that were asked for, by kind, size, side or name."""
    all_parts = tiny_parts() if args.tiny else parts(args.tests)
    wanted = {word for word in (args.only or "").split(",") if word}

    def words(part: Part) -> set[str]:
        ranks = ["ranks"] if part.fields.get("ranks", 1) > 1 else []
        return {part.kind, part.name, *ranks, *(str(value) for value in part.fields.values())}

    # The machine and the rates cost little, and bounds are computed from them.
    found = [p for p in all_parts if not wanted or p.kind == "rates" or wanted & words(p)]
    left = {record["name"] for record in earlier(args) if record["status"] == "not run"}
    return [p for p in found if p.name in left] if args.rest else found


def earlier(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What the call has found whose rest this one takes."""
    return [json.loads(line) for line in args.rest.read_text().splitlines()] if args.rest else []


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything (520)")
    parser.add_argument("--tests", type=float, default=60.0, help="seconds of them for the tests marked gpu (60)")
    parser.add_argument("--only", help="kinds, sizes, sides or names of parts, with commas: tests,1b,zero3+cpu")
    parser.add_argument("--rest", type=Path, help="results.jsonl of a call, of which this one runs what that did not")
    parser.add_argument("--host-gib", type=int, default=0, help="host memory for offload, where free memory tells less")
    parser.add_argument("--out", type=Path, help="folder for what is found ($OUT, or outputs/gpu)")
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on a local disk")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of --tiny")
    parser.add_argument("--break-row", help=argparse.SUPPRESS)  # of tests: this row raises
    args = parser.parse_args(arguments)
    args.device = args.device or ("cpu" if args.tiny else "cuda")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    out = args.out or Path(os.environ.get("OUT") or "outputs/gpu")
    folder = tempfile.mkdtemp(prefix="lightning_zero_gpu_", dir=args.nvme)
    try:
        known, todo = earlier(args), chosen(args)  # before the file is written anew
        check = Check(Output(out), args.device, folder, args.budget, broken=args.break_row)
        check.host_gib = args.host_gib
        check.compare_with(known)
        check.run(todo)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print((out / "table.md").read_text())
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
