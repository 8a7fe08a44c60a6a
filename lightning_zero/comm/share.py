"""Find by messages what a rank shares with the other ranks of its machine: memory, disks and cores."""

from __future__ import annotations

import hashlib
import os
import re
from typing import NamedTuple

from lightning_zero.comm.communicator import Communicator
from lightning_zero.device.host_threads import allowed_cores
from lightning_zero.ranks.posts import machine
from lightning_zero.ranks.started_by import launched
from lightning_zero.settings import ConfigError
from lightning_zero.tiers.limits import available_cpus


class Share(NamedTuple):
    """This rank's index among the ranks of its machine, the number of these ranks, and the number of cores for this
    rank. Ranks that may run on the same cores divide these cores equally."""

    local_rank: int = 0
    local_ranks: int = 1
    cpus: int = 1


def share_of_machine(comm: Communicator) -> Share:
    """Return this rank's :class:`Share`. Collective."""
    cores = sorted(allowed_cores())
    local_rank, in_group = neighbours(comm, machine())
    # A launcher may have given each rank separate cores, or all ranks the same ones.
    _, on_these_cores = neighbours(comm, f"{machine()} {cores}")
    # The group may be only a part of the job.
    place = launched()
    local_ranks = max(in_group, (place.local_world_size if place is not None else None) or 1)
    if on_these_cores > 1:
        on_these_cores = on_these_cores * local_ranks // in_group
    cpus = available_cpus()
    return Share(local_rank, local_ranks, max(1, cpus // on_these_cores))


def neighbours(comm: Communicator, same: str) -> tuple[int, int]:
    """Return this rank's index among the ranks that pass the same text ``same``, and their number. Collective."""
    own = int.from_bytes(hashlib.sha256(same.encode()).digest()[:7])
    (told,) = comm.exchange(own)
    return told[: comm.rank].count(own), max(1, told.count(own))


def ranks_on_disk(comm: Communicator, path: str | None) -> int:
    """Return how many ranks of this machine, this one included, have ``path`` on the same disk. Collective."""
    try:
        device = os.stat(path).st_dev if path else -1
    except OSError:
        # Do not raise: the other ranks enter the exchange below and would wait for this one.
        device = -1
    return neighbours(comm, f"{machine()} {device}")[1]


def own_path(path: str, share: Share, rank: int) -> str:
    """Return ``path`` with ``$RANK``, ``$LOCAL_RANK``, environment variables and ``~`` replaced by this rank's values.
    Raises ConfigError if a variable has no value."""
    place = {"LOCAL_RANK": str(share.local_rank), "RANK": str(rank)}

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in place and name not in os.environ:
            raise ConfigError(
                f"zero.offload.nvme_path: expected variables that every rank has, got ${name} in {path!r}, which rank "
                f"{rank} does not have. Set {name}, or change zero.offload.nvme_path."
            )
        return place[name] if name in place else os.environ[name]

    return os.path.expanduser(re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, path))
