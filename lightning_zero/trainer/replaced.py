"""Replaces methods of Lightning where it has no hook: all that are replaced, read against Lightning 2.6.6.

::

    on the class, for as long as the process lives; under another strategy they do what they did
    Trainer.save_checkpoint                                          saves/range_saves
    ModelCheckpoint._link_checkpoint, _remove_checkpoint,
        _save_checkpoint, _should_remove_checkpoint                  saves/kept_files
    WeightAveraging.setup, _swap_models, _copy_average_to_current,
        on_load_checkpoint                                           callbacks/averaging
    StochasticWeightAveraging.setup, update_parameters,
        transfer_weights                                             callbacks/stochastic_averaging
    BaseFinetuning.filter_on_optimizer                               callbacks/finetuning
    ModelPruning.setup, _run_pruning, make_pruning_permanent,
        on_save_checkpoint                                           callbacks/pruning
    trainer.trainer._verify_strategy_supports_compile                compiled

    on the Trainer's own loops and connector, for a run
    _SignalConnector._sigterm_notifier_fn                            interruptions
    _TrainingEpochLoop.advance, _broadcast_sigterm_tensor            interruptions
    _TrainingEpochLoop.on_run_start, _on_before_fetch                saves/random_numbers
    _FitLoop.setup_data, _load_combined_loader_states                saves/random_numbers

A subclass, a wrapper or a mock of the user's is called as ever, and what it calls is what is replaced here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Ours = TypeVar("Ours", bound=Callable[..., Any])
_NOTHING = object()


def in_place_of(owner: Any, name: str) -> Callable[[Ours], Ours]:
    """Have the decorated function called in the place of a method of a class, or of a function of a module.

    Its first argument is what it replaces.
    """

    def decorate(ours: Ours) -> Ours:
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        theirs = getattr(owner, name)

        @functools.wraps(theirs)
        def method(*args: Any, **kwargs: Any) -> Any:
            return ours(theirs, *args, **kwargs)

        setattr(owner, name, staticmethod(method) if is_static else method)
        return ours

    return decorate


class Replacements:
    """Methods of objects that are replaced for a run."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Have ``ours`` called in the place of ``owner.name``, with that as its first argument."""
        before = vars(owner).get(name, _NOTHING)
        method = functools.partial(ours, getattr(owner, name))
        setattr(owner, name, method)
        self._before.append((owner, name, before, method))

    def undo(self) -> None:
        """Put back what was there, unless somebody has replaced it since."""
        while self._before:
            owner, name, before, method = self._before.pop()
            if vars(owner).get(name) is not method:
                continue
            if before is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
