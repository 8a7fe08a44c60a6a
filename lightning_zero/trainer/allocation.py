"""Compares what a launcher has started with what the run expects, from the environment of this process alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightning_zero.lightning_api import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    rank_zero_only,
)
from lightning_zero.ranks.started_by import launched
from lightning_zero.settings import ConfigError

DEFAULT_PORT = 29500


def check_allocation(
    environment: ClusterEnvironment, *, nodes: int, devices: int, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise ConfigError if the launcher has not started ``devices`` processes on each of ``nodes`` nodes."""
    if isinstance(environment, LightningEnvironment) and _in_pod(environ):
        told = environ["WORLD_SIZE"]
        if told not in (str(nodes), str(nodes * devices)):
            raise ConfigError(
                f"trainer.num_nodes: expected the number of pods of the PyTorchJob, whose WORLD_SIZE is {told} (that "
                f"number, or it times trainer.devices), got trainer.num_nodes={nodes} trainer.devices={devices}. "
                "Change these, or the job's replicas."
            )
    if isinstance(environment, LightningEnvironment) and nodes > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        missing += ["NODE_RANK"] if not {"NODE_RANK", "GROUP_RANK"} & environ.keys() else []
        if missing:
            raise ConfigError(
                f"trainer.num_nodes: expected {', '.join(missing)} in the environment of each of {nodes} nodes, got "
                "none. Set MASTER_ADDR to the address of node 0, MASTER_PORT to a free port there and NODE_RANK to 0 "
                f".. {nodes - 1}, start by {flags('torchrun', nodes, devices)} or by srun, or set trainer.num_nodes=1."
            )
        node = environ.get("NODE_RANK", environ.get("GROUP_RANK", ""))
        if not node.isdigit() or int(node) >= nodes:
            raise ConfigError(
                f"NODE_RANK: expected 0 .. {nodes - 1} (trainer.num_nodes={nodes}), got {node!r}. "
                "Change NODE_RANK or trainer.num_nodes."
            )
    if isinstance(environment, LightningEnvironment) or not environment.creates_processes_externally:
        return
    found = launched(environ)
    world = environment.world_size()
    known = found is not None and found.world_size == world and found.nodes and found.local_world_size
    if known:
        assert found is not None and found.local_world_size is not None and found.nodes is not None
        if found.world_size != found.local_world_size * found.nodes:
            raise ConfigError(
                f"{found.by}: expected equally many processes on every node, got {found.local_world_size} on this one "
                f"and {world} on {found.nodes} nodes. Start them by {flags(found.by, nodes, devices)}."
            )
        if (found.nodes, found.local_world_size) == (nodes, devices):
            return
    elif world == nodes * devices:
        return
    by = found.by if found is not None else type(environment).__name__
    split = f" ({found.local_world_size} on each of {found.nodes} nodes)" if known and found else ""
    fix = f"trainer.num_nodes={found.nodes} trainer.devices={found.local_world_size}" if known and found else "these"
    raise ConfigError(
        f"trainer.num_nodes x trainer.devices: expected the {world} processes that {by} has started{split}, got "
        f"{nodes} x {devices} = {nodes * devices}. Set {fix}, or start {nodes * devices} processes: "
        f"{flags(by, nodes, devices)}."
    )


def flags(by: str, nodes: int, devices: int) -> str:
    """Return the command or words by which the launcher ``by`` starts ``devices`` processes on ``nodes`` nodes."""
    return {
        "torchrun": f"torchrun --nnodes={nodes} --nproc-per-node={devices}",
        "srun": f"srun --nodes={nodes} --ntasks-per-node={devices}",
        "mpirun": f"mpirun -n {nodes * devices}, {devices} on each node",
    }.get(by, f"{devices} on each of {nodes} nodes")


def check_srun(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError, with the missing flag, if Lightning would fail under this process's srun call."""
    tasks = environ.get("SLURM_NTASKS", "1")
    found = launched(environ)
    if found is not None and found.by == "srun" and tasks != "1" and "SLURM_NTASKS_PER_NODE" not in environ:
        nodes = found.nodes or 1
        per_node = found.local_world_size or tasks
        raise ConfigError(
            f"srun: expected --ntasks-per-node, got {tasks} tasks on {nodes} node(s) without it. Start them by "
            f"srun --nodes={nodes} --ntasks-per-node={per_node}, and the same in the sbatch script."
        )


def _in_pod(environ: Mapping[str, str]) -> bool:
    """Return whether ``RANK`` numbers nodes, as in the pods of a PyTorchJob, which start their processes themselves."""
    return launched(environ) is None and environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def own_environment() -> ClusterEnvironment | None:
    """If Lightning does not detect mpirun, set torchrun's variables and return torchrun's environment. Else ``None``.
    Lightning knows MPI through mpi4py alone, and Kubeflow's PyTorchJob through a plugin alone, for which ``NODE_RANK``
    is set here. Else every process would take itself for the first and start more. Raises ConfigError if this process's
    rank or the address of rank 0 is unknown."""
    place = launched()
    if _in_pod(os.environ):
        os.environ.setdefault("NODE_RANK", os.environ["RANK"])
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
