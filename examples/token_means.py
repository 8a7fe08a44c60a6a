"""Adds numbers. Only the digits of a sum count, and a step's loss is the mean over all of these, wherever they are.

Sums have one to three digits. Without ``loss="tokens"`` a digit of a rank that got short sums would weigh more, and
other numbers of ranks or micro-batches would train another model.

python examples/token_means.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroMonitor, ZeroStrategy

SIGNS, LENGTH, NO_LABEL = "0123456789+=.", 10, -100


class Adder(LightningModule):
    """A small causal transformer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.signs = nn.Embedding(len(SIGNS), width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH - 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.following = nn.Linear(width, len(SIGNS))

    def forward(self, signs: Tensor) -> Tensor:
        x = self.signs(signs) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1, device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.following(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signs, labels = batch
        return nn.functional.cross_entropy(self(signs).flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        signs, labels = batch
        right = (self(signs).argmax(2) == labels) | (labels == NO_LABEL)
        self.log("val_accuracy", right.all(1).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def sums(numbers: list[tuple[int, int]]) -> TensorDataset:
    """Texts such as ``7+95=102.``: their signs, and as labels the next sign from ``=`` on."""
    texts = [f"{a}+{b}={a + b}.".ljust(LENGTH, ".") for a, b in numbers]
    signs = torch.tensor([[SIGNS.index(sign) for sign in text] for text in texts])
    answers = [(text.index("="), len(text.rstrip("."))) for text in texts]
    place = torch.arange(LENGTH - 1)
    counts = torch.stack([(place >= first) & (place <= last - 1) for first, last in answers])
    return TensorDataset(signs[:, :-1], torch.where(counts, signs[:, 1:], NO_LABEL))


def main() -> None:
    seed_everything(0, verbose=False)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    order = torch.randperm(len(pairs)).tolist()
    train, held_out = ([pairs[i] for i in part] for part in (order[:9000], order[9000:]))
    trainer = Trainer(
        strategy=ZeroStrategy("zero2", loss="tokens"),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        max_epochs=10,
        check_val_every_n_epoch=10,
        callbacks=[ZeroMonitor(50)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Adder(), DataLoader(sums(train), 32, shuffle=True), DataLoader(sums(held_out), 250))
    if trainer.is_global_zero:
        print(f"mean over the tokens of the last logged step: {trainer.callback_metrics['zero/loss']:.3f}")
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
