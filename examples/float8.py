"""Linear layers that compute in float8, by torchao (pip install torchao). A CPU emulates it; GPUs from 8.9 on have it.

python examples/float8.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy


class Net(LightningModule):
    """Tells the digits of a sum of two digits in one-hot form apart: 19 classes."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(20, width)  # 16 does not divide 20: it stays in bf16
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(width, 19)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        accuracy = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def sums(count: int, seed: int) -> TensorDataset:
    digits = torch.randint(10, (count, 2), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(nn.functional.one_hot(digits, 10).flatten(1).float(), digits.sum(1))


def main() -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=ZeroStrategy("zero3", precision="float8"),  # tensorwise, beside bf16; rowwise: zero.precision.float8
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Net(), DataLoader(sums(4096, seed=0), batch_size=32), DataLoader(sums(1024, seed=1), batch_size=64))
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
