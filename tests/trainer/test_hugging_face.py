"""Models of transformers in a LightningModule: in from their files, trained, saved, resumed, and out again."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.hugging_face.export import export
from lightning_zero.checkpoint.hugging_face.files import Writer
from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.pretrained import SafetensorsFolder
from lightning_zero.settings import ConfigError
from tests.engine.test_pretrained import CONFIGS, TOKENS, make, saved, transformers
from tests.harness import on_ranks
from tests.models import Does
from tests.object_store import ObjectStore, bucket, keys
from tests.trainer.toys import assert_weights, files, trainer, weights

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]


class Lit(pl.LightningModule):
    """Made in configure_model from ``folder``, or on meta, for ``zero.init_from`` or a checkpoint."""

    def __init__(self, kind: str, folder: Path | None = None) -> None:
        super().__init__()
        self.kind, self.folder = kind, folder
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None and self.folder is None:
            self.model = make(self.kind, "meta")
        elif self.model is None:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    test_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def batches() -> DataLoader[Any]:
    data = torch.randint(3, 64, (16, 8), generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))


def fit(module: Lit, root: Path, epochs: int = 1, ckpt_path: Path | None = None, **settings: Any) -> pl.Trainer:
    of = trainer(ZeroStrategy(**{"stage": "zero3", **settings}), root, max_epochs=epochs)
    of.fit(module, batches(), ckpt_path=ckpt_path)
    return of


@on_ranks(2)
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_model_on_meta_goes_on_from_a_checkpoint(checkpoint: str, tmp_path: Path) -> None:
    """Which then is what its parameters are made of: there is no other source."""
    saved("llama", tmp_path / "in")
    settings = {"checkpoint": checkpoint, "init_from": str(tmp_path / "in")}
    whole, rest = Lit("llama"), Lit("llama")
    fit(whole, tmp_path, 2, **settings)
    first = fit(Lit("llama"), tmp_path, 1, **settings)
    first.save_checkpoint(tmp_path / "one.ckpt")
    fit(rest, tmp_path, 2, ckpt_path=tmp_path / "one.ckpt", checkpoint=checkpoint)
    assert rest.losses == whole.losses[-len(rest.losses) :]
    check = trainer("zero1", tmp_path)
    check.test(Lit("llama"), batches(), ckpt_path=tmp_path / "one.ckpt", verbose=False)
    assert_weights(weights(check), weights(first), tolerance=0)


@on_ranks(2)
def test_tokens_that_are_added_between_two_fits_are_trained_as_under_ddp(tmp_path: Path) -> None:
    saved("llama", tmp_path / "in")

    def body(strategy: str) -> tuple[list[float], dict[str, Tensor]]:
        module = Lit("llama", tmp_path / "in")
        trainer(strategy, tmp_path, max_epochs=1).fit(module, batches())
        module.model.resize_token_embeddings(70)
        trainer(strategy, tmp_path, max_epochs=1).fit(module, batches())
        assert module.model.get_input_embeddings().weight.shape[0] == 70 == module.model.config.vocab_size
        return module.losses, {name: value.clone() for name, value in module.state_dict().items()}

    (losses, own), (expected, whole) = body("zero3"), body("ddp")
    assert len(losses) == len(expected) and losses == pytest.approx(expected, abs=1e-5)
    assert_weights(own, whole, tolerance=1e-4)


def logits_of(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(TOKENS).logits


def assert_streams(module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """``lightning_zero.stream`` gives the tensors that were exported to ``folder``."""
    files = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    found = {name: value.clone() for name, value in lightning_zero.stream(module, dtype)}
    assert_weights(dict(sorted(found.items())), dict(sorted(files.items())), tolerance=0)


def assert_same_files(folder: Path, address: str) -> None:
    fs, root = fsspec.core.url_to_fs(address)
    assert files(folder) == keys(address)
    for file in files(folder):
        assert fs.cat_file(f"{root}/{file}") == (folder / file).read_bytes(), file


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "stage"), [*((kind, "zero3") for kind in CONFIGS), ("gemma2", "zero1"), ("mixtral", "zero0")]
)
def test_exported_model_gives_the_logits_of_the_trained_one(kind: str, stage: str, tmp_path: Path) -> None:
    """from_pretrained gives the logits of the model that was trained, from the files that transformers writes."""
    saved(kind, tmp_path / "in")
    if dist.get_rank() == 0:
        (tmp_path / "in" / "tokenizer.json").write_text("{}")
        (tmp_path / "in" / "README.md").write_text("not ours to copy")
        fsspec.filesystem("store").put(f"{tmp_path}/in/", f"{bucket(tmp_path / 'b')}/in/", recursive=True)
    dist.barrier()
    module, store = Lit(kind), bucket(tmp_path / "b")
    of = fit(module, tmp_path, stage=stage, init_from=f"{store}/in")
    module.eval()
    with of.strategy.step_scope():
        expected = module.model(TOKENS).logits
    state = {key.removeprefix("model."): value for key, value in weights(of).items()}
    of.strategy.export(tmp_path / "out", shard_size="40KB")
    of.strategy.export(f"{store}/out", shard_size="40KB")
    assert_same_files(tmp_path / "out", f"{store}/out")
    assert_streams(module, tmp_path / "out", None)
    if dist.get_rank() == 0:  # the model's own way, on one rank alone
        module.model.save_pretrained(tmp_path / "alone")
        alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
        assert_weights(alone.state_dict(), {key: state[key] for key in alone.state_dict()}, tolerance=0)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(found), expected)
    assert_weights(found.state_dict(), {key: state[key] for key in found.state_dict()}, tolerance=0)
    if dist.get_rank() == 0:
        found.save_pretrained(tmp_path / "again", max_shard_size="40KB")
        ours, theirs = SafetensorsFolder(tmp_path / "out"), SafetensorsFolder(tmp_path / "again")
        assert sorted(ours.keys) == sorted(theirs.keys)
        assert len(list((tmp_path / "out").glob("model-0*.safetensors"))) > 1
        assert (tmp_path / "out" / "tokenizer.json").exists() and not (tmp_path / "out" / "README.md").exists()


@on_ranks(2)
def test_export_in_another_dtype_is_one_file_and_replaces_nothing(tmp_path: Path) -> None:
    saved("llama", tmp_path / "in")
    module = Lit("llama")
    of = fit(module, tmp_path, init_from=str(tmp_path / "in"))
    of.strategy.export(tmp_path / "out", dtype="bf16")
    assert_streams(module, tmp_path / "out", torch.bfloat16)
    assert files(tmp_path / "out") == ["config.json", "generation_config.json", "model.safetensors"]
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.bfloat16
    for name, value in weights(of).items():
        assert torch.equal(found.state_dict()[name.removeprefix("model.")], value.bfloat16())
    with pytest.raises(ConfigError, match="expected a new or empty folder, got .*out"):
        of.strategy.export(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"export\(dtype=\): expected one of fp32, bf16"):
        of.strategy.export(tmp_path / "other", dtype="int8")
    assert not (tmp_path / "other").exists()


class WithAdapters(Lit):
    def configure_model(self) -> None:
        if self.model is None:
            peft = pytest.importorskip("peft")
            super().configure_model()
            self.model = peft.get_peft_model(self.model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))


@on_ranks(2)
def test_adapters_of_peft_are_trained_saved_and_exported_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    saved("llama", tmp_path / "in")
    settings: dict[str, Any] = {"init_from": str(tmp_path / "in")}
    settings["checkpoint"] = {"name": "sharded", "exclude_frozen": True}
    whole = WithAdapters("llama")
    of = fit(whole, tmp_path, 2, **settings)
    fit(WithAdapters("llama"), tmp_path, 1, **settings).save_checkpoint(tmp_path / "one.ckpt")
    keys = [key for key in ShardedFolder(tmp_path / "one.ckpt").keys if key.startswith("state_dict.")]
    assert len(keys) == 8 and all("lora_" in key for key in keys)
    rest = WithAdapters("llama")
    fit(rest, tmp_path, 2, ckpt_path=tmp_path / "one.ckpt", **settings)
    assert rest.losses == whole.losses[-len(rest.losses) :]

    whole.eval()
    with of.strategy.step_scope():
        expected = whole.model(TOKENS).logits
    of.strategy.export(tmp_path / "out")
    assert_streams(whole, tmp_path / "out", None)
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size < 20_000
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    assert torch.equal(logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "out")), expected)


@on_ranks(2)
def test_adapters_without_the_model_of_their_training_are_refused(tmp_path: Path) -> None:
    """Without it the model's own initialisation would stand in for it, in silence."""
    pytest.importorskip("peft")
    saved("llama", tmp_path / "in")
    settings: dict[str, Any] = {"checkpoint": {"name": "full", "exclude_frozen": True}}
    path = tmp_path / "one.ckpt"
    fit(WithAdapters("llama"), tmp_path, 1, init_from=str(tmp_path / "in"), **settings).save_checkpoint(path)
    with pytest.raises(ConfigError, match=r"which .*one\.ckpt does not have .* on the meta device\. Set init_from"):
        fit(WithAdapters("llama"), tmp_path, 2, ckpt_path=path, **settings)


def turned() -> nn.Module:
    """In torch's other orders in memory, of one number, empty, and with a buffer."""
    torch.default_generator.manual_seed(0)
    module = Does(
        lambda m: None,
        turned=nn.Parameter(torch.randn(5, 40).t()),
        conv=nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        scale=nn.Parameter(torch.ones(())),
        empty=nn.Parameter(torch.ones(0, 2)),
    )
    module.register_buffer("seen", torch.arange(3))
    return module


@on_ranks(1, 3)
def test_export_of_a_plain_module_holds_its_state_dict(tmp_path: Path) -> None:
    module = turned()
    expected = {key: value.clone() for key, value in module.state_dict().items()}
    engine = lightning_zero.shard(module, stage=3, device="cpu")
    export(engine, tmp_path / "out", None, sum(value.nbytes for value in expected.values()))  # one file just holds them
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_weights(dict(sorted(found.items())), dict(sorted(expected.items())), tolerance=0)
    store = bucket(tmp_path / "b")
    for shard_nbytes in (2**30, 300):
        name = f"out{shard_nbytes}"
        export(engine, tmp_path / name, torch.bfloat16, shard_nbytes)
        export(engine, f"{store}/{name}", torch.bfloat16, shard_nbytes)
        assert_same_files(tmp_path / name, f"{store}/{name}")
    assert len(files(tmp_path / name)) == 3
    with pytest.raises(ConfigError, match="expected a new or empty folder, got store://"):
        export(engine, f"{store}/{name}", None, shard_nbytes)
    engine.release()


@on_ranks(2)
@pytest.mark.parametrize("rank, what", [(0, "write"), (1, "write"), (1, "fsync")])
def test_failing_export_leaves_no_file(rank: int, what: str, tmp_path: Path) -> None:
    engine = lightning_zero.shard(turned(), stage=3, device="cpu")
    full = mock.patch.object(
        os if what == "fsync" else Writer, what, side_effect=OSError(28, "No space left on device")
    )
    says = r"out: the folder could not be written: .*No space left"
    with full if dist.get_rank() == rank else nullcontext(), pytest.raises((OSError, RuntimeError), match=says):
        export(engine, tmp_path / "out", None, 2**30)
    assert not files(tmp_path)
    store = bucket(tmp_path / "b")
    full = mock.patch.object(ObjectStore, "before", side_effect=OSError(28, "No space left on device"))
    with full if dist.get_rank() == 0 else nullcontext(), pytest.raises((OSError, RuntimeError), match=says):
        export(engine, f"{store}/out", None, 2**30)
    assert not keys(store)
    engine.release()
