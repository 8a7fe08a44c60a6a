"""The Hydra group ``cluster``: what a run requests from SLURM. Read by ``submit``, by sweeps and inside the job."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from lightning_zero.settings import ConfigError

SIGNALS = ("USR1", "USR2")
SHELLS = ("bash", "interactive")
SECONDS_A_DAY = 24 * 3600


class ClusterName(Enum):
    none = "none"
    slurm = "slurm"


class ContainerRuntime(Enum):
    pyxis = "pyxis"
    apptainer = "apptainer"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Group ``cluster``: nodes, tasks and limits of a job.

    Attributes:
        name: ``slurm``, or ``none`` for runs that are not jobs of a cluster.
        nodes: number of hosts of the job; sets ``trainer.num_nodes``.
        gpus_per_node: number of GPUs of each node; 0 on a CPU cluster.
        tasks_per_node: number of processes on each node; sets ``trainer.devices``. ``None``: one per GPU.
        cpus_per_task: number of cores of each process, for offloaded steps and data loading.
        mem: host memory of each node as SLURM writes it (``500G``); ``0``: all.
        time: time limit, ``hours:minutes:seconds`` or ``days-hours``. A requeued job gets the whole time again.
        partition, account, qos, constraint, reservation: passed to SLURM.
        exclusive: share no node with other jobs.
        job_name: shown by ``squeue``.
        requeue: save and requeue when the time is up; requeue when a task was killed or failed.
        signal: the signal that SLURM sends before the time limit: ``USR1`` or ``USR2``.
        signal_delay: seconds between signal and time limit: enough for a step and a checkpoint.
        retries: how many times in a row a failing job is requeued without a new checkpoint.
        container: image of the tasks: a name or file for pyxis, a ``.sif`` file for apptainer.
        container_runtime: ``pyxis`` (an option of srun) or ``apptainer`` (a command).
        container_mounts: further mounts, ``/outside:/inside``. The working directory is always mounted.
        python: the interpreter. ``None``: the submitting process's interpreter, or ``python`` in the container.
        env: environment variables of the job.
        setup: shell lines before srun, such as ``module load cuda``.
        sbatch, srun: further options of these commands, such as ``--mail-type=END``.
    """

    name: ClusterName = ClusterName.none
    nodes: int = 1
    gpus_per_node: int = 1
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclusive: bool = False
    job_name: str = "lightning_zero"
    requeue: bool = True
    signal: str = "USR1"
    signal_delay: int = 120
    retries: int = 3
    container: str | None = None
    container_runtime: ContainerRuntime = ContainerRuntime.pyxis
    container_mounts: list[str] = field(default_factory=list)
    python: str | None = None
    env: dict[str, Any] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    sbatch: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.signal = self.signal.removeprefix("SIG")
        self._check_used()
        for key in ("nodes", "gpus_per_node", "signal_delay", "retries", "tasks_per_node", "cpus_per_task"):
            bound = 0 if key in ("gpus_per_node", "retries") else 1
            if (value := getattr(self, key)) is not None and value < bound:
                raise ConfigError(f"cluster.{key}: expected a number >= {bound}, got {value}. Change cluster.{key}.")
        if self.signal not in SIGNALS:
            raise ConfigError(
                f"cluster.signal: expected {' or '.join(SIGNALS)}, got {self.signal}. Change cluster.signal."
            )
        self._check_tasks()
        self._check_lines()

    def _check_used(self) -> None:
        if self.name is not ClusterName.none:
            return
        defaults = {f.name: f.default if not callable(f.default_factory) else f.default_factory() for f in fields(self)}
        for key, default in defaults.items():
            if getattr(self, key) != default:
                raise ConfigError(
                    f"cluster.{key} has no effect with cluster=none. Choose cluster=slurm, or drop cluster.{key}."
                )

    def _check_tasks(self) -> None:
        if self.gpus_per_node and self.tasks_per_node not in (None, self.gpus_per_node):
            raise ConfigError(
                f"cluster.tasks_per_node: expected one task for each of {self.gpus_per_node} GPUs, got "
                f"{self.tasks_per_node}. Drop cluster.tasks_per_node, or give cluster.gpus_per_node=0 for CPUs."
            )
        if self.name is ClusterName.slurm and not self.gpus_per_node and self.tasks_per_node is None:
            raise ConfigError(
                "cluster.tasks_per_node: expected the processes of a node with cluster.gpus_per_node=0, got none. "
                "Give cluster.tasks_per_node."
            )
        if self.time is not None and seconds_of(self.time) <= self.signal_delay and self.requeue:
            raise ConfigError(
                f"cluster.time: expected more than cluster.signal_delay ({self.signal_delay} s, in which the run saves "
                f"and leaves), got {self.time}. Raise cluster.time or lower cluster.signal_delay."
            )

    def _check_lines(self) -> None:
        if self.container is None and self.container_mounts:
            raise ConfigError(
                "cluster.container_mounts has no effect without cluster.container. Drop it, or give cluster.container."
            )
        for key in ("sbatch", "srun"):
            for option in getattr(self, key):
                if not option.startswith("-") or "\n" in option:
                    raise ConfigError(
                        f"cluster.{key}: expected options such as --mail-type=END, got {option!r}. "
                        f"Change cluster.{key}."
                    )
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
                raise ConfigError(f"cluster.env: expected names of variables, got {name!r}. Change cluster.env.")
        for key in ("mem", "partition", "account", "qos", "constraint", "reservation", "job_name"):
            value = getattr(self, key)
            if value is not None and (not value.strip() or "\n" in value):
                raise ConfigError(f"cluster.{key}: expected a name or null, got {value!r}. Change cluster.{key}.")

        if self.job_name in SHELLS:
            raise ConfigError(
                f"cluster.job_name: expected another name than {' and '.join(SHELLS)}, which Lightning takes for "
                f"shells that srun has not started, got {self.job_name}. Change cluster.job_name."
            )

    @property
    def tasks(self) -> int:
        return self.tasks_per_node or self.gpus_per_node

    @property
    def world_size(self) -> int:
        return self.nodes * self.tasks


def seconds_of(time: str) -> int:
    """Return ``24:00:00`` or ``2-12:30`` in seconds. Raise ConfigError for any other form.

    Plain numbers are refused: YAML reads an unquoted 24:00:00 as 86400, and SLURM would take that for minutes.
    """
    match = re.fullmatch(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+):(\d+):(\d+))", time.strip())
    if match is None:
        raise ConfigError(
            f"cluster.time: expected hours:minutes:seconds such as 24:00:00 (in quotes in a YAML file) or days-hours "
            f"such as 2-12, got {time}. Change cluster.time."
        )
    days, *first = (int(x or 0) for x in match.groups()[:4])
    hours, minutes, seconds = first if match[1] is not None else (int(x) for x in match.groups()[4:])
    return days * SECONDS_A_DAY + hours * 3600 + minutes * 60 + seconds
