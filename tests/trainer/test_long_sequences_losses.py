"""Losses under ``zero.sequence_parallel``: each token counts once, wherever those lie that do not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import cross_entropy as by_name
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero.comm.sequence import OnPaper
from lightning_zero.sequence.part import SequencePart
from lightning_zero.sequence.step import computing
from lightning_zero.settings import ConfigError
from tests.harness import on_ranks
from tests.trainer.test_long_sequences import VOCABULARY, Own, Texts, assert_parity, fit, one_process
from tests.trainer.toys import seeded

pytestmark = pytest.mark.full

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
