"""Says of torch's errors in a backward what they have to do with weights that come and go."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_zero.engine.passes.progress import Progress
from lightning_zero.engine.units.unit import Unit

_DROPPED = "for storage of size 0"  # what torch says of a saved view whose memory is gone
_CHANGED = "modified by an inplace operation"
_READ_OUTSIDE = (
    "If nothing was changed in place: a sharded weight was read outside of its module's call, and an earlier backward "
    "has dropped it since. Add the losses up and run one backward, or read the weight again after it."
)


def explain_weights(error: BaseException, units: Sequence[Unit], progress: Progress) -> None:
    """Add to an error that a backward has raised what may have led to it.

    Raises:
        RuntimeError: in the place of one that nobody would understand.
    """
    if not isinstance(error, RuntimeError):
        return
    if _DROPPED in str(error):
        waiting = [unit.title for unit in progress.unfinished() if unit.reshards]
        raise RuntimeError(
            f"backward needed parameters of a unit that had been dropped (one of {', '.join(waiting)}): a tensor left "
            "the unit by another way than its outputs, or the graph was walked a second time (retain_graph). Return "
            "the tensor from the unit's forward, or choose other units with zero.unit.classes."
        ) from error
    if _CHANGED in str(error) and any(unit.reshards for unit in units):
        error.add_note(_READ_OUTSIDE)
