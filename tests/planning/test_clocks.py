"""Offsets of clocks: within their own error of the truth, whatever messages take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.timeline.record import offsets

seconds = st.floats(0, 0.01)


@given(
    st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=4),
    st.lists(st.lists(st.tuples(seconds, seconds), min_size=4, max_size=4), min_size=1, max_size=6),
)
def test_the_truth_is_within_the_error(clocks: list[float], rounds: list[list[tuple[float, float]]]) -> None:
    """In each round ranks come after some time, and go some time after the last has come."""
    clocks = [clock - clocks[0] for clock in clocks]  # what a rank's clock is ahead of rank 0's
    begins: list[list[float]] = [[] for _ in clocks]
    ends: list[list[float]] = [[] for _ in clocks]
    now = 0.0
    for waits in rounds:
        came = [now + waits[rank][0] for rank in range(len(clocks))]
        for rank, clock in enumerate(clocks):
            begins[rank].append(came[rank] + clock)
            ends[rank].append(max(came) + waits[rank][1] + clock)
        now = max(came) + 0.02
    for offset, clock in zip(offsets(begins, ends), clocks, strict=True):
        assert abs(offset.seconds + clock) <= offset.error + max(offset.error, 1e-6)
        if clock == 0:
            assert offset.seconds == 0
