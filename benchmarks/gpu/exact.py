"""Whether all stages and rows end with the same bits, also while streams are late; and what torch's sanitizer says.
On one rank, or on two that share a GPU.

Runs in a process of its own, under deterministic algorithms: torch then fills memory that it allocates with NaN, and
this file fills the memory of gathers. So who reads what is not written yet, or still reads what another one has now,
ends with other bits.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero.device
import lightning_zero.engine
from benchmarks.gpu.model import loss_of, make_model
from benchmarks.gpu.plan import Size
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.device.cuda import Cuda
from lightning_zero.engine.units.bucket import Bucket

ON_DEVICE = (("zero0", "none"), ("zero1", "none"), ("zero2", "none"), ("zero3", "none"))
ON_HOST = (("zero1", "optimizer_cpu"), ("zero3", "optimizer_cpu"), ("zero3", "cpu"))  # other kernels, other last bits
STEPS = 4
FAR = 0.25  # of the change by training: rounding alone may change Adam's first steps, which are as long as any
LATE_CYCLES = 400_000  # at most: a fifth of a millisecond
LATE_S = 2e-4


class Late:
    """Mixin of an accelerator on which a stream stands still, for a random while, before what is queued on it."""

    chance = random.Random(0)

    def pause(self) -> None:
        if self.chance.random() < 0.5:
            return
        if isinstance(self, Cuda):
            torch.cuda._sleep(self.chance.randrange(LATE_CYCLES))
        else:
            time.sleep(self.chance.random() * LATE_S)

    def on(self: Any, stream: Any) -> Any:
        return self._late_on(stream)

    @contextlib.contextmanager
    def _late_on(self: Any, stream: Any) -> Iterator[Any]:
        with super().on(stream) as found:  # type: ignore[misc]
            self.pause()
            yield found

    def record(self: Any) -> Any:
        self.pause()
        return super().record()  # type: ignore[misc]


class LateCuda(Late, Cuda):
    pass


class LateHost(Late, Accelerator):
    pass


@contextlib.contextmanager
def late(device: str, seed: int) -> Iterator[None]:
    """In the body, all streams of new engines are late, compute's before each module too, and gathers find NaN."""
    Late.chance = random.Random(seed)
    kinds, made = lightning_zero.device._KINDS, (LateCuda if device == "cuda" else LateHost)
    before, compute = kinds.get(device), made(torch.device(device))
    kinds[device] = made
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, args: compute.pause())
    try:
        with new_memory_is_nan():
            yield
    finally:
        hook.remove()
        if before is None:
            del kinds[device]
        else:
            kinds[device] = before


@contextlib.contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """In the body, memory of gathers is NaN until it is written, by a fill on the stream that writes it. On the stream
    whose pool the memory is from, which may be another, nothing would order the fill before the values."""
    prepare, transfers = Bucket.prepare_gather, Bucket._transfers

    def prepare_nan(bucket: Bucket, **options: Any) -> Any:
        if bucket.plan.reshards:
            bucket.full.allocate()
            bucket.full.data.fill_(float("nan"))
        return prepare(bucket, **options)

    @contextlib.contextmanager
    def transfers_into_nan(bucket: Bucket, *, into_free_memory: bool) -> Iterator[None]:
        with transfers(bucket, into_free_memory=into_free_memory):
            if into_free_memory:
                bucket.full.data.fill_(float("nan"))
            yield

    with (
        mock.patch.object(Bucket, "prepare_gather", prepare_nan),
        mock.patch.object(Bucket, "_transfers", transfers_into_nan),
    ):
        yield


def trained(size: Size, device: str, stage: str | None, offload: str = "none", *, steps: int = STEPS) -> Tensor:
    """Train a few steps, each rank on its part of the batch; or, if ``stage`` is None, the bare module on all of it.
    Return all weights."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model: Any = make_model(size, device)
    settings = {"stage": stage, "offload": offload, "precision": size.precision, "device": device}
    engine = lightning_zero.shard(model, **settings) if stage is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    if engine is not None:
        engine.add_optimizer(optimizer)
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, size.vocab_size, (size.micro_batch, size.length + 1), generator=drawn).to(device)
        parts = tokens.chunk(ranks)
        for part in parts if engine is None else [parts[rank]]:
            with torch.autocast(device, torch.bfloat16, enabled=size.precision != "fp32", cache_enabled=False):
                loss = loss_of(model, part)
            (loss if engine is not None else loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = engine.state_dict(only_rank_0=False) if engine is not None else model.state_dict()
    found = torch.cat([value.detach().cpu().flatten() for value in weights.values()])
    if engine is not None:
        engine.release()
    return found


def compare(size: Size, device: str, deadline: float, seeds: int) -> dict[str, Any]:
    """Return which rows differ from the first of their kind, which are far from the bare module, and, for each seed
    until ``deadline`` (on the clock of ``time.monotonic``), which rows end with other bits while streams are late."""
    torch.use_deterministic_algorithms(True)
    start, bare = (trained(size, device, None, steps=steps) for steps in (0, STEPS))
    ends = {row: trained(size, device, *row) for row in ON_DEVICE + ON_HOST}
    apart = {row: float((end - bare).norm() / (bare - start).norm()) for row, end in ends.items()}
    found: dict[str, Any] = {"equal_to_bare": torch.equal(ends[ON_DEVICE[0]], bare), "late_runs": 0}
    found["from_bare"] = max(apart.values())
    found["other_bits"] = [
        "+".join(row) for kind in (ON_DEVICE, ON_HOST) for row in kind if not torch.equal(ends[row], ends[kind[0]])
    ]
    found["far_from_bare"] = [f"{'+'.join(row)}: {far:.3g}" for row, far in apart.items() if not far < FAR]
    found["other_bits_late"] = []
    for seed in range(seeds):
        for row in ON_DEVICE[3:] + ON_DEVICE[:3] + ON_HOST:
            over = torch.tensor([float(time.monotonic() > deadline)], device=device)
            if dist.is_initialized():
                dist.all_reduce(over)  # the same on all ranks
            if over.item() and found["late_runs"]:
                return found
            with late(device, seed + (1000 * dist.get_rank() if dist.is_initialized() else 0)):
                other = trained(size, device, *row)
            found["late_runs"] += 1
            if not torch.equal(other, ends[row]):
                found["other_bits_late"].append(f"{'+'.join(row)}, seed {seed}")
    return found


def sanitize(size: Size, device: str) -> dict[str, Any]:
    """Run the rows under torch's CUDA sanitizer, which knows streams, events and kernels of torch, not NCCL's. Return
    the races that it finds, by row."""
    # Imported here, because from the import on each event and each allocation calls Python. That takes time, and fails
    # where the backward of a checkpointed block ends its recomputation by an exception.
    import torch.cuda._sanitizer as sanitizer

    if device == "cuda":
        sanitizer.enable_cuda_sanitizer()
    found: dict[str, str] = {}
    for row in ON_DEVICE + ON_HOST:
        try:
            trained(size, device, *row)
        except sanitizer.CUDASanitizerErrors as error:
            found["+".join(row)] = str(error)[:1500]
    return {"races": found}
