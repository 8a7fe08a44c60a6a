"""Manual optimization: the user calls backward and step, with one optimizer or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import lightning_zero
from lightning_zero import ZeroStrategy
from tests.harness import on_ranks
from tests.trainer.toys import STAGES, Block, Lit, Run, assert_same, fit, record, seeded, trainer, whole_loader

pytestmark = pytest.mark.full


class Manual(Lit):
    """Accumulates two batches by hand, clips, and steps optimizer and scheduler itself."""

    def __init__(self, block_sync: bool = False) -> None:
        super().__init__(scheduler="epoch")
        self.automatic_optimization = False
        self.block_sync = block_sync

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        last = batch_idx % 2 == 1
        if self.block_sync:
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(loss / 2)
        else:
            self.manual_backward(loss / 2)
        if last:
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss)

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()


@on_ranks(2)
@pytest.mark.parametrize("block_sync", [False, True], ids=["reduced each time", "sync_grad"])
def test_manual_accumulation(block_sync: bool, tmp_path: Path) -> None:
    def body(strategy: str) -> Run:
        return fit(strategy, tmp_path, seeded(lambda: Manual(block_sync)))

    expected = body("ddp")
    for stage in STAGES:
        assert_same(body(stage), expected, what=stage)


class Skipping(Manual):
    """Has no backward for some batches, among them the one between two of a window."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if batch_idx % 3 != 1:
            last = batch_idx % 3 == 2
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(loss)
            if last:
                optimizer.step()
                optimizer.zero_grad()


@on_ranks(2)
def test_a_step_without_a_backward_inside_an_accumulation_window(tmp_path: Path) -> None:
    expected = fit("ddp", tmp_path, seeded(Skipping))
    for stage in STAGES:
        assert_same(fit(stage, tmp_path, seeded(Skipping)), expected, what=stage)


class TwoBackwards(Lit):
    """Two losses of one forward and one of another, one step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        out = self(batch[0])
        loss = (out - batch[1]).pow(2).mean()
        self.losses.append(loss.item())
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(out.abs().mean() * 0.1)
        self.manual_backward(self.loss(batch) * 0.5)
        optimizer.step()


@on_ranks(2)
def test_several_backwards_before_a_step(tmp_path: Path) -> None:
    def body(strategy: Any) -> Run:
        return fit(strategy, tmp_path, seeded(TwoBackwards))

    expected = body("ddp")
    for stage in ("zero1", "zero3"):
        assert_same(body(stage), expected, what=stage)


class Gan(Lit):
    """Generator and discriminator, each with its optimizer and scheduler, toggled as Lightning's own example does."""

    def __init__(self, sync_grad: bool = True, momentum: float = 0.9) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.sync_grad, self.momentum = sync_grad, momentum
        del self.first, self.blocks, self.head
        self.generator = nn.Sequential(nn.Linear(4, 8), Block(8), Block(8), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), Block(8), Block(8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.generator(x)
        return out

    def _judge(self, x: Tensor, real: float) -> Tensor:
        score = self.discriminator(x)
        return nn.functional.binary_cross_entropy_with_logits(score, torch.full_like(score, real))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        for_generator, for_discriminator = self.optimizers()
        steps = self.sync_grad or batch_idx % 2 == 1
        with self._toggled(for_generator, steps):
            assert not any(p.requires_grad for p in self.discriminator.parameters())
            self._backward_and_step(self._judge(self(x), 1.0), for_generator, steps)
        with self._toggled(for_discriminator, steps):
            loss = self._judge(x, 1.0) + self._judge(self(x).detach(), 0.0)
            self._backward_and_step(loss, for_discriminator, steps)

    @contextmanager
    def _toggled(self, optimizer: Any, steps: bool) -> Iterator[None]:
        """Both ways that Lightning offers."""
        if self.sync_grad:
            self.toggle_optimizer(optimizer)
            yield
            self.untoggle_optimizer(optimizer)
        else:
            with optimizer.toggle_model(sync_grad=steps):
                yield

    def _backward_and_step(self, loss: Tensor, optimizer: Any, steps: bool) -> None:
        self.losses.append(loss.item())
        self.manual_backward(loss)
        if steps:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._judge(self(batch[0]), 1.0), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.SGD(part.parameters(), lr=0.05, momentum=self.momentum)
            for part in (self.generator, self.discriminator)
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("sync_grad", [True, False], ids=["each step", "accumulated"])
def test_gan(sync_grad: bool, tmp_path: Path) -> None:
    def body(strategy: Any) -> Run:
        return fit(strategy, tmp_path, seeded(lambda: Gan(sync_grad)))

    expected = body(DDPStrategy(find_unused_parameters=True))
    for stage in STAGES:
        assert_same(body(stage), expected, what=stage)


@on_ranks(2)
def test_gan_resumes_with_both_optimizers(tmp_path: Path) -> None:
    whole = fit("zero3", tmp_path, seeded(Gan), max_epochs=3)
    fit("zero3", tmp_path, seeded(Gan), max_epochs=2).trainer.save_checkpoint(tmp_path / "gan.ckpt")
    rest = fit("zero2", tmp_path, seeded(Gan, seed=8), max_epochs=3, ckpt_path=tmp_path / "gan.ckpt")
    rest.losses = whole.losses[: -len(rest.losses)] + rest.losses
    assert_same(rest, whole)


class GradientPenalty(Lit):
    """A gradient with respect to the input inside the loss (create_graph)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = (out - batch[1]).pow(2).mean() + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()
        self.losses.append(loss.item())
        return loss


@on_ranks(2)
def test_gradient_penalty(tmp_path: Path) -> None:
    """The oracle is one process on all samples: DDP does not support autograd.grad inside its forward."""
    module = seeded(GradientPenalty)
    alone = trainer("auto", tmp_path)
    alone.fit(module, whole_loader(4))
    expected = record(alone, module)
    for stage in ("zero1", "zero3"):
        found = fit(stage, tmp_path, seeded(GradientPenalty), limit_val_batches=0)
        for name, value in expected.weights.items():
            torch.testing.assert_close(found.weights[name], value, rtol=1e-4, atol=1e-5, msg=f"{stage} {name}")


class ClosureByHand(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@on_ranks(2)
def test_step_with_a_closure(tmp_path: Path) -> None:
    expected = fit("ddp", tmp_path, seeded(ClosureByHand))
    for stage in ("zero1", "zero3"):
        assert_same(fit(stage, tmp_path, seeded(ClosureByHand)), expected, what=stage)


class TorchClips(Manual):
    """As torch's documentation has it, and by value every other step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        if batch_idx % 2:
            self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.1, error_if_nonfinite=True))
        else:
            nn.utils.clip_grad_value_(self.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.sample
@on_ranks(2)
def test_torchs_clipping(tmp_path: Path) -> None:
    expected = fit("ddp", tmp_path, seeded(TorchClips))
    for stage, row in ((1, "none"), (3, "none"), (3, "cpu")):
        run = fit(ZeroStrategy(stage, offload=row), tmp_path, seeded(TorchClips))
        assert_same(run, expected, what=f"{stage}, {row}")


class NormOfParts(Manual):
    """Norms of one optimizer's parameters, of one parameter and of the whole."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        parts = {"all": list(self.parameters()), "block": list(self.blocks[0].parameters()), "one": [self.head.weight]}
        for name, params in parts.items():
            if isinstance(self.trainer.strategy, ZeroStrategy):
                norm = lightning_zero.grad_norm(params)
            else:
                norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
            self.log(name, norm)
        self.optimizers().step()
        self.optimizers().zero_grad()

    def on_train_epoch_end(self) -> None:
        pass


@on_ranks(2)
def test_norms_of_parts(tmp_path: Path) -> None:
    expected = fit("ddp", tmp_path, seeded(NormOfParts))
    for stage in STAGES:
        assert_same(fit(stage, tmp_path, seeded(NormOfParts)), expected, what=stage)


class SharedParameter(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        for optimizer in self.optimizers():
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.AdamW(self.head.parameters(), lr=0.01)]


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_in_two_optimizers(stage: str, tmp_path: Path) -> None:
    expected = fit("ddp", tmp_path, seeded(SharedParameter))
    assert_same(fit(stage, tmp_path, seeded(SharedParameter)), expected)
