"""Figures of all turns, beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.checkpoint.measure import Found, Save
from benchmarks.checkpoint.ranks import Turn, Window

MIB = 1 << 20
PEER, PEER_BEHIND = "dcp.save", "dcp.async_save"  # what a save is compared with, and one in the background
TOLERANCE = 1e-4  # of losses, relative
MARGIN_NBYTES = 64 * MIB  # beside one unit
SAVE_COLUMNS = {
    "ranks": "ranks",
    "side": "side",
    "stall_s": "stall s",
    "durable_s": "durable s",
    "vs_dcp": "x DCP",
    "first_s": "first s",
    "of_disk": "of disk",
    "save_mib": "save, MiB",
    "save_b_per_param": "B/param",
    "step_speed": "steps beside",
    "load_s": "load s",
    "load_vs_dcp": "x DCP load",
    "load_mib": "load, MiB",
    "load_b_per_param": "B/param load",
    "bound_mib": "unit + 64 MiB",
}


def row_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """One side with one number of ranks: medians of its turns' seconds, the most of their memory."""
    first: Found = turns[0].found[0]
    timed = [figure for turn in turns for figure in _saves(turn)[1:]]
    save_nbytes, load_nbytes = (max(_extra(turn, what) for turn in turns) for what in ("save", "load"))
    speeds = [speed for turn in turns if (speed := _step_speed(turn)) is not None]
    row: dict[str, Any] = {
        "ranks": len(turns[0].found),
        "side": first.side,
        "parameters": first.numel,
        "call_s": median(figure["call_s"] for figure in timed),
        "first_s": median(_saves(turn)[0]["stall_s"] for turn in turns),
        **{key: median(figure[key] for figure in timed) for key in ("stall_s", "durable_s", "load_s")},
        "nbytes": first.saves[-1].nbytes,
        "of_disk": median(figure["of_disk"] for figure in timed),
        "disk_mb_per_s": median(figure["disk_mb_per_s"] for figure in timed),
        "save_mib": round(save_nbytes / MIB, 1),
        "save_b_per_param": round(save_nbytes / first.numel, 2),
        "load_mib": round(load_nbytes / MIB, 1),
        "load_b_per_param": round(load_nbytes / first.numel, 2),
        "bound_mib": round((first.unit_nbytes + MARGIN_NBYTES) / MIB, 1),
        "step_s": median(s for turn in turns for s in turn.found[0].step_s),
        "loss": first.losses[-1],
    }
    if first.background:
        row["step_speed"] = median(speeds) if speeds else None
        row["steps_beside"] = sum(len(save.steps) for turn in turns for save in turn.found[0].saves)
    if errors := sorted({save.error for turn in turns for found in turn.found for save in found.saves} - {""}):
        row["error"] = "; ".join(errors)
    return row


def _saves(turn: Turn) -> list[dict[str, float]]:
    """Seconds of each save, of the slowest rank."""
    found: list[dict[str, float]] = []
    for n, save in enumerate(turn.found[0].saves):
        on_ranks: list[Save] = [f.saves[n] for f in turn.found]
        durable_s = max(s.call_s for s in on_ranks)
        if turn.found[0].background:
            durable_s = max(durable_s, turn.durable[save.path] - save.started)
        plain_s = statistics.mean(save.plain_s)
        plain = 12 * turn.found[0].numel / plain_s
        found.append(
            {
                "stall_s": max(s.call_s + s.waited_s for s in on_ranks),
                "call_s": max(s.call_s for s in on_ranks),
                "durable_s": durable_s,
                "load_s": max(s.load_s for s in on_ranks),
                "of_disk": save.nbytes / durable_s / plain,
                "disk_mb_per_s": plain / 1e6,
            }
        )
    return found


def _step_speed(turn: Turn) -> float | None:
    """The speed of steps beside a write over that of steps alone; None: no step has begun and ended beside it.

    The first save of a process is left out: it makes what later ones use again.
    """
    beside = [
        end - start
        for save in turn.found[0].saves[1:]
        for start, end in save.steps
        if end <= turn.durable.get(save.path, 0.0)
    ]
    return statistics.median(turn.found[0].step_s) / statistics.mean(beside) if beside else None


def _extra(turn: Turn, what: str) -> int:
    """The most bytes of a rank beyond what it held before."""
    return max(
        _extra_of_rank(memory, found.windows, what) for memory, found in zip(turn.memory, turn.found, strict=True)
    )


def _extra_of_rank(memory: Any, windows: Iterable[Window], what: str) -> int:
    most, of_steps = 0, 0
    for window in windows:
        if window.what == what:
            most = max(most, memory.peak(window) - memory.before(window.start))
        elif window.what == "steps":
            of_steps = memory.peak(window)
        elif window.what == f"steps beside a {what}":  # beyond what steps need anyway
            most = max(most, memory.peak(window) - of_steps)
    return most


def compare(rows: Sequence[dict[str, Any]], turns: Mapping[tuple[int, str], Sequence[Turn]]) -> None:
    """Add what follows from other rows: times of the peer's seconds, round by round, and whether losses agree."""
    for row in rows:
        ranks, side = row["ranks"], row["side"]
        own = turns[ranks, side]
        peer = PEER_BEHIND if own[0].found[0].background else PEER
        pairs = (("vs_dcp", peer, "durable_s"), ("stall_vs_dcp", peer, "stall_s"), ("load_vs_dcp", PEER, "load_s"))
        for key, other, figure in pairs:
            if (ranks, other) in turns:
                row[key] = median(
                    median(s[figure] for s in _saves(a)[1:]) / median(s[figure] for s in _saves(b)[1:])
                    for a, b in zip(own, turns[ranks, other], strict=True)
                )
        first = next(r for r in rows if r["ranks"] == ranks)
        row["loss_differs_by"] = float(f"{abs(row['loss'] / first['loss'] - 1):.2g}")
        if not row["loss_differs_by"] <= TOLERANCE:  # also where it is NaN
            row["error"] = f"its loss is not that of {first['side']}"


def median(values: Iterable[float]) -> float:
    return float(f"{statistics.median(list(values)):.4g}")


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A row with an error shows that and no figures: what is wrong may well be fast."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        names = [str(row[key]) for key in ("ranks", "side")]
        cells = [_shown(row.get(key)) for key in columns]
        if "error" in row:
            cells = [*names, row["error"], *[""] * (len(columns) - 3)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) and value < 100 else (
        f"{value:.0f}" if isinstance(value, float) else str(value)
    )  # fmt: skip
