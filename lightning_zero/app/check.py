"""Train a small model at every stage with every offload setting: ``python -m lightning_zero.env --check``.

For each stage, offload setting and precision, a model trains a few steps from the same weights, in one process per GPU
(or two on the CPU). Losses must equal those of DistributedDataParallel up to rounding, and held bytes must equal
planned bytes.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import lightning_zero
from lightning_zero.device import accelerator_of
from lightning_zero.device.cuda import gpu_count
from lightning_zero.models.gpt import GPT
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.memory import Moment, planned_bytes
from lightning_zero.planning.placement import Tier
from lightning_zero.settings import Offload, allowed_rows
from lightning_zero.trainer.memory.held_bytes import held_bytes, plan_of, state_tensors

STEPS = 4
STALL_S = 60.0
BOUND = {"fp32": 1e-4, "bf16": 5e-2}  # relative difference of losses; sums are in another order


class Row(NamedTuple):
    """A combination of stage, offload setting and precision to check."""

    stage: str
    offload: str = "none"
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return " ".join(part for part in self if part != "none")


def rows() -> list[Row]:
    """Return the combinations to check: all allowed pairs of stage and offload setting in fp32, two stages in bf16."""
    found = [Row(stage.name, offload.name) for stage, offload in allowed_rows()]
    return [*found, Row("zero1", precision="bf16"), Row("zero3", precision="bf16")]


def check(text: str, folder: str | None) -> None:
    """Train with each combination whose name contains ``text``. Exit with code 1 if there is none, or if one fails.
    ``folder``: the folder in which offload writes its files; None: the system's temporary folder."""
    chosen = [row for row in rows() if text in row.name]
    if not chosen:
        sys.exit(f"--check: expected a part of one of {', '.join(row.name for row in rows())}, got {text!r}")
    ranks, on_gpu, begin = gpu_count() or 2, bool(gpu_count()), time.monotonic()
    print(
        f"{len(chosen)} combinations on {ranks} {'GPU' if on_gpu else 'CPU'} process(es); compares losses with DDP's",
        flush=True,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=folder, prefix="lightning_zero-check-") as files:
        try:
            processes.spawn(_on_rank, (ranks, port, on_gpu, files, chosen), nprocs=ranks)
        except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
            sys.exit(f"{str(error).strip()}\nFAILED")
    print(f"{len(chosen)} of {len(chosen)} combinations passed in {time.monotonic() - begin:.0f} s")


def _on_rank(rank: int, ranks: int, port: int, on_gpu: bool, files: str, chosen: list[Row]) -> None:
    warnings.simplefilter("ignore")
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    accelerator_of(device).bind_thread()
    if not on_gpu:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=STALL_S))
    twin = DistributedDataParallel(_model().to(device))
    expected = _losses(twin, torch.optim.AdamW(twin.parameters(), lr=1e-3), rank, device, "fp32")
    for row in chosen:
        begin = time.monotonic()
        losses = _train(row, rank, device, files)
        differs = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        if not differs <= BOUND[row.precision]:  # NaN too
            raise AssertionError(f"{row.name}: losses differ from DDP's: {losses}, expected {expected}")
        if rank == 0:
            print(f"{row.name:<40} {time.monotonic() - begin:5.1f} s   differs by {differs:.1e}   ok", flush=True)
    dist.destroy_process_group()


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=64, block_size=32, n_layer=3, n_head=2, d_model=64)


def _losses(model: Any, optimizer: Any, rank: int, device: Any, precision: str, engine: Any = None) -> list[float]:
    """Train ``STEPS`` steps and return their losses. Do not clear the last gradients, so that their bytes count."""
    generator = torch.Generator().manual_seed(1000 + rank)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 64, (4, 33), generator=generator).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward() if engine is None else engine.passes.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train(row: Row, rank: int, device: Any, files: str) -> list[float]:
    """Train a model with the settings ``row`` and return its losses. Raises AssertionError if the bytes that the
    model holds after the last step differ from the plan's. Collective."""
    offload: dict[str, Any] = {"name": row.offload}
    settings: dict[str, Any] = {"stage": row.stage, "offload": offload, "precision": row.precision}
    if Offload[row.offload].uses_files or row.offload == "auto":
        offload["nvme_path"] = files
    if row.offload == "auto":
        offload |= {"device_budget": 200_000, "host_budget": 400_000}
    model = _model()
    engine = lightning_zero.shard(model, device=device, stall_timeout_s=STALL_S, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.add_optimizer(optimizer)
    losses = _losses(model, optimizer, rank, device, row.precision, engine)
    engine.passes.wait_for_all()
    states, held = state_tensors(engine), held_bytes(engine)
    plan = planned_bytes(plan_of(engine), engine.comm.shard.index, state_tensors=states, moment=Moment.reduced)
    for role, tier in plan | held:
        # Files are allocated in pages, and staging buffers at the first transfer.
        exact = role is not Role.staging and tier is not Tier.nvme
        if exact and plan[role, tier] != held[role, tier]:
            planned = f"{plan[role, tier]} were planned"
            raise AssertionError(f"{row.name}: {held[role, tier]} bytes of {role.value} on {tier.value}, {planned}")
    engine.release()
    return losses
