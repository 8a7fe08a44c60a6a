"""Compute the size of resting optimizer state under ``zero.optimizer.state_dtype``.

Under ``int8`` each block of :data:`BLOCK` elements of state rests as one byte per element and one shared exponent. Each
parameter begins a new block, and shards begin at multiples of :data:`BLOCK`, so blocks are the same at every stage and
world size.
"""

from __future__ import annotations

from lightning_zero.planning.layout import PARAM_ALIGN, SHARD_ALIGN, round_up
from lightning_zero.settings import StateDtype

BLOCK = SHARD_ALIGN  # elements that share an exponent
ROW = BLOCK + 1  # bytes of a block
# fp32 buffers per element of a piece of a shard: two states, two for conversions, gradient, master, two of the kernel.
BUFFERS = 8
TABLE_NBYTES = 1 << 22  # bytes of the table of random bits for stochastic rounding
# Elements of a piece on the host. Smaller pieces cost too much Python time (0.1 ms each, under the interpreter's lock);
# larger ones leave the cache.
MIN_CHUNK, MAX_CHUNK = 1 << 18, 1 << 19
HOST_CHUNKS = 1 << 21  # elements of the pieces of all threads together
DEVICE_CHUNK = 1 << 23  # elements of a piece on a device


def param_align(state: StateDtype) -> int:
    """Return the number of elements at whose multiples parameters begin in a bucket."""
    return BLOCK if state is StateDtype.int8 else PARAM_ALIGN


def state_nbytes(numel: int, state: StateDtype, master_itemsize: int) -> int:
    """Return the bytes of a state tensor: per element 4 (fp32), 2 (bf16) or 257/256 (int8) beside fp32 masters."""
    if state is StateDtype.int8:
        return round_up(numel, BLOCK) // BLOCK * ROW
    return numel * (2 if state is StateDtype.bf16 else master_itemsize)


def pieces_of(numel: int, threads: int | None) -> tuple[int, int]:
    """Divide an optimizer step of ``numel`` elements into pieces. Return the elements of a piece and the thread count.

    ``threads``: host threads that are available; ``None``: the step runs on a device.
    """
    if threads is None:
        return DEVICE_CHUNK, 1
    most = max(MIN_CHUNK, min(MAX_CHUNK, HOST_CHUNKS // threads // BLOCK * BLOCK))
    threads = max(1, min(threads, HOST_CHUNKS // most, -(-numel // MIN_CHUNK)))
    count = round_up(-(-numel // most), threads)  # equally many for each thread
    return max(BLOCK, round_up(-(-numel // max(count, 1)), BLOCK)), threads


def scratch_nbytes(numel: int, *, on_device: bool) -> int:
    """Return the bytes of buffers to step ``numel`` elements with narrow state. On the host they stay allocated."""
    if not on_device and numel > MIN_CHUNK:
        numel += HOST_CHUNKS // MIN_CHUNK * BLOCK  # each thread's piece ends between blocks
    pieces = BUFFERS * 4 * min(numel, DEVICE_CHUNK if on_device else HOST_CHUNKS)
    return pieces + TABLE_NBYTES if numel else 0
