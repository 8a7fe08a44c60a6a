"""The engine shards one module over the ranks of a process group. Engines are made in ``sharding.py``.

::

    engine       the class Engine: the calls that other packages make
    build        the parts of an engine, and how they are made
    units        the sharded parameters: their flat buffers, and the tiers that hold the buffers
    passes       forward and backward: gathers, gradients, reductions
    host_copy    the copy of a module on its host, between Trainer runs
    steps        optimizers and offloaded steps
    whole        state dicts, gather() and restage()
    torch_modes  sets torch's modes for engine work
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from lightning_zero.engine.engine import Engine, engine_of, engines
from lightning_zero.engine.whole.state_dicts import load_optimizer_state, optimizer_state
from lightning_zero.engine.whole.whole_params import show_gathered
from lightning_zero.settings import ConfigError

__all__ = [
    "Engine",
    "clip_grad_norm_",
    "engine_of",
    "engines",
    "gather",
    "grad_norm",
    "load_optimizer_state",
    "optimizer_state",
]

Target = nn.Module | nn.Parameter | Iterable[nn.Parameter]


def _resolve(target: Target) -> tuple[Engine, list[nn.Parameter]]:
    if isinstance(target, nn.Parameter):
        params = [target]
    elif isinstance(target, nn.Module):
        # A frozen part that was added later (a teacher, copied inside gather) is whole on every rank.
        params = [p for p in target.parameters() if p.requires_grad or any(e.units.owns(p) for e in engines())]
    else:
        params = list(target)
    found = {id(e): e for p in params for e in engines() if e.units.owns(p)}
    if len(found) != 1:
        raise ConfigError(
            f"expected parameters of one sharded module, got {len(params)} parameters of {len(found)}. "
            "Call this after the module was sharded (in training hooks, not in __init__)."
        )
    return next(iter(found.values())), params


@contextlib.contextmanager
def gather(target: Target, *, from_rank: int | None = None, grads: bool = False) -> Iterator[None]:
    """Context manager in which parameters of ``target`` have full values. Changes to the values are kept. Collective.

    The values are the master parameters, in fp32 or, under a precision ``*_true`` or ``fp64``, in that precision's
    dtype. All ranks must write the same values. With ``from_rank``, all ranks get that rank's values instead. With
    ``grads``, ``param.grad`` is the full reduced gradient, and changes to it are kept in the same way. Raises
    RuntimeError on all ranks, and keeps nothing, if ranks that share shards have written different values."""
    engine, params = _resolve(target)
    with show_gathered(engine, params, from_rank=from_rank, grads=grads):
        yield


def grad_norm(target: Target, norm_type: float = 2.0) -> Tensor:
    """Return the joint norm [0-d] of ``target``'s reduced gradients. Call between backward and step. Collective."""
    engine, params = _resolve(target)
    return engine.passes.sharded_grads.total_norm(map(engine.units.place_of, params), norm_type)


def clip_grad_norm_(
    target: Target, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip gradients of ``target`` as torch's ``clip_grad_norm_`` does. Return the norm before clipping. Collective."""
    engine, params = _resolve(target)
    places = [engine.units.place_of(param) for param in params]
    return engine.passes.sharded_grads.clip_by_norm(places, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
