"""Adds to torch's errors about dtypes which setting of ours they come from."""

from __future__ import annotations

import re

from torch import nn

from lightning_zero.config import Precision
from lightning_zero.engine.units.describe import AUTOCAST_DTYPES

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
