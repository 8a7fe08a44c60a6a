"""``make bench-offload ARGS=--vertical``: a batch in k parts through each unit, beside k backwards, with all in files.

Both sides train the same model on the same samples, one process each, in turn: an untimed step, then some that count.
Where gradients are added up, parameters are read from the disk 2 k times a step, against twice.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench
from benchmarks.sides.side import make_adamw

SIZES = {"vocab_size": 256, "n_layer": 4, "n_head": 8, "d_model": 1024, "block_size": 64}  # 51 M parameters


def side(
    rank: int, world: int, store: str, folder: str, row: str, parts: int, vertical: bool, steps: int, queue: Any
) -> None:
    """Seconds of each step, and bytes gathered, of one way."""
    import lightning_zero
    from lightning_zero.models.gpt import GPT

    torch.manual_seed(0)
    model = GPT(**SIZES)
    settings: dict[str, Any] = {"vertical_chunks": parts} if vertical else {}
    engine = lightning_zero.shard(
        model,
        stage=3,
        offload={"name": row, "nvme_path": folder},
        activation_checkpointing="blocks",
        device="cpu",
        **settings,
    )
    optimizer = make_adamw(model)
    engine.add_optimizer(optimizer)
    times, losses = [], []
    for step in range(1 + steps):
        batch = torch.randint(0, 256, (parts, 17), generator=torch.Generator().manual_seed(step))
        started = time.perf_counter()
        loss = 0.0
        for part in [batch] if vertical else batch.chunk(parts):
            nats = model(part[:, :-1], part[:, 1:]).mean() * (len(part) / parts)
            engine.passes.backward(nats)
            loss += nats.item()
        optimizer.step()
        optimizer.zero_grad()
        engine.passes.wait_for_all()
        times.append(time.perf_counter() - started)
        losses.append(round(loss, 4))
    engine.release()
    queue.put({"seconds": [round(value, 2) for value in times[1:]], "losses": losses})


def compare(folder: Path, row: str, parts: int, rounds: int, steps: int = 2) -> None:
    """Print what both ways take."""
    found: dict[bool, list[float]] = {False: [], True: []}
    losses: dict[bool, list[float]] = {}
    for number in range(rounds):
        for vertical in (False, True) if number % 2 == 0 else (True, False):
            result = bench.launch(side, 1, str(folder), row, parts, vertical, steps)
            print("vertical" if vertical else "accumulation", result["seconds"], flush=True)
            found[vertical] += result["seconds"]
            losses[vertical] = result["losses"]
    ordinary, vertically = (statistics.median(found[key]) for key in (False, True))
    print(
        json.dumps(
            {
                "row": row,
                "parts": parts,
                "accumulation_s": ordinary,
                "vertical_s": vertically,
                "speedup": round(ordinary / vertically, 2),
                "seconds": {"accumulation": found[False], "vertical": found[True]},
                "losses": {"accumulation": losses[False], "vertical": losses[True]},
            }
        )
    )
