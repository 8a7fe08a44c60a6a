"""Show a run as one self-contained page of HTML, in the browser's light or dark theme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lightning_zero.planning.choose import human_bytes

SPEEDS = ("tokens_per_s", "samples_per_s", "steps_per_s", "tflops_per_s", "mfu")  # of ZeroMonitor

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2230; --faint: #5b6577; --line: #d5d9e2; --code: #f5f6f9; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #14171e; --ink: #e4e7ee; --faint: #98a1b3; --line: #363c49; --code: #1c2029; } }
body { margin: 0 auto; padding: 20px 24px; max-width: 1150px; background: var(--ground); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0; } h2 { font-size: 15px; margin: 26px 0 6px; } p { margin: 2px 0; color: var(--faint); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 20px 3px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: normal; } td { overflow-wrap: anywhere; } td:first-child { white-space: nowrap; }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; background: var(--code); padding: 8px 12px; }
svg { width: 100%; height: auto; margin-top: 16px; } a { color: inherit; }
"""


def page_html(name: str, results: Mapping[str, Any], svg: str, timeline: str | None) -> str:
    """Return the HTML page of the run ``name``. ``svg``: its picture. ``timeline``: address of its timeline page."""
    numbers = {**results["last"], **(results["metrics"] or {}), **{n: results[n] for n in SPEEDS if n in results}}
    facts = [(what, value if isinstance(value, str) else f"{value:,}") for what, value in results["setup"].items()]
    facts += [("duration", f"{results['duration_s']:,.1f} s"), ("steps", f"{results['steps']:,}")]
    facts += [(key, f"{value:,.5g}") for key, value in numbers.items()]
    facts += [(key, results[key]) for key in ("checkpoint", "best_checkpoint", "command", "commit") if results[key]]
    facts += [("versions", ", ".join(f"{what} {version}" for what, version in results["versions"].items()))]
    held = [tuple(_size(value) for value in row.values()) for row in results["bytes"]]
    waits = [(what, human_seconds(seconds)) for what, seconds in results["wait_s_per_step"].items()]
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = [
        ("The run", (), facts),
        ("Bytes of rank 0", ("role", "tier", "planned", "measured"), held),
        ("What compute stood still for in a step", (), waits),
    ]
    link = f'<p><a href="{escape(timeline)}">What the ranks did in some steps: the timeline</a></p>' if timeline else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(name)}</h1><p>{escape(results['task'])}: {escape(results['status'])}</p>{svg}{link}"
        + "".join(f"<h2>{title}</h2>{_table(head, rows)}" for title, head, rows in tables if rows)
        + (f"<h2>Next</h2><pre>{escape(results['next'])}</pre>" if results["next"] else "")
        + "</body></html>\n"
    )


def human_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _size(value: str | int | None) -> str:
    return human_bytes(value) if isinstance(value, int) else value or "-"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [("th", head)] * bool(head) + [("td", row) for row in rows]
    cells = ("".join(f"<{tag}>{escape(text)}</{tag}>" for text in row) for tag, row in lines)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
