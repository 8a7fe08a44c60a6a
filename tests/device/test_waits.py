"""Each place that orders streams, threads or the lifetime of memory is needed: without it there is a race."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.reduction import Pending
from lightning_zero.comm.streams import Streams
from lightning_zero.comm.transports import Members, PlainTransport, Sent, _reduce_scatter_single, all_gather_single
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.grad_store import Arrived, Claimed, Landing, _wait
from lightning_zero.engine.units.master_storage import copy_cast
from lightning_zero.engine.units.unit import Unit
from lightning_zero.tiers.pinned import ReadAhead, Sender
from tests.device.simulate import Case, Found, Step, loss_of
from tests.device.test_races import (
    Trained,
    gathers,
    saves_and_loads,
    serves_others,
    steps_twice,
    trains_without_scopes,
)

issue_sum = Communicator._issue_sum

# What stands in the place of a function of the package; it has the same arguments.


@contextlib.contextmanager
def on_without_waiting(self: Streams, kind: str, *, after: Any = None) -> Iterator[Any]:
    """It waits for the event that it is given, and for none by itself."""
    with self.accelerator.on(self._streams[kind]):
        self.wait(after)
        yield self._streams[kind]


@contextlib.contextmanager
def on_without_its_event(self: Streams, kind: str, *, after: Any = None) -> Iterator[Any]:
    """It waits for none that it is given."""
    event = self.accelerator.record()
    with self.accelerator.on(self._streams[kind]):
        if after is None:
            self.wait(event)
        yield self._streams[kind]


def hold_nothing(self: Streams, memory: Any, event: Any) -> None: ...


def hold_without_waiting(self: Streams, memory: Any, event: Any) -> None:
    """The oldest is let go when there are too many, whether it is still read or not."""
    self._held.append((event, memory))
    if len(self._held) > 1:
        self._held.popleft()


def forget_the_event(self: Pending) -> None:
    self.event = None


def keep_nothing(self: Pending, name: str, value: Any) -> None:
    object.__setattr__(self, name, None if name == "keep" else value)


def run_without_waiting(self: Communicator, send: Callable[..., Any], tensor: Tensor, kind: str, label: str) -> None:
    """Nobody waits for the message."""
    with self.streams.on(kind):
        send(async_op=False)


def gather_elsewhere(self: PlainTransport, full: Tensor, among: Members) -> Sent:
    """The message is queued on a stream of NCCL's own, for which nobody waits."""
    all_gather_single(full, full.view(among.size, -1)[among.rank], group=among.group, async_op=True)
    return Sent([], lambda: full)


def reduce_elsewhere(self: PlainTransport, full: Tensor, among: Members, **options: Any) -> Sent:
    out = full.new_empty(full.numel() // among.size)
    _reduce_scatter_single(out, full, group=among.group, async_op=True)
    return Sent([], lambda: out)


def gather_what_is_not_summed(self: Communicator, shard: Tensor, full: Tensor, label: str, whole: bool) -> Tensor:
    assert self._groups is not None
    full.view(self.shard_size, -1)[self.shard_rank].copy_(shard)
    all_gather_single(full, full.view(self.shard_size, -1)[self.shard_rank], group=self._groups.reduce, async_op=True)
    return full


def sum_alone(self: Communicator, shard: Tensor, *, async_op: bool = True) -> None:
    issue_sum(self, shard, async_op=True)


def settle_once(self: Streams) -> Any:
    """What has been changed since the first gather is not waited for."""
    return self.__dict__.setdefault("_first", self.accelerator.record())


def serve_what_is_on_its_way(self: Unit) -> None:
    for bucket in self.resharded:
        bucket.comm.all_gather(bucket.full.data.clone(), bucket.label).wait()


def own_params_at_once(self: Bucket) -> Tensor:
    own = torch.empty(self.owned_numel, dtype=self.dtypes.compute, device=self.comm.device)
    with self._transfers(into_free_memory=False):
        self.param_store.read(own)
    return own


def take_what_is_on_its_way(streams: Any, arrival: Any) -> None:
    """A gradient on its way to the host is taken for one that is there."""


def arrived_at_once(self: Claimed) -> Arrived:
    return Arrived(self.grad, None)


def multiplied_at_once(self: Claimed) -> Arrived:
    _wait(self.streams, self.arrival)
    return Arrived(self.grad, None if self.factor is None else self.factor.value)


def land_at_once(self: Landing, piece: Any) -> None:
    """What has not come yet is added."""
    if piece is not None:
        piece[2].add_(piece[1])


def send_through_what_is_in_use(self: Sender, source: Tensor, target: Tensor) -> None:
    self._sent = [None, None]
    buffer = self.buffer(0, target.dtype, source.numel())
    buffer.copy_(source)
    target.copy_(buffer, non_blocking=True)


def read_into_what_is_in_use(self: ReadAhead, place: int, event: Any) -> None:
    self._free.append((place, None))


def push_unseen(self: Bucket, target: Tensor) -> None:
    """Nobody knows when what it sends has arrived."""
    with self.comm.streams.on("push", after=self.awaited_step.event):
        self.storage.copy_to(target)


def read_unseen(self: Any, event: Any) -> None:
    """A storage does not know that its master is read."""


@contextlib.contextmanager
def transfers_at_once(self: Bucket, *, into_free_memory: bool) -> Iterator[None]:
    """What the last step has sent may not have arrived."""
    with self.comm.streams.on("h2d"):
        yield


def do_not_wait(self: Any) -> None: ...


def fill_without_waiting(source: Tensor, target: Tensor) -> None:
    if target.device.type == "cpu":
        target.copy_(source, non_blocking=True)
    else:
        copy_cast(source, target)


def loads(engine: Any, model: nn.Module, optimizer: Any) -> None:
    engine.load_state_dict({name: torch.zeros(param.shape) for name, param in model.named_parameters()})


def writes_weights(engine: Any, model: Any, optimizer: Any) -> None:
    """Inside of a pass, where parameters hold compute values: the masters take over those that differ."""
    with engine.step_scope():
        with torch.no_grad():
            model.head.weight.mul_(2)
        engine.passes.backward(loss_of(model))
    optimizer.step()
    optimizer.zero_grad()


STREAMS = "lightning_zero.comm.streams.Streams."
PENDING = "lightning_zero.comm.reduction.Pending."
TRANSPORT = "lightning_zero.comm.transports.PlainTransport."
GRADS = "lightning_zero.engine.units.grad_store."
BUCKET = "lightning_zero.engine.units.bucket.Bucket."
HOST = Case(3, "optimizer_cpu")
ALONE = Case(3, "optimizer_cpu", ranks=1)
CLIPPED = (Step(clips=True),) * 3
EVALUATES = (Step(evaluates=True),) * 3

WITHOUT: dict[str, tuple[str, Any, Case, Any]] = {
    "a stream waits for what has been queued": (STREAMS + "on", on_without_waiting, Case(), None),
    "a gather waits for those who used its memory": (STREAMS + "give_back", do_not_wait, Case(), None),
    "a copy to the device waits for those who used its memory": (
        STREAMS + "give_back",
        do_not_wait,
        Case(3, "cpu"),
        None,
    ),
    "a gather waits for the step of what it sends": (STREAMS + "settled", settle_once, Case(), trains_without_scopes),
    "a step tells that it has changed what gathers send": (
        STREAMS + "change",
        do_not_wait,
        Case(),
        trains_without_scopes,
    ),
    "a push waits for readers of what it overwrites": (
        STREAMS + "on",
        on_without_its_event,
        Case(1, "optimizer_cpu", steps=EVALUATES, worker="eager"),
        None,
    ),
    "memory is held for the copy to the host": (
        STREAMS + "hold",
        hold_nothing,
        Case(3, "optimizer_cpu", ranks=1),
        None,
    ),
    "memory is held as long as the copy takes": (
        STREAMS + "hold",
        hold_without_waiting,
        ALONE,
        None,
    ),
    "compute waits for gathers": (PENDING + "_wait_event", forget_the_event, Case(), None),
    "compute waits for reductions": (PENDING + "_wait_event", forget_the_event, Case(1), None),
    "compute waits for copies where nothing is sent": (
        PENDING + "_wait_event",
        forget_the_event,
        Case(3, "cpu", ranks=1),
        None,
    ),
    "what is reduced is kept": (PENDING + "__setattr__", keep_nothing, Case(), None),
    "the gather's stream waits for its message": (TRANSPORT + "gather", gather_elsewhere, Case(), None),
    "the reduction's stream waits for its message": (TRANSPORT + "reduce", reduce_elsewhere, Case(), None),
    "compute waits for the sum of a norm": (
        "lightning_zero.comm.communicator.Communicator._run",
        run_without_waiting,
        Case(steps=CLIPPED),
        None,
    ),
    "the second half of an all-reduce is waited for": (
        "lightning_zero.comm.communicator.Communicator._rest_in_stream",
        gather_what_is_not_summed,
        Case(0),
        None,
    ),
    "the sum over the nodes is waited for": (
        "lightning_zero.comm.communicator.Communicator._issue_sum",
        sum_alone,
        Case(3, nodes=2),
        None,
    ),
    "a unit that others need has arrived here": (
        "lightning_zero.engine.units.unit.Unit.serve",
        serve_what_is_on_its_way,
        Case(),
        serves_others,
    ),
    "own parameters have been brought before they are compared": (
        BUCKET + "own_compute_params",
        own_params_at_once,
        HOST,
        writes_weights,
    ),
    "whoever looks at a gradient waits": (
        GRADS + "_wait",
        take_what_is_on_its_way,
        Case(3, "optimizer_cpu", steps=(Step(2), Step(looks=True))),
        None,
    ),
    "a step waits for its gradient": (GRADS + "Claimed.arrived", arrived_at_once, HOST, None),
    "a step waits for what its gradient is multiplied by": (
        GRADS + "Claimed.arrived",
        multiplied_at_once,
        Case(3, "optimizer_cpu", steps=CLIPPED),
        None,
    ),
    "a second gradient is added when it is there": (
        "lightning_zero.engine.units.grad_store.Landing._land",
        land_at_once,
        Case(3, "optimizer_cpu", steps=(Step(2),) * 2),
        None,
    ),
    "masters in files are sent through a buffer that is free": (
        "lightning_zero.tiers.pinned.Sender.send",
        send_through_what_is_in_use,
        Case(3, "optimizer_nvme"),
        None,
    ),
    "files are read into memory that is free": (
        "lightning_zero.tiers.pinned.ReadAhead._give_back",
        read_into_what_is_in_use,
        Case(3, "nvme"),
        None,
    ),
    "a gather waits for what a step has sent": (BUCKET + "_transfers", transfers_at_once, HOST, None),
    "a push can be waited for": (BUCKET + "_send", push_unseen, HOST, None),
    "masters are not written while a push reads them": (
        "lightning_zero.engine.units.master_storage.HostStorage.read_until",
        read_unseen,
        Case(3, "optimizer_cpu"),
        steps_twice,
    ),
    "masters are not loaded while a push reads them": (
        "lightning_zero.engine.units.master_storage.HostStorage.read_until",
        read_unseen,
        Case(3, "optimizer_cpu"),
        saves_and_loads,
    ),
    "masters are not gathered back while a push reads them": (
        "lightning_zero.engine.units.master_storage.HostStorage.read_until",
        read_unseen,
        Case(3, "optimizer_cpu"),
        gathers,
    ),
    "masters are not stepped while a gather reads them": (
        "lightning_zero.engine.units.master_storage.HostStorage.read_until",
        read_unseen,
        Case(3, "cpu"),
        None,
    ),
    "a gather waits for the step of its bucket": (
        "lightning_zero.engine.units.bucket.AwaitedStep.wait",
        do_not_wait,
        Case(3, "cpu", worker="eager"),
        None,
    ),
    "masters on the host are filled": (
        "lightning_zero.engine.units.master_storage.copy_cast",
        fill_without_waiting,
        Case(3, "optimizer_cpu", steps=()),
        loads,
    ),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_without_it_there_is_a_race(what: str, trained: Trained) -> None:
    target, new, case, then = WITHOUT[what]
    assert_no_race(trained(case, then=then))
    assert trained(case, [(target, new)], then=then).races


def assert_no_race(found: Found) -> None:
    assert not found.races
