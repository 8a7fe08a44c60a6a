"""Measure how long a job takes from the death of a rank to its next step: ``python -m benchmarks.bench_restart``.

Two CPU processes under torchrun train the small GPT of ``experiment=tiny``. One is killed; torchrun starts both again,
and they resume from the newest checkpoint. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_zero.models.gpt import LitGPT

KILLED_AT = 10
MARKS = "LIGHTNING_ZERO_BENCH_MARKS"
# What ends each part, in order.
PARTS = {
    "started": "torchrun sees that a rank is gone, ends the other, starts both",
    "imported": "Python, torch, Lightning, Hydra's configuration, the model's file",
    "met": "the Trainer is made, ranks meet",
    "resumed": "parameters are sharded, the checkpoint is read",
    "stepped": "the first step",
}


def mark(what: str, at: float | None = None) -> None:
    with Path(os.environ[MARKS]).open("a") as file:
        file.write(json.dumps([what, time.time() if at is None else at]) + "\n")


class Lit(LitGPT):
    """Is killed once, on rank 1. Rank 0 of the job that starts again notes when it is where."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.again = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1" and os.environ.get("RANK") == "0"
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine has started
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        self.note("started", time.time() - age)
        self.note("imported")

    def note(self, what: str, at: float | None = None) -> None:
        if self.again:
            mark(what, at)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.note("met")

    def on_train_start(self) -> None:
        super().on_train_start()
        self.note("resumed")

    def on_train_batch_start(self, *_: Any) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and self.trainer.global_step == KILLED_AT
        if first and self.global_rank == 1:
            mark("killed")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("stepped")
        self.again = False


def restart() -> list[float]:
    """Run the job, and return the seconds of each part."""
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder, "marks")
        overrides = ("experiment=tiny", "trainer.accelerator=cpu", "trainer.max_steps=14")
        overrides += ("model._target_=benchmarks.bench_restart.Lit", "trainer.enable_progress_bar=false")
        overrides += ("+callbacks.checkpoint.every_n_train_steps=4", f"hydra.run.dir={folder}/run")
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
        command = (sys.executable, *launch, "-m", "lightning_zero.train", *overrides)
        done = subprocess.run(command, env=os.environ | {MARKS: str(marks)}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the job ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        found: dict[str, float] = {}
        for line in marks.read_text().splitlines():
            what, at = json.loads(line)
            found.setdefault(what, at)
    return [now - before for before, now in pairwise([found["killed"], *(found[part] for part in PARTS)])]


def main() -> None:
    about = "Measure how long a job takes from the death of a rank to its next step."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_restart", description=about)
    parser.add_argument("--rounds", type=int, default=3, help="restarts, of which medians are printed")
    rounds = [restart() for _ in range(parser.parse_args().rounds)]
    for part, seconds in zip(PARTS.values(), zip(*rounds, strict=True), strict=True):
        print(f"{statistics.median(seconds):6.1f} s  {part}")
    print(f"{statistics.median(map(sum, rounds)):6.1f} s  in all")


if __name__ == "__main__":
    main()
