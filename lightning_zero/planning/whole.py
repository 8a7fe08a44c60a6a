"""The whole module between runs: one copy of its parameters on each host, beside what rests. Arithmetic on integers.

::

    after a run = rest + the copy, one per host + a bucket's masters on their way into it, where hosts gather them

The copy lies in memory that the ranks of a host share. What a rank writes to becomes its own, page by page, which no
plan knows. A run that trains begins without a copy, so it adds nothing to the peak of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lightning_zero.planning.buckets import BucketPlan, Role
from lightning_zero.planning.layout import round_up
from lightning_zero.planning.memory import Bytes
from lightning_zero.planning.placement import Tier

COPY_ALIGN = 64  # bytes: each parameter begins at a multiple
SPARE = 0.9  # of the memory that is there; the rest is for what the process does with the module


def copy_nbytes(params: Iterable[int]) -> int:
    """Bytes of the copy of a module with parameters of these bytes, in the dtypes that they were built with."""
    return max(COPY_ALIGN, sum(round_up(nbytes, COPY_ALIGN) for nbytes in params))


def needed_nbytes(nbytes: int) -> int:
    """Bytes that must be available for a copy, with what is on the way to it, of ``nbytes``."""
    return -int(-nbytes / SPARE // 1)  # rounded up


def no_room_for(nbytes: int, available: int, where: str) -> str | None:
    """Why there is no room for ``nbytes`` of a copy; ``None``: there is.

    Args:
        where: the host.
    """
    if nbytes <= SPARE * available:
        return None
    return (
        f"expected room for a whole copy of the module, {nbytes:,} bytes, on {where}, got {available:,} bytes that are "
        f"available ({SPARE:.0%} of them may be used)"
    )


def on_the_way_nbytes(buckets: Sequence[BucketPlan], *, gathers: bool) -> int:
    """Bytes of one rank while the copy is filled.

    Args:
        gathers: the shards of some rank are on several hosts; else each host has all values.
    """
    return max((b.layout.numel * b.itemsizes.master for b in buckets), default=0) if gathers else 0


def after_run(rest: Bytes, nbytes: int, on_the_way: int, ranks: int) -> Bytes:
    """Bytes of one rank when a run is over and the module is whole.

    Args:
        rest: bytes at rest.
        nbytes: of the copy, of which each of the ``ranks`` of a host is given an equal share.
        on_the_way: of one rank.
    """
    held = Counter(rest)
    held[Role.whole_copy, Tier.host] = -(-nbytes // ranks)
    held[Role.gathered, Tier.device] += on_the_way
    return +held
