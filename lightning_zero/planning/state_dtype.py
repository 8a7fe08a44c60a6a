"""Divide steps under ``zero.optimizer.state_dtype=bf16`` into pieces, and compute the bytes of their buffers."""

from __future__ import annotations

from lightning_zero.planning.layout import SHARD_ALIGN, round_up

BLOCK = SHARD_ALIGN  # elements; pieces end at its multiples
# fp32 buffers per element of a piece of a shard: two states, gradient, master, two of the kernel.
BUFFERS = 6
TABLE_NBYTES = 1 << 22  # bytes of the table of random bits for stochastic rounding
# Elements of a piece on the host. Smaller pieces cost too much Python time (0.1 ms each, under the interpreter's lock);
# larger ones leave the cache.
MIN_CHUNK, MAX_CHUNK = 1 << 18, 1 << 19
HOST_CHUNKS = 1 << 21  # elements of the pieces of all threads together
DEVICE_CHUNK = 1 << 23  # elements of a piece on a device


def pieces_of(numel: int, threads: int | None) -> tuple[int, int]:
    """Divide an optimizer step of ``numel`` elements into pieces. Return how many elements a piece has and how many
    threads to use. ``threads``: how many host threads are available; ``None``: the step runs on a device."""
    if threads is None:
        return DEVICE_CHUNK, 1
    most = max(MIN_CHUNK, min(MAX_CHUNK, HOST_CHUNKS // threads // BLOCK * BLOCK))
    threads = max(1, min(threads, HOST_CHUNKS // most, -(-numel // MIN_CHUNK)))
    count = round_up(-(-numel // most), threads)  # equally many for each thread
    return max(BLOCK, round_up(-(-numel // max(count, 1)), BLOCK)), threads


def scratch_nbytes(numel: int, *, on_device: bool) -> int:
    """Return the bytes of the temporary buffers of a step of ``numel`` elements under ``state_dtype=bf16``."""
    if not on_device and numel > MIN_CHUNK:
        numel += HOST_CHUNKS // MIN_CHUNK * BLOCK  # each thread's piece ends between blocks
    pieces = BUFFERS * 4 * min(numel, DEVICE_CHUNK if on_device else HOST_CHUNKS)
    return pieces + TABLE_NBYTES if numel else 0
