"""How many elements a step of narrow states takes at a time."""

from __future__ import annotations

import pytest

from lightning_zero.planning.state_dtype import (
    BLOCK,
    BUFFERS,
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
