"""Step a run (a flat slice of masters) in pieces, if the step must compute in a wider dtype than masters or gradients.

A wider dtype is needed if gradients and masters differ in dtype, or if bf16 masters are rounded stochastically. Wide
copies of a piece fit in the cache. Pieces are multiples of 256 elements, for which torch's element-wise
optimizers give the same numbers as for the whole run.

Stochastic rounding: bf16 has 8 bits of mantissa, so rounding to nearest loses a change below 1/512 of a weight. Instead
a value is rounded up with a probability equal to the fraction that is cut off: right on average (Gupta et al.
2015, arXiv:1502.02551; for bf16 Zamirai et al. 2020, arXiv:2010.06192). The random numbers are a hash of element and
step, so they are the same at every stage, tier and number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.optimizers.known import is_elementwise, without_hooks

CHUNK = 1 << 18  # elements per thread: parameter, gradient and two states in fp32 take 4 MiB of cache
MAX_CHUNK = 1 << 22  # elements; cores share a bounded cache
DEVICE_CHUNK = 1 << 24  # large on a GPU, where each piece launches several kernels

_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)  # multipliers of a 32-bit integer hash with low bias, as int32


def round_stochastically(values: Tensor, first: int, salt: int) -> Tensor:
    """Round fp32 ``values`` [n] to bf16: up with a probability equal to the fraction that is cut off, else down.

    Random numbers depend only on ``salt`` and each value's index; ``first`` is the index of the first value."""
    noise = torch.arange(first, first + values.numel(), dtype=torch.int64, device=values.device).to(torch.int32)
    noise ^= salt - (1 << 32) if salt >= 1 << 31 else salt  # as int32
    for shift, multiplier in ((16, _M1), (15, _M2)):
        noise ^= (noise >> shift) & ((1 << (32 - shift)) - 1)  # mask the sign bits that a signed shift brings in
        noise *= multiplier
    noise = (noise >> 16) & 0xFFFF
    bits = values.view(torch.int32)
    rounded = ((bits + noise) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.bfloat16)


def salt_of(*parts: object) -> int:
    """Return a 32-bit hash of ``parts`` that is the same in every process."""
    # Not ``hash()``, which differs between processes: ranks and reruns would round differently.
    salt = 0x9E3779B9
    for byte in "/".join(map(str, parts)).encode():
        salt = ((salt ^ byte) * 0x01000193) & 0xFFFFFFFF  # FNV-1a
    return salt


def dtype_of_step(run: Tensor, grad: Tensor, *, rounds: bool) -> torch.dtype:
    """Return the dtype in which :func:`step_in_chunks` computes. ``rounds``: whether to round stochastically."""
    same = grad.dtype == run.dtype and not rounds
    return run.dtype if same else torch.promote_types(run.dtype, torch.float32)


def step_in_chunks(
    optimizer: Optimizer,
    group: dict[str, Any],
    run: Tensor,
    grad: Tensor,
    *,
    factor: Tensor | None = None,
    rounding: tuple[int, int] | None = None,
) -> None:
    """Step ``run`` [n] (a slice of masters) with its gradient ``grad`` [n], piece by piece.

    The computation is in the dtype that :func:`dtype_of_step` returns.

    Args:
        optimizer: one of torch's element-wise optimizers. Its ``state[run]`` is the run's state.
        group: the optimizer's only param group. This function replaces its ``params``.
        factor: a 0-d tensor by which gradients are multiplied (in copies; ``grad`` does not change). None: no factor.
        rounding: (index of the run's first element, salt), to round stochastically; None: round to nearest."""
    state = optimizer.state[run]
    step = without_hooks(type(optimizer).step)
    wide = dtype_of_step(run, grad, rounds=rounding is not None)
    # Each piece starts from the state before the step. Otherwise each piece would raise a shared step count.
    before = dict(state)
    after: dict[str, Any] = {}
    scaled: Tensor | None = None
    widened: Tensor | None = None
    for low, high in _pieces(run):
        piece = run[low:high].to(wide)
        part = grad[low:high]
        if factor is not None:
            # One buffer for all pieces stays in the cache. New memory for each is mapped and given back each time.
            scaled = torch.empty_like(part) if scaled is None else scaled[: len(part)]
            part = torch.mul(part, factor, out=scaled)
        if part.dtype != wide and part.device == run.device:
            widened = torch.empty_like(part, dtype=wide) if widened is None else widened[: len(part)]
            part = widened.copy_(part)
        piece.grad = part.to(device=run.device, dtype=wide)
        own = optimizer.state[piece] = {}
        for name, value in before.items():
            if not is_elementwise(optimizer, name, value, run):
                own[name] = value.clone() if isinstance(value, Tensor) else value
            else:
                dtype = torch.promote_types(value.dtype, wide) if value.is_floating_point() else value.dtype
                own[name] = value[low:high].to(dtype)
        group["params"] = [piece]
        step(optimizer)
        after = optimizer.state.pop(piece)
        _write_back(run, low, piece, "", rounding)
        for name, value in after.items():
            if is_elementwise(optimizer, name, value, piece):
                if state.get(name) is None:
                    state[name] = torch.zeros_like(run)
                _write_back(state[name], low, value, name, rounding)
    for name, value in after.items():
        if not is_elementwise(optimizer, name, state.get(name), run):
            state[name] = value


def _pieces(run: Tensor) -> Iterator[tuple[int, int]]:
    chunk = min(CHUNK * torch.get_num_threads(), MAX_CHUNK) if run.device.type == "cpu" else DEVICE_CHUNK
    for low in range(0, run.numel(), chunk):
        yield low, min(low + chunk, run.numel())


def _write_back(whole: Tensor, low: int, piece: Tensor, name: str, rounding: tuple[int, int] | None) -> None:
    target = whole[low : low + piece.numel()]
    if target.data_ptr() == piece.data_ptr():
        return  # the piece is a view: stepped in place
    if rounding is None or whole.dtype is not torch.bfloat16:
        target.copy_(piece)
        return
    first, salt = rounding
    target.copy_(round_stochastically(piece, first + low, salt_of(salt, name)))
