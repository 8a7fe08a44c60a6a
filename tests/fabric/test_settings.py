"""Every field of the configuration under Fabric: it does what it does under the Trainer, or it is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero import ZeroFabricStrategy
from lightning_zero.config import ZeroConfig
from tests.fabric.toys import Run, adamw, assert_equal, fabric, make, train
from tests.harness import on_ranks
from tests.trainer.test_settings import EQUAL, in_folder

# Those with tests of their own, here or beside.
ELSEWHERE = {"stage", "precision", "checkpoint", "timeline", "init_from", "vertical_chunks", "sequence_parallel"}
ELSEWHERE |= {"loss", "fingerprint", "tensor_parallel", "expert_parallel", "tensor_plan"}


def test_every_field_is_tried_here_or_beside() -> None:
    tried = {name.partition(".")[0] for name in EQUAL} | ELSEWHERE
    assert tried == {field.name for field in dataclasses.fields(ZeroConfig)}


def strategy(tmp_path: Path, stage: int = 3, **settings: Any) -> ZeroFabricStrategy:
    return ZeroFabricStrategy(stage, **in_folder(settings, tmp_path))


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")
@pytest.mark.parametrize("name", EQUAL)
def test_setting_is_seen_in_the_engine_and_changes_no_number(name: str, tmp_path: Path) -> None:
    expected = train("zero3")
    found = train(strategy(tmp_path, **EQUAL[name]))
    config = found.model._forward_module.engine.config
    group = name.partition(".")[0]
    assert getattr(config, group) != getattr(ZeroConfig(), group)
    assert_equal(found, expected)


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize(("precision", "setting"), [
    ("bf16-mixed", {"reduce_dtype": "bf16"}),
    ("bf16-mixed", {"grad_dtype": "bf16"}),
    ("bf16-mixed", {"fp32_modules": ["Linear"]}),
    ("bf16-true", {"stochastic_rounding": True}),
])  # fmt: skip
def test_settings_of_precision_change_losses(precision: str, setting: dict[str, Any], tmp_path: Path) -> None:
    run = train(strategy(tmp_path, precision=setting), precision=precision)
    assert run.losses != train("zero3", precision=precision).losses


@pytest.mark.full
@on_ranks(2)
def test_vertical_chunks_give_the_losses_of_whole_batches(tmp_path: Path) -> None:
    found = train(strategy(tmp_path, vertical_chunks=2, activation_checkpointing="blocks"))
    assert found.losses == pytest.approx(train("zero3").losses, rel=1e-4)


@pytest.mark.full
@on_ranks(2)
def test_init_from_gives_first_values(tmp_path: Path) -> None:
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
