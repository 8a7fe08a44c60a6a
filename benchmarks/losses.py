"""Draw the losses of DDP, zero3 and zero3_offload over the same steps: ``python -m benchmarks.losses [FILE]``."""

from __future__ import annotations

import csv
import functools
import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure

import lightning_zero  # noqa: F401 (makes the strategies known)
from lightning_zero.data.text import TextData
from lightning_zero.models.gpt import LitGPT

STEPS = 100
# By strategy: colour, width of the line, dashes. The first is drawn widest, because all lines lie on each other.
LINES = {"ddp": ("#b8bfcc", 7, "-"), "zero3": ("#0072b2", 3, "-"), "zero3_offload": ("#d55e00", 1.4, "--")}


def losses(strategy: str) -> list[float]:
    """Train a small GPT on two CPU processes, with the same seed each time, and return the loss of each step."""
    pl.seed_everything(0, verbose=False)
    adamw = functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)
    model = LitGPT(optimizer=adamw, n_layer=2, n_head=2, d_model=64, block_size=64, warmup_steps=5)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy=f"{strategy}_notebook",  # forks the processes, so that this script runs once
            accelerator="cpu",
            devices=2,
            max_steps=STEPS,
            limit_val_batches=0,
            log_every_n_steps=1,
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, TextData(block_size=64, batch_size=4))
        with next(Path(folder).rglob("metrics.csv")).open() as file:
            rows = list(csv.DictReader(file))
    return [float(row["train_loss"]) for row in rows if row.get("train_loss")]


def main() -> None:
    found = {strategy: losses(strategy) for strategy in LINES}
    apart = max(abs(a - b) for other in found.values() for a, b in zip(found["ddp"], other, strict=True))
    figure = Figure(figsize=(8, 3.6), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for strategy, (colour, width, dashes) in LINES.items():
        axes.plot(range(1, STEPS + 1), found[strategy], dashes, color=colour, linewidth=width, label=strategy)
    axes.set_title(f"A small GPT on two CPU processes: losses differ by at most {apart:.1e}", fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    file = sys.argv[1] if len(sys.argv) > 1 else "docs/losses.png"
    figure.savefig(file)
    print(f"losses differ by at most {apart:.3g}; wrote {file}")


if __name__ == "__main__":
    main()
