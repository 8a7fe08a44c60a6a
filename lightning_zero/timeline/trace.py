"""Write a timeline in Chrome's trace format, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_zero.timeline.lanes import RankLanes


def trace_json(ranks: Sequence[RankLanes], origin: float) -> str:
    """Return the document. ``origin``: the moment that becomes 0."""
    events = [event for lanes in ranks for event in _events(lanes, origin)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _events(lanes: RankLanes, origin: float) -> Iterator[dict[str, Any]]:
    pid = lanes.rank
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    tid = 0
    for lane, rows in lanes.rows.items():
        for number, row in enumerate(rows):
            tid += 1
            name = lane if number == 0 else f"{lane} {number + 1}"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            for span in row:
                event = {
                    "ph": "X",
                    "name": f"waits: {span.what}" if span.waits_for else span.what,
                    "cat": f"exposed {span.waits_for}" if span.waits_for else lane,
                    "pid": pid,
                    "tid": tid,
                    "ts": round((span.begin - origin) * 1e6, 3),
                    "dur": round((span.end - span.begin) * 1e6, 3),
                }
                yield event | ({"cname": "terrible"} if span.waits_for else {})
    for end in lanes.ends:
        yield {"ph": "i", "name": "step", "s": "p", "pid": pid, "tid": 1, "ts": round((end - origin) * 1e6, 3)}
