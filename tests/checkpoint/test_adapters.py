"""Every kind of PEFT's adapters is exported as PEFT writes it, and reads back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lightning_zero
from lightning_zero.checkpoint.hugging_face.export import export
from tests.engine.test_pretrained import TOKENS, saved, transformers, wrapped
from tests.harness import on_ranks

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

PROJECTIONS = ["q_proj", "v_proj"]


def adapted(config: Any, *others: str) -> Callable[[Any], Any]:
    def adapt(base: Any) -> Any:
        model = peft.get_peft_model(base, config(), **({"adapter_name": others[0]} if others else {}))
        for other in others[1:]:
            model.add_adapter(other, config())
        return model

    return adapt


def lora(**more: Any) -> Any:
    return peft.LoraConfig(**{"target_modules": PROJECTIONS, "r": 4, **more})


def prompt(name: str, **more: Any) -> Callable[[Any], Any]:
    return adapted(lambda: getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=3, **more))


def resized(base: Any) -> Any:
    base.resize_token_embeddings(70)
    return peft.get_peft_model(base, lora())


def allocated(base: Any) -> Any:
    config = {"init_r": 4, "target_r": 2, "total_step": 10, "target_modules": PROJECTIONS}
    model = peft.get_peft_model(base, peft.AdaLoraConfig(**config))
    names = [name for name, _ in model.base_model.model.named_parameters() if "lora_E" in name]
    keep = [[True, False, True, False], [False, True, True, True]]
    model.peft_config["default"].rank_pattern = {name: keep[n % 2] for n, name in enumerate(names)}
    return model  # read back, its scale is another: also where PEFT itself has written it


KINDS: dict[str, Callable[[Any], Any]] = {
    "lora": adapted(lora),
    "dora": adapted(lambda: lora(use_dora=True)),
    "bias": adapted(lambda: lora(bias="all")),
    "head": adapted(lambda: lora(modules_to_save=["lm_head"])),
    "tokens": adapted(lambda: lora(trainable_token_indices=[1, 2])),
    "embeddings": adapted(lambda: lora(target_modules=["embed_tokens", "q_proj"])),
    "resized": resized,
    "named": adapted(lora, "policy"),
    "second": adapted(lora, "default", "reference"),
    "ia3": adapted(lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "vera": adapted(lambda: peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=4)),
    "oft": adapted(lambda: peft.OFTConfig(target_modules=PROJECTIONS, r=0, oft_block_size=4)),
    "boft": adapted(lambda: peft.BOFTConfig(target_modules=["q_proj"], boft_block_size=4)),
    "loha": adapted(lambda: peft.LoHaConfig(target_modules=PROJECTIONS, r=4)),
    "lokr": adapted(lambda: peft.LoKrConfig(target_modules=PROJECTIONS, r=4)),
    "norms": adapted(lambda: peft.LNTuningConfig(target_modules=["input_layernorm"])),
    "adalora": adapted(lambda: peft.AdaLoraConfig(target_modules=PROJECTIONS, total_step=10)),
    "allocated": allocated,
    "prompt": prompt("PromptTuningConfig"),
    "prefix": prompt("PrefixTuningConfig"),
    "projected": prompt("PrefixTuningConfig", prefix_projection=True, encoder_hidden_size=16),
    "p-tuning": prompt("PromptEncoderConfig", encoder_hidden_size=16),
}


def tensors_of(folder: Path) -> dict[str, Any]:
    found = {p.relative_to(folder).parent.as_posix() + "/": load_file(p) for p in folder.rglob("*.safetensors")}
    return {f"{at}{name}".removeprefix("./"): value for at, own in found.items() for name, value in own.items()}


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_exported_as_peft_writes_them(kind: str, tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    torch.manual_seed(1)

    def load() -> Any:
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        if kind == "resized":
            base.resize_token_embeddings(70)
        return base

    model = KINDS[kind](load())
    for name, param in model.named_parameters():
        if param.requires_grad or (kind == "resized" and "embed_tokens" in name):
            param.data += 0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name)))
    model.eval()
    alone = copy.deepcopy(model)
    alone.save_pretrained(tmp_path / "alone" / str(torch.distributed.get_rank()))
    expected = tensors_of(tmp_path / "alone" / str(torch.distributed.get_rank()))
    module = wrapped(model)
    engine = lightning_zero.shard(module, stage=3, device="cpu")
    streamed = {name: value.clone() for name, value in lightning_zero.stream(module)}
    export(engine, tmp_path / "out", None, 1000)
    written = tensors_of(tmp_path / "out")
    assert set(written) == set(streamed) == set(expected) and expected
    for name, value in expected.items():
        assert torch.equal(written[name], value) and torch.equal(streamed[name], value), name
    if kind == "allocated":
        return
    # Not with ``alone``: PEFT writes what a prefix encoder computes, for one prefix, and so in another order of sums.
    adapter = next(iter(model.peft_config)).replace("default", "")
    folders = tmp_path / "out", tmp_path / "alone" / str(torch.distributed.get_rank())
    with torch.no_grad():
        again, own = (
            peft.PeftModel.from_pretrained(load(), folder / adapter).eval()(TOKENS).logits for folder in folders
        )
    assert torch.equal(again, own)
    torch.testing.assert_close(again, alone(TOKENS).logits)
    engine.release()
