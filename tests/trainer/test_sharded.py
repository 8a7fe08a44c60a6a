"""Checkpoints that are folders: what is in them, for hooks, for FSDP2, and for torch's and Lightning's tools."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint import state_dict as dcp_states
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchmetrics import MeanMetric

from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.settings import ConfigError
from lightning_zero.trainer.saves.sharded_checkpoints import OPTIMIZERS, divide, read
from tests.harness import on_ranks, run_command
from tests.trainer import toys
from tests.trainer.toys import Lit, Odd, assert_weights, files, fit, loader, seeded, sharded, trainer, weights

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]


@on_ranks(4)
def test_one_of_two_replicas_is_written_and_the_other_layout_loads_it(tmp_path: Path) -> None:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank() % 2), "NODE_RANK": str(dist.get_rank() // 2)}
    nodes: dict[str, Any] = {"devices": 2, "num_nodes": 2}
    for saves, loads, count in (("node", "flat", 2), ("flat", "node", 4)):
        first, then = (sharded(hybrid_shard=layout) for layout in (saves, loads))
        path = tmp_path / f"{saves}.ckpt"
        saved = fit(first, tmp_path, seeded(lambda: Odd(width=64)), **nodes)
        saved.trainer.save_checkpoint(path)
        first.engine.release()
        # Of two replicas one, and each of its ranks.
        assert files(path, "*.distcp") == [f"__{rank}_0.distcp" for rank in range(count)]
        of = trainer(then, tmp_path, **nodes)
        of.test(seeded(lambda: Odd(width=64), seed=11), loader(), ckpt_path=path, verbose=False)
        assert_weights(weights(of), saved.weights, tolerance=0)
        then.engine.release()


@on_ranks(2)
@pytest.mark.parametrize("name", ["zero0", "zero3"])
def test_folder_holds_every_element_once_and_a_tied_weight_too(name: str, tmp_path: Path) -> None:
    saved = fit(sharded(name), tmp_path, seeded(lambda: Odd(width=64)))
    saved.trainer.save_checkpoint(tmp_path / "a.ckpt")
    folder = ShardedFolder(tmp_path / "a.ckpt")
    places = {(i.relative_path, i.offset) for i in folder.index.storage_data.values()}
    tied = [folder.index.state_dict_metadata[f"state_dict.blocks.{n}.up.weight"] for n in (0, 1)]
    assert tied[0] == tied[1]
    assert len(places) == len(folder.index.storage_data) - len(tied[0].chunks)  # in the file once, under two names
    for key, value in saved.weights.items():
        assert torch.equal(folder.tensor(f"state_dict.{key}").whole(), value)
    sizes = [(tmp_path / "a.ckpt" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert min(sizes) > 0.5 * max(sizes)  # also where nothing is sharded


class EditsCheckpoint(Lit):
    """What hooks see and change counts. A hook may not read a value."""

    reads = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.reads:
            checkpoint["norm"] = checkpoint["state_dict"]["head.weight"].norm()
        assert checkpoint["state_dict"]["head.weight"].shape == self.head.weight.shape
        checkpoint["mine"] = {"number": 5, "tensor": torch.ones(3)}
        checkpoint["state_dict"]["head.bias"] = torch.full((1,), 7.0)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"]["number"] == 5 and checkpoint["mine"]["tensor"].sum() == 3
        state = checkpoint["state_dict"]
        assert isinstance(state["first.weight"], StoredTensor)
        state["first.weight"] = state["first.weight"] * 0 + 2


@on_ranks(2)
def test_values_that_hooks_put_in_are_saved_and_loaded(tmp_path: Path) -> None:
    run = fit(sharded(), tmp_path, seeded(EditsCheckpoint))
    run.module.reads = True
    with pytest.raises(RuntimeError, match=r"no rank holds all of a tensor.*zero/checkpoint=full"):
        run.trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    run.module.reads = False
    run.trainer.save_checkpoint(tmp_path / "edited.ckpt")
    found = toys.loaded_weights(tmp_path / "edited.ckpt", sharded(), tmp_path, seeded(EditsCheckpoint, seed=4))
    assert (found["head.bias"] == 7).all() and (found["first.weight"] == 2).all()


@on_ranks(2)
def test_extra_state_of_any_form_comes_back(tmp_path: Path) -> None:
    class OwnState(Lit):
        value: Any = "another"

        def get_extra_state(self) -> Any:
            return self.value

        def set_extra_state(self, value: Any) -> None:
            self.value = value

    for number, value in enumerate([{}, {0: torch.ones(2)}, {"a": [torch.ones(1), {}]}, (torch.ones(1), 2), None]):
        path, saved, loaded = tmp_path / f"{number}.ckpt", seeded(OwnState), seeded(OwnState)
        saved.value = value
        fit(sharded(), tmp_path, saved, max_steps=1, limit_val_batches=0).trainer.save_checkpoint(path)
        toys.loaded_weights(path, sharded(), tmp_path, loaded)
        assert str(loaded.value) == str(value)


class Turned(torch.nn.Linear):
    """Turns a weight when it loads a state dict that an older version of the class has saved."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *rest: Any) -> None:
        if local.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"].t()
        super()._load_from_state_dict(state, prefix, local, *rest)


class OfVersion2(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up = Turned(8, 8)
        self.blocks[0].down = torch.nn.Linear(8, 8).requires_grad_(False)


@on_ranks(2)
@pytest.mark.parametrize("exclude_frozen", [False, True])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_modules_know_the_version_that_was_saved(form: str, exclude_frozen: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": {"name": form, "exclude_frozen": exclude_frozen}}
    run = fit(sharded(**settings), tmp_path, seeded(OfVersion2), max_epochs=1)
    run.trainer.save_checkpoint(tmp_path / "a.ckpt")
    found = toys.loaded_weights(tmp_path / "a.ckpt", sharded(**settings), tmp_path, seeded(OfVersion2, seed=4))
    assert torch.equal(found["blocks.0.up.weight"], run.weights["blocks.0.up.weight"])


@on_ranks(2)
def test_folder_may_go_once_it_is_loaded(tmp_path: Path) -> None:
    """A job removes the folder it went on from. A module puts tensors of the folder in the place of its own."""

    class Removes(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()
            self.mean.persistent(True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean.weight.add_(1)
            return super().training_step(batch, batch_idx)

        def on_train_start(self) -> None:
            dist.barrier()
            shutil.rmtree(tmp_path / "two.ckpt", ignore_errors=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01))

    whole = fit(sharded(), tmp_path, seeded(Removes), max_epochs=3)
    fit(sharded(), tmp_path, seeded(Removes), max_epochs=2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    rest = fit(sharded(), tmp_path, seeded(Removes, seed=4), max_epochs=3, ckpt_path=tmp_path / "two.ckpt")
    toys.assert_goes_on(rest, whole)
    assert rest.module.mean.weight == whole.module.mean.weight == len(whole.losses)


@on_ranks(2)
def test_model_checkpoint_keeps_the_newest_folder_and_replaces_files(tmp_path: Path) -> None:
    """The best, ``last`` and weights only; the file of a run before gives way to the folder."""
    one: dict[str, Any] = {"enable_version_counter": False}
    for strategy in ("zero3", sharded(), sharded()):
        saves = [
            ModelCheckpoint(tmp_path / "top", every_n_train_steps=2, filename="{step}", save_last=True, **one),
            ModelCheckpoint(tmp_path / "weights", save_weights_only=True, filename="only", **one),
        ]
        of = fit(strategy, tmp_path, enable_checkpointing=True, callbacks=saves, limit_val_batches=0).trainer
        dist.barrier()
    assert files(tmp_path / "top") == ["last.ckpt", "step=12.ckpt"]
    assert files(tmp_path / "weights") == ["only.ckpt"]
    assert all(path.is_dir() for path in (tmp_path / "top").iterdir())
    again = fit(sharded(), tmp_path, seeded(Lit, seed=4), max_epochs=3, ckpt_path=tmp_path / "top" / "last.ckpt")
    assert again.trainer.global_step == 18
    with pytest.raises(KeyError, match="weights_only"):
        fit(sharded(), tmp_path, max_epochs=3, ckpt_path=tmp_path / "weights" / "only.ckpt")
    found = toys.loaded_weights(tmp_path / "weights" / "only.ckpt", sharded("zero1"), tmp_path, seeded(Lit, seed=4))
    assert_weights(found, weights(of), tolerance=0)


@on_ranks(1)
def test_settings_that_folders_ignore_are_refused(tmp_path: Path) -> None:
    of = fit(sharded(), tmp_path).trainer
    path, plugin = tmp_path / "a.ckpt", AsyncCheckpointIO()
    acts: list[tuple[Callable[[], Any], str]] = [
        (lambda: sharded(checkpoint_io=plugin), "^checkpoint='sharded': expected no CheckpointIO, .* got AsyncCheck"),
        (lambda: sharded(checkpoint={"background": True}), r"^checkpoint\['background'\]: expected False with check"),
        (lambda: trainer(sharded(), tmp_path, plugins=[plugin]), "expected no CheckpointIO, .* got AsyncCheckpointIO"),
        (lambda: of.save_checkpoint(path, storage_options={"a": 1}), r"expected no storage_options, .* got \{'a': 1\}"),
        (lambda: divide({OPTIMIZERS: [{"state": {0: {"m": [{4: 1}]}}}]}), "strings as keys in optimizer .* got 4"),
    ]
    for act, says in acts:
        with pytest.raises(ConfigError, match=says):
            act()


class Adamw(Lit):
    def __init__(self) -> None:
        super().__init__(width=16, optimizer="adamw", scheduler="step")


class Fsdp2(Adamw):
    """As users of ModelParallelStrategy write it."""

    def configure_model(self) -> None:
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


def fsdp2_trained(epochs: int, root: Path, seed: int = 3, **settings: Any) -> Any:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    of, module = trainer(strategy, root, max_epochs=epochs), seeded(Fsdp2, seed)
    of.fit(module, loader(), loader(), **settings)
    return of, module


@on_ranks(2)
def test_lightnings_fsdp_goes_on_from_ours_and_ours_from_its_folders(tmp_path: Path) -> None:
    """FSDP2's; and FSDP1's, whose training needs a GPU, and its writer does not."""
    whole = fit(sharded(), tmp_path, seeded(Adamw), max_epochs=3)
    fit(sharded("zero1"), tmp_path, seeded(Adamw), max_epochs=2).trainer.save_checkpoint(tmp_path / "ours.ckpt")
    _, module = fsdp2_trained(3, tmp_path, seed=11, ckpt_path=tmp_path / "ours.ckpt")
    torch.testing.assert_close(module.losses, whole.losses[-len(module.losses) :], rtol=1e-5, atol=1e-6)
    found = {key: value.full_tensor() for key, value in dcp_states.get_model_state_dict(module).items()}
    assert_weights(found, whole.weights)
    of, _ = fsdp2_trained(2, tmp_path)
    of.save_checkpoint(tmp_path / "fsdp2.ckpt")
    checkpoint = of._checkpoint_connector.dump_checkpoint()
    theirs = mock.Mock(_state_dict_type="sharded", global_rank=dist.get_rank(), broadcast=lambda path: path)
    FSDPStrategy.save_checkpoint(theirs, checkpoint, tmp_path / "fsdp.ckpt")
    dist.barrier()  # theirs is none: rank 0 writes meta.pt after the shards
    assert any(key.startswith("model.") for key in ShardedFolder(tmp_path / "fsdp.ckpt").keys)
    for row, name in (("zero1", "fsdp2.ckpt"), ("zero3", "fsdp.ckpt")):
        rest = fit(sharded(row), tmp_path, seeded(Adamw, 11), max_epochs=3, ckpt_path=tmp_path / name)
        torch.testing.assert_close(rest.losses, whole.losses[-len(rest.losses) :], rtol=1e-5, atol=1e-6)
        assert_weights(rest.weights, whole.weights)


@on_ranks(2)
def test_dcp_loads_our_folder_and_ours_loads_dcps(tmp_path: Path) -> None:
    """dcp.load puts our folder into DTensors; what dcp.save writes, beside Lightning's meta.pt, is loaded here."""
    saved = fit(sharded(), tmp_path, seeded(Adamw), max_epochs=2)
    saved.trainer.save_checkpoint(tmp_path / "ours.ckpt")
    module = seeded(Adamw, 11)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    state = {
        "state_dict": dcp_states.get_model_state_dict(module),
        "optimizer_0": dcp_states.get_optimizer_state_dict(module, optimizer),
    }
    dcp.load(state, checkpoint_id=tmp_path / "ours.ckpt")
    module.load_state_dict(state["state_dict"])
    dcp_states.set_optimizer_state_dict(module, optimizer, optim_state_dict=state["optimizer_0"])
    assert_weights({k: v.full_tensor() for k, v in module.state_dict().items()}, saved.weights, tolerance=0)
    dcp.save(state, checkpoint_id=tmp_path / "theirs.ckpt")
    toys.once(lambda: shutil.copy(tmp_path / "ours.ckpt" / "meta.pt", tmp_path / "theirs.ckpt"))
    of = fit(sharded("zero2"), tmp_path, seeded(Adamw, 11), max_epochs=2, ckpt_path=tmp_path / "theirs.ckpt").trainer
    assert_weights(weights(of), saved.weights, tolerance=0)
    one, other = (read(tmp_path / f"{name}.ckpt", None)["optimizer_states"][0] for name in ("ours", "theirs"))
    for key, entry in one["state"].items():
        for entry_name, value in entry.items():
            assert torch.equal(value.whole(), other["state"][key][entry_name].whole())


@on_ranks(2, timeout=150)
def test_tools_of_torch_and_lightning_make_one_file(tmp_path: Path) -> None:
    saved, path = fit(sharded(), tmp_path, seeded(Odd), max_epochs=2), tmp_path / "odd.ckpt"
    saved.trainer.save_checkpoint(path)
    if dist.get_rank():
        return
    dcp_to_torch_save(path, tmp_path / "torch.pt")
    found = torch.load(tmp_path / "torch.pt", weights_only=True)
    assert found["state_dict"].keys() == saved.weights.keys()
    assert_weights({name: found["state_dict"][name] for name in saved.weights}, saved.weights, tolerance=0)
    assert len(found["optimizer_0"]["param_groups"]) == 2
    tool = "lightning.fabric.utilities.consolidate_checkpoint"
    assert run_command("python", "-m", tool, path, "--output_file", tmp_path / "one.pt").returncode == 0
    assert torch.load(tmp_path / "one.pt", weights_only=True)["global_step"] == 12
    assert_weights(Odd.load_from_checkpoint(tmp_path / "one.pt").state_dict(), saved.weights, tolerance=0)
