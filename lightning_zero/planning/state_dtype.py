"""Compute the size of resting optimizer state under ``zero.optimizer.state_dtype``.

Under ``int8`` each :data:`BLOCK` elements of state rest as one code per element and an exponent. Blocks are counted
from the start of each parameter, and parameters and shards begin at multiples of :data:`BLOCK`, so blocks are the same
at every stage and world size.
"""

from __future__ import annotations

from lightning_zero.config import StateDtype
from lightning_zero.planning.layout import PARAM_ALIGN, SHARD_ALIGN, round_up

BLOCK = SHARD_ALIGN  # elements that share an exponent
ROW = BLOCK + 1  # bytes of a block
# fp32 buffers per element of a piece: two states, two for conversions, gradient, master, and two of the kernel.
BUFFERS = 8
TABLE_NBYTES = 1 << 22  # bytes of random bits
# Elements of a piece on the host. Smaller pieces cost too much Python time (0.1 ms each, under the interpreter's lock);
# larger ones leave the cache.
MIN_CHUNK, MAX_CHUNK = 1 << 18, 1 << 19
HOST_CHUNKS = 1 << 21  # elements of the pieces of all threads together
DEVICE_CHUNK = 1 << 23  # elements of a piece on a device


def param_align(state: StateDtype) -> int:
    """Return the multiple of elements at which parameters begin in a bucket."""
    return BLOCK if state is StateDtype.int8 else PARAM_ALIGN


def state_nbytes(numel: int, state: StateDtype, master_itemsize: int) -> int:
    """Return the bytes of one state tensor of ``numel`` elements: 4, 2 or 257/256 for each, beside fp32 masters."""
    if state is StateDtype.int8:
        return round_up(numel, BLOCK) // BLOCK * ROW
    return numel * (2 if state is StateDtype.bf16 else master_itemsize)


def pieces_of(numel: int, threads: int | None) -> tuple[int, int]:
    """Return the elements of each piece of a run of ``numel``, and how many threads step pieces.

    ``threads``: of the host; ``None``: on a device.
    """
    if threads is None:
        return DEVICE_CHUNK, 1
    most = max(MIN_CHUNK, min(MAX_CHUNK, HOST_CHUNKS // threads // BLOCK * BLOCK))
    threads = max(1, min(threads, HOST_CHUNKS // most, -(-numel // MIN_CHUNK)))
    count = round_up(-(-numel // most), threads)  # equally many for each thread
    return max(BLOCK, round_up(-(-numel // max(count, 1)), BLOCK)), threads


def scratch_nbytes(numel: int, *, on_device: bool) -> int:
    """Return the bytes of buffers to step up to ``numel`` elements in pieces. On the host the buffers are kept."""
    if not on_device and numel > MIN_CHUNK:
        numel += HOST_CHUNKS // MIN_CHUNK * BLOCK  # each thread's piece ends between blocks
    pieces = BUFFERS * 4 * min(numel, DEVICE_CHUNK if on_device else HOST_CHUNKS)
    return pieces + TABLE_NBYTES if numel else 0
