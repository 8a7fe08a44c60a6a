"""The benchmark of whole tensors measures what it says."""

from __future__ import annotations

from benchmarks.bench_whole import measure


def test_it_measures_each_rank() -> None:
    found = measure(2, 3, width=16, depth=1, rounds=1)
    assert len(found) == 2 and all(0 < seconds < 60 for seconds in found)
