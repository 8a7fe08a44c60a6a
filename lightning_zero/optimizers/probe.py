"""Try an optimizer before training: does it step each tensor by itself, and what state does it keep? If the user has
declared the class element-wise (``zero.optimizer.sharding=slices``), does it step each element by itself?

:func:`probe`: one copy of the optimizer steps all tensors together. Other copies each step a part of these tensors, as
ranks do. The results must be equal to the bit. The copies step small tensors a dozen times, then tensors of the
model's shapes a few times, because a class may treat some sizes differently.

:func:`check_declared`: one copy steps whole tensors; other copies step slices of these tensors, as two ranks would. The
tensors are small first, then have some of the model's shapes. The results must be equal within a tolerance, because
vectorised kernels round the last elements of a tensor differently."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.optimizers.inner import JoinedState
from lightning_zero.optimizers.state_trees import StateShape, same
from lightning_zero.optimizers.trial import MOST_TRUE, Cut, DtypeOf, Trial, refuse_wrapped_state, step_of, trying
from lightning_zero.settings import ConfigError

CLOSE = 1e-3  # relative to the largest change in a step
SLICES, RANKS = 3, 2  # not divisible: each rank's list is shorter than that of whole tensors


class Probed(NamedTuple):
    """The result of :func:`probe`: how the tried optimizer behaves, and what state it keeps."""

    calls_closure: bool = False  # the step calls its closure in its middle; such a class is not tried
    couples: bool = False  # the step of a tensor depends on the other tensors in the same call
    steps_all: bool = True  # a step may change tensors without a gradient, or their state
    # The states of a parameter, by its param group, number of dimensions and master dtype.
    states: Mapping[tuple[int, int, torch.dtype], Sequence[StateShape]] = {}
    failed: Exception | None = None  # the error that a trial step raised
    apart: bool = False  # only a step of some of the tensors has failed
    untried: Collection[tuple[int, ...]] = ()  # shapes of parameters that were too large to try


def probe(optimizer: Optimizer, dtype_of: DtypeOf, device: torch.device, *, true_shapes: bool = True) -> Probed:
    """Step copies of ``optimizer`` and return what the steps have shown. Not collective. The optimizer and random
    states do not change. ``dtype_of``: returns the dtype of a parameter's master. ``true_shapes``: whether to step
    tensors of the model's shapes too. Raises ConfigError if a step runs collectives."""
    if device.type == "meta":  # without values nothing can be compared
        device = torch.device("cpu")
    with trying(type(optimizer).__qualname__, device):
        found = _probe_small(optimizer, dtype_of, device)
        if found.failed is not None or found.couples or not true_shapes:
            return found
        together, apart = (Trial(optimizer, dtype_of, device, most_true=MOST_TRUE) for _ in range(2))
        try:
            together.run()
            refuse_wrapped_state(together.optimizer, together.tensors)
            apart.run_apart()
        except ConfigError:
            raise
        except Exception as error:
            return found._replace(failed=error)
        return found._replace(couples=not same(together.result(), apart.result()), untried=together.untried)


def _probe_small(optimizer: Optimizer, dtype_of: DtypeOf, device: torch.device) -> Probed:
    try:
        if Trial(optimizer, dtype_of, device).calls_its_closure():
            return Probed(calls_closure=True, couples=True)
        together = Trial(optimizer, dtype_of, device)
        together.run()
    except ConfigError:
        raise
    except Exception as error:
        return Probed(failed=error)
    states = together.states()
    apart = Trial(optimizer, dtype_of, device)
    try:
        apart.run_apart()
    except ConfigError:
        raise
    except Exception as error:  # the class may need tensors in all param groups
        return Probed(states=states, failed=error, apart=True)
    couples = not same(together.result(), apart.result())
    return Probed(couples=couples, steps_all=together.steps_all(), states=states)


# -- elements ----------------------------------------------------------------------------------------------------------


def check_declared(optimizer: Optimizer, dtype_of: DtypeOf, cut: Cut, device: torch.device) -> None:
    """Raise ConfigError if ``optimizer`` does not step each element by itself, or if its step calls its closure.
    Accepts an optimizer that cannot be tried, because its step fails or draws random numbers, or its constructor has
    made state. ``cut``: returns the lengths of the slices of a parameter."""
    if len(JoinedState(optimizer).dicts()) > 1:
        raise ConfigError(
            f"zero.optimizer.sharding: expected no optimizer inside of another, got {type(optimizer).__qualname__}. "
            "Drop zero.optimizer.sharding=slices; whole tensors are stepped then."
        )
    if optimizer.state or device.type == "meta":
        return

    def wide(param: nn.Parameter) -> torch.dtype:
        dtype = dtype_of(param)
        return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype

    make = partial(Trial, optimizer, wide, device)
    with trying(type(optimizer).__qualname__, device):
        if make().calls_its_closure():
            raise ConfigError(
                "zero.optimizer.sharding: expected a step that needs gradients only, got "
                f"{type(optimizer).__qualname__}, whose step() calls its closure itself. Drop "
                "zero.optimizer.sharding=slices; whole tensors are stepped then."
            )
        try:
            if not _close(_stepped(make(), 0), _stepped(make(), 1)):
                return
        except Exception:
            return
        differs = _differs(make, lambda _: SLICES * [0]) or _differs(partial(make, most_true=MOST_TRUE // 2), cut)
    if differs:
        raise ConfigError(
            "zero.optimizer.sharding: expected a class that computes each element from its own value, gradient and "
            f"state alone, got {type(optimizer).__qualname__}: slices of tensors came out otherwise than the tensors. "
            "Drop zero.optimizer.sharding=slices; whole tensors are stepped then."
        )


def _differs(make: Callable[..., Trial], cut: Cut) -> bool:
    try:
        whole = _stepped(make(), 0)
    except Exception:
        return False
    try:
        parts = [_stepped(make(cut=cut), 0, rank) for rank in range(RANKS)]
    except Exception:
        return True
    together = [sum(changes) for changes in zip(*(changes for changes, _ in parts), strict=True)]
    return not all(_close(whole, (together, noted)) for _, noted in parts)  # type: ignore[arg-type]


def _stepped(trial: Trial, seed: int, rank: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Step the trial's tensors or, if ``rank`` is given, only the slices of that rank. Return (changes, settings): each
    tensor's change in each step, and the numeric values in the param groups afterwards."""
    groups = trial.optimizer.param_groups
    if rank is not None:
        for group in groups:
            group["params"] = group["params"][rank::RANKS]
    changes: list[Tensor] = []
    for number, scale in enumerate(trial.scales):
        before = trial.values()
        trial.give_gradients(scale)
        torch.default_generator.manual_seed(100 * seed + number)
        step_of(trial.optimizer)(trial.optimizer)
        changes += [now - then for now, then in zip(trial.values(), before, strict=True)]
    noted = [value for group in groups for value in group.values() if isinstance(value, (int, float, Tensor))]
    return changes, [torch.as_tensor(value).detach().double() for value in noted]


def _close(one: tuple[list[Tensor], list[Tensor]], other: tuple[list[Tensor], list[Tensor]]) -> bool:
    pairs = [*zip(one[0], other[0], strict=True), *zip(one[1], other[1], strict=False)]
    return all(torch.allclose(a, b, rtol=CLOSE, atol=CLOSE * float(a.abs().max()), equal_nan=True) for a, b in pairs)
