"""``make bench-scale``: models of 70 B and 400 B parameters on up to 4096 ranks, seen from one of them.

torch's fake process group plays the other ranks, and the meta device holds tensors that have no values: layouts, order,
gathers, reductions and optimizer steps are the engine's own, in one process, without the memory or a network. Every
case runs whole steps of :class:`lightning_zero.models.gpt.GPT` first and fails where

- the logical collectives of a step are not those of the table in ``docs/architecture.md`` (Stages), bucket by
  bucket;
- the bytes at rest, by role and tier, are not those of ``planning/memory.py``.

Then it is timed. The host overhead is the CPU time of a step under the engine less that of the same step of the bare
model, divided by the units: median of rounds, and quartiles. In the timed steps the blocks compute nothing (their
outputs and gradients have the right shapes), and so does the scaling of gradients, because torch's meta kernels are
partly Python, a hundred times slower than a kernel launch; the optimizer is torch's fused AdamW. What is timed is thus
hooks, order, issue of gathers and reductions, moving of parameters and gradients, runs of the optimizer. Not in it:
what a real library does when it is called, and CUDA's streams and events.

    python -m benchmarks.bench_scale                                    # the table of docs/benchmarks.md
    python -m benchmarks.bench_scale --model 70b --stages 3 --rounds 20
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import importlib
import json
import multiprocessing
import os
import statistics
import time
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench import table
from lightning_zero.models.gpt import GPT, Block

MODELS: dict[str, dict[str, Any]] = {
    "70b": {"vocab_size": 128_000, "n_layer": 80, "n_head": 64, "d_model": 8192, "block_size": 8192},
    "400b": {"vocab_size": 128_000, "n_layer": 126, "n_head": 128, "d_model": 16384, "block_size": 8192},
}
WORLDS = (8, 64, 512, 4096)
STAGES = (0, 1, 2, 3)
TOKENS = (1, 64)  # batch, length: tensors without values cost the same at any size
WARM_UP = 2  # rounds


@dataclass(frozen=True)
class Case:
    """One engine on one simulated rank.

    Attributes:
        sizes: arguments of the GPT.
        settings: arguments of ``lightning_zero.shard`` beside stage and precision.
    """

    model: str
    sizes: Mapping[str, Any]
    stage: int
    world_size: int
    rank: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """What was found. Bytes are by role (``compute_param`` ...), gradients included.

    Attributes:
        used_numel: elements of buckets before their padding; ``padded_numel`` with it.
        owned_numel: elements of parameters that this rank steps.
        fragments: pieces of parameters that lie in this rank's part of the buckets.
        gathered_nbytes: of the largest unit.
        counts: logical collectives of one step by kind.
        exchanges: agreements on the next gather, in the first step and in the following one.
        norm_table_nbytes: partial sums of a gradient norm, one for each rank: the table of shards.
        calls: of functions in one step, Python's and C's, beyond those of a step of the bare model.
        own_calls: of this package's functions, in one step.
        build_s: CPU seconds.
        host_mib: resident memory of this process that the engine and its first steps took.
        overhead_us: host microseconds per unit and step; None where nothing was timed.
        spread_us: its quartiles.
    """

    case: Case
    parameters: int
    units: int
    buckets: int
    used_numel: int
    padded_numel: int
    owned_numel: int
    fragments: int
    gathered_nbytes: int
    norm_table_nbytes: int
    counts: dict[str, int] = field(default_factory=dict)
    exchanges: tuple[int, int] = (0, 0)
    nbytes: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    own_calls: int = 0
    build_s: float = 0.0
    host_mib: float = 0.0
    overhead_us: float | None = None
    spread_us: tuple[float, float] | None = None
    bare_us: float | None = None


# -- the simulated machine --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def simulated(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a world that has no other processes."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)
    from torch._C._distributed_c10d import FakeWork  # type: ignore[attr-defined]

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        # Messages are over at once. Those of the fake group never say so, and the engine would look again and again.
        with mock.patch.object(FakeWork, "is_completed", lambda _: True, create=True):
            yield
    finally:
        dist.destroy_process_group()


def make_model(sizes: Mapping[str, Any]) -> GPT:
    with torch.device("meta"):
        return GPT(**sizes)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


@contextlib.contextmanager
def fused_on_meta() -> Iterator[None]:
    """torch's fused AdamW has a kernel for the meta device, and a list of devices that leaves it out."""
    adam = importlib.import_module("torch.optim.adam")
    with mock.patch.object(adam, "_device_dtype_check_for_fused", lambda *_, **__: None):
        yield


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    forward_backward(model)
    optimizer.step()
    optimizer.zero_grad()


def forward_backward(model: nn.Module) -> None:
    tokens = torch.zeros(TOKENS, dtype=torch.long, device="meta")
    logits = model(tokens)
    F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()


# -- timed without arithmetic -----------------------------------------------------------------------------------------


class _Nothing(torch.autograd.Function):
    """The outputs and gradients of a layer, without a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, *params: Tensor) -> Tensor:
        ctx.save_for_backward(x, *params)
        return x.new_empty(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *params = ctx.saved_tensors
        return x.new_empty(x.shape), None, *(p.new_empty(p.shape) for p in params)


def _layer(self: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = _Nothing.apply(x, self.bias.numel(), self.weight, self.bias)  # type: ignore[no-untyped-call]
    return out


def _block(self: Block, x: Tensor, _: Tensor | None = None) -> Tensor:
    x = self.proj(self.qkv(self.norm1(x)))
    return self.down(self.up(self.norm2(x)))


def compute_nothing(model: GPT) -> None:
    """Blocks and their layers are called, in their order, and cost next to nothing."""
    for block in model.blocks:
        block.forward = types.MethodType(_block, block)  # type: ignore[method-assign]
        for layer in block.children():
            layer.forward = types.MethodType(_layer, layer)


@contextlib.contextmanager
def scaling_costs_nothing() -> Iterator[None]:
    """Gradients are scaled by ``mul.out``, for which torch's meta kernel is Python and takes 0.1 ms."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that a kernel is replaced
        library.impl("mul.out", lambda self, other, *, out: out)
    try:
        yield
    finally:
        library._destroy()


# -- one case ---------------------------------------------------------------------------------------------------------


def measure(case: Case, rounds: int) -> Result:
    """Build the engine, run whole steps, compare with table and plan, and time ``rounds`` of them (0: none).

    Raises:
        RuntimeError: collectives or bytes are not those of the table and the plan.
    """
    import lightning_zero

    with simulated(case.rank, case.world_size), fused_on_meta():
        model = make_model(case.sizes)
        gc.collect()
        resident, started = _resident_mib(), time.process_time()
        engine = lightning_zero.shard(model, stage=case.stage, precision="bf16", device="meta", **case.settings)
        build_s = time.process_time() - started
        optimizer = make_adamw(model)
        engine.add_optimizer(optimizer)
        result = _describe(case, engine)
        _check_steps(engine, model, optimizer, result)
        result.build_s, result.host_mib = build_s, _resident_mib() - resident
        compute_nothing(model)
        with scaling_costs_nothing():
            bare = make_model(case.sizes).bfloat16()
            bare_optimizer = make_adamw(bare)
            compute_nothing(bare)
            calls, result.own_calls = _calls(model, optimizer)
            result.calls = calls - _calls(bare, bare_optimizer)[0]
            if rounds:
                _time(result, (bare, bare_optimizer), (model, optimizer), rounds)
        del optimizer  # a held optimizer gets its state back, and there is none on the meta device
        engine.release()
    return result


def _describe(case: Case, engine: Any) -> Result:
    buckets = engine.buckets
    owned = [fragment for bucket in buckets for fragment in bucket.owned_fragments()]
    return Result(
        case=case,
        parameters=sum(info.numel for bucket in buckets for info in bucket.params),
        units=len(engine.units),
        buckets=len(buckets),
        used_numel=sum(bucket.layout.used_numel for bucket in buckets),
        padded_numel=sum(bucket.layout.numel for bucket in buckets),
        owned_numel=sum(fragment.numel for fragment in owned),
        fragments=len(owned),
        gathered_nbytes=max(sum(bucket.full.nbytes for bucket in unit.buckets) for unit in engine.units[1:]),
        norm_table_nbytes=8 * engine.comm.world_size,
    )


def expected_counts(engine: Any, micro_batches: int) -> Counter[tuple[str, str]]:
    """The table of stages for one step of this engine. The root stays gathered, and so does the last unit."""
    from lightning_zero.planning.placement import logical_collectives

    expected: Counter[tuple[str, str]] = Counter()
    for unit in engine.units:
        stays = unit.index in (0, len(engine.units) - 1)
        for bucket in unit.buckets:
            counts = logical_collectives(bucket.plan.row, micro_batches, stays_gathered=stays)
            expected.update({(kind, bucket.label): n for kind, n in counts.items() if n})
    return expected


def _check_steps(engine: Any, model: GPT, optimizer: Any, result: Result) -> None:
    """Two whole steps: the order is agreed on in the first, the second is that of the table and the plan."""
    from lightning_zero.planning.memory import Moment

    seen: Counter[str] = Counter()
    engine.comm.observers.append(lambda kind, _: seen.update([kind]))
    train_step(model, optimizer)
    first = seen["exchange"]
    engine.passes.wait_for_all()
    engine.comm.counts.clear()
    seen.clear()
    forward_backward(model)
    result.nbytes = _check_bytes(engine, Moment.reduced)
    optimizer.step()
    optimizer.zero_grad()
    result.exchanges = first, seen["exchange"]
    engine.comm.observers.pop()
    counts, expected = engine.comm.counts.copy(), expected_counts(engine, 1)
    if counts != expected:
        raise RuntimeError(f"collectives beyond the table: {counts - expected}; missing: {expected - counts}")
    _check_bytes(engine, Moment.cleared)
    for (kind, _), n in counts.items():
        result.counts[kind] = result.counts.get(kind, 0) + n


def _check_bytes(engine: Any, moment: Any) -> dict[str, int]:
    """Bytes at rest by role, which are the plan's."""
    from lightning_zero.planning.memory import ADAM_STATES, planned_bytes
    from lightning_zero.trainer.memory.held_bytes import held_bytes, plan_of

    engine.passes.wait_for_all()
    engine.passes.sharded_grads.finish_pending()
    held = held_bytes(engine)
    planned = planned_bytes(plan_of(engine), engine.comm.rank, state_tensors=ADAM_STATES, moment=moment)
    if held != planned:
        raise RuntimeError(f"{moment.value}: held {held}, planned {planned}")
    return {role.value: nbytes for (role, _), nbytes in held.items()}


def _calls(model: GPT, optimizer: Any) -> tuple[int, int]:
    """Calls of functions, Python's and C's, and of this package's, in one step: what time goes to, without a clock."""
    import lightning_zero

    package = os.path.dirname(lightning_zero.__file__)
    train_step(model, optimizer)
    profile = cProfile.Profile()
    profile.enable()
    train_step(model, optimizer)
    profile.disable()
    entries = profile.getstats()
    own = [e for e in entries if not isinstance(e.code, str) and e.code.co_filename.startswith(package)]
    return sum(e.callcount for e in entries), sum(e.callcount for e in own)


def _time(result: Result, bare: tuple[GPT, Any], ours: tuple[GPT, Any], rounds: int) -> None:
    """A step under the engine and one of the bare model, each with its optimizer, in turns."""
    overhead, alone = [], []
    for turn in range(WARM_UP + rounds):
        gc.collect()
        times = []
        for side in (bare, ours):
            started = time.process_time()  # nothing in it waits, and other processes do not count
            train_step(*side)
            times.append((time.process_time() - started) * 1e6 / result.units)
        if turn >= WARM_UP:
            alone.append(times[0])
            overhead.append(times[1] - times[0])
    result.overhead_us, result.bare_us = statistics.median(overhead), statistics.median(alone)
    low, _, high = statistics.quantiles(overhead, n=4) if rounds > 1 else overhead * 3
    result.spread_us = low, high


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def in_process(case: Case, rounds: int = 0) -> Result:
    """:func:`measure` in a process of its own: the caller keeps its process group, and memory is measured afresh."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, case, rounds).result()


# -- tables -----------------------------------------------------------------------------------------------------------


def cases(models: list[str], stages: list[int], worlds: list[int]) -> list[Case]:
    """Every stage as the first and the last rank of the largest world, and the last stage as first rank of each."""
    largest = max(worlds)
    found = []
    for model in models:
        sizes = MODELS[model]
        found += [Case(model, sizes, stage, largest, rank) for stage in stages for rank in (0, largest - 1)]
        found += [Case(model, sizes, stages[-1], world, 0) for world in worlds if world != largest]
    return found


def print_layout(model: str) -> None:
    """The units of a model, and the buckets of one block."""
    from lightning_zero.engine.units.describe import describe_units
    from lightning_zero.planning.choose import human_bytes
    from lightning_zero.settings import Precision, make_config

    units = describe_units(make_model(MODELS[model]), make_config(), Precision.bf16)
    print(f"\n{model}: {len(units)} units with {sum(len(u.buckets) for u in units)} buckets, gathered in bf16")
    shown: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for unit in units:
        shape = tuple(tuple(info.numel for info in bucket.params) for bucket in unit.buckets)
        shown.setdefault(shape, []).append(unit.name or "(root)")
    for shape, names in shown.items():
        nbytes = human_bytes(2 * sum(map(sum, shape)))
        sizes = ", ".join(" + ".join(f"{n:,}" for n in bucket) for bucket in shape)
        print(f"  {len(names)} x {names[0]}: {nbytes}; elements of its buckets: {sizes}")


def by_stage(result: Result) -> dict[str, Any]:
    """A row of the table of stages."""
    from lightning_zero.planning.choose import human_bytes

    counts, nbytes = result.counts, result.nbytes
    return {
        "model": result.case.model,
        "stage": result.case.stage,
        "rank": result.case.rank,
        "units": result.units,
        "buckets": result.buckets,
        "gathers": counts.get("all_gather", 0),
        "reductions": counts.get("all_reduce", 0) + counts.get("reduce_scatter", 0),
        "parameters": human_bytes(nbytes["compute_param"]),
        "gradients": human_bytes(nbytes["grad"]),
        "masters, state": human_bytes(nbytes["master_param"] + nbytes["optim_state"]),
        **_timed(result),
    }


def by_world(result: Result) -> dict[str, Any]:
    """A row of the table of growth."""
    from lightning_zero.planning.choose import human_bytes

    return {
        "model": result.case.model,
        "ranks": result.case.world_size,
        "operations": sum(result.counts.values()),
        "at rest": human_bytes(sum(result.nbytes.values())),
        "padding": f"{1 - result.used_numel / result.padded_numel:.2%}",
        "agreements, first / next step": "{} / {}".format(*result.exchanges),
        "table of shards": human_bytes(result.norm_table_nbytes),
        "calls per unit": round(result.calls / result.units),
        "own": round(result.own_calls / result.units),
        "build s": round(result.build_s, 2),
        "host MiB": round(result.host_mib),
        **_timed(result),
    }


def _timed(result: Result) -> dict[str, Any]:
    if result.overhead_us is None or result.spread_us is None:
        return {}
    low, high = result.spread_us
    return {
        "us per unit": round(result.overhead_us),
        "quartiles": f"{low:.0f}-{high:.0f}",
        "us per bucket": round(result.overhead_us * result.units / result.buckets),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="default: all")
    parser.add_argument("--stages", type=int, nargs="*", default=list(STAGES), choices=STAGES)
    parser.add_argument("--worlds", type=int, nargs="*", default=list(WORLDS), help="numbers of ranks, above 1")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps; 0: counts and bytes only")
    args = parser.parse_args()
    models = args.model or list(MODELS)
    load = os.getloadavg()[0]
    print(f"{date.today()}, {os.cpu_count()} CPU cores, load {load:.1f}, torch {torch.__version__}, bf16, fake group")
    for model in models:
        print_layout(model)
    results = []
    for case in cases(models, args.stages, args.worlds):
        results.append(in_process(case, args.rounds))
        print(json.dumps(by_stage(results[-1]) | by_world(results[-1])), flush=True)
    largest = max(args.worlds)
    print(f"\nOne rank of {largest}; collectives per step as in the design's table, bytes at rest as planned:\n")
    print(table([by_stage(r) for r in results if r.case.world_size == largest]))
    print(f"\nGrowth with the number of ranks, at stage {args.stages[-1]} (the table of shards is that of norms):\n")
    growth = [r for r in results if r.case.rank == 0 and r.case.stage == args.stages[-1]]
    growth.sort(key=lambda r: (models.index(r.case.model), r.case.world_size))
    print(table([by_world(r) for r in growth]))


if __name__ == "__main__":
    main()
