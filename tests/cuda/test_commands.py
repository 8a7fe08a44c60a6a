"""The main job, and what ``make gpu-check`` asks of one GPU and of two ranks that share it, on an emulated one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import exact
from benchmarks.gpu.check import Check
from benchmarks.gpu.output import Output
from benchmarks.gpu.plan import SIZES, tiny_parts
from tests.cuda.test_engine import in_order
from tests.harness import on_ranks, run_command


def test_the_main_job(tmp_path: Path) -> None:
    settings = ["experiment=tiny", "zero/precision=bf16", "trainer.max_steps=3", "trainer.val_check_interval=null"]
    device = ["trainer.accelerator=gpu", "trainer.devices=1"]
    done = run_command("python", "-m", "lightning_zero.train", *settings, *device, code=0, LIGHTNING_ZERO_RUNS=tmp_path)
    assert "validation bits per byte" in done.stdout
    assert [*tmp_path.glob("train/*/checkpoints/last.ckpt")]


@on_ranks(1)
def test_bits_are_the_same_while_streams_are_late() -> None:
    torch.use_deterministic_algorithms(True)  # new memory is filled, too
    try:
        on_time = exact.trained(SIZES["tiny"], "cuda", "zero3", "cpu")
        with in_order("other streams early"):
            for seed in range(2):
                with exact.late("cuda", seed):
                    assert torch.equal(exact.trained(SIZES["tiny"], "cuda", "zero3", "cpu"), on_time)
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_ranks_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each calls itself a host, or NCCL would refuse them."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "5")  # or it would set that itself
    check = Check(Output(tmp_path / "out"), "cuda", str(tmp_path), 150.0)
    check.run([replace(part, estimate_s=25.0) for part in tiny_parts() if part.fields.get("ranks") == 2])
    _, bits, trainer = check.output.records
    assert bits["status"] == trainer["status"] == "ok", check.output.records
    assert bits["late_runs"] > 0 and trainer["zero1_ms"] > 0
