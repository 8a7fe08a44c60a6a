"""A mixture of experts (as in Switch Transformer, Fedus et al. 2021) whose ranks send tokens to other experts.

An expert is a unit: it is gathered for those who use it, and an expert that a rank does not need in a step is not
computed there. ``dynamic_graph=True`` lets ranks take different paths through the model.

python examples/mixture_of_experts.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy


class Expert(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class MixtureOfExperts(nn.Module):
    """Each token goes to the one expert that the router likes best: ``[tokens, width] -> [tokens, width]``."""

    def __init__(self, width: int, n_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, n_experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(n_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(dim=-1)
        weight, chosen = probabilities.max(dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(1)
            if len(mine):  # other ranks may have other experts
                out = out.index_add(0, mine, weight[mine, None] * expert(x[mine]))
        share = torch.zeros_like(probabilities).scatter_(1, chosen[:, None], 1.0).mean(dim=0)
        balance = len(self.experts) * (share * probabilities.mean(dim=0)).sum()  # 1 if all are used alike
        return out, balance


class Net(LightningModule):
    """Learns a function that differs from region to region of the plane."""

    def __init__(self, width: int = 64, n_experts: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.mixture = MixtureOfExperts(width, n_experts)
        self.last = nn.Linear(width, 1)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(points).relu()
        y, balance = self.mixture(x)
        return self.last(x + y).squeeze(1), balance

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, values = batch
        found, balance = self(points)
        loss = nn.functional.mse_loss(found, values)
        self.log("train_loss", loss, prog_bar=True)
        return loss + 0.01 * balance

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        points, values = batch
        error = nn.functional.mse_loss(self(points)[0], values)
        self.log("val_error", error, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_data(n_points: int, seed: int) -> TensorDataset:
    points = 2 * torch.rand(n_points, 2, generator=torch.Generator().manual_seed(seed)) - 1
    x, y = points.unbind(1)
    values = torch.where(x > 0, torch.where(y > 0, x * y, torch.sin(4 * y)), torch.where(y > 0, -x, x * x - 1))
    return TensorDataset(points, values)


def main() -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=ZeroStrategy("zero3", dynamic_graph=True, unit={"classes": ["Expert"]}),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=6,
        check_val_every_n_epoch=6,
        logger=False,
        enable_checkpointing=False,
    )
    train_loader = DataLoader(make_data(4096, seed=0), batch_size=64, shuffle=True)
    trainer.fit(Net(), train_loader, DataLoader(make_data(1024, seed=1), batch_size=64))
    if trainer.is_global_zero:
        print(f"validation error: {trainer.callback_metrics['val_error']:.4f}")


if __name__ == "__main__":
    main()
