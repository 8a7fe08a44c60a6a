"""Decide whether a plan fits a machine, and what would make it fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_zero.planning import memory
from lightning_zero.planning.activations import Activations, ByBatchSize, peaks_with
from lightning_zero.planning.buckets import BucketPlan, BucketShape, place
from lightning_zero.planning.memory import ADAM_STATES, Bytes, Limits, Moment, Phase, States
from lightning_zero.planning.placement import OFFLOADS, STAGES, Tier, TierRow, default_budgets, split_by_budget
from lightning_zero.planning.speed import Rates, Sent, StepTime, expected, sent_by
from lightning_zero.planning.tensor_states import TensorStates
from lightning_zero.planning.topology import check_nodes
from lightning_zero.settings import ConfigError, HybridShard, Offload, OffloadConfig, Stage

MOST_DOUBLINGS = 10  # of the number of hosts, when searching for one that fits


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine to train on. All hosts are alike. Raises ConfigError if ``hybrid_shard`` cannot divide the ranks."""

    gpus: int  # per host; without GPUs: processes per host
    gpu_memory: int  # bytes of one GPU
    host_memory: int  # bytes of one host
    nvme: int  # bytes of one host's disk
    nodes: int = 1  # hosts
    shared: bool = False  # there are no GPUs, so device memory is host memory
    hybrid_shard: HybridShard = HybridShard.auto

    def __post_init__(self) -> None:
        if self.hybrid_shard is HybridShard.node_backward:
            check_nodes(self.nodes, self.gpus)

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes and settings of a model that planning needs."""

    names: tuple[str, ...]  # units, the root first
    shapes: tuple[BucketShape, ...]
    limits: Limits
    states: int | TensorStates = ADAM_STATES  # element-wise state tensors per parameter, or each parameter's state
    activations: ByBatchSize | None = None  # activations of a micro-batch; None: not counted
    samples: int | None = None  # size of a micro-batch; default: the smaller measured size
    recomputes: bool = False  # activations include activation checkpointing
    gather_after_fit: bool | None = None  # gather the module after a run. True: it must fit. None: if it fits

    @property
    def copy_nbytes(self) -> int:
        """Return the bytes of the copy of the whole module that a host can hold after a run."""
        return memory.copy_nbytes(nbytes for shape in self.shapes for nbytes in shape.built_nbytes)

    @property
    def flops(self) -> float:
        """Return the FLOPs of a micro-batch's forward and backward; if not measured, 6 per parameter and sample."""
        found = self.micro_batch
        return 6.0 * sum(shape.numel for shape in self.shapes) * (self.samples or 1) if found is None else found.flops

    @property
    def micro_batch(self) -> Activations | None:
        known = self.activations
        return None if known is None else known.interpolate(self.samples or known.sizes[0])


@dataclass(frozen=True, slots=True)
class Shortage:
    """How many bytes a plan needs beyond the memory of one GPU (``device``) or of one host (``host``, ``nvme``)."""

    tier: Tier
    nbytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """The memory and time of a run with one stage and one choice of ``zero/offload`` on a machine."""

    stage: Stage
    offload: Offload
    rest: Bytes  # bytes of one rank at rest while gradients wait
    peaks: dict[Phase, Bytes]  # bytes of one rank at the peak of each phase
    per_rank: dict[Tier, int]  # peak bytes on each tier over all moments
    per_host: dict[Tier, int]  # the same for all ranks of a host
    together: int  # peak bytes of device and host memory over all moments, of a host's ranks
    shortages: tuple[Shortage, ...]
    refused: str = ""  # why the budgets of auto cannot hold the model
    sent: Sent | None = None  # bytes that a rank sends in a step
    time: StepTime | None = None  # expected time of a step; None: no rates were given
    after_run: Bytes = field(default_factory=Counter)  # bytes of one rank, module gathered; empty: it stays sharded
    is_whole: bool = False  # the module is gathered after a run, because it must be or it fits

    @property
    def moments(self) -> list[Bytes]:
        """Return a rank's bytes at each moment: in every phase and, if the module is gathered, after the run."""
        return [*self.peaks.values(), *([self.after_run] if self.is_whole else [])]

    @property
    def fits(self) -> bool:
        return not self.shortages and not self.refused


@dataclass(frozen=True, slots=True)
class Advice:
    """Two ways to make a plan fit: ``gpus`` GPUs in total, or ``offload`` at the same stage. None: not found."""

    gpus: int | None
    offload: Offload | None


def plan_row(
    model: Model, stage: Stage, offload: Offload, machine: Machine, settings: OffloadConfig, rates: Rates | None = None
) -> Row:
    """Plan the memory of a run with one stage and offload setting and, if ``rates`` are given, the time of a step.
    ``settings``: the budgets of ``auto``."""
    try:
        tiers = _tiers(model, stage, offload, machine, settings)
    except ConfigError as error:
        return Row(stage, offload, Counter(), {}, dict.fromkeys(Tier, 0), dict.fromkeys(Tier, 0), 0, (), str(error))
    buckets = _placed(model, stage, tiers, machine)
    kept_by = machine.gpus if machine.hybrid_shard is HybridShard.node_backward else 0
    several = bool(buckets) and buckets[0].layout.world_size > machine.gpus > 1
    summed_by = machine.gpus if several else 0
    limits = replace(model.limits, has_link=not machine.shared, node_ranks=kept_by, sum_ranks=summed_by)
    waiting = Moment.accumulating if limits.micro_batches > 1 else Moment.reduced
    states = _states(model, buckets, machine)
    rest = memory.planned_bytes(buckets, state_tensors=states, moment=waiting)
    activations = model.micro_batch
    peaks = peaks_with(buckets, limits, activations, state_tensors=states)
    exchanged = activations.exchanged if activations is not None else 0
    replicas = max(1, machine.world_size // buckets[0].layout.world_size) if buckets else 1
    sent = sent_by(buckets, limits, replicas=replicas, exchanged=exchanged)
    time = None
    if rates is not None:
        time = expected(
            buckets, limits, model.flops, rates, replicas=replicas, exchanged=exchanged, on_cpu=machine.shared
        )
    after, lack = _after_run(model, buckets, machine)
    is_whole = bool(after) and not (lack and model.gather_after_fit is None)
    moments = [*peaks.values(), *([after] if is_whole else [])]
    per_rank = {tier: max(memory.on_tier(held, tier) for held in moments) for tier in Tier}
    per_host = {tier: nbytes * machine.gpus for tier, nbytes in per_rank.items()}
    together = max(map(memory.in_memory, moments)) * machine.gpus
    lacks = _shortages(per_rank, per_host, together, machine, lack if is_whole else 0)
    row = Row(stage, offload, rest, peaks, per_rank, per_host, together, lacks, sent=sent, time=time)
    return replace(row, after_run=after, is_whole=is_whole)


def _states(model: Model, buckets: Sequence[BucketPlan], machine: Machine) -> States:
    states, has_link = model.states, not machine.shared
    return states if isinstance(states, int) else states.of_fullest_rank(buckets, has_link=has_link)


def _after_run(model: Model, buckets: Sequence[BucketPlan], machine: Machine) -> tuple[Bytes, int]:
    """Return a rank's bytes after a run that gathers the module, and the bytes that its host then lacks. Both are empty
    or 0 if ``gather_after_fit`` is False."""
    if model.gather_after_fit is False or not buckets:
        return Counter(), 0
    gathers = any(b.layout.world_size > machine.gpus for b in buckets)  # the shards are spread over several hosts
    on_the_way = memory.on_the_way_nbytes(buckets, gathers=gathers)
    rest = memory.planned_bytes(buckets, state_tensors=_states(model, buckets, machine), moment=Moment.reduced)
    there = machine.gpus * (memory.in_memory(rest) if machine.shared else memory.on_tier(rest, Tier.host))
    needed = math.ceil((model.copy_nbytes + on_the_way * machine.gpus * machine.shared) / memory.SPARE)
    after = memory.after_run(rest, model.copy_nbytes, on_the_way, machine.gpus)
    return after, max(0, there + needed - machine.host_memory)


def _placed(model: Model, stage: Stage, tiers: Sequence[TierRow], machine: Machine) -> list[BucketPlan]:
    """Plan a rank's buckets. ``machine.hybrid_shard`` decides whether shards are divided among all ranks or among the
    ranks of a node. ``tiers`` has a row for each unit."""

    def over(ranks: int) -> list[BucketPlan]:
        return [place(s, STAGES[stage], tiers[s.unit], ranks) for s in model.shapes]

    is_split = any(shape.parts > 1 for shape in model.shapes)
    if is_split or machine.nodes == 1 or machine.hybrid_shard in (HybridShard.flat, HybridShard.node_backward):
        return over(machine.world_size)
    by_node = over(machine.gpus)
    rest = memory.planned_bytes(by_node)
    gpu = 0 if machine.shared else machine.gpu_memory
    fits = len(set(tiers)) == 1 and memory.fits_half(rest, gpu, machine.host_memory, machine.gpus)
    return by_node if machine.hybrid_shard is HybridShard.node or fits else over(machine.world_size)


def _tiers(model: Model, stage: Stage, offload: Offload, machine: Machine, settings: OffloadConfig) -> list[TierRow]:
    if offload is not Offload.auto:
        return [OFFLOADS[offload]] * len(model.names)
    sizes = []
    for unit, name in enumerate(model.names):
        shapes = [shape for shape in model.shapes if shape.unit == unit]
        ranks = machine.gpus if machine.hybrid_shard is HybridShard.node else machine.world_size
        sizes.append(memory.unit_bytes(name, shapes, STAGES[stage], ranks))
    device = 0 if machine.shared else machine.gpu_memory
    found = default_budgets(device, machine.host_memory, machine.nvme // machine.gpus, machine.gpus)
    return split_by_budget(sizes, found.with_given(settings.device_budget, settings.host_budget, settings.nvme_budget))


def _shortages(
    per_rank: dict[Tier, int], per_host: dict[Tier, int], together: int, machine: Machine, after_run: int
) -> tuple[Shortage, ...]:
    """Return a shortage for each tier that lacks memory. ``after_run``: bytes that a host lacks after the run."""
    if machine.shared:
        needed = {Tier.host: (together, machine.host_memory)}
    else:
        needed = {
            Tier.device: (per_rank[Tier.device], machine.gpu_memory),
            Tier.host: (per_host[Tier.host], machine.host_memory),
        }
    needed[Tier.nvme] = (per_host[Tier.nvme], machine.nvme)
    want, have = needed[Tier.host]
    needed[Tier.host] = (max(want, have + after_run), have)
    return tuple(Shortage(tier, want - have) for tier, (want, have) in needed.items() if want > have)


def advise(model: Model, row: Row, machine: Machine, settings: OffloadConfig, rows: Sequence[Row]) -> Advice:
    """Find how many GPUs ``row`` needs, by doubling hosts, and the first offload in ``rows`` that fits at its stage."""
    gpus = None
    bigger = machine
    for _ in range(MOST_DOUBLINGS):
        bigger = replace(bigger, nodes=2 * bigger.nodes)
        if plan_row(model, row.stage, row.offload, bigger, settings).fits:
            gpus = bigger.world_size
            break
    other = next((r.offload for r in rows if r.stage is row.stage and r.fits), None)
    return Advice(gpus, other)


def best(rows: Sequence[Row]) -> Row | None:
    """Return the fitting row that offloads least; in a tie, the one with the lowest stage. None if no row fits."""
    fitting = [row for row in rows if row.fits]
    nearness = list(Offload)
    return min(fitting, key=lambda r: (nearness.index(r.offload), r.stage.value), default=None)
