"""Models of transformers under ``zero.sequence_parallel``: positions, masks and attention of many kinds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

import lightning_zero
from lightning_zero.settings import ConfigError
from tests.harness import on_ranks
from tests.trainer import test_long_sequences as long_sequences
from tests.trainer.test_long_sequences import LENGTH, LR, VOCABULARY, Texts, assert_parity

pytestmark = pytest.mark.full

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "intermediate_size": 24,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
# By the names of classes: settings, and the model.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", COMMON),
    "GPT2LMHeadModel": ("GPT2Config", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "MistralForCausalLM": ("MistralConfig", {**COMMON, "num_key_value_heads": 2, "sliding_window": 3}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**COMMON, "num_key_value_heads": 2, "head_dim": 8}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**COMMON, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 4}),
    "BertForMaskedLM": ("BertConfig", {**COMMON, **NO_DROPOUT}),
    "RobertaForMaskedLM": ("RobertaConfig", {**COMMON, **NO_DROPOUT, "max_position_embeddings": LENGTH + 2}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {**COMMON, **LATENT, **EXPERTS, "first_k_dense_replace": 1}),
}


class Model(pl.LightningModule):
    def __init__(self, kind: str = "LlamaForCausalLM", **more: Any) -> None:
        super().__init__()
        config, settings = KINDS[kind]
        self.model = getattr(transformers, kind)(getattr(transformers, config)(**{**settings, **more}))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


class Masks(Model):
    """The step makes mask and labels of its part, and asks where it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        positions = lightning_zero.sequence_positions(tokens.shape[1])[None]
        labels = torch.where(tokens > 3, tokens, -100)
        return self.model(tokens, attention_mask=tokens > 3, position_ids=positions, labels=labels).loss


class WithPositions(Texts):
    """Positions that count from 2, and no padding, as RoBERTa makes them."""

    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        mask = found["attention_mask"]
        return {**found, "position_ids": mask.cumsum(0) * mask + 1}


@on_ranks(2)
def test_models_that_count_padding_otherwise_need_position_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are given, or the batch is refused."""
    parity = partial(assert_parity, partial(Model, "RobertaForMaskedLM"), "padded", tmp_path, 2)
    with pytest.raises(ConfigError, match=r"Look in training_step.*batch\['position_ids'\]"):
        parity()
    with monkeypatch.context() as patch:
        patch.setattr(long_sequences, "Texts", WithPositions)
        parity()


@on_ranks(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("RobertaForMaskedLM", "LlamaForCausalLM")])
def test_model_of_transformers_equals_one_process(kind: str, tmp_path: Path) -> None:
    assert_parity(partial(Model, kind), "padded", tmp_path, 2)


@on_ranks(2)
@pytest.mark.parametrize("keys, form", [(4, "prompt"), (2, "padded"), (1, "padded")])
def test_llama_with_few_keys_equals_one_process(keys: int, form: str, tmp_path: Path) -> None:
    assert_parity(partial(Model, num_key_value_heads=keys), form, tmp_path, 2, accumulate=2)


@on_ranks(2, full=(4,))
def test_masks_and_positions_that_a_step_makes_equal_one_process(tmp_path: Path) -> None:
    assert_parity(partial(Masks, num_key_value_heads=2), "padded", tmp_path, 2, 1)
