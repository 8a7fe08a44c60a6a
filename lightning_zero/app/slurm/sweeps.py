"""``hydra/launcher=submitit_slurm``: the group ``cluster`` drives what submitit asks SLURM for.

Registered by our entry points only: another Hydra app that has us installed keeps submitit's own launcher.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_zero.app.slurm.cluster import ClusterConfig, ClusterName, seconds_of, slurm_options
from lightning_zero.config import ConfigError

LAUNCHER = "submitit_slurm"
RESOLVER = "lightning_zero_submitit"
DEFAULT_MINUTES = 60  # submitit's own
NAMES = {  # submitit's, of options of sbatch
    "job-name": "name",
    "ntasks-per-node": "tasks_per_node",
    **{name: name.replace("-", "_") for name in ("nodes", "gpus-per-node", "cpus-per-task")},
    **{name: name for name in ("partition", "account", "qos", "constraint")},
}
DRIVEN = (*NAMES.values(), "timeout_min", "signal_delay_s", "setup", "additional_parameters")


def check_launcher(arguments: list[str]) -> None:
    """Refuse the launcher where submitit is not installed: Hydra would say that there is no such file.

    Raises:
        ConfigError: says what to install.
    """
    asked = any(a.lstrip("+") in (f"hydra/launcher={LAUNCHER}", "hydra/launcher=submitit_local") for a in arguments)
    if asked and not _installed():
        raise ConfigError(
            f"hydra/launcher={LAUNCHER}: expected the package hydra-submitit-launcher, which is not installed. "
            "pip install 'lightning-zero[slurm]'."
        )


def _installed() -> bool:
    try:
        return importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is not None
    except ModuleNotFoundError:
        return False


def register_launcher() -> None:
    """Put a launcher whose settings follow ``cluster.*`` in the place of submitit's; may be called again."""
    if not _installed():
        return
    Plugins.instance()  # has the plugin register its own first
    OmegaConf.register_new_resolver(RESOLVER, submitit_setting, replace=True)
    store = ConfigStore.instance()
    node = copy.deepcopy(store.load(f"hydra/launcher/{LAUNCHER}.yaml").node)
    with open_dict(node):
        for key in DRIVEN:
            node[key] = f"${{{RESOLVER}:{key}}}"
    store.store(group="hydra/launcher", name=LAUNCHER, node=node, provider="lightning_zero")


def submitit_setting(key: str, *, _root_: DictConfig) -> Any:
    """The value of ``hydra.launcher.<key>`` for the ``cluster`` of a configuration."""
    node = OmegaConf.select(_root_, "cluster")
    cluster = OmegaConf.to_object(node) if node is not None else ClusterConfig()
    assert isinstance(cluster, ClusterConfig)
    value = submitit_settings(cluster)[key]
    return OmegaConf.create(value) if isinstance(value, (dict, list)) else value


def submitit_settings(cluster: ClusterConfig) -> dict[str, Any]:
    """Arguments of submitit's launcher.

    Raises:
        ConfigError: a setting that submitit cannot pass on.
    """
    for key in ("container", "python"):
        if getattr(cluster, key) is not None:
            raise ConfigError(
                f"cluster.{key}: submitit starts the interpreter that it runs in. Drop cluster.{key}, or submit each "
                "run by python -m lightning_zero.submit."
            )
    options = slurm_options(cluster)
    options.pop("time", None)
    found = {name: options.pop(option, None) for option, name in NAMES.items()}
    if cluster.name is ClusterName.none:
        found["gpus_per_node"] = None
    for option in cluster.sbatch:
        name, given, value = option.lstrip("-").partition("=")
        options[name] = value if given else True
    return found | {
        "timeout_min": DEFAULT_MINUTES if cluster.time is None else -(-seconds_of(cluster.time) // 60),
        "signal_delay_s": cluster.signal_delay,
        "setup": _setup(cluster),
        # What submitit has no name for. The signal: ours in the place of its USR2, which ends a job.
        "additional_parameters": options,
    }


def _setup(cluster: ClusterConfig) -> list[str]:
    # A task that dies takes the others down. srun does not take --cpus-per-task over from sbatch.
    lines = ["export SLURM_KILL_BAD_EXIT=1"]
    if cluster.cpus_per_task is not None:
        lines.append(f"export SRUN_CPUS_PER_TASK={cluster.cpus_per_task}")
    return [*lines, *cluster.env_lines(), *cluster.setup]
