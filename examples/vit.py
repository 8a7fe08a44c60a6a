"""A vision transformer (Dosovitskiy et al. 2020) on handwritten digits, in bf16 with activation checkpointing.

python examples/vit.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_zero import ZeroStrategy


class ViT(LightningModule):
    """Images of 8 x 8 pixels as 16 patches of 2 x 2, and a token for the class in front of them."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        loss = nn.functional.cross_entropy(self(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, digits = batch
        self.accuracy.update(self(images), digits)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.hparams["lr"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train_data, val_data = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    trainer = Trainer(
        strategy=ZeroStrategy("zero3", activation_checkpointing="blocks"),
        precision="bf16-mixed",
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=12,
        check_val_every_n_epoch=12,
        logger=False,
        enable_checkpointing=False,
    )
    train_loader = DataLoader(train_data, batch_size=32, shuffle=True, drop_last=True)
    trainer.fit(ViT(), train_loader, DataLoader(val_data, batch_size=32))
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
