"""Saves by ranges: the file is the one that rank 0 would write with everything in its memory, and nobody holds that."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor

from lightning_zero.checkpoint import verify
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.trainer.saves import range_saves
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO
from tests.harness import on_ranks
from tests.trainer.test_checkpoints import StateInLists
from tests.trainer.toys import Odd, fit, odd, same, seeded, strategy_of, weights

pytestmark = pytest.mark.full


@contextmanager
def whole_on_rank_0() -> Iterator[None]:
    """As before there were ranges."""
    with mock.patch.object(range_saves, "_choose", return_value=None):
        yield


@contextmanager
def nobody_holds_the_whole() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("gathered")

    with mock.patch.object(Bucket, "full_master", refuse), mock.patch.object(Bucket, "gathered", refuse):
        yield


WAYS = ("whole.ckpt", "ranges.ckpt", "unshared.ckpt")  # by rank 0; by all; where rank 1 does not see the file


def save_in_each_way(of: Any, root: Path, weights_only: bool = False) -> None:
    unshared = mock.patch.object(range_saves, "_open", return_value=None) if dist.get_rank() else nullcontext()
    for name, way in zip(WAYS, (whole_on_rank_0(), nobody_holds_the_whole(), unshared), strict=True):
        with way:
            of.save_checkpoint(root / name, weights_only)


ROWS = ("zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_nvme")
CASES = list(zip(ROWS, itertools.cycle(("32-true", "bf16-mixed", "bf16-true")), strict=False))


@pytest.mark.sample
@on_ranks(2, full=(3,))
@pytest.mark.parametrize(("row", "precision"), CASES)
def test_file_by_ranges_is_that_of_rank_0_and_nobody_gathers(row: str, precision: Any, tmp_path: Path) -> None:
    module = seeded(StateInLists) if row in ("zero2", "zero3_offload") else odd()
    of = fit(strategy_of(row, tmp_path), tmp_path, module, count=12, max_epochs=1, precision=precision).trainer
    for weights_only in (False, True):
        save_in_each_way(of, tmp_path, weights_only)
        whole, *others = [torch.load(tmp_path / name, weights_only=True) for name in WAYS]
        for name, found in zip(WAYS[1:], others, strict=True):
            assert same(found, whole)
            tied = [found["state_dict"][f"blocks.{n}.up.weight"] for n in (0, 1)]
            assert (tied[0].data_ptr() == tied[1].data_ptr()) == isinstance(module, Odd)
            assert verify.check(tmp_path / name).damage == []
            assert zipfile.ZipFile(tmp_path / name).testzip() is None
        dist.barrier()
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == sorted(WAYS)
    assert not list(tmp_path.glob(".*"))


class Edits(Odd):
    """Reads what is saved, and changes it in every way."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if dist.get_rank():
            return
        state = checkpoint["state_dict"]
        checkpoint["norm"] = torch.stack([v.double().norm() for v in state.values()]).norm()
        state["first.weight"].mul_(2)
        state["head.bias"] = torch.full_like(state["head.bias"], 7.0)
        checkpoint["optimizer_states"][0]["state"][0]["exp_avg"].zero_()
        del state["seen"]


@on_ranks(2)
@pytest.mark.parametrize("who", ["module", "callback", "callback of rank 0"])
def test_hooks_read_and_replace_values_of_the_file(who: str, tmp_path: Path) -> None:
    callback = Callback()
    callback.on_save_checkpoint = lambda of, module, checkpoint: Edits.on_save_checkpoint(module, checkpoint)
    asks = who == "callback" or (who == "callback of rank 0" and dist.get_rank() == 0)  # as of one that writes logs
    module = seeded(Edits if who == "module" else Odd)
    of = fit("zero3", tmp_path, module, max_epochs=1, callbacks=[callback] if asks else []).trainer
    before = weights(of)
    with nobody_holds_the_whole():
        of.save_checkpoint(tmp_path / "edited.ckpt")
    with whole_on_rank_0():
        of.save_checkpoint(tmp_path / "whole.ckpt")
    found, whole = (torch.load(tmp_path / f"{name}.ckpt") for name in ("edited", "whole"))
    assert same(found, whole)
    state = found["state_dict"]
    assert torch.equal(state["first.weight"], before["first.weight"] * 2) and state["head.bias"].eq(7).all()
    assert "seen" not in state and found["norm"] > 0
    assert not found["optimizer_states"][0]["state"][0]["exp_avg"].any()
    assert same(dict(weights(of)), dict(before))  # what trains on is not what was edited
    assert sorted(p.name for p in tmp_path.iterdir()) == ["edited.ckpt", "whole.ckpt"]


@on_ranks(2)
@pytest.mark.parametrize(("stage", "precision"), [("zero0", "32-true"), ("zero1", "bf16-mixed"), ("zero3", "32-true")])
def test_averages_are_saved_by_ranges(stage: str, precision: Any, tmp_path: Path) -> None:
    """They are one more copy of everything, and nobody holds that either."""

    class Saves(Callback):
        def on_train_batch_end(self, of: Any, *_: Any) -> None:
            if of.global_step == 4:
                save_in_each_way(of, tmp_path)

    callbacks = [EMAWeightAveraging(use_buffers=True), Saves()]
    fit(stage, tmp_path, odd(), max_epochs=1, callbacks=callbacks, precision=precision)
    whole, *others = (torch.load(tmp_path / name) for name in WAYS)
    assert "current_model_state" in whole and all(same(found, whole) for found in others)
    assert not same(whole["current_model_state"]["first.weight"], whole["state_dict"]["first.weight"])


@on_ranks(2)
def test_large_weights_are_mapped_and_what_callers_keep_is_copied(tmp_path: Path) -> None:
    big = torch.arange(1 << 19, dtype=torch.float32)
    kept, path = big * 2, tmp_path / f"{dist.get_rank()}.ckpt"
    saved = {"state_dict": {"w": big, "b": torch.ones(2)}, "kept": [{"w": kept, "w2": kept[5:], "s": torch.ones(3)}]}
    ZeroCheckpointIO().save_checkpoint(saved, path)
    found = ZeroCheckpointIO().load_checkpoint(path)
    assert same(found, saved)
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [tuple(int(n, 16) for n in line.split()[0].split("-")) for line in lines if str(path) in line]

    def mapped(tensor: Tensor) -> bool:
        return any(low <= tensor.data_ptr() < high for low, high in spans)

    here = found["kept"][0]
    assert mapped(found["state_dict"]["w"])
    assert not any(map(mapped, [found["state_dict"]["b"], *here.values()]))
    assert here["w2"].data_ptr() == here["w"].data_ptr() + 20
