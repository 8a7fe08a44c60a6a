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

from tests.lightning_table.bench import Bench, checkpoint
from tests.lightning_table.table import feature
from tests.trainer.toys import Block, Lit, Samples, seeded

# Hooks of the module that are not in Lightning's classes of hooks.
MORE = (
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_optimizers",
    "forward",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
)
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


def _noting(base: type, names: Any, calls: list[Any]) -> Any:
    """A class whose ``names`` are noted in ``calls`` before they do what they do."""

    def noted(name: str) -> Any:
        own = getattr(base, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return own(self, *args, **kwargs)

        hook.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
        return hook

    return type(base.__name__, (base,), {name: noted(name) for name in names})


def _hooks_of(*classes: type) -> list[str]:
    return sorted({name for c in classes for name, _ in inspect.getmembers(c, inspect.isfunction) if name[0] != "_"})


class Loads(Lit):
    def train_dataloader(self) -> Any:
        return DataLoader(Samples(4), batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def _everything(bench: Bench, module: Any, callbacks: Any = ()) -> None:
    """fit, validate, test, predict, save, and a fit from the file."""
    of = bench.trainer(callbacks=list(callbacks), gradient_clip_val=0.5, num_sanity_val_steps=1, max_epochs=1)
    of.fit(module)
    of.validate(module, verbose=False)
    of.test(module, verbose=False)
    of.predict(module)
    of.save_checkpoint(bench.root / "a.ckpt")
    bench.trainer(callbacks=list(callbacks), accumulate_grad_batches=2).fit(module, ckpt_path=bench.root / "a.ckpt")


@feature("all hooks of LightningModule")
def module_hooks(bench: Bench) -> Any:
    """The order of all calls in fit, validate, test, predict, save and resume"""
    calls: list[str] = []
    names = set(_hooks_of(ModelHooks, DataHooks, CheckpointHooks)) | set(MORE)
    names -= {"configure_sharded_model"}  # deprecated; Lightning refuses it beside configure_model
    module = seeded(lambda: _noting(Loads, names, calls)(scheduler="step"))
    _everything(bench, module)
    left = names - set(calls) - {"prepare_data"}  # called on one rank of each node
    assert not left, left
    return calls


@feature("all hooks of Callback")
def callback_hooks(bench: Bench) -> Any:
    """The order of all calls in fit, validate, test, predict, save and resume"""
    calls: list[str] = []
    names = set(_hooks_of(Callback)) - {"on_exception"}
    _everything(bench, seeded(Loads), [_noting(Callback, names, calls)()])
    return calls


@feature("all hooks of LightningDataModule")
def data_hooks(bench: Bench) -> Any:
    """The order of all calls in fit, validate, test, predict, save and resume"""
    calls: list[str] = []

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(Samples(4), batch_size=2)

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    data = _noting(Data, [*_hooks_of(DataHooks), "state_dict", "load_state_dict"], calls)()
    of = bench.trainer(max_epochs=1)
    module = seeded(Lit)
    of.fit(module, data)
    of.validate(module, data, verbose=False)
    of.test(module, data, verbose=False)
    of.predict(module, data)
    of.save_checkpoint(bench.root / "a.ckpt")
    bench.trainer().fit(module, data, ckpt_path=bench.root / "a.ckpt")
    return calls


@feature("on_exception")
def on_exception(bench: Bench) -> Any:
    """The calls of all hooks after an error on all ranks"""

    class Raises(Lit):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ZeroDivisionError

    calls: list[str] = []
    callback = _noting(Callback, _hooks_of(Callback), calls)()
    error = bench.raised(lambda: bench.fit(seeded(Raises), callbacks=[callback]))
    assert "on_exception" in calls
    return error, calls


@feature("training_step returns None", ddp_raises="Skipping the `training_step` by returning None")
def step_none(bench: Bench) -> Any:
    """Lightning skips no step on several ranks"""

    class Skips(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 2 else loss

    return bench.fit(seeded(Skips)).seen


@feature("training_step returns a dict")
def step_dict(bench: Bench) -> Any:
    """Losses, weights, what on_train_batch_end gets"""

    class Gives(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "size": len(batch[0]), "out": self(batch[0])}

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.outputs.append({k: v.detach() if torch.is_tensor(v) else v for k, v in outputs.items()})

    ran = bench.fit(seeded(Gives))
    return ran.seen, ran.module.outputs


@feature("on_train_batch_start returns -1")
def batch_start(bench: Bench) -> Any:
    """Losses, weights, steps"""

    class Ends(Lit):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 1 else None

    return bench.fit(seeded(Ends)).seen


class Norms(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append({k: float(v) for k, v in grad_norm(self, 2).items()})
        self.norms.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])


@feature("on_before_optimizer_step, on_after_backward: norms of gradients")
def norms(bench: Bench) -> Any:
    """grad_norm(self, 2), p.grad.norm(), losses, weights"""

    class Both(Norms):
        def on_after_backward(self) -> None:
            self.norms.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])

    ran = bench.fit(seeded(Both), gradient_clip_val=0.1)
    assert len(ran.module.norms) > 10
    return ran.module.norms, ran.seen


@feature("on_before_zero_grad")
def before_zero_grad(bench: Bench) -> Any:
    """Calls, norms of gradients that are still there"""

    class Looks(Norms):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.norms.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])

    return bench.fit(seeded(Looks), accumulate_grad_batches=2, count=24, max_epochs=1).module.norms


@feature("configure_gradient_clipping")
def own_clipping(bench: Bench) -> Any:
    """Losses, weights, where it clips from the third step on"""

    class Clips(Lit):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            if self.trainer.global_step > 1:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    return bench.fit(seeded(Clips)).seen


@feature("optimizer_step with a closure")
def own_step(bench: Bench) -> Any:
    """Losses, weights, with warm-up, every second step, and the closure alone between them"""

    class Steps(Lit):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (batch_idx + 1)
            if batch_idx % 2:
                closure()
            else:
                optimizer.step(closure=closure)

    return bench.fit(seeded(Steps)).seen


@feature("optimizer_zero_grad")
def own_zero_grad(bench: Bench) -> Any:
    """Losses, weights, with zeros in place of None"""

    class Zeros(Lit):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

    return bench.fit(seeded(Zeros)).seen


@feature("backward")
def own_backward(bench: Bench) -> Any:
    """Losses, weights, with a loss that is scaled there"""

    class Scales(Lit):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            (2 * loss).backward(*args, **kwargs)

    return bench.fit(seeded(Scales)).seen


@feature("lr_scheduler_step")
def own_scheduler_step(bench: Bench) -> Any:
    """Rates, losses, weights"""

    class Steps(Lit):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(epoch=2 * self.current_epoch)

    ran = bench.fit(seeded(lambda: Steps(scheduler="epoch")), max_epochs=3)
    return ran.module.rates, ran.seen


class Sample:
    """A batch of a class that Lightning cannot move."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


@feature("transfer_batch_to_device, on_before_ and on_after_batch_transfer")
def transfer(bench: Bench) -> Any:
    """Calls, losses, weights"""

    class Moves(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls.append("before")
            return Sample(batch[0] * 2, batch[1])

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            self.calls.append(str(device))
            return Sample(batch.x.to(device), batch.y.to(device))

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls.append("after")
            return batch.x + 1, batch.y

    ran = bench.fit(seeded(Moves))
    return ran.module.calls, ran.seen


@feature("configure_model")
def configure_model(bench: Bench) -> Any:
    """Losses, metrics, weights of layers that are made there"""

    class Late(Lit):
        def __init__(self) -> None:
            super().__init__()
            del self.blocks
            self.blocks: Any = None

        def configure_model(self) -> None:
            if self.blocks is None:
                self.blocks = nn.ModuleList([Block(8), Block(8)])

    return bench.fit(seeded(Late)).seen


@feature("configure_callbacks")
def configure_callbacks(bench: Bench) -> Any:
    """Names of all callbacks"""

    class Brings(Lit):
        def configure_callbacks(self) -> Any:
            return [Callback()]

    return [type(c).__name__ for c in bench.fit(seeded(Brings)).trainer.callbacks]


@feature("on_save_checkpoint and on_load_checkpoint")
def checkpoint_hooks(bench: Bench) -> Any:
    """What is added to the file and found again; a weight that is changed on the way in"""

    class Adds(Lit):
        def on_save_checkpoint(self, file: dict[str, Any]) -> None:
            file["mine"] = [1, "two"]

        def on_load_checkpoint(self, file: dict[str, Any]) -> None:
            self.mine = file["mine"]
            file["state_dict"]["head.bias"] = file["state_dict"]["head.bias"] + 1

    first = bench.fit(seeded(Adds), max_epochs=1)
    first.trainer.save_checkpoint(bench.root / "a.ckpt")
    ran = bench.fit(seeded(Adds, 5), ckpt_path=bench.root / "a.ckpt")
    return ran.module.mine, checkpoint(bench.root / "a.ckpt")["mine"], ran.seen


@feature("setup and teardown")
def setup_teardown(bench: Bench) -> Any:
    """Stages, and what the Trainer says of itself there"""

    class Notes(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def setup(self, stage: str) -> None:
            of = self.trainer
            shapes = [tuple(p.shape) for p in self.parameters()]
            self.calls.append((stage, of.world_size, self.global_rank, self.local_rank, str(self.device), shapes))

        def teardown(self, stage: str) -> None:
            self.calls.append((stage, self.trainer.state.fn.value))

    ran = bench.fit(seeded(Notes))
    ran.trainer.test(ran.module, bench.loader(), verbose=False)
    return ran.module.calls


@feature("on_validation_model_eval and the modes of submodules")
def modes(bench: Bench) -> Any:
    """Which modules are in training mode in each step"""

    class Frozen(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].eval()
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append([m.training for m in self.modules()])
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append([m.training for m in self.modules()])
            super().validation_step(batch, batch_idx)

        def on_validation_model_eval(self) -> None:
            self.blocks.eval()

    ran = bench.fit(seeded(Frozen))
    return ran.module.seen, ran.seen
