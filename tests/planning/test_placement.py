"""The table of stages and the counts that follow from it (``docs/architecture.md``, Stages); who shares shards."""

from __future__ import annotations

import pytest

from lightning_zero.planning.placement import OFFLOADS, ON_DEVICE, STAGES, Placement, Tier, logical_collectives
from lightning_zero.planning.topology import Group, Ranks, by_part, flat, over_nodes
from lightning_zero.settings import HybridShard, Offload, Stage, make_config

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
    assert topology.shard_groups == ((0, 1, 2),) and Ranks.locate(2, topology).replicate == Group((2,), 0, 1)
    topology = over_nodes("ab", HybridShard.node)
    assert topology.shard_groups == ((0,), (1,)) and Ranks.locate(1, topology).replicate == Group((0, 1), 1, 2)
    topology = over_nodes("ababab", HybridShard.node)
    assert topology.shard_groups == ((0, 2, 4), (1, 3, 5))
    assert Ranks.locate(3, topology).replicate == Group((2, 3), 1, 2) and topology.place_of(3) == (1, 1)


def test_ranks_with_one_batch_are_adjacent_and_gradients_of_parts_are_divided_by_batches() -> None:
    settings = make_config(stage="zero1", tensor_parallel=2)
    whole, parts = Ranks.locate(3, flat(4), settings), Ranks.locate(3, by_part(flat(4), 2), settings)
    assert parts.tensor == parts.same_batch == parts.parts == Group((2, 3), 1, 2) and whole.parts.size == 1
    assert parts.shard == parts.batch == whole.batch == Group((1, 3), 1, 2) and parts.replicate.ranks == (3,)
    experts = Ranks.locate(2, by_part(flat(4), 4), make_config(stage="zero1", expert_parallel=4))
    sequences = Ranks.locate(1, flat(4), make_config(stage="zero1", sequence_parallel=4))
    assert sequences.same_batch == Group((0, 1, 2, 3), 1, 4) and sequences.batch == Group((1,), 0, 1)
    assert [ranks.grad_divisor for ranks in (whole, parts, experts, sequences)] == [4, 2, 4, 4]


def test_gradients_are_summed_in_levels_where_nodes_share_shards() -> None:
    topology = over_nodes("aaaabbbb", exchanges=True)
    kept = over_nodes("aaaabbbb", HybridShard.node_backward)
    assert topology.sum_groups == kept.node_groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and not kept.sum_groups
    assert (
        Ranks.locate(6, topology).across == Group((2, 6), 1, 2)
        and Ranks.locate(6, kept).node == Ranks.locate(6, topology).sum
    )
    parts = by_part(topology, 2)
    assert parts.sum_groups == ((0, 2), (4, 6), (1, 3), (5, 7)) and Ranks.locate(5, parts).across.ranks == (1, 5)
    # Not where a node has one of the ranks, nodes are uneven, ranks of a node are not adjacent, or nodes share nothing.
    one_level = [over_nodes(names, exchanges=True) for names in ("aab", "abab", "aa", "a" * 64 + "b" * 64)]
    one_level += [by_part(topology, 4), over_nodes("aaaabbbb", HybridShard.node, exchanges=True)]
    assert not any(one.sum_groups for one in one_level)


def test_a_row_of_gradients_alone_takes_room_and_gathers_on_the_device() -> None:
    alone = ON_DEVICE._replace(grad=Tier.host)
    assert (alone.uses_host_or_files, alone.gathers_from_host) == (True, False)
    assert all(row.gathers_from_host == (row != ON_DEVICE) for row in OFFLOADS.values())
