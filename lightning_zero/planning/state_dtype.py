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
CHUNK = 1 << 18  # elements of a piece for each thread
MAX_CHUNK = 1 << 21  # ... for all threads of the host
DEVICE_CHUNK = 1 << 23  # ... on a device


def param_align(state: StateDtype) -> int:
    """Elements at whose multiples parameters begin in a bucket."""
    return BLOCK if state is StateDtype.int8 else PARAM_ALIGN


def state_nbytes(numel: int, state: StateDtype, master_itemsize: int) -> int:
    """Bytes of one tensor of state for ``numel`` elements: 4, 2 or 257/256 for each, beside fp32 masters."""
    if state is StateDtype.int8:
        return round_up(numel, BLOCK) // BLOCK * ROW
    return numel * (2 if state is StateDtype.bf16 else master_itemsize)


def scratch_nbytes(numel: int, *, on_device: bool) -> int:
    """Bytes beside the state while the largest range of ``numel`` elements is stepped in pieces."""
    pieces = BUFFERS * 4 * min(numel, DEVICE_CHUNK if on_device else MAX_CHUNK)
    return pieces + TABLE_NBYTES if numel else 0
