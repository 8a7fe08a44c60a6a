"""What the programs share: two ranks in processes of their own, and a callback that writes their losses."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 4
RANKS = 2
TIMEOUT_S = 300.0  # of a fit
GRACE_S = 10.0  # for a rank to end after the other has failed


def trainer_arguments(strategy: str) -> dict[str, Any]:
    """Seed this rank, and return the arguments of its Trainer. Call it after the import of the package."""
    from lightning_zero.lightning_api import pl  # the Lightning that the package has imported

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            with Path(f"losses-{trainer.global_rank}.jsonl").open("a") as file:
                print(json.dumps({"step": trainer.global_step, "loss": float(outputs["loss"])}), file=file)

    pl.seed_everything(7)
    ranks = {"strategy": strategy, "accelerator": "cpu", "devices": RANKS}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return ranks | quiet | {"max_steps": STEPS, "callbacks": [Losses()]}


def on_two_ranks(fit: Callable[[str], None]) -> None:
    """``FOLDER STRATEGY...`` of the command line: call ``fit`` with each strategy, on two ranks.

    ``FOLDER/STRATEGY`` gets the losses and the output of each rank, and ``done-RANK`` if ``fit`` has returned there.
    """
    folder, *strategies = sys.argv[1:]
    for strategy in strategies:
        _start(fit, strategy, Path(folder) / strategy)


def _start(fit: Callable[[str], None], strategy: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")  # the package takes longer to import than to train
    ranks = [fork.Process(target=_rank, args=(fit, strategy, folder, rank, port)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + TIMEOUT_S
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
        rank.join()


def _rank(fit: Callable[[str], None], strategy: str, folder: Path, rank: int, port: int) -> None:
    """What torchrun would set, for Lightning's own environment; the fit writes into ``folder``."""
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    output = os.open(f"output-{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    fit(strategy)
    Path(f"done-{rank}").touch()
