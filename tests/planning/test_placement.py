"""The table of stages and the counts that follow from it (``docs/architecture.md``, Stages); who shares shards."""

from __future__ import annotations

import pytest

from lightning_zero.planning.placement import OFFLOADS, ON_DEVICE, STAGES, Placement, Tier, logical_collectives
from lightning_zero.planning.topology import by_node, by_part, flat, in_levels, is_even, within_nodes
from lightning_zero.settings import ConfigError, Offload, Stage

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


def test_flat_has_one_group_of_shards_and_by_node_one_each() -> None:
    topology = flat(3)
    assert topology.shard_groups == ((0, 1, 2),) and topology.replicate_group_of(2) == (2,)
    assert by_node(["a", "b"]).shard_groups == ((0,), (1,)) and by_node(["a", "b"]).replicate_group_of(1) == (0, 1)
    topology = by_node(["a", "b", "a", "b", "a", "b"])
    assert topology.shard_groups == ((0, 2, 4), (1, 3, 5))
    assert [topology.replicate_group_of(rank) for rank in range(6)] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    assert all(rank in topology.shard_group_of(rank) for rank in range(6))


def test_gradients_are_summed_in_levels_where_nodes_share_shards() -> None:
    names = ["a"] * 4 + ["b"] * 4
    topology = in_levels(flat(8), names)
    assert topology.sum_groups == within_nodes(names).node_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.across_group_of(6) == (2, 6)
    parts = by_part(topology, 2)
    assert parts.sum_groups == ((0, 2), (4, 6), (1, 3), (5, 7)) and parts.across_group_of(5) == (1, 5)
    # Not where a node has one of the ranks, nodes are uneven, ranks of a node are not adjacent, or nodes share nothing.
    one_level = [by_part(topology, 4), in_levels(flat(3), ["a", "a", "b"]), in_levels(flat(4), ["a", "b"] * 2)]
    assert [t.sum_groups for t in (*one_level, in_levels(flat(2), "aa"), in_levels(by_node(names), names))] == [()] * 5


def test_uneven_nodes_are_refused_with_their_ranks() -> None:
    assert not is_even(["a", "a", "b"]) and is_even(["a", "b"])
    with pytest.raises(ConfigError, match=r"zero.hybrid_shard=node: .* got 2 on a, 1 on b\. .*hybrid_shard=flat"):
        by_node(["a", "a", "b"])


def test_a_row_of_gradients_alone_takes_room_and_gathers_on_the_device() -> None:
    alone = ON_DEVICE._replace(grad=Tier.host)
    assert (alone.uses_host_or_files, alone.gathers_from_host) == (True, False)
    assert all(row.gathers_from_host == (row != ON_DEVICE) for row in OFFLOADS.values())
