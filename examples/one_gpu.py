"""Train a model that does not fit on one GPU: parameters, gradients and optimizer state are kept in host memory.

The model is built on the meta device, so no memory ever holds all of it. A block is on the GPU while it computes; with
activation checkpointing only its inputs are kept. ``--nvme FOLDER`` keeps parameters and optimizer state in files.

python examples/one_gpu.py [--nvme FOLDER] [--width 512] [--depth 8]
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.models.gpt import GPT


class LargeModel(LightningModule):
    """Learns to add: two numbers of four digits and their sum, as text."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        if self.gpt is None:
            with torch.device("meta"):  # no memory: each block is initialized where it is kept
                self.gpt = GPT(vocab_size=12, n_layer=self.depth, n_head=8, d_model=self.width, block_size=16)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits = self.gpt(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def make_sums(n: int) -> Tensor:
    """``[n, 15] int64``: 1234+5678=06912 by digits, 10 for ``+`` and 11 for ``=``."""
    terms = torch.randint(10_000, (n, 2))
    lines = [f"{a:04}+{b:04}={a + b:05}" for a, b in terms.tolist()]
    return torch.tensor([["0123456789+=".index(character) for character in line] for line in lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", metavar="FOLDER", help="on a local disk")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    arguments = parser.parse_args()
    offload = {"name": "nvme", "nvme_path": arguments.nvme} if arguments.nvme else "cpu"
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=ZeroStrategy("zero3", offload=offload, activation_checkpointing="blocks"),
        precision="bf16-mixed",
        accelerator="auto",
        devices=1,
        max_steps=60,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LargeModel(arguments.width, arguments.depth), DataLoader(make_sums(2048), batch_size=32, shuffle=True))
    print(f"training loss: {trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
