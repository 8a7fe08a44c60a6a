"""Hooks of LightningModule, and those of Callback beside them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader

from tests.lightning_table.bench import Bench, Notes, variant
from tests.lightning_table.table import heading
from tests.trainer.toys import Block, Lit, Samples, seeded

feature = heading("Hooks")

# Hooks of the module that are not in Lightning's classes of hooks.
MORE = {"backward", "configure_callbacks", "configure_gradient_clipping", "configure_optimizers", "forward"}
MORE |= {"lr_scheduler_step", "optimizer_step", "optimizer_zero_grad"}
MORE |= {"training_step", "validation_step", "test_step", "predict_step"}


def _noting(base: type, names: Any, calls: list[Any]) -> Any:
    """A class whose ``names`` are noted in ``calls`` before they do what they do."""

    def noted(name: str) -> Any:
        own = getattr(base, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return own(self, *args, **kwargs)

        hook.__signature__ = inspect.signature(own)
        return hook

    return type(base.__name__, (base,), {name: noted(name) for name in names})


def _hooks_of(*classes: type) -> set[str]:
    return {name for c in classes for name, _ in inspect.getmembers(c, inspect.isfunction) if name[0] != "_"}


class HasLoaders:
    def train_dataloader(self) -> Any:
        return DataLoader(Samples(4), batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


Loads, Data = (type(base.__name__, (HasLoaders, base), {}) for base in (Lit, LightningDataModule))


def _everything(bench: Bench, module: Any, data: Any = None, callbacks: Any = ()) -> None:
    """fit, validate, test, predict, save, and a fit from the file."""
    of = bench.trainer(callbacks=list(callbacks), gradient_clip_val=0.5, num_sanity_val_steps=1, max_epochs=1)
    of.fit(module, data)
    of.validate(module, data, verbose=False)
    of.test(module, data, verbose=False)
    of.predict(module, data)
    path = bench.root / "a.ckpt"
    of.save_checkpoint(path)
    bench.trainer(callbacks=list(callbacks), accumulate_grad_batches=2).fit(module, data, ckpt_path=path)


@feature("all hooks of LightningModule")
def module_hooks(bench: Bench) -> Any:
    """The order of all calls in fit, validate, test, predict, save and resume"""
    calls: list[str] = []
    names = _hooks_of(ModelHooks, DataHooks, CheckpointHooks) | MORE
    names -= {"configure_sharded_model"}  # deprecated; Lightning refuses it beside configure_model
    _everything(bench, seeded(lambda: _noting(Loads, names, calls)(scheduler="step")))
    left = names - set(calls) - {"prepare_data"}  # called on one rank of each node
    assert not left, left
    return calls


@feature("all hooks of Callback")
def callback_hooks(bench: Bench) -> Any:
    """The order of all calls in fit, validate, test, predict, save and resume"""
    calls: list[str] = []
    names = _hooks_of(Callback) - {"on_exception"}
    _everything(bench, seeded(Loads), callbacks=[_noting(Callback, names, calls)()])
    return calls


@feature("all hooks of LightningDataModule")
def data_hooks(bench: Bench) -> Any:
    """The order of all calls in fit, validate, test, predict, save and resume"""
    calls: list[str] = []
    names = _hooks_of(DataHooks) | {"state_dict", "load_state_dict"}
    _everything(bench, seeded(Lit), _noting(Data, names, calls)())
    return calls


@feature("on_exception")
def on_exception(bench: Bench) -> Any:
    """The calls of all hooks after an error on all ranks"""
    calls: list[str] = []
    callback = _noting(Callback, _hooks_of(Callback), calls)()
    error = bench.raised(lambda: bench.fit(seeded(variant(on_train_batch_end=lambda *_: 1 / 0)), callbacks=[callback]))
    assert "on_exception" in calls
    return error, calls


@feature("training_step returns None", ddp_raises="Skipping the `training_step` by returning None")
class Skips(Lit):
    """Lightning skips no step on several ranks"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


@feature("training_step returns a dict")
class Gives(Notes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "size": len(batch[0]), "out": self(batch[0])}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.noted.append({k: v.detach() if torch.is_tensor(v) else v for k, v in outputs.items()})


_ENDS = variant(on_train_batch_start=lambda m, batch, batch_idx: -1 if batch_idx == 1 else None)
feature("on_train_batch_start returns -1")(_ENDS)


class Norms(Notes):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.noted.append({k: float(v) for k, v in grad_norm(self, 2).items()})
        self.note()

    def note(self) -> None:
        self.noted.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])


@feature("norms of gradients in on_before_optimizer_step and on_after_backward", fit={"gradient_clip_val": 0.1})
class AfterBackward(Norms):
    """grad_norm(self, 2), p.grad.norm(), losses, weights"""

    def on_after_backward(self) -> None:
        self.note()
        assert self.noted[-1]


_BEFORE = variant(Norms, on_before_zero_grad=lambda m, optimizer: m.note())  # gradients are still there
feature("on_before_zero_grad", fit={"accumulate_grad_batches": 2, "count": 24, "max_epochs": 1})(_BEFORE)


@feature("configure_gradient_clipping")
class Clips(Lit):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.trainer.global_step > 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


@feature("optimizer_step with a closure")
class StepsWithClosure(Lit):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (batch_idx + 1)
        if batch_idx % 2:
            closure()
        else:
            optimizer.step(closure=closure)


_ZEROS = variant(optimizer_zero_grad=lambda m, epoch, batch_idx, optimizer: optimizer.zero_grad(set_to_none=False))
feature("optimizer_zero_grad")(_ZEROS)
feature("backward")(variant(backward=lambda m, loss, *args, **kwargs: (2 * loss).backward(*args, **kwargs)))


@feature("lr_scheduler_step", fit={"max_epochs": 3})
class StepsScheduler(Lit):
    def __init__(self) -> None:
        super().__init__(scheduler="epoch")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=2 * self.current_epoch)


class Sample:
    """A batch of a class that Lightning cannot move."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


@feature("transfer_batch_to_device, on_before_batch_transfer, on_after_batch_transfer")
class Moves(Notes):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.noted.append("before")
        return Sample(batch[0] * 2, batch[1])

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.noted.append(str(device))
        return Sample(batch.x.to(device), batch.y.to(device))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.noted.append("after")
        return batch.x + 1, batch.y


@feature("configure_model")
class Late(Lit):
    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.blocks: Any = None

    def configure_model(self) -> None:
        if self.blocks is None:
            self.blocks = nn.ModuleList([Block(8), Block(8)])


@feature("configure_callbacks")
def configure_callbacks(bench: Bench) -> Any:
    """Names of all callbacks"""
    ran = bench.fit(seeded(variant(configure_callbacks=lambda _: [Callback()])))
    return [type(callback).__name__ for callback in ran.trainer.callbacks]


@feature("on_save_checkpoint and on_load_checkpoint")
def checkpoint_hooks(bench: Bench) -> Any:
    """What is added to the file and found again; weights that are changed on the way in"""

    class Adds(Lit):
        def on_save_checkpoint(self, file: dict[str, Any]) -> None:
            file["mine"] = [1, "two"]

        def on_load_checkpoint(self, file: dict[str, Any]) -> None:
            self.mine = file["mine"]
            file["state_dict"]["head.bias"] = file["state_dict"]["head.bias"] + 1
            file["state_dict"]["head.weight"] = self.head.weight

    path = bench.fit(seeded(Adds), max_epochs=1).save()
    ran = bench.fit(seeded(Adds, 5), ckpt_path=path)
    return ran.module.mine, bench.contents(), ran.seen


@feature("setup and teardown")
def setup_teardown(bench: Bench) -> Any:
    """Stages, and what the Trainer says of itself there"""

    class Asks(Notes):
        def setup(self, stage: str) -> None:
            of = self.trainer
            shapes = [tuple(p.shape) for p in self.parameters()]
            self.noted.append((stage, of.world_size, self.global_rank, self.local_rank, str(self.device), shapes))

        def teardown(self, stage: str) -> None:
            self.noted.append((stage, self.trainer.state.fn.value))

    ran = bench.fit(seeded(Asks))
    ran.trainer.test(ran.module, bench.loader(), verbose=False)
    return ran.module.noted


@feature("on_validation_model_eval, submodules in evaluation mode")
class Modes(Notes):
    """Which modules are in training mode in each step"""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].eval()

    def loss(self, batch: Any) -> Any:
        self.noted.append([m.training for m in self.modules()])
        return super().loss(batch)

    def on_validation_model_eval(self) -> None:
        self.blocks.eval()
