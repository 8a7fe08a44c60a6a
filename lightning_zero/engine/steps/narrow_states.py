"""Steps runs whose optimizer state rests in fewer bits: ``zero.optimizer.state_dtype``.

::

    state at rest --widen--> [ fp32, a piece at a time ] --torch's own step--> --round--> state at rest

Pieces are whole blocks, and every number of a piece is computed from that element (or block) alone. So results do not
depend on where pieces, runs or shards are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.config import ConfigError, StateDtype
from lightning_zero.engine.steps.mixed_dtypes import round_stochastically, salt_of
from lightning_zero.engine.steps.torch_optimizers import base_of, overrides_step, start_state
from lightning_zero.engine.units.narrow import Format
from lightning_zero.planning.layout import Fragment
from lightning_zero.planning.state_dtype import CHUNK, DEVICE_CHUNK, MAX_CHUNK, TABLE_NBYTES

_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))  # a 32-bit integer hash with low bias: shifts, multipliers
_TABLE, _SPAN = TABLE_NBYTES // 4, 1 << 18  # elements

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
_KEY = "zero.optimizer.state_dtype"


def check_narrow(optimizer: Optimizer, state: StateDtype, *, declared_elementwise: bool) -> None:
    """Refuse optimizers whose state cannot rest in fewer bits.

    Raises:
        ConfigError: why, and what to change.
    """
    if state is StateDtype.fp32:
        return
    kind = type(optimizer)
    name, asked = f"{kind.__module__}.{kind.__qualname__}", f"{_KEY}={state.name}"
    base = base_of(optimizer)
    if base is None or (declared_elementwise and overrides_step(optimizer)):
        raise ConfigError(
            f"{asked}: expected one of torch's element-wise optimizers with torch's step, got {name}, whose state is "
            f"not known. Use torch.optim.AdamW, or drop {_KEY}."
        )
    if base not in STATES:
        raise ConfigError(
            f"{asked}: torch.optim.{base.__name__} keeps more than moments (step sizes, or a second copy of the "
            f"weights), which must not be rounded. Use torch.optim.AdamW, or drop {_KEY}."
        )
    for group in optimizer.param_groups:
        if base is torch.optim.SGD and not group["momentum"]:
            raise ConfigError(
                f"{asked}: SGD without momentum keeps no state, so there is nothing to narrow. Drop {_KEY}, or give "
                "momentum to each param group."
            )
        for flag, why in (
            ("amsgrad", "the greatest of second moments that are rounded at random grows with the number of steps"),
            ("centered", "the difference of two averages that are rounded may be negative, and its root is taken"),
        ):
            if group.get(flag):
                raise ConfigError(f"{asked}: {kind.__name__}({flag}=True): {why}. Drop {flag}, or {_KEY}.")
        if any(p.is_complex() for p in group["params"]):
            raise ConfigError(f"{asked}: expected real parameters, got complex ones. Drop {_KEY}.")


def refuse_narrow_whole(optimizer: Optimizer, state: StateDtype) -> None:
    """
    Raises:
        ConfigError: state of an optimizer that steps whole tensors is to rest in fewer bits.
    """
    if state is not StateDtype.fp32:
        kind = type(optimizer)
        raise ConfigError(
            f"{_KEY}={state.name}: {kind.__module__}.{kind.__qualname__} steps whole tensors, and keeps state that is "
            f"not known. Use torch.optim.AdamW for all parameters (and not zero.optimizer.whole=true), or drop {_KEY}."
        )


def formats_of(optimizer: Optimizer, state: StateDtype) -> dict[str, Format]:
    """How each state rests, by name; empty where it rests as torch makes it."""
    base = base_of(optimizer)
    if state is StateDtype.fp32 or base is None:
        return {}
    return {name: Format(state, signed) for name, signed in STATES[base].items()}


class _Pieces:
    """Memory for the pieces of one run: fixed, and counted in the plan."""

    def __init__(self, numel: int, device: torch.device, formats: Mapping[str, Format]) -> None:
        self.noise = torch.empty(numel, dtype=torch.int32, device=device)
        self.states = {name: torch.empty(numel, dtype=torch.float32, device=device) for name in formats}


def step_narrow(
    optimizer: Optimizer,
    group: dict[str, Any],
    run: Tensor,
    grad: Tensor,
    formats: Mapping[str, Format],
    places: list[tuple[Fragment, str]],
    step: int,
    *,
    factor: Tensor | None = None,
    rounding: tuple[int, int] | None = None,
) -> None:
    """``optimizer`` steps ``run`` [n] with ``grad`` [n], with state that rests as ``formats`` say.

    Args:
        optimizer: one of torch's element-wise ones, with one param group and ``run``'s state in ``state``.
        group: that param group; its ``params`` are replaced.
        places: the fragments of the run, counted from the run's start, with names of their parameters.
        step: how many steps there are with this one.
        factor: 0-d, what ``grad`` is multiplied by; itself it stays as it is.
        rounding: index of the run's first element and a salt, to round parameters in bf16 stochastically.
    """
    state = optimizer.state[run]
    before, after = dict(state), dict[str, Any]()
    wide = torch.promote_types(run.dtype, torch.float32)
    chunk = min(CHUNK * torch.get_num_threads(), MAX_CHUNK) if run.device.type == "cpu" else DEVICE_CHUNK
    pieces = _Pieces(min(chunk, run.numel()), run.device, formats)
    for low in range(0, run.numel(), chunk):
        high = min(low + chunk, run.numel())
        piece = run[low:high].to(wide)
        part = grad[low:high].to(device=run.device, dtype=wide)
        piece.grad = part if factor is None else torch.mul(part, factor)
        group["params"] = [piece]
        if before:
            optimizer.state[piece] = _widened(before, formats, pieces, low, high, wide)
        else:
            start_state(optimizer, group, [piece])
        type(optimizer).step(optimizer)
        after = optimizer.state.pop(piece)
        for number, name in enumerate(formats):
            if after.get(name) is not None:
                _fill_noise(pieces.noise[: high - low], places, low, high, step, number)
                _round(name, after[name], state, formats[name], pieces.noise[: high - low], low, run)
        if piece.data_ptr() != run[low:high].data_ptr():
            _put(run[low:high], low, piece, rounding)
    state.update({name: value for name, value in after.items() if name not in formats})
    if isinstance(optimizer, torch.optim.SGD):
        # It counts no steps. Here they name the random bits, also those of the steps that follow a checkpoint.
        state["step"] = torch.tensor(float(step))


def _widened(
    state: Mapping[str, Any], formats: Mapping[str, Format], pieces: _Pieces, low: int, high: int, wide: torch.dtype
) -> dict[str, Any]:
    """The state of the elements ``[low, high)`` as a step takes it."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name in formats and value is not None:
            part = formats[name].part(value, low, high)
            found[name] = formats[name].widen(part, pieces.states[name][: high - low]).to(wide)
        else:
            # Each piece starts from the numbers of before: a step count would be raised once by each piece.
            found[name] = value.clone() if isinstance(value, Tensor) else value
    return found


def _round(name: str, value: Tensor, state: dict[str, Any], form: Format, noise: Tensor, low: int, run: Tensor) -> None:
    """Put a moment of a piece, which a step has made, into ``state`` of the run, from element ``low`` on."""
    if state.get(name) is None:
        state[name] = form.zeros(run.numel(), run.device)
    form.narrow(value.float(), form.part(state[name], low, low + len(value)), noise)


def _put(target: Tensor, low: int, piece: Tensor, rounding: tuple[int, int] | None) -> None:
    if rounding is None:
        target.copy_(piece)
    else:
        first, salt = rounding
        target.copy_(round_stochastically(piece, first + low, salt_of(salt, "")))


def _fill_noise(noise: Tensor, places: list[tuple[Fragment, str]], low: int, high: int, step: int, number: int) -> None:
    """Random bits for each element of a piece: by its place in its parameter, the parameter's name, the step and the
    number of the state.

    They are copied out of one table, from another place for each block of :data:`_SPAN` elements: a hash of each
    element would take longer than the step.
    """
    table = _table(noise.device)
    if sum(fragment.numel for fragment, _ in places) < places[-1][0].stop:
        noise.zero_()  # between parameters: state there is not always 0, and counts for the exponent of its block
    for fragment, name in places:
        first, last = max(low, fragment.start), min(high, fragment.start + fragment.numel)
        shift = fragment.offset - fragment.start  # from the run to the parameter
        while first < last:
            block, inside = divmod(first + shift, _SPAN)
            stop = min(last, first + _SPAN - inside)
            start = _mixed(salt_of(name, number, block, step)) % (_TABLE - _SPAN) + inside
            noise[first - low : stop - low].copy_(table[start : start + stop - first])
            first = stop


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """[_TABLE] int32, of which :data:`NOISE` bits are random, the same in every process."""
    bits = torch.arange(_TABLE, dtype=torch.int64)
    for shift, multiplier in _MIX:
        bits = ((bits ^ (bits >> shift)) * multiplier) & 0xFFFFFFFF
    return (bits & 0xFFFF).to(torch.int32).to(device)


def _mixed(value: int) -> int:
    for shift, multiplier in _MIX:
        value = ((value ^ (value >> shift)) * multiplier) & 0xFFFFFFFF
    return value
