"""Messages for code between steps that only some ranks run: other ranks answer without a call of theirs.

[Note: uses by some ranks alone]
Code under ``if trainer.is_global_zero:`` uses parameters on one rank. Meanwhile the other ranks go on until an
operation takes all ranks, so no master changes. The rank that is alone reads their shards::

    all_make(use)   each rank sends which use it makes. If other ranks do not send theirs within seconds, this rank
                    withdraws: it sends that it is alone, and waits for no answer
    ask(ranks)      this rank asks over the store; a thread of each other rank sends its shard

Messages of a rank that has withdrawn are received by the other ranks at their next use, and ignored. Until then the
rank makes further uses alone at once: until masters change, or if it has made the use alone before. A rank may withdraw
although the others are only slow; they then find this out, and use parameters alone too. So :meth:`OneSided.all_make`
decides how values are sent, and not which. Between a backward and its step no rank withdraws, because a rank may step
without a message, and has no old values then.

Each rank counts changes of masters (``Changes``): steps, other changes by all ranks together, and users' writes.
A rank asks for shards with the same counts as its own. Another rank copies its shard when it has these counts, and
then looks at them again: if they have changed, the copy may be torn.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.transports import all_gather_single
from lightning_zero.ranks.watchdog import connection_of_its_own

PATIENCE_S = 5.0  # of a rank for others that do not come to a use
KNOWN_S = 0.5  # the same, for a use that this rank has made alone the last time
LISTEN_S = 1.0  # seconds between two looks of the thread for requests
ANSWER_S = 0.002  # the same, for :data:`ANSWERS_S` after a request
ANSWERS_S = 30.0
RANKS_AT_THIS_PACE = 16  # more ranks look less often, because all use one store
KEPT = 1000  # requests that stay in the store
TAG = 1

Counts = tuple[int, ...]
Answer = Callable[[int, Counts], Tensor]


class OneSided:
    """Finds out whether all ranks make a use of parameters, and reads other ranks' shards.

    See [Note: uses by some ranks alone].
    """

    def __init__(self, comm: Communicator, answer: Answer) -> None:
        """``answer(index, counts)``: returns this rank's shard of a bucket on the host, once masters have changed as
        often as ``counts`` say. Called in a thread. The asking rank raises the error that ``answer`` raises."""
        self._comm, self._answer, self._group = comm, answer, comm.uses_group
        self._withdrawn: list[tuple[Any, Tensor, Tensor]] = []  # messages that other ranks have not received yet
        self._known: set[str] = set()  # uses that this rank has made alone the last time
        self._alone_since: Counts | None = None  # the ``at`` of the last use that this rank made alone
        self._uses: Counter[str] = Counter()  # of this rank with the same ``at``
        self._uses_since: Counts | None = None
        self._answered = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        finalize(self, self._stop.set)
        if self._group is not None:
            self._store = connection_of_its_own(dist.distributed_c10d._get_default_store())
            self._prefix = f"lightning_zero/{comm.waits.number}/one-sided"

    # -- uses ---------------------------------------------------------------------------------------------------------

    def all_make(self, use: str, at: Counts, *, withdraws: bool) -> bool:
        """Return whether all ranks now make the use of parameters that the words ``use`` name. If so, all ranks return
        True. Otherwise this rank is alone, and may send no message for the use that other ranks would have to join.
        ``at``: counts of changes of masters and of backwards. With ``withdraws`` False, raises StallError if the other
        ranks do not come."""
        if self._group is None:
            return True
        if self._uses_since != at:
            self._uses, self._uses_since = Counter(), at
        self._uses[use] += 1
        if any(not work.is_completed() for work, *_ in self._withdrawn):
            at_once = withdraws and (use in self._known or at == self._alone_since)
            if at_once or not self._comes(self._withdrawn[-1][0], use, withdraws):
                return self._is_alone(use)
        # With the number of the use: at another point of the program the same words name another use.
        own = torch.tensor([zlib.crc32(f"{use} {at} {self._uses[use]}".encode())])
        while True:
            first, comes = self._send(own), False
            try:
                comes = self._comes(first[0], use, withdraws)
            finally:
                second = self._send(torch.tensor([int(comes)]))
                self._withdrawn = [] if comes else [first, second]
            if not comes:
                return self._is_alone(use)
            self._comm.waits.wait_work(second[0], use)
            if bool(second[1].all()):
                together = bool((first[1] == own).all())
                (self._known.discard if together else self._known.add)(use)
                return together
            # Some rank has withdrawn from another use, maybe long ago. It may come to this use.

    def _comes(self, message: Any, use: str, withdraws: bool) -> bool:
        if not withdraws:
            self._comm.waits.wait_work(message, use)
            return True
        return self._comm.waits.comes(message, use, KNOWN_S if use in self._known else PATIENCE_S)

    def _is_alone(self, use: str) -> bool:
        self._known.add(use)
        self._alone_since = self._uses_since
        return False

    def _send(self, own: Tensor) -> tuple[Any, Tensor, Tensor]:
        table = torch.empty(self._comm.world_size, dtype=own.dtype)
        return all_gather_single(table, own, group=self._group, async_op=True), table, own

    # -- shards -------------------------------------------------------------------------------------------------------

    def ask(self, ranks: Sequence[int], index: int, counts: Counts) -> Iterator[Tensor]:
        """Yield the shard [bytes] of bucket ``index`` of each of ``ranks``, on the host. Raises RuntimeError if a rank
        cannot answer."""
        number = self._store.add(f"{self._prefix}/numbers", 1) - 1
        self._store.set(f"{self._prefix}/{number}", json.dumps([self._comm.rank, list(ranks), index, *counts]))
        self._store.delete_key(f"{self._prefix}/{number - KEPT}")
        for rank in ranks:
            answers = -1
            while answers != number:  # after an error, answers to an earlier request may not have been received
                answers, failed, nbytes = self._receive(rank, 3 * 8).view(torch.int64).tolist()
                received = self._receive(rank, nbytes)
            if failed:
                raise RuntimeError(f"rank {rank}: {received.numpy().tobytes().decode()}")
            yield received

    def _receive(self, rank: int, nbytes: int) -> Tensor:
        data = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            work: Any = dist.irecv(data, group=self._group, group_src=rank, tag=TAG)
            work.wait(timedelta(seconds=2 * self._comm.waits.stall_timeout_s))
        return data

    def listen(self) -> None:
        """Start the thread that answers other ranks' requests, until the communicator is closed or this object is gone.
        After a run, too, slower ranks may ask."""
        if self._group is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._stop.clear()
        answer_s = ANSWER_S * max(1.0, self._comm.world_size / RANKS_AT_THIS_PACE)
        arguments, name = (ref(self), self._stop, answer_s), "lightning_zero-shards"
        self._thread = threading.Thread(target=_answer_requests, args=arguments, name=name, daemon=True)
        self._thread.start()
        self._comm.waits.call_at_end(partial(_end, self._stop, self._thread))

    def answer_next(self) -> bool:
        """Answer the next request, if there is any. Return whether there was."""
        number, key = self._answered, f"{self._prefix}/{self._answered}"
        if not self._store.check([key]):
            return False
        asker, ranks, index, *counts = json.loads(self._store.get(key))
        self._answered += 1
        if self._comm.rank in ranks:
            failed = False
            try:
                data = self._answer(index, tuple(counts)).view(torch.uint8)
            except Exception as error:
                failed, data = True, torch.frombuffer(bytearray(str(error).encode() or b"?"), dtype=torch.uint8)
            for part in (torch.tensor([number, failed, len(data)]).view(torch.uint8), *[data] * (len(data) > 0)):
                dist.send(part, group=self._group, group_dst=asker, tag=TAG)
        return True


def _answer_requests(reference: ReferenceType[OneSided], stop: threading.Event, answer_s: float) -> None:
    """Answer requests until ``stop`` is set. ``answer_s``: seconds between two looks for requests after a request."""
    last, pause_s = -ANSWERS_S, 0.0
    while not stop.wait(pause_s):
        if (own := reference()) is None:
            return
        try:
            while own.answer_next():
                last = time.monotonic()
        except RuntimeError:  # the store or the asking rank is gone
            return
        own = None  # a reference would keep the engine alive
        pause_s = answer_s if time.monotonic() - last < ANSWERS_S else max(answer_s, LISTEN_S)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    thread.join(2 * LISTEN_S)
