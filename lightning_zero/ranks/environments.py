"""Support for processes that ``mpirun`` has started without mpi4py, from the environment. Lightning knows MPI through
mpi4py alone. Without it every process would think it is the first and start more."""

from __future__ import annotations

import os

from lightning_zero.config import ConfigError
from lightning_zero.lightning_api import (
    ClusterEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    rank_zero_only,
)
from lightning_zero.ranks.started_by import launched

DEFAULT_PORT = 29500


def own_environment() -> ClusterEnvironment | None:
    """Set torchrun's variables from mpirun's where Lightning would not recognise mpirun; else return ``None``. Raises
    ConfigError if this process's rank or the address of rank 0 is unknown."""
    place = launched()
    others = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
    if place is None or place.by != "mpirun" or place.world_size in (None, 1) or any(e.detect() for e in others):
        return None
    if place.rank is None or place.local_rank is None or place.local_world_size is None:
        raise ConfigError(
            "mpirun: expected the local rank of each process in OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID or "
            "MV2_COMM_WORLD_LOCAL_RANK, got none. Start the processes by torchrun, or install mpi4py."
        )
    if "MASTER_ADDR" not in os.environ and place.world_size != place.local_world_size:
        raise ConfigError(
            "MASTER_ADDR: expected the address of the node of rank 0 (mpirun has started processes on several nodes), "
            "got none. Give mpirun -x MASTER_ADDR=<name> -x MASTER_PORT=<port> (MPICH, Intel MPI: -genv)."
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    names = {"RANK": place.rank, "LOCAL_RANK": place.local_rank, "WORLD_SIZE": place.world_size}
    names["GROUP_RANK"] = place.rank // place.local_world_size
    os.environ.update({name: str(value) for name, value in names.items()})
    rank_zero_only.rank = place.rank  # type: ignore[attr-defined]
    return TorchElasticEnvironment()
