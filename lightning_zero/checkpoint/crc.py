"""CRC-32 of a record, combined from the checksums of pieces that different ranks have written. A CRC is linear: for two
adjacent pieces multiply the first checksum by ``x ** (8 * length of the second)``, as a polynomial over GF(2), and add
the second. Source: M. Adler, zlib's ``crc32_combine``, in Python from 3.15 on."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

_POLYNOMIAL = 0xEDB88320  # reflected: bit 31 is the constant term
_ONES = 0xFFFFFFFF


class Piece(NamedTuple):
    record: str
    start: int  # in the record
    nbytes: int
    crc: int


def add_up(record: str, nbytes: int, found: Iterable[Piece], *, gaps_are_zeros: bool = False) -> int:
    """Compute a record's checksum from pieces in any order. Raises RuntimeError for overlaps, or gaps that are not
    zeros."""
    crc, position = 0, 0
    for piece in [*sorted(found), Piece(record, nbytes, 0, 0)]:
        gap = piece.start - position
        if gap < 0 or (gap and not gaps_are_zeros):
            raise RuntimeError(f"{record}: bytes {position} to {piece.start} were written twice or not at all")
        crc = combine(combine(crc, _crc_of_zeros(gap), gap), piece.crc, piece.nbytes)
        position = piece.start + piece.nbytes
    return crc


def combine(first: int, second: int, length: int) -> int:
    """Compute the CRC-32 of two adjacent pieces. ``length``: bytes of the second."""
    return _times(_shift(length), first) ^ second


def _crc_of_zeros(length: int) -> int:
    return _times(_shift(length), _ONES) ^ _ONES


@functools.lru_cache(4096)
def _shift(length: int) -> int:
    """``x ** (8 * length)``."""
    result = 1 << 31
    for k in range(length.bit_length()):
        if length >> k & 1:
            result = _times(_power(k), result)
    return result


@functools.cache
def _power(k: int) -> int:
    """``x ** (8 * 2 ** k)``."""
    return _times(_power(k - 1), _power(k - 1)) if k else 1 << 23


def _times(a: int, b: int) -> int:
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result
