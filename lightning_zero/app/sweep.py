"""Run sweeps: each job as its own command or SLURM job, and a table of the results at the end.

Hydra's basic launcher runs all jobs in one process, and ranks that Lightning starts there would run the whole sweep
again. If each job has its own process, it may have any number of ranks, and its failure does not stop the other jobs.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_zero.app import slurm
from lightning_zero.app.slurm import ClusterConfig, ClusterName
from lightning_zero.settings import ConfigError

RESULTS = "results.json"  # written by report/results.py
OF_THE_SWEEP = r"hydra/launcher|hydra/sweeper|hydra\.(sweep|sweeper|launcher|mode|run|callbacks)\b"

failed: list[int] = []  # numbers of the failed jobs


def check_packages(arguments: Sequence[str]) -> None:
    """Raise ConfigError if ``arguments`` choose submitit's launcher, or optuna's sweeper while it is not installed."""
    asked = {a.lstrip("+") for a in arguments}
    wants_optuna = asked & {"hparams_search=optuna", "hydra/sweeper=optuna"}
    if wants_optuna and importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        raise ConfigError(
            "hparams_search=optuna: expected the package hydra-optuna-sweeper, which is not installed. Run pip install "
            "'lightning-zero[search]', or choose hparams_search=grid."
        )
    if launcher := next((a for a in asked if a.startswith("hydra/launcher=submitit")), None):
        raise ConfigError(
            f"{launcher}: expected the launcher of this package, which submits each run of a sweep with cluster=slurm. "
            f"Drop {launcher}."
        )


def job_arguments(overrides: Sequence[str], hydra_overrides: Sequence[str]) -> list[str]:
    """Return the command-line arguments of one job of a sweep, without the sweep's own options and the run folder."""
    kept = [o for o in hydra_overrides if not re.match(OF_THE_SWEEP, o.lstrip("+~"))]
    return [*overrides, *kept, "hydra.mode=RUN"]


def submit_job(cluster: ClusterConfig, arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Submit a job to SLURM. Return the sbatch process, which waits for the job and exits with the job's exit code.
    Raise ConfigError if there is no sbatch."""
    text = slurm.script(cluster, arguments, folder=Path.cwd(), run_dir=str(folder))
    try:
        process = subprocess.Popen(["sbatch", "--parsable", "--wait"], stdin=subprocess.PIPE, text=True)
    except OSError as error:
        raise ConfigError(
            f"sbatch: expected the command on PATH, got: {error.strerror}. Start the sweep on a machine of the "
            "cluster, or drop cluster=slurm."
        ) from None
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(text)
    return process


def quoted(value: str) -> str:
    """Return ``value``, quoted for a Hydra override if needed."""
    if re.fullmatch(r"[\w./:+-]+", value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def run_jobs(config: DictConfig, loader: Any, jobs: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """Run a sweep's jobs and return their results. On this machine they run one by one, under SLURM at the same time.

    Args:
        config: the sweep's configuration.
        loader: Hydra's config loader.
        jobs: the overrides of each job.
        first: number of the first job.
    """
    started: list[tuple[subprocess.Popen[str], Path, JobReturn]] = []
    for number, overrides in enumerate(jobs, start=first):
        job = loader.load_sweep_config(config, list(overrides))
        with open_dict(job):
            job.hydra.job.id = job.hydra.job.num = number
        folder = Path(str(job.hydra.sweep.dir), str(job.hydra.sweep.subdir)).absolute()
        print(f"\n=== run {number}: {shlex.join(overrides)}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS).unlink(missing_ok=True)
        arguments = job_arguments(overrides, list(config.hydra.overrides.hydra))
        cluster = OmegaConf.to_object(job.cluster) if job.get("cluster") is not None else None
        if isinstance(cluster, ClusterConfig) and cluster.name is ClusterName.slurm:
            process = submit_job(cluster, arguments, folder)
        else:
            command = [sys.executable, "-m", "lightning_zero.train", *arguments, f"hydra.run.dir={quoted(str(folder))}"]
            environ = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
            process = subprocess.Popen(command, env=environ, text=True)
            process.wait()
        result = JobReturn(overrides=list(overrides), cfg=job, hydra_cfg=job, status=JobStatus.COMPLETED)
        started.append((process, folder, result))
    for number, (process, folder, result) in enumerate(started, start=first):
        if status := process.wait():
            failed.append(number)
            print(f"=== run {number} has failed, with exit status {status}", flush=True)
        name = OmegaConf.select(config, "optimized_metric")
        # NaN for a failed job, so that the sweep continues
        result.return_value = (read_results(folder).get("metrics") or {}).get(name, math.nan)
    return [result for _, _, result in started]


def read_results(folder: Path) -> dict[str, Any]:
    """Return the content of the results file in a run folder; an empty dictionary if the run has not written one."""
    try:
        found: dict[str, Any] = json.loads((folder / RESULTS).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found


class SweepTable(Callback):
    """Prints the swept values and metrics of all runs at the end of a sweep, best run first."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(str(config.hydra.sweep.dir))
        found = sorted(folder.glob("*"), key=lambda f: (int(f.name) if f.name.isdigit() else sys.maxsize, f.name))
        runs = [f for f in found if (f / ".hydra").is_dir() or (f / RESULTS).is_file()]
        if runs:
            metric = OmegaConf.select(config, "optimized_metric")
            print_table(folder, runs, metric, str(OmegaConf.select(config, "hydra.sweeper.direction") or "minimize"))


class RunFolder(Callback):
    """Notes which folders Hydra creates for a run, so that they can be removed if the command is refused."""

    made: ClassVar[list[Path]] = []

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(str(config.hydra.run.dir)).absolute()
        RunFolder.made[:] = [path for path in (folder, *folder.parents) if not path.exists()]

    @staticmethod
    def remove() -> None:
        """Remove the folders that Hydra has created for this run, if they contain only Hydra's own files and logs."""
        for folder in RunFolder.made[:1]:
            inside = [file for file in folder.rglob("*") if not file.is_dir()]
            if all(file.parent.name == ".hydra" or file.suffix == ".log" for file in inside):
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run may be inside by now
            for parent in RunFolder.made[1:]:
                parent.rmdir()
        RunFolder.made.clear()


def overrides_of(run: Path) -> list[str]:
    """Return the overrides of the run in the folder ``run``; ``[]`` if the folder has no record of them."""
    file = run / ".hydra" / "overrides.yaml"
    return [str(o) for o in OmegaConf.load(file)] if file.is_file() else []


def print_table(folder: Path, runs: Sequence[Path], metric: str | None, direction: str) -> None:
    """Print the results in the folders ``runs`` as a table, and write them to ``sweep.csv``.

    ``metric``: the metric to sort by; ``None``: keep the order. ``direction``: ``minimize`` or ``maximize``.
    """
    from rich.console import Console
    from rich.table import Table

    found = [(run, overrides_of(run), read_results(run).get("metrics")) for run in runs]
    everywhere = set.intersection(*(set(overrides) for _, overrides, _ in found))
    names = sorted({name for _, _, metrics in found for name in metrics or ()}, key=lambda name: (name != metric, name))
    if metric is not None:
        sign = -1 if direction == "maximize" else 1
        found.sort(key=lambda row: sign * row[2][metric] if row[2] and metric in row[2] else math.inf)
    columns = ("run", "overrides", *names)
    rows: list[tuple[Any, ...]] = []
    for run, overrides, metrics in found:
        swept = [o for o in overrides if o not in everywhere] + ["(failed)"] * (metrics is None)
        rows.append((run.name, " ".join(swept), *((metrics or {}).get(name) for name in names)))
    table = Table(title=f"sweep: {os.path.relpath(folder)}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "overrides" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row[:2], *("-" if value is None else f"{value:.4f}" for value in row[2:]))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    with (folder / "sweep.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    print(f"the table: {os.path.relpath(folder / 'sweep.csv')}")
