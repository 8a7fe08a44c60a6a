"""A mixture of experts of your own whose experts are divided among ranks (``zero.expert_parallel``): tokens travel to
their experts and back, and no rank ever holds all experts.

``configure_model`` splits the experts' tensors over ``self.device_mesh["expert_parallel"]``; torch has the all-to-all
that gradients can pass. lightning_zero shards what is left: experts over the ranks that have the same ones, all other
parameters over all ranks. Beside ``zero.tensor_parallel`` the ranks that share a batch would send the same tokens: send
each rank's share only. Models of transformers with an ``ep_plan`` (Qwen3-MoE and others) need none of this code.

python examples/expert_parallel.py
"""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy


class Experts(nn.Module):
    """Two layers for each expert: ``tokens [n, width]``, sorted by expert, and ``counts [experts] -> [n, width]``."""

    def __init__(self, n_experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(n_experts, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(n_experts, 4 * width, width) / (4 * width) ** 0.5)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        # In a forward a split parameter is a DTensor; this rank's experts are its local part.
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = tokens.split(counts.tolist())
        return torch.cat([(part @ u).relu() @ d for part, u, d in zip(parts, up, down, strict=True)])


class MixtureOfExperts(nn.Module):
    """Each token goes to the one expert that the router likes best: ``[tokens, width] -> [tokens, width]``."""

    def __init__(self, width: int, n_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, n_experts)
        self.experts = Experts(n_experts, width)
        self.mesh: DeviceMesh | None = None

    def split(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        for name, param in list(self.experts.named_parameters()):
            self.experts.register_parameter(name, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(dim=-1).max(dim=-1)
        order = chosen.argsort()
        counts = chosen.bincount(minlength=self.router.out_features)
        rows = x[order]
        if self.mesh is None:
            found = self.experts(rows, counts)
        else:
            found = self._elsewhere(rows, counts.view(self.mesh.size(), -1), self.mesh.get_group())
        return torch.empty_like(found).index_copy(0, order, found) * weight[:, None]

    def _elsewhere(self, rows: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """``counts [ranks, experts of a rank]``: tokens of this rank for each expert."""
        theirs = all_to_all_single(counts.flatten(), None, None, group).view_as(counts)  # and of each rank for mine
        sent, got = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, got, sent, group)
        # By expert: each rank has sent its tokens for my experts in their order.
        expert = torch.arange(counts.shape[1]).repeat(len(got)).repeat_interleave(theirs.flatten().cpu())
        order = expert.argsort(stable=True).to(rows.device)
        done = self.experts(arrived[order], theirs.sum(0))  # also without tokens: its backward is a collective
        back = torch.empty_like(done).index_copy(0, order, done)
        return all_to_all_single_autograd(back, sent, got, group)


class Net(LightningModule):
    """Learns a function that differs from region to region of the plane."""

    def __init__(self, width: int = 64, n_experts: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.mixture = MixtureOfExperts(width, n_experts)
        self.last = nn.Linear(width, 1)

    def configure_model(self) -> None:
        if self.device_mesh is not None and self.mixture.mesh is None:
            self.mixture.split(self.device_mesh["expert_parallel"])

    def forward(self, points: Tensor) -> Tensor:
        x = self.first(points).relu()
        found: Tensor = self.last(x + self.mixture(x)).squeeze(1)
        return found

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_error", nn.functional.mse_loss(self(batch[0]), batch[1]), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_data(n_points: int, seed: int) -> TensorDataset:
    points = 2 * torch.rand(n_points, 2, generator=torch.Generator().manual_seed(seed)) - 1
    x, y = points.unbind(1)
    return TensorDataset(points, torch.where(x > 0, torch.where(y > 0, x * y, torch.sin(4 * y)), -x))


def main() -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=ZeroStrategy("zero3", expert_parallel=2),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=6,
        check_val_every_n_epoch=6,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Net(), DataLoader(make_data(2048, 1), batch_size=64), DataLoader(make_data(512, 2), batch_size=64))
    if trainer.is_global_zero:
        print(f"validation error: {float(trainer.callback_metrics['val_error']):.4f}")


if __name__ == "__main__":
    main()
