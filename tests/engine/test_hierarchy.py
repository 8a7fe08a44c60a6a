"""Shards within a node, replicas across nodes: the numbers of flat sharding, and fewer bytes between nodes.

Nodes are virtual: ranks of one machine that say they are on different ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.transports import Members
from lightning_zero.engine.units import capacity
from lightning_zero.settings import ConfigError
from tests.engine.sides import Sharded, Work, whole
from tests.engine.support import assert_equal
from tests.engine.test_offload import offload
from tests.engine.works import accumulate, train
from tests.harness import on_ranks
from tests.models import Model

pytestmark = pytest.mark.sample  # the full tier has all cases

STAGES = [0, 1, 2, 3]


def sharded(module: nn.Module, ranks_per_node: int, hybrid_shard: str = "node", **config: Any) -> Sharded:
    node = f"node {dist.get_rank() // ranks_per_node}"
    return Sharded(module, node=node, hybrid_shard=hybrid_shard, **config)


def accumulated(micro_batches: int = 1) -> Work:
    return functools.partial(accumulate, micro_batches=micro_batches)


def history(side: Sharded, work: Work | None = None, *, steps: int = 3, clip: bool = False) -> list[Any]:
    """What ``work`` (or two micro-batches) gives in each step, norms, and parameters and states at the end."""
    return [*train(side, range(steps), work or accumulated(2), clip=clip), *whole(side)]


def histories(each: Iterable[tuple[int, str, dict[str, Any]]], **settings: Any) -> list[list[Any]]:
    """Of a training for each number of ranks of a node, way to shard, and settings."""
    found = []
    for ranks_per_node, hybrid_shard, config in each:
        torch.manual_seed(3)
        with sharded(Model(), ranks_per_node, hybrid_shard, **config) as side:
            replicas = dist.get_world_size() // ranks_per_node if hybrid_shard == "node" else 1
            assert len(side.engine.comm.ranks.topology.shard_groups) == replicas
            found.append(history(side, **settings))
    return found


@on_ranks(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
@pytest.mark.mainly(lambda precision: precision == "fp32")
@pytest.mark.parametrize("stage", STAGES)
def test_two_nodes_of_two_ranks_equal_flat(stage: int, precision: str) -> None:
    config = {"stage": stage, "precision": precision}
    found = histories([(2, way, config) for way in ("node", "flat")], clip=True)
    # Gradients are added within nodes first: fp32 differs in its last bits, which AdamW's first steps make larger.
    assert_equal(*found, tolerance=2e-5 if precision == "fp32" else 2e-2)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_nodes_of_one_rank_equal_flat(stage: int) -> None:
    """Nothing is sharded then; on two ranks gradients are added in one order, so it is equal to the bit (a norm is not:
    it has a partial sum for each shard)."""
    assert_equal(*histories([(1, way, {"stage": stage}) for way in ("node", "flat")]))


@on_ranks(4)
@pytest.mark.parametrize(("row", "stage"), [("optimizer_cpu", 2), ("nvme", 3)])
def test_offload_changes_nothing_there_either(row: str, stage: int, tmp_path: Path) -> None:
    places = offload(row, tmp_path), {"offload": "none"}
    assert_equal(*histories([(2, "node", {"stage": stage, **place}) for place in places], clip=True))


# -- bytes between nodes ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bytes_from_other_nodes(comm: Communicator, ranks_per_node: int) -> Iterator[Counter[str]]:
    """Bytes that this rank has to receive from other nodes, by kind of operation: of a gather what their ranks hold; of
    a reduction their parts of this rank's shard; of a sum of ``s`` bytes over ``r`` replicas ``2 s (r - 1) / r``, as a
    ring does it."""
    found: Counter[str] = Counter()
    transport, issue_sum, own = comm._transport, comm._issue_sum, comm.rank // ranks_per_node

    def counted(kind: str, method: Any) -> Any:
        def call(full: Tensor, among: Members, **options: Any) -> Any:
            nodes = [other // ranks_per_node for other in dist.get_process_group_ranks(among.group)]
            found[kind] += full.nbytes * sum(node != own for node in nodes) // len(nodes)
            return method(full, among, **options)

        return call

    def counted_sum(shard: Tensor) -> Any:
        replicas = dist.get_world_size(comm._groups.replicate)  # type: ignore[union-attr]
        found["sum"] += 2 * shard.nbytes * (replicas - 1) // replicas
        return issue_sum(shard)

    with (
        mock.patch.object(transport, "gather", counted("gather", transport.gather)),
        mock.patch.object(transport, "reduce", counted("reduce", transport.reduce)),
        mock.patch.object(comm, "_issue_sum", counted_sum),
    ):
        yield found


@on_ranks(4)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_only_reduced_shards_cross_nodes(stage: int, micro_batches: int) -> None:
    for hybrid_shard in ("node", "flat"):
        with sharded(Model(), 2, hybrid_shard, stage=stage) as side:
            work = accumulated(micro_batches)
            train(side, [0], work)
            with bytes_from_other_nodes(side.engine.comm, 2) as found:
                train(side, [5], work)
                side.engine.passes.wait_for_all()
            reductions = micro_batches if stage >= 2 else 1
            full = sum(b.layout.numel * 4 for b in side.engine.buckets)
            across = dict(+found)
            if hybrid_shard == "node":
                # A ring over 2 replicas moves each byte of the shard, half of the bucket, once each way.
                assert across == {"sum": reductions * full // 2}, across
            else:
                assert across["reduce"] == reductions * full // 2 and across.get("sum", 0) == 0
                assert across["gather"] >= full // 2


# -- choosing ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_auto_shards_by_node_where_half_of_the_memory_is_enough() -> None:
    rest = 16 * sum(p.numel() for p in Model().parameters())  # fp32: parameters, gradients and two states
    for available, ranks_per_node, replicas in ((8 * rest, 1, 2), (2 * rest, 1, 1), (8 * rest, 2, 1)):
        memory = mock.patch.object(capacity, "available_host_memory", lambda free=available: free)
        with memory, sharded(Model(), ranks_per_node, "auto") as side:
            assert len(side.engine.comm.ranks.topology.shard_groups) == replicas


@pytest.mark.full
@on_ranks(3)
def test_uneven_nodes() -> None:
    with pytest.raises(ConfigError, match=r"hybrid_shard='node': .* got 2 on node 0, 1 on node 1"):
        sharded(Model(), 2)
    with sharded(Model(), 2, "auto") as side:
        assert len(side.engine.comm.ranks.topology.shard_groups) == 1
