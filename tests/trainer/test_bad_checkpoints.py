"""Checkpoints that cannot be loaded: one sentence on all ranks, in time, and nothing of them is loaded or run."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_zero import ZeroStrategy
from lightning_zero.app.train import refusals
from lightning_zero.checkpoint.archive import records_of
from lightning_zero.checkpoint.sharded import read
from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.engine import engine_of
from lightning_zero.ranks.resume import OUTCOME_VARIABLE
from lightning_zero.settings import ConfigError
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO, load
from tests.harness import on_ranks
from tests.lightning_table.bench import variant
from tests.trainer import toys
from tests.trainer.toys import Lit, Odd, assert_weights, fit, loader, once, seeded, sharded, trainer, weights

pytestmark = pytest.mark.full


def same_on_all_ranks(text: str) -> None:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, text.partition(" (So says rank")[0])
    assert len(set(said)) == 1, said


class Adam(Lit):
    def __init__(self, **more: Any) -> None:
        super().__init__(optimizer="adamw", **more)


class Renamed(Adam):
    head = property(lambda self: self.tail)

    def __init__(self) -> None:
        super().__init__()
        self.tail = self._modules.pop("head")


def stepping(*groups: slice, of: type = Lit) -> Any:
    """Give a class of module whose optimizer has these trained parameters in its groups."""

    def configure(module: Lit) -> torch.optim.Optimizer:
        trained = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.AdamW([{"params": trained[group]} for group in groups])

    return variant(of, configure_optimizers=configure)


NO_CHECKPOINT = r"expected a whole checkpoint, got .*a\.ckpt.*Give another checkpoint"


def unchanged(path: Path) -> None: ...


LOADS: dict[str, tuple[Callable[[Path], Any], Callable[[], Any], str]] = {
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-400]), Adam, NO_CHECKPOINT),
    "an empty folder": (lambda path: (path.unlink(), path.mkdir()), Adam, r"a\.ckpt.*Give another checkpoint"),
    "missing": (lambda path: path.unlink(), Adam, r"not found: .*a\.ckpt.*Change ckpt_path"),
    "other names": (
        unchanged,
        Renamed,
        r"this Renamed, got .*a\.ckpt: the checkpoint lacks tail\.weight, .*; the model lacks head\.weight.*Give",
    ),
    "other shapes": (
        unchanged,
        lambda: Adam(width=6),
        r"a\.ckpt: first\.weight has shape \(8, 4\) in the checkpoint and \(6, 4\) in .* and 10 more\. Give a ch",
    ),
    "another optimizer": (
        unchanged,
        Lit,
        r"a\.ckpt: its optimizer is no SGD: it has the settings amsgrad, betas, eps and not dampening, momentum",
    ),
    "other param groups": (
        unchanged,
        stepping(slice(12), slice(12, None)),
        r"a\.ckpt: its optimizer has param groups of \[16\] parameters",
    ),
    "other order": (
        unchanged,
        stepping(slice(None, None, -1)),
        r"a\.ckpt: its optimizer state 'exp_avg' of head\.bias has shape \(8, 4\)",
    ),
    "weights only": (
        lambda path: torch.save({k: v for k, v in torch.load(path).items() if k != "optimizer_states"}, path),
        Adam,
        r"^ckpt_path: expected a checkpoint with the states of optimizers, got .*a\.ckpt, which has weights only",
    ),
    "a state dict": (
        lambda path: torch.save(torch.load(path)["state_dict"], path),
        Adam,
        r"checkpoint of Lightning, got .*a\.ckpt, which holds a \w+ with first\.weight, .* and 11 more\. Change ckpt",
    ),
    "a tensor": (lambda path: torch.save(torch.ones(2), path), Adam, r"a\.ckpt, which holds a Tensor\. Change ckpt"),
}


# As under DDP weights are loaded before the optimizers are made, whose constructors may read them.
OTHER_OPTIMIZERS = ("another optimizer", "other param groups", "other order")


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("case", LOADS)
def test_what_is_no_checkpoint_of_this_run_is_refused_and_nothing_is_loaded(case: str, tmp_path: Path) -> None:
    """Not a weight, where the model is another; not a state of an optimizer. Then ranks go on together."""
    spoil, make, says = LOADS[case]
    path = tmp_path / "a.ckpt"
    saved = fit("zero3", tmp_path, seeded(Adam), max_epochs=1, count=12).trainer
    saved.save_checkpoint(path)
    once(lambda: spoil(path))
    module = seeded(make, seed=9)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    of = trainer("zero3", tmp_path, max_epochs=2)
    with pytest.raises((ConfigError, FileNotFoundError), match=says) as refused:
        of.fit(module, loader(), ckpt_path=path)
    same_on_all_ranks(str(refused.value))
    expected = weights(saved) if case in OTHER_OPTIMIZERS else before
    assert_weights(weights(of) if engine_of(module) else module.state_dict(), expected, tolerance=0)
    saved.save_checkpoint(tmp_path / "b.ckpt")
    assert fit("zero3", tmp_path, seeded(Adam), max_epochs=2, ckpt_path=tmp_path / "b.ckpt").losses


@on_ranks(2)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_trained_weights_stay_when_a_checkpoint_is_refused(form: str, tmp_path: Path) -> None:
    """Of a module that is sharded already, by a run before, and has placeholders."""
    path = tmp_path / "odd.ckpt"
    fit(sharded(checkpoint=form), tmp_path, seeded(Odd), max_epochs=1).trainer.save_checkpoint(path)
    cases: list[tuple[Any, str]] = [
        (Lit, r"got .*odd\.ckpt: the model lacks turned"),
        (lambda: Odd(width=6), r"got .*odd\.ckpt: first\.weight has shape"),
    ]
    for make, says in cases:
        of = fit(sharded(checkpoint=form), tmp_path, seeded(make), max_epochs=1, count=12).trainer
        before = weights(of)
        of.fit_loop.max_epochs = 2
        with pytest.raises((ConfigError, RuntimeError), match=says) as refused:
            of.fit(of.lightning_module, loader(), ckpt_path=path)
        same_on_all_ranks(str(refused.value))
        assert_weights(weights(of), before, tolerance=0)


@on_ranks(2)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_read_that_the_system_fails_on_one_rank_fails_on_all_and_is_no_verdict(form: str, tmp_path: Path) -> None:
    """It is no mistake of the user's, and the script of a job starts it again."""
    path = tmp_path / "a.ckpt"
    fit(sharded("zero1", checkpoint=form), tmp_path, max_epochs=1).trainer.save_checkpoint(path)
    os.environ[OUTCOME_VARIABLE] = str(tmp_path / "outcome")
    fails = mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    owner, name = (read, "_fill") if form == "sharded" else (ZeroCheckpointIO, "load_checkpoint")
    broken = mock.patch.object(owner, name, fails) if dist.get_rank() else contextlib.nullcontext()
    with broken, pytest.raises((OSError, RuntimeError), match="Stale file handle") as failed, refusals():
        fit(sharded("zero1", checkpoint=form), tmp_path, ckpt_path=path)
    assert dist.get_rank() == 0 or f"{path}: the checkpoint could not be read: " in str(failed.value)
    dist.barrier()
    assert not (tmp_path / "outcome").exists()


class OddValue:
    """What ``torch.load(weights_only=True)`` refuses."""


def test_first_whole_save_warns_of_what_will_be_refused(tmp_path: Path) -> None:
    """Files of weights only may come before it."""
    io, says = ZeroCheckpointIO(), r"odd\.ckpt holds tests\.trainer\.test_bad_checkpoints\.OddValue. A run cannot"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        io.save_checkpoint({"weight": torch.ones(3)}, tmp_path / "weights.ckpt")
        with pytest.warns(UserWarning, match=says):
            io.save_checkpoint({"optimizer_states": [OddValue()]}, tmp_path / "odd.ckpt")
        io.save_checkpoint({"optimizer_states": [OddValue()]}, tmp_path / "again.ckpt")


class Runs:
    """Writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.sample
@on_ranks(2)
def test_code_in_a_file_runs_only_by_the_users_word(tmp_path: Path) -> None:
    """As under DDP, where nothing is said, and if ``weights_only=True`` is; in whatever is done with it."""
    path, ran = tmp_path / "bad.ckpt", tmp_path / "ran"
    fit("zero3", tmp_path).trainer.save_checkpoint(path)
    once(lambda: torch.save({**torch.load(path), "extra": Runs(ran)}, path))
    for strategy in ("ddp", "zero1", "zero3"):
        of = trainer(strategy, tmp_path)
        acts: list[Callable[[], Any]] = [
            partial(of.fit, seeded(Lit), loader(), ckpt_path=path, weights_only=None),
            partial(of.fit, seeded(Lit), loader(), ckpt_path=path, weights_only=True),
            partial(of.test, seeded(Lit), loader(), ckpt_path=path),
        ]
        for act in acts:
            with pytest.raises(Exception, match=r"bad\.ckpt|Weights only load failed"):
                act()
    assert not ran.exists()
    trainer("zero3", tmp_path, max_epochs=3).fit(seeded(Lit), loader(), ckpt_path=path, weights_only=False)
    assert ran.exists()


@on_ranks(2)
def test_refusal_names_the_class_and_how_to_allow_it(tmp_path: Path) -> None:
    path, module = tmp_path / "odd.ckpt", seeded(Lit)
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update(odd=OddValue())
    fit("zero3", tmp_path, module).trainer.save_checkpoint(path)
    says = r"odd\.ckpt with tests\.trainer\.test_bad_checkpoints\.OddValue: "
    with pytest.raises(ConfigError, match=says) as refused:
        fit("zero3", tmp_path, max_epochs=3, ckpt_path=path)
    assert "weights_only=False" in str(refused.value) and "add_safe_globals([OddValue])" in str(refused.value)
    with torch.serialization.safe_globals([OddValue]):
        assert fit("zero3", tmp_path, max_epochs=3, ckpt_path=path).trainer.global_step == 18


UNREAD = r"\.metadata: it cannot be read"


def index(make: Callable[[Path], Any]) -> Callable[[Path, Path], Any]:
    """Give what writes another pickle in the place of the index."""
    return lambda path, ran: (path / ".metadata").write_bytes(pickle.dumps(make(ran)))


# The opcodes: a class of an index, a state, BUILD.
CHANGES_A_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dVmixed\nI1\nstb."
DAMAGES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "no index": (lambda path, _: (path / ".metadata").unlink(), r"bad\.ckpt: it has no \.metadata"),
    "half an index": (lambda path, _: os.truncate(path / ".metadata", 500), UNREAD),
    "an index that runs code": (index(Runs), rf"{UNREAD}: .*(pathlib\.Path\.touch|getattr)"),
    "an index that changes a class": (
        lambda path, _: (path / ".metadata").write_bytes(CHANGES_A_CLASS),
        rf"{UNREAD}: .*it changes a type",
    ),
    "another pickle": (index(lambda _: {"a": 1}), r"\.metadata: it holds no index but a dict"),
    "no meta.pt": (lambda path, _: (path / "meta.pt").unlink(), r"bad\.ckpt: it has no meta\.pt"),
    "meta.pt runs code": (
        lambda path, ran: torch.save({**torch.load(path / "meta.pt"), "extra": Runs(ran)}, path / "meta.pt"),
        r"meta\.pt with pathlib\.Path\.touch|meta\.pt with .*getattr",
    ),
    "a value runs code": (lambda path, ran: _put_value(path, Runs(ran)), r"bad\.ckpt with .*(touch|getattr)"),
    "no shard": (lambda path, _: (path / "__1_0.distcp").unlink(), r"__1_0\.distcp: this file .* is missing"),
    "half a shard": (
        lambda path, _: os.truncate(path / "__1_0.distcp", 900),
        r"__1_0\.distcp: this file has 900 bytes, fewer than the",
    ),
}


def _put_value(path: Path, value: Any) -> None:
    """In the place of a learning rate."""
    folder = ShardedFolder(path)
    (place,) = (i for k, i in folder.index.storage_data.items() if k.fqn == "optimizer_0.param_groups.0.lr")
    torch.save(value, path / "evil.distcp")
    place.relative_path, place.offset, place.length = "evil.distcp", 0, (path / "evil.distcp").stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(folder.index))


@on_ranks(2)
def test_damaged_folder_is_refused_on_all_ranks(tmp_path: Path) -> None:
    of = fit(sharded(), tmp_path, seeded(Odd), max_epochs=1).trainer
    of.save_checkpoint(tmp_path / "good.ckpt")
    before, path = weights(of), tmp_path / "bad.ckpt"
    of.fit_loop.max_epochs = 2
    for damage, (change, says) in DAMAGES.items():
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(tmp_path / "good.ckpt", path)
            change(path, tmp_path / "ran")
        dist.barrier()
        for weights_only in (None, True):
            with pytest.raises(ConfigError, match=says):
                of.fit(of.lightning_module, loader(), ckpt_path=path, weights_only=weights_only)
        assert not (tmp_path / "ran").exists(), damage
    assert_weights(weights(of), before, tolerance=0)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("weights_only", [None, False])
def test_file_that_is_no_archive_is_refused(weights_only: bool | None, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(torch.ones(5000), path)
    for content in (path.read_bytes()[: 5000 * 2], b"", bytes(1000), pickle.dumps({"a": 1})):
        path.write_bytes(content)
        says = r"expected a whole checkpoint, got .*a\.ckpt.*\. Give another checkpoint\."
        with pytest.raises(ConfigError, match=says) as refused:
            load(ZeroCheckpointIO(), path, weights_only)
        assert "weights_only` set to" not in str(refused.value)
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(ConfigError, match=r"got .*a\.ckpt: torch.save writes no file that begins with b'<html>no'\."):
        load(ZeroCheckpointIO(), path, weights_only)


def test_code_from_an_address_runs_only_by_the_users_word() -> None:
    """Lightning alone runs what is at an address of http unless it is told not to."""
    for weights_only in (None, True, False):
        io = mock.Mock()
        load(io, "http://somewhere/a.ckpt", weights_only)
        assert io.load_checkpoint.call_args.kwargs["weights_only"] is (weights_only is not False)


def flip(path: Path, at: int | None = None) -> None:
    """Change a bit of a file on all ranks' behalf: of its largest tensor, if no place is given."""
    dist.barrier()
    if dist.get_rank() == 0:
        with path.open("rb+") as file:
            if at is None:
                at = 3 + max((r for r in records_of(file) if r.name.startswith("data/")), key=lambda r: r.nbytes).start
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 16]))
    dist.barrier()


def go_on(path: Any, root: Path, module: Any = None, *, verify: bool | None = None, in_job: bool = False) -> None:
    strategy = ZeroStrategy("zero3", checkpoint={"verify": verify})
    strategy.run_plan.resumes_job = in_job
    trainer(strategy, root, max_epochs=3).fit(module or seeded(Lit), loader(), ckpt_path=path)


@pytest.mark.sample
@on_ranks(2, full=(3,))
def test_flipped_bit_of_a_file_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """Where that is asked for, or a job goes on by itself; elsewhere it loads as torch loads it."""
    path = tmp_path / "a.ckpt"
    fit("zero3", tmp_path).trainer.save_checkpoint(path)
    go_on(path, tmp_path, verify=True)
    flip(path)
    for how in ({"verify": True}, {"in_job": True}):
        module = seeded(Lit, seed=9)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with pytest.raises(ConfigError, match=r"expected .*a\.ckpt as it was written, got other values in bytes \d+"):
            go_on(path, tmp_path, module, **how)
        assert_weights(module.state_dict(), before, tolerance=0)
    go_on(path, tmp_path)
    go_on(path, tmp_path, verify=False, in_job=True)


@on_ranks(2)
def test_files_of_ddp_are_checked_and_old_formats_and_addresses_are_not(tmp_path: Path) -> None:
    """A file of DDP's has checksums too; one in torch's old format has none, and one elsewhere is refused."""
    path, old = tmp_path / "a.ckpt", tmp_path / "old.ckpt"
    fit("ddp", tmp_path).trainer.save_checkpoint(path)
    dist.barrier()
    go_on(path, tmp_path, verify=True)
    once(lambda: torch.save(torch.load(path), old, _use_new_zipfile_serialization=False))
    flip(path)
    with pytest.raises(ConfigError, match="as it was written"):
        go_on(path, tmp_path, verify=True)
    of = trainer(ZeroStrategy("zero3", checkpoint={"verify": True}), tmp_path, max_epochs=3)
    with toys.on_rank_0(pytest.warns(UserWarning, match="without checksums")):
        of.fit(seeded(Lit), loader(), ckpt_path=old)


@on_ranks(2)
def test_flipped_bit_of_a_folder_is_refused(tmp_path: Path) -> None:
    """In a tensor, it would load in silence."""
    path, strategy = tmp_path / "bad.ckpt", partial(sharded, checkpoint={"name": "sharded", "verify": True})
    fit(sharded(), tmp_path, seeded(Odd), max_epochs=1).trainer.save_checkpoint(path)
    toys.loaded_weights(path, strategy(), tmp_path)
    places = ShardedFolder(path).index.storage_data
    place = next(place for key, place in places.items() if key.fqn == "state_dict.first.weight")
    flip(path / place.relative_path, place.offset + 720)
    with pytest.raises(ConfigError, match=r"bad\.ckpt as it was written, got other values in .*\.first\.weight"):
        toys.loaded_weights(path, strategy(), tmp_path)
