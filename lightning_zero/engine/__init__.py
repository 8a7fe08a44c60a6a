"""The engine shards one module over the ranks of a process group. ``sharding.py`` makes it.

::

    engine       what callers may ask of an engine
    build        checks and hooks of a new one
    units        what is sharded, in which buffers, and where it rests
    passes       forward and backward: gathers, gradients, reductions
    vertical     units in chunks of the batch, all chunks before the next unit
    steps        optimizers and offloaded steps
    whole        state dicts, gather, restage
    torch_modes  sets torch's modes for engine work
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from lightning_zero.config import ConfigError
from lightning_zero.engine.engine import Engine, engine_of, engines
from lightning_zero.engine.whole.state_dicts import load_optimizer_state, optimizer_state
from lightning_zero.engine.whole.whole_params import show_gathered

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
        params = list(target.parameters())
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
    """Show full master values in parameters inside the ``with``, and keep what is written to them. Collective.

    Masters are fp32, or of the one dtype under ``*_true`` and ``fp64``. All ranks write the same values, or
    ``from_rank`` names the rank whose values count. With ``grads``, ``param.grad`` holds the full reduced gradient, and
    changes to it are kept too.
    """
    engine, params = _resolve(target)
    with show_gathered(engine, params, from_rank=from_rank, grads=grads):
        yield


def grad_norm(target: Target, norm_type: float = 2.0) -> Tensor:
    """Return the norm of the reduced gradients, 0-d, between backward and step. Collective."""
    engine, params = _resolve(target)
    return engine.passes.sharded_grads.total_norm(map(engine.units.place_of, params), norm_type)


def clip_grad_norm_(
    target: Target, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip sharded gradients as ``torch.nn.utils.clip_grad_norm_`` does. Return the norm before it. Collective."""
    engine, params = _resolve(target)
    places = [engine.units.place_of(param) for param in params]
    return engine.passes.sharded_grads.clip_by_norm(places, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
