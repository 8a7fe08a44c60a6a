"""Optimizer state that rests in fewer bits than it is stepped in: ``zero.optimizer.state_dtype``.

::

    bf16 | a value of 16 bits                                                    | [n] bfloat16
    int8 | 256 codes, and the exponent of the block, of a value's 256 neighbours | [n / 256, 257] uint8

A code is a number of 8 bits with an exponent of its own, as in the maps of 8-bit optimizers (Dettmers et al. 2021,
arXiv:2110.02861), so that small and large values of a block are equally precise: 3 bits of fraction, and

- for values with a sign, 4 bits of exponent: 15 powers of two, and 1/8 of the least of them as the least value;
- for values that are never negative (second moments), 5 bits: 31 powers of two. Their square root, by which the first
  moment is divided, so has about the range of the first moment. A positive one is never stored as 0, which would be
  divided by ("zero-point problem": Li et al. 2023, arXiv:2309.01507).

Blocks share a power of two and no other factor. So every code stands for a bf16 number, exactly: in checkpoints, and
wherever state is whole, it is bf16, and is encoded to the same values again (:meth:`Format.store`).

Rounding. A second moment changes by a thousandth of itself in a step (beta2 = 0.999), and half a unit in the last place
of bf16 is 1/512 to 1/256: rounded to nearest, it would never change again. So what a step makes is rounded up with the
probability of the fraction that is cut off, by bits that are a pure function of the element's place in its parameter,
the parameter's name and the step: they are the same at every stage, tier and number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_zero.config import StateDtype
from lightning_zero.planning.state_dtype import BLOCK, ROW

FRACTION = 3  # bits
_SHIFT = 23 - FRACTION
_ONE = 0x3F800000  # 1.0
_NOT_FINITE = -128  # in the place of an exponent: all of the block is NaN
NOISE = 16  # random bits for each value
STORE_CHUNK = 1 << 20  # elements


@dataclass(frozen=True, slots=True)
class Format:
    """How one tensor of state rests.

    Attributes:
        dtype: ``bf16`` or ``int8``.
        signed: values may be negative.
    """

    dtype: StateDtype
    signed: bool

    @property
    def is_packed(self) -> bool:
        return self.dtype is StateDtype.int8

    def zeros(self, numel: int, device: torch.device) -> Tensor:
        """What stands for ``numel`` zeros."""
        if not self.is_packed:
            return torch.zeros(numel, dtype=torch.bfloat16, device=device)
        assert numel % BLOCK == 0, f"a run of {numel} elements cuts a block of {BLOCK}"
        return torch.zeros(numel // BLOCK, ROW, dtype=torch.uint8, device=device)

    def part(self, whole: Tensor, low: int, high: int) -> Tensor:
        """What of ``whole`` stands for the elements ``[low, high)``, which end between blocks."""
        if not self.is_packed:
            return whole[low:high]
        assert low % BLOCK == 0 == high % BLOCK, f"the cut [{low}, {high}) falls inside a block of {BLOCK}"
        return whole[low // BLOCK : high // BLOCK]

    def place(self, whole: Tensor, start: int, numel: int) -> Tensor:
        """What of ``whole`` stands for ``numel`` elements from ``start`` on, the end of the last block included."""
        high = -(-(start + numel) // BLOCK) * BLOCK if self.is_packed else start + numel
        return self.part(whole, start, high)

    def widen(self, part: Tensor, out: Tensor) -> Tensor:
        """The values that ``part`` stands for, into ``out`` [n] fp32."""
        if not self.is_packed:
            return out.copy_(part)
        codes = part[:, :BLOCK].to(torch.int32)
        torch.index_select(_values(self.signed, part.device), 0, codes.view(-1), out=out)
        out.view(-1, BLOCK).mul_(_power(part[:, BLOCK:].view(torch.int8).to(torch.int32)))
        return out

    def narrow(self, values: Tensor, part: Tensor, noise: Tensor | None = None) -> None:
        """Round ``values`` [n] fp32, which are overwritten, into ``part``.

        Args:
            noise: [n] int32, :data:`NOISE` random bits each; overwritten. None: to nearest.
        """
        if self.is_packed:
            self._encode(values, part, noise)
        elif noise is None:
            part.copy_(values)
        else:
            # Not a NaN: the sum may carry into its sign. A look for one is cheap where it need not be waited for.
            if values.device.type != "cpu" or values.amax().isnan():
                noise.masked_fill_(values.isnan(), 0)
            noise.add_(values.view(torch.int32)).bitwise_and_(-0x10000)
            part.copy_(noise.view(torch.float32))

    def _encode(self, values: Tensor, part: Tensor, noise: Tensor | None) -> None:
        bits = values.view(torch.int32)
        sign = (bits >> 24).bitwise_and_(0x80) if self.signed else None
        if self.signed:
            bits.bitwise_and_(0x7FFFFFFF)
        blocks = values.view(-1, BLOCK)
        most = blocks.amax(1, keepdim=True)
        # The least power of two under which no value is rounded up beyond the largest code.
        exponent = ((most.view(torch.int32) + ((1 << _SHIFT) - 1)) >> 23) - 127
        exponent.clamp_(_least(self.signed), 127)
        above = _above(self.signed)
        blocks.mul_(((127 + above - exponent) << 23).view(torch.float32))
        exponent.masked_fill_(~most.isfinite(), _NOT_FINITE)
        # Below 1 the codes are linear: adding 1 brings equal steps about, as there are between 1 and 2.
        some = None if self.signed else values > 0
        small = (values < 1).to(torch.int32)
        values.add_(small)
        code = bits.sub_(_ONE - (1 << 23)).sub_(small.mul_(1 << 23))
        code.add_(1 << (_SHIFT - 1) if noise is None else noise.mul_(1 << (_SHIFT - NOISE)))
        code.bitwise_right_shift_(_SHIFT).clamp_(0, 0x7F if self.signed else 0xFF)
        if sign is not None:
            code.bitwise_or_(sign)
        elif some is not None:
            code.clamp_(min=some.to(torch.int32))
        part[:, :BLOCK].copy_(code.view(-1, BLOCK))
        part[:, BLOCK:].copy_(exponent.bitwise_and_(0xFF))

    def values(self, part: Tensor) -> Tensor:
        """The values that ``part`` stands for, exactly: [n] bf16."""
        if not self.is_packed:
            return part
        found = torch.empty(len(part) * BLOCK, dtype=torch.bfloat16, device=part.device)
        for low in range(0, len(found), STORE_CHUNK):
            rows = self.part(part, low, min(low + STORE_CHUNK, len(found)))
            wide = torch.empty(len(rows) * BLOCK, dtype=torch.float32, device=part.device)
            found[low : low + STORE_CHUNK].copy_(self.widen(rows, wide))
        return found

    def store(self, values: Tensor, part: Tensor) -> bool:
        """Put ``values`` [n], of any dtype and device, into ``part``: those that it can stand for as they are, others
        rounded to nearest. The last block may be filled in part. Returns whether any was rounded."""
        rounded = False
        for low in range(0, len(values), STORE_CHUNK):
            given = values[low : low + STORE_CHUNK]
            numel = -(-len(given) // BLOCK) * BLOCK if self.is_packed else len(given)
            wide = torch.zeros(numel, dtype=torch.float32, device=part.device)
            wide[: len(given)].copy_(given)
            place = self.part(part, low, low + numel)
            asked = wide.clone()
            self.narrow(wide, place)
            got = self.widen(place, wide)
            rounded = rounded or not torch.equal(got.nan_to_num_(), asked.nan_to_num_())
        return rounded


def is_packed(value: Any, tensor: Tensor) -> bool:
    """Whether ``value`` is a packed state for the elements of ``tensor``."""
    packed = isinstance(value, Tensor) and value.dtype is torch.uint8 and value.dim() == 2 and value.shape[1] == ROW
    return packed and value.shape[0] * BLOCK == tensor.numel()


def _exponent_bits(signed: bool) -> int:
    return 7 - FRACTION if signed else 8 - FRACTION


def _least(signed: bool) -> int:
    """The least exponent of a block: its least value is a normal number then, in fp32 and bf16."""
    return -126 + FRACTION + _above(signed)


def _above(signed: bool) -> int:
    """Powers of two between a block's exponent and that from which on codes are linear."""
    return (1 << _exponent_bits(signed)) - 2


@lru_cache(maxsize=8)
def _values(signed: bool, device: torch.device) -> Tensor:
    """What codes stand for in a block of exponent 0: [256] fp32."""
    code = torch.arange(256, dtype=torch.int32)
    size = code & 0x7F if signed else code
    power, fraction = (size >> FRACTION).clamp(min=1), size & ((1 << FRACTION) - 1)
    whole = (size >> FRACTION > 0).to(torch.float64)
    found = torch.ldexp(whole + fraction.double() / (1 << FRACTION), (power - 1 - _above(signed)).double())
    if signed:
        found = torch.where(code >= 0x80, -found, found)
    return found.float().to(device)


def _power(exponent: Tensor) -> Tensor:
    power = ((exponent + 127) << 23).view(torch.float32)
    return power.masked_fill(exponent == _NOT_FINITE, torch.nan)
