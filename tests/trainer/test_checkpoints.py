"""A save and a load: whatever form, row and number of ranks, training goes on as if it had not been interrupted.

What DDP shows too (the content of files, ``ckpt_path``, ModelCheckpoint) is in ``tests/lightning_table``; what goes
wrong is in ``test_bad_checkpoints`` and ``test_saves``.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, Callback, EMAWeightAveraging, LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_zero.checkpoint.sharded.read import ShardedFolder
from tests.engine.optimizers import Lookahead, Marked, Shampoo
from tests.harness import on_ranks, run
from tests.selection import pairwise_places
from tests.trainer import toys
from tests.trainer.toys import Lit, Odd, assert_weights, fit, loader, optimizer_states, seeded, trainer, weights

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]


class TwoOptimizers(toys.ByHand, Odd):
    """AdamW and SGD with two param groups."""

    def configure_optimizers(self) -> Any:
        rest = [*self.first.parameters(), self.turned, self.scale, self.empty]
        parts = list(self.blocks[0].parameters())
        groups = [{"params": parts[:2]}, {"params": parts[2:], "momentum": 0.5}]
        return [torch.optim.AdamW(rest, lr=0.01), torch.optim.SGD(groups, lr=0.01)]


class StateInLists(Lit):
    """State in lists of other shapes than the parameters'."""

    def configure_optimizers(self) -> Any:
        return Shampoo(self.parameters(), lr=0.01)


class Anchored(Lookahead):
    """Has the first weights, which its state dict, a list, leaves out."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["slow"] = p.detach().clone()

    def state_dict(self) -> Any:
        return [self.inner.state_dict()]

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state[0])


class WithAnchor(Lit):
    def configure_optimizers(self) -> Any:
        return Anchored(torch.optim.AdamW(self.parameters(), lr=0.01))


class WithMark(Lit):
    def configure_optimizers(self) -> Any:
        return Marked(self.parameters(), lr=0.01)


class MuonOfTorch(toys.ByHand):
    """For matrices, and AdamW for the rest."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.blocks.parameters() if p.dim() == 2]
        rest = [p for p in self.parameters() if not any(p is matrix for matrix in matrices)]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


class TrainsHead(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class Thaw(BaseFinetuning):
    """All but the head is frozen; a block thaws at epoch 1, the rest at epoch 2."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.first, pl_module.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[1], optimizer, lr=0.02)
        if epoch == 2:
            self.unfreeze_and_add_param_group([pl_module.first, pl_module.blocks], optimizer, lr=0.01)


def on_rank_0_alone() -> Lit:
    """As scripts do that load a model on one rank and send it to the others."""
    with torch.device("meta" if dist.get_rank() else "cpu"):
        return Lit()


WIDE = {"reduce_bucket_bytes": 3000}  # so that several parameters are in a bucket


@dataclass
class Kind:
    make: Callable[[], Lit]
    zero: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    again: Callable[[], Lit] | None = None  # what is loaded into: with other weights, if nothing is said

    def resumed(self) -> Lit:
        return seeded(self.make, seed=11) if self.again is None else self.again()


KINDS: dict[str, Kind] = {
    "odd": Kind(Odd),
    "two optimizers": Kind(TwoOptimizers),
    "state in lists": Kind(StateInLists, WIDE),
    "Muon of torch": Kind(MuonOfTorch, WIDE),
    "bf16 state": Kind(Odd, {"optimizer": {"state_dtype": "bf16"}}),
    "averages": Kind(Odd, callbacks=lambda: [EMAWeightAveraging(decay=0.8)]),
    "frozen left out": Kind(
        toys.Frozen, {"exclude_frozen": True}, lambda: [EMAWeightAveraging(decay=0.8)], lambda: seeded(toys.Frozen)
    ),
    "thawed": Kind(TrainsHead, callbacks=lambda: [Thaw()]),
    "on rank 0 alone": Kind(Lit, {"stall_timeout_s": 20}, again=on_rank_0_alone),
}
ROWS = ("zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_nvme")


def strategy(row: str, form: str, root: Path, **zero: Any) -> Any:
    if row == "ddp":
        return DDPStrategy(find_unused_parameters=True)
    checkpoint = {"name": form.removesuffix(" behind"), "background": form.endswith("behind")}
    checkpoint |= {name: zero.pop(name) for name in ("exclude_frozen",) if name in zero}
    return toys.strategy_of(row, root, checkpoint=checkpoint, **zero)


def saves_at_epoch(path: Path, epoch: int = 1) -> Callback:
    return LambdaCallback(on_train_epoch_end=lambda of, _: of.current_epoch == epoch and of.save_checkpoint(path))


Case = namedtuple("Case", "kind form saves loads precision")


def cases() -> Iterator[Case]:
    """Give each kind in each form. Rows and precisions take turns."""
    precisions = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
    for number, (kind, form) in enumerate(itertools.product(KINDS, ("full", "sharded", "sharded behind"))):
        saves, loads = ROWS[number % len(ROWS)], ROWS[(3 * number + number // len(ROWS) + 1) % len(ROWS)]
        few_bits = "optimizer" in KINDS[kind].zero
        yield Case(kind, form, saves, loads, "32-true" if few_bits else precisions[number * 5 // 3 % 4])


@pytest.mark.sample
@on_ranks(1)
def test_accumulation_of_an_epoch_goes_on_in_the_middle_of_it(tmp_path: Path) -> None:
    path = tmp_path / "cut.ckpt"
    save = LambdaCallback(on_train_batch_end=lambda t, *_: t.fit_loop.batch_idx == 2 and t.save_checkpoint(path))
    settings: dict[str, Any] = {
        "callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 3}), save],
        "max_epochs": 1,
    }
    whole, resumed = (fit("zero1", tmp_path, ckpt_path=start, **settings).trainer for start in (None, path))
    assert resumed.global_step == whole.global_step == 4


@pytest.mark.smoke
@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_resumed_run_is_the_uninterrupted_one_to_the_bit(form: str, tmp_path: Path) -> None:
    for stage in ("zero0", "zero3"):
        settings: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "limit_val_batches": 1}
        path = tmp_path / f"{stage}.ckpt"
        saves = [saves_at_epoch(path, 0)]
        whole = fit(strategy(stage, form, tmp_path), tmp_path, seeded(Odd), callbacks=saves, **settings)
        rest = fit(strategy(stage, form, tmp_path), tmp_path, seeded(Odd, 11), ckpt_path=path, **settings)
        toys.assert_goes_on(rest, whole, stage)


@on_ranks(2)
@pytest.mark.parametrize("case", list(cases()), ids="-".join)
def test_run_resumed_in_another_row_is_the_uninterrupted_one_to_the_bit(case: Case, tmp_path: Path) -> None:
    """Saved in the middle of a run by one row, loaded by another."""
    kind = KINDS[case.kind]
    path = tmp_path / "saved.ckpt"

    def body(row: str, module: Lit, *callbacks: Callback, **settings: Any) -> Any:
        settings |= {"limit_val_batches": 1, "precision": case.precision, "max_epochs": 3}
        settings["gradient_clip_val"] = 0.5 if module.automatic_optimization else None
        strategy_here = strategy(row, case.form, tmp_path, **kind.zero)
        return fit(strategy_here, tmp_path, module, callbacks=[*kind.callbacks(), *callbacks], count=12, **settings)

    whole = body(case.saves, seeded(kind.make), saves_at_epoch(path))
    whole.trainer.strategy.teardown()
    assert path.is_dir() == (case.form != "full")
    rest = body(case.loads, kind.resumed(), ckpt_path=path)
    toys.assert_goes_on(rest, whole)
    assert rest.trainer.precision_plugin.state_dict() == whole.trainer.precision_plugin.state_dict()


Way = namedtuple("Way", "kind form saves loads ranks")
FAR = itertools.product(
    ("odd", "state in lists", "Muon of torch"),
    ("full", "sharded"),
    ("ddp", "zero0", "zero1", "zero2_offload", "zero3", "zero3_nvme"),
    ("ddp", "zero0", "zero1_offload", "zero2", "zero3", "zero3_offload"),
    ("1to3", "2to3", "3to2", "2to1"),
)
ALL_WAYS = [way for way in map(Way._make, FAR) if "ddp" not in way or (way.form == "full" and way.saves != way.loads)]
WAYS = [ALL_WAYS[place] for place in pairwise_places([way._asdict() for way in ALL_WAYS])]


def _save(way: Way, root: Path) -> dict[str, Any]:
    """Two epochs, saved; and what a third gives."""
    kind, size = KINDS[way.kind], 12 // dist.get_world_size()
    settings: dict[str, Any] = {"batch_size": size, "limit_val_batches": 0}

    def body(epochs: int) -> Any:
        return fit(strategy(way.saves, way.form, root), root, seeded(kind.make), max_epochs=epochs, **settings)

    whole, saved = body(3), body(2)
    saved.trainer.save_checkpoint(root / "saved.ckpt")
    return {"weights": whole.weights, "losses": _mean_over_ranks(whole.losses[-2:]), "saved": saved.weights}


def _resume(way: Way, root: Path, expected: dict[str, Any]) -> None:
    kind, size, path = KINDS[way.kind], 12 // dist.get_world_size(), root / "saved.ckpt"
    of = trainer(strategy(way.loads, way.form, root), root, max_epochs=3, limit_val_batches=0)
    module = kind.resumed()
    of.fit(module, loader(size), ckpt_path=path)
    near, far = (1e-5, 1e-5) if way.kind == "odd" else (1e-4, 1e-3)
    torch.testing.assert_close(_mean_over_ranks(module.losses), expected["losses"], rtol=near, atol=near)
    assert_weights(weights(of), expected["weights"], tolerance=far)
    found = toys.loaded_weights(path, strategy(way.loads, way.form, root), root, kind.resumed())
    assert_weights(found, expected["saved"], tolerance=0)


def _mean_over_ranks(losses: list[float]) -> Tensor:
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


@pytest.mark.sample
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_training_goes_on_under_another_row_on_other_ranks(way: Way, tmp_path: Path) -> None:
    saves, loads = map(int, way.ranks.split("to"))
    expected = run(saves, _save, way, tmp_path)[0]
    run(loads, _resume, way, tmp_path, expected)


@on_ranks(2)
def test_ddp_goes_on_with_the_loss_scale_that_we_have_saved(tmp_path: Path) -> None:
    path = tmp_path / "scaled.ckpt"

    def scale(strategy: Any, **settings: Any) -> float:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
        of = fit(strategy, tmp_path, plugins=plugin, max_epochs=1, **settings).trainer
        of.save_checkpoint(path)
        return of.precision_plugin.scaler.get_scale()

    halves = LambdaCallback(on_train_end=lambda of, _: of.precision_plugin.scaler.update(overflowed=True))
    assert scale("zero3", callbacks=[halves]) == scale(DDPStrategy(), ckpt_path=path) == 32


@on_ranks(2)
@pytest.mark.parametrize("make", [WithAnchor, WithMark])
def test_state_dicts_of_classes_go_on_as_under_ddp(make: Any, tmp_path: Path) -> None:
    """From files of DDP too, and back. ``configure_optimizers`` sees the weights of the checkpoint."""

    def save(row: str) -> Path:
        path = tmp_path / f"{row}.ckpt"
        fit(row, tmp_path, seeded(make), max_epochs=1).trainer.save_checkpoint(path)
        dist.barrier()
        return path

    def resume(row: str, path: Path) -> toys.Run:
        found = fit(row, tmp_path, seeded(make, 5), max_epochs=2, ckpt_path=path)
        assert getattr(found.trainer.optimizers[0], "mark", 7) == 7
        return found

    expected = resume("ddp", save("ddp"))
    for first, then in (("ddp", "zero3"), ("zero3", "ddp"), ("zero3_offload", "zero1")):
        toys.assert_same(resume(then, save(first)), expected, what=f"{first}, {then}")


@on_ranks(2)
def test_tensors_own_their_memory(tmp_path: Path) -> None:
    """A view of a bucket would drag the whole bucket into the file."""
    run = fit("zero3", tmp_path, seeded(lambda: Lit(width=64, depth=4)), max_epochs=1)
    run.trainer.save_checkpoint(tmp_path / "big.ckpt")
    nbytes = sum(value.nbytes for value in run.weights.values())
    assert os.path.getsize(tmp_path / "big.ckpt") < 2 * nbytes * 1.3  # weights and momentum


@on_ranks(2)
def test_files_with_callbacks_hold_nothing_that_runs(tmp_path: Path) -> None:
    callbacks: list[Any] = [EMAWeightAveraging(), pl.callbacks.EarlyStopping("val")]
    callbacks.append(pl.callbacks.ModelCheckpoint(tmp_path, save_last=True))
    module = seeded(lambda: Lit(optimizer="adamw", scheduler="onecycle"))
    fit("zero1", tmp_path, module, callbacks=callbacks, enable_checkpointing=True, precision="bf16-mixed")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"]


def _keys(path: Path) -> Iterable[str]:
    if path.is_dir():
        return {k.removeprefix("state_dict.") for k in ShardedFolder(path).keys if k.startswith("state_dict.")}
    return set(torch.load(path)["state_dict"])


@on_ranks(2)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_frozen_parameters_are_left_out_and_then_needed(form: str, tmp_path: Path) -> None:
    path = tmp_path / "adapter.ckpt"
    saved = fit(strategy("zero3", form, tmp_path, exclude_frozen=True), tmp_path, seeded(toys.Frozen), max_epochs=1)
    saved.trainer.save_checkpoint(path)
    assert _keys(path) == {"head.weight", "head.bias", "seen"}
    with pytest.raises(RuntimeError, match=r"got .*adapter\.ckpt: the checkpoint lacks turned"):
        toys.loaded_weights(path, strategy("zero3", form, tmp_path, exclude_frozen=True), tmp_path)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_saves_before_a_run_after_an_evaluation_and_after_a_fit_hold_the_weights(form: str, tmp_path: Path) -> None:
    def assert_saved(expected: dict[str, Tensor], weights_only: bool = False) -> None:
        of.save_checkpoint(tmp_path / "a.ckpt", weights_only)
        assert_weights(toys.loaded_weights(tmp_path / "a.ckpt", "zero1", tmp_path), expected, tolerance=0)

    of, module = trainer(strategy("zero3", form, tmp_path), tmp_path, max_epochs=1), seeded(Odd)
    of.strategy.connect(module)
    assert_saved(seeded(Odd).state_dict(), weights_only=True)
    of.validate(module, loader(), verbose=False)
    assert_saved(seeded(Odd).state_dict())
    of.fit(module, loader())
    expected, states = weights(of), optimizer_states(of)
    assert_saved(expected)
    of.test(module, loader(), verbose=False)
    assert_saved(expected)
    torch.testing.assert_close(optimizer_states(of), states, rtol=1e-4, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("scheduler", ["none", "step", "onecycle", "plateau"])
def test_settings_that_a_checkpoint_overrules_are_named(scheduler: str, tmp_path: Path) -> None:
    def lit(rate: float) -> Any:
        return seeded(lambda: Lit(optimizer="adamw", scheduler=scheduler, lr=rate))

    fit("zero3", tmp_path, lit(0.05), max_epochs=1).trainer.save_checkpoint(tmp_path / "first.ckpt")
    for then in (0.05,) if scheduler == "plateau" else (0.05, 0.1):
        after = trainer("zero3", tmp_path, max_epochs=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            after.fit(lit(then), loader(), loader(), ckpt_path=tmp_path / "first.ckpt")
        said = [str(w.message) for w in caught if "the settings in the checkpoint" in str(w.message)]
        if dist.get_rank() or then == 0.05 or scheduler == "onecycle":  # which sets aside the rate that was given
            assert said == []
        else:
            assert len(said) == 1 and "lr: 0.01 (given: 0.02)." in said[0] and ".ckpt: the optimizer" in said[0]
