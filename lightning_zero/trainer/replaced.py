"""Replace methods of Lightning where it has no hook. This list is complete, and was checked against Lightning 2.6.6.

::

    on the class, for the life of the process; under other strategies they behave as before
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

Subclasses, wrappers and mocks of users still work: the methods that they call are the replaced ones.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Ours = TypeVar("Ours", bound=Callable[..., Any])
_NOTHING = object()


def in_place_of(owner: Any, name: str) -> Callable[[Ours], Ours]:
    """Replace ``owner.name``, of a class or module, by the decorated function. Its first argument is the original."""

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
    """Methods of objects that are replaced for one run."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by ``ours``, whose first argument is the original."""
        before = vars(owner).get(name, _NOTHING)
        method = functools.partial(ours, getattr(owner, name))
        setattr(owner, name, method)
        self._before.append((owner, name, before, method))

    def undo(self) -> None:
        """Restore the originals, except where somebody has replaced them since."""
        while self._before:
            owner, name, before, method = self._before.pop()
            if vars(owner).get(name) is not method:
                continue
            if before is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
