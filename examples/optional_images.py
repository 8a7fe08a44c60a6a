"""A model of text and images whose batches do not all have images: ranks without one skip the encoder.

``dynamic_graph=True`` lets ranks take different paths. Gradients of the encoder are those of the ranks that used it,
divided by all ranks, as under ``DDPStrategy(find_unused_parameters=True)``.

python examples/optional_images.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_zero import ZeroStrategy

Batch = tuple[Tensor, Tensor | None, Tensor]
WORDS, SIDE, CLASSES = 8, 12, 4


class Encoder(nn.Module):
    """Images ``[batch, 1, 12, 12]`` to tokens ``[batch, 9, width]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(9, width))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.gelu(self.patches(images).flatten(2).transpose(1, 2) + self.positions)


class Net(LightningModule):
    """Answers with the sum of the first word's class and the image's class, if there is an image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.encoder = Encoder(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(2)
        )
        self.answer = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor, images: Tensor | None) -> Tensor:
        x = self.words(words)
        if images is not None:  # other ranks may have none in this step
            x = torch.cat([x, self.encoder(images)], 1)
        for layer in self.layers:
            x = layer(x)
        return self.answer(x[:, 0])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        words, images, answers = batch
        loss = nn.functional.cross_entropy(self(words, images), answers)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        words, images, answers = batch
        right = (self(words, images).argmax(1) == answers).float().mean()
        self.log("val_accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Batches(Dataset[Batch]):
    """Whole batches; every other one has images: a bright square in one of four corners."""

    def __init__(self, count: int, seed: int, size: int = 32) -> None:
        self.count, self.seed, self.size = count, seed, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        draw = torch.Generator().manual_seed(10_000 * self.seed + index)
        words = torch.randint(WORDS, (self.size, 4), generator=draw)
        answers = words[:, 0] % CLASSES
        if index % 2:
            return words, None, answers
        corner = torch.randint(CLASSES, (self.size,), generator=draw)
        images = 0.1 * torch.randn(self.size, 1, SIDE, SIDE, generator=draw)
        for image, where in zip(images, corner.tolist(), strict=True):
            top, left = SIDE // 2 * (where // 2), SIDE // 2 * (where % 2)
            image[0, top : top + SIDE // 2, left : left + SIDE // 2] += 1
        return words, images, (answers + corner) % CLASSES


def main() -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=ZeroStrategy("zero3", dynamic_graph=True),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=8,
        check_val_every_n_epoch=8,
        logger=False,
        enable_checkpointing=False,
    )
    train_loader = DataLoader(Batches(160, seed=0), batch_size=None, shuffle=True)
    trainer.fit(Net(), train_loader, DataLoader(Batches(20, seed=1), batch_size=None))
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
