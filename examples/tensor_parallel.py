"""Handwritten digits, read row by row by a transformer whose matrices are divided among two ranks that share a batch.

The plan is written as for Lightning's ``ModelParallelStrategy``: only the strategy differs. A plan can also come from
Hydra (``zero.tensor_plan``), and models of transformers bring one.

python examples/tensor_parallel.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_zero import ZeroStrategy


class Block(nn.Module):
    """Attention and MLP, each with pre-norm and residual: ``[batch, length, width] -> [batch, length, width]``."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        # -1: the heads that this rank has.
        q, k, v = (m(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm2(x)).relu())


class DigitsNet(LightningModule):
    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.rows, self.position = nn.Linear(8, width), nn.Parameter(0.1 * torch.randn(8, width))
        self.blocks = nn.ModuleList(Block(width, 16) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def configure_model(self) -> None:
        if self.device_mesh is None or hasattr(self, "split"):
            return
        self.split = True
        styles = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        for block in self.blocks:
            parallelize_module(
                block, self.device_mesh["tensor_parallel"], styles | {"o": RowwiseParallel(), "down": RowwiseParallel()}
            )

    def forward(self, images: Tensor) -> Tensor:
        x = self.rows(images) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=1))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        right = (self(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("val_accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    seed_everything(0, verbose=False)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data, held_out = random_split(TensorDataset(images, labels), [0.8, 0.2], torch.Generator().manual_seed(0))
    trainer = Trainer(
        strategy=ZeroStrategy("zero3", tensor_parallel=2),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitsNet(), DataLoader(data, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=64))
    if trainer.is_global_zero:
        print(f"validation accuracy: {float(trainer.callback_metrics['val_accuracy']):.4f}")


if __name__ == "__main__":
    main()
