"""The Hydra group ``cluster``, which says what a run requests from SLURM, and the scripts of SLURM jobs."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from lightning_zero.ranks.resume import OUTCOME_VARIABLE, RAISED, REFUSED, REQUEUE, RUN_DIR_VARIABLE
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
        cpus_per_task: number of cores of each process, for offloaded steps and data loading. ``None``: SLURM's default.
        mem: host memory of each node as SLURM writes it (``500G``); ``0``: all.
        time: time limit, ``hours:minutes:seconds`` or ``days-hours``. A requeued job gets the whole time again.
        partition, account, qos, constraint, reservation: passed to SLURM.
        exclusive: share no node with other jobs.
        job_name: shown by ``squeue``.
        requeue: save and requeue when the time is up; requeue also if a task was killed or failed.
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
                f"{self.tasks_per_node}. Drop cluster.tasks_per_node, or set cluster.gpus_per_node=0 for CPUs."
            )
        if self.name is ClusterName.slurm and not self.gpus_per_node and self.tasks_per_node is None:
            raise ConfigError(
                "cluster.tasks_per_node: expected the number of processes of a node with cluster.gpus_per_node=0, got "
                "none. Set cluster.tasks_per_node."
            )
        if self.time is not None and seconds_of(self.time) <= self.signal_delay and self.requeue:
            raise ConfigError(
                f"cluster.time: expected more than cluster.signal_delay ({self.signal_delay} s, in which the run saves "
                f"a checkpoint and exits), got {self.time}. Raise cluster.time or lower cluster.signal_delay."
            )

    def _check_lines(self) -> None:
        if self.container is None and self.container_mounts:
            raise ConfigError(
                "cluster.container_mounts has no effect without cluster.container. Drop cluster.container_mounts, or "
                "set cluster.container."
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
                f"cluster.job_name: expected another name than {' and '.join(SHELLS)}, by which Lightning recognizes "
                f"shells that srun has not started, got {self.job_name}. Change cluster.job_name."
            )

    @property
    def tasks(self) -> int:
        return self.tasks_per_node or self.gpus_per_node

    @property
    def world_size(self) -> int:
        return self.nodes * self.tasks


def seconds_of(time: str) -> int:
    """Return a time such as ``24:00:00`` or ``2-12:30`` in seconds. Raise ConfigError for any other form.

    Plain numbers are refused, because YAML reads an unquoted 24:00:00 as 86400, which SLURM would take for minutes.
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


# -- the script of a job ----------------------------------------------------------------------------------------------

RUN_DIR = "outputs/train/slurm-$SLURM_JOB_ID"


def script(
    cluster: ClusterConfig, arguments: Sequence[str], *, folder: Path, run_dir: str | None = None, own: bool = False
) -> str:
    """Return the text of an sbatch script that runs ``lightning_zero.train`` or the user's own command.

    Args:
        arguments: arguments of ``python -m lightning_zero.train``, or the words of the command.
        folder: working directory of the job.
        run_dir: the run's folder. The default has the job's id in its name, so that a requeued job finds it again.
        own: whether ``arguments`` are the user's own command, which gets the folder in an environment variable.
    """
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in cluster.env.items()]
    begin = [f'run_dir="{RUN_DIR}"' if run_dir is None else f"run_dir={shlex.quote(run_dir)}", 'mkdir -p "$run_dir"']
    here = "" if run_dir is not None and os.path.isabs(run_dir) else "$PWD/"  # the run may change directory
    if own:
        begin += [f'export {RUN_DIR_VARIABLE}="{here}$run_dir"']
    if cluster.requeue:
        begin += [f'rm -f "$run_dir/outcome" "$run_dir/{RAISED}"*', 'touch "$run_dir/started"']
        begin += [f'export {OUTCOME_VARIABLE}="{here}$run_dir/outcome"']
    parts = [
        "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options(cluster, folder, run_dir))]),
        "\n".join([*exports, *cluster.setup]),
        "\n".join(begin),
        command(cluster, arguments, folder, own=own),
        requeue_lines(cluster) if cluster.requeue else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def options(cluster: ClusterConfig, folder: Path, run_dir: str | None) -> list[str]:
    """Return the options of sbatch, each as ``--name=value`` or ``--name``."""
    wanted = {  # True: an option without a value; None: left out
        "job-name": cluster.job_name,
        "nodes": cluster.nodes,
        "ntasks-per-node": cluster.tasks,
        "gpus-per-node": cluster.gpus_per_node or None,
        "cpus-per-task": cluster.cpus_per_task,
        "mem": cluster.mem,
        "time": cluster.time,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "reservation": cluster.reservation,
        "chdir": str(folder),
        "output": log_path(run_dir),
        "open-mode": "append",
        "signal": f"{cluster.signal}@{cluster.signal_delay}" if cluster.requeue else None,
        "exclusive": cluster.exclusive or None,
        "requeue" if cluster.requeue else "no-requeue": True,
    }
    lines = [
        f"--{name}" if value is True else f"--{name}={_quoted(value)}"
        for name, value in wanted.items()
        if value is not None
    ]
    return [*lines, *cluster.sbatch]


def log_path(run_dir: str | None, job: str = "%j") -> str:
    """Return the path of SLURM's log: in ``run_dir``, or beside the default run folder, which the job makes later."""
    return os.path.join(run_dir or os.path.dirname(RUN_DIR), f"slurm-{job}.log")


def _quoted(value: object) -> str:
    """Return ``value``, quoted for an ``#SBATCH`` line if needed. sbatch, not the shell, parses such lines."""
    text = str(value)
    return text if re.fullmatch(r"[\w./:@%+,=&|\[\]-]+", text) else '"' + text.replace('"', '\\"') + '"'


def command(cluster: ClusterConfig, arguments: Sequence[str], folder: Path, *, own: bool = False) -> str:
    """Return the shell command, on several lines, that starts the run by srun."""
    srun = ["srun", "--kill-on-bad-exit=1"]
    if cluster.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={cluster.cpus_per_task}")  # srun does not inherit it from sbatch
    lines = [" ".join([*srun, *map(shlex.quote, cluster.srun)])]
    lines += _container(cluster, folder)
    if own:
        return " \\\n    ".join([*lines, shlex.join(arguments)])
    python = cluster.python or ("python" if cluster.container else sys.executable)
    lines += [f"{shlex.quote(python)} -m lightning_zero.train", "\"hydra.run.dir='$run_dir'\""]
    lines += map(_word, arguments)
    return " \\\n    ".join(lines)


def _word(text: str) -> str:
    """Return ``text`` as one word for the shell, quoted if needed: in double quotes if it contains single quotes."""
    plain = re.fullmatch(r"[\w./:@%+,=-]+", text)  # shlex would quote = too
    return text if plain else f'"{text}"' if "'" in text and not re.search(r'["$`\\!]', text) else shlex.quote(text)


def _container(cluster: ClusterConfig, folder: Path) -> list[str]:
    if cluster.container is None:
        return []
    image, here = shlex.quote(cluster.container), shlex.quote(str(folder))
    mounts = ",".join([f"{folder}:{folder}", *cluster.container_mounts])
    if cluster.container_runtime is ContainerRuntime.pyxis:
        return [f"--container-image={image}", f"--container-mounts={shlex.quote(mounts)} --container-workdir={here}"]
    gpus = "--nv " if cluster.gpus_per_node else ""
    return [f"apptainer exec {gpus}--bind {shlex.quote(mounts)} --pwd {here} {image}"]


def requeue_lines(cluster: ClusterConfig) -> str:
    """Return shell lines that requeue the job if it failed, or if its time was up according to the file ``outcome``."""
    lines = ["code=$?", 'outcome=$(cat "$run_dir/outcome" 2>/dev/null)', ""]
    lines += ["# The time is up, and the ranks have saved and left.", f'if [ "$outcome" = {REQUEUE} ]; then']
    lines += ['    scontrol requeue "$SLURM_JOB_ID"']
    if cluster.retries:
        lines.insert(2, f'raised=$(ls "$run_dir" | grep -c "^{RAISED}")')
        lines.insert(3, 'trained=$(find "$run_dir" -name "*.ckpt" | head -1)')
        some = f'{{ [ "$raised" -lt {cluster.world_size} ] || [ -n "$trained" ]; }}'
        lines += [
            f"# A task was killed or failed: at most {cluster.retries} times without a new checkpoint, and never if",
            "# all tasks have raised an error before the first step of the job: they would again.",
            f'elif [ $code -ne 0 ] && [ "$outcome" != {REFUSED} ] && {some}; then',
            '    new=$(find "$run_dir" -name "*.ckpt" -newer "$run_dir/started" | head -1)',
            '    if [ -n "$new" ]; then rm -f "$run_dir/failures"; fi',
            '    echo "$(date): exit code $code on $SLURM_JOB_NODELIST" >>"$run_dir/failures"',
            f'    if [ "$(wc -l <"$run_dir/failures")" -le {cluster.retries} ]; then',
            '        scontrol requeue "$SLURM_JOB_ID"',
            "    fi",
        ]
    return "\n".join([*lines, "fi", "exit $code"])
