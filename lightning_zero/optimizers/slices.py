"""Try before training an optimizer that users declare element-wise (``zero.optimizer.sharding=slices``).

Tensors are stepped whole, and in slices as on two ranks: small tensors, then some of the model's shapes. Results must
agree within a tolerance, because vectorised kernels round the last elements of a tensor differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.optimizers.trial import MOST_TRUE, Trial, step_of, trying
from lightning_zero.settings import ConfigError

CLOSE = 1e-3  # relative to the largest change in a step
SLICES, RANKS = 3, 2  # not divisible: each rank's list is shorter than that of whole tensors


Cut = Callable[[nn.Parameter], Sequence[int]]  # lengths of the slices of a parameter over all ranks
DtypeOf = Callable[[nn.Parameter], torch.dtype]


def check_declared(optimizer: Optimizer, dtype_of: DtypeOf, cut: Cut, device: torch.device) -> None:
    """Raise ConfigError if ``optimizer`` does not step each element by itself, or if its step calls its closure.

    An optimizer is accepted untried if its step fails or draws random numbers, or if its constructor made state.
    """
    if optimizer.state or device.type == "meta":
        return

    def wide(param: nn.Parameter) -> torch.dtype:
        dtype = dtype_of(param)
        return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype

    make = partial(Trial, optimizer, wide, device)
    with trying(type(optimizer).__qualname__, device):
        make().refuse_own_closure()
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
    """Step the trial's tensors; if ``rank`` is given, only the slices of this rank. Return each tensor's change in each
    step, and the numbers in the param groups."""
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
