"""All ranks come together in a store, or a sentence says which did not, and what to change.

Before the process group is made the ranks meet in its store, so that a rank that never comes is known by its number
instead of by a hang::

    rank 0    opens a room ...... lets each in ...... all are there ...... compares ...... verdict
    others        knock ... enter, read rank 0's settings ............ report ...... hear the verdict

*Room*: torchrun's agent keeps its store when it starts the processes again, with all that an earlier round has written.
So rank 0 opens a room, which is a prefix of keys with a new number, and tells the number to every rank that knocks.
Knocks that an earlier round has left are answered too, and nobody reads these answers. The process group lives in the
room as well.
Rank 0 takes a few small operations for each rank: a thousand ranks take about a second.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch.distributed as dist

from lightning_zero.config import ConfigError

MARGIN_S = 15.0  # for rank 0 to say what is wrong, after the others' time is over
_POLL_S = 0.02
_PREFIX = "lightning_zero/start"


class StartError(ConfigError):
    """The ranks did not come together. The message says what was expected, what was found, and what to change."""


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
    """

    guests: dict[int, Guest]
    last: int = 0
    last_s: float = 0.0

    def lines(self, where: str, shared: Mapping[str, Mapping[str, str]], *, details: bool = True) -> list[str]:
        """One line for each thing that was looked at.

        Args:
            details: also on one machine, whose ranks have one clock, one address and the same files.
        """
        expected = len(self.guests)
        if not details and len({guest.host for guest in self.guests.values()}) == 1:
            return [f"ranks: {expected} of {expected} on {places(self.guests.values())}"]
        late = f"; the last, rank {self.last}, came {self.last_s:.1f} s after the first" if expected > 1 else ""
        same = ", ".join(f"{name} {version}" for name, version in shared["versions"].items())
        return [
            f"ranks: {expected} of {expected} on {places(self.guests.values())}{late}",
            f"address: {where}",
            f"same on all ranks: {same}; configuration {digest(shared['settings'])}",
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
    ) -> None:
        self._hall = dist.PrefixStore(_PREFIX, store)
        self._guest, self._shared = guest, shared
        self._where, self._timeout_s, self._per_node = where, timeout_s, per_node
        self.room: Any = None  # the store of this round
        self._number = 0

    def hold(self) -> Report | None:
        """Come together; on rank 0 the report.

        Raises:
            StartError: on all ranks that came: some did not, or they differ.
        """
        try:
            if self._guest.rank == 0:
                return self._host()
            self._visit()
            return None
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
        # Told before the reports are waited for: the others write theirs only when they hear that all have come.
        self.room.set("complete", "")
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
                self._dismiss("complete", f"rank 0 came twice: one is {self._guest.who}. {_SAME_RANK}", entered)
            if time.monotonic() - first > self._timeout_s:
                self._dismiss("complete", self._absence(report.guests), entered)
            time.sleep(_POLL_S)
        return report

    def _admit(self, guest: Guest, report: Report) -> None:
        other = report.guests.get(guest.rank)
        arrived = len(report.guests)
        if guest.world_size != self._guest.world_size:
            self._dismiss(
                "complete",
                f"expected {self._guest.world_size} ranks, as {self._guest.who} does, got {guest.world_size} from "
                f"{guest.who}. Give all nodes the same trainer.num_nodes and trainer.devices.",
                arrived,
            )
        if other is not None or not 0 <= guest.rank < guest.world_size:
            what = f"came twice: {other.who} and {guest.who}" if other else f"is not one of {guest.world_size}"
            self._dismiss("complete", f"rank {guest.rank} {what}. {_SAME_RANK}", arrived)
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
            if unequal := json.loads(self.room.get(f"report/{rank}")):
                found[rank] = unequal
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
        # The number is counted before the entry is written. Rank 0 may read in between; its ``get`` waits for the
        # entry.
        self.room.set(f"guest/{self.room.add('entered', 1)}", json.dumps(asdict(self._guest)))
        self._listen("complete")
        self.room.set(f"report/{self._guest.rank}", json.dumps(_cut(differences(reference, self._shared))))
        self._listen("verdict")

    def _listen(self, key: str) -> None:
        said = self._wait_for(self.room, key, self._timeout_s + MARGIN_S)
        heard = json.loads(said) if said else {}
        if "error" in heard:
            self.room.add("heard", 1)
            raise StartError(heard["error"])

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
