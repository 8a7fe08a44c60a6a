"""The least there is to do: your own LightningModule, and ``strategy="zero3"``.

python examples/minimal.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401  makes zero0, zero1, zero2 and zero3 known to Lightning


class Net(LightningModule):
    """Learns to tell on which side of a curve a point lies."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, side = batch
        loss = nn.functional.cross_entropy(self(points), side)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        points, side = batch
        accuracy = (self(points).argmax(dim=1) == side).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_data(n_points: int, seed: int) -> TensorDataset:
    points = torch.randn(n_points, 2, generator=torch.Generator().manual_seed(seed))
    side = (points[:, 1] > torch.sin(2 * points[:, 0])).long()
    return TensorDataset(points, side)


def main() -> None:
    trainer = Trainer(
        strategy="zero3",
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
    )
    train_loader = DataLoader(make_data(8192, seed=0), batch_size=64, shuffle=True)
    trainer.fit(Net(), train_loader, DataLoader(make_data(1024, seed=1), batch_size=64))
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
