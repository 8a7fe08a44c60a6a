"""What cannot work under ``zero.sequence_parallel`` is refused with the way out, and nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lightning_zero
from lightning_zero import ZeroStrategy, config
from lightning_zero.app.parts import groups_of_ranks
from lightning_zero.app.schema import TrainConfig
from lightning_zero.config import ConfigError
from lightning_zero.data.synthetic import SyntheticData
from lightning_zero.ranks.waits import StallError
from lightning_zero.sequence.model import check_model
from tests.engine.support import places_posted_often
from tests.harness import on_ranks
from tests.trainer.test_long_sequences import LENGTH, STEPS, Llama, Own, Texts, fit, gpt, loader
from tests.trainer.toys import seeded, trainer


class Changed(Own):
    """A model with one thing in its step that would be wrong on a part."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("table", torch.zeros(LENGTH, 16))
        self.free = nn.Parameter(torch.zeros(LENGTH, 16))
        self.plain = torch.zeros(LENGTH, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        length = tokens.shape[1]
        if self.change == "arange":
            _ = self.position(torch.arange(length))
        x = self.embed(tokens)
        if self.change == "buffer":
            x = x + self.table[:length]
        if self.change == "parameter":
            x = x + self.free[None, :length]
        if self.change == "cumsum":
            _ = (tokens > 0).cumsum(dim=1)
        if self.change == "roll":
            labels = tokens.roll(-1, 1)
        if self.change == "eager":
            x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        if self.change in CHANGES:
            _ = CHANGES[self.change](x, self)
        if self.change == "conv":
            x = F.conv1d(x.transpose(1, 2), torch.zeros(16, 16, 3), padding=1).transpose(1, 2)
        if self.change == "none":
            return self.head(x).sum()
        mask = torch.ones(length, length, dtype=torch.bool) if self.change == "mask" else None
        if self.change == "cross":
            _ = F.scaled_dot_product_attention(x[:, None], image := torch.zeros(len(x), 1, 1, 16), image)
        if self.change == "heads":
            _ = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
        if self.change == "flat":
            _ = F.scaled_dot_product_attention(x, x, x)
        q = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).reshape(x.shape)
        logits = self.head(x)
        if self.change == "shift":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# What is done to activations [batch, part, 16], in what words it is refused.
CHANGES: dict[str, Any] = {
    "attribute": lambda x, module: module.plain[: x.shape[1]],
    "narrow": lambda x, module: module.plain.narrow(0, 0, x.shape[1]),
    "scores": lambda x, module: (x @ x.transpose(1, 2)).sigmoid(),
    "pairs": lambda x, module: torch.einsum("bqd,bkd->bqk", x, x),
    "state": lambda x, module: torch.einsum("...ld,...le->...de", x, x),
    "pool": lambda x, module: (x * x.mean(-1, keepdim=True).softmax(dim=1)).sum(),
    "mean": lambda x, module: x.mean(dim=1),
    "most": lambda x, module: x.max(1),
    "pad": lambda x, module: F.pad(x, (0, 0, 1, -1)),
    "last": lambda x, module: x[:, -1],
    "first": lambda x, module: x.select(1, 0),
    "several": lambda x, module: x[:, 2:],
    "kernel": lambda x, module: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[x[:, None]] * 3),
}
WORDS = {
    "attribute": "sequence_positions",
    "narrow": "sequence_positions",
    **dict.fromkeys(("scores", "pairs", "state"), "looks like attention"),
    "pool": "softmax over the positions",
    **dict.fromkeys(("mean", "most"), "mean_over_tokens"),
    "pad": "padding along the positions",
    **dict.fromkeys(("last", "first"), "one of the positions"),
    "several": "some of its positions",
    "kernel": "another kernel of attention",
    "arange": "sequence_positions",
    "buffer": "sequence_positions",
    "parameter": "sequence_positions",
    "cumsum": "split_sequence",
    "roll": "split_sequence",
    "eager": "F.scaled_dot_product_attention",
    "conv": "convolution",
    "none": "without any",
    "mask": "is_causal=True",
    "cross": "self-attention",
    "heads": "divides the 1 heads",
    "flat": r"\[batch, heads, positions, width\]",
    "shift": r"part.of\(tokens\[:, 1:\]\)",
}


@on_ranks(2)
def test_what_would_be_wrong_on_a_part_is_refused(tmp_path: Path) -> None:
    for change, words in WORDS.items():
        with pytest.raises(ConfigError, match=words):
            fit(seeded(lambda c=change: Changed(c)), Texts("pair", 1), tmp_path, 2, 1)
    fit(seeded(lambda: Changed("nothing")), Texts("pair", 1), tmp_path, 2, 1)  # and goes on after it


class Asks(Changed):
    """It has asked for its positions, so what else it counts is its own affair."""

    def forward(self, tokens: Tensor) -> Tensor:
        lightning_zero.sequence_positions(tokens.shape[1])
        return super().forward(tokens)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self(batch[0])
        return super().training_step(batch, batch_idx)


class Gives(pl.LightningModule):
    """A step that takes anything, and computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("the batch is refused before")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(2)
def test_batches_that_nothing_cuts_are_refused(tmp_path: Path) -> None:
    fit(seeded(lambda: Asks("arange")), Texts("pair", 1), tmp_path, 2, 1)
    odd = torch.zeros(4, 7, dtype=torch.int64)
    floats, labels = torch.zeros(4, 8, 3), torch.zeros(4, dtype=torch.int64)
    cases: list[tuple[Any, str]] = [
        (odd, "a multiple of 2, got 7"),
        (floats, "split_sequence"),
        ([floats, labels], r"list\(a tensor \(2, 8, 3\)"),
        ({"x": odd}, "input_ids"),
        ({"input_ids": torch.zeros(4, 8, dtype=torch.int64), "cu_seqlens": labels}, "packs several"),
    ]
    for data, words in cases:
        of = trainer(ZeroStrategy(1, sequence_parallel=2, summary=False), tmp_path, max_epochs=1)
        batches = [{k: v[:2] for k, v in data.items()} if isinstance(data, dict) else _first(data)]
        with pytest.raises(ConfigError, match=words):
            of.fit(seeded(Gives), DataLoader(batches, batch_size=None))


def _first(data: Any) -> Any:
    return data[:2] if isinstance(data, Tensor) else [part[:2] for part in data]


@on_ranks(2)
def test_transformers_without_positions_or_with_packed_texts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokens = torch.ones(2, LENGTH, dtype=torch.int64)
    packed = torch.arange(LENGTH).remainder(3).expand(2, -1)
    class_loss = {"input_ids": tokens, "labels": tokens, "num_items_in_batch": 3}
    for batch, words in (
        (tokens, "position_ids"),
        ({"input_ids": tokens, "labels": tokens, "position_ids": packed}, "packed texts"),
        (class_loss, "num_items_in_batch"),
    ):
        module = seeded(Llama)
        if isinstance(batch, Tensor):
            module.training_step = lambda b, _, m=module: m.model(b, labels=b, use_cache=False).loss
        else:
            module.training_step = lambda b, _, m=module: m.model(**b, use_cache=False).loss
        of = trainer(ZeroStrategy(1, sequence_parallel=2, summary=False), tmp_path, max_epochs=1)
        with pytest.raises(ConfigError, match=words):
            of.fit(module, DataLoader([batch], batch_size=None))


@on_ranks(2)
def test_compiled_blocks_are_refused(tmp_path: Path) -> None:
    module = seeded(Own)
    module.blocks[1].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"Drop torch\.compile"):
        fit(module, Texts("pair", 1), tmp_path, 2, 1)


@on_ranks(2, 4)
def test_ranks_of_a_group_with_other_batches_are_refused(tmp_path: Path) -> None:
    data = Texts("pair", 2)
    sampler = DistributedSampler(data, shuffle=False)  # of all ranks, each its own
    of = trainer(ZeroStrategy(3, sequence_parallel=2, summary=False), tmp_path, max_epochs=1)
    with pytest.raises(ConfigError, match=r"distributed_sampler_kwargs"):
        of.fit(seeded(Own), DataLoader(data, batch_size=2, sampler=sampler))
    again = trainer(ZeroStrategy(3, sequence_parallel=2, summary=False), tmp_path, max_epochs=1)
    again.fit(seeded(Own), loader(data, again))
    assert dist.get_world_size() // 2 == again.distributed_sampler_kwargs["num_replicas"]


@pytest.mark.parametrize("layer, words", [
    (nn.LSTM(2, 2), "from position to position"),
    (nn.BatchNorm1d(2), "statistics"),
    (nn.Conv1d(2, 2, 3), "kernel"),
    (nn.MultiheadAttention(6, 3), "divides the 3 heads"),
    (torch.jit.script(nn.Linear(2, 2)), "hides what it calls"),
])  # fmt: skip
def test_layers_are_refused_before_a_run(layer: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_model(nn.Sequential(layer), 2)
    check_model(nn.Sequential(layer), 1)
    check_model(nn.Sequential(nn.Conv1d(2, 2, 1), nn.MultiheadAttention(6, 2), nn.SyncBatchNorm(2)), 2)


def test_a_run_whose_ranks_or_heads_do_not_divide_is_refused_before_it_starts(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accelerator": "cpu", "logger": False, "default_root_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"divides the 4 rank\(s\) of the run \(1, 2, 4\), got 3"):
        pl.Trainer(strategy=ZeroStrategy(3, sequence_parallel=3), devices=4, **settings)
    three = pl.Trainer(strategy=ZeroStrategy(3, sequence_parallel=3), devices=3, **settings)
    with pytest.raises(ConfigError, match=r"divides the 4 heads"):
        three.fit(gpt(), DataLoader(Texts("next", 1)))


@pytest.mark.parametrize("settings, words", [
    ({"sequence_parallel": 0}, "> 0"),
    ({"sequence_parallel": True}, "a whole number"),
    ({"sequence_parallel": 2, "compile": "blocks"}, "zero/compile=none"),
    ({"sequence_parallel": 2, "micro_batches": 2, "activation_checkpointing": "blocks"}, "Drop one of them"),
])  # fmt: skip
def test_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.make_config(**settings)


def test_the_main_job_refuses_lengths_and_counts_groups() -> None:
    job = TrainConfig(zero=config.make_config(sequence_parallel=2))
    assert groups_of_ranks(job, SyntheticData(block_size=64), 4) == 2
    with pytest.raises(ConfigError, match=r"data.block_size: expected a multiple of .* \(2\)"):
        groups_of_ranks(job, SyntheticData(block_size=63), 4)
    with pytest.raises(ConfigError, match="zero.sequence_parallel"):
        groups_of_ranks(job, SyntheticData(block_size=64), 3)


def test_shard_and_fabric_refuse_it() -> None:
    with pytest.raises(ConfigError, match="ZeroStrategy"):
        lightning_zero.shard(nn.Linear(2, 2), sequence_parallel=2)
    with pytest.raises(ConfigError, match="ZeroStrategy"):
        lightning_zero.ZeroFabricStrategy(3, sequence_parallel=2)


class Breaks(Own):
    """Rank 1 raises in the middle of its second step, before its second attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(seeded(Own).blocks)
        self.broken = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(lightning_zero.sequence_positions(tokens.shape[1]))
        for number, block in enumerate(self.blocks):
            if self.broken and number == 1 and self.trainer.global_step == 1 and dist.get_rank() == 1:
                raise ValueError("a bad sample")
            x = block(x)
        return self.head(x)


@on_ranks(2)
def test_a_rank_that_raises_is_not_waited_for_without_end(tmp_path: Path) -> None:
    data, module = Texts("pair", 1), seeded(Breaks)
    error, words = (ValueError, "a bad sample") if dist.get_rank() else (StallError, "exchange of heads")
    with places_posted_often(), pytest.raises(error, match=words):
        fit(module, data, tmp_path, 2, 3, zero={"stall_timeout_s": 4.0})
    module.broken = False
    # Other settings: the module is whole in between, by messages that the ranks have issued equally many of.
    found = fit(module, data, tmp_path, 2, 3)
    assert len(found.losses) == STEPS
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
