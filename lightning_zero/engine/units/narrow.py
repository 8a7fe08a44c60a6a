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
probability of the fraction that is cut off, by bits that are the same at every stage (``steps/random_bits.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.config import StateDtype
from lightning_zero.planning.state_dtype import BLOCK, ROW

FRACTION = 3  # bits
_SHIFT = 23 - FRACTION
_ONE = 0x3F800000  # 1.0
_NOT_FINITE = -128  # in the place of an exponent: all of the block is NaN
BITS = 16  # random bits for each value
STORE_CHUNK = 1 << 20  # elements


class Stretch(NamedTuple):
    """Random bits for the elements ``[start, stop)`` of what is rounded: [stop - start] int32, not to be changed."""

    start: int
    stop: int
    bits: Tensor


class Scratch:
    """Memory for conversions of up to ``numel`` elements, for one after the other."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.one, self.two = (torch.empty(numel, dtype=torch.int32, device=device) for _ in range(2))


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

    def widen(self, part: Tensor, out: Tensor, scratch: Scratch | None = None) -> Tensor:
        """The values that ``part`` stands for, into ``out`` [n] fp32."""
        if not self.is_packed:
            return out.copy_(part)
        # The number that has the code in its bits, and begins at 1/2: see :meth:`_encode`. From 1 on, where codes have
        # an exponent, it is the value itself, and below 1 the value is twice its distance to 1/2. (A table of values
        # takes longer to look into.)
        bits = out.view(torch.int32)
        if self.signed:
            scratch = scratch or Scratch(len(out), out.device)
            half = scratch.one[: len(out)]
            half.view(-1, BLOCK).copy_(part[:, :BLOCK].view(torch.int8))  # the sign in the first bit
            half.mul_(1 << _SHIFT).bitwise_and_(-0x78000001).add_(_ONE - (1 << 23))
            distance = scratch.two[: len(out)].view(torch.float32)
            torch.ops.aten.softshrink.out(half.view(torch.float32), 0.5, out=distance)
            torch.clamp(distance, -0.5, 0.5, out=out).add_(distance)
        else:
            bits.view(-1, BLOCK).copy_(part[:, :BLOCK])
            bits.mul_(1 << _SHIFT).add_(_ONE - (1 << 23))
            torch.nn.functional.leaky_relu_(out.sub_(1), 2.0).add_(1)
        power = torch.index_select(_powers(self.signed, part.device), 0, part[:, BLOCK].to(torch.int32))
        out.view(-1, BLOCK).mul_(power.unsqueeze(1))
        return out

    def narrow(
        self,
        values: Tensor,
        part: Tensor,
        noise: Sequence[Stretch] | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """Round ``values`` [n] fp32, which are overwritten, into ``part``.

        Args:
            noise: random bits, in the sum of which with what is cut off a carry rounds up; where there are none it is
                cut off. None: to nearest.
        """
        if self.is_packed:
            self._encode(values, part, noise, scratch or Scratch(len(values), values.device))
        elif noise is None:
            part.copy_(values)
        else:
            # Another NaN may carry into its sign. A look for one is cheap where it need not be waited for.
            if values.device.type != "cpu" or values.amax().isnan():
                values.masked_fill_(values.isnan(), torch.nan)
            bits = values.view(torch.int32)
            for stretch in noise:
                bits[stretch.start : stretch.stop].add_(stretch.bits)
            part.view(torch.int16).copy_(bits.bitwise_right_shift_(16))

    def _encode(self, values: Tensor, part: Tensor, noise: Sequence[Stretch] | None, scratch: Scratch) -> None:
        # Few passes, each over memory that is there: what they take is most of a step's time.
        bits, code = values.view(torch.int32), scratch.two[: len(values)]
        beside = scratch.one[: len(values)]
        if self.signed:
            torch.bitwise_right_shift(bits, 31, out=beside)  # -1 where negative
            values.abs_()
        else:
            torch.clamp(bits, min=0, max=1, out=beside)  # 1 where positive
        blocks = values.view(-1, BLOCK)
        most = blocks.amax(1, keepdim=True)
        # The least power of two under which no value is rounded up beyond the largest code.
        exponent = ((most.view(torch.int32) + ((1 << _SHIFT) - 1)) >> 23) - 127
        exponent.clamp_(_least(self.signed), 127)
        # Of a value x, in units of the power from which on codes are linear, the code is in the bits of max(2x, 1 + x):
        # of 2x where codes have an exponent, and below 1 of 1 + x, which goes in the equal steps between 1 and 2.
        blocks.mul_(((128 + _above(self.signed) - exponent) << 23).view(torch.float32))
        exponent.masked_fill_(~most.isfinite(), _NOT_FINITE)
        one, largest = _bounds(self.signed, values.device)
        wide = torch.add(one, values, alpha=0.5, out=code.view(torch.float32))
        torch.clamp(wide, min=values, max=largest, out=wide)
        if noise is None:
            code.add_(1 << (_SHIFT - 1))
        else:
            for stretch in noise:
                code[stretch.start : stretch.stop].add_(stretch.bits, alpha=1 << (_SHIFT - BITS))
        code.bitwise_right_shift_(_SHIFT).sub_(_ONE >> _SHIFT)
        if self.signed:
            code.add_(beside, alpha=-0x80)
        else:
            torch.maximum(code, beside, out=code)
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
def _bounds(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of what has the code in its bits: 1, which is the code 0, and what is the largest code. 0-d fp32."""
    bits = torch.tensor([_ONE, _ONE + ((0x7F if signed else 0xFF) << _SHIFT)], dtype=torch.int32, device=device)
    one, largest = bits.view(torch.float32)
    return one, largest


@lru_cache(maxsize=8)
def _powers(signed: bool, device: torch.device) -> Tensor:
    """By the byte of a block's exponent: the power from which on its codes are linear. [256] fp32"""
    exponent = torch.arange(256, dtype=torch.uint8).view(torch.int8).to(torch.int32)
    power = ((exponent - _above(signed) + 127) << 23).view(torch.float32)
    return power.masked_fill(exponent == _NOT_FINITE, torch.nan).to(device)
