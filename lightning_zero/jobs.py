"""The main job as a job of a cluster."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_zero.cluster import ClusterConfig, ClusterName
from lightning_zero.config import ConfigError
from lightning_zero.hydra_schema import TrainConfig
from lightning_zero.launched import launched

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import SLURMEnvironment

GPU_ACCELERATORS = ("auto", "gpu", "cuda")


# -- before the job ---------------------------------------------------------------------------------------------------


def fit_trainer(config: TrainConfig) -> None:
    """Set ``trainer.num_nodes``, ``devices`` and ``accelerator`` as the cluster has them.

    Raises:
        ConfigError: one of them was given and says otherwise.
    """
    cluster, trainer = config.cluster, config.trainer
    if cluster.name is ClusterName.none:
        return
    asked = trainer.num_nodes
    if asked not in (None, cluster.nodes):
        raise ConfigError(
            f"trainer.num_nodes: expected {cluster.nodes}, which is cluster.nodes, got {asked}. Drop "
            "trainer.num_nodes, or change cluster.nodes."
        )
    if trainer.devices not in ("auto", -1, cluster.tasks, str(cluster.tasks)):
        key = "gpus_per_node" if cluster.gpus_per_node else "tasks_per_node"
        raise ConfigError(
            f"trainer.devices: expected {cluster.tasks}, which is cluster.{key}, got {trainer.devices}. Drop "
            f"trainer.devices, or change cluster.{key}."
        )
    config.trainer = replace(
        trainer, num_nodes=cluster.nodes, devices=cluster.tasks, accelerator=_accelerator(cluster, trainer.accelerator)
    )


def _accelerator(cluster: ClusterConfig, asked: str) -> str:
    if cluster.gpus_per_node:
        if asked not in GPU_ACCELERATORS:
            raise ConfigError(
                f"trainer.accelerator: expected gpu with cluster.gpus_per_node={cluster.gpus_per_node}, got {asked}. "
                "Drop trainer.accelerator, or give cluster.gpus_per_node=0 cluster.tasks_per_node=..."
            )
        return "gpu"
    if asked not in ("auto", "cpu"):
        raise ConfigError(
            f"trainer.accelerator: expected cpu with cluster.gpus_per_node=0, got {asked}. Drop trainer.accelerator, "
            "or give cluster.gpus_per_node."
        )
    return "cpu"


# -- inside the job ---------------------------------------------------------------------------------------------------


def check_inside(cluster: ClusterConfig) -> None:
    """Refuse a run for a cluster that srun has not started: it would train on the machine of the one who typed it.

    Raises:
        ConfigError: says how it is started.
    """
    found = launched()
    if cluster.name is ClusterName.slurm and (found is None or found.by == "plain"):
        raise ConfigError(
            "cluster=slurm: expected processes that srun has started inside a job, got none. Submit the run by "
            "python -m lightning_zero.submit (a sweep by --multirun hydra/launcher=submitit_slurm), or drop "
            "cluster=slurm."
        )


def slurm_plugins(cluster: ClusterConfig) -> list[SLURMEnvironment]:
    """Lightning's view of the job, listening for the signal that SLURM sends."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    if cluster.name is not ClusterName.slurm:
        return []
    wanted = signal.Signals[f"SIG{cluster.signal}"]
    return [SLURMEnvironment(auto_requeue=cluster.requeue, requeue_signal=wanted)]


@contextlib.contextmanager
def as_trained(trainer: Trainer) -> Iterator[None]:
    """Evaluate the weights that are there: on SLURM Lightning would load the checkpoint of the requeue signal again."""
    connector = trainer._checkpoint_connector
    connector._parse_ckpt_path = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del connector._parse_ckpt_path
