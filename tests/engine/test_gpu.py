"""The engine on an NVIDIA GPU. Run with ``pytest -m gpu`` where there is one; everywhere else these are skipped.

NCCL takes one rank of a host on one GPU. So a group of one rank gathers and reduces over NCCL by
``LIGHTNING_ZERO_EVEN_ALONE`` (without it, one rank sends nothing), and groups of two share the GPU over gloo (through
host memory, not fast). Two ranks that call themselves two hosts, over NCCL, are a part of ``make gpu-check``.
"""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero
from benchmarks.gpu import trace
from lightning_zero.engine import Engine
from lightning_zero.engine.whole import state_dicts
from lightning_zero.engine.whole.values import FakeTensors, Range, Value, own_ranges
from lightning_zero.planning import memory
from lightning_zero.planning.placement import Tier
from lightning_zero.trainer.memory.held_bytes import limits_of, plan_of
from tests import models
from tests.engine.snapshots import KeptRanges
from tests.rows import IN_FILES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = "cuda"
STAGES = ["zero0", "zero1", "zero2", "zero3"]
STEPS = 4
CHANGE = {"fp32": 1e-3, "bf16": 0.25}  # of a parameter by training, that may differ from the twin's
# Of one body; the first one of a group waits for the imports of its ranks.
TIMEOUT_S = float(os.environ.get("LIGHTNING_ZERO_TEST_TIMEOUT_S", "150"))


class Model(models.Model):
    """Of sizes that are even, as those of real models."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__(width, depth)
        self.embed, self.head = nn.Embedding(97, width), nn.Linear(width, 97)
        for block in self.blocks:
            block.up, block.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def batch(step: int, ranks: int) -> Tensor:
    return torch.randint(0, 97, (2 * ranks, 16), generator=torch.Generator().manual_seed(step)).to(DEVICE)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def autocast(precision: str) -> torch.autocast:
    return torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def sharded(model: nn.Module, *, lr: float = 1e-3, **config: Any) -> tuple[Engine, torch.optim.Optimizer]:
    engine = lightning_zero.shard(model, device=DEVICE, **config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    engine.add_optimizer(optimizer)
    return engine, optimizer


def train(engine: Engine, optimizer: torch.optim.Optimizer, tokens: Tensor, precision: str = "fp32") -> None:
    with autocast(precision):
        loss = loss_of(engine.module, tokens)
    engine.passes.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def compare_with_twin(
    rank: int, ranks: int, stage: str, precision: str, offload: str | dict[str, str], alone: bool = False
) -> None:
    """Train sharded and plain side by side; the twin averages the ranks' losses by itself.

    Args:
        alone: one rank sends its messages through the library all the same.
    """
    torch.manual_seed(0)
    model = Model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    twin = copy.deepcopy(model).to(DEVICE)
    os.environ["LIGHTNING_ZERO_EVEN_ALONE"] = str(int(alone))
    engine, optimizer = sharded(model, stage=stage, precision=precision, offload=offload)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
    close = {"rtol": 1e-4, "atol": 1e-5} if precision == "fp32" else {"rtol": 2e-2, "atol": 2e-3}
    for step in range(STEPS):
        parts = batch(step, ranks).chunk(ranks)
        with autocast(precision):
            loss, others = loss_of(model, parts[rank]), [loss_of(twin, part) for part in parts]
        engine.passes.backward(loss)
        (sum(others) / ranks).backward()
        norm = lightning_zero.clip_grad_norm_(model, 0.5)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(norm.cpu(), expected.cpu(), **close)
        torch.testing.assert_close(loss.detach().cpu(), others[rank].detach().cpu(), **close)
    with lightning_zero.gather(model):
        for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            # Of the whole change: Adam's first steps are as long for an element whose gradient is all rounding.
            apart = (own.cpu() - other.detach().cpu()).norm() / (other.detach().cpu() - before[name]).norm()
            assert apart < CHANGE[precision], f"{name}: {apart:.3g} of its change is another"
    kinds = {kind for kind, _ in engine.comm.counts}
    engine.release()
    if alone or ranks > 1:
        assert ("all_gather" in kinds) == (stage != "zero0")
        assert ("all_reduce" if stage == "zero0" else "reduce_scatter") in kinds


def no_growth(rank: int, ranks: int, stage: str, offload: str) -> None:
    """Reserved memory does not grow over 500 steps."""
    model = Model()
    engine, optimizer = sharded(model, stage=stage, offload=offload)
    reserved = []
    for step in range(520):
        train(engine, optimizer, batch(step, ranks))
        if step in (20, 519):
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] <= reserved[0]
    engine.release()


def kept_is_what_was_there(rank: int, ranks: int, stage: str, offload: str) -> None:
    """What a thread reads beside steps is what was there before them."""
    model = Model(width=1024)
    engine, optimizer = sharded(model, stage=stage, offload=offload, lr=1e-2)
    train(engine, optimizer, batch(0, ranks))
    for first in ("copies", "step"):
        fakes = FakeTensors()
        engine.state_dict(fakes=fakes)
        state_dicts.optimizer_state(engine, optimizer, fakes=fakes)
        values = {value: tensor.dtype for value, tensor in fakes.made}
        expected = taken(own_ranges(engine, values, {}))
        kept = KeptRanges(engine, values)
        thread = threading.Timer(0.0 if first == "copies" else 0.3, kept.snapshot.stage)
        thread.start()
        for number in range(1, 4):
            train(engine, optimizer, batch(number, ranks))
        thread.join()
        found = taken(kept)
        kept.close()
        assert found.keys() == expected.keys()
        for value, own in found.items():
            assert torch.equal(own, expected[value]), (first, value)
    engine.release()


def taken(parts: Iterable[Range]) -> dict[Value, Tensor]:
    """Ranges of one rank that has all, put together."""
    found: dict[Value, Tensor] = {}
    for part in parts:
        own = part.values.detach().to("cpu", copy=True)
        found[part.value] = torch.cat([found[part.value], own]) if part.start else own
    return found


def peak_is_planned(rank: int, ranks: int, precision: str, offload: str, alone: bool) -> None:
    """Wide layers and few tokens: activations, which the plan leaves out, are next to nothing."""
    loss_of(Model().to(DEVICE), batch(0, 1)).backward()  # libraries keep memory for their work from now on
    model = Model(width=2048, depth=6)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    os.environ["LIGHTNING_ZERO_EVEN_ALONE"] = str(int(alone))
    engine, optimizer = sharded(model, stage="zero3", precision=precision, offload=offload)
    for step in range(3):
        if step == 1:  # the first gathers and steps settle what is learned and made once
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        train(engine, optimizer, batch(step, 1), precision)
    engine.passes.wait_for_all()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    peaks = memory.peak_bytes(plan_of(engine), limits_of(engine))
    planned = max(memory.on_tier(held, Tier.device) for held in peaks.values())
    assert measured <= 1.05 * planned, f"{measured:,} measured, {planned:,} planned"
    engine.release()


# What the kernels of a step leave no time for, in units, beside how many units are copied in it: the first gather of a
# forward, and what becomes of the last gradient of a backward, with some room.
ALLOWED = {
    # Gradients go to the host as they come, steps follow inside the backward, and what they have changed comes back.
    "optimizer_cpu": {"DtoH": (2, 8), "HtoD": (2, 8)},
    # Parameters come for the forward, and again for the backward, where the last unit is still there.
    "cpu": {"DtoH": (2, 8), "HtoD": (2, 15)},
}


def transfers_are_hidden(rank: int, ranks: int, offload: str) -> None:
    """Copies run beside kernels, but for those before the first kernel of a step and behind the last."""
    from torch.profiler import ProfilerActivity, profile

    model = Model(width=2048, depth=8)
    engine, optimizer = sharded(model, stage="zero3", offload=offload)
    tokens = torch.randint(0, 97, (16, 512)).to(DEVICE)  # compute of a unit takes longer than its copies and its step

    def closure() -> Tensor:
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        engine.passes.backward(loss)
        return loss

    def step() -> None:
        optimizer.step(closure)
        engine.passes.wait_for_all()
        torch.cuda.synchronize()

    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        timeline = json.loads(file.read_text())
    for way, (allowed, copied) in ALLOWED[offload].items():
        taken, exposed = trace.copies(timeline, way)
        assert taken > 1e3, f"{way}: copies of {taken:.0f} us, where {copied} units of 128 MiB move"
        assert exposed <= taken * allowed / copied, f"{way}: {exposed:.0f} of {taken:.0f} us beside no kernel"
    engine.release()


# -- groups of ranks --------------------------------------------------------------------------------------------------


class Group:
    """Processes that stand in one process group and run one body after the other.

    They are spawned, because CUDA cannot be forked into, and stay, because that takes seconds.
    """

    def __init__(self, ranks: int, backend: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.ranks = [
            ProcessPoolExecutor(1, spawn, initializer=join, initargs=(rank, ranks, address, backend))
            for rank in range(ranks)
        ]

    def run(self, body: Callable[..., None], args: tuple[Any, ...]) -> None:
        futures = [each.submit(serve, body, rank, len(self.ranks), args) for rank, each in enumerate(self.ranks)]
        ended, late = wait(futures, TIMEOUT_S, FIRST_EXCEPTION)
        for future in ended:
            future.result()
        assert not late, f"ranks {[futures.index(future) for future in late]} were not ready in {TIMEOUT_S} s"

    def close(self, *, kill: bool) -> None:
        if not kill:
            wait([each.submit(dist.destroy_process_group) for each in self.ranks], 30)
        for each in self.ranks:
            for process in each._processes.values():
                process.kill()
            each.shutdown()


def join(rank: int, ranks: int, address: str, backend: str) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks)


def serve(body: Callable[..., None], rank: int, ranks: int, args: tuple[Any, ...]) -> None:
    try:
        body(rank, ranks, *args)
        dist.barrier()
    finally:
        gc.collect()
        torch.cuda.empty_cache()


GROUPS: dict[tuple[int, str], Group] = {}


@pytest.fixture(scope="module", autouse=True)
def groups_end() -> Iterator[None]:
    yield
    while GROUPS:
        GROUPS.popitem()[1].close(kill=False)


def on_gpu(ranks: int, backend: str, body: Callable[..., None], *args: Any) -> None:
    """Run ``body`` on all ranks. After a failure the next body gets new processes: CUDA's errors stay."""
    if (ranks, backend) not in GROUPS:
        GROUPS[ranks, backend] = Group(ranks, backend)
    try:
        GROUPS[ranks, backend].run(body, args)
    except BaseException:
        GROUPS.pop((ranks, backend)).close(kill=True)
        raise


# What counts most comes first: `python -m benchmarks.gpu` may have time for some of them only.
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])
HOST_ROWS = [("zero2", "optimizer_cpu"), ("zero3", "optimizer_cpu"), ("zero3", "cpu")]
PARITY = [
    *((1, "nccl", stage, "none", True) for stage in STAGES),
    *((1, "nccl", *place, alone) for place in HOST_ROWS for alone in (False, True)),
    *((2, "gloo", stage, "none", False) for stage in STAGES),
    *((1, "nccl", "zero3", row, False) for row in IN_FILES),
    *((1, "nccl", stage, "none", False) for stage in STAGES),
]


@PRECISIONS
@pytest.mark.parametrize(("ranks", "backend", "stage", "offload", "alone"), PARITY)
def test_parity(
    ranks: int, backend: str, stage: str, offload: str, alone: bool, precision: str, tmp_path: Path
) -> None:
    row = {"name": offload, "nvme_path": str(tmp_path)} if offload in IN_FILES else offload
    on_gpu(ranks, backend, compare_with_twin, stage, precision, row, alone)


PLACES = [("zero1", "none"), ("zero3", "none"), ("zero3", "cpu")]


@pytest.mark.parametrize(("stage", "offload"), [*PLACES, ("zero0", "none"), ("zero1", "optimizer_cpu")])
def test_what_is_kept_is_what_was_there(stage: str, offload: str) -> None:
    on_gpu(1, "nccl", kept_is_what_was_there, stage, offload)


@pytest.mark.parametrize(("stage", "offload"), PLACES)
def test_reserved_memory_does_not_grow(stage: str, offload: str) -> None:
    on_gpu(1, "nccl", no_growth, stage, offload)


@pytest.mark.parametrize("offload", ["optimizer_cpu", "cpu"])
def test_transfers_from_and_to_the_host_are_hidden(offload: str) -> None:
    on_gpu(1, "nccl", transfers_are_hidden, offload)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("offload", ["none", "optimizer_cpu", "cpu"])
@PRECISIONS
def test_peak_memory_is_as_planned(precision: str, offload: str, alone: bool) -> None:
    on_gpu(1, "nccl", peak_is_planned, precision, offload, alone)
