"""Start a run: open the store, compare what must be equal on all ranks, and make the process group. All ranks join
through the store before they make the group, so that a missing rank is named and does not cause a hang."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import Enum
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero.settings import ConfigError, ZeroConfig

# Settings that may differ between ranks: paths of a node, and folder names that contain the time.
OWN_SETTINGS = frozenset({"zero.offload.nvme_path", "data.num_workers", "run_dir"})
RESOLVE_S = 20.0  # seconds to resolve an address: names of nodes that have just started may take a moment
ELSEWHERE_S = 15.0  # seconds to wait at an address that is not this machine's but may be mapped to it
MARGIN_S = 15.0  # seconds for rank 0 to say what is wrong after the other ranks' time has passed
_POLL_S = 0.02


class StartError(ConfigError):
    """Raised if the ranks cannot join. The message says what was expected and found, and what to change."""


# -- what is compared ---------------------------------------------------------------------------------------------


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value.name if isinstance(value, Enum) else str(value)
    return flat


def shared_settings(config: ZeroConfig, more: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that must be equal on all ranks. ``<run_dir>`` replaces the path of the run folder in values.
    ``more``: settings besides those of ``config``."""
    flat = flatten({"zero": asdict(config)}) | flatten(more)
    run_dir = flat.get("run_dir")
    return {k: v.replace(run_dir, "<run_dir>") if run_dir else v for k, v in flat.items() if k not in OWN_SETTINGS}


def versions(lightning: str) -> dict[str, str]:
    """Return the versions that must be equal on all ranks, by package. ``lightning``: the version of Lightning."""
    return {
        "lightning_zero": lightning_zero.__version__,
        "lightning": lightning,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


# -- the ranks join -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    rank: int
    world_size: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"


class Rendezvous:
    """Lets all ranks join through a store, or raises an error that names ranks which did not join::

        rank 0    opens a round .... answers each ........ all have joined ........ result
        others        ask ........ join, read rank 0's settings ....... ready ...... hear it

    torchrun's agent keeps its store when it restarts processes. So each round has a numbered key prefix, which rank 0
    tells to every rank that asks. The process group uses the round's store too.

    Args:
        shared: values that must be equal on all ranks, by part (``versions``, ``settings``) and key.
        where: address and port of the store, for error messages.
        per_node: number of processes per node, for error messages.
    """

    def __init__(
        self,
        store: Any,
        own: Member,
        shared: Mapping[str, Mapping[str, str]],
        *,
        where: str,
        timeout_s: float,
        per_node: int = 1,
    ) -> None:
        self._all = dist.PrefixStore("lightning_zero/start", store)
        self._own, self._shared = own, shared
        self._where, self._timeout_s, self._per_node = where, timeout_s, per_node
        self.store: Any = None
        self._round = 0

    def join(self) -> dict[int, Member]:
        """Wait until all ranks have joined with equal settings. Return all members on rank 0, else {}. Collective.
        Raises StartError on all ranks that have joined if some ranks have not joined or have other settings."""
        try:
            return self._host() if self._own.rank == 0 else self._join()
        except dist.DistError as error:
            raise StartError(
                f"{self._own}: the store at {self._where} broke off while the ranks came together: rank 0 has ended, "
                f"and its output says why ({str(error).splitlines()[0]})."
            ) from error

    def _host(self) -> dict[int, Member]:
        self._round = self._all.add("rounds", 1)
        self.store = dist.PrefixStore(str(self._round), self._all)
        self.store.set("shared", json.dumps(self._shared))
        members = self._wait_for_members()
        self.store.set("complete", "")  # set before ranks are ready: one may have ended while it waited for others
        found: dict[int, str] = {}
        deadline = time.monotonic() + self._timeout_s
        for rank in range(1, self._own.world_size):
            try:
                self.store.wait([f"ready/{rank}"], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except dist.DistStoreError:
                why = f"{members[rank]} came, and ended before all had. Its output says why."
                self._dismiss("result", why, len(members) - 1)
            found[rank] = self.store.get(f"ready/{rank}").decode()
        if first := next(filter(None, found.values()), ""):
            part, key, expected, got = json.loads(first)
            ranks = [rank for rank, unequal in found.items() if unequal == first]
            fix = "Start all ranks with the same command, files and environment."
            if part == "versions":
                fix = "Install the same versions on all nodes."
            elif key == "ckpt_path":
                fix = "The run folder (hydra.run.dir) must be on a disk that all nodes share."
            text = f"{key}: expected {expected[:200]}, as rank 0 has it, got {got[:200]} on {_plural(ranks)}. {fix}"
            self._dismiss("result", text, len(members) - 1)
        self.store.set("result", "")
        return members

    def _wait_for_members(self) -> dict[int, Member]:
        members, joined = {0: self._own}, 0
        answered = int(self._all.get("answered")) if self._all.check(["answered"]) else 0
        deadline = time.monotonic() + self._timeout_s
        while len(members) < self._own.world_size:
            while answered < self._all.add("asked", 0):
                answered += 1
                self._all.set(f"answer/{answered}", str(self._round))
                self._all.set("answered", str(answered))
            while joined < self.store.add("joined", 0):
                joined += 1
                member = Member(**json.loads(self.store.get(f"member/{joined}")))
                if why := self._refusal(member, members):
                    self._dismiss("complete", why, joined)
                members[member.rank] = member
            if self._all.add("rounds", 0) != self._round:
                self._dismiss("complete", f"rank 0 came twice: one is {self._own}. {_SAME_RANK}", joined)
            if time.monotonic() > deadline:
                self._dismiss("complete", self._absence(members), joined)
            time.sleep(_POLL_S)
        return members

    def _refusal(self, member: Member, members: Mapping[int, Member]) -> str:
        if member.world_size != self._own.world_size:
            return (
                f"expected {self._own.world_size} ranks, as {self._own} does, got {member.world_size} from {member}. "
                "Give all nodes the same trainer.num_nodes and trainer.devices."
            )
        if other := members.get(member.rank):
            return f"rank {member.rank} came twice: {other} and {member}. {_SAME_RANK}"
        if not 0 <= member.rank < member.world_size:
            return f"rank {member.rank} is not one of {member.world_size}. {_SAME_RANK}"
        return ""

    def _absence(self, members: Mapping[int, Member]) -> str:
        world, per_node = self._own.world_size, self._per_node
        missing = [rank for rank in range(world) if rank not in members]
        empty = sorted({r // per_node for r in range(world)} - {r // per_node for r in members})
        nodes = f" (all of node{'s' if len(empty) > 1 else ''} {ranges(empty)})" if empty else ""
        return (
            f"{_plural(missing)} of {world}{nodes} did not come to {self._where} within {self._timeout_s:g} s: "
            f"expected ranks {ranges(range(world))}, found {ranges(members)} on {places(members.values())}. Start the "
            "missing ones with the same MASTER_ADDR and MASTER_PORT (their own output says why they ended, if they "
            "did), set trainer.num_nodes and trainer.devices to what there is, or raise zero.stall_timeout_s for ranks "
            "that come late."
        )

    def _dismiss(self, key: str, message: str, others: int) -> None:
        """Send ``message`` to the ranks that wait for ``key``, and raise a StartError with the message. Before that,
        wait up to five seconds until ``others`` ranks have read it, because the store may end with this process."""
        for n in range(self._round, self._all.add("rounds", 0) + 1):
            self._all.set(f"{n}/{key}", message)
        deadline = time.monotonic() + MARGIN_S / 3
        while self.store.add("heard", 0) < others and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        raise StartError(message)

    def _join(self) -> dict[int, Member]:
        answer = self._wait_for(self._all, f"answer/{self._all.add('asked', 1)}", self._timeout_s)
        self.store = dist.PrefixStore(answer, self._all)
        unequal = _first_difference(json.loads(self.store.get("shared")), self._shared)
        # If rank 0 reads between the count and the entry, its ``get`` waits for the entry.
        self.store.set(f"member/{self.store.add('joined', 1)}", json.dumps(asdict(self._own)))
        self._hear("complete")
        self.store.set(f"ready/{self._own.rank}", json.dumps(unequal) if unequal else "")
        self._hear("result")
        return {}

    def _hear(self, key: str) -> None:
        if message := self._wait_for(self.store, key, self._timeout_s + MARGIN_S):
            self.store.add("heard", 1)
            raise StartError(message)

    def _wait_for(self, store: Any, key: str, timeout_s: float) -> str:
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            raise StartError(
                f"{self._own}: expected rank 0 at {self._where}, heard nothing of it within {timeout_s:g} s. Its "
                "output says why, if it was started; raise zero.stall_timeout_s for a rank that comes late."
            ) from error
        return store.get(key).decode()


_SAME_RANK = "Give each node a NODE_RANK (torchrun: --node-rank) of its own, and each job a MASTER_PORT of its own."


def _first_difference(reference: Mapping[str, Mapping[str, str]], own: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return [part, key, value in ``reference``, value in ``own``] of the first difference; [] if there is none."""
    for part in reference:
        for key in sorted({*reference[part], *own[part]}):
            expected, got = (values[part].get(key, "nothing") for values in (reference, own))
            if expected != got:
                return [part, key, expected, got]
    return []


def ranges(ranks: Iterable[int]) -> str:
    """Format ranks as ``0-3, 7``."""
    parts = []
    for _, run in groupby(enumerate(sorted(set(ranks))), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(parts)


def _plural(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def places(members: Iterable[Member]) -> str:
    """Format the hosts of ``members`` as ``2 nodes (a: 0-1, b: 2-3)``; above 4 nodes return only their number."""
    hosts: dict[str, list[int]] = {}
    for member in members:
        hosts.setdefault(member.host, []).append(member.rank)
    count = f"{len(hosts)} node{'s' if len(hosts) > 1 else ''}"
    if len(hosts) > 4:
        return count
    return f"{count} ({', '.join(f'{host}: {ranges(ranks)}' for host, ranks in hosts.items())})"


# -- the store and the process group --------------------------------------------------------------------------------


def resolve(address: str, port: int, *, wait_s: float = RESOLVE_S) -> str:
    """Return the IP of ``address``. Raises StartError if it cannot be resolved within ``wait_s`` seconds."""
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
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def open_store(address: str, port: int, *, rank: int, timeout: timedelta, wait_s: float) -> Any:
    """Open and return a run's store, which rank 0 or torchrun's agent serves. ``timeout``: limit of later operations.
    ``wait_s``: seconds to wait for rank 0. Raises StartError for a port in use, a wrong address or a missing rank 0."""
    ip = resolve(address, port, wait_s=min(RESOLVE_S, wait_s))
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    elsewhere = serves and not is_ours(ip)
    limit = min(wait_s, ELSEWHERE_S) if elsewhere else wait_s
    try:
        store = dist.TCPStore(
            address, port, is_master=serves, timeout=timedelta(seconds=limit), wait_for_workers=False, multi_tenant=True
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
    backend: str,
    shared: Mapping[str, Mapping[str, str]],
    *,
    rank: int,
    world: int,
    address: str,
    port: int,
    timeout: timedelta,
    stall_timeout_s: float | None,
    wait_s: float,
    per_node: int,
) -> list[str]:
    """Join the other ranks and make the default process group. Return lines to log about the ranks, [] if not rank 0.
    Collective. Raises StartError if ranks are missing after ``wait_s`` seconds. ``timeout``: limit of operations of the
    store and the group; in a group on gloo, ``stall_timeout_s`` replaces ``timeout`` unless it is None."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    store = open_store(address, port, rank=rank, timeout=timeout, wait_s=wait_s)
    own = Member(rank=rank, world_size=world, host=socket.gethostname(), pid=os.getpid())
    where = f"{address}:{port}"
    rendezvous = Rendezvous(store, own, shared, where=where, timeout_s=wait_s, per_node=per_node)
    members = rendezvous.join()
    if stall_timeout_s is not None and backend == "gloo":
        timeout = timedelta(seconds=stall_timeout_s)
    try:
        dist.init_process_group(backend, store=rendezvous.store, rank=rank, world_size=world, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        name = "NCCL_SOCKET_IFNAME" if "nccl" in backend else "GLOO_SOCKET_IFNAME"
        ip = ""
        with contextlib.suppress(OSError):
            ip = f" ({socket.gethostbyname(socket.gethostname())})"
        raise StartError(
            f"{backend}: the ranks met at {where}, but could not connect to each other from "
            f"{socket.gethostname()}{ip}: {str(error).splitlines()[0]}. Set {name} to the network interface "
            "that the nodes share (ip addr lists them)."
        ) from error
    lines = [f"ranks: {world} of {world} on {places(members.values())}"]
    if len({m.host for m in members.values()}) > 1 or logging.getLogger("lightning_zero").isEnabledFor(logging.DEBUG):
        same = ", ".join(f"{name} {version}" for name, version in shared["versions"].items())
        lines.append(f"address: {where}, {backend}; the same on all ranks: settings, {same}")
    return lines if members else []
