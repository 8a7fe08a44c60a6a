"""Folders of ours are read by FSDP2 and by torch's and Lightning's tools, and ours reads theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.trainer.saves.sharded_checkpoints import read
from tests.harness import on_ranks
from tests.trainer.test_sharded import odd, sharded
from tests.trainer.toys import Lit, assert_weights, fit, loader, seeded, trainer, weights

pytestmark = pytest.mark.full


def adamw() -> Lit:
    module: Lit = seeded(lambda: Lit(width=16, optimizer="adamw", scheduler="step"))
    return module


def other_weights() -> Lit:
    module: Lit = seeded(lambda: Lit(width=16, optimizer="adamw", scheduler="step"), seed=11)
    return module


class Fsdp2(Lit):
    """As users of ModelParallelStrategy write it."""

    def configure_model(self) -> None:
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


def fsdp2_trained(epochs: int, root: Path, seed: int = 3, **settings: Any) -> Any:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    of = trainer(strategy, root, max_epochs=epochs)
    module = seeded(lambda: Fsdp2(width=16, optimizer="adamw", scheduler="step"), seed=seed)
    of.fit(module, loader(), loader(), **settings)
    return of, module


@on_ranks(2)
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_with_lightnings_fsdp2_both_ways(name: str, tmp_path: Path) -> None:
    whole = fit(sharded(name), tmp_path, adamw(), max_epochs=3)
    fit(sharded(name), tmp_path, adamw(), max_epochs=2).trainer.save_checkpoint(tmp_path / "ours.ckpt")

    _, module = fsdp2_trained(3, tmp_path, seed=11, ckpt_path=tmp_path / "ours.ckpt")
    torch.testing.assert_close(module.losses, whole.losses[-len(module.losses) :], rtol=1e-5, atol=1e-6)
    found = {key: value.full_tensor() for key, value in get_model_state_dict(module).items()}
    assert_weights(found, whole.weights)

    of, _ = fsdp2_trained(2, tmp_path)
    of.save_checkpoint(tmp_path / "theirs.ckpt")
    rest = fit(sharded(name), tmp_path, other_weights(), max_epochs=3, ckpt_path=tmp_path / "theirs.ckpt")
    torch.testing.assert_close(rest.losses, whole.losses[-len(rest.losses) :], rtol=1e-5, atol=1e-6)
    assert_weights(rest.weights, whole.weights)


@on_ranks(2)
def test_a_folder_of_lightnings_fsdp_goes_on(tmp_path: Path) -> None:
    """Its training needs a GPU, and its own writer does not."""
    whole = fit(sharded(), tmp_path, adamw(), max_epochs=3)
    of, _ = fsdp2_trained(2, tmp_path)
    checkpoint = of._checkpoint_connector.dump_checkpoint()
    theirs = mock.Mock(_state_dict_type="sharded", global_rank=dist.get_rank(), broadcast=lambda path: path)
    FSDPStrategy.save_checkpoint(theirs, checkpoint, tmp_path / "fsdp.ckpt")
    assert any(key.startswith("model.") for key in ShardedFolder(tmp_path / "fsdp.ckpt").keys)
    rest = fit(sharded(), tmp_path, other_weights(), max_epochs=3, ckpt_path=tmp_path / "fsdp.ckpt")
    torch.testing.assert_close(rest.losses, whole.losses[-len(rest.losses) :], rtol=1e-5, atol=1e-6)
    assert_weights(rest.weights, whole.weights)


@on_ranks(2)
def test_with_plain_fsdp2(tmp_path: Path) -> None:
    """dcp.load puts our folder into DTensors; what dcp.save writes, beside Lightning's meta.pt, is loaded here."""
    saved = fit(sharded(), tmp_path, adamw(), max_epochs=2)
    saved.trainer.save_checkpoint(tmp_path / "ours.ckpt")
    module = other_weights()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    state = {"state_dict": get_model_state_dict(module), "optimizer_0": get_optimizer_state_dict(module, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path / "ours.ckpt")
    module.load_state_dict(state["state_dict"])
    set_optimizer_state_dict(module, optimizer, optim_state_dict=state["optimizer_0"])
    assert_weights({k: v.full_tensor() for k, v in module.state_dict().items()}, saved.weights, tolerance=0)
    dcp.save(state, checkpoint_id=tmp_path / "theirs.ckpt")
    if dist.get_rank() == 0:
        (tmp_path / "theirs.ckpt" / "meta.pt").write_bytes((tmp_path / "ours.ckpt" / "meta.pt").read_bytes())
    dist.barrier()
    of = fit(sharded("zero2"), tmp_path, other_weights(), max_epochs=2, ckpt_path=tmp_path / "theirs.ckpt").trainer
    assert_weights(weights(of), saved.weights, tolerance=0)
    one, other = (read(tmp_path / f"{name}.ckpt", None)["optimizer_states"][0] for name in ("ours", "theirs"))
    for key, entry in one["state"].items():
        for entry_name, value in entry.items():
            assert torch.equal(value.whole(), other["state"][key][entry_name].whole())


@on_ranks(2)
def test_torchs_and_lightnings_tools(tmp_path: Path) -> None:
    saved = fit(sharded(), tmp_path, odd(), max_epochs=2)
    path = tmp_path / "odd.ckpt"
    saved.trainer.save_checkpoint(path)
    if dist.get_rank():
        return
    dcp_to_torch_save(path, tmp_path / "torch.pt")
    found = torch.load(tmp_path / "torch.pt", weights_only=True)
    assert_weights(found["state_dict"], {k: saved.weights[k] for k in found["state_dict"]}, tolerance=0)
    assert found["state_dict"].keys() == saved.weights.keys()
    assert len(found["optimizer_0"]["param_groups"]) == 2
    command = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint", str(path)]
    subprocess.run([*command, "--output_file", str(tmp_path / "one.pt")], check=True, capture_output=True)
    consolidated = torch.load(tmp_path / "one.pt", weights_only=True)
    assert consolidated["global_step"] == 12
    loaded = type(odd()).load_from_checkpoint(tmp_path / "one.pt")
    assert_weights(loaded.state_dict(), saved.weights, tolerance=0)
