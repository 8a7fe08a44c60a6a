"""The random bits by which a step rounds state that rests in fewer bits: the same at every stage, tier and rank count.

They are a pure function of the element's place in its parameter, the parameter's name, the step and the state::

    parameter | span 0, of 2^18 elements | span 1       | ...
    table     |      ....[  span 1  ].......[  span 0  ].....|    a span's bits lie in one piece, from a place that a
                                                                  hash of name, state, span and step gives

All are taken from one table: a hash of each element would take longer than the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_zero.engine.steps.mixed_dtypes import salt_of
from lightning_zero.engine.units.narrow import BITS, Stretch
from lightning_zero.planning.layout import Fragment
from lightning_zero.planning.state_dtype import TABLE_NBYTES

_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))  # a 32-bit integer hash with low bias: shifts, multipliers
_TABLE, _SPAN = TABLE_NBYTES // 4, 1 << 18  # elements

Places = Sequence[tuple[Fragment, str]]
"""The fragments of a run, in order, counted from the run's start; each with the name of its parameter."""


def random_bits(places: Places, low: int, high: int, step: int, number: int, device: torch.device) -> list[Stretch]:
    """Those of the piece ``[low, high)`` of a run, in order; none for what lies between parameters.

    Args:
        step: how many steps there are with this one.
        number: of the state.
    """
    table, found = _table(device), []
    first = bisect_right(places, low, key=lambda place: place[0].start + place[0].numel)
    for fragment, name in places[first:]:
        start, last = max(low, fragment.start), min(high, fragment.start + fragment.numel)
        if fragment.start >= high:
            break
        shift = fragment.offset - fragment.start  # from the run to the parameter
        while start < last:
            span, inside = divmod(start + shift, _SPAN)
            stop = min(last, start + _SPAN - inside)
            at = _mixed(salt_of(name, number, span, step)) % (_TABLE - _SPAN) + inside
            found.append(Stretch(start - low, stop - low, table[at : at + stop - start]))
            start = stop
    return found


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """[_TABLE] int32, of which :data:`BITS` are random, the same in every process."""
    bits = torch.arange(_TABLE, dtype=torch.int64)
    for shift, multiplier in _MIX:
        bits = ((bits ^ (bits >> shift)) * multiplier) & 0xFFFFFFFF
    return (bits & ((1 << BITS) - 1)).to(torch.int32).to(device)


def _mixed(value: int) -> int:
    for shift, multiplier in _MIX:
        value = ((value ^ (value >> shift)) * multiplier) & 0xFFFFFFFF
    return value
