"""The engine on an NVIDIA GPU. Run with ``pytest -m gpu`` where there is one; everywhere else these are skipped.

One GPU holds one NCCL rank. So a group of one rank gathers and reduces over NCCL by ``LIGHTNING_ZERO_EVEN_ALONE``
(without it, one rank sends nothing), and groups of two share the GPU over gloo (through host memory, not fast).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero
from benchmarks.gpu import trace
from lightning_zero.engine.whole import state_dicts
from lightning_zero.engine.whole.values import FakeTensors, Range, Value, own_ranges
from lightning_zero.planning import memory
from lightning_zero.planning.placement import Tier
from lightning_zero.trainer.memory.held_bytes import limits_of, plan_of
from tests.engine.snapshots import KeptRanges
from tests.rows import IN_FILES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = "cuda"
STAGES = ["zero0", "zero1", "zero2", "zero3"]
STEPS = 4
CHANGE = {"fp32": 1e-3, "bf16": 0.25}  # of a parameter by training, that may differ from the twin's
# Of one body; the first one of a group waits for the imports of its ranks.
TIMEOUT_S = float(os.environ.get("LIGHTNING_ZERO_TEST_TIMEOUT_S", "150"))


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
    return torch.randint(0, 97, (2 * ranks, 16), generator=torch.Generator().manual_seed(step)).to(DEVICE)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


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
    engine = lightning_zero.shard(model, stage=stage, precision=precision, offload=offload, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.add_optimizer(optimizer)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
    for step in range(STEPS):
        tokens = batch(step, ranks)
        with autocast:
            loss = loss_of(model, tokens[2 * rank : 2 * rank + 2])
        engine.passes.backward(loss)
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
        torch.testing.assert_close(loss.detach().cpu(), parts[rank].detach().cpu(), **close)
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
    engine = lightning_zero.shard(model, stage=stage, offload=offload, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    engine.add_optimizer(optimizer)
    reserved = []
    for step in range(520):
        engine.passes.backward(loss_of(model, batch(step, ranks)))
        optimizer.step()
        optimizer.zero_grad()
        if step in (20, 519):
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] <= reserved[0]
    engine.release()


def kept_is_what_was_there(rank: int, ranks: int, stage: str, offload: str) -> None:
    """What a thread reads beside steps is what was there before them."""
    model = Model(width=1024)
    engine = lightning_zero.shard(model, stage=stage, offload=offload, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.add_optimizer(optimizer)

    def step(number: int) -> None:
        engine.passes.backward(loss_of(model, batch(number, ranks)))
        optimizer.step()
        optimizer.zero_grad()

    def wanted() -> dict[Any, torch.dtype]:
        fakes = FakeTensors()
        engine.state_dict(fakes=fakes)
        state_dicts.optimizer_state(engine, optimizer, fakes=fakes)
        return {value: tensor.dtype for value, tensor in fakes.made}

    step(0)
    for first in ("copies", "step"):
        values = wanted()
        expected, found = Taken(), Taken()
        for part in own_ranges(engine, values, {}):
            expected(part)
        kept = KeptRanges(engine, values)
        thread = threading.Timer(0.0 if first == "copies" else 0.3, kept.snapshot.stage)
        thread.start()
        for number in range(1, 4):
            step(number)
        thread.join()
        found.all(kept)
        kept.snapshot.close()
        assert found.values.keys() == expected.values.keys()
        for value, own in found.values.items():
            assert torch.equal(own, expected.values[value]), (first, value)
    engine.release()


class Taken:
    """Ranges of one rank that has all, put together."""

    def __init__(self) -> None:
        self.values: dict[Value, Tensor] = {}

    def __call__(self, part: Range) -> None:
        own = part.values.detach().to("cpu", copy=True)
        self.values[part.value] = torch.cat([self.values[part.value], own]) if part.start else own

    def all(self, parts: Iterable[Range]) -> None:
        for part in parts:
            self(part)


def peak_is_planned(rank: int, ranks: int, precision: str, offload: str, alone: bool) -> None:
    """Wide layers and few tokens: activations, which the plan leaves out, are next to nothing."""
    small = Model().to(DEVICE)
    loss_of(small, batch(0, 1)).backward()  # libraries keep memory for their work from now on
    del small
    model = Model(width=2048, blocks=6)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    os.environ["LIGHTNING_ZERO_EVEN_ALONE"] = str(int(alone))
    engine = lightning_zero.shard(model, stage="zero3", precision=precision, offload=offload, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.add_optimizer(optimizer)
    for step in range(3):
        if step == 1:  # the first gathers and steps settle what is learned and made once
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            loss = loss_of(model, batch(step, 1))
        engine.passes.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
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

    model = Model(width=2048, blocks=8)
    engine = lightning_zero.shard(model, stage="zero3", offload=offload, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.add_optimizer(optimizer)
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
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pairs = [context.Pipe() for _ in range(ranks)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=serve, args=(rank, ranks, port, backend, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()

    def run(self, body: Callable[..., None], args: tuple[Any, ...]) -> None:
        for pipe in self.pipes:
            pipe.send((body, args))
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                raise AssertionError(f"rank {rank} was not ready in {TIMEOUT_S} s")
            try:
                failure = pipe.recv()
            except EOFError as error:
                raise AssertionError(f"rank {rank} has died") from error
            if failure is not None:
                raise AssertionError(f"rank {rank}:\n{failure}")

    def close(self, *, kill: bool) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0 if kill else 30)
            process.kill()
            process.join()


def serve(rank: int, ranks: int, port: int, backend: str, pipe: Connection) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    while True:
        try:
            body, args = pipe.recv()
        except (EOFError, ConnectionError):
            break
        failure = None
        try:
            body(rank, ranks, *args)
            dist.barrier()
        except BaseException:
            failure = traceback.format_exc()
        gc.collect()
        torch.cuda.empty_cache()
        with contextlib.suppress(BrokenPipeError):  # after another rank has failed, nobody listens
            pipe.send(failure)
    dist.destroy_process_group()


GROUPS: dict[tuple[int, str], Group] = {}


@pytest.fixture(scope="module", autouse=True)
def groups_end() -> Iterator[None]:
    yield
    while GROUPS:
        GROUPS.popitem()[1].close(kill=False)


def on_gpu(ranks: int, backend: str, body: Callable[..., None], *args: Any) -> None:
    """Run ``body`` on all ranks. After a failure the next body gets new processes: CUDA's errors stay."""
    group = GROUPS.get((ranks, backend))
    if group is None:
        group = GROUPS[ranks, backend] = Group(ranks, backend)
    try:
        group.run(body, args)
    except BaseException:
        GROUPS.pop((ranks, backend)).close(kill=True)
        raise


# What counts most comes first: `python -m benchmarks.gpu` may have time for some of them only.


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_parity_over_nccl(stage: str, precision: str) -> None:
    on_gpu(1, "nccl", compare_with_twin, stage, precision, "none", True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("stage", "offload"), [("zero2", "optimizer_cpu"), ("zero3", "optimizer_cpu"), ("zero3", "cpu")]
)
def test_parity_of_host_rows(stage: str, offload: str, alone: bool, precision: str) -> None:
    on_gpu(1, "nccl", compare_with_twin, stage, precision, offload, alone)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_parity_of_two_ranks(stage: str, precision: str) -> None:
    on_gpu(2, "gloo", compare_with_twin, stage, precision, "none")


@pytest.mark.parametrize(
    ("stage", "offload"),
    [("zero0", "none"), ("zero1", "none"), ("zero3", "none"), ("zero1", "optimizer_cpu"), ("zero3", "cpu")],
)
def test_what_is_kept_is_what_was_there(stage: str, offload: str) -> None:
    on_gpu(1, "nccl", kept_is_what_was_there, stage, offload)


@pytest.mark.parametrize("row", IN_FILES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parity_of_rows_in_files(row: str, precision: str, tmp_path: Path) -> None:
    on_gpu(1, "nccl", compare_with_twin, "zero3", precision, {"name": row, "nvme_path": str(tmp_path)})


@pytest.mark.parametrize(("stage", "offload"), [("zero1", "none"), ("zero3", "none"), ("zero3", "cpu")])
def test_reserved_memory_does_not_grow(stage: str, offload: str) -> None:
    on_gpu(1, "nccl", no_growth, stage, offload)


@pytest.mark.parametrize("offload", ["optimizer_cpu", "cpu"])
def test_transfers_from_and_to_the_host_are_hidden(offload: str) -> None:
    on_gpu(1, "nccl", transfers_are_hidden, offload)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("offload", ["none", "optimizer_cpu", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peak_memory_is_as_planned(precision: str, offload: str, alone: bool) -> None:
    on_gpu(1, "nccl", peak_is_planned, precision, offload, alone)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_parity_of_one_rank_that_sends_nothing(stage: str, precision: str) -> None:
    on_gpu(1, "nccl", compare_with_twin, stage, precision, "none")
