"""Adds to torch's errors which setting of ours they come from: dtypes, and weights that come and go."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from lightning_zero.config import Precision
from lightning_zero.engine.passes.open_pass import Progress
from lightning_zero.engine.units.describe import AUTOCAST_DTYPES
from lightning_zero.engine.units.unit import Unit

_DTYPES_DIFFER = re.compile(
    r"same dtype|same data ?type|expected .*(scalar type|dtype)|mixed dtype|dtype mismatch"
    r"|not implemented for '(BFloat16|Half)'",
    re.IGNORECASE,
)


def explain_dtypes(error: BaseException, precision: Precision) -> None:
    """Add to an error about dtypes, which a forward has raised, how a module keeps fp32."""
    told = any("zero/precision" in note for note in getattr(error, "__notes__", ()))
    if precision not in AUTOCAST_DTYPES or told or not _DTYPES_DIFFER.search(str(error)):
        return
    module = _innermost_module(error)
    if module is not None:
        name = type(module).__name__
        error.add_note(
            f"Under zero/precision={precision.name} parameters are used in {precision.name}, autocast alone leaves "
            f"them in fp32. If {name} needs fp32, add its class to those that keep it: "
            f"zero.precision.fp32_modules=[..., {name}]."
        )


def _innermost_module(error: BaseException) -> nn.Module | None:
    """The module whose code has raised."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        found = owner if isinstance(owner, nn.Module) else found
        traceback = traceback.tb_next
    return found


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
