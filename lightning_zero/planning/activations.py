"""Add activations to the peak bytes of a step.

The bytes of different roles peak at different moments: activations at the end of the forward, reduced gradients near
the end of the backward. So bytes are summed for each stretch (forward or backward of one unit); the peak is the largest
sum::

    forward  = rest + gradients of the last step + gathered + activations
    backward = rest + gathered + gradients (filling, in flight, reduced) + activations      of the stretch
    step     = the same as without activations
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_zero.planning import memory
from lightning_zero.planning.buckets import BucketPlan, Role
from lightning_zero.planning.memory import ADAM_STATES, Bytes, Limits, Moment, Phase, States, received_nbytes
from lightning_zero.planning.placement import Tier

KEPT_BUFFERS = 2  # buffers of the largest bucket's size that are kept for later reductions, on the host
KEPT_BUFFERS_NBYTES = 64 << 20  # upper bound of those buffers


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a forward or backward pass, in which one unit runs."""

    unit: int  # 0: the root, or code between units
    backward: bool  # whether it is in the backward
    nbytes: int  # peak bytes, without parameters, the batch and gradients of parameters
    begun: frozenset[int] = frozenset()  # indices of the buckets whose first gradient arrives in the stretch
    done: frozenset[int] = frozenset()  # indices of the buckets whose last gradient arrives in the stretch


@dataclass(frozen=True, slots=True)
class Activations:
    """The activation memory and compute of one micro-batch."""

    stretches: tuple[Stretch, ...]  # of the forward, then of the backward, in order
    saved: int  # bytes that autograd saves for the backward, without parameters and buffers
    batch: int  # bytes
    flops: float  # of matrix products in forward and backward
    exchanged: int = 0  # bytes that a rank sends to ranks of the same sequence

    def peak(self, *, backward: bool) -> int:
        return max((s.nbytes for s in self.stretches if s.backward is backward), default=0)


@dataclass(frozen=True, slots=True)
class ByBatchSize:
    """Activations at two micro-batch sizes, interpolated for other sizes. Interpolation is exact if bytes grow linearly
    with the size. With losses that compare samples (contrastive losses) bytes grow faster. ``measure(size)`` measures
    activations at another size, which is slow, and returns None if the model refuses the size."""

    sizes: tuple[int, int]  # samples; both equal where the model accepts one size only
    measured: tuple[Activations, Activations]
    measure: Callable[[int], Activations | None] | None = field(default=None, compare=False, repr=False)

    @property
    def scales(self) -> bool:
        return self.sizes[0] != self.sizes[1]

    def interpolate(self, size: int) -> Activations:
        """Interpolate the activations of ``size`` samples. Raises ValueError if only another size was measured."""
        (few, many), (small, large) = self.sizes, self.measured
        if size == few:
            return small
        if not self.scales:
            raise ValueError(f"activations are known for {few} samples only, not for {size}")

        def between(low: float, high: float) -> int:
            return max(0, -int(-(low + (high - low) * (size - few) / (many - few)) // 1))  # rounded up

        pairs = zip(small.stretches, large.stretches, strict=True)
        stretches = tuple(replace(a, nbytes=between(a.nbytes, b.nbytes)) for a, b in pairs)
        names = ("saved", "batch", "flops", "exchanged")
        return Activations(stretches, *(between(getattr(small, name), getattr(large, name)) for name in names))


def peaks_with(
    buckets: Sequence[BucketPlan],
    limits: Limits,
    activations: Activations | None,
    rank: int = 0,
    *,
    state_tensors: States = ADAM_STATES,
) -> dict[Phase, Bytes]:
    """Return the peak bytes of ``rank`` in each phase, like :func:`memory.peak_bytes`, and include the bytes of
    ``activations`` unless ``activations`` is None."""
    bounds = memory.peak_bytes(buckets, limits, rank, state_tensors=state_tensors)
    if activations is None:
        return bounds
    several = limits.micro_batches > 1
    spare = _spare_nbytes([b for b in buckets if b.reduces_apart(limits.micro_batches)], limits)
    # The first of several micro-batches takes spare buffers for the gradients that wait replicated.
    before = _spare_nbytes(buckets, limits) + _gradients_at(Moment.reduced, buckets, rank)
    in_forward = max(spare, before - _gradients_at(Moment.accumulating, buckets, rank)) if several else spare
    gradients = _Gradients(buckets, limits)
    worst: dict[Phase, tuple[int, int, int, int]] = {}
    for stretch, gathered in zip(activations.stretches, _gathered(buckets, limits, activations.stretches), strict=True):
        gradients.go_on(stretch)
        phase = Phase.backward if stretch.backward else Phase.forward
        reducing = max(gradients.reducing, spare) if stretch.backward else in_forward
        landed = gradients.landed if stretch.backward and not several else 0
        found = (stretch.nbytes + activations.batch, gathered, reducing, landed)
        worst[phase] = max(worst.get(phase, found), found, key=sum)
    peaks = dict(bounds)
    for phase, (nbytes, gathered, reducing, landed) in worst.items():
        peaks[phase] = held = Counter(bounds[phase])
        if phase is Phase.backward and not several:  # resting gradients are counted per stretch
            cleared = memory.planned_bytes(buckets, rank, state_tensors=state_tensors, moment=Moment.cleared)
            held[Role.grad, Tier.device] = cleared[Role.grad, Tier.device] + landed
        held[Role.activation, Tier.device] = nbytes
        held[Role.gathered, Tier.device] = gathered
        held[Role.reducing, Tier.device] = reducing
        peaks[phase] = +held
    return peaks


def _gradients_at(moment: Moment, buckets: Sequence[BucketPlan], rank: int) -> int:
    return memory.planned_bytes(buckets, rank, state_tensors=0, moment=moment)[Role.grad, Tier.device]


def _spare_nbytes(buckets: Sequence[BucketPlan], limits: Limits) -> int:
    """Return the bytes of the reduction buffers that a rank keeps for later reductions of gradients; 0 on a GPU."""
    reduced = [b for b in buckets if b.trainable and b.layout.world_size > 1]
    largest = max((b.layout.numel * b.itemsizes.reduce for b in reduced), default=0)
    limit = min(KEPT_BUFFERS * largest, KEPT_BUFFERS_NBYTES) * (not limits.has_link)
    sizes = [b.layout.numel * b.wire_itemsize(limits.micro_batches) for b in reduced]
    kept = 0
    for size in sorted(sizes, reverse=True):
        kept += size if kept + size <= limit else 0
    return kept


def _gathered(buckets: Sequence[BucketPlan], limits: Limits, stretches: Sequence[Stretch]) -> Iterator[int]:
    """Yield for each stretch the most bytes of gathered parameters that a rank holds during that stretch."""
    nbytes = memory.by_unit(buckets, lambda b: b.full_nbytes * b.reshards)
    at: dict[tuple[int, bool], int] = {}
    for unit, backward, held in memory.gathered_along(nbytes, limits):
        at[unit, backward] = max(at.get((unit, backward), 0), held)
    root = nbytes[0] if nbytes else 0
    own = [at.get((s.unit, s.backward)) for s in stretches]
    kept = memory.kept_nbytes(buckets, limits)
    for index, held_by_unit in enumerate(own):
        if held_by_unit is not None:
            yield held_by_unit + kept
        else:  # between units: the neighbouring units may be gathered
            yield kept + max([root, *(held for held in own[max(0, index - 1) : index + 2] if held is not None)])


class _Gradients:
    """Counts the bytes of gradients while a planned backward proceeds. ``reducing``: bytes of unreduced gradients and
    of reductions in flight. ``landed``: bytes of reduced gradients on the device."""

    def __init__(self, buckets: Sequence[BucketPlan], limits: Limits) -> None:
        self._bucket, self._limit, self._limits = buckets.__getitem__, limits.reduce_bucket_bytes, limits
        several = any(bucket.layout.world_size > 1 for bucket in buckets)
        # On the host, a rank always receives the parts of other ranks before it sums them.
        self._receives = several and not limits.has_link
        self._filling: set[int] = set()
        self._full: list[int] = []  # buckets whose last gradient came in the last stretch
        self._under_way: deque[int] = deque()
        self.reducing = self.landed = 0

    def go_on(self, stretch: Stretch) -> None:
        """Advance to ``stretch``. Set ``reducing`` and ``landed`` to the bytes that are held during that stretch."""
        self._under_way.extend(self._full)
        self._filling.difference_update(self._full)
        self._filling |= stretch.begun
        self._full = sorted(stretch.done, reverse=True)
        flying = sum(map(self._size, self._under_way))
        while len(self._under_way) > 1 and flying > self._limit:
            number = self._under_way.popleft()
            flying -= self._size(number)
            bucket = self._bucket(number)
            if not bucket.grads_on_host:  # on the host its memory is reserved anyway
                self.landed += bucket.owned_numel * bucket.itemsizes.grad
        several = self._limits.micro_batches
        filling = (b for b in map(self._bucket, self._filling) if b.reduces_apart(several))
        wide = (max(b.wire_itemsize(several), b.itemsizes.compute) * b.layout.numel for b in filling)
        exchanged = (b for b in map(self._bucket, self._under_way) if b.exchanges(several))
        comes = [*map(self._size, self._under_way if self._receives else ())]
        received = max([*comes, *(received_nbytes(b, self._limits) for b in exchanged)], default=0)
        # With several micro-batches the reduced shard is added to the resting gradient, so both exist.
        brought = [
            b.owned_numel * b.itemsizes.reduce
            for b in map(self._bucket, self._under_way)
            if several > 1 and b.shards_master and b.layout.world_size > 1 and not self._receives
        ]
        own = sum(self._size(number) for number in self._under_way if self._bucket(number).reduces_apart(several))
        self.reducing = own + received + sum(wide) + sum(brought)

    def _size(self, number: int) -> int:
        bucket = self._bucket(number)
        return bucket.layout.numel * bucket.wire_itemsize(self._limits.micro_batches)
