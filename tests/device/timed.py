"""How long a step of a model of 7 B parameters would take: the recorded order, with the rates of a machine.

The model that runs is small, and has the units of the large one. Each of its bytes of parameters stands for ``scale``
bytes; buffers of a fixed size and settings in bytes are smaller by as much. Of activations no bytes count: what they
cost is in the share of its peak that a model's matrix products reach.

What is left out: copies over the link take memory bandwidth of the host, too.

``python -m tests.device.timed`` prints the rows of ``docs/benchmarks.md``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine.units import master_storage
from lightning_zero.optimizers import chunks
from lightning_zero.planning.speed import Rates, least_seconds, work_of
from lightning_zero.settings import ZeroConfig
from lightning_zero.tiers import pinned
from lightning_zero.trainer.memory.held_bytes import plan_of
from tests.device.machine import Place, is_on_device, nbytes_of
from tests.device.order import COMPUTE, Trace
from tests.device.simulate import Step, on_paper, train_step
from tests.device.timeline import busy, ends
from tests.models import Does
from tests.rows import OFFLOADED

PARAMETERS = 6.7e9
BLOCKS = 24  # fewer than the large one has: what is not hidden of the first and the last counts for more
WIDTH = 32
TOKENS = 4  # of the small model

# One H200 with 16 cores of its host. Matrix products of a model reach half of the peak.
H200 = Rates(
    compute=395e12, device_memory=4e12, host_memory=200e9, to_device=50e9, to_host=50e9, disk_read=6e9, disk_write=4e9
)
NETWORK = 300e9  # bytes of a message that a rank gathers or reduces in a second; work has no bound for it
QUEUEING_S = 8e-6  # of a kernel, with the Python around it
HOST_OPERATION_S = 10e-6
CACHE = 80e6  # bytes that the host's cores share

PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.")
FRESH = ("aten.copy_.", "aten.fill_.", "aten.zero_.")  # what they write they have not read
FUSED = "_fused_"  # gradients are listed as written, and are not


def block() -> nn.Module:
    """Two products: their weights are buckets of their own, as the large one's are."""
    first, second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    return Does(lambda m, x: (y := x + m.first(x)) + m.second(y), first=first, second=second)


@dataclass
class Scaled:
    """How long the large model's work takes, from the small one's: seconds, and the resource that they need."""

    rates: Rates
    scale: float  # of bytes of parameters
    flop_scale: float

    def kernel(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], where: Place) -> tuple[float, str]:
        if what == "a copy to the host":
            return self._bytes(reads) / self.rates.to_host, "link to the host"
        if what == "a copy to the device":
            return self._bytes(writes) / self.rates.to_device, "link to the device"
        if "." not in what:  # a message
            return self._bytes(reads) / NETWORK, "network"
        if what.startswith(PRODUCTS):
            flops = 2 * writes[0].numel() * reads[-2].shape[-1]
            return self.flop_scale * flops / self.rates.compute, "compute"
        if where.function == "engine/passes/passes.py: Passes.backward" or not where.line:
            return 0.0, ""  # of the model: activations
        return self._traffic(what, reads, writes) / self.rates.device_memory, "device memory"

    def on_host(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> tuple[float, str]:
        return HOST_OPERATION_S + self._traffic(what, reads, writes) / self.rates.host_memory, "host memory"

    def _is_far(self, tensor: Tensor) -> bool:
        """Whether it is in memory: what is small, and used by turns, stays in the host's cache."""
        return is_on_device(tensor) or self.scale * tensor.untyped_storage().nbytes() > CACHE

    def on_disk(self, tensor: Tensor, *, writes: bool) -> tuple[float, str]:
        rate = self.rates.disk_read if writes else self.rates.disk_write
        return self._bytes([tensor]) / rate, "disk"

    def queueing(self) -> float:
        return QUEUEING_S

    def _bytes(self, tensors: Sequence[Tensor]) -> float:
        return self.scale * sum(map(nbytes_of, tensors))

    def _traffic(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> float:
        if FUSED in what:  # of parameters, gradients, first and second moments; and numbers
            large = [t for t in writes if t.numel() > 1]
            grads = large[len(large) // 4 : len(large) // 2]
            far = [t for t in (*large, *large) if self._is_far(t)]
            return self._bytes(far) - self._bytes([t for t in grads if self._is_far(t)])
        reads, writes = [t for t in reads if self._is_far(t)], [t for t in writes if self._is_far(t)]
        inputs = {id(t) for t in reads}
        again = 0 if what.startswith(FRESH) else self._bytes([t for t in writes if id(t) not in inputs])
        return self._bytes(reads) + self._bytes(writes) + again * what.split(".")[1].endswith("_")


class Predicted(NamedTuple):
    """Seconds of a step where steps follow one another, the least that it can take, and how long resources work."""

    seconds: float
    bound: float
    busy: dict[str, float]

    @property
    def phi(self) -> float:
        return self.bound / self.seconds


def predict(
    row: str, tokens: float, *, precision: str = "bf16", clips: bool = False, micro_batches: int = 1, ranks: int = 1
) -> Predicted:
    """A step of stage 3, with ``tokens`` on one rank."""
    steps = 2
    with on_paper(ranks, ()) as (machine, folder):
        model = nn.Sequential(*(block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 8, bias=False))
        held = sum(p.numel() for p in model.parameters())
        scale = PARAMETERS / held
        flop_scale = scale * tokens / (TOKENS * micro_batches)
        machine.costs = Scaled(H200, scale, flop_scale)
        marks: list[int] = []
        with _smaller(scale):
            engine = _shard(model, row, precision, scale, folder)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            engine.add_optimizer(optimizer)
            plans = plan_of(engine)
            step = Step(micro_batches, clips=clips)
            train_step(step, engine, model, optimizer, _loss_of)  # learns the order
            engine.passes.wait_for_all()
            trace = machine.order.trace = Trace()
            for _ in range(steps):
                train_step(step, engine, model, optimizer, _loss_of)
                marks.append(len(trace.tasks))
            engine.passes.wait_for_all()
            machine.order.trace = None
            engine.release()
    over = ends(trace.tasks)
    # A step is over when its last kernel is: what it leaves to be done is done beside the next.
    last = [max(over[n] for n in range(mark) if trace.tasks[n].party == COMPUTE) for mark in marks]
    seconds = (last[-1] - last[0]) / (steps - 1)
    work = work_of(plans, 6 * held * TOKENS * micro_batches * flop_scale / scale, micro_batches=micro_batches)
    for name, amount in vars(work).items():
        setattr(work, name, amount * scale)
    found = {name: amount / steps for name, amount in busy(trace.tasks).items()}
    return Predicted(seconds, least_seconds(work, H200, micro_batches=micro_batches), found)


@contextlib.contextmanager
def _smaller(scale: float) -> Iterator[None]:
    """Buffers of a fixed size hold as much of the small model as they would of the large one."""
    sizes = [(master_storage, "CAST_CHUNK"), (pinned, "PAIR_NBYTES")]
    with contextlib.ExitStack() as stack:
        for module, name in [*sizes, (chunks, "MAX_CHUNK")]:
            size = max(256, int(getattr(module, name) / scale) // 64 * 64)
            stack.enter_context(mock.patch.object(module, name, size))
        yield


def _shard(model: nn.Module, row: str, precision: str, scale: float, folder: str) -> Any:
    offload: Any = {"name": row} | ({"nvme_path": folder} if "nvme" in row else {})
    sizes = {
        name: max(1, int(getattr(ZeroConfig(), name) / scale)) for name in ("prefetch_bytes", "reduce_bucket_bytes")
    }
    return lightning_zero.shard(model, stage=3, precision=precision, offload=offload, device="meta", **sizes)


def _loss_of(model: nn.Module) -> Tensor:
    x = torch.zeros(TOKENS, WIDTH, device="meta", requires_grad=True)
    return F.mse_loss(model(x).float(), torch.zeros(TOKENS, 8, device="meta"))


HOWS: dict[str, dict[str, Any]] = {"plain": {}, "clipped": {"clips": True}, "two micro-batches": {"micro_batches": 2}}
# The next forward hides the optimizer: what that reads and writes of a parameter (28 bytes, 4 of its gradient) takes as
# long as a third of the model's compute, with 6 operations for each token.
HIDING_TOKENS = 3 * 32 * H200.compute / (6 * H200.host_memory)


def main() -> None:
    print(f"{PARAMETERS / 1e9:g} B parameters, bf16, {HIDING_TOKENS:,.0f} tokens in a step\n")
    print("| `zero/offload` | step | ranks | seconds | least | phi | busy longest |\n|---|---|---|---|---|---|---|")
    for row in OFFLOADED:
        for how, ranks in (("plain", 1), ("plain", 4), ("clipped", 1), ("two micro-batches", 1)):
            found = predict(row, HIDING_TOKENS, ranks=ranks, **HOWS[how])
            name, seconds = max(found.busy.items(), key=lambda item: item[1])
            times = f"{found.seconds:.2f} | {found.bound:.2f} | {found.phi:.2f}"
            print(f"| `{row}` | {how} | {ranks} | {times} | {name}, {seconds:.2f} s |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
