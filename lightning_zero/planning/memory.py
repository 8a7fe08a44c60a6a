"""Compute the bytes of one rank by role and tier, at rest and at the peak of each phase.

P parameters on N ranks under bf16 with fp32 masters and Adam, while gradients wait for more micro-batches (ZeRO:
Rajbhandari et al. 2020, arXiv:1910.02054, section 5)::

    stage | compute | grad (bf16) | master, state | sum          | with fp32 grad (the default)
    0     | 2P      | 2P          | 12P           | 16P          | 18P
    1     | 2P      | 2P          | 12P/N         | 4P + 12P/N   | 6P + 12P/N
    2     | 2P      | 2P/N        | 12P/N         | 2P + 14P/N   | 2P + 16P/N
    3     | -       | 2P/N        | 12P/N         | 14P/N        | 16P/N

The paper's 16P/N of stage 3 includes a bf16 shard of the parameters. The engine casts this shard from the masters at
each gather, and keeps a bf16 shard only if the masters are kept on another tier.

Memory that two roles share counts once, as ``compute_param``. Padding counts. Activations (see ``activations.py``),
memory inside libraries, and scalar optimizer state do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from lightning_zero.planning.buckets import RESTING, BucketPlan, BucketShape, ParamsRest, Role, place
from lightning_zero.planning.layout import round_up
from lightning_zero.planning.placement import ON_DEVICE, StageRow, Tier, UnitBytes
from lightning_zero.planning.schedule import Cursor, compile_plan, may_come_ahead
from lightning_zero.planning.state_dtype import scratch_nbytes
from lightning_zero.settings import StateDtype

ADAM_STATES = 2  # tensors of optimizer state for each parameter
FILE_PAGE_NBYTES = 4096  # files are allocated in whole pages
HOST_ALIGN_NBYTES = 64  # host allocations begin at multiples of this
RING_COUNT = 4  # staging buffers of files
RING_NBYTES = 32 << 20  # bytes of each staging buffer
PAIR_NBYTES = 32 << 20  # bytes of each of the two pinned buffers that transfers alternate between
READ_AHEAD = 3  # buffers for parameters that are read from files ahead of their gather
STEP_CHUNK_NBYTES = 1 << 24  # bytes of the fp32 copies of gradients that an offloaded step makes, on the host
DEVICE_STEP_CHUNK_NBYTES = 1 << 26  # the same on the device
COPY_ALIGN = 64  # bytes; parameters in the copy of a whole module begin at multiples
SPARE = 0.9  # share of the available host memory that the copy of a whole module may take
STEPS_IN_MEMORY = 3  # buckets of state from files in host memory at a time: one read, one stepped, one written


class Moment(Enum):
    """The moment of a step at which bytes that stay allocated between steps are counted."""

    accumulating = "accumulating"  # between two micro-batches of a step
    reduced = "reduced"  # after the last backward, before the gradients are zeroed
    cleared = "cleared"  # after the gradients are zeroed


class Phase(Enum):
    """The phase of a step for which a peak is computed."""

    forward = "forward"
    backward = "backward"
    step = "step"


Bytes = Counter[tuple[Role, Tier]]
_ALIGN = {Tier.device: 1, Tier.host: HOST_ALIGN_NBYTES, Tier.nvme: FILE_PAGE_NBYTES}


@dataclass(frozen=True, slots=True)
class StateOfRank:
    """Bytes of a rank's optimizer state if an optimizer steps whole tensors, whose state is only on their owners."""

    tensors: tuple[tuple[int, ...], ...]  # bytes of each tensor of state, by bucket
    step: int = 0  # bytes on the device beside the shards during the step, from owners.step_peak


States = int | StateOfRank  # an int counts the element-wise state tensors of each parameter


def unit_bytes(name: str, shapes: Iterable[BucketShape], row: StageRow, world_size: int) -> UnitBytes:
    """Compute the bytes of a unit's masters, optimizer state and gradients on one rank."""
    state = grad = 0
    for bucket in (place(shape, row, ON_DEVICE, world_size) for shape in shapes):
        if bucket.trainable:
            state += bucket.owned_numel * bucket.itemsizes.master
            state += bucket.state_nbytes(bucket.owned_numel) * ADAM_STATES
            grad += bucket.owned_numel * bucket.itemsizes.grad
    return UnitBytes(name, state, grad)


# -- at rest ---------------------------------------------------------------------------------------------------------


def planned_bytes(
    buckets: Iterable[BucketPlan],
    rank: int = 0,
    *,
    state_tensors: States = ADAM_STATES,
    moment: Moment = Moment.reduced,
) -> Bytes:
    """Sum the bytes that ``rank`` keeps allocated, by role and tier. Rank 0, with least padding, has the most state.

    Args:
        state_tensors: how many element-wise state tensors a parameter has, or the state of ``rank``.
        moment: decides which gradients exist.
    """
    total: Bytes = Counter({(role, Tier.device): 0 for role in RESTING})
    files = False
    for number, bucket in enumerate(buckets):
        files |= Tier.nvme in bucket.tiers
        for role, tier, nbytes in at_rest(
            bucket, rank, state=_state(bucket, number, rank, state_tensors), moment=moment
        ):
            total[role, tier] += round_up(nbytes, _ALIGN[tier])
    if files:
        total[Role.staging, Tier.host] += RING_COUNT * RING_NBYTES
    return total


def _state(bucket: BucketPlan, number: int, rank: int, states: States) -> Sequence[int]:
    """Return the bytes of each optimizer state tensor of ``bucket`` on ``rank``. ``number``: the bucket's index."""
    if isinstance(states, StateOfRank):
        return states.tensors[number]
    return [bucket.state_nbytes(bucket.state_numel(rank))] * states


def at_rest(bucket: BucketPlan, rank: int, *, state: Sequence[int], moment: Moment) -> Iterator[tuple[Role, Tier, int]]:
    """Yield (role, tier, bytes) of what ``bucket`` keeps allocated at ``moment``. ``state``: bytes of state tensors."""
    sizes, tiers, owned = bucket.itemsizes, bucket.tiers, bucket.owned_numel
    if bucket.beside:
        yield Role.compute_param, Tier.device, bucket.beside
    if not bucket.reshards:
        yield Role.compute_param, Tier.device, bucket.full_nbytes
    elif bucket.params_rest is ParamsRest.shard:
        yield Role.compute_param, tiers.compute_param, owned * sizes.compute
    if bucket.copies_master:
        yield bucket.storage_role, bucket.storage_tier, owned * bucket.storage_itemsize
    if not bucket.trainable:
        return
    for nbytes in state:
        yield Role.optim_state, tiers.master, nbytes
    if moment is Moment.accumulating and bucket.accumulates_locally:
        yield Role.grad, Tier.device, bucket.layout.numel * sizes.grad  # not reduced yet, so still on the device
    if bucket.grads_on_host:
        yield Role.grad, tiers.grad, owned * sizes.grad  # this memory stays reserved
    elif moment is Moment.reduced or (moment is Moment.accumulating and not bucket.accumulates_locally):
        yield Role.grad, tiers.grad, owned * sizes.grad


# -- peaks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that bound temporary memory."""

    prefetch_bytes: int
    keep_gathered_bytes: int
    reduce_bucket_bytes: int
    micro_batches: int = 1  # backwards per step
    has_link: bool = True  # the device is not the host, so transfers use pinned buffers
    node_ranks: int = 0  # ranks of a node that together keep each unit until the end of the backward; 0: none do
    sum_ranks: int = 0  # ranks of a node that sum exchanged gradients before nodes do; 0: all sum them at once


def gathered_peaks(nbytes: Sequence[int], limits: Limits) -> tuple[int, int]:
    """Compute the peak bytes of gathered units in forward and backward, for units called in order. ``nbytes``: gathered
    bytes of each unit, the root first, without buckets that do not reshard. The root stays gathered during a pass."""
    peaks = [nbytes[0] if nbytes else 0] * 2
    for _, backward, held in gathered_along(nbytes, limits):
        peaks[backward] = max(peaks[backward], held)
    return peaks[0], peaks[1]


def gathered_along(nbytes: Sequence[int], limits: Limits) -> Iterator[tuple[int, bool, int]]:
    """Yield (unit, is in backward, gathered bytes) for each use of a unit. ``nbytes``: see :func:`gathered_peaks`."""
    units = [unit for unit, size in enumerate(nbytes) if unit and size]
    history = units + units[::-1]
    cursor = Cursor(compile_plan(history, nbytes, limits.keep_gathered_bytes))
    held: set[int] = set()
    ahead: list[int] = []

    def admit(unit: int) -> bool:
        if unit in held or not may_come_ahead(nbytes[unit], [nbytes[u] for u in ahead], limits.prefetch_bytes):
            return False
        ahead.append(unit)
        held.add(unit)
        return True

    for event, unit in enumerate(history):
        if unit not in held:
            held.update(cursor.up_to(unit) or [unit])
        if unit in ahead:
            ahead.remove(unit)
        cursor.ahead(admit)
        yield unit, event >= len(units), nbytes[0] + sum(nbytes[u] for u in held)
        if cursor.used(unit):
            held.discard(unit)


def peak_bytes(
    buckets: Sequence[BucketPlan], limits: Limits, rank: int = 0, *, state_tensors: States = ADAM_STATES
) -> dict[Phase, Bytes]:
    """Compute the bytes of one rank at the peak of each phase.

    ::

        forward  = rest + gradients of the last backward + gathered (root, current, prefetched) + offloaded steps
        backward = rest + gradients + gathered + reducing (the filling unit, reductions in flight) + offloaded steps
        step     = rest + gradients + a chunk of gradients in the master dtype + offloaded steps + whole tensors
        each     + staging memory between tiers
    """
    waiting = Moment.accumulating if limits.micro_batches > 1 else Moment.reduced

    def rest(moment: Moment) -> Bytes:
        return planned_bytes(buckets, rank, state_tensors=state_tensors, moment=moment)

    total = {Phase.forward: rest(waiting), Phase.backward: rest(waiting), Phase.step: rest(Moment.reduced)}
    forward, backward = gathered_peaks(by_unit(buckets, lambda b: b.full_nbytes * b.reshards), limits)
    kept = kept_nbytes(buckets, limits)
    total[Phase.forward][Role.gathered, Tier.device] = forward + kept
    total[Phase.backward][Role.gathered, Tier.device] = backward + kept
    total[Phase.backward][Role.reducing, Tier.device] = _reducing_nbytes(buckets, limits)
    for phase, staging in _staging(buckets, limits, state_tensors, rank).items():
        total[phase].update(staging)
    return {phase: +held for phase, held in total.items()}


def kept_nbytes(buckets: Iterable[BucketPlan], limits: Limits) -> int:
    """Return the bytes of the slices of units, without the root, that a rank keeps for its node until the backward."""
    if not limits.node_ranks:
        return 0
    return sum(b.full_nbytes // limits.node_ranks for b in buckets if b.reshards and b.unit)


def by_unit(buckets: Iterable[BucketPlan], size: Callable[[BucketPlan], int]) -> list[int]:
    """Sum ``size(bucket)`` over the buckets of each unit. Return the sums, indexed by unit."""
    sums: dict[int, int] = {}
    for bucket in buckets:
        sums[bucket.unit] = sums.get(bucket.unit, 0) + size(bucket)
    return [sums.get(unit, 0) for unit in range(max(sums, default=-1) + 1)]


def _reducing_nbytes(buckets: Sequence[BucketPlan], limits: Limits) -> int:
    """Compute the bytes of unsharded gradients at the peak of the backward: of the unit whose backward runs, and of
    reductions in flight. On a device, autograd's gradients are kept until their bucket is complete. Gradients that each
    rank adds up unsharded are reduced in place if the wire dtype allows. With several micro-batches, a reduced shard
    exists beside the gradient to which it is added."""
    trainable, count = [b for b in buckets if b.trainable], limits.micro_batches

    def filled(bucket: BucketPlan) -> int:
        wide = max(bucket.wire_itemsize(count), bucket.itemsizes.compute)
        return bucket.layout.numel * wide * bucket.reduces_apart(count)

    sizes = [b.layout.numel * b.wire_itemsize(count) for b in trainable]
    under_way = min(sum(sizes), max(limits.reduce_bucket_bytes, max(sizes, default=0)))
    brought = [b for b in trainable if count > 1 and b.shards_master and b.layout.world_size > 1]
    all_shards = sum(b.layout.numel * b.itemsizes.reduce // b.layout.world_size for b in brought)
    shards = (under_way * b.itemsizes.reduce // b.wire_itemsize(count) // b.layout.world_size for b in brought)
    filling = max(by_unit(trainable, filled), default=0)
    own = [size for size, bucket in zip(sizes, trainable, strict=True) if bucket.reduces_apart(count)]
    received = limits.has_link * max((received_nbytes(b, limits) for b in trainable if b.exchanges(count)), default=0)
    return min(sum(own), min(sum(own), under_way) + filling) + min(all_shards, max(shards, default=0)) + received


def received_nbytes(bucket: BucketPlan, limits: Limits) -> int:
    """Return how many bytes a rank receives in the all-to-all of the bucket's gradients, before the local sum. If
    gradients are summed in two levels, each node's sums count too."""
    size = bucket.layout.numel * bucket.wire_itemsize(limits.micro_batches)
    if not limits.sum_ranks:
        return size
    sums = bucket.layout.numel * bucket.itemsizes.reduce // limits.sum_ranks
    return sums + max(sums, size * limits.sum_ranks // bucket.layout.world_size)


def _staging(buckets: Sequence[BucketPlan], limits: Limits, states: States, rank: int) -> dict[Phase, Bytes]:
    """Compute for each phase the bytes of buffers for transfers between tiers, without the ring of file buffers."""
    found: dict[Phase, Bytes] = {phase: Counter() for phase in Phase}
    trainable = [b for b in buckets if b.trainable]
    host = (Role.staging, Tier.host)
    pair = 2 * PAIR_NBYTES * limits.has_link
    in_files = [
        b.owned_numel * b.itemsizes.master + sum(_state(b, number, rank, states))
        for number, b in enumerate(buckets)
        if b.trainable and b.tiers.master is Tier.nvme
    ]
    in_steps = at_once = max((sum(in_files[i : i + STEPS_IN_MEMORY]) for i in range(len(in_files))), default=0)
    written = [b for b in trainable if b.params_rest is ParamsRest.shard and b.tiers.compute_param is Tier.nvme]
    # Buffers for parameters cast from the masters: one is being filled while one is written to files.
    in_steps += 2 * max((b.owned_numel * b.itemsizes.compute for b in written if not b.one_dtype), default=0)
    cast = [b for b in trainable if b.itemsizes.grad != b.itemsizes.master]
    in_steps += STEP_CHUNK_NBYTES * any(b.steps_on_host for b in cast)
    narrow = [b for b in trainable if states and b.itemsizes.state is not StateDtype.fp32]
    on_host = max((b.owned_numel for b in narrow if b.steps_on_host), default=0)
    # Memory that is never freed: for parameters read ahead, for gradients added to resting ones, for shards that are
    # stepped and sent in pieces, and for the pieces themselves.
    stays = READ_AHEAD * round_up(max(map(read_nbytes, buckets), default=0), FILE_PAGE_NBYTES)
    stays += pair * any(b.grads_on_host for b in trainable) + pair * bool(in_files)
    stays += scratch_nbytes(on_host, on_device=False)
    for phase in Phase:  # a step overlaps the next forward
        found[phase][host] += stays + in_steps * (phase in (Phase.step, Phase.forward))
    on_device = max((b.owned_numel * b.itemsizes.master for b in cast if not b.steps_on_host), default=0)
    found[Phase.step][Role.staging, Tier.device] += min(DEVICE_STEP_CHUNK_NBYTES, on_device)
    on_device = max((b.owned_numel for b in narrow if not b.steps_on_host), default=0)
    found[Phase.step][Role.staging, Tier.device] += scratch_nbytes(on_device, on_device=True)
    if isinstance(states, StateOfRank):
        found[Phase.step][Role.staging, Tier.device] += states.step
        found[Phase.step][host] += sum(in_files) - at_once  # a step of whole tensors opens all files
    return found


def read_nbytes(bucket: BucketPlan) -> int:
    """Return the bytes of host memory into which a gather reads the bucket's shard; 0 if the shard is not in a file."""
    in_file = bucket.reshards and bucket.tiers.compute_param is Tier.nvme
    return bucket.owned_numel * bucket.itemsizes.compute if in_file else 0


def fits_half(rest: Bytes, gpu: int, host: int, local_ranks: int) -> bool:
    """Return whether ``rest``, the bytes of each of a host's ``local_ranks`` ranks, fills at most half of the memory of
    a GPU and of the host. ``gpu``, ``host``: the bytes of these memories; ``gpu`` is 0 if there is no GPU."""
    on_device, on_host = on_tier(rest, Tier.device), on_tier(rest, Tier.host)
    if not gpu:
        return (on_device + on_host) * local_ranks <= host // 2
    return on_device <= gpu // 2 and on_host * local_ranks <= host // 2


def in_memory(held: Bytes) -> int:
    return on_tier(held, Tier.device) + on_tier(held, Tier.host)


def on_tier(held: Bytes, tier: Tier) -> int:
    return sum(nbytes for (_, where), nbytes in held.items() if where is tier)


# -- the whole module between runs -----------------------------------------------------------------------------------
#
#     after a run = rest + one copy of its parameters per host + a bucket's masters in flight, if hosts gather them
#
# The ranks of a host share the copy. Pages that a rank writes become private to it, which plans do not count. A
# training run starts without a copy, so the copy adds nothing to the peak of a step.


def copy_nbytes(params: Iterable[int]) -> int:
    """Return the bytes of a copy of a whole module. ``params``: bytes of each parameter in its original dtype."""
    return max(COPY_ALIGN, sum(round_up(nbytes, COPY_ALIGN) for nbytes in params))


def reason_not_to_fit(nbytes: int, available: int, where: str) -> str | None:
    """Return the text of an error if a copy of the whole module, of ``nbytes``, needs more than the share :data:`SPARE`
    of ``available`` bytes; None if it fits. ``where``: names the host or device."""
    if nbytes <= SPARE * available:
        return None
    return (
        f"expected room for a whole copy of the module, {nbytes:,} bytes, on {where}, got {available:,} bytes that are "
        f"available ({SPARE:.0%} of them may be used)"
    )


def on_the_way_nbytes(buckets: Sequence[BucketPlan], *, gathers: bool) -> int:
    """Return the most bytes of masters that are gathered at a time for the module's copy; 0 unless ``gathers``."""
    return max((b.layout.numel * b.itemsizes.master for b in buckets), default=0) if gathers else 0


def after_run(rest: Bytes, nbytes: int, on_the_way: int, ranks: int) -> Bytes:
    """Compute the bytes of one rank after a run: ``rest``, and its share of the copy of the whole module.

    Args:
        nbytes: bytes of the module's copy, shared equally by the ``ranks`` of a host.
        on_the_way: bytes of one rank from :func:`on_the_way_nbytes`.
    """
    held = Counter(rest)
    held[Role.whole_copy, Tier.host] = -(-nbytes // ranks)
    held[Role.gathered, Tier.device] += on_the_way
    return +held
