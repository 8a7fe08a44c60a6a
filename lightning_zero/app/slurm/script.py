"""Write the script of a SLURM job as text. Nothing is submitted."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_zero.app.slurm.cluster import ClusterConfig, ContainerRuntime
from lightning_zero.ranks.resume import OUTCOME_VARIABLE, RAISED, REFUSED, REQUEUE, RUN_DIR_VARIABLE

RUN_DIR = "outputs/train/slurm-$SLURM_JOB_ID"


def script(
    cluster: ClusterConfig, arguments: Sequence[str], *, folder: Path, run_dir: str | None = None, own: bool = False
) -> str:
    """Return the text of an sbatch script that runs the main job, or a command of the user's own.

    Args:
        arguments: arguments of ``python -m lightning_zero.train``, or the words of the command.
        folder: working directory of the job.
        run_dir: the run's folder. The default has the job's id in its name, so that a requeued job finds it again.
        own: whether ``arguments`` are a command of the user's own, which gets the folder in an environment variable.
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
    """Return ``value``, quoted for an ``#SBATCH`` line if needed. sbatch parses such lines, and not the shell."""
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
    """Return ``text`` as one word for the shell, quoted if needed; in double quotes if it has single quotes in it."""
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
    """Return shell lines that requeue the job if its time was up or it failed. The file ``outcome`` says which."""
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
