"""``python -m lightning_zero.selftest``: trains a small model at every stage and on every tier, and compares.

Each row is trained for a few steps from the same weights, on as many processes as there are GPUs (or two). Its losses
must be those of the model under torch's DistributedDataParallel, and the bytes that it holds those that were planned.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS = 4
RANKS = 2  # where there is no GPU
STALL_S = 60.0
BOUND = {"fp32": 1e-4, "bf16": 5e-2}  # relative, of losses: other sums in another order, and other digits


@dataclass(frozen=True, slots=True)
class Row:
    """What is tried."""

    stage: str
    offload: str = "none"
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return " ".join([self.stage, self.offload if self.offload != "none" else "", self.precision]).replace("  ", " ")


@dataclass(slots=True)
class Found:
    """What came of a row on one rank.

    Attributes:
        differs: the largest relative difference of a loss.
        error: in words; empty where all is well.
    """

    name: str
    seconds: float = 0.0
    differs: float = 0.0
    error: str = ""


def rows() -> list[Row]:
    """Every row that the settings allow, and bf16 where parameters are sharded."""
    from lightning_zero.config import ConfigError, Offload, Stage, check_rows

    found = []
    for stage in Stage:
        if stage is Stage.auto:  # one of the others, which the strategy chooses
            continue
        for offload in Offload:
            with contextlib.suppress(ConfigError):
                check_rows(stage, offload)
                found.append(Row(stage.name, offload.name))
    return [*found, Row("zero1", precision="bf16"), Row("zero3", precision="bf16")]


# -- on each rank -----------------------------------------------------------------------------------------------------


def _model() -> Any:
    from lightning_zero.models.gpt import GPT

    return GPT(vocab_size=64, block_size=32, n_layer=3, n_head=2, d_model=64)


def _batches(rank: int) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(1000 + rank)
    return [torch.randint(0, 64, (4, 33), generator=generator) for _ in range(STEPS)]


def _loss(model: Any, batch: Any) -> Any:
    from torch.nn.functional import cross_entropy

    logits = model(batch[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def _twin_losses(rank: int, device: Any) -> list[float]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(_model().to(device), device_ids=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in _batches(rank):
        loss = _loss(model, batch.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _row_losses(row: Row, rank: int, device: Any, folder: str) -> list[float]:
    import torch

    import lightning_zero
    from lightning_zero.planning.buckets import Role
    from lightning_zero.planning.memory import Moment, planned_bytes
    from lightning_zero.planning.placement import Tier
    from lightning_zero.trainer.memory.held_bytes import held_bytes, plan_of, state_tensors

    offload: Any = row.offload
    if "nvme" in row.offload or row.offload == "auto":
        budget = {"device_budget": 200_000, "host_budget": 400_000} if row.offload == "auto" else {}
        offload = {"name": row.offload, "nvme_path": folder, **budget}
    torch.manual_seed(0)
    model = _model()
    engine = lightning_zero.shard(
        model,
        device=device,
        stage=row.stage,
        offload=offload,
        precision=row.precision,
        stall_timeout_s=STALL_S,
        summary=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.add_optimizer(optimizer)
    cast = torch.autocast(device.type, torch.bfloat16, enabled=row.precision == "bf16", cache_enabled=False)
    losses = []
    for batch in _batches(rank):
        optimizer.zero_grad()  # first, so that gradients are there at the end
        with cast:
            loss = _loss(model, batch.to(device))
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    engine.settle()
    plan = planned_bytes(
        plan_of(engine), engine.comm.shard_rank, state_tensors=state_tensors(engine), moment=Moment.reduced
    )
    held = held_bytes(engine)
    for role, tier in plan | held:
        # Files are laid out by pages, and staging buffers come with the first transfer.
        exact = role is not Role.staging and tier is not Tier.nvme
        if exact and plan[role, tier] != held[role, tier]:
            what = f"{role.value} on {tier.value}"
            raise AssertionError(f"{what}: {held[role, tier]} bytes are held, {plan[role, tier]} were planned")
    engine.release()
    return losses


def _on_rank(rank: int, ranks: int, port: int, on_gpu: bool, folder: str, names: list[str]) -> None:
    """The rows on one rank; a line of JSON for each goes to a file of this rank."""
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    from lightning_zero.device import accelerator_of

    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    accelerator_of(device).bind_thread()
    if not on_gpu:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=rank, world_size=ranks)
    with (Path(folder) / f"rank{rank}.jsonl").open("w", buffering=1) as out:
        twin: list[float] = []
        for row in (row for row in rows() if row.name in names):
            begin, found = time.monotonic(), Found(row.name)
            try:
                if not twin:
                    twin, begin = _twin_losses(rank, device), time.monotonic()
                losses = _row_losses(row, rank, device, folder)
                found.differs = max(abs(a - b) / abs(b) for a, b in zip(losses, twin, strict=True))
                if not found.differs <= BOUND[row.precision]:  # NaN too
                    found.error = f"losses differ from DDP's: {losses}, expected {twin}"
            except Exception as error:
                traceback.print_exc()
                found.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            found.seconds = time.monotonic() - begin
            out.write(json.dumps(asdict(found)) + "\n")
            if found.error:
                return  # other ranks may be anywhere: what would follow says nothing
    dist.destroy_process_group()


# -- the command ------------------------------------------------------------------------------------------------------


def run(ranks: int, on_gpu: bool, folder: str, names: list[str], timeout_s: float) -> Iterator[Found]:
    """Try the rows ``names`` in processes of their own, and give what came of each as soon as all ranks have it."""
    import torch.multiprocessing as processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = processes.start_processes(
        _on_rank, (ranks, port, on_gpu, folder, names), nprocs=ranks, join=False, start_method="spawn"
    )
    deadline, shown, error, alive = time.monotonic() + timeout_s, 0, "", True
    try:
        while alive and shown < len(names):
            try:
                alive = not context.join(0.2)
            except Exception as raised:  # one has died: join ends the others
                alive, error = False, str(raised).strip().splitlines()[-1]
            for found in _new(folder, ranks, names, shown):
                yield found
                shown += 1
                if found.error:
                    return
            if time.monotonic() > deadline:
                alive, error = False, f"not over after {timeout_s:.0f} s (--timeout)"
        if shown < len(names):
            yield Found(names[shown], error=error or "the processes ended")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.terminate()
            process.join(10)
            if process.is_alive():
                process.kill()


def _new(folder: str, ranks: int, names: list[str], shown: int) -> list[Found]:
    """The rows after the first ``shown`` that all ranks have ended, or that one has ended with an error."""
    files = [Path(folder) / f"rank{rank}.jsonl" for rank in range(ranks)]
    of_ranks = [
        [Found(**json.loads(line)) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if file.exists()
        else []
        for file in files
    ]
    new: list[Found] = []
    for number in range(shown, len(names)):
        there = [found[number] for found in of_ranks if len(found) > number]
        failed = next((found for found in there if found.error), None)
        if failed is not None:
            return [*new, failed]
        if len(there) < ranks:
            break
        new.append(max(there, key=lambda found: found.differs))
    return new


def main(arguments: list[str] | None = None) -> None:
    """The command; exit code 1 where a row fails."""
    parser = argparse.ArgumentParser(prog="python -m lightning_zero.selftest", description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, help=f"processes (default: one for each GPU, or {RANKS})")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument(
        "--nvme", metavar="FOLDER", help="where the rows with files put them (default: a temporary one)"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="the rows whose names have this in them")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for all rows")
    given = parser.parse_args(arguments)

    from rich.console import Console

    from lightning_zero.device.cuda import gpu_count

    names = [row.name for row in rows() if given.only in row.name]
    if not names:
        parser.error(f"--only: expected a part of one of {', '.join(row.name for row in rows())}, got {given.only!r}")
    if given.nvme is not None and not os.path.isdir(given.nvme):
        parser.error(f"--nvme: expected a folder, got {given.nvme!r}")
    gpus = 0 if given.cpu else gpu_count()
    ranks = given.ranks or gpus or RANKS
    if ranks < 1 or (gpus and ranks > gpus):
        parser.error(
            f"--ranks: expected 1 to {gpus or 'any number of'} processes, got {ranks}; --cpu leaves GPUs alone"
        )
    console, begin = Console(width=None), time.monotonic()
    console.print(f"{len(names)} rows on {ranks} {'GPU' if gpus else 'CPU'} process(es); losses beside DDP's")
    failed = passed = 0
    with tempfile.TemporaryDirectory(dir=given.nvme, prefix="lightning_zero-selftest-") as folder:
        for found in run(ranks, bool(gpus), folder, names, given.timeout):
            passed, failed = passed + (not found.error), failed + bool(found.error)
            result = "[red]FAILED[/red]" if found.error else "[green]ok[/green]"
            console.print(f"{found.name:<40} {found.seconds:5.1f} s   differs by {found.differs:.1e}   {result}")
            if found.error:
                console.print(f"  {found.error}", markup=False, soft_wrap=True)
    left = len(names) - passed - failed
    console.print(
        f"{passed} of {len(names)} rows passed in {time.monotonic() - begin:.0f} s"
        + (f"; {left} were not tried" if left else "")
    )
    sys.exit(1 if failed or left else 0)
