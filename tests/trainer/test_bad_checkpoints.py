"""Checkpoints that cannot be loaded, and places to which none can be saved: one sentence, on all ranks, in time."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint import durable
from lightning_zero.checkpoint.sharded import read
from lightning_zero.config import ConfigError
from lightning_zero.engine import engine_of
from tests.harness import on_ranks
from tests.trainer.toys import Lit, assert_weights, fit, loader, seeded, trainer, weights

pytestmark = pytest.mark.full


def same_on_all_ranks(text: str) -> None:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, text.partition(" (So says rank")[0])
    assert len(set(said)) == 1, said


class Adam(Lit):
    def __init__(self, **more: Any) -> None:
        super().__init__(optimizer="adamw", **more)


class Renamed(Adam):
    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(8, 1)
        del self.head

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


class Knows(Renamed):
    """Takes weights by their older names, as modules do when something is renamed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_rename)


def _rename(module: Any, state: dict[str, Any], *_: Any) -> None:
    for name in [name for name in state if name.startswith("head.")]:
        state["tail." + name.removeprefix("head.")] = state.pop(name)


class Sgd(Lit):
    pass


class TwoGroups(Lit):
    def configure_optimizers(self) -> Any:
        rest = [*self.first.parameters(), *self.head.parameters()]
        groups = [{"params": list(self.blocks.parameters())}, {"params": rest}]
        return torch.optim.AdamW(groups, lr=0.1)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-400])


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        checkpoint = torch.load(path)
        change(checkpoint)
        torch.save(checkpoint, path)

    return act


def other_state(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"][0]["state"][2]["exp_avg"] = torch.ones(3)


NO_CHECKPOINT = r"expected a whole checkpoint, got .*a\.ckpt.*Give another one"
LOADS: dict[str, tuple[Callable[[Path], Any], Callable[[], Any], str]] = {
    "cut off": (cut, Adam, NO_CHECKPOINT),
    "empty": (lambda path: path.write_bytes(b""), Adam, NO_CHECKPOINT),
    "text": (lambda path: path.write_text("<html>"), Adam, NO_CHECKPOINT),
    "an empty folder": (lambda path: (path.unlink(), path.mkdir()), Adam, r"a\.ckpt.*Give another one"),
    "missing": (lambda path: path.unlink(), Adam, r"not found: .*a\.ckpt.*Give another ckpt_path"),
    "other names": (
        lambda path: None,
        Renamed,
        r"this Renamed, got .*a\.ckpt: it lacks tail\.weight, tail\.bias; the model lacks head\.weight.*Give",
    ),
    "other shapes": (
        lambda path: None,
        lambda: Adam(width=6),
        r"a\.ckpt: first\.weight has shape \(8, 4\) there and \(6, 4\) here, .* and 10 more\. Give a checkpoint",
    ),
    "another optimizer": (
        lambda path: None,
        Sgd,
        r"a\.ckpt: its optimizer is no SGD: it has the settings amsgrad, betas, eps and not dampening, momentum",
    ),
    "other param groups": (
        lambda path: None,
        TwoGroups,
        r"a\.ckpt: its optimizer has param groups of \[16\] parameters",
    ),
    "other states": (edit(other_state), Adam, r"a\.ckpt: its optimizer state 'exp_avg' of .* has shape \(3,\)"),
    "weights only": (
        edit(lambda checkpoint: checkpoint.pop("optimizer_states")),
        Adam,
        r"^ckpt_path: expected a checkpoint with the states of optimizers, got .*a\.ckpt, which has weights only",
    ),
    "a state dict": (
        lambda path: torch.save(torch.load(path)["state_dict"], path),
        Adam,
        r"checkpoint of Lightning, got .*a\.ckpt, which holds a \w+ with first\.weight, .* and 11 more\. Give another",
    ),
    "a tensor": (lambda path: torch.save(torch.ones(2), path), Adam, r"a\.ckpt, which holds a Tensor\. Give another"),
}


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("case", LOADS)
def test_what_cannot_be_loaded(case: str, tmp_path: Path) -> None:
    """And nothing of it is: not a weight, where the model is another; not a state of an optimizer."""
    spoil, make, says = LOADS[case]
    path = tmp_path / "a.ckpt"
    fit("zero3", tmp_path, seeded(Adam), max_epochs=1).trainer.save_checkpoint(path)
    if dist.get_rank() == 0:
        spoil(path)
    dist.barrier()
    module = seeded(make, seed=9)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    of = trainer("zero3", tmp_path, max_epochs=2)
    with pytest.raises((ConfigError, FileNotFoundError), match=says) as refused:
        of.fit(module, loader(), ckpt_path=path)
    same_on_all_ranks(str(refused.value))
    assert_weights(weights(of) if engine_of(module) else module.state_dict(), before, tolerance=0)
    dist.barrier()
    if dist.get_rank() == 0:
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    dist.barrier()
    fit("zero3", tmp_path, seeded(Adam), max_epochs=1).trainer.save_checkpoint(path)  # ranks go on together
    assert fit("zero3", tmp_path, seeded(Adam), max_epochs=2, ckpt_path=path).losses


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("make", "checkpoint"), [(Sgd, "full"), (TwoGroups, "sharded"), (Renamed, "full")])
def test_what_was_trained_stays_when_a_checkpoint_is_refused(make: Any, checkpoint: str, tmp_path: Path) -> None:
    """A module that is sharded already, by a run before; its optimizers are new in each run."""
    strategy = partial(ZeroStrategy, "zero1", checkpoint=checkpoint)
    fit(strategy(), tmp_path, seeded(Adam), max_epochs=1).trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = seeded(make, seed=9)
    before = fit(strategy(), tmp_path, module, max_epochs=1).weights
    of = trainer(strategy(), tmp_path, max_epochs=2)
    with pytest.raises(ConfigError, match=r"a\.ckpt") as refused:
        of.fit(module, loader(), ckpt_path=tmp_path / "a.ckpt")
    same_on_all_ranks(str(refused.value))
    assert_weights(weights(of), before, tolerance=0)
    assert of.current_epoch == 0 and not (of.optimizers and of.optimizers[0].state)


class GroupsInHook(Adam):
    """Gives its optimizer param groups where Lightning's fine-tuning callbacks do it too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.blocks.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        rest = [*self.first.parameters(), *self.head.parameters()]
        self.trainer.optimizers[0].add_param_group({"params": rest})


@on_ranks(2)
def test_optimizers_that_a_hook_completes_are_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    whole = fit("zero3", tmp_path, seeded(GroupsInHook), max_epochs=2)
    fit("zero3", tmp_path, seeded(GroupsInHook), max_epochs=1).trainer.save_checkpoint(path)
    rest = fit("zero3", tmp_path, seeded(GroupsInHook, seed=9), max_epochs=2, ckpt_path=path)
    assert rest.losses == whole.losses[-len(rest.losses) :]


@on_ranks(2)
def test_hooks_that_rename_and_sharded_modules(tmp_path: Path) -> None:
    """The model's own hooks decide; and a sharded one, with its placeholders, is compared likewise."""
    path = tmp_path / "a.ckpt"
    saved = fit("zero3", tmp_path, seeded(Adam), max_epochs=1)
    saved.trainer.save_checkpoint(path, weights_only=True)
    module = seeded(Knows, seed=9)
    of = trainer("zero3", tmp_path)
    of.test(module, loader(), verbose=False)
    of.test(module, loader(), ckpt_path=path, verbose=False)
    assert torch.equal(weights(of)["tail.weight"], saved.weights["head.weight"])
    other = seeded(Renamed, seed=9)
    of = trainer("zero3", tmp_path)
    of.test(other, loader(), verbose=False)
    before = weights(of)
    with pytest.raises(RuntimeError, match="it lacks tail"):
        of.test(other, loader(), ckpt_path=path, verbose=False)
    assert_weights(weights(of), before, tolerance=0)


@on_ranks(2)
@pytest.mark.parametrize("case", ["read-only", "a file in the way", "full"])
@pytest.mark.parametrize("hooks", [False, True])
def test_where_nothing_can_be_saved(case: str, hooks: bool, tmp_path: Path) -> None:
    module = seeded(Adam)
    if hooks:
        module.on_save_checkpoint = lambda checkpoint: None
    of = fit("zero3", tmp_path, module, max_epochs=1).trainer
    path = tmp_path / "folder" / "a.ckpt"
    if case == "a file in the way":
        path = tmp_path / "file" / "a.ckpt"
        if dist.get_rank() == 0:
            (tmp_path / "file").touch()
        dist.barrier()
    code = errno.EROFS if case == "read-only" else errno.ENOSPC

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    broken = {
        "read-only": lambda: mock.patch.object(durable, "_open_part", fails),
        "a file in the way": lambda: mock.patch.dict(os.environ),
        "full": lambda: mock.patch.object(os, "fsync", fails),
    }[case]
    says = {"read-only": "Read-only file system", "a file in the way": "FileExistsError", "full": "No space left"}[case]
    names = pytest.raises((OSError, RuntimeError), match=rf"a\.ckpt: the file could not be written: .*{says}")
    with broken(), names:
        of.save_checkpoint(path)
    dist.barrier()
    assert not path.exists() and not list(tmp_path.glob("**/.*"))
    of.save_checkpoint(tmp_path / "b.ckpt")
    assert (tmp_path / "b.ckpt").exists()


@on_ranks(2)
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_a_folder_with_other_things_in_it_is_kept(checkpoint: str, tmp_path: Path) -> None:
    strategy = ZeroStrategy("zero3", checkpoint=checkpoint)
    of = fit(strategy, tmp_path, seeded(Adam), max_epochs=1).trainer
    results = tmp_path / "results"
    for name in ("a.ckpt", "a.ckpt", "folder/b.ckpt"):  # one in the place of another; and of an empty folder
        (results / "folder" / "b.ckpt").mkdir(parents=True, exist_ok=True)
        of.save_checkpoint(results / name)
    says = r"results: .*a folder with other things in it \(a\.ckpt, folder\)"
    with pytest.raises((OSError, RuntimeError), match=says):
        of.save_checkpoint(results)
    dist.barrier()
    assert sorted(p.name for p in results.iterdir()) == ["a.ckpt", "folder"] and (results / "folder/b.ckpt").exists()


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_cannot_be_read_on_one_rank(rank: int, tmp_path: Path) -> None:
    strategy = partial(ZeroStrategy, "zero1", checkpoint="sharded")
    path = tmp_path / "a.ckpt"
    fit(strategy(), tmp_path, seeded(Adam), max_epochs=1).trainer.save_checkpoint(path)

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    broken = mock.patch.object(read, "_fill", fails) if dist.get_rank() == rank else contextlib.nullcontext()
    of = trainer(strategy(), tmp_path, max_epochs=2)
    with broken, pytest.raises((OSError, RuntimeError), match="Input/output error") as failed:
        of.fit(seeded(Adam), loader(), ckpt_path=path)
    if dist.get_rank() == rank:
        assert f"{path}: the checkpoint could not be read: " in str(failed.value)


@on_ranks(2)
def test_a_small_disk(tmp_path: Path) -> None:
    """A real one, where this process may mount it."""
    disk = tmp_path / "disk"
    if dist.get_rank() == 0:
        disk.mkdir()
        mounted = os.system(f"mount -t tmpfs -o size=40k tmpfs {disk} 2>/dev/null") == 0
    else:
        mounted = False
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mounted)
    if not any(found):
        return
    try:
        of = fit("zero3", tmp_path, seeded(Adam), max_epochs=1).trainer
        of.save_checkpoint(disk / "a.ckpt", weights_only=True)
        kept = (disk / "a.ckpt").read_bytes()
        with pytest.raises((OSError, RuntimeError), match=r"a\.ckpt: the file could not be written: .*No space left"):
            of.save_checkpoint(disk / "a.ckpt")
        dist.barrier()
        assert (disk / "a.ckpt").read_bytes() == kept and [p.name for p in disk.iterdir()] == ["a.ckpt"]
    finally:
        dist.barrier()
        if mounted:
            os.system(f"umount {disk}")
