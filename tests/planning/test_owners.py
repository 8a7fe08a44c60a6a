"""Owners of whole tensors: the work is even, owners stay, and messages meet."""

from __future__ import annotations

import random

import pytest

from lightning_zero.planning.layout import lay_out
from lightning_zero.planning.owners import Transfer, choose_owners, find_route, matrix_work, split_windows, step_peak


@pytest.mark.parametrize(
    ("shape", "work"),
    [((), 1), ((7,), 7), ((0, 3), 0), ((4, 8), 8 * 16), ((8, 4), 8 * 16), ((8, 2, 3, 2), 12 * 64), ((5, 5), 125)],
)
def test_work_is_that_of_a_product_with_the_shorter_side(shape: tuple[int, ...], work: int) -> None:
    assert matrix_work(shape) == work


def test_windows_are_whole_units_up_to_the_limit_and_parts_of_larger_ones() -> None:
    assert split_windows([4, 4, 4, 10, 1, 1], [0, 0, 1, 2, 3, 3], 12) == [[0, 1, 2], [3, 4, 5]]
    assert split_windows([4, 4, 4, 10, 1, 1], [0, 0, 1, 2, 3, 3], 5) == [[0], [1], [2], [3], [4, 5]]
    assert split_windows([], [], 5) == []
    for seed in range(20):
        rng = random.Random(seed)
        nbytes = [rng.randint(1, 20) for _ in range(15)]
        units = sorted(rng.randint(0, 5) for _ in nbytes)
        windows = split_windows(nbytes, units, 24)
        assert [place for window in windows for place in window] == list(range(15))
        assert all(sum(nbytes[p] for p in window) <= 24 or len(window) == 1 for window in windows)


def test_blocks_are_divided_evenly_in_all_and_in_each_window() -> None:
    blocks = 8
    costs = [matrix_work(shape) for shape in ((192, 64), (64, 64), (256, 64), (64, 256))] * blocks
    windows = [[4 * block + n for n in range(4)] for block in range(blocks)]
    for ranks in (1, 2, 3, 4, 8):
        owners = choose_owners(costs, windows, ranks, [None] * len(costs))
        loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(ranks)]
        assert max(loads) <= 1.12 * sum(loads) / ranks, ranks
        if ranks == 4:  # as many as a window has tensors
            assert all(len({owners[place] for place in window}) >= 3 for window in windows)


def test_owners_stay_and_new_tensors_go_where_there_is_room() -> None:
    costs = [8, 8, 1, 9]
    first = choose_owners(costs[:3], [[0, 1], [2]], 2, [None] * 3)
    assert sorted(first[:2]) == [0, 1]
    kept = choose_owners(costs, [[0, 1], [2, 3]], 2, [1, 1, 0, None])
    assert kept == [1, 1, 0, 0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_holds_at_most_two_and_a_half_windows_beside_its_shards(ranks: int) -> None:
    """Also where one rank owns all of a window, and the next one too."""
    numels = [4096] * 6
    layouts = [lay_out(numels, ranks)]
    for owners in ([0] * 6, [0, 1] * 3, [1] * 3 + [0] * 3):
        windows = [[Transfer(0, slot, owners[slot], 4, 4)] for slot in range(6)]
        whole = 4096 * 8
        for rank in range(ranks):
            routes = [find_route(window, layouts, rank) for window in windows]
            values = [whole // 2 * (owners[slot] == rank) for slot in range(6)]
            assert step_peak(routes, values, values) <= 2.5 * whole
