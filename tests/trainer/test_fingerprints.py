"""``zero.fingerprint``: the same numbers for the same values, whatever the stage, tier and number of ranks."""

from __future__ import annotations

import csv
import ctypes
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.engine.whole import state_dicts
from tests.harness import on_ranks
from tests.trainer.toys import Lit, fit, odd, seeded, strategy_of

Rows = list[dict[str, str]]


def read(folder: Path) -> Rows:
    with (folder / "fingerprints.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def expected(values: dict[str, Tensor]) -> int:
    """By the formula, over whole tensors: bits times an odd number for the place and one for the name."""
    total = 0
    for name, value in values.items():
        flat = value.reshape(-1).view(torch.int32).tolist()
        total += sum(bits * (2 * place + 1) for place, bits in enumerate(flat)) * (zlib.crc32(name.encode()) | 1)
    return total % 2**64


class Whole(Lit):
    """Keeps fingerprints of whole values after each batch: of masters by their names, and of momenta."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        strategy: Any = self.trainer.strategy
        weights = strategy.engine.state_dict(only_rank_0=False)
        optimizer = state_dicts.optimizer_state(strategy.engine, strategy.optimizers[0], only_rank_0=False)
        momenta = {
            f"{name} {key}": value
            for name, state in zip(weights, optimizer["state"].values(), strict=True)
            for key, value in state.items()
        }
        self.seen.append((expected({f"{name} ": value for name, value in weights.items()}), expected(momenta)))


@pytest.mark.parametrize("row", ["zero0", "zero1", "zero2", "zero3", "zero3 cpu", "zero3 nvme", "zero2 optimizer_cpu"])
@on_ranks(1, 2, 3)
def test_fingerprints_are_those_of_whole_values(row: str, tmp_path: Path) -> None:
    run = fit(strategy_of(row, tmp_path, fingerprint=2), tmp_path, seeded(Whole), max_epochs=1)
    found = read(tmp_path)
    steps = len(run.module.seen)
    assert sorted({int(line["step"]) for line in found}) == list(range(0, steps + 1, 2))
    for step in range(2, steps + 1, 2):
        lines = [line for line in found if line["step"] == str(step)]
        assert [line["unit"] for line in lines] == ["(root)", "blocks.0", "blocks.1"]
        sums = [sum(int(line[name], 16) for line in lines) % 2**64 for name in ("masters", "optimizer_state")]
        assert tuple(sums) == run.module.seen[step - 1]


class Damaged(Lit):
    """In the fourth step a number of one rank's parameters changes, as by a defect of its memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3 and dist.get_rank() == 1:
            ctypes.c_int32.from_address(self.blocks[1].up.weight.data_ptr() + 20).value ^= 1
        return loss


@pytest.mark.parametrize("stage", ["zero0", "zero2"])
@on_ranks(2)
def test_replicas_that_differ_are_an_error(stage: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"equal replicas of blocks\.1 on all ranks, got .* before step 4"):
        fit(ZeroStrategy(stage, fingerprint=2), tmp_path, seeded(Damaged), max_epochs=1)


@on_ranks(2)
def test_a_resumed_run_writes_the_same_lines(tmp_path: Path) -> None:
    def lines(stage: str, **settings: Any) -> Rows:
        run = fit(ZeroStrategy(stage, fingerprint=1), tmp_path / stage, odd(), **settings)
        run.trainer.save_checkpoint(tmp_path / f"{stage}.ckpt")
        return read(tmp_path / stage)

    first, second = lines("zero3", max_epochs=1), lines("zero1", ckpt_path=tmp_path / "zero3.ckpt")
    again = len([line for line in second if line["step"] == first[-1]["step"]])
    assert first + second[again:] == lines("zero2")
