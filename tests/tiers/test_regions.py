"""Regions of a file: never two at one place, and no growth while a hole is large enough."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.tiers.nvme import Regions


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=40))
def test_regions_do_not_overlap_and_holes_are_whole(steps: list[tuple[int, int]]) -> None:
    regions, taken, length = Regions(), list[tuple[int, int]](), 0

    def ensure(nbytes: int) -> None:
        nonlocal length
        length = max(length, nbytes)

    for nbytes, choice in steps:
        if nbytes:
            holes = [high - low for low, high in regions.holes]
            before = regions.end
            low = regions.take(nbytes, ensure)
            assert (regions.end == before) == (max(holes, default=0) >= nbytes)
            taken.append((low, low + nbytes))
        elif taken:
            regions.give_back(*taken.pop(choice % len(taken)))
        everything = sorted([*taken, *regions.holes])
        assert everything == sorted({*taken, *regions.holes})
        ends = [0, *(high for _, high in everything)]
        assert ends[:-1] == [low for low, _ in everything] and ends[-1] == regions.end <= length
        touching = zip(regions.holes, regions.holes[1:], strict=False)
        assert all(first[1] < second[0] for first, second in touching)
        assert all(high < regions.end for _, high in regions.holes)
    for region in taken:
        regions.give_back(*region)
    assert regions.end == 0 and not regions.holes
