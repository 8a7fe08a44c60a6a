"""Try an optimizer before training: does it step each tensor by itself, and what state does it keep?

One copy of the optimizer steps all tensors, others step parts of equal tensors, as ranks do, and the results must agree
to the bit. They step small tensors a dozen times, then tensors of the model's shapes a few times, because a class
may treat some sizes differently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.optimizers import trial
from lightning_zero.optimizers.state_trees import StateShape, same
from lightning_zero.optimizers.trial import Trial, trying
from lightning_zero.settings import ConfigError


class Probed(NamedTuple):
    """What the trial of an optimizer has shown."""

    couples: bool = False  # the step of a tensor depends on the other tensors in the same call
    steps_all: bool = True  # a step may change tensors without a gradient, or their state
    # The states of a parameter, by its param group, number of dimensions and master dtype.
    states: Mapping[tuple[int, int, torch.dtype], Sequence[StateShape]] = {}
    failed: Exception | None = None  # the error that a trial step raised
    apart: bool = False  # only a step of some of the tensors has failed
    untried: Collection[tuple[int, ...]] = ()  # shapes of parameters that were too large to try


def probe(
    optimizer: Optimizer,
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    device: torch.device,
    *,
    true_shapes: bool = True,
) -> Probed:
    """Try ``optimizer`` by stepping copies of it. Sends no message. The optimizer and random states do not change.

    ``dtype_of`` returns the dtype of a parameter's master. ``true_shapes``: also step tensors of the model's shapes.
    Raises ConfigError if the optimizer's step sends messages or calls its closure itself.
    """
    if device.type == "meta":  # without values nothing can be compared
        device = torch.device("cpu")
    with trying(type(optimizer).__qualname__, device):
        found = _probe_small(optimizer, dtype_of, device)
        if found.failed is not None or found.couples or not true_shapes:
            return found
        together, apart = (Trial(optimizer, dtype_of, device, most_true=trial.MOST_TRUE) for _ in range(2))
        try:
            together.run()
            together.refuse_wrapped_state()
            apart.run_apart()
        except ConfigError:
            raise
        except Exception as error:
            return found._replace(failed=error)
        return found._replace(couples=not same(together.result(), apart.result()), untried=together.untried)


def _probe_small(optimizer: Optimizer, dtype_of: Callable[[nn.Parameter], torch.dtype], device: torch.device) -> Probed:
    try:
        Trial(optimizer, dtype_of, device).refuse_own_closure()
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
    return Probed(not same(together.result(), apart.result()), together.steps_all(), states)
