"""Owners of whole tensors: the work is even, and owners stay."""

from __future__ import annotations

import pytest

from lightning_zero.planning.buckets import BucketShape, Itemsizes, place
from lightning_zero.planning.owners import choose_owners, matrix_work, split_messages
from lightning_zero.planning.placement import ON_DEVICE, STAGES, Tier
from lightning_zero.planning.tensor_states import TensorState, TensorStates
from lightning_zero.settings import Stage


@pytest.mark.parametrize(
    ("shape", "work"),
    [((), 1), ((7,), 7), ((0, 3), 0), ((4, 8), 8 * 16), ((8, 4), 8 * 16), ((8, 2, 3, 2), 12 * 64), ((5, 5), 125)],
)
def test_work_is_that_of_a_product_with_the_shorter_side(shape: tuple[int, ...], work: int) -> None:
    assert matrix_work(shape) == work


def test_messages_have_whole_units_up_to_the_limit_or_a_larger_one() -> None:
    assert split_messages([4, 4, 4, 10, 1, 1], [0, 0, 1, 2, 3, 3], 12) == [[0, 1, 2], [3, 4, 5]]
    assert split_messages([4, 4, 4, 10, 1, 1], [0, 0, 1, 2, 3, 3], 5) == [[0, 1], [2], [3], [4, 5]]
    assert split_messages([], [], 5) == []


def test_blocks_are_divided_evenly() -> None:
    blocks = 8
    costs = [matrix_work(shape) for shape in ((192, 64), (64, 64), (256, 64), (64, 256))] * blocks
    for ranks in (1, 2, 3, 4, 8):
        owners = choose_owners(costs, ranks, [None] * len(costs))
        loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(ranks)]
        assert max(loads) <= 1.12 * sum(loads) / ranks, ranks


def test_owners_stay_and_new_tensors_go_where_there_is_room() -> None:
    costs = [8, 8, 1, 9]
    first = choose_owners(costs[:3], 2, [None] * 3)
    assert sorted(first[:2]) == [0, 1]
    assert choose_owners(costs, 2, [1, 1, 0, None]) == [1, 1, 0, 0]


def test_a_step_holds_masters_and_gradients_of_all_that_a_rank_owns() -> None:
    """And on a device copies of what rests on the host, with their state."""
    shape = BucketShape(0, (64, 64), Itemsizes(4, 4, 4, 4))
    states = TensorStates(((TensorState(0, 1, (256,)), TensorState(0, 1, (256,))),), 1)
    on_host = ON_DEVICE._replace(master=Tier.host)
    for ranks, tiers, has_link, expected in (
        (1, ON_DEVICE, True, 0),
        (1, on_host, False, 0),
        (1, on_host, True, 2 * (256 + 256 + 256)),
        (2, ON_DEVICE, True, 256 + 256 + 256),  # of the one that it owns, half of which arrives
        (2, on_host, True, 256 + 256 + 256 + 256),
    ):
        buckets = [place(shape, STAGES[Stage.zero1], tiers, ranks)]
        assert states.of_fullest_rank(buckets, has_link=has_link).step == expected, (ranks, tiers, has_link)
