"""What torch's ``fully_shard`` queues in one step, counted as :mod:`tests.device.machine` counts what ours does.

It runs on the host, as one rank of torch's fake process group. There its streams and events are objects that do
nothing, so the calls on them can be counted. Operators count where code below ``torch/distributed`` asks for them.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device.machine import Counts
from tests.device.simulate import Model, world
from tests.device.virtual import signature_of, tensors_in

DISTRIBUTED = str(Path(str(dist.__file__)).parent) + "/"
STEPS = 3


def _is_theirs() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(DISTRIBUTED):
            return True
        frame = frame.f_back
    return False


class Watch(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        signature = signature_of(func)
        if func.namespace not in ("aten", "fsdp") or not _is_theirs():
            return result
        given = {id(t) for t in itertools.chain.from_iterable(map(tensors_in, (*args, *kwargs.values())))}
        fresh = [t for t in tensors_in(result) if id(t) not in given] if signature.new else []
        storages = {t.untyped_storage()._cdata for t in fresh if t.untyped_storage().nbytes()}
        self._counts.allocations += len(storages)
        if signature.writes or (signature.fills and fresh) or func.namespace == "fsdp":
            self._counts.kernels += 1
        return result


@contextlib.contextmanager
def counted(counts: Counts) -> Iterator[None]:
    def calls(kind: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            setattr(counts, kind, getattr(counts, kind) + 1)
            return torch.cpu.Event()

        return call

    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, nbytes: int) -> Any:
        counts.allocations += nbytes > 0
        return resize(storage, nbytes)

    def message(method: Any) -> Any:
        def send(group: Any, *args: Any) -> Any:
            counts.collectives += 1
            counts.kernels += 1
            return method(group, *args)

        return send

    group = dist.ProcessGroup
    names = ("_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single", "allreduce")
    patches = [
        *((torch.cpu.Stream, name, calls("recorded")) for name in ("record_event",)),
        *((torch.cpu.Stream, name, calls("waited")) for name in ("wait_event", "wait_stream")),
        (torch.cpu.Event, "record", calls("recorded")),
        (torch.cpu.Event, "synchronize", calls("host_waits")),
        (torch.UntypedStorage, "resize_", resized),
        *((group, name, message(getattr(group, name))) for name in names if hasattr(group, name)),
    ]
    with contextlib.ExitStack() as stack:
        for target, name, new in patches:
            stack.enter_context(mock.patch.object(target, name, new))
        stack.enter_context(Watch(counts))
        yield


def fsdp2_step(blocks: int, precision: str, ranks: int) -> Counts:
    """The counts of a step that repeats what is known, without the optimizer's."""
    low = precision == "bf16"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None
    with world(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        model = Model(blocks)
        options: dict[str, Any] = {"mesh": mesh} | ({"mp_policy": policy} if policy else {})
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        tokens = torch.zeros(2, 4, dtype=torch.long)
        for step in range(STEPS):
            counts = Counts()
            with counted(counts) if step == STEPS - 1 else contextlib.nullcontext():
                loss: Tensor = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return counts
