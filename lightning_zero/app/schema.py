"""The typed schema of our own commands. Imports no torch, so that mistakes are reported at once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import Enum
from importlib import resources
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import BooleanNode, IntegerNode, OmegaConf, StringNode

from lightning_zero.app.slurm import ClusterConfig
from lightning_zero.planning.speed import Rates
from lightning_zero.ranks.resume import job_name
from lightning_zero.settings import ConfigError, ZeroConfig, change, parse_bytes
from lightning_zero.settings.names import positive

TRAIN_SCHEMA = "lightning_zero_train"
PLAN_SCHEMA = "lightning_zero_plan"
SUBMIT_SCHEMA = "lightning_zero_submit"
RUN_NAME_RESOLVER = "lightning_zero_run_name"


class Task(Enum):
    """What a run does: one of the Trainer's methods."""

    fit = "fit"
    validate = "validate"
    test = "test"
    predict = "predict"


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The settings of ``conf/train.yaml``. Groups that may hold a user's own class are plain mappings."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    task: Task = Task.fit
    tags: list[str] = field(default_factory=list)
    optimized_metric: str | None = None
    seed: int = 0
    ckpt_path: str | None = None
    weights_only: bool = True
    save_minutes: float | None = 30.0
    run_dir: str = "."

    def __post_init__(self) -> None:
        if self.save_minutes is not None and not self.save_minutes > 0:
            raise ConfigError(
                f"save_minutes: expected a number > 0, or null, got {self.save_minutes}. Change save_minutes."
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed: expected a number from 0 to 2**32 - 1, got {self.seed}. Change seed.")


RATES = [rate.name for rate in fields(Rates)]


@dataclass(kw_only=True, slots=True)
class MachineConfig:
    """The machine that a memory plan is for. ``None``: take the value from this machine.

    Attributes:
        gpus: number of GPUs per host.
        gpu_memory: bytes of one GPU, such as ``80GB``, ``80GiB`` or a number.
        host_memory: bytes of one host's memory.
        nvme: bytes of one host's disk.
        nodes: number of hosts.
        rates: what one rank reaches per second, by the names of :class:`~lightning_zero.planning.speed.Rates`: bytes
            such as ``50GB``, and FLOPs for ``compute``. Missing rates are assumed.
    """

    gpus: int | None = None
    gpu_memory: Any = None
    host_memory: Any = None
    nvme: Any = None
    nodes: int | None = None
    rates: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.rates.items():
            key = f"machine.rates.{name}"
            if name not in RATES:
                raise ConfigError(
                    f"{key}: no such rate; there are {', '.join(RATES)}. {change('machine.rates.', name, RATES)}"
                )
            if value is not None:
                self.rates[name] = value if isinstance(value, float) else float(parse_bytes(key, value))
                positive(key, self.rates[name])
        for key in ("gpus", "nodes"):
            if (value := getattr(self, key)) is not None:
                positive(f"machine.{key}", value)
        for key in ("gpu_memory", "host_memory", "nvme"):
            value = getattr(self, key)
            if value is not None:
                setattr(self, key, parse_bytes(f"machine.{key}", value))


def named_machine(name: str) -> dict[str, Any]:
    """Return the values of a choice of the group ``machine``. Raise ConfigError if there is no such choice."""
    folder = resources.files("lightning_zero.conf") / "app" / "machine"
    known = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir())
    if name not in known:
        raise ConfigError(
            f"machine: expected one of {', '.join(known)}, or a mapping of its memory and numbers of GPUs and nodes, "
            f"got {name!r}. {change('machine=', str(name), known, 'machine')}"
        )
    found: Any = OmegaConf.to_container(OmegaConf.create((folder / f"{name}.yaml").read_text()))
    return dict(found)


def run_name() -> str:
    """Return a run folder's name. In a job it is the job's name, which stays the same after a restart; otherwise it is
    date and time."""
    return job_name() or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"


def register_schema() -> None:
    """Register the schema of our own commands, their launcher and a resolver with Hydra. Another call changes nothing.

    The schema of the group ``zero``, which every app may compose, is registered by the Hydra plugin.
    """
    store = ConfigStore.instance()
    store.store(name=TRAIN_SCHEMA, node=TrainConfig, provider="lightning_zero")
    # Settings of a plan beside those of a run; train.yaml is merged in.
    plan = {
        "machine": MachineConfig,
        "json": BooleanNode(False),
        "optimizer_states": IntegerNode(None),
        "activations": BooleanNode(True),
        "picture": StringNode(None),
    }
    store.store(name=PLAN_SCHEMA, node=plan, provider="lightning_zero")
    submit = {"machine": MachineConfig, "dry_run": BooleanNode(False)}
    store.store(name=SUBMIT_SCHEMA, node=submit, provider="lightning_zero")
    # Run each job of a sweep in its own process: lightning_zero/app/sweep.py.
    processes = {"_target_": "hydra_plugins.lightning_zero_plugin.ProcessLauncher"}
    store.store(group="hydra/launcher", name="processes", node=processes, provider="lightning_zero")
    OmegaConf.register_new_resolver(RUN_NAME_RESOLVER, run_name, replace=True, use_cache=True)
