"""Start, connect and end the processes of a run, for the strategies of the Trainer and of Fabric. Check that a launcher
has started the processes that the run expects."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_zero.comm.agreements import barrier, broadcast_object, gather_objects, open_waits, together
from lightning_zero.comm.groups import even_alone
from lightning_zero.device import accelerator_of
from lightning_zero.device.cuda import bind_near, default_device
from lightning_zero.engine.engine import Engine, engines
from lightning_zero.lightning_api import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    init_process_group,
    pl,
    rank_zero_info,
    reduce_tensor,
)
from lightning_zero.planning.topology import Ranks, check_groups, flat
from lightning_zero.ranks import rendezvous
from lightning_zero.ranks.started_by import launched
from lightning_zero.ranks.waits import Waits
from lightning_zero.settings import ConfigError, ZeroConfig, names_arguments
from lightning_zero.tiers.limits import available_cpus
from lightning_zero.trainer import launchers
from lightning_zero.trainer.settings import RunPlan

T = TypeVar("T")
EXIT_BARRIER_S = 20.0
OWN_RENDEZVOUS = frozenset({"mpi", "fake"})  # backends whose ranks need no store to find each other
_START_METHODS = ("popen", "fork")


class Processes:
    """Base class of the Trainer's and Fabric's strategies: starts, connects and ends processes. ``run_plan``: facts
    about the run, given by the program that starts it."""

    config: ZeroConfig
    _given_config: ZeroConfig | None  # the argument ``config``
    cluster_environment: ClusterEnvironment | None
    _launchers: ClassVar[tuple[Any, Any]]  # for "popen" and for "fork"
    if TYPE_CHECKING:  # Lightning's
        parallel_devices: Any
        _launcher: Any
        global_rank: Any
        local_rank: Any
        node_rank: Any
        world_size: Any

        # Defined by the strategies.
        def _settings_of_front(self) -> dict[str, Any]:
            """Return the settings of the Trainer or Fabric that change which collectives ranks issue."""

        @property
        def _engine_that_waits(self) -> Engine | None:
            """Return an engine of this run, which watches Lightning's collectives for stalls; None before sharding."""

    def __init__(
        self,
        *args: Any,
        cluster_environment: ClusterEnvironment | None,
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: str,
        **more: Any,
    ) -> None:
        """Args:
        cluster_environment: default: that of ``mpirun`` if it started this process, else Lightning's choice.
        process_group_backend: backend of ``torch.distributed``; default: nccl on GPUs, gloo on CPUs.
        timeout: timeout of collectives of the process group; default: torch's, but on gloo ``zero.stall_timeout_s``.
        start_method: ``"popen"`` or ``"fork"``. Another value raises ConfigError.
        """
        if start_method not in _START_METHODS:
            raise ConfigError(
                f"start_method: expected one of {', '.join(_START_METHODS)}, got {start_method!r}. Set 'fork' in a "
                "notebook (strategy='zero3_notebook'), and 'popen' in a script."
            )
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._start_waits: Waits | None = None  # used until there is an engine
        self.run_plan = RunPlan()
        more["cluster_environment"] = cluster_environment or own_environment()
        if (ray := sys.modules.get("ray.train.lightning")) is not None:
            ray.RayDDPStrategy.register(type(self))  # prepare_trainer takes instances of Ray's classes only
        super().__init__(*args, **more)

    # -- how many, and which -----------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        ray = sys.modules.get("ray.train.torch") if self._is_led else None
        device: torch.device = self.parallel_devices[self.local_rank] if ray is None else ray.get_device()
        return device

    @property
    def _is_led(self) -> bool:
        """Return whether the environment, not the Trainer's arguments, determines the number of ranks. This is so under
        Ray Train, which makes the process group, and whose workers all have ``devices="auto"``."""
        environment, own = self.cluster_environment, self.num_nodes * self.num_processes
        if environment is None or environment.world_size() == own or not dist.is_initialized():
            return False
        return environment.world_size() == dist.get_world_size()

    @property
    def _n_ranks(self) -> int:
        return dist.get_world_size() if self._is_led else self.num_nodes * self.num_processes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def _ranks(self) -> Ranks:
        """Return this rank's position in the groups of ranks (data, sequence, tensor, ...) of :attr:`config`."""
        return Ranks.locate(self.global_rank, flat(self._n_ranks), self.config)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return DistributedSampler's arguments. Ranks that share a sequence or a batch get the same samples."""
        batch = self._ranks.batch
        return {"num_replicas": batch.size, "rank": batch.index}

    @property
    def _node(self) -> str | None:
        """Return this rank's host and node rank (one host may count as several nodes); None if there is one node."""
        return f"{socket.gethostname()}/{self.node_rank}" if self._n_ranks > self.num_processes else None

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # -- start and end -----------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._set_world_ranks()
        with names_arguments(self._given_config):
            check_groups(self.config, self._n_ranks)
        if self.global_rank == 0 and self.num_nodes > 1 and self.num_processes % self.config.tensor_parallel:
            warnings.warn(
                f"zero.tensor_parallel={self.config.tensor_parallel}: with {self.num_processes} rank(s) on a node, "
                "ranks that share a batch are on different nodes, which exchange activations in every layer. Set "
                "zero.tensor_parallel to a divisor of trainer.devices.",
                stacklevel=2,
            )
        check_allocation(self.cluster_environment, nodes=self.num_nodes, devices=self.num_processes)
        by_script, by_fork = self._launchers
        if self._start_method == "fork":
            self._launcher = by_fork(self, "fork")
        elif launchers.in_one_process(self.cluster_environment, self.num_nodes * self.num_processes):
            self._launcher = None
        else:
            # Also for processes started from outside: the launcher sets each rank's number of threads.
            self._launcher = by_script(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Create the process group, unless it exists or this is a lone process in a notebook. Raise ConfigError if the
        existing group's size differs from the number of ranks that the Trainer's arguments give. Collective."""
        Ended.failed = False  # all ranks survived the exception of an earlier run
        if dist.is_initialized() and (there := dist.get_world_size()) != self._n_ranks:
            raise ConfigError(
                f"trainer.num_nodes x trainer.devices: expected {there}, the number of processes that already run this "
                f"script, got {self.num_nodes} x {self.num_processes}. Give the same numbers to all Trainers of a "
                "script."
            )
        super().setup_environment()  # type: ignore[misc]
        self._set_world_ranks()
        device = self.root_device
        if device.type == "cuda":
            bind_near(device, self.parallel_devices)
        known = dist.Backend.default_device_backend_map
        self._process_group_backend = self._process_group_backend or known.get(device.type, "gloo")
        if not dist.is_initialized() and (self._launcher is not None or even_alone()):
            self._join()
            atexit.register(destroy_process_group)
        if self._waits is None and dist.is_initialized():
            self._start_waits = open_waits(dist.group.WORLD, device, self.config.stall_timeout_s)
            self._start_waits.place = "the start of the run (prepare_data and setup hooks)"

    def _join(self) -> None:
        """Create the default process group of all ranks. Do not bind it to a device, because for a bound group NCCL
        would at once allocate up to a gigabyte for a communicator that is not used. Collective."""
        assert self.cluster_environment is not None and self._process_group_backend is not None
        timeout = self._timeout or default_pg_timeout
        if self.world_size == 1 or self._process_group_backend in OWN_RENDEZVOUS:
            init_process_group(self.cluster_environment, self._process_group_backend, timeout=timeout)
            return
        here, cores = self.num_processes, available_cpus()
        few = f" ({here} here, on {cores} cores)" if cores < here else ""
        rank_zero_info(f"waiting for {self.world_size} processes{few}, which first import torch and Lightning")
        settings = rendezvous.shared_settings(self.config, self._settings_of_front() | dict(self.run_plan.settings))
        lines = rendezvous.join(
            self._process_group_backend,
            {"versions": rendezvous.versions(pl.__version__), "settings": settings},
            rank=self.cluster_environment.global_rank(),
            world=self.cluster_environment.world_size(),
            address=self.cluster_environment.main_address,
            port=self.cluster_environment.main_port,
            timeout=timeout,
            stall_timeout_s=self.config.stall_timeout_s if self._timeout is None else None,
            wait_s=self.config.stall_timeout_s,
            per_node=self.num_processes,
        )
        for line in lines:
            rank_zero_info(line)

    def _end_forked(self, *, failed: bool) -> None:
        """Close files and the process group at the end of a forked process, which runs no exit handlers. ``failed``:
        whether the process raised an exception."""
        Ended.failed |= failed
        for engine in engines():
            engine.tiers.close()
        destroy_process_group()

    # -- messages ----------------------------------------------------------------------------------------------------

    @property
    def _waits(self) -> Waits | None:
        """Return the Waits object that watches for stalls in Lightning's collectives: the engine's or, before sharding,
        the one made at the start of the run. None if there is no process group."""
        engine = self._engine_that_waits
        return engine.comm.waits if engine is not None else self._start_waits

    def _start_is_over(self) -> None:
        if self._start_waits is not None:
            self._start_waits.close()
            self._start_waits = None

    def barrier(self, name: str | None = None) -> None:
        if (waits := self._waits) is not None:
            barrier(dist.group.WORLD, waits, f"Lightning's barrier {name!r}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        waits = self._waits
        return obj if waits is None else broadcast_object(dist.group.WORLD, obj, src, waits)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        with self._elsewhere("a reduction of Lightning's (self.log(sync_dist=True), ...)", group):
            return reduce_tensor(tensor, group, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self._elsewhere("all_gather of Lightning", group):
            return super().all_gather(tensor, group, sync_grads)  # type: ignore[misc, no-any-return]

    def _elsewhere(self, what: str, group: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank posts that it is in Lightning's collective ``what``."""
        waits = self._waits if group is None or group is dist.group.WORLD else None
        return waits.elsewhere(what) if waits is not None else contextlib.nullcontext()

    def _gather_objects(self, value: Any, what: str) -> list[Any]:
        """Return the ``value`` of each rank, in rank order. ``what`` names this wait in messages. Collective."""
        waits = self._waits
        return [value] if waits is None else gather_objects(dist.group.WORLD, value, waits, what, patient=True)

    def _together(self, what: str, act: Callable[[], T]) -> T:
        """Call ``act``, which must issue no collectives, on each rank, and return its result. If ``act`` raises on any
        rank, all ranks raise. ``what``: names this wait in messages. Collective."""
        waits = self._waits
        return act() if waits is None else together(dist.group.WORLD, waits, what, act, patient=True)


class Ended:
    """Says whether the last run of this process ended by an exception (``failed``). If so, the process does not wait
    for other ranks: see [Note: what a rank does when another dies]."""

    failed = False


def destroy_process_group() -> None:
    """Destroy the process group on all ranks at exit; otherwise gloo aborts at random. After an error do not destroy
    it, because gloo's destructor would wait for messages that other ranks will never send."""
    if not dist.is_initialized():
        return
    with contextlib.suppress(Exception):
        if not Ended.failed and not hasattr(sys, "last_value"):
            if dist.get_backend() == "nccl":
                accelerator_of(default_device()).synchronize()
            else:
                work = dist.barrier(async_op=True)
                work.wait(timedelta(seconds=EXIT_BARRIER_S))
            dist.destroy_process_group()
            return
    with contextlib.suppress(Exception):
        for group in dist.distributed_c10d._world.pg_map:
            if dist.get_backend(group) == "gloo":
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # keeps the group from its destructor


# -- what a launcher has started, as the environment of this process says ----------------------------------------------

DEFAULT_PORT = 29500


def check_allocation(
    environment: ClusterEnvironment, *, nodes: int, devices: int, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise ConfigError if the launcher has not started ``devices`` processes on each of ``nodes`` nodes, or has not
    set the environment variables by which several nodes find each other."""
    if isinstance(environment, LightningEnvironment) and _in_pod(environ):
        told = environ["WORLD_SIZE"]
        if told not in (str(nodes), str(nodes * devices)):
            raise ConfigError(
                f"trainer.num_nodes: expected the number of pods of the PyTorchJob, whose WORLD_SIZE is {told} (the "
                f"number of pods, or of pods times trainer.devices), got trainer.num_nodes={nodes} "
                f"trainer.devices={devices}. Change trainer.num_nodes and trainer.devices, or the job's replicas."
            )
    if isinstance(environment, LightningEnvironment) and nodes > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        missing += ["NODE_RANK"] if not {"NODE_RANK", "GROUP_RANK"} & environ.keys() else []
        if missing:
            raise ConfigError(
                f"trainer.num_nodes: expected {', '.join(missing)} in the environment of each of {nodes} nodes, got "
                "none. Set MASTER_ADDR to the address of node 0, MASTER_PORT to a free port of node 0, and NODE_RANK "
                f"to 0 .. {nodes - 1}; or start the script with {flags('torchrun', nodes, devices)} or srun; or set "
                "trainer.num_nodes=1."
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
                f"and {world} on {found.nodes} nodes. Start the processes with {flags(found.by, nodes, devices)}."
            )
        if (found.nodes, found.local_world_size) == (nodes, devices):
            return
    elif world == nodes * devices:
        return
    by = found.by if found is not None else type(environment).__name__
    split = f" ({found.local_world_size} on each of {found.nodes} nodes)" if known and found else ""
    fix = "trainer.num_nodes and trainer.devices"
    if known and found:
        fix = f"trainer.num_nodes={found.nodes} trainer.devices={found.local_world_size}"
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
    """Raise ConfigError if srun started several tasks without ``--ntasks-per-node``, which Lightning requires."""
    tasks = environ.get("SLURM_NTASKS", "1")
    found = launched(environ)
    if found is not None and found.by == "srun" and tasks != "1" and "SLURM_NTASKS_PER_NODE" not in environ:
        nodes = found.nodes or 1
        per_node = found.local_world_size or tasks
        raise ConfigError(
            f"srun: expected the option --ntasks-per-node, got {tasks} tasks on {nodes} node(s) without this option. "
            f"Pass --nodes={nodes} --ntasks-per-node={per_node} to srun and in the sbatch script."
        )


def _in_pod(environ: Mapping[str, str]) -> bool:
    """Return whether ``RANK`` in ``environ`` is a node's rank, not a process's, as in a pod of a PyTorchJob."""
    return launched(environ) is None and environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def own_environment() -> ClusterEnvironment | None:
    """If mpirun has started this process and Lightning does not detect this (it needs mpi4py to do so), set torchrun's
    variables and return torchrun's environment. Otherwise return ``None``, and in a pod of Kubeflow's PyTorchJob, which
    Lightning detects only by a plugin, set ``NODE_RANK``. Without these variables every process would act as rank 0 and
    start further processes. Raises ConfigError if this process's rank or the address of rank 0 is unknown."""
    place = launched()
    if _in_pod(os.environ):
        os.environ.setdefault("NODE_RANK", os.environ["RANK"])
    others = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
    if place is None or place.by != "mpirun" or place.world_size in (None, 1) or any(e.detect() for e in others):
        return None
    if place.rank is None or place.local_rank is None or place.local_world_size is None:
        raise ConfigError(
            "mpirun: expected the local rank of each process in OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID or "
            "MV2_COMM_WORLD_LOCAL_RANK, got none. Start the processes with torchrun, or install mpi4py."
        )
    if "MASTER_ADDR" not in os.environ and place.world_size != place.local_world_size:
        raise ConfigError(
            "MASTER_ADDR: expected the address of the node of rank 0 (mpirun has started processes on several nodes), "
            "got none. Pass -x MASTER_ADDR=<name> -x MASTER_PORT=<port> to mpirun (MPICH, Intel MPI: -genv)."
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    names = {"RANK": place.rank, "LOCAL_RANK": place.local_rank, "WORLD_SIZE": place.world_size}
    names["GROUP_RANK"] = place.rank // place.local_world_size
    os.environ.update({name: str(value) for name, value in names.items()})
    rank_zero_only.rank = place.rank  # type: ignore[attr-defined]
    return TorchElasticEnvironment()
