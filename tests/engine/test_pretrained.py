"""First values from folders of Hugging Face: read in parts, into shards, by every model of transformers."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.pretrained import SafetensorsFolder
from lightning_zero.pretrained.conversions import hugging_face_model
from lightning_zero.settings import ConfigError
from tests.engine.test_offload import offload
from tests.harness import on_ranks
from tests.models import Does
from tests.object_store import bucket

transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file
logging.getLogger("transformers").setLevel(logging.ERROR)
transformers.utils.logging.disable_progress_bar()  # which leaves a thread
pytestmark = [pytest.mark.sample, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}
TOKENS = torch.arange(1, 13).view(2, 6)


def make(kind: str, device: str = "cpu", seed: int = 0) -> Any:
    torch.default_generator.manual_seed(seed)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()


def saved(kind: str, folder: Path, **settings: Any) -> Any:
    """A model, and its files in ``folder``, by rank 0."""
    model = make(kind)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder, **settings)
    if dist.is_initialized():
        dist.barrier()
    return model


def wrapped(model: Any) -> nn.Module:
    return Does(lambda m, tokens: m.model(tokens).logits, model=model)


def shard_from(module: nn.Module, folder: Path, **settings: Any) -> Any:
    return lightning_zero.shard(module, **{"stage": 3, "init_from": str(folder), "device": "cpu", **settings})


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_on_meta_has_the_values_of_the_folder(kind: str, stage: int, tmp_path: Path) -> None:
    """And its rotary frequencies, embedding scales and tied weights."""
    expected = wrapped(saved(kind, tmp_path))
    module = wrapped(make(kind, "meta"))
    with from_folder(module, tmp_path, stage=stage) as engine:
        with torch.no_grad(), engine.step_scope(evaluation=True):
            assert torch.equal(module(TOKENS), expected(TOKENS))
        assert_values(engine, expected)
        for (name, own), other in zip(module.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(own, other), name


@contextlib.contextmanager
def from_folder(module: nn.Module, folder: Path, **settings: Any) -> Iterator[Any]:
    engine = shard_from(module, folder, **settings)
    yield engine
    engine.release()


def assert_values(engine: Any, expected: nn.Module, prefix: str = "") -> None:
    state = engine.state_dict(only_rank_0=False)
    for name, value in expected.state_dict().items():
        assert torch.equal(state[f"{prefix}{name}"], value), name


@on_ranks(2)
@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])  # turned, and stacked in memory
def test_a_folder_may_lie_in_an_object_store(kind: str, tmp_path: Path) -> None:
    expected = wrapped(saved(kind, tmp_path / "files", max_shard_size="20KB"))
    store = bucket(tmp_path / "store")
    if dist.get_rank() == 0:
        fsspec.filesystem("store").put(f"{tmp_path}/files/", f"{store}/model/", recursive=True)
    dist.barrier()
    engine = shard_from(wrapped(make(kind, "meta")), f"{store}/model")  # type: ignore[arg-type]
    assert_values(engine, expected)
    engine.release()
    with pytest.raises(ConfigError, match=r"init_from: expected a folder, got store://.*/other"):
        shard_from(wrapped(make(kind, "meta")), f"{store}/other")  # type: ignore[arg-type]


@on_ranks(2)
@pytest.mark.parametrize("row", ["optimizer_cpu", "nvme"])
def test_values_go_into_offloaded_shards(row: str, tmp_path: Path) -> None:
    expected = wrapped(saved("llama", tmp_path / "files"))
    (tmp_path / "disk").mkdir(exist_ok=True)
    module = wrapped(make("llama", "meta"))
    with from_folder(module, tmp_path / "files", precision="bf16", **offload(row, tmp_path / "disk")) as engine:
        assert_values(engine, expected)


@on_ranks(3)
def test_ranks_read_no_byte_beyond_their_shards(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    read = mock.patch.object(SafetensorsFolder, "_read", autospec=True, side_effect=SafetensorsFolder._read)
    module = wrapped(make("llama", "meta"))
    with read as calls, from_folder(module, tmp_path) as engine:
        own = sum(f.numel for bucket in engine.buckets for f in bucket.owned_fragments())
        assert sum(stop - start for _, _, start, stop, _ in (call.args for call in calls.call_args_list)) == own
        total = torch.tensor(own)
        dist.all_reduce(total)
        assert total == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("what", ["one file", "several files", "the base model's", "no index"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_folders_of_every_form_are_read_whatever_the_model_holds(what: str, device: str, tmp_path: Path) -> None:
    model = make("gpt2")
    if what == "the base model's":  # as gpt2 was published: without the prefix transformer.
        model.transformer.save_pretrained(tmp_path)
    else:
        model.save_pretrained(tmp_path, max_shard_size="1MB" if what == "one file" else "60KB")
        assert (len(list(tmp_path.glob("*.safetensors"))) == 1) == (what == "one file")
        if what == "no index":
            index_of(tmp_path).unlink()
    with from_folder(wrapped(make("gpt2", device, seed=5)), tmp_path) as engine:
        assert_values(engine, model, "model.")


def test_a_module_that_is_none_of_transformers(tmp_path: Path) -> None:
    make_net = lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))  # noqa: E731
    net = make_net()
    net[1].running_mean += 3
    save_file(net.state_dict(), tmp_path / "a.safetensors")
    with torch.device("meta"):
        module = wrapped(make_net())
    with from_folder(module, tmp_path) as engine:
        assert_values(engine, net, "model.")


def no_reset() -> Any:
    gain, bias = (nn.Parameter(torch.ones(3, device="meta")) for _ in range(2))
    return Does(lambda m, x: x, gain=gain, bias=bias)


def test_a_tensor_without_a_source_is_named(tmp_path: Path) -> None:
    module = lambda: nn.Sequential(no_reset(), nn.Linear(3, 2, device="meta"))  # noqa: E731
    values = {"0.gain": torch.full((3,), 2.0)}
    save_file(values, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"\(bias\).*nor has 0\.bias a source in init_from"):
        shard_from(module(), tmp_path)
    values["0.bias"] = torch.full((3,), 3.0)
    save_file(values, tmp_path / "a.safetensors")
    with (
        pytest.warns(UserWarning, match=r"has no 1\.weight, 1\.bias: these tensors keep their initial values"),
        from_folder(module(), tmp_path) as engine,
    ):
        state = engine.state_dict()
        assert all(torch.equal(state[name], value) for name, value in values.items())
        assert state["1.weight"].isfinite().all()


def test_what_is_left_without_a_value_is_named() -> None:
    forgets = no_reset()
    forgets.reset_parameters = lambda: nn.init.ones_(forgets.gain)
    with pytest.raises(ConfigError, match=r"0\.bias was on the meta device, and Does has not initialized it"):
        lightning_zero.shard(nn.Sequential(forgets), stage=3, device="cpu")


def test_a_model_of_transformers_needs_no_folder(tmp_path: Path) -> None:
    """It makes its first values as it does off meta: norms of ones, small weights, rotary frequencies."""
    module = make("llama", "meta")
    with from_folder(module, tmp_path, init_from=None) as engine:
        state = engine.state_dict()
    assert (state["model.norm.weight"] == 1).all()
    assert 0.01 < state["lm_head.weight"].std() < 0.03
    assert torch.equal(module.model.rotary_emb.inv_freq, make("llama").model.rotary_emb.inv_freq)


def first_of(folder: Path) -> Path:
    return next(folder.glob("*00001*"))


def index_of(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def leave_only(folder: Path, values: dict[str, Tensor]) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    save_file(values, folder / "model.safetensors")


def move_out(folder: Path) -> None:
    """The index names a file above, with the same in it."""
    first = first_of(folder)
    index_of(folder).write_text(index_of(folder).read_text().replace(first.name, "../stolen.safetensors"))
    first.rename(folder / "../stolen.safetensors")


def with_head(folder: Path, change: Callable[[Tensor], Tensor]) -> None:
    values = make("llama").state_dict()
    leave_only(folder, values | {"lm_head.weight": change(values["lm_head.weight"])})


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, r"expected a folder, got .*files"),
    "no files": (lambda folder: [p.unlink() for p in folder.iterdir()], r"expected \*\.safetensors files in .*files"),
    "a file is missing": (
        lambda folder: first_of(folder).unlink(),
        r"expected model-00001-of-\d+\.safetensors in .*files, where .*index\.json names it",
    ),
    "half a file": (
        lambda folder: first_of(folder).write_bytes(first_of(folder).read_bytes()[:5000]),
        r"expected a whole file, got .*00001.*cannot be read",
    ),
    "an index that is none": (
        lambda folder: index_of(folder).write_text("hello"),
        r"expected a whole file, got .*index\.json",
    ),
    "an index that names a file above": (
        move_out,
        r"index\.json.*it names \.\./stolen\.safetensors, which is not in the folder",
    ),
    "another size": (
        lambda folder: with_head(folder, lambda weight: weight[:32].clone()),
        r"expected model\.lm_head\.weight of shape \(64, 32\) in .*files, got \(32, 32\)",
    ),
    "another model": (
        lambda folder: leave_only(folder, {"x": torch.ones(3)}),
        r"expected tensors of this module in .*files, got none",
    ),
    "a quantized model": (
        lambda folder: with_head(folder, lambda weight: weight.to(torch.float8_e4m3fn)),
        r"expected model\.lm_head\.weight as floating-point numbers of 16 bits or more in .*files, got float8_e4m3fn",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_folder_is_refused_on_all_ranks(damage: str, tmp_path: Path) -> None:
    change, says = DAMAGES[damage]
    folder = tmp_path / "files"
    saved("llama", folder, max_shard_size="30KB")
    if dist.get_rank() == 0:
        change(folder)
    dist.barrier()
    with pytest.raises(ConfigError, match=says):
        shard_from(wrapped(make("llama", "meta")), folder)


@on_ranks(2)
def test_folders_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    """A node's copy that lacks a file: its ranks would wait for values that nobody sends."""
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    values = make("llama").state_dict()
    if dist.get_rank() == 1:
        del values["model.norm.weight"]
    save_file(values, folder / "model.safetensors")
    says = r"got model\.model\.norm\.weight on rank 0 and none on rank 1\. Give a folder"
    with pytest.raises(ConfigError, match=says):
        shard_from(wrapped(make("llama", "meta")), folder, stall_timeout_s=20)


@on_ranks(2)
@pytest.mark.parametrize("way", [True, "gaussian"])
def test_adapters_of_peft(way: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    expected = saved("llama", tmp_path)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=way)
    module = wrapped(peft.get_peft_model(make("llama", "meta"), config).eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        engine = shard_from(module, tmp_path)
    with torch.no_grad(), engine.step_scope(evaluation=True):
        torch.testing.assert_close(module(TOKENS), expected(TOKENS).logits)  # the second factor is zero
    lora = {name: value for name, value in engine.state_dict(only_rank_0=False).items() if "lora_" in name}
    assert len(lora) == 8
    assert all(bool(value.any()) == ("lora_A" in name) for name, value in lora.items())
    engine.release()


@on_ranks(1)
def test_adapters_that_follow_from_the_values_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    saved("llama", tmp_path)
    model = peft.get_peft_model(make("llama", "meta"), peft.LoraConfig(target_modules=["q_proj"]))
    for config in model.peft_config.values():
        config.init_lora_weights = "pissa"
    with pytest.raises(ConfigError, match="which is on the meta device, got 'pissa', which needs values"):
        shard_from(model, tmp_path)


def test_a_package_that_nobody_uses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports its models when it is asked for a class, and fails where a logger of its is a mock."""
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    assert hugging_face_model(nn.Linear(2, 2)) == (None, "")
    lightning_zero.shard(nn.Linear(2, 2), stage=3, device="cpu").release()
