"""A GAN (Goodfellow et al. 2014) with manual optimization: two networks, two optimizers, one sharded module.

It learns to draw points on a circle. The code is that of Lightning's documentation; nothing in it knows about sharding.

python examples/gan.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy


def network(n_in: int, n_out: int, width: int = 64) -> nn.Sequential:
    inner = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.LeakyReLU(0.2))]
    return nn.Sequential(nn.Linear(n_in, width), nn.LeakyReLU(0.2), *inner, nn.Linear(width, n_out))


class GAN(LightningModule):
    def __init__(self, n_noise: int = 8) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.n_noise = n_noise
        self.generator = network(n_noise, 2)
        self.discriminator = network(2, 1)

    def forward(self, n_points: int) -> Tensor:
        return self.generator(torch.randn(n_points, self.n_noise, device=self.device))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()

        self.toggle_optimizer(discriminator_optimizer)
        loss = self.judge(real, is_real=True) + self.judge(self(len(real)).detach(), is_real=False)
        discriminator_optimizer.zero_grad()
        self.manual_backward(loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)
        self.log("discriminator_loss", loss, prog_bar=True)

        self.toggle_optimizer(generator_optimizer)
        loss = self.judge(self(len(real)), is_real=True)
        generator_optimizer.zero_grad()
        self.manual_backward(loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)
        self.log("generator_loss", loss, prog_bar=True)

    def judge(self, points: Tensor, is_real: bool) -> Tensor:
        verdict = self.discriminator(points)
        return nn.functional.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(is_real)))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        distance = (self(len(batch[0])).norm(dim=1) - 1).abs().mean()
        self.log("distance", distance, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        settings = {"lr": 1e-3, "betas": (0.5, 0.9)}
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), **settings) for network in networks]


def main() -> None:
    seed_everything(0, verbose=False)
    angle = 2 * torch.pi * torch.rand(8192, 1)
    circle = TensorDataset(torch.cat([angle.cos(), angle.sin()], dim=1))
    trainer = Trainer(
        strategy=ZeroStrategy("zero3", unit={"classes": ["Sequential"]}),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=4,
        check_val_every_n_epoch=4,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(GAN(), DataLoader(circle, batch_size=64, shuffle=True), DataLoader(circle, batch_size=1024))
    if trainer.is_global_zero:
        print(f"distance from the circle: {trainer.callback_metrics['distance']:.3f}")


if __name__ == "__main__":
    main()
