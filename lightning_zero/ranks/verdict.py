"""A file that tells a job's script what the end of a run means."""

from __future__ import annotations

import os
from pathlib import Path

# Names the file. The script requeues the job, because a container has no scontrol.
VERDICT_VARIABLE = "LIGHTNING_ZERO_VERDICT"
REQUEUE, REFUSED = "requeue", "refused"


def give_verdict(word: str) -> bool:
    """Write ``word`` to the file that the job's script reads, and return whether there is one."""
    path = os.environ.get(VERDICT_VARIABLE)
    if path:
        Path(path).write_text(f"{word}\n")
    return bool(path)
