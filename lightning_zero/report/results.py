"""Read the metrics that a run logged, from ``curves.jsonl`` or a CSVLogger's ``metrics.csv``. Collect the numbers of a
run, and write ``results.json``, ``results.png`` and ``report.html``. Imports no torch."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_zero.report.figure import can_draw, draw_run
from lightning_zero.report.page import SPEEDS, page_html

CURVES, METRICS = "curves.jsonl", "metrics.csv"
Series = dict[str, list[tuple[int, float]]]  # for each metric pairs (step, value)


def lines_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield each line of ``curves.jsonl`` as a mapping of metrics by name, and ``step``. Skip incomplete lines, which a
    killed process may leave."""
    with contextlib.suppress(OSError):
        for line in (folder / CURVES).read_text().splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def lines_of_csv(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield lines as :func:`lines_in` does, from the newest ``metrics.csv`` of a CSVLogger in ``folder``."""
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
    """Return the bytes by role and tier that ZeroMonitor logged last, and mean waits by kind, in seconds per step."""
    # Without the first pair: the first steps also wait for objects that are made once.
    stood = {name: pairs[1:] or pairs for name, pairs in series.items() if name.startswith("zero/wait_s/")}
    held = {name: pairs[-1][1] for name, pairs in series.items() if name.startswith("zero/bytes/")}
    return {
        "bytes": {name.removeprefix("zero/bytes/"): int(nbytes) for name, nbytes in held.items() if nbytes},
        "wait_s_per_step": {name.split("/")[2]: fmean(value for _, value in pairs) for name, pairs in stood.items()},
    }


RESULTS, PICTURE, PAGE = "results.json", "results.png", "report.html"
PROCESS = "whole process"
Held = tuple[str, str, int | None, int | None]  # role, tier, bytes planned and measured


def measured(series: Series, held: Sequence[Held], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the run's last metrics, speeds, bytes and waits.

    Args:
        held: bytes of rank 0, measured at the end; if empty, the bytes that rank 0 logged are used.
        ranks: the measurements of each rank, rank 0 first; only of rank 0 after an interrupted run.
    """
    last = {name: values[-1][1] for name, values in series.items()}
    own, rows = ranks[0], [*held]
    if not held:
        rows = [(*name.split("/"), None, nbytes) for name, nbytes in own["bytes"].items()]
    rows.append((PROCESS, "host", None, own["peak_process"]))

    def most(role: str, tier: str) -> int | None:
        peaks = "peak_process" if role == PROCESS else "peak_device" if tier == "device" else ""
        of_ranks = [rank["bytes"].get(f"{role}/{tier}") or rank.get(peaks) for rank in ranks]
        return max(filter(None, of_ranks), default=None)

    columns = ("role", "tier", "planned", "measured", "most")
    kinds = {kind: [rank["wait_s_per_step"].get(kind, 0.0) for rank in ranks] for kind in own["wait_s_per_step"]}
    return {
        "last": {name: value for name, value in last.items() if not name.startswith(("zero/", "run/"))},
        **{name: last[f"zero/{name}"] for name in SPEEDS if f"zero/{name}" in last},
        "bytes": [dict(zip(columns, (*row, most(*row[:2])), strict=True)) for row in rows],
        "wait_s_per_step": {kind: fmean(seconds) for kind, seconds in kinds.items()},
        "most_wait_s_per_step": {kind: max(seconds) for kind, seconds in kinds.items()},
        "ranks": list(ranks),
    }


def commit() -> str | None:
    """Return the working directory's commit, with ``-dirty`` if files were changed since; ``None`` without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write(folder: Path, results: dict[str, Any], series: Series, timeline: str | None) -> None:
    """Write results.json; after a fit also report.html and, with matplotlib, results.png. ``timeline``: the folder of a
    timeline that the page links to, or None."""
    write_whole(folder / RESULTS, json.dumps(results, indent=2) + "\n")
    if results["task"] != "fit":
        return
    svg, lacks = "", ""
    if can_draw():
        svg = draw_run(folder / PICTURE, series, results)
    else:
        lacks = f" (without curves, and no {PICTURE}: matplotlib is not installed; pip install 'lightning-zero[plot]')"
    link = None if timeline is None else os.path.relpath(Path(timeline).expanduser() / "timeline.html", folder)
    write_whole(folder / PAGE, page_html(folder.resolve().name, results, svg, link))
    print(f"report: {os.path.relpath(folder / PAGE)}{lacks}", flush=True)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: a crash leaves the old file or the new one."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
