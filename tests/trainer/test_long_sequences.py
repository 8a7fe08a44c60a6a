"""``zero.sequence_parallel`` through the Trainer: losses and gradients of one process that has whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.models.gpt import LitGPT
from tests.harness import on_ranks
from tests.trainer.toys import seeded, trainer

VOCABULARY, LENGTH, STEPS = 13, 8, 2
LR = 0.3


class Texts(Dataset[Any]):
    """Whole texts, as ``form`` says: each item belongs to one step of one group."""

    def __init__(self, form: str, groups: int, ignored: bool = False) -> None:
        extra = 1 if form == "next" else 0
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(1, VOCABULARY, (2 * groups * STEPS, LENGTH + extra), generator=generator)
        self.form, self.labels = form, self.tokens.roll(-1, 1)
        if ignored:  # the second half of a text, but for one token of the first, and the end of the others
            self.labels = self.labels.clone()
            self.labels[::2, LENGTH // 2 :] = -100
            self.labels[1::2, -1] = -100
            self.labels[0, : LENGTH - 1] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        if self.form == "next":
            return self.tokens[index]
        if self.form == "pair":
            return self.tokens[index], self.labels[index]
        padding = (torch.arange(LENGTH) < LENGTH - index % 3).long()
        labels = torch.where(padding > 0, self.tokens[index], -100)
        if self.form == "prompt":
            labels[: LENGTH // 2 + 1] = -100
        return {"input_ids": self.tokens[index], "attention_mask": padding, "labels": labels}


class Attention(nn.Module):
    """Own attention, with fewer heads of keys than of queries."""

    def __init__(self, width: int, heads: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys, self.width = heads, keys, width // heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * keys * self.width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, self.keys, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.keys)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Own(pl.LightningModule):
    """A language model of the user's own; ``heads`` and ``keys`` of attention."""

    def __init__(self, heads: int = 4, keys: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.blocks = nn.ModuleList(Attention(16, heads, keys) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(lightning_zero.sequence_positions(tokens.shape[1], tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


class Llama(pl.LightningModule):
    """Of transformers, with rotary positions, masks of padding and a shift of labels of its own."""

    def __init__(self, attention: str = "sdpa", keys: int = 2) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=keys,
            max_position_embeddings=LENGTH,
            attn_implementation=attention,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def gpt(**settings: Any) -> LitGPT:
    sizes = {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4, "d_model": 16, "block_size": LENGTH}
    module = LitGPT(**{**sizes, **settings})
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=LR)  # type: ignore[method-assign]
    return module


class Record(pl.Callback):
    """Losses of steps, and the gradient of the first step, whole."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.seen.append(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.gradients:
            with lightning_zero.gather(pl_module, grads=True):
                self.gradients = {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}


def loader(data: Dataset[Any], of: pl.Trainer) -> DataLoader[Any]:
    sampler = DistributedSampler(data, shuffle=False, **of.distributed_sampler_kwargs)  # type: ignore[arg-type]
    return DataLoader(data, batch_size=2, sampler=sampler)


def fit(module: pl.LightningModule, data: Texts, root: Path, size: int, stage: int = 3, **settings: Any) -> Record:
    record = Record()
    strategy = ZeroStrategy(stage, sequence_parallel=size, summary=False, **settings.pop("zero", {}))
    of = trainer(strategy, root, max_epochs=1, callbacks=[record], **settings)
    of.fit(module, loader(data, of))
    return record


def one_process(
    module: pl.LightningModule, data: Texts, groups: int, loss: Callable[[Any, Any], Tensor], accumulate: int = 1
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses of each group, by steps, and the first gradient: of plain training, with whole sequences."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    losses: list[list[float]] = [[] for _ in range(groups)]
    gradients: dict[str, Tensor] = {}
    batches = [
        list(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, groups, g, shuffle=False)))
        for g in range(groups)
    ]
    for step in range(STEPS):
        for group in range(groups):
            found = loss(module, batches[group][step])
            (found / groups / accumulate).backward()
            losses[group].append(found.item())
        if (step + 1) % accumulate == 0:
            gradients = gradients or {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
    return losses, gradients


def assert_parity(
    make: Callable[[], pl.LightningModule],
    loss: Callable[[Any, Any], Tensor],
    form: str,
    root: Path,
    size: int,
    stage: int = 3,
    ignored: bool = False,
    accumulate: int = 1,
    **settings: Any,
) -> Record:
    """Losses and gradients are those of one process; the trained weights too, since later losses are."""
    groups = dist.get_world_size() // size
    data = Texts(form, groups, ignored)
    losses, gradients = one_process(seeded(make), data, groups, loss, accumulate)
    found = fit(seeded(make), data, root, size, stage, accumulate_grad_batches=accumulate, **settings)
    expected = losses[dist.get_rank() // size]
    torch.testing.assert_close(found.losses, [x / accumulate for x in expected], rtol=1e-6, atol=1e-6)
    assert found.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found.gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}"
        )
    return found


def loss_of_pair(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten())


def loss_of_next(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def loss_of_llama(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module.model(**batch).loss
    return loss


@on_ranks(2, 4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_own_attention_equals_one_process(stage: int, tmp_path: Path) -> None:
    for heads, keys in ((4, 4), (4, 2), (4, 1)):
        make = lambda h=heads, k=keys: Own(h, k)  # noqa: E731
        for size in {2, dist.get_world_size()}:
            assert_parity(make, loss_of_pair, "pair", tmp_path, size, stage, ignored=heads == keys)


@on_ranks(2)
@pytest.mark.parametrize("position, recompute", [("learned", "none"), ("rotary", "blocks"), ("rotary", "offload")])
def test_the_default_model_equals_one_process(position: str, recompute: str, tmp_path: Path) -> None:
    make = lambda: gpt(position=position)  # noqa: E731
    zero = {"activation_checkpointing": recompute}
    assert_parity(make, loss_of_next, "next", tmp_path, 2, 1, zero=zero)


@on_ranks(2)
@pytest.mark.parametrize("attention, keys, form", [
    ("sdpa", 4, "prompt"),
    ("sdpa", 2, "padded"),
    ("eager", 1, "padded"),
])  # fmt: skip
def test_transformers_equals_one_process(attention: str, keys: int, form: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make = lambda: Llama(attention, keys)  # noqa: E731
    assert_parity(make, loss_of_llama, form, tmp_path, 2, accumulate=2)
