"""Show two runs side by side, or list the runs of a folder: ``python -m lightning_zero report``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from types import NoneType
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from lightning_zero.planning.choose import human_bytes
from lightning_zero.report.figure import Bars, can_draw, draw_runs, own_metrics
from lightning_zero.report.page import MEANING, SPEEDS, Html, Table, html_page, human_seconds, link
from lightning_zero.report.results import (
    CURVES,
    METRICS,
    PAGE,
    PROCESS,
    RESULTS,
    Series,
    held_and_waits,
    lines_in,
    lines_of_csv,
    series_of,
    write_whole,
)
from lightning_zero.settings import ConfigError

INDEX = "index.html"
# What Lightning's ThroughputMonitor and DeviceStatsMonitor log. If two are logged for one metric, the last one counts.
THROUGHPUT = {f"train/{each}samples_per_sec": "zero/samples_per_s" for each in ("device/", "")}
THROUGHPUT |= {f"train/{each}items_per_sec": "zero/tokens_per_s" for each in ("device/", "")}
TIME, DEVICE_PEAK = "train/time", "DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.peak"
Rows = dict[str, list[float | None]]  # values of both runs; None: not measured


class Run(NamedTuple):
    folder: Path
    series: Series
    results: dict[str, Any]  # empty: it left none

    def link(self, name: str, page: Path) -> Html:
        """Return a link from ``page`` to the run's report, or to the run's folder if there is no report."""
        report = self.folder / PAGE
        return link(name, os.path.relpath(report if report.is_file() else self.folder, page.parent))

    def speeds(self) -> dict[str, float | None]:
        """Return the median of each speed, None for an unknown one. The first value of a speed is left out, because the
        first steps also wait for setup."""
        pairs = {name: self.series[f"zero/{name}"] for name in SPEEDS if f"zero/{name}" in self.series}
        return defaultdict(NoneType, {name: median(v for _, v in own[1:] or own) for name, own in pairs.items()})

    def times(self) -> dict[str, float | None]:
        rate = self.speeds()["steps_per_s"]
        waits = self.results.get("wait_s_per_step") or held_and_waits(self.series)["wait_s_per_step"]
        of_step = {"total": 1 / rate} if rate else {}
        return _known({f"waiting for {kind}": seconds for kind, seconds in waits.items()}, of_step)

    def memory(self) -> dict[str, float | None]:
        rows, peak = self.results.get("bytes", ()), self.series.get(DEVICE_PEAK)
        held = {f"{row['role']}, {row['tier']}": row["most"] or row["measured"] for row in rows}
        held = held or {name.replace("/", ", "): size for name, size in held_and_waits(self.series)["bytes"].items()}
        return _known(held, {"peak of a step, device": peak[-1][1]} if peak else {})

    def settings(self) -> dict[str, str]:
        """Return the run's Hydra settings and package versions, as text by dotted key; {} without Hydra's file."""
        file, versions = self.folder / ".hydra" / "config.yaml", {"version": self.results.get("versions", {})}
        node: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False) if file.is_file() else {}
        return dict(_flat(node | versions)) if node else {}


def _known(found: Mapping[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return ``found`` and ``more`` in one mapping. Missing keys have the value 0, or None if ``found`` is empty."""
    return defaultdict(int if found else NoneType, more | {**found})


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(node, dict):
        yield path, str(node)
        return
    for key, inner in node.items():
        yield from _flat(inner, f"{path}.{key}" if path else str(key))


def load(folder: Path) -> Run:
    """Read what a run wrote into ``folder``. A missing or unreadable file counts as empty."""
    series = series_of([*lines_in(folder)] or lines_of_csv(folder))
    series |= {name: series[theirs] for theirs, name in THROUGHPUT.items() if theirs in series}
    times = pairwise(series.get(TIME, ()))
    rates = [(step, (step - before) / (now - since)) for (before, since), (step, now) in times if now > since]
    series |= {"zero/steps_per_s": rates} if rates else {}
    found = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / RESULTS).read_text())
    return Run(folder, series, found if isinstance(found, dict) and "setup" in found else {})


# -- two runs ---------------------------------------------------------------------------------------------------------


def compare(a: Path, b: Path, out: Path) -> None:
    """Write to ``out`` a page that compares the runs in the folders ``a`` and ``b``, and print the page's numbers."""
    runs = _pair(a, b)
    groups: list[tuple[str, Rows, Callable[[float], str]]] = [
        ("step time", _rows(runs, Run.times), human_seconds),
        ("speed", _rows(runs, Run.speeds), "{:,.5g}".format),
        ("memory of a rank", _rows(runs, Run.memory), lambda size: human_bytes(int(size))),
    ]
    first, second = runs.values()
    settings = [first.settings(), second.settings()]
    both = [(key, *(own.get(key, "-") for own in settings)) for key in dict.fromkeys(chain(*settings)) if all(settings)]
    numbers = [_numbers(what, *row, text) for what, rows, text in groups for row in rows.items()]
    head = ("", *(f"last value, {name}" for name in runs), "largest difference", "at step")
    tables: list[Table] = [
        ("Numbers", ("", *runs, "second / first"), numbers),
        ("Metrics", head, [*_metrics(first, second)]),
        ("Differences in the configuration", ("", *runs), [row for row in both if row[1] != row[2]]),
    ]
    explained = [(*row, MEANING.get(re.sub(r"^.*?: (waiting for )?|, .*", "", row[0]), "")) for row in numbers]
    of_page = [("Numbers", (*tables[0][1], ""), explained), *tables[1:]]
    bars: list[Bars] = []
    for title, rows, text in (groups[0], groups[2]):
        shown = {row: values for row, values in rows.items() if not row.startswith(PROCESS)}  # which hides all others
        bars.append((title, [*shown], {name: [v[at] for v in shown.values()] for at, name in enumerate(runs)}, text))
    svg = draw_runs({name: run.series for name, run in runs.items()}, bars) if can_draw() else ""
    links = ", ".join(run.link(name, out) for name, run in runs.items())
    lacks = "" if all(settings) else "The configurations are not compared: one run has left no .hydra/config.yaml."
    write_whole(out, html_page(" and ".join(runs), f"<p>{links}</p><div>{svg}</div>", of_page, f"<p>{lacks}</p>"))
    for title, columns, lines in tables:
        print(*([f"{title}:", *_aligned([columns, *lines]), ""] if lines else [lacks] if lacks else []), sep="\n")
    print(f"report: {os.path.relpath(out)}")


def _pair(a: Path, b: Path) -> dict[str, Run]:
    """Return the runs in ``a`` and ``b``, by their paths relative to the common parent folder. Raise ConfigError if
    ``a`` is ``b``, or if a run has logged nothing."""
    above = os.path.commonpath([a.resolve(), b.resolve()])
    runs = {os.path.relpath(folder.resolve(), above): load(folder) for folder in (a, b)}
    for run in runs.values():
        if not run.series or len(runs) < 2:
            got = "twice" if run.series else "without one"
            raise ConfigError(
                f"report compare: expected folders of two runs, each with {CURVES}, or {METRICS} of a CSVLogger, got "
                f"{str(run.folder)!r} {got}. Give two other folders."
            )
    return runs


def _rows(runs: Mapping[str, Run], of: Callable[[Run], dict[str, float | None]]) -> Rows:
    found = [of(run) for run in runs.values()]
    rows = {row: [own[row] for own in found] for row in dict.fromkeys(chain(*found))}
    return {row: values for row, values in rows.items() if any(values)}


def _numbers(what: str, row: str, values: Sequence[float | None], text: Callable[[float], str]) -> Sequence[str]:
    first, second = values
    ratio = f"{second / first:.3g}" if first and second else ""
    return f"{what}: {row}", *("not measured" if value is None else text(value) for value in values), ratio


def _metrics(*runs: Run) -> Iterator[Sequence[str]]:
    """Yield a row of text for each metric: its name, its last value in each run, the largest difference between the
    runs, and the step of this difference. A NaN in only one run counts as the largest difference."""
    both = [{name: dict(pairs) for name, pairs in own_metrics(run.series).items()} for run in runs]
    for name in dict.fromkeys(chain(*both)):
        a, b = (own.get(name, {}) for own in both)
        steps = sorted(a.keys() & b.keys())
        apart = {step: 0.0 if str(a[step]) == str(b[step]) else abs(a[step] - b[step]) for step in steps}
        at = max(apart, key=lambda step: (math.isnan(apart[step]), apart[step]), default=None)
        most = ("", "") if at is None else (f"{apart[at]:.3g}", str(at))
        yield name, *(f"{own[max(own)]:.6g}" if own else "-" for own in (a, b)), *most


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


# -- the runs of a folder ---------------------------------------------------------------------------------------------


def index(folder: Path) -> None:
    """Write ``index.html`` into ``folder``: a list of its runs, the newest first, with links to their reports."""
    if not folder.is_dir():
        raise ConfigError(f"report index: expected a folder of runs, got {str(folder)!r}. Give another folder.")
    runs = [load(Path(place)) for place in _places(folder)]
    rows = [_line(run, folder) for run in sorted(runs, key=lambda run: run.folder.stat().st_mtime, reverse=True)]
    head = ("run", "ended", "model", "stage", "offload", "steps", "last loss", "tokens per second")
    write_whole(folder / INDEX, html_page(f"Runs in {folder.resolve().name}", "", [(f"{len(rows)} runs", head, rows)]))
    print(f"index: {os.path.relpath(folder / INDEX)} ({len(rows)} runs)")


def _places(folder: Path) -> Iterator[str]:
    for place, inside, files in os.walk(folder):
        if ".hydra" in inside or {RESULTS, CURVES, METRICS} & {*files}:
            inside.clear()
            yield place


def _line(run: Run, folder: Path) -> Sequence[str]:
    setup, model = run.results.get("setup", {}), run.results.get("configuration", {}).get("model", "-")
    last = {name: pairs[-1] for name, pairs in own_metrics(run.series).items() if "loss" in name}
    speed = run.speeds()["tokens_per_s"]
    steps = run.results.get("steps") or max((step + 1 for step, _ in last.values()), default="-")
    return (
        run.link(os.path.relpath(run.folder, folder), folder / INDEX),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.folder.stat().st_mtime)),
        model.partition("(")[0],
        *(str(setup.get(key, "-")) for key in ("stage", "offload")),
        str(steps),
        next((f"{value:.4g} ({name})" for name, (_, value) in last.items()), "-"),
        f"{speed:,.0f}" if speed else "-",
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("lightning-zero report", description="Write a page about two runs, or many.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    beside = commands.add_parser("compare", help="two runs side by side, each by its folder")
    beside.add_argument("a", type=Path)
    beside.add_argument("b", type=Path)
    beside.add_argument("--out", type=Path, default=Path("compare.html"), help="default: %(default)s")
    beside.set_defaults(write=compare)
    listed = commands.add_parser("index", help="a list of the runs in a folder, with links to their reports")
    listed.add_argument("folder", nargs="?", type=Path, default=Path("outputs"), help="default: %(default)s")
    listed.set_defaults(write=index)
    given = vars(parser.parse_args(arguments))
    try:
        given.pop("write")(**given)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
