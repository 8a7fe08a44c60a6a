"""``zero.loss=tokens``: a step's gradients are of the mean over all its tokens, as of one batch in one process."""

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
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import ZeroMonitor
from lightning_zero.settings import ConfigError
from lightning_zero.trainer.precision import ZeroPrecision
from tests.harness import on_ranks
from tests.models import Model
from tests.trainer.toys import Block, seeded, strategy_of, trainer, weights

STEPS, TEXTS, LENGTH, VOCABULARY = 3, 24, 8, 11
CLIP, LR = 0.3, 0.5
CLASS_WEIGHTS = torch.linspace(0.2, 2.0, VOCABULARY)
SOME_CLASSES = (torch.arange(VOCABULARY) > 7).float()


def texts(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels ``[24, 8]`` of a step. Labels behind a text's end are -100; one text in six has none."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (TEXTS, LENGTH + 1), generator=draw)
    lengths = torch.randint(1, LENGTH + 1, (TEXTS,), generator=draw)
    lengths[::6] = 0
    labels = torch.where(torch.arange(LENGTH) < lengths[:, None], tokens[:, 1:], -100)
    return tokens[:, :-1], labels


def micro_batches(micro: int, ranks: int | None = None) -> DataLoader[Any]:
    """This rank's micro-batches of all steps, in order: of one text, so that some have no labels, or of several."""
    ranks = ranks or dist.get_world_size()
    size = TEXTS // (ranks * micro)
    first = dist.get_rank() * ranks // dist.get_world_size() * micro * size
    places = range(first, first + micro * size, size)
    data = [[part[at : at + size] for part in texts(step)] for step in range(STEPS) for at in places]
    return DataLoader(data, batch_size=None)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1)(logits.flatten(0, 1), labels.flatten())


def of_some_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), SOME_CLASSES)


def own_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return lightning_zero.mean_over_tokens((logits.logsumexp(-1) - 1).square(), labels >= 0)


def with_a_second_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels) + 0.1 * own_mean(logits, labels)


class Reader(pl.LightningModule):
    """A model of tokens; ``loss`` makes a loss of logits and labels."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any] = cross_entropy) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)
        self.loss = loss

    forward = Model.forward

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LR, momentum=0.9)


def counted(logits: Tensor, labels: Tensor) -> Any:
    """By the step itself; the mean over none is 0."""
    losses = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    count = (labels >= 0).sum()
    return {"loss": -(losses * (labels >= 0)).sum() / count.clamp(min=1), "tokens": count}


class ByHand(Reader):
    """Manual optimization, with clipping by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        if batch_idx % 2 == 0:  # thrown away, with its tokens
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            lightning_zero.divide_by_tokens(self, optimizer)
            nn.utils.clip_grad_norm_(self.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


class Steps(ByHand):
    """Two optimizers, one of them the head's; ``act(module, loss, optimizers)`` is done for each batch."""

    def __init__(self, act: Callable[[Any, Tensor, list[Any]], Any]) -> None:
        super().__init__()
        self.act = act

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.act(self, Reader.training_step(self, batch, batch_idx), self.optimizers())

    def configure_optimizers(self) -> Any:
        body = [*self.embed.parameters(), *self.blocks.parameters()]
        return [torch.optim.SGD(params, LR) for params in (body, self.head.parameters())]


def step(
    module: Any,
    loss: Tensor,
    optimizers: list[Any],
    *,
    divided: slice | None = slice(2),
    plain: bool = False,
    clips: bool = False,
    clears: bool = True,
) -> None:
    """``divided``: the optimizers whose gradients are divided; ``plain``: ``loss.backward()`` is called."""
    loss.backward() if plain else module.manual_backward(loss)
    if divided is not None:
        lightning_zero.divide_by_tokens(module, *optimizers[divided])
    if clips:
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
    for optimizer in optimizers:
        optimizer.step()
        if clears:
            optimizer.zero_grad()


def cleared_in_place(module: Any, loss: Tensor, optimizers: list[Any]) -> None:
    module.manual_backward(loss)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)
    Reader.training_step(module, texts(0), 0).backward()
    lightning_zero.divide_by_tokens(module)


NOT_DIVIDED = r"call lightning_zero\.divide_by_tokens\(self, optimizer\) after the last"
NO_TOKENS = r"got gradients of loss\.backward\(\), .* Call self\.manual_backward"


@pytest.mark.parametrize(("act", "message"), [
    (partial(step, divided=None), NOT_DIVIDED),
    (partial(step, divided=None, clips=True), NOT_DIVIDED),
    (partial(step, divided=None, plain=True), NO_TOKENS),
    (partial(step, plain=True), NO_TOKENS),
    (partial(step, divided=slice(1)), r"got none for head\.weight, head\.bias\. Pass all .*divide_by_tokens"),
    (partial(step, clears=False), r"expected no gradients of an earlier step for embed\.weight, .* with zero_grad"),
    (cleared_in_place, r"or clear them with zero_grad\(set_to_none=True\)"),
])  # fmt: skip
@on_ranks(2)
def test_gradients_that_are_not_of_the_steps_tokens_are_refused(act: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=message):
        train("zero2", tmp_path, seeded(lambda: Steps(act)), 1)


@on_ranks(2)
def test_gradients_of_several_optimizers_are_divided_together(tmp_path: Path) -> None:
    for divided in (slice(2), slice(0)):
        train("zero2", tmp_path, seeded(lambda d=divided: Steps(partial(step, divided=d))), 1)


@on_ranks(2)
def test_weights_can_be_read_and_trained_on_while_gradients_are_sums(tmp_path: Path) -> None:
    """They are read between micro-batches, and the second of the first step fails."""

    class CutOff(Reader):
        fails = True

        def on_train_batch_end(self, *_: Any) -> None:
            with lightning_zero.gather(self):
                assert self.head.weight.isfinite().all()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.fails and batch_idx == 1:
                raise KeyError("planned")

    module = seeded(CutOff)
    with pytest.raises(KeyError):
        train("zero2", tmp_path, module)
    module.fails = False
    of = trainer("zero2", tmp_path, max_epochs=1, accumulate_grad_batches=2)
    of.fit(module, micro_batches(2))
    assert of.global_step == STEPS


@on_ranks(2)
def test_a_step_without_tokens_has_gradients_of_zero(tmp_path: Path) -> None:
    without_labels = lambda logits, labels: cross_entropy(logits, torch.full_like(labels, -100))  # noqa: E731
    found, loss = train("zero2", tmp_path, seeded(lambda: Reader(without_labels)))
    assert loss == 0
    torch.testing.assert_close(found, {name: param.detach() for name, param in seeded(Reader).named_parameters()})


def twin(module: Reader) -> tuple[dict[str, Tensor], float]:
    """One process with all texts of a step in one batch: weights, and the loss of the last step."""
    optimizer: Any = module.configure_optimizers()
    for step in range(STEPS):
        loss = Reader.training_step(module, texts(step), 0)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in module.named_parameters()}, float(loss)


def train(
    row: str | int, root: Path, module: Reader, micro: int = 2, ranks: int | None = None, **zero: Any
) -> tuple[dict[str, Tensor], float]:
    plugins, strategy = zero.pop("plugins", None), strategy_of(row, root, **{"loss": "tokens", **zero})
    settings: dict[str, Any] = {"callbacks": [ZeroMonitor(1)], "plugins": plugins, "max_epochs": 1}
    if module.automatic_optimization:
        settings |= {"accumulate_grad_batches": micro, "gradient_clip_val": CLIP}
    of = trainer(strategy, root, **settings)
    of.fit(module, micro_batches(micro, ranks))
    return weights(of), float(of.callback_metrics["zero/loss"])


def assert_twin(found: tuple[dict[str, Tensor], float], of: Reader | None = None, tol: float = 2e-6) -> None:
    torch.testing.assert_close(found, twin(of or seeded(Reader)), atol=tol, rtol=tol)


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("row", ["zero0", "zero1", "zero2", "zero3", "zero3 cpu", "zero2 optimizer_nvme"])
@on_ranks(2, 3)
def test_gradients_are_of_the_mean_over_all_tokens_of_a_step(row: str, micro: int, tmp_path: Path) -> None:
    assert_twin(train(row, tmp_path, seeded(Reader), micro))


@pytest.mark.parametrize(("loss", "mean"), [
    *[(loss, loss) for loss in (weighted, of_some_classes, own_mean, with_a_second_mean)],
    (counted, cross_entropy),
])  # fmt: skip
@on_ranks(2)
def test_losses_that_say_their_tokens_are_counted(loss: Any, mean: Any, tmp_path: Path) -> None:
    assert_twin(train("zero2", tmp_path, seeded(lambda: Reader(loss)), 12), seeded(lambda: Reader(mean)))


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_manual_optimization_divides_by_a_call(stage: str, tmp_path: Path) -> None:
    assert_twin(train(stage, tmp_path, seeded(ByHand)))


@pytest.mark.parametrize(("settings", "tolerance"), [
    ({"plugins": "16-mixed"}, 5e-3),
    ({"plugins": "bf16-mixed"}, 3e-2),
    ({"ranks": 1, "sequence_parallel": 2}, 2e-6),  # whose parts are counted once
])  # fmt: skip
@on_ranks(2)
def test_settings_of_a_step_keep_the_mean(settings: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    if precision := settings.get("plugins"):
        settings = {"plugins": ZeroPrecision(precision)}
    assert_twin(train("zero3", tmp_path, seeded(Reader), **settings), tol=tolerance)


UNKNOWN: list[tuple[str, Callable[[Tensor, Tensor], Any]]] = [
    ("one without a known number", lambda logits, labels: logits.square().mean()),
    ("one without a known number", lambda logits, labels: F.cross_entropy(logits[0], labels[0], size_average=False)),
    (
        r"means over \d+, \d+ tokens",
        lambda logits, labels: cross_entropy(logits, labels) + lightning_zero.mean_over_tokens(logits.mean(-1)),
    ),
    ("returns, got str", lambda logits, labels: {"loss": logits.mean(), "tokens": "3"}),
]


@on_ranks(1)
def test_losses_whose_tokens_are_not_known_are_refused(tmp_path: Path) -> None:
    for got, loss in UNKNOWN:
        with pytest.raises(ConfigError, match=rf"^loss='tokens': expected .*{got}"):
            train("zero2", tmp_path, seeded(lambda of=loss: Reader(of)))
