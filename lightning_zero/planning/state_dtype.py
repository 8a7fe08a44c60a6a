"""How wide optimizer state rests: ``zero.optimizer.state_dtype``. Arithmetic on integers.

Under ``int8`` a tensor of state is a row of bytes for each :data:`BLOCK` elements: a code for each, and the block's
exponent. Blocks are counted from the start of each parameter, so that which elements share an exponent is the same at
every stage and on any number of ranks. Every parameter then starts at a multiple of :data:`BLOCK` in its bucket;
shards are cut at such multiples anyway (``layout.py``), and so between blocks.
"""

from __future__ import annotations

from lightning_zero.config import StateDtype
from lightning_zero.planning.layout import PARAM_ALIGN, SHARD_ALIGN, round_up

BLOCK = SHARD_ALIGN  # elements that share an exponent
ROW = BLOCK + 1  # bytes of a block
# Buffers of 4 bytes an element that a step needs for its pieces: two states, two for conversions, gradient and master
# in the step's dtype, and two of the kernel's own.
BUFFERS = 8
TABLE_NBYTES = 1 << 22  # random bits
# Elements of a piece on the host: at least so many, as a piece costs some 0.1 ms in Python, during which other threads
# wait for the interpreter; at most so many, or what it makes of the state would not stay in the cache.
MIN_CHUNK, MAX_CHUNK = 1 << 18, 1 << 19
HOST_CHUNKS = 1 << 21  # ... of the pieces of all threads
DEVICE_CHUNK = 1 << 23  # ... on a device


def param_align(state: StateDtype) -> int:
    """Elements at whose multiples parameters begin in a bucket."""
    return BLOCK if state is StateDtype.int8 else PARAM_ALIGN


def state_nbytes(numel: int, state: StateDtype, master_itemsize: int) -> int:
    """Bytes of one tensor of state for ``numel`` elements: 4, 2 or 257/256 for each, beside fp32 masters."""
    if state is StateDtype.int8:
        return round_up(numel, BLOCK) // BLOCK * ROW
    return numel * (2 if state is StateDtype.bf16 else master_itemsize)


def pieces_of(numel: int, threads: int | None) -> tuple[int, int]:
    """Elements of the pieces in which a run of ``numel`` is stepped, and how many threads take them.

    Args:
        threads: that the host has for it; None: on a device.
    """
    if threads is None:
        return DEVICE_CHUNK, 1
    most = max(MIN_CHUNK, min(MAX_CHUNK, HOST_CHUNKS // threads // BLOCK * BLOCK))
    threads = max(1, min(threads, HOST_CHUNKS // most, -(-numel // MIN_CHUNK)))
    count = round_up(-(-numel // most), threads)  # each thread gets as many
    return max(BLOCK, round_up(-(-numel // max(count, 1)), BLOCK)), threads


def scratch_nbytes(numel: int, *, on_device: bool) -> int:
    """Bytes beside the state by which the largest range of ``numel`` elements is stepped in pieces; those on the host
    stay for the next step."""
    if not on_device and numel > MIN_CHUNK:
        numel += HOST_CHUNKS // MIN_CHUNK * BLOCK  # the piece of each thread ends between blocks
    pieces = BUFFERS * 4 * min(numel, DEVICE_CHUNK if on_device else HOST_CHUNKS)
    return pieces + TABLE_NBYTES if numel else 0
