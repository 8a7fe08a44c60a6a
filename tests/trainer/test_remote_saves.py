"""Folders of checkpoints in an object store: saved by all ranks, kept, loaded, and found again."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero.app.convert import convert
from lightning_zero.checkpoint import verify
from lightning_zero.data.resumable import ResumableLoader
from lightning_zero.ranks import resume
from lightning_zero.settings import ConfigError
from lightning_zero.trainer import interruptions
from lightning_zero.trainer.saves import checkpoint_io, checkpointing
from lightning_zero.trainer.saves.kept_files import NoteJob
from lightning_zero.trainer.saves.sharded_checkpoints import read
from tests import harness, object_store
from tests.harness import Pool, on_ranks
from tests.object_store import ObjectStore, bucket, keys
from tests.trainer import toys
from tests.trainer.test_checkpoint_io import job_named
from tests.trainer.toys import (
    Dropping,
    Lit,
    Odd,
    Samples,
    assert_weights,
    fit,
    loaded_weights,
    loader,
    once,
    seeded,
    sharded,
    trainer,
    weights,
)

STEPS = 8


def folders(address: str) -> set[str]:
    return {key.partition("/")[0] for key in keys(address)}


@pytest.mark.full
@on_ranks(2, full=[3])
@pytest.mark.parametrize("background", [False, True])
def test_folders_are_saved_kept_and_loaded_at_any_stage(background: bool, tmp_path: Path) -> None:
    address = bucket(tmp_path / "b")
    form = {"name": "sharded", "background": background, "verify": True}
    saves = ModelCheckpoint(address, every_n_train_steps=2, filename="{step}", save_last=True)
    settings: dict[str, Any] = {"limit_val_batches": 0}
    of = fit(sharded(checkpoint=form), tmp_path, enable_checkpointing=True, callbacks=[saves], **settings)
    last = of.trainer.global_step
    assert folders(address) == {f"step={last // 2 * 2}.ckpt", "last.ckpt"}
    path, whole = f"{address}/last.ckpt", fit("zero3", tmp_path, max_epochs=3, **settings)
    again = fit(sharded("zero1", checkpoint=form), tmp_path, seeded(Lit, 4), max_epochs=3, ckpt_path=path, **settings)
    assert again.trainer.global_step == whole.trainer.global_step and again.losses
    assert_weights(again.weights, whole.weights, tolerance=1e-5)
    test = trainer("zero3", tmp_path)  # a strategy that saves files
    test.validate(seeded(Lit, 5), loader(), ckpt_path=path, verbose=False)
    assert_weights(weights(test), of.weights, tolerance=0)
    dist.barrier()


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_is_stopped_leaves_the_older_checkpoint(background: bool, tmp_path: Path) -> None:
    """At the end of its upload, as a full quota stops it: every rank raises, and the older folder goes on."""
    path = f"{bucket(tmp_path / 'b')}/last.ckpt"
    form = {"name": "sharded", "background": background}
    of = fit(sharded(), tmp_path, max_epochs=1)
    of.trainer.save_checkpoint(path)

    def full(act: str, key: str) -> None:
        if act == "complete" and "__1_" in key:
            raise OSError(28, "No space left on device")

    for _ in range(2):
        saves = ModelCheckpoint(bucket(tmp_path / "b"), filename="last", enable_version_counter=False)
        with mock.patch.object(ObjectStore, "before", full), pytest.raises(Exception, match="No space left|__1_"):
            again = trainer(sharded(checkpoint=form), tmp_path, enable_checkpointing=True, callbacks=[saves])
            again.fit(seeded(Lit), loader(), ckpt_path=path)
        dist.barrier()
        assert_weights(loaded_weights(path, sharded(), tmp_path, Lit()), of.weights, tolerance=0)


@on_ranks(2)
def test_a_folder_loads_without_a_trainer(tmp_path: Path) -> None:
    address = f"{bucket(tmp_path / 'b')}/a.ckpt"
    of = fit(sharded(), tmp_path, seeded(lambda: Odd(width=8)), max_epochs=1)
    for path in (tmp_path / "a.ckpt", address):
        of.trainer.save_checkpoint(path)
        for given in ({}, {"map_location": "cpu"}):
            module = Odd.load_from_checkpoint(path, lr=0.5, **given)
            assert_weights(module.state_dict(), of.weights, tolerance=0)
            assert module.hparams["width"] == 8 and module.hparams["lr"] == 0.5
    dist.barrier()


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_last_is_found_in_an_object_store(form: str, tmp_path: Path) -> None:
    root, losses = bucket(tmp_path / "b"), []
    whole = fit("zero3", tmp_path, max_epochs=3, limit_val_batches=0)
    for epochs in (1, 2, 3):
        saves: dict[str, Any] = {"callbacks": [ModelCheckpoint(save_last=True)], "enable_checkpointing": True}
        strategy = toys.strategy_of("zero3", checkpoint=form)
        of = fit(strategy, root, max_epochs=epochs, limit_val_batches=0, ckpt_path="last", **saves)
        losses += of.losses
    assert losses == pytest.approx(whole.losses, rel=1e-5)
    assert {key.partition("/")[2].partition("/")[0] for key in keys(root)} == {"last.ckpt", "epoch=2-step=18.ckpt"}
    dist.barrier()


@on_ranks(2)
def test_a_file_is_uploaded_in_parts_where_memory_lacks(tmp_path: Path) -> None:
    """And not at all if that fails. A save that has no room for whole tensors names the folder."""
    path = f"{bucket(tmp_path / 'b')}/a.ckpt"
    of = trainer("zero3", tmp_path, max_epochs=1, limit_train_batches=1)
    of.fit(seeded(lambda: Lit(width=1024, depth=1)), loader())
    state = of.strategy.engine.state_dict(only_rank_0=False)  # type: ignore[attr-defined]
    parts, upload = [], object_store._Object._upload_chunk

    def noting(self: Any, final: bool = False) -> bool:
        parts.append(self.buffer.getbuffer().nbytes)
        if failing and len(parts) > 1:
            raise OSError(5, "planned")
        return upload(self, final)

    for failing, free in [(False, 2**50), (False, 10 * 2**20), (True, 10 * 2**20)]:
        parts.clear()
        with contextlib.ExitStack() as stack:
            for module in (checkpoint_io, checkpointing):
                stack.enter_context(mock.patch.object(module, "available_host_memory", return_value=free))
            stack.enter_context(mock.patch.object(object_store._Object, "_upload_chunk", noting))
            said = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            if failing:
                stack.enter_context(pytest.raises(Exception, match="planned"))
            of.save_checkpoint(path)
        if dist.get_rank() == 0:
            assert any("zero/checkpoint=sharded" in str(w.message) for w in said) == (free < 2**50)
            assert (max(parts) > 2**25) == (free == 2**50)
        dist.barrier()
        assert len(list((tmp_path / "b").iterdir())) == 1
        assert_weights(torch.load(fsspec.open(path).open())["state_dict"], state, tolerance=0)
    dist.barrier()


def start(run_dir: Path, kill: tuple[int, int] | None, background: bool) -> None:
    """One start of a job, on this rank, that is killed before the change number ``kill[1]`` of rank ``kill[0]``."""
    changes = itertools.count(1)

    def before(act: str, key: str) -> None:
        if kill is not None and kill[0] == dist.get_rank() and next(changes) == kill[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    with job_named("job"), mock.patch.object(ObjectStore, "before", before):
        address = bucket(run_dir / "b")
        newest = resume.checkpoint_of_job(run_dir, [address])
        saves = ModelCheckpoint(address, "{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
        form = {"name": "sharded", "background": background, "verify": newest is not None}
        settings: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": True}
        settings["callbacks"] = [saves, NoteJob(str(run_dir))]
        of = trainer(sharded(checkpoint=form, stall_timeout_s=20.0), run_dir, **settings)
        of.fit(seeded(Dropping), ResumableLoader(Samples(), 2, trainer=of), ckpt_path=newest)
    dist.barrier()


@pytest.mark.full
@pytest.mark.parametrize(("background", "kills"), [(False, [(0, 21), (1, 5), (0, 33)]), (True, [(0, 38), (1, 7)])])
def test_a_job_that_is_killed_again_and_again_loses_nothing(background: bool, kills: Any, tmp_path: Path) -> None:
    steps = [0]
    for kill in [*kills, None]:
        pool = Pool(2)
        try:
            pool.run(pickle.dumps((start, (tmp_path, kill, background), {})), 60)
        except Exception as error:
            assert "exit code -9" in str(error) + "".join(getattr(error, "__notes__", [])), error
        finally:
            pool.kill()
        newest = resume.newest_checkpoint([bucket(tmp_path / "b")])
        assert verify.main([str(newest)]) == 0
        steps.append(read(newest, None)["global_step"])
    assert steps == sorted(steps) and steps[1] > 0 and steps[-1] == STEPS
    assert folders(bucket(tmp_path / "b")) == {"last.ckpt", f"step={STEPS}.ckpt"}
    (other := tmp_path / "undisturbed").mkdir()
    harness.run(2, start, other, None, False)
    found, whole = (read(f"{bucket(run / 'b')}/last.ckpt", None)["state_dict"] for run in (tmp_path, other))
    for name, value in whole.items():
        assert torch.equal(found[name].whole(), value.whole()), name


@pytest.mark.full
@on_ranks(2)
def test_the_commands_convert_from_and_to_an_object_store(tmp_path: Path) -> None:
    address = bucket(tmp_path / "b")
    of = fit(sharded(), tmp_path)
    of.trainer.save_checkpoint(f"{address}/a.ckpt")
    once(lambda: convert(f"{address}/a.ckpt", str(tmp_path / "full.ckpt"), to="full"))
    once(lambda: convert(str(tmp_path / "full.ckpt"), f"{address}/c.ckpt", to="sharded"))
    once(lambda: convert(f"{address}/a.ckpt", f"{address}/d.ckpt", to="full"))
    for path in (tmp_path / "full.ckpt", f"{address}/c.ckpt", f"{address}/d.ckpt"):
        assert_weights(loaded_weights(path, sharded("zero1"), tmp_path, Lit()), of.weights, tolerance=0)
    assert toys.files(tmp_path, "store*") == []
    with pytest.raises(ConfigError, match="expected an OUT that does not exist, got store:"):
        convert(f"{address}/a.ckpt", f"{address}/c.ckpt", to="sharded")


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("background", [False, True])
@mock.patch.object(interruptions, "SAVING_SHARE", 1e9)
def test_saves_by_the_clock_keep_the_newest_folder_which_is_found(background: bool, tmp_path: Path) -> None:
    root = f"{bucket(tmp_path / 'b')}/run"
    assert resume.newest_checkpoint([root]) is None  # and this listing is not used again
    of = trainer(sharded(checkpoint={"name": "sharded", "background": background}), root, limit_val_batches=0)
    of.strategy.save_every_s = 1e-9  # type: ignore[attr-defined]
    of.fit(seeded(Lit), loader())
    dist.barrier()
    (kept,) = folders(root)
    assert kept.startswith("hpc_ckpt_")
    found = resume.newest_checkpoint([root])
    assert found == f"{root}/{kept}"
    until = fit("zero3", tmp_path, limit_val_batches=0, max_epochs=-1, max_steps=of.global_step - 1)
    assert_weights(loaded_weights(found, sharded("zero1"), tmp_path, Lit()), until.weights, tolerance=0)
    dist.barrier()


@on_ranks(1)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_folders_are_tried_before_training(form: str, tmp_path: Path) -> None:
    saves: dict[str, Any] = {"enable_checkpointing": True}
    nowhere = bucket(tmp_path / "b").replace(":b", ":none")
    for root, settings in [
        ("none-such://root", saves),
        (nowhere, saves),
        (str(tmp_path), saves | {"callbacks": [ModelCheckpoint(nowhere)]}),
    ]:
        module = seeded(Lit)
        with pytest.raises(ConfigError, match=r"in which this process can write, got (none-such|store)://.*: .+"):
            trainer(toys.strategy_of("zero3", checkpoint=form), root, **settings).fit(module, loader())
        assert not module.losses
    linked = saves | {"callbacks": [ModelCheckpoint("memory://a", save_last="link")]}
    with pytest.raises(ConfigError, match=r"save_last=\): expected True or False .*, got 'link' with memory://a"):
        fit(toys.strategy_of("zero3", checkpoint=form), tmp_path, **linked)
    fit(sharded(), f"memory://{tmp_path.name}", max_epochs=1, **saves)
    fs = fsspec.filesystem("memory")
    assert [os.path.basename(p) for p in fs.find(f"/{tmp_path.name}")].count(".metadata") == 1
