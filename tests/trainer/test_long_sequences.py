"""``zero.sequence_parallel`` through the Trainer: losses and gradients of one process that has whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as by_name
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lightning_zero
from lightning_zero import ZeroMonitor, ZeroStrategy
from lightning_zero.comm.sequence import OnPaper
from lightning_zero.models.gpt import LitGPT
from lightning_zero.sequence.part import SequencePart
from lightning_zero.sequence.step import computing
from lightning_zero.settings import ConfigError, Precision, make_config
from lightning_zero.trainer.memory.activations import LiveBytes, measure
from tests.harness import on_ranks
from tests.models import checkpointed
from tests.trainer.toys import seeded, trainer

pytestmark = pytest.mark.full

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
        attention = lightning_zero.attention if self.heads == self.keys else F.scaled_dot_product_attention
        y = attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.keys)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Own(pl.LightningModule):
    """A language model of the user's own; ``heads`` and ``keys`` of attention. ``call(block, x)`` calls a block."""

    def __init__(self, heads: int = 4, keys: int = 4, call: Callable[[nn.Module, Tensor], Tensor] | None = None):
        super().__init__()
        if call is not None:
            self.call = call  # type: ignore[method-assign]
        self.embed, self.position = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.blocks = nn.ModuleList(Attention(16, heads, keys) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def embedded(self, tokens: Tensor) -> Tensor:
        positions = lightning_zero.sequence_positions(tokens.shape[1], tokens.device)
        return self.embed(tokens) + self.position(positions)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = self.call(block, x)
        return x

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))

    def nats(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none").view_as(batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def gpt(*, block_size: int = LENGTH, n_layer: int = 2, position: str = "rotary") -> LitGPT:
    settings: dict[str, Any] = {"block_size": block_size, "n_layer": n_layer, "position": position}
    module = LitGPT(vocab_size=VOCABULARY, n_head=4, d_model=16, **settings)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=LR)
    return module


class Record(pl.Callback):
    """Losses of steps, and the gradient of the first step, whole."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.gradients:
            with lightning_zero.gather(pl_module, grads=True):
                self.gradients = {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}


def loader(data: Dataset[Any], of: pl.Trainer) -> DataLoader[Any]:
    sampler = DistributedSampler(data, shuffle=False, **of.distributed_sampler_kwargs)
    return DataLoader(data, batch_size=2, sampler=sampler)


def fit(module: pl.LightningModule, data: Texts, root: Path, size: int, stage: int = 3, **settings: Any) -> Record:
    record = Record()
    strategy = ZeroStrategy(stage, sequence_parallel=size, **settings.pop("zero", {}))
    path, callbacks = settings.pop("ckpt_path", None), [record, *settings.pop("callbacks", ())]
    of = trainer(strategy, root, **{"max_epochs": 1, "callbacks": callbacks, **settings})
    of.fit(module, loader(data, of), ckpt_path=path)
    return record


def loss_of_step(module: Any, batch: Any) -> Tensor:
    return module.training_step(batch, 0)


def one_process(
    module: pl.LightningModule,
    data: Texts,
    groups: int,
    loss: Callable[[Any, Any], Tensor] = loss_of_step,
    accumulate: int = 1,
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses of each group, by steps, and the first gradient: of plain training, with whole sequences."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    losses: list[list[float]] = [[] for _ in range(groups)]
    gradients: dict[str, Tensor] = {}
    samplers = [DistributedSampler(data, groups, group, shuffle=False) for group in range(groups)]
    for step, batches in enumerate(zip(*(DataLoader(data, 2, sampler=s) for s in samplers), strict=True)):
        for group, batch in enumerate(batches):
            found = loss(module, batch)
            (found / groups / accumulate).backward()
            losses[group].append(found.item())
        if (step + 1) % accumulate == 0:
            gradients = gradients or {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
    return losses, gradients


def assert_parity(
    make: Callable[[], pl.LightningModule],
    form: str,
    root: Path,
    size: int,
    stage: int = 3,
    ignored: bool = False,
    accumulate: int = 1,
    loss: Callable[[Any, Any], Tensor] = loss_of_step,
    **settings: Any,
) -> Record:
    """Losses and gradients are those of one process; the trained weights too, since later losses are."""
    groups = dist.get_world_size() // size
    data = Texts(form, groups, ignored)
    losses, gradients = one_process(seeded(make), data, groups, loss, accumulate)
    found = fit(seeded(make), data, root, size, stage, accumulate_grad_batches=accumulate, **settings)
    expected = losses[dist.get_rank() // size]
    torch.testing.assert_close(found.losses, [x / accumulate for x in expected], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.gradients, gradients, rtol=1e-5, atol=1e-6)
    return found


def loss_of_next(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.sample
@on_ranks(2, full=(4,))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_own_attention_equals_one_process(stage: int, tmp_path: Path) -> None:
    for heads, keys in ((4, 4), (4, 2), (4, 1)):
        for size in {2, dist.get_world_size()} if heads == keys else {dist.get_world_size()}:
            assert_parity(partial(Own, heads, keys), "pair", tmp_path, size, stage, ignored=heads == keys)


@on_ranks(2)
@pytest.mark.parametrize("position, recompute", [("learned", "none"), ("rotary", "blocks"), ("rotary", "offload")])
def test_the_default_model_equals_one_process(position: str, recompute: str, tmp_path: Path) -> None:
    zero = {"activation_checkpointing": recompute}
    assert_parity(partial(gpt, position=position), "next", tmp_path, 2, 1, loss=loss_of_next, zero=zero)


class Encoder(Own):
    """Attention inside of ``nn.MultiheadAttention``, and norms."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList([nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)])


@on_ranks(2, full=(4,))
def test_layers_of_torch_and_blocks_that_are_recomputed_equal_one_process(tmp_path: Path) -> None:
    for make in (Encoder, *[partial(Own, call=checkpointed(reentrant)) for reentrant in (True, False)]):
        assert_parity(make, "pair", tmp_path, 2, 1)


class Most(pl.Callback):
    """The most bytes that a step makes beside what is there."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.live = LiveBytes()
        self.live.__enter__()

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.live is not None:
            self.most = self.live.most
            self.live.__exit__(None, None, None)
            self.live = None


@on_ranks(2)
def test_activations_are_divided_as_planned(tmp_path: Path) -> None:
    """Measured in a run: at most a half and a tenth of what one rank needs for the whole sequence; and planned so."""
    most, planned = {}, {}
    tokens = torch.zeros(2, 257, dtype=torch.int64)
    for size in (1, 2):
        make, callback = partial(gpt, block_size=256, n_layer=3), Most()
        of = trainer(ZeroStrategy(0, sequence_parallel=size), tmp_path, max_epochs=1, callbacks=[callback])
        of.fit(seeded(make), DataLoader([tokens] * 2, batch_size=None))
        most[size] = callback.most
        found = measure(make(), tokens, make_config(sequence_parallel=size), Precision.fp32)
        planned[size] = found.peak(backward=False)
        assert (found.exchanged > 0) == (size > 1)
    assert most[2] <= most[1] * (1 / 2 + 1 / 10)
    assert planned[2] <= planned[1] * (1 / 2 + 1 / 10)
    assert most[2] == pytest.approx(planned[2], rel=0.1)


class Drops(Own):
    """Draws in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(F.dropout(torch.ones(64)))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.drawn.append(torch.rand(4))


@on_ranks(4)
def test_dropout_of_parts_is_independent_and_all_else_is_the_same(tmp_path: Path) -> None:
    module = seeded(Drops)
    fit(module, Texts("pair", 2), tmp_path, 2, 1)
    table: list[Any] = [None] * 4
    dist.all_gather_object(table, [tuple(drawn.tolist()) for drawn in module.drawn])
    assert len({step for drawn in table[:2] for step in drawn[::2]}) == 2 * STEPS  # other ones on each rank and step
    assert all(drawn[1::2] == table[0][1::2] for drawn in table)


@on_ranks(2)
def test_resumed_run_draws_the_same_dropout(tmp_path: Path) -> None:
    data, kept = Texts("pair", 1), ModelCheckpoint(tmp_path, every_n_train_steps=STEPS, save_top_k=-1)
    make = partial(Own, call=lambda block, x: block(F.dropout(x, 0.3, block.training)))
    straight = fit(seeded(make), data, tmp_path, 2, 1, max_epochs=2, callbacks=[kept], enable_checkpointing=True)
    first = min(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    torch.manual_seed(1)
    again = fit(seeded(make), data, tmp_path, 2, 1, max_epochs=2, ckpt_path=first)
    assert len(again.losses) == STEPS and again.losses == straight.losses[STEPS:]


class Evaluated(Encoder):
    """Values of an evaluation, by the helper and by ``sync_dist``.

    torch has kernels for its own layers in evaluation, which attention would be hidden in.
    """

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.nats(batch).mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return lightning_zero.mean_over_tokens(self.nats(batch), dim=1)


@on_ranks(2, full=(4,))
def test_evaluations_and_predictions_equal_one_process(tmp_path: Path) -> None:
    group, groups = dist.get_rank() // 2, dist.get_world_size() // 2
    data = Texts("pair", groups)
    with torch.no_grad():
        expected = seeded(Evaluated).eval().nats((data.tokens, data.labels))
    of, module = trainer(ZeroStrategy(3, sequence_parallel=2), tmp_path), seeded(Evaluated)
    (found,) = of.validate(module, loader(data, of), verbose=False)
    assert found["val"] == pytest.approx(expected.mean().item(), rel=1e-6)
    predictions = of.predict(module, loader(data, of))
    torch.testing.assert_close(torch.cat(predictions), expected.mean(1)[group::groups], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_tokens_of_a_group_are_counted_once(tmp_path: Path) -> None:
    seen: dict[int, Any] = {}
    tokens = torch.zeros(2, LENGTH + 1, dtype=torch.int64)
    for size in (1, 2):
        monitor = ZeroMonitor(1)
        of = trainer(ZeroStrategy(1, sequence_parallel=size), tmp_path, max_epochs=1, callbacks=[monitor])
        of.fit(seeded(gpt), loader(Texts("next", 1), of))
        sums, replicas = monitor._sums, of.distributed_sampler_kwargs["num_replicas"]
        seen[size] = sums["tokens"] * replicas / sums["batches"], sums["flops"] / sums["batches"]
        plan = measure(gpt(), tokens, make_config(sequence_parallel=size), Precision.fp32)
        assert of.callback_metrics.get("zero/moved_bytes/sequence", 0) == plan.exchanged
        assert (plan.exchanged > 0) == (size > 1)
    assert seen[1][0] == 2 * seen[2][0] == 2 * 2 * (LENGTH + 1)  # two batches at once, or one
    assert seen[1][1] == pytest.approx(2 * seen[2][1], rel=1e-6)  # each rank computes a half


# -- losses: each token counts once, wherever those lie that do not count ---------------------------------------------

IGNORED = 4  # a token


class Loss(Own):
    """A loss of one form, of labels of which nearly all that do not count are in one part."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def split_sequence(self, batch: Any, part: Any) -> Any:
        return [*(part.of(tensor) for tensor in batch), batch[0][:, 0]]  # and what a text is labelled with

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels, *of_texts = batch
        if self.form == "texts":
            features = lightning_zero.mean_over_tokens(self.hidden(tokens), tokens[..., None] > 3, dim=1)
            return F.cross_entropy(self.head(features), of_texts[0] if of_texts else tokens[:, 0])
        if self.form == "chunked":
            return lightning_zero.chunked_loss(self.head, None, self.hidden(tokens), labels, chunks=2)
        logits = self(tokens)
        flat = logits.flatten(0, 1)
        if self.form == "index":
            return F.cross_entropy(flat, torch.where(labels < 0, IGNORED, labels).flatten(), ignore_index=IGNORED)
        if self.form == "weight":
            return F.cross_entropy(flat, labels.flatten(), torch.arange(1.0, VOCABULARY + 1), label_smoothing=0.1)
        if self.form == "nll":
            return F.nll_loss(flat.log_softmax(-1), labels.flatten())
        if self.form == "two":  # which count other tokens, and one that is a mean over as many values in each part
            other = torch.where(tokens > 6, labels, -100).flatten()
            return F.cross_entropy(flat, labels.flatten()) + F.cross_entropy(flat, other) + 0.1 * flat.square().mean()
        if self.form == "beside":  # a mean that is logged says nothing of the loss
            self.accuracy = lightning_zero.mean_over_tokens((logits.argmax(-1) == labels).float(), labels != -100)
            return F.cross_entropy(flat, labels.flatten())
        if self.form == "values":
            return lightning_zero.mean_over_tokens(F.mse_loss(logits, torch.zeros_like(logits), reduction="none"))
        if self.form == "mse":
            return F.mse_loss(logits, torch.zeros_like(logits))
        if self.form == "by name":
            return by_name(flat, labels.flatten())
        return F.cross_entropy(flat, labels.flatten(), reduction="none" if self.form == "each" else "sum").sum()


FORMS = ("index", "weight", "nll", "two", "beside", "values", "chunked", "texts")


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("form", FORMS)
def test_losses_count_each_token_once(form: str, tmp_path: Path) -> None:
    assert_parity(lambda: Loss(form), "pair", tmp_path, 2, 1, ignored=True)


class Beside(Own):
    """A loss by hand beside a mean that is only logged; or one that looks so, beside a mean that it counts."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        flat = self(tokens).flatten(0, 1)
        self.logged = F.cross_entropy(flat, labels.flatten()) + F.mse_loss(flat, flat.detach() + 1)
        if self.form == "feature":
            flat = flat + lightning_zero.mean_over_tokens(self(tokens), dim=1).mean()
        nats = -flat.log_softmax(-1).gather(-1, labels.clamp(min=0).view(-1, 1))[:, 0]
        if self.form == "mean":
            return lightning_zero.mean_over_tokens(nats, labels.flatten() != -100)
        return nats[labels.flatten() != -100].mean()


@on_ranks(2)
def test_losses_that_are_no_means_are_refused_and_a_mean_beside_others_is_not(tmp_path: Path) -> None:
    assert_parity(lambda: Beside("mean"), "pair", tmp_path, 2, 1, ignored=True)
    no_means = [(Loss, form) for form in ("sum", "each", "mse", "by name")]
    no_means += [(Beside, form) for form in ("by hand", "feature")]  # whose first batch has as many labels in each part
    for kind, form in no_means:
        with pytest.raises(ConfigError, match="mean over the tokens of all parts"):
            fit(seeded(lambda k=kind, f=form: k(f)), Texts("pair", 1), tmp_path, 2, 1)


class Leaves(Own):
    """A loss on the ranks only whose part has labels."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step and dist.get_rank() == 0:
            return 0 * self(batch[0]).sum()
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_losses_that_some_ranks_leave_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Call them on all ranks"):
        fit(seeded(Leaves), Texts("pair", 1), tmp_path, 2, 1)


class TwoSteps(Own):
    """Two optimizer steps for each batch, by hand, of other tokens each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        optimizer: Any = self.optimizers()
        for wanted in (labels, torch.where(tokens > 5, labels, -100)):
            loss = super().training_step((tokens, wanted), batch_idx)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss}


@on_ranks(2)
def test_each_loss_of_manual_optimization_counts_its_tokens(tmp_path: Path) -> None:
    data, expected, losses = Texts("pair", 1, ignored=True), seeded(TwoSteps), []
    optimizer = expected.configure_optimizers()
    expected.optimizers, expected.manual_backward = lambda: optimizer, lambda loss: loss.backward()
    for batch in DataLoader(data, batch_size=2):
        losses.append(expected.training_step(batch, 0)["loss"].item())
    found = seeded(TwoSteps)
    assert fit(found, data, tmp_path, 2, 3).losses == pytest.approx(losses, rel=1e-5)
    with lightning_zero.gather(found):
        torch.testing.assert_close(dict(found.state_dict()), dict(expected.state_dict()), rtol=1e-5, atol=1e-6)


class Logs(Own):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("alone", loss)
        self.log("together", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append(tuple(self.trainer.callback_metrics[name].item() for name in ("alone", "together")))


@on_ranks(2)
def test_logged_loss_is_that_of_whole_texts(tmp_path: Path) -> None:
    """Also on a rank whose part has no labels, where a mean of its own would be NaN."""
    data, module = Texts("pair", 1, ignored=True), seeded(Logs)
    expected, _ = one_process(seeded(Own), data, 1)
    fit(module, data, tmp_path, 2, 1)
    assert module.found == [(pytest.approx(loss, rel=1e-6),) * 2 for loss in expected[0]]


def test_losses_in_half_precision_keep_what_torch_computes() -> None:
    """Sums over many tokens are beyond its largest number."""
    logits = torch.zeros(3000, 3, dtype=torch.half).index_fill_(1, torch.tensor(0), 20.5).requires_grad_()
    args = logits, torch.ones(3000, dtype=torch.int64)
    part, expected = SequencePart(OnPaper(2)), F.cross_entropy(*args)
    with computing(part):
        found = F.cross_entropy(*args)
    assert torch.equal(found, expected) and found.dtype is torch.half
    assert part.loss(found) is found and part.loss(found + 0) == found
    values = torch.full((2, 5000), 20.5, dtype=torch.half)
    assert lightning_zero.mean_over_tokens(values, values > 0) == 20.5
