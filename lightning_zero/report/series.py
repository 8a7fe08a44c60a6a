"""Read what a run logged: the lines of ``curves.jsonl``, or of a CSVLogger's ``metrics.csv``. Imports no torch."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

CURVES, METRICS = "curves.jsonl", "metrics.csv"
Series = dict[str, list[tuple[int, float]]]  # for each metric pairs (step, value)


def lines_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each call of a logger, with their step; without a line that a killed process left half."""
    with contextlib.suppress(OSError):
        for line in (folder / CURVES).read_text().splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def lines_of_csv(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the same from the newest file of a CSVLogger in ``folder``."""
    newest = max(folder.rglob(METRICS), key=lambda path: path.stat().st_mtime, default=folder / METRICS)
    with contextlib.suppress(OSError), newest.open(newline="", errors="replace") as file:
        for row in csv.DictReader(file):
            with contextlib.suppress(LookupError, TypeError, ValueError):  # another program's file, or cut off
                yield {key: float(text) for key, text in row.items() if text} | {"step": int(row["step"])}


def series_of(lines: Iterable[dict[str, Any]]) -> Series:
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        for name in line.keys() - {"step", "epoch"}:
            found.setdefault(name, {})[line["step"]] = line[name]
    return {name: sorted(found[name].items()) for name in sorted(found)}


def held_and_waits(series: Series) -> dict[str, dict[str, Any]]:
    """Return the bytes that ZeroMonitor logged last, and the mean of the waits of a step by kind."""
    # Without the first pair: the first steps wait for what is made once.
    stood = {name: pairs[1:] or pairs for name, pairs in series.items() if name.startswith("zero/wait_s/")}
    held = {name: pairs[-1][1] for name, pairs in series.items() if name.startswith("zero/bytes/")}
    return {
        "bytes": {name.removeprefix("zero/bytes/"): int(nbytes) for name, nbytes in held.items() if nbytes},
        "wait_s_per_step": {name.split("/")[2]: fmean(value for _, value in pairs) for name, pairs in stood.items()},
    }
