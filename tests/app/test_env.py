"""``python -m lightning_zero.env``: all that a report needs and no secret; ``--check`` tries every row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest

from lightning_zero.app import check, env
from lightning_zero.settings import Offload, Stage
from tests.harness import run_command


@pytest.mark.full
def test_the_command_tells_all_and_no_secret(tmp_path: Path) -> None:
    command = ("python", "-m", "lightning_zero.env", "--json", "--disk", tmp_path)
    done = run_command(*command, NCCL_DEBUG="INFO", WANDB_API_KEY="hidden", code=0)
    found = json.loads(done.stdout)
    sections = {"torch", "packages", "host", "GPUs", "network", "environment", "disk"}
    assert set(found) == sections and not [name for name in sections if "failed" in found[name]], found
    assert {"torch", "lightning", "lightning-zero"} <= set(found["packages"]) and "python_version" in found["torch"]
    assert found["disk"]["write"].endswith("GB/s") and found["disk"]["read"].endswith("GB/s")
    assert found["environment"]["NCCL_DEBUG"] == "INFO"
    assert "hidden" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_variables_are_named_and_hold_no_secret() -> None:
    shown = {"SLURM_JOB_ID": "7", "NCCL_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_RANK": "1"}
    names = ("SLURM_JWT", "TORCH_AUTH", "HF_TOKEN", "HOME", "LIGHTNING_ZERO_PASSWORD")
    given = shown | dict.fromkeys(names, "hidden") | {"TORCH_HOME": "https://user:hidden@host/path"}
    assert env.variables(given) == shown | {"TORCH_HOME": "https://host/path"}


def test_what_fails_says_why_and_leaves_the_rest() -> None:
    no_memory = mock.patch("psutil.virtual_memory", side_effect=RuntimeError("no /proc"))
    with no_memory, mock.patch.object(env, "_gpus", {}):
        found = env.facts()
    assert found["host"] == {"failed": "RuntimeError: no /proc"}
    assert "failed" in found["GPUs"] and "torch" in found["packages"]
    assert "  failed  RuntimeError: no /proc" in env.text_of(found)


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        env.main(["--disk", "/nowhere"])
    assert stopped.value.code == 2 and "expected a folder, got '/nowhere'" in capsys.readouterr().err


@pytest.mark.full
def test_rows_pass_and_leave_no_files(tmp_path: Path) -> None:
    command = ("python", "-m", "lightning_zero.env", "--check", "--disk", tmp_path)
    done = run_command(*command, folder=tmp_path, timeout=280, code=0)  # another folder, as who has installed a wheel
    rows = [row.name for row in check.rows()]
    assert re.findall(r"^(.+?) +[\d.]+ s +differs by \S+ +ok$", done.stdout, re.MULTILINE) == rows
    assert f"{len(rows)} of {len(rows)} combinations passed" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_losses_that_differ_from_those_of_ddp_are_an_error(tmp_path: Path) -> None:
    broken = "import lightning_zero.app.check as c; c.BOUND['fp32'] = -1.0; "
    broken += "c._on_rank(0, 1, 0, False, '', [c.Row('zero1')])"
    done = run_command("python", "-c", broken, timeout=280, code=1)
    assert "zero1 fp32: losses differ from DDP's" in done.stderr, done.stderr


def test_every_row_that_is_allowed_is_tried_and_others_refused() -> None:
    rows = check.rows()
    assert {row.stage for row in rows} == set(Stage.__members__) - {"auto"}  # which is one of the others
    assert {row.offload for row in rows if row.stage == "zero3"} == set(Offload.__members__)
    with pytest.raises(SystemExit, match="--check: expected a part of one of zero0 fp32"):
        check.check("zero9", None)
