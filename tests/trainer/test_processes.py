"""Real launches: exit codes, and exceptions on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_command

pytestmark = pytest.mark.full

SCRIPT = """
import sys
import lightning.pytorch as pl
import lightning_zero
import torch
torch.set_num_threads(1)
from tests.trainer.toys import Lit, Samples, _quiet
from torch.utils.data import DataLoader
_quiet()
strategy, failing = sys.argv[1:]

class Scripted(Lit):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and failing in (str(self.global_rank), "each"):
            raise KeyError("planned")
        return super().training_step(batch, batch_idx)

pl.seed_everything(3, verbose=False)
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
module, data = Scripted(), DataLoader(Samples(), batch_size=2)
if failing == "each":
    try:
        trainer.fit(module, data)
    except KeyError:
        failing = ""
trainer.fit(module, data, data)
sys.stdout.write("done %d\\n" % trainer.global_rank)
"""


STARTS = [  # by the rank that fails, and how often
    *[(strategy, "none", 1) for strategy in ("zero0", "zero1", "zero2")],
    ("zero3", "none", 10),
    *[(strategy, rank, times) for strategy, times in (("zero1", 1), ("zero3", 5)) for rank in "01"],
    *[(strategy, "each", 1) for strategy in ("zero1", "zero3")],  # its script catches the exception, and fits again
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "failing", "times"), STARTS)
def test_script_ends_with_0_unless_one_rank_fails(strategy: str, failing: str, times: int, tmp_path: Path) -> None:
    """Lightning starts it twice."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for _ in range(times):
        done = run_command("python", tmp_path / "script.py", strategy, failing, folder=tmp_path, timeout=120)
        output = done.stdout + done.stderr
        if failing in "01":
            assert done.returncode and "planned" in output and "done" not in output, output
        else:
            assert done.returncode == 0 and "done 0" in output and "done 1" in output, output
