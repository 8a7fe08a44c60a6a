"""What cannot work under ``zero.sequence_parallel`` is refused with the way out, and nothing hangs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.ranks.verdict import StallError
from lightning_zero.settings import ConfigError
from tests.engine.support import places_posted_often
from tests.harness import on_ranks
from tests.trainer.test_long_sequences import LENGTH, STEPS, Own, Record, Texts, fit, loader
from tests.trainer.toys import seeded, trainer

pytestmark = pytest.mark.full


class Changed(Own):
    """A model with one thing in its step that looks along the positions, or might."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("table", torch.randn(LENGTH, 16))
        self.free = nn.Parameter(torch.randn(LENGTH, 16))
        self.plain = torch.randn(LENGTH, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.weighing = nn.MultiheadAttention(16, 2, batch_first=True)

    def embedded(self, tokens: Tensor) -> Tensor:
        x = super().embedded(tokens)
        return x + self.change(x, self, tokens)


Change = Callable[[Tensor, Any, Tensor], Any]

# What is added to activations [batch, length, 16].
LOOKS_ALONG: dict[str, Change] = {
    "var": lambda x, *_: x.var(dim=1, keepdim=True),
    "median": lambda x, *_: x.median(dim=1, keepdim=True).values,
    "any": lambda x, *_: (x > 1).any(dim=1, keepdim=True).float(),
    "layer_norm": lambda x, *_: F.layer_norm(x, x.shape[1:]),
    "conv2d": lambda x, *_: F.conv2d(x[:, None], torch.ones(1, 1, 3, 3), padding=1)[:, 0],
    "unfold": lambda x, *_: F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).amax(-1),
    "gather": lambda x, *_: x.gather(1, torch.zeros(len(x), 1, 16, dtype=torch.int64)),
    "fft": lambda x, *_: torch.fft.fft(x, dim=1).real,
    "linspace": lambda x, *_: torch.linspace(0, 1, x.shape[1])[None, :, None],
    "einsum": lambda x, *_: torch.einsum("btd->bd", x)[:, None],
    "transpose": lambda x, *_: x.transpose(1, 2).sum(-1)[:, None],
    "one": lambda x, *_: x[..., :1].sum(1, keepdim=True),
    "constant": lambda x, *_: torch.ones(x.shape[1], x.shape[1]).tril() @ x,
    "arange": lambda x, module, tokens: module.position(torch.arange(tokens.shape[1])),
    "buffer": lambda x, module, _: module.table[: x.shape[1]],
    "parameter": lambda x, module, _: module.free[None, : x.shape[1]],
    "attribute": lambda x, module, _: module.plain.narrow(0, 0, x.shape[1]),
    "cumsum": lambda x, module, tokens: (tokens > 3).cumsum(dim=1)[..., None],
    "roll": lambda x, *_: x.roll(1, 1),
    "last": lambda x, *_: x[:, -1:],
    "mean": lambda x, *_: x.mean(dim=1, keepdim=True),
    "softmax": lambda x, *_: x * x.mean(-1, keepdim=True).softmax(dim=1),
    "state": lambda x, *_: torch.einsum("ble,bde->bld", x, torch.einsum("bld,ble->bde", x, x)),
    "attention": lambda x, *_: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "by name": lambda x, *_: by_name(*[x.unflatten(2, (4, 4)).transpose(1, 2)] * 3).transpose(1, 2).flatten(2),
    "weights": lambda x, module, _: module.weighing(x, x, x)[0],
    "hidden": lambda x, *_: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[x[:, None]] * 3)[0][:, 0],
    "lstm": lambda x, module, _: module.lstm(x)[0],
    "batch norm": lambda x, module, _: module.norm(x.transpose(1, 2)).transpose(1, 2),
}
# What looks like it, and is not; and what is drawn at random.
HONEST: dict[str, Change] = {
    "each": lambda x, *_: x.var(dim=-1, keepdim=True) * F.normalize(x, dim=-1) + x[..., :1].sum(-1, keepdim=True),
    "square": lambda x, *_: torch.einsum("btd,de->bte", x, torch.ones(16, 16).tril()) / 16,
    "arange": lambda x, *_: torch.arange(x.shape[-1]),
    "mean": lambda x, *_: lightning_zero.mean_over_tokens(x, dim=1)[:, None],
    "texts": lambda x, *_: (x[..., None] @ x[..., None, :]).mean(-1),
    "dropout": lambda x, module, _: F.dropout(x, 0.2, module.training),
    "noise": lambda x, *_: torch.randn_like(x) + torch.rand(x.shape) + torch.bernoulli(torch.full_like(x, 0.3)),
    "drawn": lambda x, *_: x * torch.empty(len(x), 1, 1).bernoulli_(0.9) + torch.empty_like(x).uniform_(0, 1),
}


def refused(words: str) -> Any:
    return pytest.raises(ConfigError, match=words)


def fit_pairs(module: Own, root: Path, stage: int = 3, **settings: Any) -> Record:
    return fit(module, Texts("pair", 1), root, 2, stage, **settings)


def fit_changed(change: Change, root: Path, stage: int = 3, **settings: Any) -> Record:
    return fit_pairs(seeded(partial(Changed, change)), root, stage, **settings)


def fit_batches(module: Any, batches: list[Any], root: Path, stage: int = 3, **settings: Any) -> None:
    """``batches``: as they are, on each rank."""
    of = trainer(ZeroStrategy(stage, sequence_parallel=2), root, max_epochs=1, **settings)
    of.fit(module, DataLoader(batches, batch_size=None))


@on_ranks(2)
def test_operations_along_the_positions_are_refused(tmp_path: Path) -> None:
    for number, (name, change) in enumerate(LOOKS_ALONG.items()):
        module = seeded(partial(Changed, change))
        with refused("the first parameter whose gradient differs is") as found:
            fit_pairs(module, tmp_path, 3 * (number % 2), accumulate_grad_batches=2)
        assert "Look in training_step" in str(found.value), name
        assert module.trainer.global_step == 0


@on_ranks(2)
def test_operations_of_each_position_by_itself_are_not_refused(tmp_path: Path) -> None:
    for name, change in HONEST.items():
        assert len(fit_changed(change, tmp_path).losses) == STEPS, name


class Rotary(Own):
    """Turns queries and keys by positions that begin at 0 in each part. What comes behind begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.head, *(block.out for block in self.blocks)):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        for layer in (layer for block in self.blocks for layer in (block.q, block.kv)):
            layer.register_forward_hook(turned)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)


def turned(layer: nn.Module, inputs: Any, x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1])[:, None].float()
    pairs = torch.view_as_complex(x[..., :16].unflatten(-1, (-1, 2)).contiguous())  # queries or keys
    found = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([found, x[..., 16:]], -1)


@on_ranks(2)
def test_what_zeros_hide_from_the_first_trial_is_tried_again(tmp_path: Path) -> None:
    module = seeded(Rotary)
    with refused("the first parameter whose gradient differs is"):
        fit_pairs(module, tmp_path)
    assert module.trainer.global_step == 1


@on_ranks(2)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_comparison_asks_for_no_more_digits_than_the_precision_has(precision: str, tmp_path: Path) -> None:
    for name in ("each", "dropout", "mean"):
        fit_changed(HONEST[name], tmp_path, precision=precision)
    for name in ("var", "constant", "arange", "last"):
        with refused("Look in training_step"):
            fit_changed(LOOKS_ALONG[name], tmp_path, precision=precision)


class ByHand(Changed):
    """Manual optimization, with all that a step may do to what is around it."""

    def __init__(self, change: Change) -> None:
        super().__init__(change)
        self.automatic_optimization = False
        self.register_buffer("seen", torch.zeros(()))
        self.metric = MeanMetric()
        self.calls, self.kept, self.rates, self.drawn = 0, [], [], []
        self.inside: Any = {"deep": [torch.zeros(()), {"inside": 0}]}

    def on_fit_start(self) -> None:
        random.seed(dist.get_rank())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        batch[1].add_(1).remainder_(4)
        loss = super().training_step(batch, batch_idx)
        self.calls += 1
        self.kept.append(batch_idx)
        self.drawn.append((random.random(), float(np.random.rand())))  # as layers that are chosen at random
        self.seen += 1
        self.inside["deep"][0] += 1
        self.inside["deep"][1]["inside"] += 1
        self.norm(torch.ones(2, 16))
        self.metric(loss.detach())
        self.log("loss", loss)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        self.lr_schedulers().step()
        self.rates.append(optimizer.param_groups[0]["lr"])
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2)
        return [optimizer], [torch.optim.lr_scheduler.ChainedScheduler([falls])]


@on_ranks(2)
def test_step_that_is_tried_leaves_no_trace(tmp_path: Path) -> None:
    for stage in (0, 3):
        fine, along = (seeded(partial(ByHand, change)) for change in (HONEST["dropout"], LOOKS_ALONG["mean"]))
        fit_pairs(fine, tmp_path, stage, zero={"offload": "optimizer_cpu"} if stage else {})
        drawn: list[Any] = [None, None]
        dist.all_gather_object(drawn, fine.drawn)
        assert drawn[0] == drawn[1]
        assert fine.calls == fine.metric.update_count == fine.seen == STEPS == fine.trainer.global_step
        assert fine.kept == [0, 1] and fine.rates == [0.75, 0.5]
        assert fine.inside == {"deep": [STEPS, {"inside": STEPS}]}
        torch.testing.assert_close(fine.norm.running_mean, torch.full((16,), 1 - 0.9**STEPS))
        with refused("Look in training_step"):
            fit_pairs(along, tmp_path, stage)
        assert along.calls == along.trainer.global_step == 0 and not along.trainer.callback_metrics


class Norms(ByHand):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, *args, **kwargs)
        self.head.weight.grad.norm()


@on_ranks(2)
def test_error_of_a_tried_step_says_that_it_has_no_gradients(tmp_path: Path) -> None:
    with pytest.raises(AttributeError) as found:
        fit_pairs(seeded(partial(Norms, HONEST["each"])), tmp_path)
    assert "each param.grad is None: use gradients in on_before_optimizer_step" in found.value.__notes__[0]


class Teacher(Own):
    """Clamps weights in its step. ``at``: where a teacher follows them."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.teacher = at, nn.Linear(16, 13).requires_grad_(False)

    def follow(self, at: str) -> None:
        if at == self.at:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.head.weight, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow("step")
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        with lightning_zero.gather(self):
            self.follow("end")


@on_ranks(2)
def test_writes_that_a_tried_step_would_leave_are_refused(tmp_path: Path) -> None:
    for stage in (0, 2, 3):
        with refused("training_step not to change parameters, got a write to teacher.weight"):
            fit_pairs(seeded(partial(Teacher, "step")), tmp_path, stage)
        assert len(fit_pairs(seeded(partial(Teacher, "end")), tmp_path, stage).losses) == STEPS


class Third(Changed):
    """Looks along the positions where a batch has three tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.change = LOOKS_ALONG["mean"] if len(batch) > 2 else HONEST["each"]
        return super().training_step(batch, batch_idx)


@on_ranks(4)
def test_batches_of_another_form_are_tried_too(tmp_path: Path) -> None:
    """Also where those of the other group are of the same kind as before, and in the middle of an accumulation."""
    data = Texts("pair", 1)
    batches = [(data.tokens[:2], data.labels[:2])] * 3
    batches += [(*batches[0], data.tokens[:2]) if dist.get_rank() < 2 else batches[0]]
    module = seeded(partial(Third, HONEST["each"]))
    with refused("Look in training_step"):
        fit_batches(module, batches, tmp_path, accumulate_grad_batches=2)
    assert module.trainer.global_step == 1


@on_ranks(2)
def test_gradients_of_an_accumulation_survive_a_tried_step(tmp_path: Path) -> None:
    """A batch of another kind comes in the middle of an accumulation."""
    data, found = Texts("pair", 1), []
    pair = data.tokens[:2], data.labels[:2]
    for second in (pair, (*pair, data.tokens[:2])):
        for stage in (1, 3):
            module = seeded(Own)
            module.training_step = lambda batch, _, m=module: Own.training_step(m, batch[:2], 0)
            fit_batches(module, [pair, second], tmp_path, stage, accumulate_grad_batches=2)
            with lightning_zero.gather(module):
                found.append({name: value.clone() for name, value in module.state_dict().items()})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-7)


class Evaluates(Own):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        nats = self.nats(batch)
        if self.form == "by hand":
            self.log("val", nats[batch[1] != -100].mean(), sync_dist=True)
        self.log("all", nats.sum(), reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        return logits.mean(1) if self.form == "features" else logits


@on_ranks(2)
def test_evaluations_whose_parts_give_other_values_are_refused(tmp_path: Path) -> None:
    data = Texts("pair", 1, ignored=True)
    of = trainer(ZeroStrategy(3, sequence_parallel=2), tmp_path)
    fine, by_hand, features = (seeded(partial(Evaluates, form)) for form in ("fine", "by hand", "features"))
    of.validate(fine, loader(data, of), verbose=False)
    assert len(of.predict(fine, loader(data, of))) == STEPS
    with refused(r"Look in validation_step|val, which is logged, is"):
        of.validate(by_hand, loader(data, of), verbose=False)
    with refused(r"a returned tensor \(2, 13\) equals"):
        of.predict(features, loader(data, of))


class Prompted(Own):
    """Texts that are longer than what is tried, with labels at their end only, that its own method cuts; and a mask
    that each part has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(256, 16)

    def split_sequence(self, batch: Any, part: Any) -> Any:
        tokens, labels, mask = batch
        return part.of(tokens), part.of(labels), part.keep(mask, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mask = batch[2][:, None, None]
        return super().training_step(batch, batch_idx)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        q = x.view(*x.shape[:2], 4, 4).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, q, q, self.mask).transpose(1, 2).reshape(x.shape)


@on_ranks(2)
def test_short_piece_with_labels_is_tried(tmp_path: Path) -> None:
    tokens = torch.randint(1, 13, (2, 256), generator=torch.Generator().manual_seed(1))
    labels = torch.where(torch.arange(256) < 250, -100, tokens)
    module, lengths = seeded(Prompted), list[int]()
    module.embed.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    fit_batches(module, [(tokens, labels, tokens > 2)], tmp_path)
    assert lengths == [64, 32, 64, 32, 64, 32, 128]


@on_ranks(2)
def test_masks_and_heads_that_attention_cannot_divide_are_refused(tmp_path: Path) -> None:
    def cross(x: Tensor, *_: Any) -> Tensor:
        image = torch.zeros(len(x), 1, 1, 16)
        return F.scaled_dot_product_attention(x[:, None], image, image)[:, 0]

    def masked(x: Tensor, *_: Any) -> Tensor:
        heads = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        return F.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).flatten(2)

    cases: list[tuple[Change, str]] = [
        (masked, "is_causal=True"),
        (cross, "self-attention"),
        (lambda x, *_: F.scaled_dot_product_attention(*[x[:, None]] * 3)[:, 0], "divides the 1 heads"),
        (lambda x, *_: F.scaled_dot_product_attention(x, x, x), r"\[batch, heads, positions, width\]"),
    ]
    for change, words in cases:
        with refused(words):
            fit_changed(change, tmp_path, 1)
    fit_pairs(seeded(Own), tmp_path, 1)  # and goes on after it


@pytest.mark.sample
@on_ranks(2)
def test_batches_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    odd, even = (torch.zeros(2, length, dtype=torch.int64) for length in (7, 8))
    floats, labels = torch.zeros(2, 8, 3), torch.zeros(2, dtype=torch.int64)
    cases: list[tuple[Any, str]] = [
        (odd, "a multiple of 2, got 7"),
        (floats, "split_sequence"),
        ([floats, labels], r"list\(a tensor \(2, 8, 3\)"),
        ({"x": odd}, "input_ids"),
        ({"input_ids": even, "cu_seqlens": labels}, "packed texts"),
    ]
    for batch, words in cases:
        module = seeded(Own)
        module.training_step = lambda *_: pytest.fail("the batch is refused before")
        with refused(words):
            fit_batches(module, [batch], tmp_path, 1)


@on_ranks(2)
def test_transformers_without_positions_or_with_packed_texts_are_refused(tmp_path: Path) -> None:
    from tests.trainer.test_long_sequences_models import Model

    tokens = Texts("pair", 1).tokens[:2]
    packed, both = torch.arange(LENGTH).remainder(3).expand(2, -1), {"input_ids": tokens, "labels": tokens}
    for batch, words in (
        (tokens, r"positions that begin at 0 in each part"),
        (both, "attn_implementation='sdpa'"),
        ({**both, "position_ids": packed}, "packed texts"),
        ({**both, "num_items_in_batch": 3}, "mean over the tokens of all parts"),
    ):
        module = seeded(partial(Model, attn_implementation="eager" if "sdpa" in words else "sdpa"))
        if isinstance(batch, Tensor):
            module.training_step = lambda b, _, m=module: m.model(b, labels=b, use_cache=False).loss
        else:
            module.training_step = lambda b, _, m=module: m.model(**b, use_cache=False).loss
        with refused(words):
            fit_batches(module, [batch], tmp_path, 1)


@on_ranks(2)
def test_compiled_blocks_are_refused(tmp_path: Path) -> None:
    module = seeded(Own)
    module.blocks[1].compile(backend="eager")
    with refused(r"Do not call torch\.compile"):
        fit_pairs(module, tmp_path, 1)


@on_ranks(2, 4)
def test_ranks_of_a_group_with_other_batches_are_refused(tmp_path: Path) -> None:
    data = Texts("pair", 2)
    sampler = DistributedSampler(data, shuffle=False)  # of all ranks, each its own
    of = trainer(ZeroStrategy(3, sequence_parallel=2), tmp_path, max_epochs=1)
    with refused(r"distributed_sampler_kwargs"):
        of.fit(seeded(Own), DataLoader(data, batch_size=2, sampler=sampler))
    again = trainer(ZeroStrategy(3, sequence_parallel=2), tmp_path, max_epochs=1)
    again.fit(seeded(Own), loader(data, again))
    assert dist.get_world_size() // 2 == again.distributed_sampler_kwargs["num_replicas"]


def test_ranks_that_do_not_divide_are_refused_before_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accelerator": "cpu", "logger": False, "default_root_dir": str(tmp_path)}
    with refused(r"divides the 4 rank\(s\) of the run \(1, 2, 4\), got 3"):
        pl.Trainer(strategy=ZeroStrategy(3, sequence_parallel=3), devices=4, **settings)


class Breaks(Own):
    """Rank 1 raises in the middle of its second step, before its second attention."""

    broken = True

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.broken and block is self.blocks[1] and self.trainer.global_step == 1 and dist.get_rank() == 1:
            raise ValueError("a bad sample")
        return super().call(block, x)


@on_ranks(2)
def test_rank_that_raises_ends_the_wait_of_its_group(tmp_path: Path) -> None:
    module = seeded(Breaks)
    error, words = (ValueError, "a bad sample") if dist.get_rank() else (StallError, "exchange of heads")
    with places_posted_often(), pytest.raises(error, match=words):
        fit_pairs(module, tmp_path, zero={"stall_timeout_s": 4.0})
    module.broken = False
    # Other settings: the module is whole in between, by messages that the ranks have issued equally many of.
    assert len(fit_pairs(module, tmp_path).losses) == STEPS
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert not hasattr(F.cross_entropy, "__wrapped__") and torch.backends.mha.get_fastpath_enabled()
