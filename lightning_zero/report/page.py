"""Show runs as self-contained pages of HTML, in the browser's light or dark theme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from lightning_zero.planning.choose import human_bytes

SPEEDS = ("tokens_per_s", "samples_per_s", "steps_per_s", "tflops_per_s", "mfu")  # of ZeroMonitor

MOST_RANKS = 32  # of the table
MEANING = {  # of the words of the tables
    "gather": "ranks send each other their shards of a unit's parameters before the unit computes",
    "reduce": "ranks sum their gradients, and each rank gets its shard of the sums",
    "agree": "ranks exchange small messages, such as norms of gradients and signals",
    "transfer": "copies between host memory and the device",
    "disk": "reads and writes of files",
    "step": "optimizer steps on the host",
    "sequence": "ranks that divide a sequence exchange attention heads",
    "compute_param": "parameters in the dtype of the forward pass: this rank's shards, below stage 3 whole parameters",
    "master_param": "this rank's shards of the parameters in the dtype that the optimizer uses",
    "grad": "gradients after their reduction",
    "optim_state": "moments and other tensors of the optimizer",
    "peak of a step": "maximum during a step, with gathered parameters, gradients before reduction and activations",
    "whole process": "peak of resident memory (RSS), with Python, torch and the data",
    "staging": "buffers for copies between the device, host memory and files",
    "total": "median over the run, without the first steps",
    "tokens_per_s": "all ranks together",
    "samples_per_s": "all ranks together",
    "tflops_per_s": "10^12 floating-point operations per second, on one device",
    "mfu": "model FLOPs utilization: the share of the peak FLOP/s of a device",
}

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2230; --faint: #5b6577; --line: #d5d9e2; --code: #f5f6f9; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #14171e; --ink: #e4e7ee; --faint: #98a1b3; --line: #363c49; --code: #1c2029; } }
body { margin: 0 auto; padding: 20px 24px; max-width: 1150px; background: var(--ground); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0; } h2 { font-size: 15px; margin: 26px 0 6px; } p { margin: 2px 0; color: var(--faint); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 20px 3px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: normal; } td:first-child { white-space: nowrap; }
td { min-width: 5em; } td:last-child { overflow-wrap: anywhere; } td:nth-child(n+3):last-child { min-width: 10em; }
div { overflow-x: auto; } @media (max-width: 600px) { td:first-child { white-space: normal; } }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; background: var(--code); padding: 8px 12px; }
svg { width: 100%; min-width: 640px; height: auto; margin-top: 16px; } a { color: inherit; }
"""


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, head, rows


class Html(str):
    """Text that is HTML, and is inserted into pages without escaping."""


def link(text: str, address: str) -> Html:
    return Html(f'<a href="{escape(quote(address))}">{escape(text)}</a>')


def html_page(title: str, top: str, tables: Iterable[Table], end: str = "") -> str:
    """Return an HTML page with the non-empty ``tables`` between ``top`` and ``end``. ``top`` and ``end`` are HTML;
    titles and cells are text."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{top}"
        + "".join(f"<h2>{escape(title)}</h2>{_table(head, rows)}" for title, head, rows in tables if rows)
        + f"{end}</body></html>\n"
    )


def page_html(name: str, results: Mapping[str, Any], svg: str, timeline: str | None) -> str:
    """Return the HTML page of the run ``name``. ``svg``: its picture. ``timeline``: address of its timeline page."""
    numbers = {**results["last"], **(results["metrics"] or {}), **{n: results[n] for n in SPEEDS if n in results}}
    facts = [(what, _text(value)) for what, value in [*results["setup"].items(), *results["seen"].items()]]
    facts += [("duration", f"{results['duration_s']:,.1f} s"), ("steps", f"{results['steps']:,}")]
    facts += [(key, f"{value:,.5g} ({MEANING.get(key)})".removesuffix(" (None)")) for key, value in numbers.items()]
    facts += [(key, results[key]) for key in ("checkpoint", "best_checkpoint", "command", "commit") if results[key]]
    facts += [("versions", ", ".join(f"{what} {version}" for what, version in results["versions"].items()))]
    held = [(*map(_size, row.values()), MEANING.get(row["role"], "")) for row in results["bytes"]]
    means, most = results["wait_s_per_step"], results["most_wait_s_per_step"]
    waits = [(kind, *map(human_seconds, (mean, most[kind])), MEANING.get(kind, "")) for kind, mean in means.items()]
    ranks = results["ranks"]
    tables: list[Table] = [
        ("Configuration", (), [(what, _text(value)) for what, value in results["configuration"].items()]),
        ("The run", (), facts),
        ("Memory", ("role", "kept on", "planned", "measured on rank 0", "maximum over ranks", ""), held),
        ("Waits of the computation per step", ("", f"mean over {len(ranks)} rank(s)", "maximum over ranks", ""), waits),
        _ranks(ranks, results["setup"].get("ranks", len(ranks))),
    ]
    pictures = f"<p>{link('What the ranks did in some steps: the timeline', timeline)}</p>" if timeline else ""
    top = f"<p>{escape(results['task'])}: {escape(results['status'])}</p><div>{svg}</div>{pictures}"
    end = f"<h2>Next</h2><pre>{escape(results['next'])}</pre>" if results["next"] else ""
    return html_page(name, top, tables, end)


def human_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _ranks(ranks: Sequence[Mapping[str, Any]], world_size: int) -> Table:
    """Return the table of ranks. If there are more than ``MOST_RANKS``, list only the ranks that waited longest, and
    the slowest ranks, which waited least."""
    shown, title = sorted(ranks, key=lambda rank: sum(rank["wait_s_per_step"].values())), "Ranks"
    if len(ranks) > MOST_RANKS:
        shown, title = shown[: MOST_RANKS // 2] + shown[-MOST_RANKS // 2 :], "Ranks that waited least and longest"
    elif len(ranks) < world_size:
        title = f"Rank 0 (of {world_size}: the other ranks sent no numbers, because the run did not end by itself)"
    rows = [
        (
            *(str(rank[key]) for key in ("rank", "host", "device")),
            *map(_size, (sum(rank["bytes"].values()) or None, rank["peak_device"], rank["peak_process"])),
            human_seconds(sum(rank["wait_s_per_step"].values())) if rank["wait_s_per_step"] else "-",
        )
        for rank in sorted(shown, key=lambda rank: rank["rank"])
    ]
    peaks = ("peak of the device", "peak of the process (RSS)")
    return title, ("rank", "host", "device", "between steps", *peaks, "waits per step"), rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _size(value: str | int | None) -> str:
    return human_bytes(value) if isinstance(value, int) else value or "-"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [("th", head)] * bool(head) + [("td", row) for row in rows]
    cells = (
        "".join(f"<{tag}>{text if isinstance(text, Html) else escape(text)}</{tag}>" for text in row)
        for tag, row in lines
    )
    return f"<div><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table></div>"
