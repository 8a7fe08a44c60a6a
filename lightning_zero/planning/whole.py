"""Compute the bytes of the whole module between runs: one copy of its parameters on each host.

::

    after a run = rest + one copy per host + a bucket's masters in flight, if hosts gather them

The ranks of a host share the copy. Pages that a rank writes become private to it, which plans do not count. A training
run starts without a copy, so the copy adds nothing to the peak of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lightning_zero.planning.buckets import BucketPlan, Role
from lightning_zero.planning.layout import round_up
from lightning_zero.planning.memory import Bytes
from lightning_zero.planning.placement import Tier

COPY_ALIGN = 64  # bytes; parameters begin at multiples
SPARE = 0.9  # share of the available memory; the rest is left to the process


def copy_nbytes(params: Iterable[int]) -> int:
    """Bytes of the copy of a module whose parameters have these bytes in their original dtypes."""
    return max(COPY_ALIGN, sum(round_up(nbytes, COPY_ALIGN) for nbytes in params))


def needed_nbytes(nbytes: int) -> int:
    return -int(-nbytes / SPARE // 1)  # rounded up


def no_room_for(nbytes: int, available: int, where: str) -> str | None:
    """Say why ``nbytes`` of a copy do not fit on the host ``where``; ``None``: they fit."""
    if nbytes <= SPARE * available:
        return None
    return (
        f"expected room for a whole copy of the module, {nbytes:,} bytes, on {where}, got {available:,} bytes that are "
        f"available ({SPARE:.0%} of them may be used)"
    )


def on_the_way_nbytes(buckets: Sequence[BucketPlan], *, gathers: bool) -> int:
    """Bytes of one rank while the copy is filled. ``gathers``: shards are spread over several hosts."""
    return max((b.layout.numel * b.itemsizes.master for b in buckets), default=0) if gathers else 0


def after_run(rest: Bytes, nbytes: int, on_the_way: int, ranks: int) -> Bytes:
    """Compute the bytes of one rank after a run, with its share of the copy.

    Args:
        nbytes: of the copy, shared equally by the ``ranks`` of a host.
        on_the_way: bytes of one rank from :func:`on_the_way_nbytes`.
    """
    held = Counter(rest)
    held[Role.whole_copy, Tier.host] = -(-nbytes // ranks)
    held[Role.gathered, Tier.device] += on_the_way
    return +held
