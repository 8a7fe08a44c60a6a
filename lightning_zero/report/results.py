"""Collect the numbers of a run, and write ``results.json``, ``results.png`` and ``report.html``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_zero.report.figure import can_draw, draw_run
from lightning_zero.report.page import SPEEDS, page_html
from lightning_zero.report.record import Series

RESULTS, PICTURE, PAGE = "results.json", "results.png", "report.html"
Held = tuple[str, str, int | None, int | None]  # role, tier, bytes planned and measured


def measured(series: Series, held: Sequence[Held]) -> dict[str, Any]:
    """Return the run's speeds, bytes and waits. ``held``: bytes measured at its end; empty: take the logged bytes."""
    last = {name: values[-1][1] for name, values in series.items()}
    speeds = {name: last[f"zero/{name}"] for name in SPEEDS if f"zero/{name}" in last}
    if not held:
        parts = {tuple(name.split("/")[2:]): value for name, value in last.items() if name.startswith("zero/bytes/")}
        held = [(role, tier, None, int(nbytes)) for (role, tier), nbytes in parts.items() if nbytes]
    # Without the first pair: the first steps wait for what is made once.
    stood = {name: pairs[1:] or pairs for name, pairs in series.items() if name.startswith("zero/wait_s/")}
    return {
        "last": {name: value for name, value in last.items() if not name.startswith("zero/")},
        **speeds,
        "bytes": [dict(zip(("role", "tier", "planned", "measured"), row, strict=True)) for row in held],
        "wait_s_per_step": {name.split("/")[2]: fmean(value for _, value in pairs) for name, pairs in stood.items()},
    }


def commit() -> str | None:
    """Return the commit of the working directory, with ``-dirty`` if files differ from it; ``None`` without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write(folder: Path, results: dict[str, Any], series: Series, timeline: str | None) -> None:
    """Write ``results.json``, and after a fit a picture and a page. ``timeline``: folder of a timeline, for a link."""
    _write(folder / RESULTS, json.dumps(results, indent=2) + "\n")
    if results["task"] != "fit":
        return
    svg, lacks = "", ""
    if can_draw():
        svg = draw_run(folder / PICTURE, series, results)
    else:
        lacks = f" (without curves, and no {PICTURE}: matplotlib is not installed; pip install 'lightning-zero[plot]')"
    link = None if timeline is None else os.path.relpath(Path(timeline).expanduser() / "timeline.html", folder)
    _write(folder / PAGE, page_html(folder.resolve().name, results, svg, link))
    print(f"report: {os.path.relpath(folder / PAGE)}{lacks}", flush=True)


def _write(path: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
