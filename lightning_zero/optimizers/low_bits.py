"""Optimizer state in bf16 or 8 bits (``zero.optimizer.state_dtype``): its format, and steps that write it.

::

    bf16 | 16 bits for each value                                                  | [n] bfloat16
    int8 | a code of 8 bits for each value, and an exponent for a block of 256     | [n / 256, 257] uint8

**Codes.** A code is an 8-bit float with 3 bits of fraction, as in other 8-bit optimizers (Dettmers et al. 2021,
arXiv:2110.02861). Signed values have 4 bits of exponent: 15 powers of two; the least value is 1/8 of the least power.
Values >= 0 (second moments) have 5 bits of exponent: 31 powers of two, whose square roots have about the range of the
first moment. A positive value is never stored as 0, because a step divides by it ("zero-point problem": Li et al. 2023,
arXiv:2309.01507). A block's scale is a power of two, so every code is exactly a bf16 number. Checkpoints hold these
bf16 numbers; loading encodes them to the same codes (:meth:`Format.store`).

**Steps.** Piece by piece, a step decodes the state to fp32 in :class:`PieceMemory`, lets torch's optimizer step it, and
rounds it back. Pieces are whole blocks, so results do not depend on how pieces, runs or shards are cut. Each thread
steps pieces with one-threaded kernels: with all threads, a step's fifty short kernels would wait for the slowest ones.

**Rounding.** With beta2 = 0.999 a step changes a second moment by a thousandth, less than half a unit in the last place
of bf16, and rounding to nearest would lose it. So a step rounds up with the probability of the fraction that is cut
off. Random bits depend only on the parameter's name, the element's index in it, the step and the state::

    parameter | span 0, of 2^18 elements | span 1       | ...
    table     |      ....[  span 1  ].......[  span 0  ].....|    a hash places each span in one table of bits

Hashing each element would take longer than the step.
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

from lightning_zero.device.host_threads import setting_threads
from lightning_zero.optimizers.chunks import round_stochastically, salt_of
from lightning_zero.optimizers.known import base_of, shadow_of, start_state, without_hooks
from lightning_zero.planning.layout import Fragment
from lightning_zero.planning.state_dtype import BLOCK, ROW, TABLE_NBYTES, pieces_of
from lightning_zero.settings import StateDtype

FRACTION = 3  # bits
_SHIFT = 23 - FRACTION
_ONE = 0x3F800000  # 1.0
_NOT_FINITE = -128  # replaces the exponent of a block that is not finite; all its values then read as NaN
BITS = 16  # random bits for each value
STORE_CHUNK = 1 << 20  # elements


class Stretch(NamedTuple):
    """Random bits that round elements ``[start, stop)`` of a piece of optimizer state. ``bits``: int32, read-only."""

    start: int
    stop: int
    bits: Tensor


class Scratch:
    """Two buffers of ``numel`` elements, for one conversion between codes and fp32 at a time."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.one, self.two = (torch.empty(numel, dtype=torch.int32, device=device) for _ in range(2))


@dataclass(frozen=True, slots=True)
class Format:
    """How one tensor of optimizer state is stored: as bf16 or int8 codes. ``signed``: values can be below 0."""

    dtype: StateDtype
    signed: bool

    @property
    def is_packed(self) -> bool:
        return self.dtype is StateDtype.int8

    def zeros(self, numel: int, device: torch.device) -> Tensor:
        if not self.is_packed:
            return torch.zeros(numel, dtype=torch.bfloat16, device=device)
        assert numel % BLOCK == 0, f"a run of {numel} elements cuts a block of {BLOCK}"
        return torch.zeros(numel // BLOCK, ROW, dtype=torch.uint8, device=device)

    def part(self, whole: Tensor, low: int, high: int) -> Tensor:
        """Return a view of elements ``[low, high)`` of the stored state ``whole``. For int8: multiples of BLOCK."""
        if not self.is_packed:
            return whole[low:high]
        assert low % BLOCK == 0 == high % BLOCK, f"the cut [{low}, {high}) falls inside a block of {BLOCK}"
        return whole[low // BLOCK : high // BLOCK]

    def place(self, whole: Tensor, start: int, numel: int) -> Tensor:
        """Return a view of ``numel`` elements of the stored state ``whole``, from element ``start`` on. For int8, the
        view goes on to the end of a block."""
        high = -(-(start + numel) // BLOCK) * BLOCK if self.is_packed else start + numel
        return self.part(whole, start, high)

    def widen(self, part: Tensor, out: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Decode the stored elements ``part`` into ``out`` [n] fp32, and return ``out``."""
        if not self.is_packed:
            return out.copy_(part)
        # Put the code into the top bits of a float >= 1/2, see :meth:`_encode`. From 1 on (codes with an exponent) the
        # float is the value; below 1 the value is twice its distance to 1/2. A table of values would be slower.
        bits = out.view(torch.int32)
        if self.signed:
            scratch = scratch or Scratch(len(out), out.device)
            half = scratch.one[: len(out)]
            half.view(-1, BLOCK).copy_(part[:, :BLOCK].view(torch.int8))  # int8 extends the sign
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
        self, values: Tensor, part: Tensor, noise: Sequence[Stretch] | None = None, scratch: Scratch | None = None
    ) -> None:
        """Encode fp32 ``values`` [n] into the stored elements ``part``. Overwrites ``values``.

        ``noise``: random bits for stochastic rounding; elements in no Stretch are cut off, not rounded. None: round
        all values to nearest. ``scratch``: buffers to reuse; None: new ones if needed.
        """
        if self.is_packed:
            self._encode(values, part, noise, scratch or Scratch(len(values), values.device))
        elif noise is None:
            part.copy_(values)
        else:
            # Noise could carry a NaN's bits into its sign. On a CPU it is faster to look for NaN first.
            if values.device.type != "cpu" or values.amax().isnan():
                values.masked_fill_(values.isnan(), torch.nan)
            bits = values.view(torch.int32)
            for stretch in noise:
                bits[stretch.start : stretch.stop].add_(stretch.bits)
            part.view(torch.int16).copy_(bits.bitwise_right_shift_(16))

    def _encode(self, values: Tensor, part: Tensor, noise: Sequence[Stretch] | None, scratch: Scratch) -> None:
        # Memory passes take most of a step's time: few passes, and no new memory.
        bits, code = values.view(torch.int32), scratch.two[: len(values)]
        beside = scratch.one[: len(values)]
        if self.signed:
            torch.bitwise_right_shift(bits, 31, out=beside)  # -1 where negative
            values.abs_()
        else:
            torch.clamp(bits, min=0, max=1, out=beside)  # 1 where positive
        blocks = values.view(-1, BLOCK)
        most = blocks.amax(1, keepdim=True)
        # The least power of two for which no value rounds up beyond the largest code.
        exponent = ((most.view(torch.int32) + ((1 << _SHIFT) - 1)) >> 23) - 127
        # From the least exponent on, a block's least value is a normal number in fp32 and bf16.
        exponent.clamp_(-126 + FRACTION + _above(self.signed), 127)
        # In units of the power above which codes have an exponent, the top bits of max(2x, 1 + x) hold the code of x:
        # those of 2x where codes have an exponent, and of 1 + x where codes are linear (x below 1).
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
        """Decode the stored elements ``part`` to [n] bf16, which holds every code exactly."""
        if not self.is_packed:
            return part
        found = torch.empty(len(part) * BLOCK, dtype=torch.bfloat16, device=part.device)
        for low in range(0, len(found), STORE_CHUNK):
            rows = self.part(part, low, min(low + STORE_CHUNK, len(found)))
            wide = torch.empty(len(rows) * BLOCK, dtype=torch.float32, device=part.device)
            found[low : low + STORE_CHUNK].copy_(self.widen(rows, wide))
        return found

    def store(self, values: Tensor, part: Tensor) -> bool:
        """Encode ``values`` [n], of any dtype, into ``part``, rounded to nearest. Return whether any value changed."""
        numel = len(part) * BLOCK if self.is_packed else len(values)
        wide = torch.zeros(numel, dtype=torch.float32, device=part.device)
        wide[: len(values)].copy_(values)
        asked = wide.clone()
        self.narrow(wide, part)
        return not torch.equal(self.widen(part, wide).nan_to_num_(), asked.nan_to_num_())


def _above(signed: bool) -> int:
    """Return the exponent of a block minus the exponent of the power of two below which its codes are linear."""
    return (1 << (7 - FRACTION if signed else 8 - FRACTION)) - 2


@lru_cache(maxsize=8)
def _bounds(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two 0-d fp32 tensors: what the least code (0) and what the largest code stand for before scaling. The
    value of the first is 1.0."""
    bits = torch.tensor([_ONE, _ONE + ((0x7F if signed else 0xFF) << _SHIFT)], dtype=torch.int32, device=device)
    one, largest = bits.view(torch.float32)
    return one, largest


@lru_cache(maxsize=8)
def _powers(signed: bool, device: torch.device) -> Tensor:
    """Return a table [256] fp32. Index: the byte that stores a block's exponent. Value: the power of two below which
    the block's codes are linear."""
    exponent = torch.arange(256, dtype=torch.uint8).view(torch.int8).to(torch.int32)
    power = ((exponent - _above(signed) + 127) << 23).view(torch.float32)
    return power.masked_fill(exponent == _NOT_FINITE, torch.nan).to(device)


_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))  # a 32-bit integer hash with low bias: shifts, multipliers
_TABLE, _SPAN = TABLE_NBYTES // 4, 1 << 18  # elements

Places = Sequence[tuple[Fragment, str]]
"""A run's fragments of parameters, in order, each with its parameter's name. A fragment starts at element ``start`` of
the run."""


def random_bits(places: Places, low: int, high: int, step: int, number: int, device: torch.device) -> list[Stretch]:
    """Return random bits to round the state of elements ``[low, high)`` of a run in step ``step``. Padding gets none.

    ``places``: the run's fragments of parameters. ``number``: the state's index among the optimizer's states."""
    table, found = _table(device), []
    first = bisect_right(places, low, key=lambda place: place[0].start + place[0].numel)
    for fragment, name in places[first:]:
        start, last = max(low, fragment.start), min(high, fragment.start + fragment.numel)
        if fragment.start >= high:
            break
        shift = fragment.offset - fragment.start  # run index to parameter index
        while start < last:
            span, inside = divmod(start + shift, _SPAN)
            stop = min(last, start + _SPAN - inside)
            at = _mixed(salt_of(name, number, span, step)) % (_TABLE - _SPAN) + inside
            found.append(Stretch(start - low, stop - low, table[at : at + stop - start]))
            start = stop
    return found


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """Return a table [_TABLE] int32 of :data:`BITS` random bits per entry, equal in every process."""
    return (_mixed(torch.arange(_TABLE, dtype=torch.int64)) & ((1 << BITS) - 1)).to(torch.int32).to(device)


def _mixed(value: Any) -> Any:
    """Hash an int, or each element of an int64 tensor, to 32 bits."""
    for shift, multiplier in _MIX:
        value = ((value ^ (value >> shift)) * multiplier) & 0xFFFFFFFF
    return value


T = TypeVar("T")
M = TypeVar("M")


def in_threads(work: Callable[[Iterator[T], M], None], items: Iterable[T], memories: Sequence[M]) -> None:
    """Call ``work(iterator, memory)`` in one thread for each of ``memories``. All calls share the iterator over
    ``items``, so that each item goes to one thread. Wait for all threads, and raise the first error."""
    left = iter([*items])  # a list's iterator gives each item to one thread, thanks to the interpreter's lock
    ready, errors = threading.Semaphore(0), list[BaseException]()

    def run(memory: M) -> None:
        # Ask for the number first. Otherwise the thread's first kernel takes the number that any thread has set last:
        # it is not 1 by then, and each of these threads would start more threads.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.release()
        try:
            with torch.inference_mode(False), torch.no_grad():  # torch's modes are per thread
                work(left, memory)
        except BaseException as error:
            errors.append(error)

    # New threads for each call: a forked process would lack those of a pool.
    running: list[threading.Thread] = []
    with setting_threads():
        with contextlib.suppress(RuntimeError):  # the system's limit of threads, or the interpreter is ending
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
    work(left, memories[0])  # the rest, if no thread could be started


# Element-wise state of each optimizer, and whether its values may be negative.
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
_MAKES = threading.Lock()


def formats_of(optimizer: Optimizer, state: StateDtype) -> dict[str, Format]:
    """Return the :class:`Format` of each state of ``optimizer`` by name; {} if states stay as torch makes them."""
    base = base_of(optimizer)
    if state is StateDtype.fp32 or base is None:
        return {}
    return {name: Format(state, signed) for name, signed in STATES[base].items()}


class _Memory:
    """Buffers in which one thread steps a piece of a run: at most ``numel`` elements. The memory plan counts them."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self._device = numel, device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.scratch = Scratch(numel, device)

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        if (name, dtype) not in self._buffers:
            self._buffers[name, dtype] = torch.empty(self.numel, dtype=dtype, device=self._device)
        return self._buffers[name, dtype][:numel]


class PieceMemory:
    """Keeps the buffers in which threads step pieces of runs, for all optimizers. New ones would cost page faults."""

    def __init__(self) -> None:
        self._held: list[_Memory] = []

    def lend(self, threads: int, numel: int, device: torch.device) -> list[_Memory]:
        for number in range(threads):
            if number < len(self._held) and self._held[number].numel >= numel:
                continue
            del self._held[number : number + 1]  # free the small one before allocating
            self._held.insert(number, _Memory(numel, device))
        return self._held[:threads]

    def clear(self) -> None:
        self._held = []


@dataclass(frozen=True)
class NarrowStep:
    """One optimizer step of ``run`` [n], a slice of the masters, with ``grad`` [n]. ``formats`` says how ``state`` is
    stored. ``step``: the number of the step, from 1.

    ``factor``: a 0-d tensor, by which copies of the gradients are multiplied, not ``grad`` itself; None: no factor.
    ``rounding``: (index of the run's first element, salt), to round bf16 masters stochastically; None: to nearest.
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
        """Step the run piece by piece. ``optimizer``: one of torch's element-wise optimizers, with one param group."""
        run = self.run
        chunk, threads = pieces_of(run.numel(), torch.get_num_threads() if run.device.type == "cpu" else None)
        pieces = [(low, min(low + chunk, run.numel())) for low in range(0, run.numel(), chunk)]
        memories = memory.lend(threads, min(chunk, run.numel()), run.device)
        before, after = dict(self.state), dict[str, Any]()

        def take(pieces: Iterator[tuple[int, int]], memory: _Memory) -> None:
            own = shadow_of(optimizer)  # its param group is used by this thread only
            for low, high in pieces:
                after.update(self._piece(own, before, memory, low, high))

        if threads > 1:
            in_threads(take, pieces, memories)
        else:
            take(iter(pieces), memories[0])
        self.state.update({name: value for name, value in after.items() if name not in self.formats})

    def _piece(
        self, optimizer: Optimizer, before: Mapping[str, Any], memory: _Memory, low: int, high: int
    ) -> dict[str, Any]:
        part, wide = self.run[low:high], torch.promote_types(self.run.dtype, torch.float32)
        piece = part if part.dtype == wide else memory.buffer("param", high - low, wide).copy_(part)
        grad = self.grad[low:high]
        if grad.dtype != wide or grad.device != part.device:
            grad = memory.buffer("grad", high - low, wide).copy_(grad)
        if self.factor is not None:
            grad = torch.mul(grad, self.factor, out=memory.buffer("grad", high - low, wide))
        piece.grad = grad
        optimizer.param_groups[0]["params"] = [piece]
        if before:
            optimizer.state[piece] = self._widened(before, memory, low, high, wide)
        else:
            start_state(optimizer, optimizer.param_groups[0], [piece])
        without_hooks(type(optimizer).step)(optimizer)
        after = optimizer.state.pop(piece)
        for number, (name, form) in enumerate(self.formats.items()):
            if after.get(name) is not None:
                noise = random_bits(self.places, low, high, self.step, number, part.device)
                part_of_state = form.part(self._whole(name), low, high)
                form.narrow(after[name].float(), part_of_state, noise, memory.scratch)
        if piece is not part and self.rounding is not None:
            first, salt = self.rounding
            part.copy_(round_stochastically(piece, first + low, salt_of(salt, "")))
        elif piece is not part:
            part.copy_(piece)
        return after

    def _whole(self, name: str) -> Tensor:
        with _MAKES:
            if self.state.get(name) is None:
                self.state[name] = self.formats[name].zeros(self.run.numel(), self.run.device)
            return self.state[name]  # type: ignore[no-any-return]

    def _widened(
        self, state: Mapping[str, Any], memory: _Memory, low: int, high: int, wide: torch.dtype
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        # Named by number, because optimizers with other names of states share this memory.
        buffers = {name: f"state {number}" for number, name in enumerate(self.formats)}
        for name, value in state.items():
            if name in self.formats and value is not None:
                form = self.formats[name]
                out = memory.buffer(buffers[name], high - low, torch.float32)
                found[name] = form.widen(form.part(value, low, high), out, memory.scratch).to(wide)
            else:
                # Copied, because each piece would raise a shared step count.
                found[name] = value.clone() if isinstance(value, Tensor) else value
        return found
