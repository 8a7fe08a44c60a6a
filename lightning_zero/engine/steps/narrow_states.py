"""Steps runs whose optimizer state rests in fewer bits: ``zero.optimizer.state_dtype``.

::

    state at rest --widen--> [ fp32, a piece at a time ] --torch's own step--> --round--> state at rest

Pieces are whole blocks, and every number of a piece is computed from that element (or block) alone. So results do not
depend on where pieces, runs or shards are cut.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.config import StateDtype
from lightning_zero.engine.steps.mixed_dtypes import round_stochastically, salt_of
from lightning_zero.engine.steps.piece_threads import in_threads
from lightning_zero.engine.steps.random_bits import Places, random_bits
from lightning_zero.engine.steps.torch_optimizers import base_of, shadow_of, start_state
from lightning_zero.engine.units.narrow import Format, Scratch
from lightning_zero.planning.state_dtype import pieces_of

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
