"""Which rows a device holds, and with how large a batch. Arithmetic, and rather too much than too little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gpu.plan import Part, Row, Size
from lightning_zero.planning import memory
from lightning_zero.planning.buckets import BucketPlan, BucketShape, Itemsizes, place
from lightning_zero.planning.placement import OFFLOADS, STAGES, Tier
from lightning_zero.settings import Offload, Stage
from lightning_zero.settings.zero_config import ZeroConfig

GIB = 1 << 30
LIBRARIES_NBYTES = GIB  # of each process: CUDA's context, cuBLAS, NCCL
FRAGMENTS = 1.1  # what the allocator cannot use
# Bytes for a token: of a block in each of its width (inputs of norms in fp32, the rest in bf16), and of the logits in
# each entry of the vocabulary (bf16, fp32, their logarithms, gradients).
BLOCK, BLOCK_INPUT, LOGIT = 38, 4, 14


def fitted(parts: Sequence[Part], free_nbytes: int) -> list[Part]:
    """The parts with the largest micro-batches, down to a quarter, with which most rows of a size fit. A row that does
    not fit all the same has a reason not to run."""
    rows = [part.row for part in parts if part.row is not None]
    known: dict[Row, tuple[Row, int]] = {}
    for size in {row.size for row in rows}:
        known |= _fitting([row for row in rows if row.size == size], free_nbytes)
    found = []
    for part in parts:
        if part.row is not None:
            row, needed = known[part.row]
            why = f"needs {needed / GIB:.0f} GiB of the device, {free_nbytes / GIB:.0f} are free"
            part = replace(part, row=row, why_not=why if needed > free_nbytes else "")
        found.append(part)
    return found


def _fitting(rows: Sequence[Row], free_nbytes: int) -> dict[Row, tuple[Row, int]]:
    """All rows of a size with one micro-batch, and the bytes that each needs."""
    size = rows[0].size
    sizes = [replace(size, micro_batch=size.micro_batch // n) for n in (1, 2, 4) if size.micro_batch // n]

    def needed(size: Size) -> list[tuple[Row, int]]:
        sized = [replace(row, size=size) for row in rows]
        peers = [row for row in sized if row.is_peer and size.together]
        stay = [peer for peer in peers if _needs(peer, peers) <= free_nbytes]
        return [(row, _needs(row, peers if row.is_peer else stay)) for row in sized]

    # The first of those that are equal is the largest.
    best = max(map(needed, sizes), key=lambda found: sum(nbytes <= free_nbytes for _, nbytes in found))
    return dict(zip(rows, best, strict=True))


def _needs(row: Row, peers: Sequence[Row]) -> int:
    """Bytes of the device while ``row`` and ``peers``, which stay, take turns."""
    sides = [row, *(peer for peer in peers if peer != row)]
    at_rest = sum(map(_at_rest, sides))
    most = max(at_rest - _at_rest(side) + _at_peak(side) for side in sides)
    return int(FRAGMENTS * most) + LIBRARIES_NBYTES * len(sides)


def _plans(row: Row) -> list[BucketPlan]:
    size, sizes = row.size, Itemsizes(row.size.itemsize, 4, 4, 4)
    numels = [size.parameters - size.n_layer * size.block_parameters] + [size.block_parameters] * size.n_layer
    shapes = [BucketShape(unit, (numel,), sizes) for unit, numel in enumerate(numels)]
    stage, tiers = STAGES[Stage(row.side)], OFFLOADS[Offload(row.offload if row.offload != "auto" else "optimizer_cpu")]
    return [place(shape, stage, tiers, 1, even_alone=row.alone) for shape in shapes]


def _at_rest(row: Row) -> int:
    if not row.is_ours:  # parameters and the state of Adam; gradients are dropped
        return 12 * row.size.parameters * (row.offload == "none")
    return memory.on_tier(memory.planned_bytes(_plans(row)), Tier.device)


def _at_peak(row: Row) -> int:
    size = row.size
    blocks = size.n_layer * BLOCK_INPUT + BLOCK if size.recompute else size.n_layer * BLOCK
    activations = size.tokens * (size.d_model * blocks + size.vocab_size * LOGIT)
    if not row.is_ours:  # behind the forward, with weights that were cast for the backward; or behind that
        cast = 0 if size.recompute else size.itemsize * size.parameters
        grads = 4 * size.parameters if row.offload == "none" else 8 * size.block_parameters
        return _at_rest(row) + max(grads, activations + cast)
    settings = ZeroConfig()
    limits = memory.Limits(settings.prefetch_bytes, settings.keep_gathered_bytes, settings.reduce_bucket_bytes)
    peaks = memory.peak_bytes(_plans(row), limits).values()
    return max(memory.on_tier(held, Tier.device) for held in peaks) + activations
