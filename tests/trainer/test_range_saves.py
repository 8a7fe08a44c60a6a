"""Saves by ranges: the file is the one that rank 0 would write with everything in its memory, and nobody holds that."""

from __future__ import annotations

import errno
import itertools
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import verify
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.trainer.saves import range_saves
from tests.harness import on_ranks
from tests.selection import pairwise_places
from tests.trainer.toys import Lit, assert_same, fit, loader, seeded, trainer, weights

pytestmark = pytest.mark.full


class Model(Lit):
    """With what makes ranges less simple: tied, frozen, empty and channels-last parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__(width=24, optimizer="adamw", scheduler="step")
        self.tied = nn.Linear(24, 1)
        self.tied.weight = self.head.weight
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.none = nn.Parameter(torch.empty(0))
        self.conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("count", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.tied(self.frozen(self.first(x))) + self.none.sum()
        return out + self.conv(x.view(-1, 2, 2, 1).repeat(1, 1, 2, 4)).mean()


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, with dtypes and strides."""
    if isinstance(a, Tensor):
        return bool(torch.equal(a, b)) and a.dtype == b.dtype and a.stride() == b.stride()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


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


CASES = [
    {"stage": stage, "offload": offload, "precision": precision}
    for stage, offload, precision in itertools.product(
        ("zero0", "zero1", "zero2", "zero3"),
        ("none", "optimizer_cpu", "cpu", "nvme"),
        ("32-true", "bf16-mixed", "bf16-true"),
    )
    if (offload == "none" or stage != "zero0") and (stage == "zero3" or offload in ("none", "optimizer_cpu"))
]
CASES = [CASES[place] for place in pairwise_places(CASES)]


def strategy_of(case: dict[str, Any], root: Path) -> ZeroStrategy:
    offload: Any = case["offload"]
    if offload == "nvme":
        (root / "nvme").mkdir(exist_ok=True)
        offload = {"name": "nvme", "nvme_path": str(root / "nvme")}
    return ZeroStrategy(case["stage"], offload=offload)


@pytest.mark.sample
@on_ranks(2, full=(1, 3))
@pytest.mark.mainly(lambda case: CASES.index(case) % 2 == 0)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_the_file_is_that_of_rank_0(case: dict[str, Any], tmp_path: Path) -> None:
    of = fit(strategy_of(case, tmp_path), tmp_path, seeded(Model), max_epochs=1, precision=case["precision"]).trainer
    for weights_only in (False, True):
        with whole_on_rank_0():
            of.save_checkpoint(tmp_path / "whole.ckpt", weights_only)
        with nobody_holds_the_whole():
            of.save_checkpoint(tmp_path / "ranges.ckpt", weights_only)
        with mock.patch.object(range_saves, "_open", return_value=None) if dist.get_rank() else nullcontext():
            of.save_checkpoint(tmp_path / "unshared.ckpt", weights_only)
        files = [tmp_path / f"{name}.ckpt" for name in ("whole", "ranges", "unshared")]
        whole, *others = [torch.load(path, weights_only=True) for path in files]
        for path, found in zip(files[1:], others, strict=True):
            assert same(found, whole)
            tied = found["state_dict"]["head.weight"], found["state_dict"]["tied.weight"]
            assert tied[0].data_ptr() == tied[1].data_ptr()
            assert verify.check(path).damage == []
            assert zipfile.ZipFile(path).testzip() is None
        dist.barrier()
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == sorted(path.name for path in files)
    assert not list(tmp_path.glob(".*"))


class Edits(Model):
    """Reads what is saved, and changes it in every way."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if dist.get_rank():
            return
        state = checkpoint["state_dict"]
        checkpoint["norm"] = torch.stack([v.double().norm() for v in state.values()]).norm()
        state["first.weight"].mul_(2)
        state["head.bias"] = torch.full_like(state["head.bias"], 7.0)
        checkpoint["optimizer_states"][0]["state"][0]["exp_avg"].zero_()
        del state["count"]


class ByCallback(Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        Edits.on_save_checkpoint(pl_module, checkpoint)


@on_ranks(2)
@pytest.mark.parametrize("who", ["module", "callback", "callback of rank 0", "callback's own"])
def test_hooks_read_and_replace(who: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 1}
    if who == "callback":
        settings["callbacks"] = [ByCallback()]
    elif who == "callback of rank 0":  # as of a rank that writes logs
        settings["callbacks"] = [] if dist.get_rank() else [ByCallback()]
    elif who == "callback's own":
        settings["callbacks"] = [callback := Callback()]
        callback.on_save_checkpoint = lambda trainer, module, c: Edits.on_save_checkpoint(module, c)  # type: ignore
    of = fit("zero3", tmp_path, seeded(Edits if who == "module" else Model), **settings).trainer
    before = weights(of)
    with nobody_holds_the_whole():
        of.save_checkpoint(tmp_path / "edited.ckpt")
    with whole_on_rank_0():
        of.save_checkpoint(tmp_path / "whole.ckpt")
    found, whole = (torch.load(tmp_path / f"{name}.ckpt") for name in ("edited", "whole"))
    assert same(found, whole)
    state = found["state_dict"]
    assert torch.equal(state["first.weight"], before["first.weight"] * 2) and state["head.bias"].eq(7).all()
    assert "count" not in state and found["norm"] > 0
    assert not found["optimizer_states"][0]["state"][0]["exp_avg"].any()
    assert same(dict(weights(of)), dict(before))  # what trains on is not what was edited
    assert sorted(p.name for p in tmp_path.iterdir()) == ["edited.ckpt", "whole.ckpt"]


@on_ranks(2)
@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        *[pytest.param(*case, marks=pytest.mark.full) for case in (("zero0", "32-true"), ("zero3", "bf16-mixed"))],
        ("zero1", "bf16-mixed"),
        ("zero3", "32-true"),
    ],
)
def test_averages(stage: str, precision: Any, tmp_path: Path) -> None:
    """They are one more copy of everything, and nobody holds that either."""

    class Saves(Callback):
        def on_train_batch_end(self, of: Any, *_: Any) -> None:
            if of.global_step == 4:
                with nobody_holds_the_whole():
                    of.save_checkpoint(tmp_path / "ranges.ckpt")
                with mock.patch.object(range_saves, "_open", return_value=None) if dist.get_rank() else nullcontext():
                    of.save_checkpoint(tmp_path / "unshared.ckpt")
                with whole_on_rank_0():
                    of.save_checkpoint(tmp_path / "whole.ckpt")

    callbacks = [EMAWeightAveraging(use_buffers=True), Saves()]
    fit(stage, tmp_path, seeded(Model), max_epochs=1, callbacks=callbacks, precision=precision)
    found, unshared, whole = (torch.load(tmp_path / f"{name}.ckpt") for name in ("ranges", "unshared", "whole"))
    assert "current_model_state" in whole and same(found, whole) and same(unshared, whole)
    assert not same(whole["current_model_state"]["first.weight"], whole["state_dict"]["first.weight"])
    settings: dict[str, Any] = {"max_epochs": 2, "callbacks": [EMAWeightAveraging(use_buffers=True)]}
    runs = [
        fit(stage, tmp_path, seeded(Model), ckpt_path=tmp_path / name, precision=precision, **settings)
        for name in ("ranges.ckpt", "whole.ckpt")
    ]
    assert_same(*runs, tolerance=0)


def full_disk(fd: int, data: Any, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_is_named_on_all_ranks(rank: int, shared: bool, tmp_path: Path) -> None:
    of = fit("zero3", tmp_path, seeded(Model), max_epochs=1).trainer
    path = tmp_path / "a.ckpt"
    of.save_checkpoint(path)
    before = path.read_bytes()
    fails = dist.get_rank() == (rank if shared else 0)
    unshared = nullcontext() if shared else mock.patch.object(range_saves, "_open", _not_seen)
    full = mock.patch.object(os, "pwrite", full_disk) if fails else nullcontext()
    names = pytest.raises((OSError, RuntimeError), match=r"a\.ckpt: the file could not be written: .*No space left")
    with unshared, full, names:
        of.save_checkpoint(path)
    assert path.read_bytes() == before
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
    of.save_checkpoint(path)  # and these ranks go on together
    assert fit("zero3", tmp_path, seeded(Model), max_epochs=2, ckpt_path=path).losses


_open = range_saves._open


def _not_seen(place: Any) -> int | None:
    return None if dist.get_rank() else _open(place)


@on_ranks(2)
def test_a_value_that_nobody_wrote_is_no_checkpoint(tmp_path: Path) -> None:
    """Zeros in the place of weights would load in silence."""
    of = fit("zero3", tmp_path, seeded(Model), max_epochs=1).trainer
    lost = mock.patch.object(range_saves, "own_ranges", lambda *a: iter(()))  # type: ignore[attr-defined]
    with lost if dist.get_rank() else nullcontext(), pytest.raises(RuntimeError, match=r"a\.ckpt: .*bytes .*written"):
        of.save_checkpoint(tmp_path / "a.ckpt")
    dist.barrier()
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_saved_values_are_those_of_the_moment(tmp_path: Path) -> None:
    """Fake tensors outlive no save, and reading one raises."""
    of = fit("zero3", tmp_path, seeded(Model), max_epochs=1).trainer
    asked: list[Any] = []
    state = of.strategy.lightning_module_state_dict
    with mock.patch.object(of.strategy, "lightning_module_state_dict", lambda: asked.append(state()) or asked[-1]):
        of.save_checkpoint(tmp_path / "a.ckpt")
    if dist.get_rank() == 0:
        with pytest.raises(DataDependentOutputException):
            asked[0]["first.weight"].sum().item()
    assert of.strategy._checkpoints.range_save is None  # type: ignore[attr-defined]
    assert weights(of)["first.weight"].sum().item() != 0


@dataclass(frozen=True)
class Settings:
    """As people keep hyperparameters."""

    number: int
    tensor: Tensor


@on_ranks(2)
def test_what_is_loaded_is_mapped_and_what_is_kept_is_not(tmp_path: Path) -> None:
    from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO

    big = torch.arange(1 << 19, dtype=torch.float32)
    kept = big * 2
    saved = {"state_dict": {"w": big, "b": torch.ones(2)}, "kept": [{"w": kept, "w2": kept[5:], "s": torch.ones(3)}]}
    path = tmp_path / f"{dist.get_rank()}.ckpt"
    ZeroCheckpointIO().save_checkpoint(saved | {"frozen": Settings(5, kept * 3)}, path)
    found = ZeroCheckpointIO().load_checkpoint(path, weights_only=False)
    frozen = found.pop("frozen")
    assert frozen.number == 5 and torch.equal(frozen.tensor, kept * 3)
    assert same(found, saved)
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [tuple(int(n, 16) for n in line.split()[0].split("-")) for line in lines if str(path) in line]

    def mapped(tensor: Tensor) -> bool:
        return any(low <= tensor.data_ptr() < high for low, high in spans)

    here = found["kept"][0]
    assert mapped(found["state_dict"]["w"])
    assert not any(map(mapped, [found["state_dict"]["b"], *here.values(), frozen.tensor]))
    assert here["w2"].data_ptr() == here["w"].data_ptr() + 20


@on_ranks(2)
def test_what_the_user_has_put_in_its_place_is_called(tmp_path: Path) -> None:
    """For as long as it is there, in this run and the next, and in the place of ``torch.save`` too."""
    of, called = trainer("zero3", tmp_path, max_epochs=1), []
    plain = of.save_checkpoint

    def theirs(path: Any, *rest: Any) -> None:
        called.append(path)
        plain(path, *rest)

    of.save_checkpoint = theirs  # type: ignore[method-assign]
    of.fit(seeded(Model), loader())
    of.save_checkpoint(tmp_path / "a.ckpt")
    of.fit(seeded(Model), loader())
    of.save_checkpoint(tmp_path / "b.ckpt")
    assert called == [tmp_path / "a.ckpt", tmp_path / "b.ckpt"]
    assert verify.check(tmp_path / "a.ckpt").damage == [] == verify.check(tmp_path / "b.ckpt").damage
    with mock.patch.object(of, "save_checkpoint") as mocked:
        of.save_checkpoint("c")
    mocked.assert_called_once_with("c")
    with mock.patch.object(torch, "save") as mocked:
        of.save_checkpoint(tmp_path / "d.ckpt")
    assert mocked.called == (dist.get_rank() == 0)
    if mocked.called:
        state = mocked.call_args.args[0]["state_dict"]
        assert state["first.weight"].sum() == torch.load(tmp_path / "b.ckpt")["state_dict"]["first.weight"].sum()
