"""The main job does not make the host wait for the device, but for a loss that is shown or logged, every few steps.

Our model runs on the machine under Lightning's Trainer, with what it logs and shows.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_zero import ZeroMonitor, ZeroStrategy
from lightning_zero.models.gpt import LitGPT
from tests.device.machine import Machine, Tally, Wait
from tests.device.simulate import fused_on_meta
from tests.device.virtual import simulated

EVERY = 5  # steps between two logs
STEPS = 21
SHOWN = Wait("models/language_model.py: LanguageModel.on_train_batch_end", "a copy")
# Lightning, called from there, reads the loss and the same in bits per byte:
LOGGED = Wait("trainer/loops.py: ZeroTrainingEpochLoop.advance", "a value")


class OnPaper(CPUAccelerator):
    """Lightning's idea of the machine."""

    def setup_device(self, device: torch.device) -> None: ...

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("meta")]


class Count(Callback):
    """What was waited for in each step, from the start of the batch before to that of the batch."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.steps: list[dict[Wait, int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.steps.append(dict(self._machine.tally.waits))
        self._machine.tally = Tally()


def run(precision: Any) -> list[dict[Wait, int]]:
    """Waits of the host in each step of a run on one rank, whose batches are on the device already."""
    machine = Machine()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    batches = [torch.zeros(2, 9, dtype=torch.long, device="meta")] * 2 * STEPS
    with tempfile.TemporaryDirectory() as folder, fused_on_meta(), simulated(machine):
        count = Count(machine)
        trainer = pl.Trainer(
            accelerator=OnPaper(),
            devices=1,
            strategy=ZeroStrategy(stage=3),
            precision=precision,
            max_steps=STEPS,
            log_every_n_steps=EVERY,
            logger=CSVLogger(folder),
            callbacks=[count, TQDMProgressBar(refresh_rate=EVERY), ZeroMonitor(prog_bar=True)],
            enable_checkpointing=False,
            enable_model_summary=False,
            limit_val_batches=0,
            gradient_clip_val=1.0,
            default_root_dir=folder,
        )
        model = LitGPT(n_layer=2, n_head=2, d_model=16, block_size=8, vocab_size=16)
        try:
            trainer.fit(model, DataLoader(batches, batch_size=None))
        finally:
            dist.destroy_process_group()  # Lightning's, which it leaves for the next run
    return count.steps


@pytest.mark.full
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_host_waits_where_a_loss_is_read(precision: str, elsewhere: Callable[..., Any]) -> None:
    waits = elsewhere(run, precision)
    assert len(waits) == STEPS
    for step, found in enumerate(waits[2:], 2):  # until then the module is sharded, and things are done for once
        assert found == ({SHOWN: 1, LOGGED: 2} if step % EVERY == 0 else {}), step
