"""Training on the machine, as one rank of a world whose other ranks are torch's fake process group."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine.units import capacity
from lightning_zero.planning.memory import on_tier, peak_bytes
from lightning_zero.planning.placement import Tier
from lightning_zero.planning.topology import Ranks, over_nodes
from lightning_zero.settings import HybridShard
from lightning_zero.trainer.memory.held_bytes import limits_of
from tests.device.machine import Machine, Tally
from tests.device.virtual import Pace, simulated
from tests.models import Does

VOCABULARY = 16
WIDTH = 16


class Step(NamedTuple):
    """One training step: between backward and step it clips by the norm, calls the model, or looks at gradients."""

    micro_batches: int = 1
    clips: bool = False
    evaluates: bool = False
    looks: bool = False


FLAT = {"hybrid_shard": "flat"}
PLAIN = (Step(),) * 3
# Each number of micro-batches with clipping and without; the last two repeat what has been learned by then.
MIXED = (Step(), Step(clips=True), Step(2), Step(2, clips=True), Step(), Step(2))


@dataclass(frozen=True)
class Case:
    """One engine and how it is trained.

    Attributes:
        row: of offload.
        worker: when the thread of offloaded steps gets on: as soon as it can, or when somebody waits for it.
        nodes: on which the ranks are; with several, shards are divided inside of a node, unless ``settings`` differ.
        even_alone: one rank sends its messages all the same.
        settings: arguments of ``lightning_zero.shard``, beside those.
        fp32_modules: classes that keep fp32; None: as by default.
    """

    stage: int = 3
    row: str = "none"
    precision: str = "fp32"
    grad_dtype: str | None = None
    ranks: int = 4
    steps: tuple[Step, ...] = PLAIN
    worker: Pace = "lazy"
    blocks: int = 3
    nodes: int = 1
    even_alone: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    fp32_modules: tuple[str, ...] | None = None

    def __str__(self) -> str:
        words = [f"zero{self.stage}", self.row, self.precision, f"{self.ranks}ranks"]
        words += [self.worker] * (self.row != "none") + [f"{self.nodes}nodes"] * (self.nodes > 1)
        words += ["even_alone"] * self.even_alone + [f"{key}={value}" for key, value in self.settings.items()]
        return "-".join(words)


@dataclass
class Found:
    """What one simulated training has shown.

    Attributes:
        races: with how often each was seen, until the engine rests.
        at_release: races that came with the end of the engine.
        unbound: functions that used the device in a thread that had not been bound to it.
        construction: what was counted while the module was sharded.
        steps: what was counted in each step.
        at_first, at_rest: bytes of device memory when the module has been sharded, and behind the last step.
        shard_nbytes: of this rank's shards in the dtype of gradients; all buckets together.
        unit_nbytes: of the largest unit, gathered.
        planned_nbytes: of the device, at the peak of the last step, without the model's own.
    """

    construction: Tally
    at_first: int
    shard_nbytes: int
    unit_nbytes: int
    planned_nbytes: int
    at_rest: int = 0
    steps: list[Tally] = field(default_factory=list)
    races: dict[str, int] = field(default_factory=dict)
    at_release: dict[str, int] = field(default_factory=dict)
    unbound: dict[str, int] = field(default_factory=dict)


def block() -> nn.Module:
    return Does(lambda m, x: x + m.linear(m.norm(x)), norm=nn.LayerNorm(WIDTH), linear=nn.Linear(WIDTH, WIDTH))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@contextlib.contextmanager
def world(ranks: int) -> Iterator[None]:
    """This process as the first of ``ranks``."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    hook = sys.excepthook  # torch puts one of its own in front, each time
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def fused_on_meta() -> Any:
    """torch's fused AdamW has a kernel for the meta device, and a list of devices that leaves it out."""
    adam = importlib.import_module("torch.optim.adam")
    return mock.patch.object(adam, "_device_dtype_check_for_fused", lambda *_, **__: None)


@contextlib.contextmanager
def on_paper(ranks: int, mutations: Sequence[tuple[str, Any]], pace: Pace = "lazy") -> Iterator[tuple[Machine, str]]:
    """A machine in the place of the device, and a folder for files.

    Args:
        mutations: what stands in the place of a function of the package, by its path.
    """
    machine = Machine()
    with contextlib.ExitStack() as stack:
        for target, new in mutations:
            stack.enter_context(mock.patch(target, new))
        files = stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning_zero_virtual_"))
        for context in (world(ranks), fused_on_meta(), simulated(machine, pace)):
            stack.enter_context(context)
        yield machine, files


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.zeros(2, 4, dtype=torch.long, device="meta")
    loss: Tensor = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    return loss


def train_step(
    step: Step,
    engine: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module], Tensor] = loss_of,
) -> None:
    with engine.step_scope():
        for micro_batch in range(step.micro_batches):
            last = micro_batch == step.micro_batches - 1
            with contextlib.nullcontext() if last else engine.passes.reducer.no_sync():
                engine.passes.backward(loss_of(model) / step.micro_batches)
        if step.clips:
            lightning_zero.clip_grad_norm_(model, 1.0)
        if step.evaluates:
            with torch.no_grad():
                loss_of(model)
        if step.looks:
            with lightning_zero.gather(model, grads=True):
                pass
        optimizer.step()
        optimizer.zero_grad()


def train(case: Case, mutations: Sequence[tuple[str, Any]] = (), *, then: Callable[..., None] | None = None) -> Found:
    """Train a small model on the machine; ``then`` is called with engine, model and optimizer behind the last step."""
    warnings.filterwarnings("ignore", message=".*to a meta parameter in the current model, which is a no-op")
    names = [str(rank * case.nodes // case.ranks) for rank in range(case.ranks)]
    ranks = Ranks.locate(0, over_nodes(names, HybridShard[case.settings.get("hybrid_shard", "node")], exchanges=True))
    gc.collect()
    gc.disable()  # what garbage is freed when would be another each time
    try:
        with (
            # No tensor has values: each is taken for one that was written to.
            mock.patch("lightning_zero.engine.whole.whole_params.same_bits", lambda *_: False),
            mock.patch.object(capacity, "find_ranks", lambda *_: ranks),  # the others would say where they are
            mock.patch.dict(os.environ, LIGHTNING_ZERO_EVEN_ALONE=str(int(case.even_alone))),
            on_paper(case.ranks, mutations, case.worker) as (machine, files),
        ):
            return _train(case, machine, files, then)
    finally:
        gc.enable()


def _train(case: Case, machine: Machine, files: str, then: Callable[..., None] | None) -> Found:
    def counted() -> Tally:
        tally, machine.tally = machine.tally, Tally(peak=machine.held)
        return tally

    model = Model(case.blocks)
    precision: Any = {"name": case.precision} | ({"grad_dtype": case.grad_dtype} if case.grad_dtype else {})
    precision |= {"fp32_modules": list(case.fp32_modules)} if case.fp32_modules is not None else {}
    settings = {k: v for k, v in case.settings.items() if case.stage == 3 or k != "prefetch_bytes"}
    settings |= {"offload": {"name": case.row} | ({"nvme_path": files} if "nvme" in case.row else {})}
    engine = lightning_zero.shard(model, stage=case.stage, precision=precision, device="meta", **settings)
    for name, stream in engine.comm.streams._streams.items():
        machine.order.names[stream] = name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine.add_optimizer(optimizer)
    limits = limits_of(engine, case.steps[-1].micro_batches if case.steps else 1)
    peaks = peak_bytes([bucket.plan for bucket in engine.buckets], replace(limits, has_link=True))
    found = Found(
        construction=counted(),
        at_first=machine.held,
        shard_nbytes=sum(bucket.plan.owned_numel * bucket.dtypes.grad.itemsize for bucket in engine.buckets),
        unit_nbytes=max(sum(bucket.full.nbytes for bucket in unit.buckets) for unit in engine.units),
        planned_nbytes=max(on_tier(held, Tier.device) for held in peaks.values()),
    )
    try:
        for step in case.steps:
            train_step(step, engine, model, optimizer)
            found.steps.append(counted())
        if then is not None:
            then(engine, model, optimizer)
        engine.passes.end_run()
        races, found.at_rest = machine.races.copy(), machine.held
    finally:
        engine.release()
    found.races = {str(race): times for race, times in races.items()}
    found.at_release = {str(race): times for race, times in (machine.races - races).items()}
    found.unbound = dict(machine.unbound)
    return found
