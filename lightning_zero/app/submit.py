"""Submit a run to SLURM: ``python -m lightning_zero.submit [group=file] [key=value] [cluster.nodes=4 ...]``.

Checks the configuration and the memory plan, writes an sbatch script and submits it. Prints job id, folder and log.
``python -m lightning_zero.submit [cluster.nodes=4 ...] -- python train.py ...`` submits any command in the same way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_zero.app import slurm, train
from lightning_zero.app.jobs import check_saves, fit_trainer
from lightning_zero.app.overrides import check_keys
from lightning_zero.app.parts import agreed_precision, build_data, check_data, check_packages
from lightning_zero.app.plan_output import advice_lines, after_run_line, short_bytes
from lightning_zero.app.schema import MachineConfig, TrainConfig
from lightning_zero.app.slurm import ClusterConfig, ClusterName
from lightning_zero.planning.choose import choose_row
from lightning_zero.planning.fit import Advice, Machine, advise, plan_row
from lightning_zero.planning.placement import Tier
from lightning_zero.planning.speed import CPU_RATES, GPU_RATES
from lightning_zero.settings import (
    ConfigError,
    HybridShard,
    OffloadConfig,
    PrecisionConfig,
    allowed_rows,
    candidate_rows,
    is_decided,
)

EXTRA_KEYS = ("machine", "dry_run")
PLENTY = 2**60  # bytes to assume for a memory of unknown size
RUN_DIR_KEY = "hydra.run.dir="
# Keys that have an effect on a job that runs the user's own command.
OWN_KEYS = r"cluster(\.(?!python$).*)?|machine(\.(gpus|nodes))?|dry_run|hydra\.mode"
LAUNCHERS = ("srun", "torchrun", "mpirun", "mpiexec")

NO_CPUS = (
    "cluster.cpus_per_task is not set: unless the site has another default, SLURM gives each rank one core, which its "
    "data loader workers, offloaded steps and messages share. Set cluster.cpus_per_task."
)
# Words in errors of sbatch, and the key to change.
REFUSALS = {
    "partition": "cluster.partition",
    "qos": "cluster.qos",
    "account": "cluster.account",
    "time": "cluster.time",
    "feature": "cluster.constraint",
    "reservation": "cluster.reservation",
    "memory": "cluster.mem",
    "gres": "cluster.gpus_per_node",
    "tres": "cluster.gpus_per_node",
    "cpu count": "cluster.cpus_per_task",
    "processors": "cluster.nodes, cluster.gpus_per_node, cluster.tasks_per_node or cluster.cpus_per_task",
    "node count": "cluster.nodes",
    "node configuration": "cluster.nodes, cluster.gpus_per_node, cluster.cpus_per_task or cluster.mem",
}

# -- checks -----------------------------------------------------------------------------------------------------------


def check_run(config: TrainConfig, explicit: set[str]) -> None:
    """Raise ConfigError if ``lightning_zero.train`` would raise one in the job. This machine need not have the job's
    devices."""
    check_packages(config, "model", "data")
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from lightning_zero.trainer.memory.activations import quiet

    train.check_checkpoint(config.ckpt_path)
    train.check_task(config)
    agreed_precision(config)
    check_saves(config, explicit)
    # Check callbacks and Trainer arguments on the devices of this machine, without fp16 (no CPU supports it) and
    # without the folder for offloaded files, which may exist on the nodes only.
    offload = config.zero.offload
    if offload.nvme_path is not None:
        offload = replace(offload, nvme_path=os.curdir)
    zero = replace(config.zero, precision=PrecisionConfig(), offload=offload, sequence_parallel=1)
    trial = config.trainer | {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "precision": None}
    with quiet(logging.INFO), contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        # Messages about this machine's devices do not apply to the job, and stdout is for the script.
        warnings.filterwarnings("ignore", message="The `srun` command is available")  # true for the job only
        data = build_data(config, explicit)
        check_data(config, data, config.cluster.world_size)
        train.build_trainer(replace(config, zero=zero, trainer=trial), plugins=[LightningEnvironment()])


def machine_of(cluster: ClusterConfig, asked: MachineConfig, hybrid_shard: HybridShard = HybridShard.auto) -> Machine:
    """Return the cluster's nodes as a machine for the memory plan. A memory of unknown size counts as unlimited.

    Raises ConfigError if ``asked`` (``machine.*``) has fewer GPUs or nodes than ``cluster`` requests.
    """
    for key, of_cluster in (("gpus", cluster.gpus_per_node), ("nodes", cluster.nodes)):
        there = getattr(asked, key)
        if there is not None and there < of_cluster:
            name = "gpus_per_node" if key == "gpus" else key
            raise ConfigError(
                f"cluster.{name}: expected at most {there}, which is machine.{key}, got {of_cluster}. Change "
                f"cluster.{name} or machine.{key}."
            )
    host = asked.host_memory if asked.host_memory is not None else slurm_memory(cluster.mem)
    memory, host, nvme = (PLENTY if x is None else x for x in (asked.gpu_memory, host, asked.nvme))
    shared = not cluster.gpus_per_node
    return Machine(cluster.tasks, memory, host, nvme, cluster.nodes, shared=shared, hybrid_shard=hybrid_shard)


def slurm_memory(mem: str | None) -> int | None:
    """Return ``cluster.mem`` in bytes. Return None if it is not set, is 0 (all of a node's memory), or has a form that
    only SLURM reads."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", (mem or "").upper())
    if match is None or not int(match[1]):
        return None
    return int(match[1]) * 1024 ** ("KMGT".index(match[2] or "M") + 1)


def check_memory(config: TrainConfig, asked: MachineConfig) -> str:
    """Return text about the memory that the plan predicts for the run. Raise ConfigError if the run does not fit."""
    from lightning_zero.app.plan_model import describe

    model = describe(config, train.explicit_keys()).model
    machine = machine_of(config.cluster, asked, config.zero.hybrid_shard)
    settings = config.zero.offload
    if not is_decided(config.zero):
        candidates = [(stage, row.name, row) for stage, row in candidate_rows(config.zero)]
        choice = choose_row(model, machine, candidates, CPU_RATES if machine.shared else GPU_RATES)
        after = after_run_line(model, [choice.row])
        return f"{choice.rows}, if there is enough memory for activations too: {choice.reason}. {after}"
    chosen = plan_row(model, config.zero.stage.name, settings.name, machine, settings)
    if not chosen.fits:
        rows = [
            plan_row(model, stage, row, machine, OffloadConfig()) for stage, row in allowed_rows(machine.hybrid_shard)
        ]
        advice: Advice = advise(model, chosen, machine, settings, rows)
        raise ConfigError(
            f"the run does not fit into the memory of machine.*: {advice_lines(machine, [chosen], [advice])[0]}. "
            "Change cluster.nodes, zero/offload or machine.*; python -m lightning_zero.plan shows all possible choices."
        )
    tiers: tuple[tuple[str, int, int], ...] = (
        ("each GPU", chosen.per_rank[Tier.device], machine.gpu_memory),
        ("each host", chosen.per_host[Tier.host], machine.host_memory),
        ("its disk", chosen.per_host[Tier.nvme], machine.nvme),
    )
    if machine.shared:
        tiers = (("each host", chosen.together, machine.host_memory), tiers[2])
    parts = [
        f"{short_bytes(need)} of {'an unknown size' if there == PLENTY else short_bytes(there)} on {where}"
        for where, need, there in tiers
        if need
    ]
    unknown = any(need and there == PLENTY for _, need, there in tiers)
    hint = "; set machine=... or machine.* to check the memory" if unknown else ""
    return f"memory without activations: {', '.join(parts)}{hint}. {after_run_line(model, [chosen])}"


def check_command(command: Sequence[str], cluster: ClusterConfig) -> None:
    """Raise ConfigError if a setting has no effect on ``command``, or if srun cannot start it once for each rank."""
    overrides = HydraConfig.get().overrides
    for override in (*overrides.task, *overrides.hydra):
        key = re.split(r"[=@]", override.lstrip("+~"))[0]
        if not re.fullmatch(OWN_KEYS, key):
            raise ConfigError(
                f"{key} has no effect on a command after --: expected cluster.*, machine.gpus, machine.nodes, dry_run "
                f"or hydra.run.dir before --, got {override}. Drop {key}, or pass {key} to the command."
            )
    if not command or Path(command[0]).name in LAUNCHERS:
        got = command[0] if command else "nothing"
        raise ConfigError(
            f"--: expected a command that srun can start {cluster.tasks} time(s) on each node, once for each rank, "
            f"such as python train.py, got {got}. Change the command after --."
        )


# -- the job ----------------------------------------------------------------------------------------------------------


def job_arguments(choices: dict[str, str]) -> list[str]:
    """Return the job's arguments for ``lightning_zero.train``: those of this command, without keys that only ``submit``
    has."""
    overrides = HydraConfig.get().overrides
    ours = re.compile(rf"[+~]*({'|'.join(EXTRA_KEYS)})([.=@]|$)")
    found = [o for o in overrides.task if not ours.match(o)]
    if not any(re.match(r"\+?cluster=", o) for o in found):
        found.insert(0, f"cluster={choices['cluster']}")
    given = get_args_parser().parse_args(sys.argv[1:])
    if given.config_dir:
        found = ["--config-dir", os.path.abspath(given.config_dir), *found]
    return [*found, *(o for o in overrides.hydra if not re.match(r"[+~]*hydra\.(run\.dir|mode)=", o))]


def submit(text: str) -> str:
    """Submit the script by sbatch and return the job's id. Raises ConfigError if sbatch is missing or refuses."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(
            f"sbatch: expected the command on PATH, got: {error.strerror}. Submit from a machine of the cluster, or "
            "set dry_run=true to print the script."
        ) from None
    if done.returncode:
        answer = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
        keys = [key for word, key in REFUSALS.items() if word in answer.lower()]
        raise ConfigError(f"sbatch refuses the job: {answer}. Change {keys[0] if keys else 'cluster.*'}.")
    return done.stdout.strip().splitlines()[-1].partition(";")[0]  # job;cluster


def run(
    config: TrainConfig,
    asked: MachineConfig,
    arguments: list[str],
    *,
    run_dir: str | None,
    dry_run: bool,
    own: bool = False,
) -> None:
    """Check the run, print its script and, unless ``dry_run``, submit it. ``own``: whether ``arguments`` are the user's
    own command, whose model, data and memory cannot be checked."""
    cluster = config.cluster
    if cluster.name is ClusterName.none:
        raise ConfigError("cluster: expected a cluster to submit to, got none. Set cluster=slurm.")
    if own:
        check_command(arguments, cluster)
        machine_of(cluster, asked)
        said = []
    else:
        fit_trainer(config)
        check_run(config, train.explicit_keys())
        said = [check_memory(config, asked)]
    if cluster.cpus_per_task is None and not any("--cpus-per" in option for option in cluster.sbatch):
        said.append(NO_CPUS)
    text = slurm.script(cluster, arguments, folder=Path.cwd(), run_dir=run_dir, own=own)
    os.makedirs(os.path.dirname(slurm.log_path(run_dir)), exist_ok=True)  # SLURM does not; the job would die silently
    if dry_run:
        print(text, end="")
        print(*said, "not submitted: dry_run=true", sep="\n", file=sys.stderr)
        return
    print(text, *said, sep="\n")
    job = submit(text)
    folder = run_dir or slurm.RUN_DIR.replace("$SLURM_JOB_ID", job)
    print(f"job: {job}\nrun folder: {folder}\nlog: {slurm.log_path(run_dir, job)}", flush=True)


@hydra.main(version_base="1.3", config_path="pkg://lightning_zero.conf.app", config_name="submit")
def _task(cfg: DictConfig) -> None:
    with train.refusals():
        OmegaConf.set_struct(cfg, False)
        check_keys(cfg.machine, "machine.")
        asked: Any = OmegaConf.to_object(cfg.machine)
        dry_run = bool(cfg["dry_run"])
        for key in EXTRA_KEYS:
            del cfg[key]
        if _command is not None:
            config, arguments = TrainConfig(cluster=OmegaConf.to_object(cfg.cluster)), _command  # type: ignore[arg-type]
        else:
            arguments = job_arguments(dict(HydraConfig.get().runtime.choices))
            config = train.train_config(cfg)
        run(config, asked, arguments, run_dir=_given_run_dir, dry_run=dry_run, own=_command is not None)


_given_run_dir: str | None = None  # run folder of the job, not of this command
_command: list[str] | None = None  # of the user's own; None: the main job


def main() -> None:
    global _command, _given_run_dir
    _command = None
    if "--" in sys.argv:
        at = sys.argv.index("--")
        _command, sys.argv[at:] = sys.argv[at + 1 :], []
    found = [a for a in sys.argv[1:] if a.startswith(RUN_DIR_KEY)]
    _given_run_dir = found[-1].removeprefix(RUN_DIR_KEY).strip("'\"") if found else None
    sys.argv[1:] = [a for a in sys.argv[1:] if not a.startswith(RUN_DIR_KEY)]
    if {"-m", "--multirun"} & set(sys.argv[1:]):
        print(
            "error: --multirun: expected one run, got a sweep. Start sweeps with python -m lightning_zero.train "
            "--multirun cluster=slurm ...",
            file=sys.stderr,
        )
        raise SystemExit(2)
    train.start(_task, "submit")
