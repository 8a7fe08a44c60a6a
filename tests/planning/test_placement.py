"""The table of stages and the counts that follow from it (``docs/architecture.md``, Stages)."""

from __future__ import annotations

import pytest

from lightning_zero.config import Offload, Stage
from lightning_zero.planning.placement import OFFLOADS, STAGES, Placement, Tier, logical_collectives

pytestmark = pytest.mark.smoke

ROLES = ("compute_param", "grad", "master")


def test_every_stage_and_offload_has_a_row() -> None:
    assert set(STAGES) == set(Stage) - {Stage.auto}  # which becomes one of the others
    assert set(OFFLOADS) == set(Offload) - {Offload.auto}  # whose rows follow from budgets


def test_properties_of_offload_are_those_of_its_row() -> None:
    for offload, row in OFFLOADS.items():
        assert offload.uses_files == (Tier.nvme in row)
        assert offload.moves_params == (row.compute_param is not Tier.device)


def test_every_stage_shards_one_role_more() -> None:
    sharded = [sum(getattr(STAGES[s], role) is Placement.sharded for role in ROLES) for s in STAGES]
    assert sharded == [0, 1, 2, 3]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("stays", [False, True])
def test_logical_collectives_are_those_of_the_table(k: int, stays: bool) -> None:
    table = {  # all-gathers, reduce-scatters, all-reduces
        Stage.zero0: (0, 0, 1),
        Stage.zero1: (1, 1, 0),
        Stage.zero2: (1, k, 0),
        Stage.zero3: (k if stays else 2 * k, k, 0),
    }
    names = ("all_gather", "reduce_scatter", "all_reduce")
    for stage, counts in table.items():
        found = logical_collectives(STAGES[stage], k, stays_gathered=stays)
        assert found == dict(zip(names, counts, strict=True))
