"""python -m lightning_zero.env: all that a report needs, on any machine, and no secret."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from lightning_zero.app import env
from tests.harness import run_command


@pytest.mark.full
def test_the_command_tells_all_and_no_secret(tmp_path: Path) -> None:
    environ = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "hidden", "TORCH_TOKEN": "hidden"}
    done = run_command("python", "-m", "lightning_zero.env", "--json", "--disk", tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    sections = {"torch", "packages", "host", "GPUs", "network", "environment", "disk"}
    assert set(found) == sections and not [name for name in sections if "failed" in found[name]], found
    assert {"torch", "lightning", "lightning-zero"} <= set(found["packages"]) and "python_version" in found["torch"]
    assert found["disk"]["write"].endswith("GB/s") and found["disk"]["read"].endswith("GB/s")
    assert found["environment"]["NCCL_DEBUG"] == "INFO"
    assert "hidden" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_variables_are_named_and_hold_no_secret() -> None:
    given = {
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "hidden",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TORCH_AUTH": "hidden",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HF_TOKEN": "hidden",
        "HOME": "hidden",
        "TORCH_HOME": "https://user:hidden@host/path",
        "LIGHTNING_ZERO_PASSWORD": "hidden",
        "LOCAL_RANK": "1",
    }
    found = env.variables(given)
    assert set(found) == {"SLURM_JOB_ID", "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "TORCH_HOME", "LOCAL_RANK"}
    assert found["TORCH_HOME"] == "https://host/path"


def test_what_fails_says_why_and_leaves_the_rest() -> None:
    with (
        mock.patch("psutil.virtual_memory", side_effect=RuntimeError("no /proc")),
        mock.patch.object(env, "_gpus", {}),
    ):
        found = env.facts()
    assert found["host"] == {"failed": "RuntimeError: no /proc"}
    assert "failed" in found["GPUs"] and "torch" in found["packages"]
    assert "  failed  RuntimeError: no /proc" in env.text_of(found)


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        env.main(["--disk", "/nowhere"])
    assert stopped.value.code == 2 and "expected a folder, got '/nowhere'" in capsys.readouterr().err
