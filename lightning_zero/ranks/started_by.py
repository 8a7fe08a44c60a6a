"""Find from the environment alone which launcher started this process, and the process's ranks in the job.

Each launcher sets other variables::

    torchrun  TORCHELASTIC_RUN_ID  RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE
    srun      SLURM_PROCID         SLURM_NTASKS SLURM_LOCALID SLURM_NODEID SLURM_NNODES SLURM_TASKS_PER_NODE
    mpirun    OMPI_COMM_WORLD_*    (Open MPI), PMI_* with MPI_LOCAL* (Intel MPI, MPICH), MV2_COMM_WORLD_* (MVAPICH2)
    plain     LOCAL_RANK           and perhaps RANK WORLD_SIZE LOCAL_WORLD_SIZE: Lightning's own launcher, or a user's

The order is Lightning's: torchrun inside a SLURM job counts as torchrun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

# Variables of rank, world size, local rank, local world size.
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """The launcher of a process, and the process's ranks in the job. A number that the launcher has not set is None."""

    by: str  # ``torchrun``, ``srun``, ``mpirun`` or ``plain``
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None  # processes of the job on this node
    nodes: int | None = None


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Return this process's launcher and ranks; ``None`` if no launcher has started this process."""
    place = {key: _number(environ, key.upper()) for key in ("rank", "world_size", "local_rank", "local_world_size")}
    if "TORCHELASTIC_RUN_ID" in environ:
        return Launched(by="torchrun", nodes=_number(environ, "GROUP_WORLD_SIZE"), **place)
    # Lightning's rule for a shell inside an allocation, which srun has not started.
    in_shell = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if "SLURM_NTASKS" in environ and "SLURM_PROCID" in environ and not in_shell:
        return _srun(environ)
    for names in MPI_VARIABLES:
        if names[0] in environ and names[1] in environ:
            place = {key: _number(environ, name) for key, name in zip(place, names, strict=True)}
            size, local = place["world_size"], place["local_world_size"]
            nodes = None if size is None or not local else -(-size // local)
            return Launched(by="mpirun", nodes=nodes, **place)
    if "LOCAL_RANK" in environ or "LOCAL_WORLD_SIZE" in environ:
        return Launched(by="plain", **place)
    return None


def _srun(environ: Mapping[str, str]) -> Launched:
    world_size = _number(environ, "SLURM_NTASKS")
    tasks = tasks_of_nodes(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    if sum(tasks) != world_size:  # of another step, or of the whole allocation
        tasks = []
    nodes = len(tasks) or _number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_NNODES")
    node = _number(environ, "SLURM_NODEID") or 0
    local = tasks[node] if node < len(tasks) else _number(environ, "SLURM_NTASKS_PER_NODE")
    if local is None and world_size is not None and nodes is not None:
        local = world_size // nodes or None
    return Launched(
        by="srun",
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=local,
        nodes=nodes,
    )


def tasks_of_nodes(text: str) -> list[int]:
    """Return the number of tasks of each node, parsed from SLURM's text, such as ``2(x3),1``; [] if it is not valid."""
    tasks: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if re.fullmatch(r"\d+", value) else None
