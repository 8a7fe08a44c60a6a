"""Change the behavior of Lightning's objects where Lightning has no hook, by giving a run's objects subclasses with
methods of this package.

The list below (class of Lightning, file of this package, methods) is complete for Lightning 2.6.6. Lightning's own
classes do not change. (``registration.py`` replaces the function that reads the file for ``load_from_checkpoint``.)

::

    Trainer                    saves/range_saves     save_checkpoint
    _FitLoop                   loops                 setup_data
    _PrefetchDataFetcher       uneven                reset, __iter__, __next__
    _TrainingEpochLoop         loops                 advance, _broadcast_sigterm_tensor, on_run_start, _on_before_fetch
    ModelCheckpoint            saves/kept_files      _save_checkpoint, _link_checkpoint, _remove_checkpoint,
                                                     _should_remove_checkpoint
    WeightAveraging            callbacks/averaging   setup, _swap_models, _copy_average_to_current, on_load_checkpoint
    StochasticWeightAveraging  callbacks/averaging   setup, update_parameters, transfer_weights
    ModelPruning               callbacks/parameters  setup, _run_pruning, make_pruning_permanent, on_save_checkpoint
    BaseFinetuning             callbacks/parameters  filter_on_optimizer, unfreeze_and_add_param_group

The subclass comes between the user's class and Lightning's: a method of the user's class, or a mock, is called first,
and its ``super()`` calls the method of this package. Under other strategies these methods call Lightning's.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Iterable
from typing import Any


def adapt(objects: Iterable[Any], ours: tuple[type, ...]) -> None:
    """Change the class of each object to a subclass of its class and of the classes in ``ours`` that match. A class
    matches if the object is an instance of the class's base."""
    for thing in objects:
        wanted = tuple(c for c in ours if isinstance(thing, c.__bases__) and not isinstance(thing, c))
        if wanted:
            theirs: Any = type(thing)
            thing.__class__ = _adapted(theirs, wanted)


@functools.cache
def _adapted(theirs: Any, ours: tuple[Any, ...]) -> Any:
    # Python refuses a class and its subclass, in this order, as bases.
    bases = ours if any(issubclass(c, theirs) for c in ours) else (theirs, *ours)
    names = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__, "__doc__": theirs.__doc__}
    adapted = type(theirs)(theirs.__name__, bases, names)  # Lightning stores a callback's state by its class's name

    def reduce(thing: Any) -> Any:
        reduced = super(adapted, thing).__reduce_ex__(2)
        if isinstance(reduced, str) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # the user's own
        _, (_, *args), *rest = reduced  # pickle would refuse __newobj__ with another class than the object's
        return theirs.__new__, (theirs, *args), *rest

    copyreg.pickle(adapted, reduce)  # type: ignore[arg-type]  # copies have the class that can be imported
    return adapted


def is_ours(trainer: Any) -> bool:
    """Return whether the Trainer's strategy is a ZeroStrategy."""
    return hasattr(trainer.strategy, "_checkpoints")
