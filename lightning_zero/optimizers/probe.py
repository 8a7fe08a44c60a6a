"""Tries an optimizer before training: may its tensors be stepped apart, and what does it keep?

A class of the user's says nothing of that. Its copies, with the user's settings, step the same tensors in one call and
in several, and everything must come out equal to the bit: small tensors for a dozen steps, and then, for a few, tensors
of the model's own shapes, because a class may treat tensors of some sizes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.config import ConfigError
from lightning_zero.optimizers import trial
from lightning_zero.optimizers.state_trees import StateShape, same
from lightning_zero.optimizers.trial import Trial, trying


class Probed(NamedTuple):
    """What was found.

    Attributes:
        couples: what a step does to a tensor depends on the others that it steps.
        steps_all: it changes a tensor that has no gradient, or its state, too; or that is not known.
        hides_empty: it cannot stand a param group without tensors.
        states: by param group, number of dimensions and dtype, the tensors of state of a parameter.
        failed: why it could not be tried.
        untried: shapes of parameters that were too large to be tried.
    """

    couples: bool = False
    steps_all: bool = True
    hides_empty: bool = False
    states: Mapping[tuple[int, int, torch.dtype], Sequence[StateShape]] = {}
    failed: Exception | None = None
    untried: Collection[tuple[int, ...]] = ()


def probe(
    optimizer: Optimizer,
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    device: torch.device,
    *,
    true_shapes: bool = True,
) -> Probed:
    """Step copies. Neither the optimizer nor random numbers of others are changed; sends no message.

    Args:
        dtype_of: that of a parameter's master.
        true_shapes: try tensors of the parameters' own shapes, too.

    Raises:
        ConfigError: its step sends messages, or calls a closure, itself.
    """
    if device.type == "meta":  # nothing could be compared there
        device = torch.device("cpu")
    with trying(type(optimizer).__qualname__, device):
        found = _probe_small(optimizer, dtype_of, device)
        if found.failed is not None or found.couples or not true_shapes:
            return found
        together, apart = (Trial(optimizer, dtype_of, device, most_true=trial.MOST_TRUE) for _ in range(2))
        try:
            together.run()
            apart.run(in_parts=True, hides_empty=found.hides_empty)
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
    for hides_empty in (False, True):
        apart = Trial(optimizer, dtype_of, device)
        try:
            apart.run(in_parts=True, hides_empty=hides_empty)
        except ConfigError:
            raise
        except Exception:  # then all tensors are needed in each call
            continue
        couples, states = not same(together.result(), apart.result()), together.states()
        # Of a group that is hidden at each call nothing would be counted.
        return Probed(couples, together.steps_all() or hides_empty, hides_empty, states)
    return Probed(couples=True, states=together.states())
