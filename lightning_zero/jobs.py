"""The main job as a job of a cluster: fitted to its allocation, and going on where an earlier stretch ended."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_zero.cluster import ClusterConfig, ClusterName
from lightning_zero.config import ConfigError
from lightning_zero.hydra_schema import TrainConfig

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import SLURMEnvironment

GPU_ACCELERATORS = ("auto", "gpu", "cuda")
INTERACTIVE = ("bash", "interactive")  # names of jobs in which Lightning does not look at SLURM


# -- before the job ---------------------------------------------------------------------------------------------------


def fit_trainer(config: TrainConfig, explicit: set[str]) -> None:
    """Set ``trainer.num_nodes``, ``devices`` and ``accelerator`` as the cluster has them.

    Args:
        explicit: keys that were given on the command line.

    Raises:
        ConfigError: one of them was given and says otherwise.
    """
    cluster, trainer = config.cluster, config.trainer
    if cluster.name is ClusterName.none:
        return
    asked = trainer.num_nodes
    if asked != cluster.nodes and (asked != 1 or "trainer.num_nodes" in explicit):
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


def check_tasks(config: TrainConfig, devices: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Compare what SLURM started with what the run expects, before any process waits for another.

    Args:
        devices: processes of a node, if they are known.

    Raises:
        ConfigError: another number of nodes or tasks, or no job where there should be one.
    """
    cluster = config.cluster
    inside = "SLURM_PROCID" in environ and environ.get("SLURM_JOB_NAME") not in INTERACTIVE
    if "TORCHELASTIC_RUN_ID" in environ or not inside:
        if cluster.name is ClusterName.slurm and "TORCHELASTIC_RUN_ID" not in environ:
            raise ConfigError(
                "cluster=slurm: expected processes that srun has started inside a job, got none. Submit the run by "
                "python -m lightning_zero.submit (a sweep by --multirun hydra/launcher=submitit_slurm), or drop "
                "cluster=slurm."
            )
        return
    of_cluster = cluster.name is ClusterName.slurm
    nodes_key = "cluster.nodes" if of_cluster else "trainer.num_nodes"
    nodes, tasks = (int(environ.get(f"SLURM_{name}", "1")) for name in ("NNODES", "NTASKS"))
    if nodes != config.trainer.num_nodes:
        raise ConfigError(
            f"{nodes_key}: expected {nodes}, the nodes that SLURM has given, got {config.trainer.num_nodes}. Change "
            f"{nodes_key}, or --nodes of sbatch and srun."
        )
    per_node = environ.get("SLURM_NTASKS_PER_NODE")
    if tasks > 1 and per_node is None:
        each = f"={tasks // nodes}" if tasks % nodes == 0 else ""
        raise ConfigError(
            f"srun: expected --ntasks-per-node{each}, got {tasks} tasks without it. Ranks are numbered by node: start "
            f"with srun --nodes={nodes} --ntasks-per-node{each or '=...'}."
        )
    if isinstance(devices, int) and per_node is not None and devices != int(per_node):
        devices_key = "trainer.devices" if not of_cluster else "cluster.gpus_per_node or cluster.tasks_per_node"
        raise ConfigError(
            f"trainer.devices: expected {per_node}, the tasks that SLURM has started on each node, got {devices}. "
            f"Change {devices_key}, or --ntasks-per-node of sbatch and srun."
        )


def slurm_plugins(cluster: ClusterConfig) -> list[SLURMEnvironment]:
    """Lightning's view of the job, listening for the signal that SLURM sends."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    if cluster.name is not ClusterName.slurm:
        return []
    wanted = signal.Signals[f"SIG{cluster.signal}"]
    return [SLURMEnvironment(auto_requeue=cluster.requeue, requeue_signal=wanted)]


# -- after a requeue --------------------------------------------------------------------------------------------------


def restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How many times this job has been back in the queue."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0) if "SLURM_JOB_ID" in environ else 0


def checkpoint_to_resume(
    ckpt_path: str | None, run_dir: str | Path, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Where a run begins: ``ckpt_path``, but the run's own newest checkpoint when its job comes back from the queue.

    Lightning itself takes the checkpoint of the last requeue signal, which may be older than one of ModelCheckpoint,
    and takes ``ckpt_path`` before it, which would begin from the start.
    """
    left_by_signal = "SLURM_JOB_ID" in environ and any(Path(run_dir).glob("hpc_ckpt_*.ckpt"))
    if restarts(environ) or (left_by_signal and ckpt_path is None):
        return newest_checkpoint(run_dir) or ckpt_path
    return ckpt_path


def newest_checkpoint(run_dir: str | Path) -> str | None:
    """The last whole checkpoint below a run folder."""
    found = []
    for path in Path(run_dir).rglob("*.ckpt"):
        if path.exists() and (path.is_dir() or zipfile.is_zipfile(path)):  # a link may dangle, a killed job cut a file
            found.append((path.stat().st_mtime_ns, str(path)))
    return max(found)[1] if found else None


def keep_logs(run_dir: str | Path, environ: Mapping[str, str] = os.environ) -> None:
    """Rename the ``metrics.csv`` of the stretch before: Lightning's logger deletes it when it starts."""
    count = restarts(environ)
    if not count or environ.get("SLURM_PROCID", "0") != "0":
        return
    warnings.filterwarnings("ignore", message=r"Experiment logs directory .* exists and is not empty")
    for path in Path(run_dir).rglob("metrics.csv"):
        path.rename(path.with_name(f"metrics-{count - 1}.csv"))


@contextlib.contextmanager
def as_trained(trainer: Trainer) -> Iterator[None]:
    """Evaluate the weights that are there: on SLURM Lightning would load the checkpoint of the requeue signal again."""
    connector = trainer._checkpoint_connector
    connector._parse_ckpt_path = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del connector._parse_ckpt_path
