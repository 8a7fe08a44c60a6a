"""``python -m tests.field [NAME ...]``: train published packages (default: all) under DDP and these strategies.

Each rank's losses of every step are compared with DDP's. A cell is the largest difference, relative to the loss of
the first step. It may be 1e-5: sums over ranks and buckets are made in another order than DDP's, and Adam's first steps
divide a gradient by its own size, which makes more of a rounding. Ends with 1 where a cell is larger, or a run fails.
A package that cannot be installed is listed as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.field.support import RANKS, STEPS

ROOT = Path(__file__).parents[2]
REFERENCE = "ddp"
STRATEGIES = ("zero1", "zero3", "zero3_offload")
TOLERANCE = 1e-5
# The module in this folder, and what pip installs for it.
PACKAGES = {
    "gluonts": "gluonts[torch]",
    "pytorch_forecasting": "pytorch-forecasting",
    "darts": "darts[torch]",
    "chemprop": "chemprop",
    "deeptab": "deeptab",
    "pina": "pina-mathlab",
    "ts3l": "ts3l",
    "sheeprl": "sheeprl",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.field", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PACKAGES)}")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-field", help="made if it is missing")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "field", help="losses and output of each run")
    asked = parser.parse_args()
    if not (asked.venv / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", asked.venv], check=True)
    print(f"| package | {REFERENCE}: first to last loss, by rank | {' | '.join(STRATEGIES)} |")
    print("|---" * (2 + len(STRATEGIES)) + "|")
    passed = True
    for name in asked.names or PACKAGES:
        cells, good = try_package(asked.venv / "bin" / "python", name, asked.out / name)
        passed = passed and good
        print(f"| {' | '.join(cells)} |", flush=True)
    return int(not passed)


def try_package(python: Path, name: str, folder: Path) -> tuple[list[str], bool]:
    """The cells of its line, and whether nothing failed."""
    version = install(python, PACKAGES[name])
    if version is None:
        return [name, "NOT RUN: it cannot be installed (above)", *["not run"] * len(STRATEGIES)], True
    shutil.rmtree(folder, ignore_errors=True)
    command = [python, "-m", f"tests.field.{name}", folder, REFERENCE, *STRATEGIES]
    folder.mkdir(parents=True)
    with (folder / "output.txt").open("w") as output:
        subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output)
    expected, *found = (losses(folder / strategy) for strategy in (REFERENCE, *STRATEGIES))
    title = f"{PACKAGES[name]} {version}"
    if isinstance(expected, str):
        return [title, f"FAILED: {expected}", *["nothing to compare with"] * len(STRATEGIES)], False
    outcomes = [compare(expected, each) for each in found]
    of_ddp = ", ".join(f"{rank[0]:.6f} to {rank[-1]:.6f}" for rank in expected)
    return [title, of_ddp, *(cell for cell, _ in outcomes)], all(good for _, good in outcomes)


TORCH = "torch==2.13.0"  # an exact version, for which a CPU build is found where a range would find the CUDA build


def install(python: Path, package: str) -> str | None:
    """The version of ``package``, which is installed if it is missing; None if it cannot be."""
    ask = [python, "-c", f"from importlib.metadata import version; print(version({package.partition('[')[0]!r}))"]
    if subprocess.run(ask, capture_output=True).returncode:
        # With torch and this package each time, so that no package brings another build or version of theirs.
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, TORCH, "-e", ".", package], cwd=ROOT, stdout=sys.stderr).returncode:
            return None
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()


def losses(folder: Path) -> list[list[float]] | str:
    """Each rank's losses of every step, or what is wrong with the run."""
    found = []
    for rank in range(RANKS):
        if not (folder / f"done-{rank}").exists():
            output = folder / f"output-{rank}.txt"
            lines = output.read_text().strip().splitlines() if output.exists() else []
            return f"rank {rank}: {lines[-1] if lines else 'no output'} ({output})"
        records = [json.loads(line) for line in (folder / f"losses-{rank}.jsonl").read_text().splitlines()]
        found.append([record["loss"] for record in records])
        if len(records) != STEPS:
            return f"rank {rank} took {len(records)} steps, expected {STEPS}"
    return found


def compare(expected: list[list[float]], found: list[list[float]] | str) -> tuple[str, bool]:
    if isinstance(found, str):
        return f"FAILED: {found}", False
    differences = [
        abs(mine - ddp) / abs(rank[0])
        for rank, ours in zip(expected, found, strict=True)
        for ddp, mine in zip(rank, ours, strict=True)
    ]
    good = all(difference <= TOLERANCE for difference in differences)  # false for NaN
    return f"{'' if good else 'DIFFERS: '}{max(differences):.1e}", good


if __name__ == "__main__":
    sys.exit(main())
