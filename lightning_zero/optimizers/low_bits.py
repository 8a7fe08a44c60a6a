"""Optimizer state in bf16 or 8 bits (``zero.optimizer.state_dtype``): what the bits mean, and how a step writes them.

::

    bf16 | 16 bits for each value                                                  | [n] bfloat16
    int8 | a code of 8 bits for each value, and an exponent for a block of 256     | [n / 256, 257] uint8

**Codes.** A code is a number of 8 bits with an exponent of its own, as in the maps of 8-bit optimizers (Dettmers et al.
2021, arXiv:2110.02861): small and large values of a block are equally precise. Three bits are its fraction, and

- values with a sign have 4 bits of exponent: 15 powers of two, and 1/8 of the least of them as the least value;
- values that are never negative (second moments) have 5 bits: 31 powers of two. The first moment is divided by their
  square root, which has about the range of the first moment. A positive value is never stored as 0, because a step
  would divide by it ("zero-point problem": Li et al. 2023, arXiv:2309.01507).

The values of a block share a power of two and no other factor, so every code stands for a bf16 number, exactly.
Checkpoints hold these bf16 numbers, and encode to the same codes again (:meth:`Format.store`).

**Steps.** :class:`PieceMemory` widens a piece of the state to fp32, torch's own optimizer steps it, and it is rounded
back. A piece is a number of whole blocks, and each value depends on its element (or block) alone, so results do not
depend on where pieces, runs or shards are cut. Each thread steps one piece after the other with kernels of one thread:
a kernel that is divided over threads ends with the slowest of them, and a step has some fifty short kernels.

**Rounding.** With beta2 = 0.999 a step changes a second moment by a thousandth of itself, less than half a unit
in the last place of bf16 (1/512 to 1/256): rounded to nearest, it would never change. So a step rounds up with the
probability of the fraction that is cut off. The random bits are a function of the parameter's name, the element's place
in it, the step and the state, and so are the same at every stage, tier and number of ranks::

    parameter | span 0, of 2^18 elements | span 1       | ...
    table     |      ....[  span 1  ].......[  span 0  ].....|    a hash gives the place of a span's bits

One table holds all bits, because a hash of each element would take longer than the step.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.config import StateDtype
from lightning_zero.device.host_threads import setting_threads
from lightning_zero.optimizers.chunks import round_stochastically, salt_of
from lightning_zero.optimizers.known import base_of, shadow_of, start_state
from lightning_zero.planning.layout import Fragment
from lightning_zero.planning.state_dtype import BLOCK, ROW, TABLE_NBYTES, pieces_of

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


T = TypeVar("T")
M = TypeVar("M")


def in_threads(work: Callable[[Iterator[T], M], None], items: Iterable[T], memories: Sequence[M]) -> None:
    """Have ``work`` take ``items`` in a thread for each of ``memories``; they end with it. Any error is raised."""
    left = iter([*items])  # an item goes to one thread: a list's iterator is asked under the interpreter's lock
    ready, errors = threading.Semaphore(0), list[BaseException]()

    def run(memory: M) -> None:
        # Asked first: a thread that has never asked for its number takes, at its first kernel, that which was set last
        # in any thread. That would not be 1 by then, and each of these threads would have a team of its own.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.release()
        try:
            with torch.inference_mode(False), torch.no_grad():  # modes are those of a thread
                work(left, memory)
        except BaseException as error:
            errors.append(error)

    # New ones for each call: those of a pool would be gone in a process that is forked.
    running: list[threading.Thread] = []
    with setting_threads():
        with contextlib.suppress(RuntimeError):  # no more can be started, because of a limit or as the interpreter ends
            for number, memory in enumerate(memories):
                thread = threading.Thread(target=run, args=(memory,), name=f"lightning_zero-pieces_{number}")
                thread.start()
                running.append(thread)
        for _ in running:
            ready.acquire()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]
    work(left, memories[0])  # what nobody has taken


# State with an element for each element of a parameter, and whether it may be negative.
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
STATES: dict[type[Optimizer], dict[str, bool]] = {
    torch.optim.Adam: _MOMENTS,
    torch.optim.AdamW: _MOMENTS,
    torch.optim.NAdam: _MOMENTS,
    torch.optim.RAdam: _MOMENTS,
    torch.optim.Adamax: {"exp_avg": True, "exp_inf": False},
    torch.optim.RMSprop: {"momentum_buffer": True, "square_avg": False},
    torch.optim.Adagrad: {"sum": False},
    torch.optim.Adadelta: {"acc_delta": False, "square_avg": False},
    torch.optim.SGD: {"momentum_buffer": True},
}
_MAKES = threading.Lock()  # state, by one thread


def formats_of(optimizer: Optimizer, state: StateDtype) -> dict[str, Format]:
    """How each state rests, by name; empty where it rests as torch makes it."""
    base = base_of(optimizer)
    if state is StateDtype.fp32 or base is None:
        return {}
    return {name: Format(state, signed) for name, signed in STATES[base].items()}


class _Memory:
    """Memory for pieces of up to ``numel`` elements, for one after the other: fixed, and counted in the plan."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self._device = numel, device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.scratch = Scratch(numel, device)

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        if (name, dtype) not in self._buffers:
            self._buffers[name, dtype] = torch.empty(self.numel, dtype=dtype, device=self._device)
        return self._buffers[name, dtype][:numel]


class PieceMemory:
    """Memory of the threads that step pieces, for one run after the other, whichever optimizer steps it.

    It stays for the runs that follow: new memory would be given by the system page by page, in each of them.
    """

    def __init__(self) -> None:
        self._held: list[_Memory] = []

    def lend(self, threads: int, numel: int, device: torch.device) -> list[_Memory]:
        """One for each of ``threads``, for pieces of ``numel`` elements."""
        for number in range(threads):
            if number < len(self._held) and self._held[number].numel >= numel:
                continue
            del self._held[number : number + 1]  # what is too small goes before there is more
            self._held.insert(number, _Memory(numel, device))
        return self._held[:threads]

    def clear(self) -> None:
        """Give it back; what is lent goes when it is not used any more."""
        self._held = []


@dataclass(frozen=True)
class NarrowStep:
    """A step of ``run`` [n] with ``grad`` [n], whose state rests as ``formats`` say.

    Attributes:
        state: of the run; what a step makes is put into it.
        places: of the run.
        step: how many steps there are with this one.
        factor: 0-d, what ``grad`` is multiplied by; itself it stays as it is.
        rounding: index of the run's first element and a salt, to round parameters in bf16 stochastically.
    """

    run: Tensor
    grad: Tensor
    state: dict[str, Any]
    formats: Mapping[str, Format]
    places: Places
    step: int
    factor: Tensor | None = None
    rounding: tuple[int, int] | None = None

    def by(self, optimizer: Optimizer, memory: PieceMemory) -> None:
        """Have it done by the step of ``optimizer``, one of torch's element-wise ones, with one param group."""
        run = self.run
        chunk, threads = pieces_of(run.numel(), torch.get_num_threads() if run.device.type == "cpu" else None)
        pieces = [(low, min(low + chunk, run.numel())) for low in range(0, run.numel(), chunk)]
        memories = memory.lend(threads, min(chunk, run.numel()), run.device)
        before, after = dict(self.state), dict[str, Any]()

        def take(pieces: Iterator[tuple[int, int]], memory: _Memory) -> None:
            own = shadow_of(optimizer)  # with a param group of its own
            for low, high in pieces:
                after.update(self._piece(own, before, memory, low, high))

        if threads > 1:
            in_threads(take, pieces, memories)
        else:
            take(iter(pieces), memories[0])
        self.state.update({name: value for name, value in after.items() if name not in self.formats})
        if isinstance(optimizer, torch.optim.SGD):
            # It counts no steps. Here they name the random bits, also those of the steps that follow a checkpoint.
            self.state["step"] = torch.tensor(float(self.step))

    def _piece(
        self,
        optimizer: Optimizer,
        before: Mapping[str, Any],
        memory: _Memory,
        low: int,
        high: int,
    ) -> dict[str, Any]:
        """Step the elements ``[low, high)``. Returns their state after it."""
        part, wide = self.run[low:high], torch.promote_types(self.run.dtype, torch.float32)
        piece = part if part.dtype == wide else memory.buffer("param", high - low, wide).copy_(part)
        piece.grad = self._grad(low, high, wide, memory)
        optimizer.param_groups[0]["params"] = [piece]
        if before:
            optimizer.state[piece] = self._widened(before, memory, low, high, wide)
        else:
            start_state(optimizer, optimizer.param_groups[0], [piece])
        type(optimizer).step(optimizer)
        after = optimizer.state.pop(piece)
        for number, (name, form) in enumerate(self.formats.items()):
            if after.get(name) is not None:
                noise = random_bits(self.places, low, high, self.step, number, part.device)
                part_of_state = form.part(self._whole(name), low, high)
                form.narrow(after[name].float(), part_of_state, noise, memory.scratch)
        if piece is not part:
            _put(part, low, piece, self.rounding)
        return after

    def _whole(self, name: str) -> Tensor:
        """A state of the run, which the first piece makes."""
        with _MAKES:
            if self.state.get(name) is None:
                self.state[name] = self.formats[name].zeros(self.run.numel(), self.run.device)
            return self.state[name]  # type: ignore[no-any-return]

    def _grad(self, low: int, high: int, wide: torch.dtype, memory: _Memory) -> Tensor:
        grad, factor = self.grad[low:high], self.factor
        if grad.dtype == wide and grad.device == self.run.device:
            return grad if factor is None else torch.mul(grad, factor, out=memory.buffer("grad", high - low, wide))
        out = memory.buffer("grad", high - low, wide).copy_(grad)
        return out if factor is None else out.mul_(factor)

    def _widened(
        self, state: Mapping[str, Any], memory: _Memory, low: int, high: int, wide: torch.dtype
    ) -> dict[str, Any]:
        """The state of the elements ``[low, high)`` as a step takes it."""
        found: dict[str, Any] = {}
        # By numbers: optimizers name their states differently, and share this memory.
        buffers = {name: f"state {number}" for number, name in enumerate(self.formats)}
        for name, value in state.items():
            if name in self.formats and value is not None:
                form = self.formats[name]
                out = memory.buffer(buffers[name], high - low, torch.float32)
                found[name] = form.widen(form.part(value, low, high), out, memory.scratch).to(wide)
            else:
                # Each piece starts from the numbers of before: a step count would be raised once by each piece.
                found[name] = value.clone() if isinstance(value, Tensor) else value
        return found


def _put(target: Tensor, low: int, piece: Tensor, rounding: tuple[int, int] | None) -> None:
    if rounding is None:
        target.copy_(piece)
    else:
        first, salt = rounding
        target.copy_(round_stochastically(piece, first + low, salt_of(salt, "")))
