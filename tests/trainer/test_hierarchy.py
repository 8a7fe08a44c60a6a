"""Hybrid sharding through the Trainer: virtual nodes, told apart by their rank of node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_zero import ZeroStrategy
from tests.harness import run
from tests.trainer.toys import Lit, assert_weights, fit, seeded

pytestmark = pytest.mark.full


class TwoNodes(LightningEnvironment):
    """Ranks 0 and 1 on node 0, ranks 2 and 3 on node 1."""

    def node_rank(self) -> int:
        return dist.get_rank() // 2

    def local_rank(self) -> int:
        return dist.get_rank() % 2

    @property
    def creates_processes_externally(self) -> bool:
        return True


def _fit(stage: int, folder: Path) -> None:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank() % 2), "NODE_RANK": str(dist.get_rank() // 2)}
    found = []
    for hybrid_shard in ("node", "flat"):
        strategy = ZeroStrategy(stage, comm={"hybrid_shard": hybrid_shard}, cluster_environment=TwoNodes())
        module = seeded(lambda: Lit(optimizer="adamw"))
        result = fit(strategy, folder, module, max_epochs=2, devices=2, num_nodes=2, gradient_clip_val=0.1)
        engine = strategy.engine
        assert len(engine.comm.topology.shard_groups) == (2 if hybrid_shard == "node" else 1)
        assert result.trainer.world_size == 4
        result.trainer.save_checkpoint(folder / f"{hybrid_shard}.ckpt")
        found.append(result)
        engine.release()
    assert_weights(found[0].weights, found[1].weights, tolerance=1e-5)
    files = [torch.load(folder / f"{name}.ckpt", weights_only=False) for name in ("node", "flat")]
    assert_weights(files[0]["state_dict"], files[1]["state_dict"], tolerance=1e-5)
    # Once: every node has all shards, but rank 0 alone writes.
    assert sorted(p.name for p in folder.glob("*.ckpt")) == ["flat.ckpt", "node.ckpt"]


def _keeps(folder: Path) -> None:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank() % 2), "NODE_RANK": str(dist.get_rank() // 2)}
    found = []
    for hybrid_shard in ("node_backward", "flat"):
        strategy = ZeroStrategy(3, comm={"hybrid_shard": hybrid_shard}, cluster_environment=TwoNodes())
        module = seeded(lambda: Lit(optimizer="adamw"))
        settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "val_check_interval": 2}
        result = fit(strategy, folder, module, max_epochs=2, devices=2, num_nodes=2, **settings)
        assert strategy.engine.comm.node_size == (2 if hybrid_shard == "node_backward" else 0)
        found.append(result)
        strategy.engine.release()
    assert found[0].losses == found[1].losses
    assert_weights(found[0].weights, found[1].weights, tolerance=0.0)


def test_gathers_of_the_backward_within_nodes(tmp_path: Path) -> None:
    run(4, _keeps, tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_nodes_of_two_ranks(stage: int, tmp_path: Path) -> None:
    run(4, _fit, stage, tmp_path)
