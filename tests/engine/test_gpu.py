"""The engine on an NVIDIA GPU. Run with ``pytest -m gpu`` where there is one; everywhere else these are skipped.

One GPU holds one NCCL rank, so a group of one rank goes the whole way through NCCL's world of one, and groups of two
share the GPU over gloo (through host memory: correct, not fast).
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine.whole.held_bytes import limits_of, plan_of
from lightning_zero.planning import memory
from lightning_zero.planning.placement import Tier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

STAGES = ["zero0", "zero1", "zero2", "zero3"]
STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 256, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 97)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, ranks: int) -> Tensor:
    return torch.randint(0, 97, (2 * ranks, 16), generator=torch.Generator().manual_seed(step)).cuda()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def compare_with_twin(rank: int, ranks: int, stage: str, precision: str, offload: str | dict[str, str]) -> None:
    """Train sharded and plain side by side; the twin averages the ranks' losses by itself."""
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model).cuda()
    engine = lightning_zero.shard(model, stage=stage, precision=precision, offload=offload, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.add_optimizer(optimizer)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
    for step in range(STEPS):
        tokens = batch(step, ranks)
        with autocast:
            loss = loss_of(model, tokens[2 * rank : 2 * rank + 2])
        engine.backward(loss)
        norm = lightning_zero.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with autocast:
            parts = [loss_of(twin, tokens[2 * r : 2 * r + 2]) for r in range(ranks)]
        (sum(parts) / ranks).backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        close = {"rtol": 1e-4, "atol": 1e-5} if precision == "fp32" else {"rtol": 2e-2, "atol": 2e-3}
        torch.testing.assert_close(norm.cpu(), expected.cpu(), **close)
    with lightning_zero.gather(model):
        for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.cpu(), other.detach().cpu(), msg=lambda m, n=name: f"{n}: {m}", **close)
    engine.release()


def no_growth(rank: int, ranks: int, stage: str, offload: str) -> None:
    """Reserved memory does not grow over 500 steps."""
    model = Model()
    engine = lightning_zero.shard(model, stage=stage, offload=offload, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    engine.add_optimizer(optimizer)
    reserved = []
    for step in range(520):
        engine.backward(loss_of(model, batch(step, ranks)))
        optimizer.step()
        optimizer.zero_grad()
        if step in (20, 519):
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] <= reserved[0]
    engine.release()


def peak_is_planned(rank: int, ranks: int, stage: str, precision: str, offload: str) -> None:
    """Wide layers and few tokens: activations, which the plan leaves out, are next to nothing."""
    model = Model(width=2048, blocks=6)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = lightning_zero.shard(model, stage=stage, precision=precision, offload=offload, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.add_optimizer(optimizer)
    for step in range(3):
        if step == 1:  # the first gathers and steps settle what is learned and made once
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            loss = loss_of(model, batch(step, 1))
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    peaks = memory.peak_bytes(plan_of(engine), limits_of(engine))
    planned = max(memory.on_tier(held, Tier.device) for held in peaks.values())
    assert measured <= 1.05 * planned, f"{measured:,} measured, {planned:,} planned"
    engine.release()


def transfers_are_hidden(rank: int, ranks: int, offload: str) -> None:
    """Of the copies from the host, only the first (and what waits for it) finds the device idle."""
    from torch.profiler import ProfilerActivity, profile

    model = Model(width=2048, blocks=8)
    engine = lightning_zero.shard(model, stage="zero3", offload=offload, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    engine.add_optimizer(optimizer)
    tokens = torch.randint(0, 97, (16, 512)).cuda()  # enough compute for each unit to hide the next one's copy
    for _ in range(2):
        engine.backward(loss_of(model, tokens))
        optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.backward(loss_of(model, tokens))
        torch.cuda.synchronize()
    events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [(e.time_range.start, e.time_range.end) for e in events if "HtoD" in e.name and e.device_time_total > 50]
    kernels = [(e.time_range.start, e.time_range.end) for e in events if "Memcpy" not in e.name]
    exposed = [c for c in copies if not any(low < c[1] and c[0] < high for low, high in kernels)]
    assert len(copies) >= 8
    assert len(exposed) <= 2, f"{len(exposed)} of {len(copies)} copies ran beside no kernel"
    engine.release()


def worker(rank: int, ranks: int, port: int, backend: str, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    body(rank, ranks, *args)
    dist.barrier()
    dist.destroy_process_group()


def on_gpu(ranks: int, backend: str, body: Callable[..., None], *args: Any) -> None:
    """CUDA cannot be forked into, so processes are spawned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (ranks, port, backend, body, args), nprocs=ranks)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("ranks", "backend"), [(1, "nccl"), (2, "gloo")])
def test_parity_with_a_plain_twin(ranks: int, backend: str, stage: str, precision: str) -> None:
    on_gpu(ranks, backend, compare_with_twin, stage, precision, "none")


@pytest.mark.parametrize(
    ("stage", "offload"), [("zero2", "optimizer_cpu"), ("zero3", "optimizer_cpu"), ("zero3", "cpu")]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parity_of_host_rows(stage: str, offload: str, precision: str) -> None:
    on_gpu(1, "nccl", compare_with_twin, stage, precision, offload)


@pytest.mark.parametrize("row", ["optimizer_nvme", "optimizer_cpu_param_nvme", "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parity_of_rows_in_files(row: str, precision: str, tmp_path: Path) -> None:
    on_gpu(1, "nccl", compare_with_twin, "zero3", precision, {"name": row, "nvme_path": str(tmp_path)})


@pytest.mark.parametrize(("stage", "offload"), [("zero1", "none"), ("zero3", "none"), ("zero3", "cpu")])
def test_reserved_memory_does_not_grow(stage: str, offload: str) -> None:
    on_gpu(1, "nccl", no_growth, stage, offload)


@pytest.mark.parametrize("offload", ["none", "optimizer_cpu", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peak_memory_is_as_planned(precision: str, offload: str) -> None:
    on_gpu(1, "nccl", peak_is_planned, "zero3", precision, offload)


@pytest.mark.parametrize("offload", ["optimizer_cpu", "cpu"])
def test_transfers_from_the_host_are_hidden(offload: str) -> None:
    on_gpu(1, "nccl", transfers_are_hidden, offload)
