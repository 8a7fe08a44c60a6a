"""Checkpoints in another form: what is converted is what would have been saved so."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.checkpoint.__main__ import main
from lightning_zero.checkpoint.sharded.read import ShardedFolder
from tests.engine.support import assert_equal
from tests.engine.test_pretrained import TOKENS, saved, transformers
from tests.harness import on_ranks
from tests.trainer.test_hugging_face import Lit, logits_of
from tests.trainer.test_hugging_face import fit as fit_model
from tests.trainer.toys import assert_weights, fit, odd, other_weights, sharded

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def on_rank_0(*arguments: Any) -> None:
    if dist.get_rank() == 0:
        assert main(["convert", *map(str, arguments)]) == 0
    dist.barrier()


@pytest.mark.full
@on_ranks(2)
def test_converted_checkpoints_are_those_saved_in_that_form(tmp_path: Path) -> None:
    """The file is the one that would have been saved, and training goes on from each form to the bit."""
    whole = fit(sharded(), tmp_path, odd(), max_epochs=3)
    of = fit(sharded(), tmp_path, odd(), max_epochs=2).trainer
    of.save_checkpoint(tmp_path / "folder")
    fit(sharded(checkpoint="full"), tmp_path, odd(), max_epochs=2).trainer.save_checkpoint(tmp_path / "file")
    for source, target in (("folder", "a"), ("file", "b"), ("b", "c"), ("folder", "d"), ("file", "e")):
        on_rank_0(tmp_path / source, tmp_path / target, f"to={'full' if target in 'ace' else 'sharded'}")
    expected = torch.load(tmp_path / "file")
    for name in ("a", "c", "e"):
        found = torch.load(tmp_path / name)
        assert found.keys() == expected.keys() and found["loops"] == expected["loops"]
        assert_equal(found["state_dict"], expected["state_dict"])
        assert found["state_dict"]._metadata == expected["state_dict"]._metadata
        tied = [found["state_dict"][f"blocks.{n}.up.weight"] for n in (0, 1)]
        assert tied[0].data_ptr() == tied[1].data_ptr()
        assert_equal(found["optimizer_states"], expected["optimizer_states"])
    for name in ("a", "b", "c", "d"):
        rest = fit(sharded(), tmp_path, other_weights(), max_epochs=3, ckpt_path=tmp_path / name)
        assert rest.losses == whole.losses[-len(rest.losses) :], name
        assert_weights(rest.weights, whole.weights, tolerance=0, what=name)
    if dist.get_rank() == 0:
        assert main(["verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("kind", ["gemma2", "mixtral"])
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_to_a_folder_of_hugging_face(checkpoint: str, kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path / "in")
    if dist.get_rank() == 0:
        (tmp_path / "in" / "tokenizer.json").write_text("{}")
    dist.barrier()
    module = Lit(kind)
    of = fit_model(module, tmp_path, init_from=str(tmp_path / "in"), checkpoint=checkpoint)
    of.save_checkpoint(tmp_path / "a.ckpt")
    module.eval()
    with of.strategy.step_scope():
        expected = module.model(TOKENS).logits
    on_rank_0(tmp_path / "a.ckpt", tmp_path / "out", "to=safetensors", "shard_size=40KB")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(found), expected)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert (tmp_path / "out" / "tokenizer.json").exists()
    on_rank_0(tmp_path / "a.ckpt", tmp_path / "half", "to=safetensors", "dtype=bf16")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


@on_ranks(2)
def test_dtype_casts_parameters_and_prefix_selects_them(tmp_path: Path) -> None:
    of = fit(sharded(), tmp_path, odd()).trainer
    of.save_checkpoint(tmp_path / "a.ckpt")
    on_rank_0(tmp_path / "a.ckpt", tmp_path / "full", "to=full", "dtype=bf16")
    on_rank_0(tmp_path / "a.ckpt", tmp_path / "folder", "to=sharded", "dtype=bf16")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        on_rank_0(tmp_path / "a.ckpt", tmp_path / "out", "to=safetensors", "prefix=blocks.")
    assert dist.get_rank() or "left out, as their names do not begin with prefix='blocks.': " in said.getvalue()
    folder = ShardedFolder(tmp_path / "a.ckpt")
    weight = folder.tensor("state_dict.blocks.1.up.weight").whole()
    found = torch.load(tmp_path / "full")
    assert torch.equal(found["state_dict"]["blocks.1.up.weight"], weight.bfloat16())
    assert found["optimizer_states"][0]["state"][0]["exp_avg"].dtype == torch.float32
    other = ShardedFolder(tmp_path / "folder")
    assert torch.equal(other.tensor("state_dict.blocks.1.up.weight").whole(), weight.bfloat16())
    assert other.tensor("optimizer_0.state.turned.exp_avg").dtype == torch.float32
    plain = load_file(tmp_path / "out" / "model.safetensors")
    assert "0.up.weight" in plain and "1.up.weight" not in plain and "0.norm.weight" in plain  # tied weights once
    assert torch.equal(plain["0.up.weight"], weight)


@on_ranks(1)
def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    of = fit(sharded(), tmp_path, odd(), max_epochs=1).trainer
    of.save_checkpoint(tmp_path / "a.ckpt")
    read, held = ShardedFolder._read, list[StorageWeakRef]()

    def watched(self: Any, *arguments: Any) -> Any:
        assert all(storage.expired() for storage in held), arguments[0]
        values = read(self, *arguments)
        held.append(StorageWeakRef(values.untyped_storage()))
        return values

    with mock.patch.object(ShardedFolder, "_read", watched):
        for to in ("full", "sharded", "safetensors"):
            before = len(held)
            on_rank_0(tmp_path / "a.ckpt", tmp_path / to, f"to={to}")
            assert len(held) > before + 5
    state = torch.load(tmp_path / "full")["state_dict"]
    found = load_file(tmp_path / "safetensors" / "model.safetensors")
    assert all(torch.equal(found[key], value) for key, value in state.items() if key != "blocks.1.up.weight")


@pytest.mark.parametrize(("arguments", "says"), [
    ("", "usage"),
    ("in to=full", "expected IN OUT to=..., got in to=full"),
    ("in out", "expected to=full|sharded|safetensors, got ''"),
    ("in out to=zip", "got 'zip'"),
    ("in out to=full speed=9", "expected IN OUT to=..., got in out to=full speed=9"),
    ("in out to=full shard_size=5GB", "shard_size= and prefix= have no effect with to=full"),
    ("in out to=full dtype=int8", "dtype: expected one of fp32, bf16"),
    ("in out to=safetensors shard_size=much", "shard_size: expected a size such as 80GB"),
    ("missing out to=full", "expected a checkpoint, got missing, which does not exist"),
    ("in out to=full", "expected a whole checkpoint, got in"),
    ("in taken to=full", "expected an OUT that does not exist, got taken"),
    ("good none-such://out to=full", "error: Protocol not known: none-such"),
    ("own out to=sharded", "expected optimizers with torch's state_dict(), got one with its own in own. Resume"),
    ("inside out to=full", "expected optimizers with torch's state_dict(), got one with its own in inside. Resume"),
    ("good out to=safetensors prefix=x.", "expected names that begin with prefix='x.', got names such as 'a'"),
])  # fmt: skip
def test_a_mistake_is_refused_and_writes_nothing(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("hello")
    (tmp_path / "taken").touch()
    good: dict[str, Any] = {"state_dict": {"a": torch.ones(3)}, "pytorch-lightning_version": "2.6"}
    torch.save(good, tmp_path / "good")
    for name, states in {"own": [{"inner": {}}], "inside": [{"state": {0: {"inner.state": {}}}}]}.items():
        torch.save({**good, "optimizer_states": states}, tmp_path / name)
    assert main(["convert", *arguments.split()]) == (1 if "none-such" in arguments else 2)
    captured = capsys.readouterr()
    assert says in captured.err + captured.out
    assert not (tmp_path / "out").exists()
