"""Settings of the strategy reach the engine: each is seen there, and those that promise it change no number.

What they do is shown on the engine (``tests/engine``).
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError, ZeroConfig
from tests.harness import on_ranks
from tests.trainer.toys import (
    Lit,
    Run,
    TwoNodes,
    assert_same,
    assert_weights,
    fit,
    loader,
    odd,
    record,
    seeded,
    trainer,
)

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]

# Fields that change no number, by group.
EQUAL: dict[str, dict[str, Any]] = {
    "offload.host": {"offload": "cpu"},
    "offload.files": {"offload": {"name": "nvme", "nvme_path": ""}},
    "offload.auto": {
        "offload": {"name": "auto", "device_budget": 4096, "host_budget": 9000, "nvme_budget": 1 << 20, "nvme_path": ""}
    },
    "unit.classes": {"unit": {"classes": ["Linear"]}},
    "unit.sizes": {"unit": {"max_bytes": 1 << 20}},
    "comm": {"comm": {"transport": "direct", "hybrid_shard": "flat"}},
    "optimizer": {"optimizer": {"sharding": "slices"}},
    "compile": {"compile": {"name": "blocks", "arguments": {"backend": "eager", "dynamic": False}}},
    "prefetch_bytes": {"prefetch_bytes": 0},
    "keep_gathered_bytes": {"keep_gathered_bytes": 1 << 20},
    "reduce_bucket_bytes": {"reduce_bucket_bytes": 1 << 10},
    "activation_checkpointing": {"activation_checkpointing": "blocks"},
    "dynamic_graph": {"dynamic_graph": True},
    "stall_timeout_s": {"stall_timeout_s": 50.0},
    "gather_after_fit": {"gather_after_fit": False},
}
SHORT: dict[str, Any] = {"max_epochs": 1, "count": 16, "limit_val_batches": 1}


def in_folder(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Give the settings with ``folder`` where a path is to be."""
    return {
        group: value | {"nvme_path": str(folder)} if isinstance(value, dict) and "nvme_path" in value else value
        for group, value in settings.items()
    }


@functools.cache
def plain() -> Run:
    """Without any setting. (Workers are used again, and so is this.)"""
    return fit("zero3", tempfile.mkdtemp(), odd(), **SHORT)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("name", EQUAL)
def test_setting_is_seen_in_the_engine_and_changes_no_number(name: str, tmp_path: Path) -> None:
    strategy = ZeroStrategy(3, **in_folder(EQUAL[name], tmp_path))
    found = fit(strategy, tmp_path, odd(), **SHORT)
    group = name.partition(".")[0]
    assert getattr(strategy.engine.config, group) != getattr(ZeroConfig(), group)
    found.weights = {key.replace("_orig_mod.", ""): value for key, value in found.weights.items()}
    assert_same(found, plain(), tolerance=0)
    strategy.engine.release()


def test_folder_that_is_not_there_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, got in ((tmp_path / "no", "does not exist"), (tmp_path / "file", "is not a folder")):
        with pytest.raises(ConfigError, match=rf"zero.offload.nvme_path: expected .* {got}"):
            ZeroStrategy("zero3", offload={"name": "nvme", "nvme_path": str(path)})


@on_ranks(4)
@pytest.mark.parametrize(("stage", "hybrid_shard"), [(1, "node"), (3, "node"), (3, "node_backward")])
def test_two_nodes_of_two_ranks_equal_flat_sharding(stage: int, hybrid_shard: str, tmp_path: Path) -> None:
    """Nodes are told apart by their rank of node."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank() % 2), "NODE_RANK": str(dist.get_rank() // 2)}
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "val_check_interval": 2}
    settings |= {"max_epochs": 1, "devices": 2, "num_nodes": 2, "count": 32}
    found = []
    for way in (hybrid_shard, "flat"):
        strategy = ZeroStrategy(stage, comm={"hybrid_shard": way}, cluster_environment=TwoNodes())
        found.append(fit(strategy, tmp_path, seeded(lambda: Lit(optimizer="adamw")), **settings))
        assert len(strategy.engine.comm.topology.shard_groups) == (2 if way == "node" else 1)
        assert strategy.engine.comm.node_size == (2 if way == "node_backward" else 0)
        found[-1].trainer.save_checkpoint(tmp_path / f"{way}.ckpt")
        strategy.engine.release()
    near = 0.0 if hybrid_shard == "node_backward" else 1e-5
    assert_same(*found, tolerance=near)
    files = [torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in (hybrid_shard, "flat")]
    assert_weights(files[0]["state_dict"], files[1]["state_dict"], tolerance=near)


# -- zero.vertical_chunks: the run of accumulate_grad_batches, with the whole batch in one step -----------------------


def in_parts(parts: int, stage: int = 3) -> ZeroStrategy:
    return ZeroStrategy(stage, vertical_chunks=parts, activation_checkpointing="blocks")


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("stage", "accumulate"), [(3, 1), (1, 2)])
def test_run_in_chunks_is_that_of_accumulation(stage: int, accumulate: int, tmp_path: Path) -> None:
    """With validations of batches of three, which do not divide."""
    runs = []
    for strategy, times in ((ZeroStrategy(stage), 2), (in_parts(2, stage), 1)):
        settings = {"accumulate_grad_batches": times * accumulate, "gradient_clip_val": 0.5}
        of, module = trainer(strategy, tmp_path, **settings), seeded(Lit)
        of.fit(module, loader(4 // times // accumulate), loader(3))
        runs.append(record(of, module))
    plain, found = runs
    assert_weights(found.weights, plain.weights, tolerance=1e-5)
    assert plain.module.evaluated == pytest.approx(found.module.evaluated, rel=1e-4)
    assert len(found.losses) == len(plain.losses) // 2


@on_ranks(1)
@pytest.mark.parametrize(("size", "got"), [(3, "3 samples"), (20, "4 samples")])
def test_batches_that_will_not_divide_are_refused_before_the_first(size: int, got: str, tmp_path: Path) -> None:
    module = seeded(Lit)
    with pytest.raises(ConfigError, match=f"got a batch of {got}"):
        trainer(in_parts(5), tmp_path).fit(module, loader(size))
    assert not module.losses and dist.is_initialized()
    if size == 20:  # a first batch that divides, and no other
        trainer(in_parts(5), tmp_path, limit_train_batches=1, max_epochs=1).fit(module, loader(size))
        assert len(module.losses) == 1
