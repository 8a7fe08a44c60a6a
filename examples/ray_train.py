"""Ray Train: the workers of a Ray cluster are the ranks. If a worker dies, Ray starts all of them again, and training
resumes from the checkpoint of the last epoch. With "tune", Ray Tune tries two widths, each with workers of its own.

python examples/ray_train.py [STRATEGY] [tune]
"""

import contextlib
import os
import sys

import ray.train
import ray.tune
import torch
from lightning.pytorch import Trainer, seed_everything
from minimal import Net, make_data
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from ray.tune import TuneConfig, Tuner
from ray.tune.integration.ray_train import TuneReportCallback
from torch.utils.data import DataLoader

import lightning_zero  # noqa: F401  makes zero0, zero1, zero2 and zero3 known to Lightning


def train(config: dict) -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=RayDDPStrategy() if config["strategy"] == "ddp" else config["strategy"],
        accelerator="auto",
        devices="auto",
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback(), *config.get("callbacks", [])],
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer = prepare_trainer(trainer)
    checkpoint = ray.train.get_checkpoint()  # of an earlier try
    with checkpoint.as_directory() if checkpoint is not None else contextlib.nullcontext() as folder:
        path = os.path.join(folder, "checkpoint.ckpt") if folder is not None else None
        trainer.fit(
            Net(config.get("width", 256)),
            DataLoader(make_data(2048, seed=0), batch_size=64),
            ckpt_path=path,
            weights_only=False,
        )


def run(strategy: str, name: str | None = None, reports: tuple = (), **config: object) -> ray.train.Result:
    trainer = TorchTrainer(
        train,
        train_loop_config={"strategy": strategy} | config,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name=name,
            callbacks=list(reports),
            storage_path=os.path.abspath("outputs/ray"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    return trainer.fit()


def trial(config: dict) -> None:
    run(name=ray.tune.get_context().get_trial_id(), reports=(TuneReportCallback(),), **config)


def tune(space: dict) -> ray.tune.ResultGrid:
    best = TuneConfig(metric="train_loss", mode="min", max_concurrent_trials=1)
    return Tuner(trial, param_space=space, tune_config=best).fit()


if __name__ == "__main__":
    strategy = sys.argv[1] if len(sys.argv) > 1 else "zero3"
    if "tune" in sys.argv:
        found = tune({"strategy": strategy, "width": ray.tune.grid_search([64, 256])})
        print(f"best width: {found.get_best_result().config['width']}")
    else:
        print(f"training loss: {run(strategy).metrics['train_loss']:.6f}")
