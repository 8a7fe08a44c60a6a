"""The main job, and what ``make gpu-check`` asks of one GPU, on an emulated one."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu import exact
from benchmarks.gpu.plan import SIZES
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
        on_time = exact.digest_of(SIZES["tiny"], "cuda", "zero3", "cpu")
        with in_order("other streams early"):
            for seed in range(2):
                with exact.late("cuda", seed):
                    assert exact.digest_of(SIZES["tiny"], "cuda", "zero3", "cpu") == on_time
    finally:
        torch.use_deterministic_algorithms(False)
