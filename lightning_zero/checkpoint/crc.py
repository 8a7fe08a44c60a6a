"""CRC-32 of long ranges, put together from those of pieces that different ranks have written.

The checksum of two pieces, one behind the other, follows from theirs and from the length of the second, because a CRC
is linear: the first one is multiplied by ``x ** (8 * length)``, as a polynomial over GF(2), and the second is added.
Source: M. Adler, ``crc32_combine`` of zlib.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from lightning_zero.config import MIB

CHUNK_NBYTES = 16 * MIB  # of a record: what is checked at a time
_POLYNOMIAL = 0xEDB88320  # reflected: bit 31 is the constant term
_ONE = 1 << 31


class Piece(NamedTuple):
    """Bytes of a record that somebody has written."""

    record: str
    start: int  # in the record
    nbytes: int
    crc: int


class Report(NamedTuple):
    """What a comparison with checksums has found.

    Attributes:
        checked: bytes that have a checksum.
        unknown: bytes that have none.
        damage: the places that are not as they were written, in words.
    """

    checked: int
    unknown: int
    damage: list[str]

    def __add__(self, other: Report) -> Report:  # type: ignore[override]
        return Report(self.checked + other.checked, self.unknown + other.unknown, [*self.damage, *other.damage])


def pieces(record: str, start: int, data: memoryview) -> Iterable[Piece]:
    """The checksums of ``data``, which begins at byte ``start`` of a record, cut where its chunks are."""
    low = 0
    while low < len(data):
        high = min(len(data), low + CHUNK_NBYTES - (start + low) % CHUNK_NBYTES)
        yield Piece(record, start + low, high - low, zlib.crc32(data[low:high]))
        low = high


class Sums(NamedTuple):
    """The checksums of one record."""

    whole: int
    chunks: tuple[int, ...]


def add_up(record: str, nbytes: int, found: Iterable[Piece], *, gaps_are_zeros: bool = False) -> Sums:
    """The checksums of a record of ``nbytes``, of pieces in any order.

    Raises:
        RuntimeError: they overlap, or leave gaps that are not said to be zeros.
    """
    chunks: list[int] = []
    chunk, position = 0, 0

    def add(crc: int, length: int) -> None:
        nonlocal chunk, position
        chunk = combine(chunk, crc, length) if position % CHUNK_NBYTES else crc
        position += length
        if position % CHUNK_NBYTES == 0 or position == nbytes:
            chunks.append(chunk)
            chunk = 0

    def add_zeros(stop: int) -> None:
        while position < stop:
            length = min(stop - position, CHUNK_NBYTES - position % CHUNK_NBYTES)
            add(_crc_of_zeros(length), length)

    for piece in sorted(found):
        if piece.start > position and gaps_are_zeros:
            add_zeros(piece.start)
        if piece.start != position:
            raise RuntimeError(f"{record}: bytes {position} to {piece.start} were written twice or not at all")
        add(piece.crc, piece.nbytes)
    if gaps_are_zeros:
        add_zeros(nbytes)
    if position != nbytes:
        raise RuntimeError(f"{record}: {position} of {nbytes} bytes were written")
    return Sums(whole(chunks, nbytes), tuple(chunks))


def whole(chunks: Iterable[int], nbytes: int) -> int:
    """The checksum of a record, of those of its chunks."""
    result, left = 0, nbytes
    for crc in chunks:
        result = combine(result, crc, min(left, CHUNK_NBYTES))
        left -= CHUNK_NBYTES
    return result


@functools.lru_cache(16)
def _crc_of_zeros(length: int) -> int:
    return zlib.crc32(bytes(length))


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two pieces, one behind the other. ``length``: bytes of the second."""
    return _times(_shift(length), first) ^ second


@functools.lru_cache(4096)
def _shift(length: int) -> int:
    """``x ** (8 * length)``."""
    result = _ONE
    for k in range(length.bit_length()):
        if length >> k & 1:
            result = _times(_power(k), result)
    return result


@functools.cache
def _power(k: int) -> int:
    """``x ** (8 * 2 ** k)``."""
    return _times(_power(k - 1), _power(k - 1)) if k else _ONE >> 8


def _times(a: int, b: int) -> int:
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result
