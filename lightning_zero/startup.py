"""The start of a run: all ranks come together, or a sentence says which did not, and what to change.

Before the process group is made the ranks meet in its store, so that a rank that never comes is known by its number
instead of by a hang::

    rank 0    opens a room ...... lets each in ...... all are there: ticks ...... compares ...... verdict
    others        knock ... enter, read rank 0's settings ...... read the ticks ... report ...... hear the verdict

*Room*: torchrun's agent keeps its store when it starts the processes again, with all that an earlier round has written.
So rank 0 opens a room (a prefix of keys) of a new number, and tells it to everyone who knocks; a knock of an earlier
round is answered too, to nobody. The process group lives in the room as well. *Ticks* are rank 0's time of day, which a
waiting rank gets as it is written: what its own clock is ahead, plus the way (well below a millisecond).
Rank 0 takes a few small operations for each rank: a thousand ranks take about a second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import Enum
from itertools import groupby
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info

import lightning_zero
from lightning_zero.config import ConfigError, ZeroConfig
from lightning_zero.launched import launched

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
MARGIN_S = 15.0  # for rank 0 to say what is wrong, after the others' time is over
TICKS = 3
SKEW_WORTH_A_WARNING_S = 1.0
_POLL_S = 0.02
_PREFIX = "lightning_zero/start"


class StartError(ConfigError):
    """The ranks did not come together. The message says what was expected, what was found, and what to change."""


# -- what can be told without other processes ---------------------------------------------------------------------


def check_allocation(
    environment: ClusterEnvironment, *, nodes: int, devices: int, environ: Mapping[str, str] = os.environ
) -> None:
    """Refuse numbers of nodes and devices that differ from the processes that a launcher has started.

    Raises:
        ConfigError: expected and found, and the settings and flags to change.
    """
    if isinstance(environment, LightningEnvironment):
        _check_by_hand(nodes, devices, environ)
        return
    if not environment.creates_processes_externally:
        return
    found = launched(environ)
    world = environment.world_size()
    known = found is not None and found.world_size == world and found.nodes and found.local_world_size
    if known:
        assert found is not None
        if not found.even:
            raise ConfigError(
                f"{found.by}: expected as many processes on every node, got {found.local_world_size} on this one and "
                f"{world} on {found.nodes} nodes. Start them by {flags(found.by, nodes, devices)}."
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
    """How a launcher is told to start ``devices`` processes on each of ``nodes`` nodes."""
    return {
        "torchrun": f"torchrun --nnodes={nodes} --nproc-per-node={devices}",
        "srun": f"srun --nodes={nodes} --ntasks-per-node={devices}",
        "mpirun": f"mpirun -n {nodes * devices}, {devices} on each node",
    }.get(by, f"{devices} on each of {nodes} nodes")


def check_srun(environ: Mapping[str, str] = os.environ) -> None:
    """What Lightning would answer to a call of srun with a traceback.

    Raises:
        ConfigError: the flag that is missing.
    """
    tasks = environ.get("SLURM_NTASKS", "1")
    found = launched(environ)
    if found is not None and found.by == "srun" and tasks != "1" and "SLURM_NTASKS_PER_NODE" not in environ:
        nodes = found.nodes or 1
        per_node = found.local_world_size or tasks
        raise ConfigError(
            f"srun: expected --ntasks-per-node, got {tasks} tasks on {nodes} node(s) without it. Start them by "
            f"srun --nodes={nodes} --ntasks-per-node={per_node}, and the same in the sbatch script."
        )


def _check_by_hand(nodes: int, devices: int, environ: Mapping[str, str]) -> None:
    if nodes == 1:
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    missing += ["NODE_RANK"] if not {"NODE_RANK", "GROUP_RANK"} & environ.keys() else []
    if missing:
        raise ConfigError(
            f"trainer.num_nodes: expected {', '.join(missing)} in the environment of each of {nodes} nodes, got none. "
            "Set MASTER_ADDR to the address of node 0, MASTER_PORT to a free port there and NODE_RANK to 0 .. "
            f"{nodes - 1}, start by {flags('torchrun', nodes, devices)} or by srun, or set trainer.num_nodes=1."
        )
    node = environ.get("NODE_RANK", environ.get("GROUP_RANK", ""))
    if not node.isdigit() or int(node) >= nodes:
        raise ConfigError(
            f"NODE_RANK: expected 0 .. {nodes - 1} (trainer.num_nodes={nodes}), got {node!r}. "
            "Change NODE_RANK or trainer.num_nodes."
        )


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
        "lightning": lightning.__version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def digest(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:8]


def ranges(ranks: Iterable[int]) -> str:
    """``0-3, 7``."""
    parts = []
    for _, run in groupby(enumerate(sorted(set(ranks))), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(parts)


def _plural(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


# -- the meeting ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Guest:
    """A rank that has come."""

    rank: int
    world_size: int
    host: str
    pid: int

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"


@dataclass(kw_only=True, slots=True)
class Report:
    """What rank 0 knows when all have come.

    Attributes:
        last_s: seconds between the first rank and the last.
        skews: seconds that the clocks of the ranks are ahead of rank 0's.
    """

    guests: dict[int, Guest]
    last: int = 0
    last_s: float = 0.0
    skews: dict[int, float] = field(default_factory=dict)

    def lines(self, where: str, shared: Mapping[str, Mapping[str, str]]) -> list[str]:
        """One line for each thing that was looked at."""
        expected = len(self.guests)
        late = f"; the last, rank {self.last}, came {self.last_s:.1f} s after the first" if expected > 1 else ""
        worst = max(self.skews, key=lambda r: abs(self.skews[r]), default=0)
        skew = self.skews.get(worst, 0.0)
        clock = f"{abs(skew) * 1000:.1f} ms" if abs(skew) < SKEW_WORTH_A_WARNING_S else f"{abs(skew):.1f} s"
        warning = f", on {self.guests[worst].host}: set it right" if abs(skew) >= SKEW_WORTH_A_WARNING_S else ""
        same = ", ".join(f"{name} {version}" for name, version in shared["versions"].items())
        return [
            f"ranks: {expected} of {expected} on {places(self.guests.values())}{late}",
            f"address: {where}",
            f"same on all ranks: {same}; configuration {digest(shared['settings'])}",
            f"clocks: rank {worst}'s is furthest from rank 0's, by {clock}{warning}",
        ]


def places(guests: Iterable[Guest]) -> str:
    """``2 nodes (a: 0-1, b: 2-3)``; only their number where there are many."""
    hosts: dict[str, list[int]] = {}
    for guest in guests:
        hosts.setdefault(guest.host, []).append(guest.rank)
    count = f"{len(hosts)} node{'s' if len(hosts) > 1 else ''}"
    if len(hosts) > 4:
        return count
    return f"{count} ({', '.join(f'{host}: {ranges(ranks)}' for host, ranks in hosts.items())})"


def differences(reference: Mapping[str, Mapping[str, str]], own: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    """What differs, as [part, key, the reference's value, the own one]."""
    return [
        [part, key, reference[part].get(key, "nothing"), own[part].get(key, "nothing")]
        for part in reference
        for key in sorted({*reference[part], *own[part]})
        if reference[part].get(key) != own[part].get(key)
    ]


def disagreement(found: Mapping[int, list[list[str]]], *, most: int = 5) -> str | None:
    """A sentence about everything in which ranks differ from rank 0; ``None`` if they do not.

    Args:
        found: for each rank its :func:`differences`.
        most: how many keys are named.
    """
    ranks_by: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for rank, items in sorted(found.items()):
        for part, key, expected, got in items:
            ranks_by.setdefault((part, key, expected), {}).setdefault(got, []).append(rank)
    if not ranks_by:
        return None
    sentences = []
    for (_, key, expected), others in list(ranks_by.items())[:most]:
        got = ", ".join(f"{value} on {_plural(ranks)}" for value, ranks in others.items())
        sentences.append(f"{key}: expected {expected}, as rank 0 has it, got {got}.")
    if len(ranks_by) > most:
        sentences.append(f"And {len(ranks_by) - most} more.")
    if any(part == "versions" for part, _, _ in ranks_by):
        fix = "Install the same versions on all nodes."
    elif any(key == "ckpt_path" for _, key, _ in ranks_by):
        fix = "The run folder (hydra.run.dir) must be on a disk that all nodes share."
    else:
        fix = "Start all ranks with the same command, files and environment."
    return " ".join([*sentences, fix])


class Meeting:
    """All ranks in one room of a store.

    Args:
        shared: parts (versions, settings) of keys and values that must be equal on all ranks.
        where: address and port, for messages.
        per_node: processes of a node, for messages.
    """

    def __init__(
        self,
        store: Any,
        guest: Guest,
        shared: Mapping[str, Mapping[str, str]],
        *,
        where: str,
        timeout_s: float,
        per_node: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._hall = dist.PrefixStore(_PREFIX, store)
        self._guest, self._shared = guest, shared
        self._where, self._timeout_s, self._per_node = where, timeout_s, per_node
        self._clock = clock
        self.room: Any = None  # the store of this round
        self._number = 0

    def hold(self) -> Report | None:
        """Come together; on rank 0 the report.

        Raises:
            StartError: on all ranks that came: some did not, or they differ.
        """
        try:
            return self._host() if self._guest.rank == 0 else self._visit()
        except dist.DistError as error:
            raise StartError(
                f"{self._guest.who}: the store at {self._where} broke off while the ranks came together: rank 0 has "
                f"ended, and its output says why ({str(error).splitlines()[0]})."
            ) from error

    # -- rank 0

    def _host(self) -> Report:
        self._number = self._hall.add("rooms", 1)
        self.room = dist.PrefixStore(str(self._number), self._hall)
        self.room.set("shared", json.dumps(self._shared))
        report = self._let_in()
        self._tick()
        found = self._hear(report)
        message = disagreement(found)
        if message is not None:
            self._dismiss("verdict", message, len(report.guests) - 1)
        self.room.set("verdict", "")
        return report

    def _let_in(self) -> Report:
        report = Report(guests={0: self._guest})
        first = time.monotonic()
        answered = int(self._hall.get("answered")) if self._hall.check(["answered"]) else 0
        entered = 0
        while len(report.guests) < self._guest.world_size:
            while answered < self._hall.add("knocks", 0):
                answered += 1
                self._hall.set(f"answer/{answered}", str(self._number))
                self._hall.set("answered", str(answered))
            while entered < self.room.add("entered", 0):
                entered += 1
                guest = Guest(**json.loads(self.room.get(f"guest/{entered}")))
                self._admit(guest, report)
                report.last, report.last_s = guest.rank, time.monotonic() - first
            if self._hall.add("rooms", 0) != self._number:
                self._dismiss("tick/0", f"rank 0 came twice: one is {self._guest.who}. {_SAME_RANK}", entered)
            if time.monotonic() - first > self._timeout_s:
                self._dismiss("tick/0", self._absence(report.guests), entered)
            time.sleep(_POLL_S)
        return report

    def _admit(self, guest: Guest, report: Report) -> None:
        other = report.guests.get(guest.rank)
        arrived = len(report.guests)
        if guest.world_size != self._guest.world_size:
            self._dismiss(
                "tick/0",
                f"expected {self._guest.world_size} ranks, as {self._guest.who} does, got {guest.world_size} from "
                f"{guest.who}. Give all nodes the same trainer.num_nodes and trainer.devices.",
                arrived,
            )
        if other is not None or not 0 <= guest.rank < guest.world_size:
            what = f"came twice: {other.who} and {guest.who}" if other else f"is not one of {guest.world_size}"
            self._dismiss("tick/0", f"rank {guest.rank} {what}. {_SAME_RANK}", arrived)
        report.guests[guest.rank] = guest

    def _absence(self, guests: Mapping[int, Guest]) -> str:
        world, per_node = self._guest.world_size, self._per_node
        missing = [rank for rank in range(world) if rank not in guests]
        empty = sorted({r // per_node for r in range(world)} - {r // per_node for r in guests})
        nodes = f" (all of node{'s' if len(empty) > 1 else ''} {ranges(empty)})" if empty else ""
        return (
            f"{_plural(missing)} of {world}{nodes} did not come to {self._where} within {self._timeout_s:g} s: "
            f"expected ranks {ranges(range(world))}, found {ranges(guests)} on {places(guests.values())}. Start the "
            "missing ones with the same MASTER_ADDR and MASTER_PORT (their own output says why they ended, if they "
            "did), set trainer.num_nodes and trainer.devices to what there is, or raise zero.stall_timeout_s for ranks "
            "that come late."
        )

    def _tick(self) -> None:
        for n in range(TICKS):
            self.room.set(f"tick/{n}", json.dumps({"time": self._clock()}))
            time.sleep(0.01)

    def _hear(self, report: Report) -> dict[int, list[list[str]]]:
        found: dict[int, list[list[str]]] = {}
        deadline = time.monotonic() + self._timeout_s
        for rank in range(1, self._guest.world_size):
            left = max(0.001, deadline - time.monotonic())
            try:
                self.room.wait([f"report/{rank}"], timedelta(seconds=left))
            except dist.DistStoreError:
                message = f"{report.guests[rank].who} came, and ended before all had. Its output says why."
                self._dismiss("verdict", message, len(report.guests) - 1)
            said = json.loads(self.room.get(f"report/{rank}"))
            report.skews[rank] = said["skew"]
            if said["differences"]:
                found[rank] = said["differences"]
        return found

    def _dismiss(self, key: str, message: str, others: int) -> None:
        """Tell all who wait, and give them time to hear it: the store may end with this process."""
        for n in range(self._number, self._hall.add("rooms", 0) + 1):
            self._hall.set(f"{n}/{key}", json.dumps({"error": message}))
        deadline = time.monotonic() + MARGIN_S / 3
        while self.room.add("heard", 0) < others and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        raise StartError(message)

    # -- the others

    def _visit(self) -> None:
        knock = self._hall.add("knocks", 1)
        answer = self._wait_for(self._hall, f"answer/{knock}", self._timeout_s)
        self.room = dist.PrefixStore(answer, self._hall)
        reference = json.loads(self.room.get("shared"))
        self.room.set(f"guest/{self.room.add('entered', 1)}", json.dumps(asdict(self._guest)))
        ahead = []
        for n in range(TICKS):
            ticked = self._listen(f"tick/{n}")
            ahead.append(self._clock() - ticked["time"])
        # The way only ever adds to it: the least is the nearest to the truth.
        said = {"skew": min(ahead), "differences": _cut(differences(reference, self._shared))}
        self.room.set(f"report/{self._guest.rank}", json.dumps(said))
        self._listen("verdict")

    def _listen(self, key: str) -> Any:
        said = self._wait_for(self.room, key, self._timeout_s + MARGIN_S)
        heard = json.loads(said) if said else {}
        if "error" in heard:
            self.room.add("heard", 1)
            raise StartError(heard["error"])
        return heard

    def _wait_for(self, store: Any, key: str, timeout_s: float) -> str:
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            raise StartError(
                f"{self._guest.who}: expected rank 0 at {self._where}, heard nothing of it within {timeout_s:g} s. Its "
                "output says why, if it was started; raise zero.stall_timeout_s for a rank that comes late."
            ) from error
        return store.get(key).decode()


_SAME_RANK = "Give each node a NODE_RANK (torchrun: --node-rank) of its own, and each job a MASTER_PORT of its own."


def _cut(items: list[list[str]], *, most: int = 20, length: int = 200) -> list[list[str]]:
    return [[text[:length] for text in item] for item in items[:most]]


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
    timeout: timedelta | None,
    wait_s: float,
    per_node: int,
    device_id: torch.device | None,
) -> None:
    """Meet the other ranks and make the default process group; rank 0 says what it found, a line each.

    Args:
        timeout: of the process group.
        wait_s: how long ranks are waited for.

    Raises:
        StartError: they did not come together.
    """
    rank, world = environment.global_rank(), environment.world_size()
    address, port = environment.main_address, environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    store = open_store(address, port, rank=rank, timeout=timeout or timedelta(minutes=30), wait_s=wait_s)
    guest = Guest(rank=rank, world_size=world, host=socket.gethostname(), pid=os.getpid())
    where = f"{address}:{port}"
    meeting = Meeting(store, guest, shared, where=where, timeout_s=wait_s, per_node=per_node)
    report = meeting.hold()
    try:
        dist.init_process_group(
            backend, store=meeting.room, rank=rank, world_size=world, timeout=timeout, device_id=device_id
        )
    except (dist.DistError, RuntimeError) as error:
        raise StartError(_no_connection(error, where, backend)) from error
    if report is not None:
        for line in report.lines(f"{where}, {backend}", shared):
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
