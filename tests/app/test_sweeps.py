"""What submitit is asked for follows the group ``cluster``; sweeps on a real SLURM are in tests/slurm."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_zero.app.schema import register_schema
from lightning_zero.app.slurm import sweeps
from lightning_zero.app.slurm.cluster import ClusterConfig, ClusterName
from lightning_zero.config import ConfigError


def settings(**cluster: Any) -> dict[str, Any]:
    return sweeps.submitit_settings(ClusterConfig(name=ClusterName.slurm, **cluster))


def test_a_cluster_in_the_words_of_submitit() -> None:
    found = settings(nodes=4, gpus_per_node=8, cpus_per_task=12, time="1-0:30", partition="long", job_name="sweep")
    assert {key: found[key] for key in ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task")} == {
        "nodes": 4,
        "tasks_per_node": 8,
        "gpus_per_node": 8,
        "cpus_per_task": 12,
    }
    assert (found["timeout_min"], found["partition"], found["name"]) == (24 * 60 + 30, "long", "sweep")
    assert found.keys() == set(sweeps.DRIVEN)
    cpus = settings(gpus_per_node=0, tasks_per_node=2, time="00:00:61", requeue=False)
    assert (cpus["tasks_per_node"], cpus["gpus_per_node"], cpus["timeout_min"]) == (2, None, 2)


def test_one_key_is_the_signal_of_all_sides() -> None:
    assert settings(signal="USR2", signal_delay=60)["additional_parameters"] == {"signal": "USR2@60", "requeue": True}
    assert settings()["additional_parameters"]["signal"] == "USR1@120"  # and not submitit's USR2
    assert settings(requeue=False)["additional_parameters"] == {"no-requeue": True}


def test_options_and_lines_of_a_site() -> None:
    found = settings(
        mem="500G", exclusive=True, sbatch=["--mail-type=END", "--spread-job"], setup=["module load cuda"], env={"A": 1}
    )
    options = found["additional_parameters"]
    assert options["mem"] == "500G" and options["exclusive"] is True
    assert options["mail-type"] == "END" and options["spread-job"] is True
    assert found["setup"] == ["export SLURM_KILL_BAD_EXIT=1", "export A=1", "module load cuda"]
    assert "export SRUN_CPUS_PER_TASK=3" in settings(cpus_per_task=3)["setup"]


@pytest.mark.parametrize("key", ["container", "python"])
def test_what_submitit_cannot_do_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.{key}: submitit starts the interpreter that it runs in"):
        settings(**{key: "x"})


def test_without_submitit_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "_installed", lambda: False)
    sweeps.check_launcher(["hydra/launcher=basic", "seed=1"])
    with pytest.raises(ConfigError, match=r"pip install 'lightning-zero\[slurm\]'"):
        sweeps.check_launcher(["--multirun", "hydra/launcher=submitit_slurm"])


def test_composed() -> None:
    """With submitit installed: the launcher's values are those of the cluster; ones that are given win."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    register_schema()
    sweeps.register_launcher()
    sweeps.register_launcher()
    overrides = ["hydra/launcher=submitit_slurm", "hydra.launcher.comment=ours", "hydra.launcher.partition=other"]
    overrides += ["cluster=slurm", "cluster.nodes=2", "cluster.gpus_per_node=4", "cluster.partition=long"]
    with initialize_config_module("lightning_zero.conf", version_base="1.3"):
        cfg = compose("train", overrides=overrides, return_hydra_config=True)
        found = OmegaConf.select(cfg, "hydra.launcher")
        assert (found.nodes, found.tasks_per_node, found.gpus_per_node) == (2, 4, 4)
        assert (found.partition, found.comment) == ("other", "ours")
        assert found.additional_parameters["signal"] == "USR1@120"
        plain = compose("train", overrides=["hydra/launcher=submitit_slurm"], return_hydra_config=True).hydra.launcher
        assert (plain.nodes, plain.tasks_per_node, plain.gpus_per_node, plain.timeout_min) == (1, 1, None, 60)
