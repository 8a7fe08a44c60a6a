"""The engine on an NVIDIA GPU. Run with ``pytest -m gpu`` where there is one; everywhere else these are skipped.

One GPU holds one NCCL rank, so a group of one rank goes the whole way through NCCL's world of one, and groups of two
share the GPU over gloo (through host memory: correct, not fast).
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero

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


def compare_with_twin(rank: int, ranks: int, stage: str, precision: str, offload: str) -> None:
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


def no_growth(rank: int, ranks: int, stage: str) -> None:
    """Reserved memory does not grow from step to step."""
    model = Model()
    engine = lightning_zero.shard(model, stage=stage, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    engine.add_optimizer(optimizer)
    reserved = []
    for step in range(200):
        engine.backward(loss_of(model, batch(step, ranks)))
        optimizer.step()
        optimizer.zero_grad()
        if step in (20, 199):
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] <= reserved[0]
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


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_reserved_memory_does_not_grow(stage: str) -> None:
    on_gpu(1, "nccl", no_growth, stage)
