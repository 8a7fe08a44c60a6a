"""Optimizer state in bf16 (``zero.optimizer.state_dtype``), and steps that write it.

**Steps.** For each piece of a run, a step copies the state to fp32 buffers in :class:`PieceMemory`, calls torch's
optimizer, and rounds the new state to bf16. Each thread steps its own pieces with single-threaded kernels. With
multi-threaded kernels, each of a step's fifty short kernels would wait for the slowest thread.

**Rounding.** With beta2 = 0.999 a step changes a second moment by a thousandth of its value. This is less than half a
unit in the last place of bf16, so rounding to nearest would lose the change. Instead a value is rounded up with a
probability equal to the fraction that is cut off. The random bits depend only on the parameter's name, the element's
index in the parameter, the step and the state's index::

    parameter | span 0, of 2^18 elements | span 1       | ...
    table     |      ....[  span 1  ].......[  span 0  ].....|    a hash places each span in one table of bits

Hashing each element would take longer than the step."""

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
from lightning_zero.planning.state_dtype import TABLE_NBYTES, pieces_of
from lightning_zero.settings import StateDtype

BITS = 16  # random bits for each value
STORE_CHUNK = 1 << 20  # elements


class Stretch(NamedTuple):
    """Random bits for rounding elements ``[start, stop)`` of a piece of optimizer state. ``bits``: int32, read-only."""

    start: int
    stop: int
    bits: Tensor


def narrow(values: Tensor, part: Tensor, noise: Sequence[Stretch]) -> None:
    """Round fp32 ``values`` [n] stochastically to bf16 and write the result to ``part`` [n]. Overwrites ``values``.
    ``noise``: the random bits. Elements outside of every Stretch are truncated."""
    # Noise could carry a NaN's bits into its sign. On a CPU it is faster to look for NaN first.
    if values.device.type != "cpu" or values.amax().isnan():
        values.masked_fill_(values.isnan(), torch.nan)
    bits = values.view(torch.int32)
    for stretch in noise:
        bits[stretch.start : stretch.stop].add_(stretch.bits)
    part.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))  # a 32-bit integer hash with low bias: shifts, multipliers
_TABLE, _SPAN = TABLE_NBYTES // 4, 1 << 18  # elements

Places = Sequence[tuple[Fragment, str]]
"""The fragments of parameters in a run, in order, each with its parameter's name. ``fragment.start`` is an index in the
run."""


def random_bits(places: Places, low: int, high: int, step: int, number: int, device: torch.device) -> list[Stretch]:
    """Return the random bits for rounding a state of elements ``[low, high)`` of a run in step ``step``. Padding gets
    none. Positions in the result are relative to ``low``. ``number``: the state's index among the states."""
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
    """Return a table [_TABLE] of int32, equal in every process, whose entries have :data:`BITS` random bits each."""
    return (_mixed(torch.arange(_TABLE, dtype=torch.int64)) & ((1 << BITS) - 1)).to(torch.int32).to(device)


def _mixed(value: Any) -> Any:
    """Return the 32-bit hash of an int, or of each element of an int64 tensor."""
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


# Element-wise state of each optimizer.
_MOMENTS = ("exp_avg", "exp_avg_sq")
STATES: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: _MOMENTS,
    torch.optim.AdamW: _MOMENTS,
    torch.optim.NAdam: _MOMENTS,
    torch.optim.RAdam: _MOMENTS,
    torch.optim.Adamax: ("exp_avg", "exp_inf"),
    torch.optim.RMSprop: ("momentum_buffer", "square_avg"),
    torch.optim.Adagrad: ("sum",),
    torch.optim.Adadelta: ("acc_delta", "square_avg"),
    torch.optim.SGD: ("momentum_buffer",),
}
_MAKES = threading.Lock()


def narrow_states(optimizer: Optimizer, state: StateDtype) -> tuple[str, ...]:
    """Return the names of the states of ``optimizer`` that are stored in bf16 under setting ``state``; () if none."""
    base = base_of(optimizer)
    return () if state is StateDtype.fp32 or base is None else STATES[base]


class _Memory:
    """Buffers in which one thread steps pieces of at most ``numel`` elements. The memory plan counts these buffers."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self._device = numel, device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        if (name, dtype) not in self._buffers:
            self._buffers[name, dtype] = torch.empty(self.numel, dtype=dtype, device=self._device)
        return self._buffers[name, dtype][:numel]


class PieceMemory:
    """Keeps the buffers in which threads step pieces of runs. All optimizers share these buffers. Allocating new ones
    in each step would cost page faults."""

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
    """One optimizer step of ``run`` [n] (a slice of masters) with its gradient ``grad`` [n]. ``names``: the keys of
    ``state`` whose tensors are in bf16. ``step``: the step count, from 1.
    ``factor``: a 0-d tensor by which gradients are multiplied (in copies; ``grad`` does not change). None: no factor.
    ``rounding``: (index of the run's first element, salt), to round bf16 masters stochastically; None: to nearest."""

    run: Tensor
    grad: Tensor
    state: dict[str, Any]
    names: Sequence[str]
    places: Places
    step: int
    factor: Tensor | None = None
    rounding: tuple[int, int] | None = None

    def step_pieces(self, optimizer: Optimizer, memory: PieceMemory) -> None:
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
        self.state.update({name: value for name, value in after.items() if name not in self.names})

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
        for number, name in enumerate(self.names):
            if after.get(name) is not None:
                noise = random_bits(self.places, low, high, self.step, number, part.device)
                narrow(after[name].float(), self._whole(name)[low:high], noise)
        if piece is not part and self.rounding is not None:
            first, salt = self.rounding
            part.copy_(round_stochastically(piece, first + low, salt_of(salt, "")))
        elif piece is not part:
            part.copy_(piece)
        return after

    def _whole(self, name: str) -> Tensor:
        with _MAKES:
            if self.state.get(name) is None:
                self.state[name] = torch.zeros_like(self.run, dtype=torch.bfloat16)
            return self.state[name]  # type: ignore[no-any-return]

    def _widened(
        self, state: Mapping[str, Any], memory: _Memory, low: int, high: int, wide: torch.dtype
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        # Named by number, because optimizers with other names of states share this memory.
        buffers = {name: f"state {number}" for number, name in enumerate(self.names)}
        for name, value in state.items():
            if name in self.names and value is not None:
                out = memory.buffer(buffers[name], high - low, torch.float32)
                found[name] = out.copy_(value[low:high]).to(wide)
            else:
                # Copied, because each piece would raise a shared step count.
                found[name] = value.clone() if isinstance(value, Tensor) else value
        return found
