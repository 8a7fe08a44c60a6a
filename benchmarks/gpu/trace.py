"""What a timeline of torch's profiler says about the steps in it. Plain JSON; imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STEP = "measured step"  # the range around each step
SYNCS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuCtxSynchronize",
    "cudaMemcpy",  # without Async: it waits
)
BACKWARD = "autograd::engine::evaluate_function"
Interval = tuple[float, float]
Thread = tuple[Any, Any]


def of_trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Waits of the host per step, and what the device did meanwhile. Times in milliseconds per step.

    Copies are exposed while no kernel runs: the parts of them that nothing hides.
    """
    events = [e for e in trace.get("traceEvents", []) if e.get("ph") == "X"]
    steps = [e for e in events if e.get("name") == STEP and e.get("cat") == "user_annotation"]
    if not steps:
        return {}
    low, high = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    count = len(steps)
    # A GPU's backward has a thread of its own, for which the one that trains waits.
    training = {_thread(e) for e in events if e.get("name", "").startswith(BACKWARD)} | {_thread(steps[0])}
    found = _waits(events, (low, high), training, count)
    if kernels := union(_intervals(events, "kernel")):
        found["device_busy_ms"] = _ms(length(kernels), count)
        for way in ("HtoD", "DtoH"):
            taken, exposed = copies(trace, way)
            found |= {f"{way}_ms": _ms(taken, count), f"{way}_exposed_ms": _ms(exposed, count)}
        for kind in ("AllGather", "ReduceScatter", "AllReduce"):
            if taken := union(i for name in (kind, kind.lower()) for i in _intervals(events, "kernel", name)):
                others = union(_intervals([e for e in events if "nccl" not in e["name"]], "kernel"))
                exposed = length(taken) - length(common(taken, others))
                found |= {f"{kind}_ms": _ms(length(taken), count), f"{kind}_exposed_ms": _ms(exposed, count)}
    return found


def copies(trace: Mapping[str, Any], way: str) -> tuple[float, float]:
    """Microseconds in which copies of a ``way`` (HtoD, DtoH) ran, and those of them in which no kernel did."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    taken = union(_intervals(events, "gpu_memcpy", way))
    return length(taken), length(taken) - length(common(taken, union(_intervals(events, "kernel"))))


def _waits(events: Sequence[Any], within: Interval, training: set[Thread], steps: int) -> dict[str, Any]:
    """Calls that wait for the device: of the threads that train, and of others, whose waits do not hold them up."""
    here: Counter[str] = Counter()
    waited = 0.0
    elsewhere = 0
    for event in events:
        if event.get("name") not in SYNCS or not within[0] <= event["ts"] <= within[1]:
            continue
        if _thread(event) in training:
            here[event["name"]] += 1
            waited += event["dur"]
        else:
            elsewhere += 1
    return {
        "host_waits": round(here.total() / steps, 1),
        "host_waits_ms": _ms(waited, steps),
        "host_waits_by_call": {name: round(n / steps, 1) for name, n in here.items()},
        "other_threads_waits": round(elsewhere / steps, 1),
    }


def _thread(event: Mapping[str, Any]) -> Thread:
    return event["pid"], event["tid"]


def _ms(microseconds: float, steps: int) -> float:
    return round(microseconds / 1e3 / steps, 3)


def _intervals(events: Iterable[Any], category: str, part: str = "") -> list[Interval]:
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == category and part in e["name"]]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Where any of them is: disjoint and in order."""
    result: list[Interval] = []
    for low, high in sorted(intervals):
        if result and low <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], high)
        else:
            result.append((low, high))
    return result


def common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Where both unions are."""
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low < high:
            result.append((low, high))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return result


def length(intervals: Iterable[Interval]) -> float:
    return sum(high - low for low, high in intervals)
