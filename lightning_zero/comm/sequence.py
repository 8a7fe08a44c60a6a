"""Sends messages among the ranks that share a sequence: ``n`` adjacent ranks (``zero.sequence_parallel=n``).

::

    4 ranks, n = 2      ranks 0 and 1 have one batch, each half of its positions; ranks 2 and 3 another batch

The host waits for messages of host tensors. Messages of device tensors are queued on the compute stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.agreements import gather_objects, gather_on
from lightning_zero.comm.groups import backend_for, host_backend, make_group
from lightning_zero.device import recording
from lightning_zero.planning.topology import Group
from lightning_zero.ranks.waits import Waits
from lightning_zero.settings import ConfigError

HEADS = "the exchange of heads around attention"
TOKENS = "a sum over the tokens of a sequence"


class SequenceGroup:
    """Sends messages among the ranks that share a sequence with this rank. ``rank``: this rank's index in the group.
    ``size``: ranks in the group. ``counts``: messages by kind. ``waits``: bounds this rank's waits."""

    def __init__(self, parent: Any, ranks: Group, device: torch.device, waits: Waits) -> None:
        """Make process groups of ``ranks`` (indices in ``parent``). On a GPU also connect the ranks. Collective."""
        of_job = dist.get_process_group_ranks(parent)
        members = [of_job[rank] for rank in ranks.ranks]
        backend = backend_for(parent, device)
        self.parent, self.ranks, self.device, self.waits = parent, ranks, device, waits
        self.rank, self.size = ranks.index, ranks.size
        self.counts: Counter[str] = Counter()
        self._through_host = backend == "gloo" and device.type != "cpu"
        self._group = make_group(members, "sequence", backend, waits.stall_timeout_s)
        self._control = make_group(members, "sequence, small", host_backend(parent))
        if device.type != "cpu":
            # Connect ranks now. At the first message of a group NCCL makes the host wait for the other ranks, which in
            # the middle of a step may be waiting for another message of this rank.
            self.exchange(torch.zeros(self.size, 1, device=device))
            self.sum_(torch.zeros(1, device=device))

    @property
    def issued(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(self.counts.items()))

    def exchange(self, rows: Tensor, label: str = HEADS) -> Tensor:
        """Send row ``r`` of ``rows`` [size, elements] to rank ``r`` of the group. Return the rows received, [size,
        elements], in rank order. Collective. ``label``: what the message is for, in words."""
        self.counts["all_to_all"] += 1
        recording.moved("sequence", rows.nbytes - rows.nbytes // self.size)
        rows = rows.cpu() if self._through_host else rows
        received = torch.empty_like(rows)
        self._send(partial(dist.all_to_all_single, received, rows), label)
        return received.to(self.device)

    def sum_alike(self, values: Tensor, kind: int) -> Tensor:
        """Sum ``values`` ([elements] float64) over the ranks of the group, and return the sums. Collective. ``kind``: a
        code of the kind of mean that is computed. If ranks pass different kinds, all raise a ConfigError; on a device,
        where the host does not wait, the returned sums are NaN instead."""
        marked = self.sum_(torch.cat([values, values.new_full((1,), float(kind))]))
        total, alike = marked[:-1], marked[-1] == kind * self.size
        if values.device.type != "cpu":
            return torch.where(alike, total, torch.nan)
        if not alike:
            raise ConfigError(
                "zero.sequence_parallel: expected losses that all ranks of a group compute in one order, got other "
                "ones on some. Call them on all ranks, also where a part has no labels that count."
            )
        return total

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor over the ranks of the group, in place, and return the tensor. Collective."""
        self.counts["all_reduce"] += 1
        total = tensor.cpu() if self._through_host else tensor
        self._send(partial(dist.all_reduce, total), TOKENS)
        return tensor.copy_(total) if self._through_host else tensor

    def _send(self, collective: Callable[..., Any], label: str) -> None:
        if self.device.type != "cpu" and not self._through_host:
            collective(group=self._group)
            return
        with recording.waiting("sequence", label, on_host=True):
            self.waits.wait_work(collective(group=self._group, async_op=True), label)

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Gather a small object from each rank of the group. Blocks. Collective."""
        self.counts["objects"] += 1
        return gather_on(self._control, value, self.waits, what)


_made: list[SequenceGroup] = []  # for reuse, because torch never frees groups


def open_sequence_group(parent: Any, ranks: Group, device: torch.device, waits: Waits) -> SequenceGroup:
    """Return a :class:`SequenceGroup` of ``ranks``: an existing one on which all its ranks have sent equally many
    messages, else a new one. Collective. After an exception the numbers of sent messages can differ; then a rank's new
    message would be matched with an old message of another rank."""
    made = [g for g in _made if g.parent is parent and g.ranks == ranks and g.device == device]
    issued, what = [g.issued for g in made], "the groups of zero.sequence_parallel"
    table = gather_objects(parent, issued, waits, what, patient=True)
    for index, group in enumerate(made):
        if len({table[rank][index] for rank in ranks.ranks}) == 1:
            group.waits = waits
            return group
    _made.append(SequenceGroup(parent, ranks, device, waits))
    return _made[-1]


class OnPaper:
    """Has the methods of a :class:`SequenceGroup` but sends nothing: for one rank alone (``OnPaper(1)``), or to make a
    memory plan with tensors that have no values. ``sent``: bytes that a rank would have sent."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = 0

    def exchange(self, rows: Tensor, label: str = HEADS) -> Tensor:
        self.sent += rows.nbytes - rows.nbytes // self.size
        return rows.clone()

    def sum_alike(self, values: Tensor, kind: int) -> Tensor:
        return values


Sharers = SequenceGroup | OnPaper
