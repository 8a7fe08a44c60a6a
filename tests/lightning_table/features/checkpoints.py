"""Files that are saved, resumed from and loaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from tests.lightning_table.bench import Bench
from tests.lightning_table.table import heading
from tests.trainer.toys import Lit, seeded

feature = heading("Checkpoints")


def _adam(seed: int = 3) -> Any:
    return seeded(lambda: Lit(optimizer="adamw", scheduler="step"), seed)


def _saved(**how: Any) -> Any:
    def contents(bench: Bench) -> Any:
        """What is in the file: weights, optimizer states, schedulers, loops, hyper-parameters, all keys"""
        bench.fit(_adam()).save(**how)
        return bench.contents()

    return contents


def _resumed(**first: Any) -> Any:
    return lambda bench: bench.fit(_adam(5), ckpt_path=bench.fit(_adam(), **first).save()).seen


feature("trainer.save_checkpoint")(_saved())
feature("trainer.save_checkpoint(weights_only=True)")(_saved(weights_only=True))
feature("resume by fit(ckpt_path)")(_resumed(max_epochs=1))
feature("resume in the middle of an epoch")(_resumed(max_steps=2, max_epochs=-1))


@feature("resume from a checkpoint of DDP, and the reverse")
def across(bench: Bench) -> Any:
    ddp = Bench("ddp", bench.root)
    return [
        then.fit(_adam(5), ckpt_path=first.fit(_adam(), max_epochs=1).save()).seen
        for first, then in ((ddp, bench), (bench, ddp))
    ]


@feature('ckpt_path="best" and "last"')
def best_and_last(bench: Bench) -> Any:
    """Metrics of validate and test, losses and weights of a fit that goes on"""

    class Counts(Lit):
        def on_validation_epoch_end(self) -> None:
            self.log("number", float(self.current_epoch))

    callback = ModelCheckpoint(bench.root, "{epoch}", monitor="number", mode="min", save_top_k=2, save_last=True)
    ran = bench.fit(seeded(Counts), enable_checkpointing=True, callbacks=[callback])
    of = ran.trainer
    found = [of.validate(dataloaders=bench.loader(), ckpt_path="best", verbose=False)]
    found.append(of.test(dataloaders=bench.loader(), ckpt_path="last", verbose=False))
    assert found[0][0]["val"] != found[1][0]["val"]
    of.fit_loop.max_epochs = 3
    of.fit(ran.module, bench.loader(), bench.loader(), ckpt_path="last")
    return found, ran.seen


@feature("load_from_checkpoint, save_hyperparameters")
def load_from(bench: Bench) -> Any:
    """Hyper-parameters, weights, what the module gives in the process that loads it"""
    path = bench.fit(seeded(lambda: Lit(width=6, lr=0.1))).save()
    module = Lit.load_from_checkpoint(path, lr=0.2, weights_only=False)
    return dict(module.hparams), dict(module.state_dict()), module(torch.ones(2, 4)).detach()


@feature("load_from_checkpoint, then validate and fit")
def load_then_fit(bench: Bench) -> Any:
    module = Lit.load_from_checkpoint(bench.fit(max_epochs=1).save(), weights_only=False)
    result = bench.trainer().validate(module, bench.loader(), verbose=False)
    return result, bench.fit(module).seen


@feature("strict_loading=False")
def strict(bench: Bench) -> Any:
    """Metrics; an error that names the parameters without it"""

    class More(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)
            self.more.requires_grad_(False)

    path, of = bench.fit(max_epochs=1).save(), bench.trainer()
    error = bench.raised(lambda: of.validate(seeded(More), bench.loader(), ckpt_path=path))
    assert "more.weight" in error
    loose = seeded(More)
    loose.strict_loading = False
    return of.validate(loose, bench.loader(), ckpt_path=path, verbose=False)


@feature("AsyncCheckpointIO")
def asynchronous(bench: Bench) -> Any:
    """Names and contents of files"""
    callback = ModelCheckpoint(bench.root, "{step}", every_n_train_steps=2, save_top_k=-1)
    bench.fit(_adam(), enable_checkpointing=True, callbacks=[callback], plugins=AsyncCheckpointIO())
    found = bench.contents()
    assert len(found) > 1
    return found


@feature("a custom CheckpointIO")
def own_io(bench: Bench) -> Any:
    """Calls of each rank; losses and weights of a fit that goes on"""

    class Notes(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            calls.append(("save", storage_options, sorted(checkpoint.keys() - {"lightning_zero_rng"})))
            super().save_checkpoint(checkpoint, path)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("load")
            return super().load_checkpoint(path, *args, **kwargs)

        def remove_checkpoint(self, path: Any) -> None:
            calls.append("remove")
            super().remove_checkpoint(path)

    calls: list[Any] = []
    callbacks = [ModelCheckpoint(bench.root, "{epoch}")]
    path = bench.fit(enable_checkpointing=True, callbacks=callbacks, plugins=Notes()).save(storage_options={"to": 1})
    return calls, bench.fit(seeded(Lit, 5), plugins=Notes(), ckpt_path=path, max_epochs=3).seen


@feature("saves in hooks")
def inside(bench: Bench) -> Any:
    """What is in the files of three hooks"""

    class Saves(Lit):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            if self.trainer.global_step == 2:
                self.trainer.save_checkpoint(bench.root / "batch.ckpt")

        def on_validation_epoch_end(self) -> None:
            self.trainer.save_checkpoint(bench.root / "validation.ckpt")

        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(bench.root / "end.ckpt")

    return bench.fit(seeded(Saves)).seen, bench.contents()


@feature("ckpt_path of a missing file")
def missing(bench: Bench) -> Any:
    """The error"""
    error = bench.raised(lambda: bench.fit(ckpt_path=bench.root / "none.ckpt"))
    dist.barrier()
    return error.partition(":")[0]
