"""Run ``lightning_zero.train`` as a job of SLURM: use the job's nodes, save before its time limit, and resume."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightning_zero.app.schema import Task, TrainConfig
from lightning_zero.app.slurm import ClusterConfig, ClusterName
from lightning_zero.app.sweep import overrides_of, quoted
from lightning_zero.ranks.resume import job_name
from lightning_zero.ranks.started_by import launched
from lightning_zero.settings import ConfigError, make_folder

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    from lightning_zero.trainer.strategy import ZeroStrategy

GPU_ACCELERATORS = ("auto", "gpu", "cuda")


# -- before the job ---------------------------------------------------------------------------------------------------


def fit_trainer(config: TrainConfig) -> None:
    """Set the Trainer's nodes, devices and accelerator from ``cluster``. Raise ConfigError if other values are set."""
    cluster, trainer = config.cluster, config.trainer
    if cluster.name is ClusterName.none:
        return
    asked, devices = trainer.get("num_nodes"), trainer.get("devices", "auto")
    if asked not in (None, cluster.nodes):
        raise ConfigError(
            f"trainer.num_nodes: expected {cluster.nodes}, which is cluster.nodes, got {asked}. Drop "
            "trainer.num_nodes, or change cluster.nodes."
        )
    if devices not in ("auto", -1, cluster.tasks, str(cluster.tasks)):
        key = "gpus_per_node" if cluster.gpus_per_node else "tasks_per_node"
        raise ConfigError(
            f"trainer.devices: expected {cluster.tasks}, which is cluster.{key}, got {devices}. Drop "
            f"trainer.devices, or change cluster.{key}."
        )
    accelerator = _accelerator(cluster, trainer.get("accelerator", "auto"))
    config.trainer = trainer | {"num_nodes": cluster.nodes, "devices": cluster.tasks, "accelerator": accelerator}


def _accelerator(cluster: ClusterConfig, asked: str) -> str:
    if cluster.gpus_per_node:
        if asked not in GPU_ACCELERATORS:
            raise ConfigError(
                f"trainer.accelerator: expected gpu with cluster.gpus_per_node={cluster.gpus_per_node}, got {asked}. "
                "Drop trainer.accelerator, or set cluster.gpus_per_node=0 and cluster.tasks_per_node."
            )
        return "gpu"
    if asked not in ("auto", "cpu"):
        raise ConfigError(
            f"trainer.accelerator: expected cpu with cluster.gpus_per_node=0, got {asked}. Drop trainer.accelerator, "
            "or set cluster.gpus_per_node."
        )
    return "cpu"


# -- inside the job ---------------------------------------------------------------------------------------------------


def check_inside(cluster: ClusterConfig) -> None:
    """Raise ConfigError if ``cluster=slurm``, but no launcher such as srun has started this process in a job."""
    found = launched()
    if cluster.name is ClusterName.slurm and (found is None or found.by == "plain"):
        raise ConfigError(
            "cluster=slurm: expected a process that srun has started in a job, got one outside of a job. Submit the "
            "run with python -m lightning_zero.submit (a sweep with --multirun), or drop cluster=slurm."
        )


def slurm_plugins(cluster: ClusterConfig) -> list[SLURMEnvironment]:
    """Return a list with Lightning's SLURM environment, which handles the signal before the time limit; [] without
    SLURM."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    if cluster.name is not ClusterName.slurm:
        return []
    wanted = signal.Signals[f"SIG{cluster.signal}"]
    return [SLURMEnvironment(auto_requeue=cluster.requeue, requeue_signal=wanted)]


@contextlib.contextmanager
def decided(trainer: Trainer, ckpt_path: str | None) -> Iterator[None]:
    """In the body, let the Trainer load ``ckpt_path`` (None: nothing), and never a checkpoint of an earlier SLURM job.
    If the checkpoint is of another model, add the overrides of the run that wrote it to the error."""
    from lightning_zero.trainer.saves.checkpoint_fits import OtherModelError

    connector = trainer._checkpoint_connector
    connector._parse_ckpt_path = lambda *_, **__: ckpt_path  # type: ignore[method-assign]
    try:
        yield
    except OtherModelError as error:
        folders = Path(ckpt_path).absolute().parents[:2] if ckpt_path is not None else ()
        if had := next(filter(None, map(overrides_of, folders)), None):
            error.args = (f"{error} The run that wrote the checkpoint had: {shlex.join(had)}",)
        raise
    finally:
        del connector._parse_ckpt_path


# -- saving and resuming ----------------------------------------------------------------------------------------------


def saves_nothing(config: TrainConfig) -> str | None:
    """Return the setting, as ``key=value``, that disables checkpoints; ``None`` if they are enabled."""
    if config.trainer.get("enable_checkpointing") is False:
        return "trainer.enable_checkpointing=false"
    fast = config.trainer.get("fast_dev_run")
    return f"trainer.fast_dev_run={fast}" if fast else None


def check_saves(config: TrainConfig, explicit: set[str]) -> None:
    """Raise ConfigError if the user gave ``save_minutes`` although checkpoints are disabled."""
    setting = saves_nothing(config)
    if setting is not None and config.save_minutes is not None and "save_minutes" in explicit:
        raise ConfigError(
            f"save_minutes: expected null with {setting}, got {config.save_minutes:g}. Drop save_minutes, or "
            f"{setting.partition('=')[0]}."
        )


def make_folders(config: TrainConfig) -> None:
    """Create the folders of loggers, and of checkpoints if the run saves checkpoints. Raise ConfigError if a folder
    cannot be made."""
    saves = config.task is Task.fit and saves_nothing(config) is None
    for group, key, nodes in (("logger", "save_dir", config.logger), ("callbacks", "dirpath", config.callbacks)):
        for name, node in nodes.items() if saves or group == "logger" else ():
            if isinstance(folder := (node or {}).get(key), str) and not re.search(r"://|\$", folder):
                make_folder(f"{group}.{name}.{key}", folder)


def keep_work(config: TrainConfig, trainer: Trainer) -> None:
    """Make the strategy save on SIGTERM and every ``save_minutes`` minutes, unless checkpoints are disabled."""
    if saves_nothing(config) is None:
        strategy = cast("ZeroStrategy", trainer.strategy)
        strategy.saves_on_sigterm = True
        strategy.run_plan.command_to_go_on = partial(command_to_go_on, sys.argv[1:])
        strategy.save_every_s = 60 * config.save_minutes if config.save_minutes is not None else None


def command_to_go_on(arguments: Sequence[str], path: str) -> str:
    """Return text that says how to resume a run from the checkpoint ``path``: a command, or in a job a sentence.
    ``arguments``: the run's command-line arguments."""
    given = [a for a in arguments if re.split(r"[=@]", a.lstrip("+"))[0] != "ckpt_path"]
    place = launched()
    if job_name() is not None or (place is not None and place.by != "plain"):
        return f"start the same command again with {shlex.quote(f'ckpt_path={quoted(path)}')}"
    return shlex.join(["python", "-m", "lightning_zero.train", *given, f"ckpt_path={quoted(path)}"])


def checkpoint_to_resume(config: TrainConfig, trainer: Trainer) -> str | None:
    """Return the newest checkpoint that an earlier start of this job has written, else ``config.ckpt_path``."""
    from lightning_zero.trainer.saves.kept_files import newest_of_job

    folders = [folder for c in trainer.checkpoint_callbacks if (folder := getattr(c, "dirpath", None))]
    found = newest_of_job(trainer, config.run_dir, folders)
    if found is not None and trainer.is_global_zero:
        keep_metrics(trainer)
    return found or config.ckpt_path


def keep_metrics(trainer: Trainer) -> None:
    """Rename ``metrics.csv`` of an earlier start to ``metrics-<n>.csv``, because Lightning would delete the file."""
    from lightning.pytorch.loggers import CSVLogger

    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            written = Path(logger.log_dir) / "metrics.csv"
            if written.is_file():
                kept = len(list(written.parent.glob("metrics-*.csv")))
                written.rename(written.with_name(f"metrics-{kept + 1}.csv"))
