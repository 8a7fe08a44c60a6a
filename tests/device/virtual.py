"""The machine of ``machine.py`` in the place of a GPU. Its device is torch's "meta": tensors without values, whose
shapes, storages and devices are real, so that the engine takes the ways that it takes on CUDA.

What an operator reads and writes is read from its schema. Copies follow torch's own rules for CUDA
(``copy_kernel_cuda``): one that casts does so on the device if it does not block, and on the host if it does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_zero.device
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.engine.units.after_step import StepWorker
from lightning_zero.tiers.nvme import NvmeTier
from tests.device.machine import Copy, Machine, is_on_device, nbytes_of, place

aten = torch.ops.aten


class Virtual(Accelerator):
    """The machine, as the engine sees it. Streams and events are numbers."""

    has_streams = True

    def __init__(self, device: torch.device, machine: Machine) -> None:
        super().__init__(device)
        self._machine = machine
        self._streams = itertools.count()

    def new_stream(self) -> int:
        return self._machine.new_stream(f"stream {next(self._streams)}")

    def current_stream(self) -> int:
        return self._machine.here.stream

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[int]:
        here = self._machine.here
        before, here.stream = here.stream, stream
        try:
            yield stream
        finally:
            here.stream = before

    def record(self) -> int:
        machine = self._machine
        machine.used_here()
        machine.tally.recorded[place().function] += 1
        return machine.event_of(machine.here.stream)

    def wait(self, event: int) -> None:
        self._machine.tally.waited[place().function] += 1
        self._machine.wait(self._machine.here.stream, event)

    def is_over(self, event: int) -> bool:
        """Never: the worst case is a device that is far behind."""
        return False

    def wait_on_host(self, event: int) -> None:
        self._machine.host_waits("event", events=[event])

    def synchronize(self) -> None:
        self._machine.host_waits("synchronize", parties=self._machine.order.parties())

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        tensor = super().host_memory(shape, dtype)
        self._machine.pin(tensor, minded=True)
        return tensor

    def pin(self, memory: Tensor) -> None:
        self._machine.pin(memory, minded=False)

    def unpin(self, memory: Tensor) -> None:
        self._machine.unpin(memory)

    def bind_thread(self) -> None:
        self._machine.here.bound = True


# -- kernels ----------------------------------------------------------------------------------------------------------

_FACTORY = re.compile(r"aten::(new_.*|.*_like|empty.*|zeros|ones|full|arange|scalar_tensor)$")


class Signature(NamedTuple):
    """What an operator does to its arguments: their names in order, those that it reads, and those that it writes.

    Attributes:
        fills: its new outputs are written.
        new: all its outputs are new memory.
        in_place: the argument that is its only output, where it has no other; or "" where it has no output.
    """

    order: tuple[str, ...]
    reads: set[str]
    writes: set[str]
    fills: bool
    new: bool
    in_place: str | None


@functools.cache
def signature_of(operator: Any) -> Signature:
    schema = operator._schema
    factory = _FACTORY.match(schema.name) is not None
    aliases = {argument.name: argument.alias_info for argument in schema.arguments}
    writes = {name for name, alias in aliases.items() if alias is not None and alias.is_write}
    reads = {name for name, alias in aliases.items() if alias is None and not factory}  # what is viewed is not read
    new = [result.alias_info is None for result in schema.returns]
    in_place = "" if not new else next(iter(writes)) if len(writes) == len(new) == 1 and not new[0] else None
    fills = any(new) and "empty" not in schema.name
    return Signature(tuple(aliases), reads, writes, fills, bool(new) and all(new), in_place)


def tensors_in(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [inner for inner in value if isinstance(inner, Tensor)]
    return ()


_ONLY_LOOK = {aten.is_same_size.default, aten._has_compatible_shallow_copy_type.default}

_MAKERS: dict[Any, Callable[[], Any]] = {}


def on_shapes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator gives on the device. torch's kernels for "meta" are mostly slow Python: each is asked once."""
    signature = signature_of(func)
    if signature.in_place is not None:
        named = dict(zip(signature.order, args, strict=False)) | kwargs
        # There are no values to change, unless tensors of the host are written.
        if all(is_on_device(t) for name in signature.writes for t in tensors_in(named[name])):
            return named[signature.in_place] if signature.in_place else None
    if signature.in_place is not None or not signature.new:
        return func(*args, **kwargs)
    key = (func, _key(args), _key(tuple(kwargs.items())))
    make = _MAKERS.get(key)
    if make is not None:
        return make()
    result = func(*args, **kwargs)
    if isinstance(result, Tensor) or all(isinstance(r, Tensor) for r in result):
        _MAKERS[key] = _maker_of(result)
    return result


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


def _maker_of(result: Any) -> Callable[[], Any]:
    if not isinstance(result, Tensor):
        makers = [_maker_of(r) for r in result]
        return lambda: tuple(make() for make in makers)
    shape = result.shape, result.stride()
    return functools.partial(torch.empty_strided, *shape, dtype=result.dtype, device=result.device)


class Watch(TorchDispatchMode):
    """Tells the machine of every operator of this thread."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten" or func in _ONLY_LOOK:
            return func(*args, **kwargs)  # of collectives we hear elsewhere
        if func is aten.copy_.default and is_on_device(args[0]) != is_on_device(args[1]):
            self._copy(args[0], args[1], blocks=not (args[2:] and args[2]) and not kwargs.get("non_blocking"))
            return args[0]
        if func is aten._to_copy.default and is_on_device(args[0]) != _goes_to_device(args[0], kwargs):
            return self._new_copy(args[0], kwargs)
        if func is aten._local_scalar_dense.default and is_on_device(args[0]):
            return self._value(args[0])
        if func is aten.record_stream.default:
            raise NotImplementedError("the machine does not know record_stream")
        on_device = any(is_on_device(t) for arg in args for t in tensors_in(arg))
        result = on_shapes(func, args, kwargs) if on_device else func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        signature = signature_of(func)
        given = [*zip(signature.order, args, strict=False), *kwargs.items()]
        reads = [t for name, value in given if name in signature.reads for t in tensors_in(value)]
        writes = [t for name, value in given if name in signature.writes for t in tensors_in(value)]
        outputs = [t for t in tensors_in(result) if all(t is not known for known in writes)]
        if signature.fills:
            writes += outputs
        else:
            for output in filter(is_on_device, outputs):  # new memory that nobody has written to
                self._machine.block_of(output)
        if any(map(is_on_device, (*reads, *writes))):
            self._machine.kernel(str(func), reads, writes)
        elif reads or writes:
            self._machine.on_host(str(func), reads, writes)

    def _value(self, tensor: Tensor) -> Any:
        machine = self._machine
        stream = machine.kernel("a read of one value", [tensor], [])
        machine.host_waits("a value", parties=[stream])
        return torch.ones((), dtype=tensor.dtype).item()  # there is no value: one that is finite, and true

    def _new_copy(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        dtype = kwargs.get("dtype") or source.dtype
        blocks = not kwargs.get("non_blocking")
        if is_on_device(source):
            target = torch.zeros(source.shape, dtype=dtype)  # what stands on the host for values that are nowhere
            if not blocks:
                self._machine.pin(target, minded=True)  # torch gives such copies pinned memory
        else:
            target = torch.empty(source.shape, dtype=dtype, device="meta")
        self._copy(target, source, blocks=blocks)
        return target

    def _copy(self, target: Tensor, source: Tensor, *, blocks: bool) -> None:
        machine = self._machine
        to_host = is_on_device(source)
        host = target if to_host else source
        pinned = machine.block_of(host) is not None
        casts = target.dtype != source.dtype
        waits = blocks or not pinned
        copy = Copy(place().function, to_host, waits)
        machine.tally.copies[copy] += 1
        machine.tally.copied[copy] += nbytes_of(target if blocks == to_host else source)
        if casts and not blocks:
            machine.scratch(nbytes_of(target if to_host else source))
        what = "a copy to the host" if to_host else "a copy to the device"
        on_host = casts and blocks  # then the cast, and so the host's side of it, is the host's
        if to_host:
            stream = machine.kernel(what, [source], [] if on_host else [target])
        else:
            if on_host or not pinned:
                machine.on_host("a cast", [source], [])
            stream = machine.kernel(what, [] if on_host or not pinned else [source], [target])
        if blocks or (to_host and not pinned):
            machine.host_waits("a copy", parties=[stream])
        elif not pinned:
            machine.host_waits("a copy of pageable memory")  # it is staged: the host does not hear of its end
        if to_host and on_host:
            machine.on_host("a cast", [], [target])


def _goes_to_device(source: Tensor, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return is_on_device(source) if device is None else torch.device(device).type == "meta"


# -- collectives ------------------------------------------------------------------------------------------------------


class QueuedWork:
    """A collective under way on a stream of its group. Its tensors are kept until somebody waits, as NCCL's are."""

    def __init__(self, machine: Machine, event: int | None, tensors: Sequence[Tensor]) -> None:
        self._machine, self._event = machine, event
        self._tensors: Sequence[Tensor] = tensors

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits, not the host."""
        if self._event is not None:
            self._machine.wait(self._machine.here.stream, self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return False


# Methods of a process group that write their first argument and read their second. The other two do both to the first.
_TO_ANOTHER = ("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced")
_TO_ANOTHER += ("allgather", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter")
_TO_ANOTHER += ("alltoall_base", "all_to_all_single")
_COLLECTIVES = {"allreduce": 0, "broadcast": 0} | dict.fromkeys(_TO_ANOTHER, 1)  # which argument is read
_ON_DEVICE = ("gather", "reduce", "second half", "replicate")  # ends of the names of groups that NCCL serves alone


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for inner in value for t in _flat(inner)]


class Groups:
    """Process groups, each with a stream of its own on the device."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._streams: dict[str, int] = {}

    def collective(self, method: Callable[..., Any], group: Any, *args: Any, name: str) -> Any:
        writes, reads = _flat(args[0]), _flat(args[_COLLECTIVES[name]])
        if not any(map(is_on_device, (*writes, *reads))):
            if group.group_desc.endswith(_ON_DEVICE):
                raise RuntimeError(f"{name}: no backend of this group serves tensors of the host")
            return method(group, *args)
        if "coalesced" not in name:  # torch's fake group has none for the device
            method(group, *args)
        return self._queue(group, name, reads, writes, asynchronous=getattr(args[-1], "asyncOp", True))

    def _queue(
        self, group: Any, name: str, reads: list[Tensor], writes: list[Tensor], *, asynchronous: bool
    ) -> QueuedWork:
        machine, title = self._machine, group.group_desc.removeprefix("lightning_zero: ")
        machine.tally.collectives[title, name] += 1
        if "gather" in name:
            machine.tally.messages.update((title, "gather", write.nbytes) for write in writes)
        elif "scatter" in name:
            machine.tally.messages.update((title, "reduce", read.dtype, read.nbytes) for read in reads)
        else:  # a ring, or pairs of ranks, or one of a few numbers
            machine.tally.messages[title, name] += 1
        if not asynchronous:
            machine.kernel(name, reads, writes)
            return QueuedWork(machine, None, ())
        if title not in self._streams:
            self._streams[title] = machine.new_stream(f"NCCL's stream of {title!r}")
        machine.kernel(name, reads, writes, party=self._streams[title])
        # Of NCCL itself: its stream waits for this one, and later this one for it.
        machine.tally.recorded[place().function] += 2
        machine.tally.waited[place().function] += 2
        return QueuedWork(machine, machine.event_of(self._streams[title]), (*reads, *writes))


# -- threads ----------------------------------------------------------------------------------------------------------


class SeenLock:
    """A lock: who takes it comes after who gave it back."""

    def __init__(self, machine: Machine, lock: Any) -> None:
        self._machine, self._lock = machine, lock
        self._event: int | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got: bool = self._lock.acquire(blocking, timeout)
        if got and self._event is not None:
            self._machine.wait(self._machine.thread(), self._event, timed=False)
        return got

    def release(self) -> None:
        self._event = _now(self._machine)
        self._lock.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _now(machine: Machine) -> int:
    """An event behind what this thread has done and seen."""
    return machine.event_of(machine.thread())


_EVENT = "_virtual_event"
_OF_DISK = "_virtual_of_disk"
Pace = Literal["eager", "lazy"]


def _is_under_way(future: Future[None] | None) -> bool:
    """Looked up so that whoever asks does not thereby come after what was done: ``Future.done`` would be a way."""
    return future is not None and future._state not in ("FINISHED", "CANCELLED")


class Threads:
    """Who comes after whom among threads, and when the thread of offloaded steps gets on: a case is the same each time.

    Streams are first in, first out: how two threads take turns decides what is queued behind what. ``eager``: whoever
    asks for steps goes on when they are over. ``lazy``: the next step begins when the main thread waits for one.

    Methods that are called with a method stand around it.
    """

    LIMIT_S = 60.0

    def __init__(self, machine: Machine, pace: Pace) -> None:
        self._machine, self._pace = machine, pace
        self._main = threading.get_ident()
        self._changed = threading.Condition(threading.RLock())
        self._awaited: Any = None  # the future or thread that the main thread waits for
        self._here = threading.local()

    def _leave(self, source: Any, event: int | None = None) -> None:
        """Whoever finds the object done comes after ``event``, or after this thread."""
        source.__dict__.setdefault(_EVENT, []).append(_now(self._machine) if event is None else event)

    def _follow(self, *events: int) -> None:
        for event in events:
            self._machine.wait(self._machine.thread(), event)

    def is_done(self, method: Callable[..., None], source: Any, *args: Any) -> None:
        """A future: if the main thread waits for it, that goes on, and the worker must not."""
        self._leave(source)
        with self._changed:
            if self._awaited is source:
                self._awaited = None
        method(source, *args)
        self._pause()

    def find(self, method: Callable[..., Any], source: Any, *args: Any, **kwargs: Any) -> Any:
        """A future or a thread, after a wait."""
        waits = threading.get_ident() == self._main and not hasattr(source, _OF_DISK)
        try:
            if waits:
                self._wait_for(source)
            answer = method(source, *args, **kwargs)
            if waits:
                self._wait_for(None)
        finally:
            if source.done() if isinstance(source, Future) else not source.is_alive():
                self._follow(*source.__dict__.get(_EVENT, ()))
        return answer

    def _wait_for(self, source: Any) -> None:
        with self._changed:
            self._awaited = source
            self._changed.notify_all()

    def find_done(self, done: Callable[[Any], bool], source: Any) -> bool:
        if is_done := done(source):
            self._follow(*source.__dict__.get(_EVENT, ()))
        return is_done

    def start(self, start: Callable[[Any], None], thread: Any) -> None:
        """It comes after who has started it, and its operators are seen."""
        run, event = thread.run, _now(self._machine)

        def seen() -> None:
            self._follow(event)
            try:
                with Watch(self._machine):
                    run()
            finally:
                self._leave(thread)

        thread.run = seen
        start(thread)

    def hand_over(self, submit: Callable[..., Any], pool: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        event = _now(self._machine)

        def seen() -> Any:
            self._follow(event)
            return function(*args, **kwargs)

        return submit(pool, seen)

    def stage(self, stage: Callable[..., Any], tier: Any, extent: Any, tensor: Tensor, *, write: bool) -> Future[Any]:
        """The disk has a tensor from the moment that it is staged until the future is done."""
        what = "a write to a file" if write else "a read of a file"
        event = self._machine.on_disk(what, tensor, writes=not write)
        future = stage(tier, extent, tensor, write=write)
        self._leave(future, event)
        setattr(future, _OF_DISK, True)
        return future

    def _pause(self) -> None:
        """The worker has ended a step. It goes on when the main thread waits again."""
        if self._pace == "lazy" and getattr(self._here, "is_worker", False):
            with self._changed:
                if not self._changed.wait_for(lambda: self._awaited is not None, self.LIMIT_S):
                    raise RuntimeError("nobody waits for the steps")

    def take_a_step(self, take: Callable[..., Any], worker: Any, **options: Any) -> Any:
        if not getattr(self._here, "is_worker", False):
            self._here.is_worker = True
            self._pause()
        return take(worker, **options)

    def ask_for_steps(self, submit: Callable[..., None], worker: Any, jobs: Iterable[Any], event: Any) -> None:
        jobs = list(jobs)
        submit(worker, jobs, event)
        deadline = time.monotonic() + self.LIMIT_S
        while self._pace == "eager" and any(_is_under_way(job.bucket.awaited_step.future) for job in jobs):
            if time.monotonic() > deadline:
                raise RuntimeError("the steps do not end")
            time.sleep(0.0002)


# -- all of it --------------------------------------------------------------------------------------------------------


def _around(target: Any, name: str, new: Callable[..., Any]) -> Any:
    """Patches a method: ``new`` is called with it, and its arguments."""
    method = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return new(method, *args, **kwargs)

    return mock.patch.object(target, name, call)


@contextlib.contextmanager
def simulated(machine: Machine, pace: Pace = "lazy") -> Iterator[None]:
    """Inside, the device "meta" is ``machine``. Its threads must have ended when it is left."""
    lock = threading.Lock  # the real one
    threads, groups = Threads(machine, pace), Groups(machine)

    def resize_(resize: Any, storage: Any, nbytes: int) -> Any:
        on_device = storage.device.type == "meta"
        if on_device and nbytes == 0:
            machine.resized(storage, nbytes)
        result = resize(storage, nbytes)
        if on_device and nbytes:
            machine.resized(storage, nbytes)
        return result

    patches = [
        mock.patch.object(threading, "Lock", lambda: SeenLock(machine, lock())),
        mock.patch.dict(lightning_zero.device._KINDS, {"meta": functools.partial(Virtual, machine=machine)}),
        _around(torch.UntypedStorage, "resize_", resize_),
        _around(threading.Thread, "start", threads.start),
        _around(threading.Thread, "join", threads.find),
        _around(ThreadPoolExecutor, "submit", threads.hand_over),
        _around(Future, "set_result", threads.is_done),
        _around(Future, "set_exception", threads.is_done),
        _around(Future, "result", threads.find),
        _around(Future, "exception", threads.find),
        _around(Future, "done", threads.find_done),
        _around(StepWorker, "_next_job", threads.take_a_step),
        _around(StepWorker, "submit", threads.ask_for_steps),
        _around(NvmeTier, "_stage", threads.stage),
    ]
    for name in _COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            patches.append(_around(dist.ProcessGroup, name, functools.partial(groups.collective, name=name)))
    with contextlib.ExitStack() as stack:
        for patch in (*patches, Watch(machine)):
            stack.enter_context(patch)
        yield
