"""Run steps of an earlier run again, and name the first step and unit whose values differ.

The run must have written ``fingerprints.csv`` (``zero.fingerprint=n``). Settings on the command line replace those of
the run: other stages, tiers and machines should give the same numbers, except for the order of sums over ranks.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from omegaconf import OmegaConf

from lightning_zero.app.sweep import quoted
from lightning_zero.trainer.steps import COLUMNS, FILE

Fingerprints = Mapping[int, Mapping[str, tuple[str, ...]]]  # by step and unit


class StopAfter(Callback):
    """Stops a fit after ``steps`` optimizer steps. Prevents saves, which could remove the run's checkpoints."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._last = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step + self.steps
        trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, Checkpoint)]  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step >= self._last


def read(path: Path) -> Fingerprints:
    """Return the fingerprints in a CSV file; {} if there is no file. If a step ran twice, its later lines count."""
    found: dict[int, dict[str, tuple[str, ...]]] = {}
    if not path.exists():
        return found
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            found.setdefault(int(line["step"]), {})[line["unit"]] = tuple(line[name] for name in COLUMNS[2:])
    return found


def compare(before: Fingerprints, now: Fingerprints) -> tuple[str | None, int]:
    """Return text about the first difference (None if there is none), and the number of equal steps before it. The
    first step in ``now`` is the checkpoint's, and does not count."""
    equal = 0
    for step in sorted(before.keys() & now.keys()):
        for unit in {**before[step], **now[step]}:  # in the order of the files
            if (own := before[step].get(unit)) != (other := now[step].get(unit)):
                return f"after step {step}, unit {unit}: {own} in the run, {other} again", equal
        equal += step > min(now)
    return None, equal


def main() -> None:
    parser = argparse.ArgumentParser(prog="lightning-zero replay", description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("run", type=Path, help="the folder of a run, with fingerprints.csv")
    parser.add_argument("--from", dest="checkpoint", type=Path, required=True, help="a checkpoint of the run")
    parser.add_argument("--steps", type=int, required=True, help="number of steps to run again")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that replace those of the run")
    given = parser.parse_intermixed_args()
    if given.steps < 1:
        parser.error(f"--steps: expected a number >= 1, got {given.steps}. Change --steps.")
    settings = given.run / ".hydra" / "overrides.yaml"
    needed = (
        (given.run / FILE, "zero.fingerprint=1"),
        (settings, "the folder of the run"),
        (given.checkpoint, "--from"),
    )
    for path, what in needed:
        if not path.exists():
            parser.exit(2, f"error: {path}: expected a file that replay reads, got none. Change {what}.\n")
    folder = next(p for n in range(1, 10**6) if not (p := given.run.resolve() / f"replay-{n}").exists())
    overrides = list(OmegaConf.load(settings))
    kept = [o for o in overrides if o.lstrip("+").split("=")[0] not in ("ckpt_path", "run_dir")]
    stop = f"+callbacks.replay={{_target_:{StopAfter.__module__}.StopAfter,steps:{given.steps}}}"
    places = [f"ckpt_path={quoted(str(given.checkpoint.resolve()))}", f"hydra.run.dir={quoted(str(folder))}"]
    command = [sys.executable, "-m", "lightning_zero.train", *kept, *given.settings, stop, *places]
    if (code := subprocess.run(command).returncode) != 0:
        parser.exit(code, "error: the run failed: see its message above.\n")
    difference, equal = compare(read(given.run / FILE), read(folder / FILE))
    if difference is not None:
        parser.exit(1, f"{equal} steps are equal; {difference}\n")
    if not equal:
        parser.exit(1, f"error: {given.run / FILE} has no step that was run again. Change --steps or --from.\n")
    print(f"all {equal} steps that both have are equal", flush=True)
