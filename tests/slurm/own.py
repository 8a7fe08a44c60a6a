"""A script as a user has it, for ``submit -- python own.py EVENT``. It knows nothing of jobs and checkpoints.

In the first stretch of a job, after step 7, rank 1 gets the signal before the time limit (``signal``); or every rank
fails before the first step (``fail``).
"""

import os
import signal
import sys

import lightning as L
import torch

import lightning_zero  # noqa: F401


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if sys.argv[1] == "fail":
            batch = {"x": batch["y"], "y": batch["x"]}
        loss = torch.nn.functional.mse_loss(self.net(batch["x"]), batch["y"])
        self.log("loss", loss)
        print(f"step {self.global_step} of rank {self.global_rank}: {loss.item()!r}", flush=True)
        here = (sys.argv[1], self.global_step, self.global_rank)
        if here == ("signal", 7, 1) and "SLURM_RESTART_COUNT" not in os.environ:
            os.kill(os.getpid(), signal.SIGUSR1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader() -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
    data = [{"x": row, "y": row.sum(0, keepdim=True)} for row in torch.randn(64, 8)]
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)  # type: ignore[arg-type]  # 8 steps an epoch


if __name__ == "__main__":
    L.seed_everything(1)
    data = loader()
    trainer = L.Trainer(
        strategy="zero3", accelerator="cpu", num_nodes=2, devices=1, max_epochs=3, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Regression(), data)
    trainer.print(f"ended after step {trainer.global_step}")
