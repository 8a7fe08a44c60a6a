"""The start of a run: the ranks' store and process group, and what must be equal on all of them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero.config import ZeroConfig
from lightning_zero.lightning_api import ClusterEnvironment, pl, rank_zero_info
from lightning_zero.ranks.meeting import Guest, Meeting, StartError

# A node may have its own paths and counts of threads, and all may find another moment's name for a folder.
OWN_SETTINGS = frozenset(
    {
        "zero.offload.nvme_path",
        "zero.offload.threads",
        "zero.offload.io_threads",
        "zero.summary",
        "data.cache_dir",
        "data.num_workers",
        "run_dir",
    }
)
RESOLVE_S = 20.0  # names of nodes that were just started may take a moment
ELSEWHERE_S = 15.0  # for an address that is not this machine's, but may be mapped to it


# -- what is compared ---------------------------------------------------------------------------------------------


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys and text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value.name if isinstance(value, Enum) else str(value)
    return flat


def shared_settings(config: ZeroConfig, more: Mapping[str, Any]) -> dict[str, str]:
    """What all ranks must have alike, besides versions: the strategy's settings, and those of the run.

    Paths in the run folder count relative to it.
    """
    flat = flatten({"zero": asdict(config)}) | flatten(more)
    run_dir = flat.get("run_dir")
    return {k: v.replace(run_dir, "<run_dir>") if run_dir else v for k, v in flat.items() if k not in OWN_SETTINGS}


def versions() -> dict[str, str]:
    """What every rank must have in the same version."""
    return {
        "lightning_zero": lightning_zero.__version__,
        "lightning": pl.__version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


# -- the store and the process group --------------------------------------------------------------------------------


def resolve(address: str, port: int, *, wait_s: float = RESOLVE_S) -> str:
    """The IP address of a name; a node's name may be known only a moment after its start.

    Raises:
        StartError: there is none.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return str(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0])
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise StartError(
                    f"MASTER_ADDR: expected the address of the node of rank 0, got {address!r}, which "
                    f"{socket.gethostname()} cannot resolve ({error}). Set MASTER_ADDR to a name or IP address that "
                    "all nodes can reach (torchrun: --master-addr, --rdzv-endpoint, --local-addr)."
                ) from error
            time.sleep(min(1.0, wait_s / 4))


def is_ours(ip: str) -> bool:
    """Whether an IP address belongs to this machine."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def open_store(address: str, port: int, *, rank: int, timeout: timedelta, wait_s: float) -> Any:
    """The store of a run, which rank 0 holds, or torchrun's agent.

    Args:
        timeout: of later operations.
        wait_s: how long rank 0 is waited for.

    Raises:
        StartError: a port that is taken, an address that is not rank 0's, or nobody there.
    """
    ip = resolve(address, port, wait_s=min(RESOLVE_S, wait_s))
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    elsewhere = serves and not is_ours(ip)
    limit = min(wait_s, ELSEWHERE_S) if elsewhere else wait_s
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=serves,
            timeout=timedelta(seconds=limit),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistError, RuntimeError) as error:
        raise StartError(_no_store(error, address, ip, port, limit, serves=serves, elsewhere=elsewhere)) from error
    store.set_timeout(timeout)
    return store


def _no_store(
    error: Exception, address: str, ip: str, port: int, waited_s: float, *, serves: bool, elsewhere: bool
) -> str:
    if serves and ("EADDRINUSE" in str(error) or "address already in use" in str(error).lower()):
        return (
            f"MASTER_PORT: expected a free port on {socket.gethostname()} for rank 0, got {port}, on which another "
            "process listens: another job, a run that has not ended, or another rank 0 (NODE_RANK). Set MASTER_PORT to "
            "a free port."
        )
    if elsewhere:
        return (
            f"MASTER_ADDR: expected an address of the node of rank 0, {socket.gethostname()}, got {address} ({ip}), "
            f"which is another machine's. Set MASTER_ADDR={socket.gethostname()}, or NODE_RANK."
        )
    return (
        f"MASTER_ADDR, MASTER_PORT: expected rank 0 at {address}:{port} ({ip}), found nobody there within "
        f"{waited_s:g} s. Start rank 0 (its output says why, if it ended), open the port between the nodes, set "
        "MASTER_ADDR and MASTER_PORT to where rank 0 is, or raise zero.stall_timeout_s for a rank 0 that comes late. "
        f"({str(error).splitlines()[0]})"
    )


def join(
    environment: ClusterEnvironment,
    backend: str,
    shared: Mapping[str, Mapping[str, str]],
    *,
    timeout: timedelta,
    stall_timeout_s: float | None,
    wait_s: float,
    per_node: int,
) -> None:
    """Meet the other ranks and make the default process group; rank 0 says what it found, a line each.

    Args:
        timeout: of the process group, and of the store.
        stall_timeout_s: in the place of ``timeout`` where only the hosts wait in collectives (gloo); None: ``timeout``.
        wait_s: how long ranks are waited for.

    Raises:
        StartError: they did not come together.
    """
    rank, world = environment.global_rank(), environment.world_size()
    address, port = environment.main_address, environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    store = open_store(address, port, rank=rank, timeout=timeout, wait_s=wait_s)
    guest = Guest(rank=rank, world_size=world, host=socket.gethostname(), pid=os.getpid())
    where = f"{address}:{port}"
    meeting = Meeting(store, guest, shared, where=where, timeout_s=wait_s, per_node=per_node)
    report = meeting.hold()
    if stall_timeout_s is not None and backend == "gloo":
        timeout = timedelta(seconds=stall_timeout_s)
    try:
        dist.init_process_group(backend, store=meeting.room, rank=rank, world_size=world, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise StartError(_no_connection(error, where, backend)) from error
    if report is not None:
        details = logging.getLogger("lightning_zero").isEnabledFor(logging.DEBUG)  # hydra.verbose=lightning_zero
        for line in report.lines(f"{where}, {backend}", shared, details=details):
            rank_zero_info(line)


def _no_connection(error: Exception, where: str, backend: str) -> str:
    name = "NCCL_SOCKET_IFNAME" if "nccl" in backend else "GLOO_SOCKET_IFNAME"
    ip = ""
    with contextlib.suppress(OSError):
        ip = f" ({socket.gethostbyname(socket.gethostname())})"
    return (
        f"{backend}: the ranks met at {where}, but could not connect to each other from {socket.gethostname()}{ip}: "
        f"{str(error).splitlines()[0]}. Set {name} to the network interface that the nodes share (ip addr lists them)."
    )
