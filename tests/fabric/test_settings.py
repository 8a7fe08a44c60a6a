"""Every field of the configuration under Fabric: it does what it does under the Trainer, or it is refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero import ZeroFabricStrategy
from lightning_zero.config import ConfigError, ZeroConfig
from tests.fabric.toys import Run, adamw, assert_equal, fabric, make, train
from tests.harness import on_ranks

SMALL = 1 << 10
# Fields that change no number, by group: values, and what can be seen of them in the engine.
EQUAL: dict[str, dict[str, Any]] = {
    "offload.host": {"offload": "cpu"},
    "offload.files": {"offload": {"name": "nvme", "nvme_path": ""}},
    "offload.auto": {
        "offload": {
            "name": "auto",
            "device_budget": 4096,
            "host_budget": 9000,
            "nvme_budget": 1 << 20,
            "nvme_path": "",
        }
    },
    "unit.classes": {"unit": {"classes": ["Linear"]}},
    "unit.sizes": {"unit": {"max_bytes": 1 << 20}},
    "comm": {"comm": {"transport": "direct", "hybrid_shard": "flat"}},
    "optimizer": {"optimizer": {"sharding": "slices"}},
    "compile": {"compile": {"name": "blocks", "arguments": {"backend": "eager", "dynamic": False}}},
    "prefetch_bytes": {"prefetch_bytes": 0},
    "keep_gathered_bytes": {"keep_gathered_bytes": 1 << 20},
    "reduce_bucket_bytes": {"reduce_bucket_bytes": SMALL},
    "activation_checkpointing": {"activation_checkpointing": "blocks"},
    "dynamic_graph": {"dynamic_graph": True},
    "stall_timeout_s": {"stall_timeout_s": 50.0},
    "gather_after_fit": {"gather_after_fit": False},
}
OFTEN = {"offload.files", "unit.classes", "comm", "compile", "activation_checkpointing"}
# Those with tests of their own, here or beside.
ELSEWHERE = {"stage", "precision", "checkpoint", "timeline", "init_from", "vertical_chunks", "sequence_parallel"}


def test_no_field_is_left_out() -> None:
    tried = {name.partition(".")[0] for name in EQUAL} | ELSEWHERE
    assert tried == {field.name for field in dataclasses.fields(ZeroConfig)}


def strategy(tmp_path: Path, stage: int = 3, **settings: Any) -> ZeroFabricStrategy:
    for group in settings.values():
        if isinstance(group, dict) and "nvme_path" in group:
            group["nvme_path"] = str(tmp_path)
    return ZeroFabricStrategy(stage, **settings)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")
@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.full) for n in EQUAL])
def test_it_changes_no_number(name: str, tmp_path: Path) -> None:
    expected = train("zero3")
    found = train(strategy(tmp_path, **EQUAL[name]))
    config = found.model._forward_module.engine.config
    group = name.partition(".")[0]
    assert getattr(config, group) != getattr(ZeroConfig(), group)
    assert_equal(found, expected)


@on_ranks(2)
def test_batches_in_parts(tmp_path: Path) -> None:
    found = train(strategy(tmp_path, vertical_chunks=2, activation_checkpointing="blocks"))
    assert found.losses == pytest.approx(train("zero3").losses, rel=1e-4)


@on_ranks(2)
def test_compiled_blocks(tmp_path: Path) -> None:
    run = train(strategy(tmp_path, compile={"name": "blocks", "arguments": {"backend": "eager"}}))
    assert run.model._forward_module.engine.forwards.compiled.are_there


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("dtypes", [{"reduce_dtype": "bf16"}, {"grad_dtype": "bf16"}, {"fp32_modules": ["Linear"]}])
def test_precision(dtypes: dict[str, Any], tmp_path: Path) -> None:
    run = train(strategy(tmp_path, precision=dtypes), precision="bf16-mixed")
    assert run.losses != train("zero3", precision="bf16-mixed").losses


@on_ranks(2)
def test_stochastic_rounding(tmp_path: Path) -> None:
    rounded = {"precision": {"stochastic_rounding": True}}
    run = train(strategy(tmp_path, **rounded), precision="bf16-true")
    assert run.losses != train("zero3", precision="bf16-true").losses
    with pytest.raises(ConfigError, match=r"zero\.precision\.stochastic_rounding"):
        train(strategy(tmp_path, **rounded))


@on_ranks(2)
def test_a_timeline(tmp_path: Path) -> None:
    with mock.patch.multiple("lightning_zero.timeline.record", AFTER=1, STEPS=1):
        train(strategy(tmp_path, timeline=str(tmp_path)))
    dist.barrier()
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} >= {".html", ".json"}


@on_ranks(2)
def test_first_values_from_a_folder(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = make()
    if dist.get_rank() == 0:
        save_file({name: p.detach() + 1 for name, p in source.named_parameters()}, tmp_path / "model.safetensors")
    dist.barrier()
    found = fabric(strategy(tmp_path, init_from=str(tmp_path)))
    with found.init_module(empty_init=True):
        model = make()
    run = Run(found, *found.setup(model, adamw(model.parameters())))
    with lightning_zero.gather(run.model):
        for own, other in zip(run.model.parameters(), source.parameters(), strict=True):
            assert torch.equal(own, other + 1)


@on_ranks(1)
def test_even_alone(tmp_path: Path) -> None:
    os.environ["LIGHTNING_ZERO_EVEN_ALONE"] = "1"
    run = train(strategy(tmp_path))
    counts = run.model._forward_module.engine.comm.counts
    assert any(kind == "all_gather" for kind, _ in counts)
