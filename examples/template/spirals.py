"""The project's own code: a classifier of points on two spirals, and the points."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Sequential):
    def __init__(self, width: int, depth: int) -> None:
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        super().__init__(nn.Linear(2, width), *blocks, nn.Linear(width, 2))


class Classifier(LightningModule):
    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])
        self.net = net

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        points, labels = batch
        return cross_entropy(self.net(points), labels)

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        points, labels = batch
        self.log("val_loss", cross_entropy(self.net(points), labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams["lr"])


class Spirals(LightningDataModule):
    def __init__(self, batch_size: int, points: int = 1024) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        angles = torch.rand(points, generator=generator) * 9
        labels = torch.randint(2, (points,), generator=generator)
        turned = angles + labels * torch.pi
        where = torch.stack((turned.cos(), turned.sin()), 1) * angles[:, None] / 9
        self.points = TensorDataset(where + 0.02 * torch.randn(points, 2, generator=generator), labels)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.points, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.points, self.batch_size)
