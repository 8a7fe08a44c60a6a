"""The Trainer with ZeRO beside the Trainer alone: milliseconds of a step, and how long a save holds training up."""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.gpu.model import loss_of, make_model
from benchmarks.gpu.plan import TOLERANCE, Size

WARM_UP, STEPS = 3, 8


def measure(size: Size, device: str, folder: str, rows: Sequence[str], nodes: int = 1) -> dict[str, Any]:
    """Return milliseconds of a step under each strategy, and of the stall of a save behind the last of these steps: the
    Trainer alone writes a file, ZeRO a folder in the background. And the sides whose losses are not those of the first.

    Args:
        nodes: this process is one of so many, each of which calls itself a node of one device.
    """
    import lightning.pytorch as pl

    from lightning_zero import ZeroStrategy

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(size, device)
            self.ends: list[float] = []
            self.losses: list[Tensor] = []
            self.stall_s = 0.0

        def training_step(self, tokens: Tensor, number: int) -> Tensor:
            loss = loss_of(self.model, tokens)
            self.losses.append(loss.detach())
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
            if len(self.ends) == WARM_UP + STEPS:
                self.trainer.save_checkpoint(there / "saved.ckpt")
                self.stall_s = time.perf_counter() - self.ends[-1]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)

        def train_dataloader(self) -> Any:
            drawn, count = torch.Generator().manual_seed(0), size.micro_batch * (WARM_UP + STEPS) * nodes
            tokens: Any = torch.randint(0, size.vocab_size // 8, (count, size.length + 1), generator=drawn)
            return DataLoader(tokens, size.micro_batch)

    background = {"name": "sharded", "background": True}
    sides: dict[str, Any] = {"alone": "auto" if nodes == 1 else "ddp"}
    for row in rows:
        stage, _, offload = row.partition("+")
        sides[row] = ZeroStrategy(stage, offload=offload or "none", checkpoint=background)
    found: dict[str, Any] = {"other_losses": []}
    losses: dict[str, Tensor] = {}
    for name, strategy in sides.items():
        there = Path(folder) / f"{nodes}-{name}"  # the same on all nodes
        module = Lit()
        pl.Trainer(
            strategy=strategy,
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            num_nodes=nodes,
            max_epochs=1,
            precision="32-true" if size.precision == "fp32" else "bf16-mixed",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module)
        if nodes == 1:
            shutil.rmtree(there)
        losses[name] = torch.stack(module.losses).cpu()
        if not (losses[name] / losses["alone"] - 1).abs().max() < TOLERANCE[size.precision] / 10:
            found["other_losses"].append(f"{name}: {losses[name].tolist()}, alone: {losses['alone'].tolist()}")
        steps = [after - before for before, after in itertools.pairwise(module.ends[WARM_UP - 1 :])]
        found[f"{name}_ms"] = round(statistics.median(steps) * 1e3, 3)
        found[f"{name}_save_stall_ms"] = round(module.stall_s * 1e3, 1)
    return found | {"vs_alone": round(found["alone_ms"] / found["zero3_ms"], 3)}
