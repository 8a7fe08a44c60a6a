"""How many elements a step of narrow states takes at a time."""

from __future__ import annotations

import pytest

from lightning_zero.planning.state_dtype import (
    BLOCK,
    BUFFERS,
    DEVICE_CHUNK,
    HOST_CHUNKS,
    MAX_CHUNK,
    TABLE_NBYTES,
    pieces_of,
    scratch_nbytes,
)


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 7, 8, 64])
@pytest.mark.parametrize("numel", [0, 1, 255, 70_001, 300_000, 1_250_000, 4_196_352, 100_000_001])
def test_pieces_end_between_blocks_and_fit_in_what_is_planned(numel: int, threads: int) -> None:
    piece, taken = pieces_of(numel, threads)
    assert piece % BLOCK == 0 < piece <= MAX_CHUNK
    assert 1 <= taken <= threads
    assert taken * BUFFERS * 4 * min(piece, numel) + TABLE_NBYTES * bool(numel) <= scratch_nbytes(
        numel, on_device=False
    ), "more memory than is planned"
    pieces = -(-numel // piece)
    if numel >= HOST_CHUNKS:
        assert pieces % taken == 0 or pieces > 8 * taken, f"{pieces} pieces for {taken} threads: some wait for others"


def test_a_small_run_is_stepped_by_one_thread_and_a_large_one_by_as_many_as_memory_allows() -> None:
    assert pieces_of(10_000, 16) == (10_240, 1)
    assert pieces_of(4 << 20, 2) == (MAX_CHUNK, 2)
    assert pieces_of(64 << 20, 16) == (HOST_CHUNKS // 8, 8)
    assert pieces_of(64 << 20, None) == (DEVICE_CHUNK, 1)
