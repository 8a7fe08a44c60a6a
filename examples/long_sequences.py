"""Sequences that are shared by two ranks, each with half of the positions: attention sees all of them.

The first token of a sequence is to be named at its last position. The first rank alone has the one, the second alone
the other.

python examples/long_sequences.py
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero

SYMBOLS, LENGTH, IGNORED = 8, 64, -100


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Remembers(LightningModule):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        self.position = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(depth))
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = lightning_zero.sequence_positions(tokens.shape[1], tokens.device)  # those of this rank's part
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch  # of this rank's part
        nats = F.cross_entropy(self(tokens).transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        loss = lightning_zero.mean_over_tokens(nats, labels != IGNORED)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        tokens, labels = batch
        right = (self(tokens).argmax(dim=-1) == labels).float()
        accuracy = lightning_zero.mean_over_tokens(right, labels != IGNORED)
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_data(n: int, seed: int) -> TensorDataset:
    tokens = torch.randint(0, SYMBOLS, (n, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = torch.full_like(tokens, IGNORED)
    labels[:, -1] = tokens[:, 0]
    return TensorDataset(tokens, labels)


def main() -> None:
    trainer = Trainer(
        strategy=lightning_zero.ZeroStrategy("zero3", sequence_parallel=2),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
    )
    train_loader = DataLoader(make_data(4096, seed=0), batch_size=32, shuffle=True)
    trainer.fit(Remembers(), train_loader, DataLoader(make_data(256, seed=1), batch_size=32))
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
