"""A file that tells the script of a job what the end of a run means."""

from __future__ import annotations

import os
from pathlib import Path

# Where the script of a job wants to read what follows: it requeues by itself, because a container has no scontrol.
VERDICT_VARIABLE = "LIGHTNING_ZERO_VERDICT"
REQUEUE, REFUSED = "requeue", "refused"


def give_verdict(word: str) -> bool:
    """Tell the script of the job, if there is one that wants to know, what this end of the run means."""
    path = os.environ.get(VERDICT_VARIABLE)
    if path:
        Path(path).write_text(f"{word}\n")
    return bool(path)
