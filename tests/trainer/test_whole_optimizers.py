"""Optimizers that step whole tensors, under the Trainer: runs that go on elsewhere, and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.app.convert import convert
from tests.engine.optimizers import MuonAndAdam, Shampoo, matrices_and_rest
from tests.harness import on_ranks, run
from tests.trainer.test_background_saves import Gate, Opens, Saves, behind, content, same
from tests.trainer.test_sharded import Odd, sharded
from tests.trainer.toys import Lit, assert_weights, fit, loader, seeded, weights

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]


class OneClass(Odd):
    """Tied, frozen, turned, empty and lone parameters; matrices in one param group, the rest in another."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = MuonAndAdam(matrices_and_rest(trained), own_count=False)  # which no state_dict has
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Nested(Lit):
    """State in lists of other shapes than the parameters'."""

    def configure_optimizers(self) -> Any:
        return Shampoo(self.parameters(), lr=0.01)


class TwoOptimizers(Lit):
    """Muon of torch for matrices, AdamW for the rest."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.blocks.parameters() if p.dim() == 2]
        rest = [p for p in self.parameters() if not any(p is matrix for matrix in matrices)]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


MODULES = {"one class": OneClass, "nested": Nested, "two": TwoOptimizers}


def made(name: str, seed: int = 3) -> Any:
    return seeded(MODULES[name], seed=seed)


def strategy(name: str, root: Path) -> Any:
    if name == "ddp":
        return "ddp_find_unused_parameters_true"
    full = {"checkpoint": "full"} if name.endswith(" full") else {}
    return sharded(name.removesuffix(" full"), root, reduce_bucket_bytes=3000, **full)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(
    ("module", "name"),
    [("one class", "zero3_nvme"), ("one class", "zero0 full"), ("nested", "zero3 full"), ("two", "zero2_offload")],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(module: str, name: str, tmp_path: Path) -> None:
    whole = fit(strategy(name, tmp_path), tmp_path, made(module), max_epochs=3, batch_size=6)
    first = fit(strategy(name, tmp_path), tmp_path, made(module), max_epochs=2, batch_size=6)
    path = tmp_path / "two.ckpt"
    first.trainer.save_checkpoint(path)
    rest = fit(strategy(name, tmp_path), tmp_path, made(module, 11), max_epochs=3, ckpt_path=path, batch_size=6)
    assert_weights(rest.weights, whole.weights, tolerance=0)
    assert rest.losses == whole.losses[-len(rest.losses) :]


def _mean(losses: list[float]) -> Tensor:
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def _save(module: str, name: str, root: Path) -> dict[str, Any]:
    size = 12 // dist.get_world_size()
    whole = fit(strategy(name, root), root, made(module), max_epochs=3, batch_size=size)
    saved = fit(strategy(name, root), root, made(module), max_epochs=2, batch_size=size)
    saved.trainer.save_checkpoint(root / "saved.ckpt")
    return {"weights": whole.weights, "losses": _mean(whole.losses[-2:])}


def _resume(module: str, name: str, root: Path, expected: dict[str, Any]) -> None:
    size = 12 // dist.get_world_size()
    path = root / "saved.ckpt"
    found = fit(strategy(name, root), root, made(module, 11), max_epochs=3, batch_size=size, ckpt_path=path)
    torch.testing.assert_close(_mean(found.losses), expected["losses"], rtol=1e-4, atol=1e-5)
    assert_weights(found.weights, expected["weights"], tolerance=1e-3, what=name)


WAYS = [
    ("nested", ("zero1", 3), ("zero3_nvme", 2)),
    ("nested", ("ddp", 2), ("zero3", 3)),
    ("two", ("zero3_nvme", 2), ("zero2 full", 1)),
    ("two", ("zero0", 2), ("zero3_offload", 3)),
    ("one class", ("zero2_offload full", 2), ("ddp", 2)),
    pytest.param("nested", ("zero3 full", 3), ("ddp", 2), marks=pytest.mark.full),
    pytest.param("one class", ("ddp", 2), ("zero3_offload", 3), marks=pytest.mark.full),
    pytest.param("two", ("zero1", 1), ("zero3", 3), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("module", "saved_by", "loaded_by"), WAYS, ids=str)
def test_a_run_goes_on_at_other_stages_on_other_ranks(
    module: str, saved_by: tuple[str, int], loaded_by: tuple[str, int], tmp_path: Path
) -> None:
    expected = run(saved_by[1], _save, module, saved_by[0], tmp_path)[0]
    run(loaded_by[1], _resume, module, loaded_by[0], tmp_path, expected)


@on_ranks(2)
def test_the_state_in_a_file_is_that_of_ddp(tmp_path: Path) -> None:
    """Names, shapes and nesting, so that any tool which reads the one reads the other."""
    found = []
    for name in ("ddp", "zero3 full"):
        of = fit(strategy(name, tmp_path), tmp_path, made("nested"), max_epochs=1).trainer
        of.save_checkpoint(tmp_path / f"{name}.ckpt")
        found.append(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["optimizer_states"][0])
    assert _shapes(found[0]) == _shapes(found[1])


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: _shapes(item) for key, item in value.items()}
    return [_shapes(item) for item in value] if isinstance(value, list) else value


@on_ranks(2)
@pytest.mark.parametrize(("stage", "offload"), [("zero3", "none"), ("zero2", "optimizer_cpu")])
def test_what_is_written_behind_training_is_what_was_there(stage: str, offload: str, tmp_path: Path) -> None:
    """The reader comes when the next step has changed state in place, and put other tensors in its place."""
    gate = Gate("step")
    with gate.watched():
        callbacks = [Saves(tmp_path, gate.saved), Opens(gate)]
        strategy = behind(tmp_path, stage, offload)
        fit(strategy, tmp_path, made("nested"), callbacks=callbacks, max_epochs=1)
    assert gate.passed.is_set()
    found, expected = (content(tmp_path / f"{name}.ckpt") for name in ("behind", "now"))
    assert same(found, expected)


@on_ranks(2)
def test_under_fp16_with_clipping_and_accumulation_stages_agree(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "16-mixed", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    found = [fit(strategy(name, tmp_path), tmp_path, made("one class"), **settings) for name in ("zero1", "zero0")]
    assert_weights(found[0].weights, found[1].weights, tolerance=0)
    assert found[0].losses == found[1].losses


@on_ranks(2)
def test_a_second_fit_and_a_call_between_them(tmp_path: Path) -> None:
    run_of = fit(strategy("zero3", tmp_path), tmp_path, made("nested"), max_epochs=1)
    module, of = run_of.trainer.lightning_module, run_of.trainer
    assert module(torch.zeros(1, 4)).shape == (1, 1)
    of.fit_loop.max_epochs = 2
    of.fit(module, loader())
    assert all(torch.isfinite(value).all() for value in weights(of).values())


class Reads(Nested):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["state_dict"]:  # on rank 0
            state = checkpoint["optimizer_states"][0]["state"]
            self.read = {place: [gram.clone() for gram in entry["grams"]] for place, entry in state.items()}
            state[0]["grams"][0] = state[0]["grams"][0] * 2


@on_ranks(2)
def test_hooks_see_values_in_lists_and_a_folder_becomes_a_file(tmp_path: Path) -> None:
    of = fit(strategy("zero3 full", tmp_path), tmp_path, seeded(Reads), max_epochs=1, batch_size=6).trainer
    of.save_checkpoint(tmp_path / "hook.ckpt")
    same_run = fit(strategy("zero2", tmp_path), tmp_path, made("nested"), max_epochs=1, batch_size=6).trainer
    same_run.save_checkpoint(tmp_path / "folder.ckpt")
    if dist.get_rank() == 0:
        convert(tmp_path / "folder.ckpt", tmp_path / "file.ckpt", "full")
        read = of.lightning_module.read
        state, converted = (
            torch.load(tmp_path / name, weights_only=True)["optimizer_states"][0]["state"]
            for name in ("hook.ckpt", "file.ckpt")
        )
        assert torch.equal(state[0]["grams"][0], read[0][0] * 2)
        for place, grams in read.items():
            for gram, other in zip(grams, converted[place]["grams"], strict=True):
                assert torch.equal(gram, other)
    dist.barrier()
