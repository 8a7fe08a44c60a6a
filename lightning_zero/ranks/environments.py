"""Processes that ``mpirun`` has started, without mpi4py: their places are in the environment.

Lightning knows MPI through mpi4py alone. Without it every process would take itself for the first one, and start more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightning_zero.config import ConfigError
from lightning_zero.lightning_api import (
    ClusterEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    rank_zero_only,
)
from lightning_zero.ranks.started_by import Launched, launched

DEFAULT_PORT = 29500


class MPIRunEnvironment(ClusterEnvironment):
    """The variables of Open MPI, MPICH, Intel MPI and MVAPICH2.

    On several nodes MASTER_ADDR says where rank 0 is (``mpirun -x MASTER_ADDR=... -x MASTER_PORT=...``, or ``-genv``).

    Raises:
        ConfigError: it does not, or the places cannot be told.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__()
        found = launched(environ)
        if found is None or found.by != "mpirun":
            raise ConfigError("mpirun: expected variables such as OMPI_COMM_WORLD_RANK in the environment, got none.")
        self._place = _complete(found)
        rank_zero_only.rank = self._place.rank  # type: ignore[attr-defined]

    @staticmethod
    def detect() -> bool:
        found = launched()
        if found is None or found.by != "mpirun" or (found.world_size or 1) == 1:
            return False
        return not LSFEnvironment.detect() and not MPIEnvironment.detect()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        if "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        if self._place.world_size != self._place.local_world_size:
            raise ConfigError(
                "MASTER_ADDR: expected the address of the node of rank 0 (mpirun has started processes on several "
                "nodes), got none. Give mpirun -x MASTER_ADDR=<name> -x MASTER_PORT=<port> (MPICH, Intel MPI: -genv)."
            )
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", DEFAULT_PORT))

    def world_size(self) -> int:
        assert self._place.world_size is not None
        return self._place.world_size

    def set_world_size(self, size: int) -> None:
        """mpirun has said it."""

    def global_rank(self) -> int:
        assert self._place.rank is not None
        return self._place.rank

    def set_global_rank(self, rank: int) -> None:
        """mpirun has said it."""

    def local_rank(self) -> int:
        assert self._place.local_rank is not None
        return self._place.local_rank

    def node_rank(self) -> int:
        assert self._place.rank is not None and self._place.local_world_size is not None
        return self._place.rank // self._place.local_world_size


def _complete(found: Launched) -> Launched:
    if None in (found.rank, found.world_size, found.local_rank, found.local_world_size):
        raise ConfigError(
            "mpirun: expected the local rank of each process in OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID or "
            "MV2_COMM_WORLD_LOCAL_RANK, got none. Start the processes by torchrun, or install mpi4py."
        )
    return found


def own_environment() -> ClusterEnvironment | None:
    """An environment that Lightning would not recognise; ``None`` leaves the choice to it."""

    if TorchElasticEnvironment.detect() or SLURMEnvironment.detect() or not MPIRunEnvironment.detect():
        return None
    return MPIRunEnvironment()
