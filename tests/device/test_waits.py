"""Each place that orders streams, threads or the lifetime of memory is needed: without it there is a race."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.reduction import Pending
from lightning_zero.comm.transports import Members, PlainTransport, Sent, _reduce_scatter_single, all_gather_single
from lightning_zero.device.streams import Streams
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.grad_store import Claimed, _wait
from lightning_zero.engine.units.master_storage import copy_cast
from lightning_zero.engine.units.unit import Unit
from lightning_zero.tiers.pinned import Landing, ReadAhead, Sender
from tests.device.simulate import FLAT, Case, Step, loss_of
from tests.device.test_races import Trained, gathers, saves_and_loads, serves_others, steps_twice, trains_without_scopes

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


def gather_what_is_not_summed(self: Communicator, shard: Tensor, full: Tensor, levels: bool, whole: bool) -> Tensor:
    assert self._groups is not None
    full.view(self.shard.size, -1)[self.shard.index].copy_(shard)
    all_gather_single(full, full.view(self.shard.size, -1)[self.shard.index], group=self._groups.reduce, async_op=True)
    return full


def sum_nodes_elsewhere(self: Communicator, sums: Tensor) -> Sent:
    parts = torch.empty_like(sums)
    dist.all_to_all_single(parts, sums, group=self._groups.across, async_op=True)  # type: ignore[union-attr]
    return Sent([], lambda: parts.view(2, -1).sum(0))


def leave_at_once(self: Any) -> None:
    for kept in self._inputs:
        kept.device = None


def take_inputs_at_once(self: Any, kept: Any) -> Tensor:
    self.start_return()
    tensor, kept.device = kept.device, None
    return tensor  # type: ignore[no-any-return]


def sum_alone(self: Communicator, shard: Tensor, *, async_op: bool = True) -> None:
    issue_sum(self, shard, async_op=True)


def settle_once(self: Streams) -> Any:
    """What has been changed since the first gather is not waited for."""
    return self.__dict__.setdefault("_first", self.accelerator.record())


def serve_what_is_on_its_way(self: Unit) -> None:
    for bucket in self.resharded:
        bucket.comm.all_gather(bucket.full.data.clone(), bucket.label).wait()


def own_params_at_once(self: Bucket) -> Tensor:
    own = torch.empty(self.plan.owned_numel, dtype=self.dtypes.compute, device=self.comm.device)
    with self._transfers(into_free_memory=False):
        self.param_store.read(own)
    return own


def take_what_is_on_its_way(streams: Any, arrival: Any) -> None:
    """A gradient on its way to the host is taken for one that is there."""


def arrived_at_once(self: Claimed) -> tuple[Tensor | None, Tensor | None]:
    return self.grad, None


def multiplied_at_once(self: Claimed) -> tuple[Tensor | None, Tensor | None]:
    _wait(self.streams, self.arrival)
    return self.grad, None if self.factor is None else self.factor[0]


def land_at_once(self: Landing, piece: Any) -> None:
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


COMM, UNITS, PINNED = (f"lightning_zero.{name}." for name in ("comm", "engine.units", "tiers.pinned"))
STREAMS, PENDING = "lightning_zero.device.streams.Streams.", f"{COMM}reduction.Pending."
COMMUNICATOR = f"{COMM}communicator.Communicator."
TRANSPORT, STORAGE = f"{COMM}transports.PlainTransport.", f"{UNITS}master_storage."
GRADS, BUCKET = f"{UNITS}grad_store.", f"{UNITS}bucket.Bucket."
DEVICE, HOST, OFFLOADED, ALONE = Case(), Case(3, "optimizer_cpu"), Case(3, "cpu"), Case(3, "optimizer_cpu", ranks=1)
CLIPPED, EAGER = (Step(clips=True),) * 3, Case(3, "cpu", worker="eager")
EVALUATES = Case(1, "optimizer_cpu", steps=(Step(evaluates=True),) * 3, worker="eager")
LEVELS = Case(3, precision="bf16", nodes=2, settings=FLAT)
RECOMPUTES = Case(blocks=6, settings={"activation_checkpointing": "offload"})
INPUTS = "lightning_zero.engine.passes.recompute._InputsOfBlock."
LOOKS, CLIPS, ADDS, UNFILLED = (
    replace(HOST, steps=steps) for steps in ((Step(2), Step(looks=True)), CLIPPED, (Step(2),) * 2, ())
)

# What must wait: the function that sees to it, what stands in its place, a case, and what is done behind its steps.
WITHOUT: dict[str, tuple[Any, ...]] = {
    "a stream, for what has been queued": (STREAMS + "on", on_without_waiting, DEVICE),
    "a gather, for those who used its memory": (STREAMS + "give_back", do_not_wait, DEVICE),
    "a copy to the device, for those who used its memory": (STREAMS + "give_back", do_not_wait, OFFLOADED),
    "a gather, for the step of what it sends": (STREAMS + "change_event", settle_once, DEVICE, trains_without_scopes),
    "gathers, for a change of what they send": (STREAMS + "change", do_not_wait, DEVICE, trains_without_scopes),
    "a push, for readers of what it overwrites": (STREAMS + "on", on_without_its_event, EVALUATES),
    "memory, for the copy to the host": (STREAMS + "hold", hold_nothing, ALONE),
    "memory, until the end of the copy to the host": (STREAMS + "hold", hold_without_waiting, ALONE),
    "compute, for gathers": (PENDING + "_wait_event", forget_the_event, DEVICE),
    "compute, for reductions": (PENDING + "_wait_event", forget_the_event, Case(1)),
    "compute, for copies where nothing is sent": (PENDING + "_wait_event", forget_the_event, Case(3, "cpu", ranks=1)),
    "what is reduced, until it is": (PENDING + "__setattr__", keep_nothing, DEVICE),
    "the gather's stream, for its message": (TRANSPORT + "gather", gather_elsewhere, DEVICE),
    "the reduction's stream, for its message": (TRANSPORT + "reduce", reduce_elsewhere, DEVICE),
    "compute, for the sum of a norm": (COMMUNICATOR + "_run", run_without_waiting, Case(steps=CLIPPED)),
    "the second half of an all-reduce": (COMMUNICATOR + "_rest_in_stream", gather_what_is_not_summed, Case(0)),
    "the sum over the nodes": (COMMUNICATOR + "_issue_sum", sum_alone, Case(3, nodes=2)),
    "the sum over nodes, for those within them": (COMMUNICATOR + "_sum_nodes", sum_nodes_elsewhere, LEVELS),
    "inputs of a block, for their copy to the host": (INPUTS + "free_copied", leave_at_once, RECOMPUTES),
    "a block that is computed again, for its inputs": (INPUTS + "unpack", take_inputs_at_once, RECOMPUTES),
    "others, for a unit arriving here": (UNITS + "unit.Unit.serve", serve_what_is_on_its_way, DEVICE, serves_others),
    "a comparison, for own parameters": (BUCKET + "own_compute_params", own_params_at_once, HOST, writes_weights),
    "whoever looks at a gradient": (GRADS + "_wait", take_what_is_on_its_way, LOOKS),
    "a step, for its gradient": (GRADS + "Claimed.arrived", arrived_at_once, HOST),
    "a step, for what its gradient is multiplied by": (GRADS + "Claimed.arrived", multiplied_at_once, CLIPS),
    "a sum, for a second gradient": (PINNED + "Landing._land", land_at_once, ADDS),
    "files, for a buffer that is free": (
        PINNED + "Sender.send",
        send_through_what_is_in_use,
        Case(3, "optimizer_nvme"),
    ),
    "files, for memory that is free": (PINNED + "ReadAhead._give_back", read_into_what_is_in_use, Case(3, "nvme")),
    "a gather, for what a step has sent": (BUCKET + "_transfers", transfers_at_once, HOST),
    "others, for a push": (BUCKET + "_send", push_unseen, HOST),
    "a write of masters, for a push": (STORAGE + "HostStorage.read_until", read_unseen, HOST, steps_twice),
    "a load of masters, for a push": (STORAGE + "HostStorage.read_until", read_unseen, HOST, saves_and_loads),
    "gathered masters, for a push": (STORAGE + "HostStorage.read_until", read_unseen, HOST, gathers),
    "a step of masters, for a gather": (STORAGE + "HostStorage.read_until", read_unseen, OFFLOADED),
    "a gather, for the step of its bucket": (UNITS + "bucket.AwaitedStep.wait", do_not_wait, EAGER),
    "the host, for its masters to be filled": (STORAGE + "copy_cast", fill_without_waiting, UNFILLED, loads),
}

BY_DEFAULT = list(WITHOUT)[::3]  # some of each kind


@pytest.mark.mainly(lambda what: what in BY_DEFAULT)
@pytest.mark.parametrize("what", WITHOUT)
def test_without_its_wait_there_is_a_race(what: str, trained: Trained) -> None:
    target, new, case, *then = WITHOUT[what]
    options = {"then": then[0]} if then else {}
    assert not trained(case, **options).races
    assert trained(case, [(target, new)], **options).races
