"""The copy of a module's parameters between Trainer runs, in memory shared by all ranks of a host: see
``whole_params.py``."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.engine.passes.sharded_grad import ShardedGrad
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.optimizers.state_trees import same_bits
from lightning_zero.planning.layout import round_up
from lightning_zero.planning.memory import COPY_ALIGN, copy_nbytes


class _Shown(NamedTuple):
    """A parameter in the host's shared memory: ``original`` is shared, ``value`` is mapped copy-on-write."""

    bucket: Bucket
    info: ParamInfo
    original: Tensor
    value: Tensor


class HostCopy:
    """Maps the host's shared memory, which has a copy of all parameters. This rank's writes are private to the rank
    (copy-on-write). ``fd``: the file descriptor of the memory. ``params``: each parameter's tensors in the memory."""

    def __init__(self, buckets: Sequence[Bucket], fd: int) -> None:
        self.nbytes, start = nbytes_of(buckets), 0
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        shared = mmap.mmap(fd, self.nbytes, flags=mmap.MAP_SHARED, prot=rights)
        own = mmap.mmap(fd, self.nbytes, flags=mmap.MAP_PRIVATE, prot=rights)
        self.params: list[_Shown] = []
        with torch.inference_mode(False):
            for bucket, info in ((b, info) for b in buckets for info in b.params):
                self.params.append(_Shown(bucket, info, _mapped(info, shared, start), _mapped(info, own, start)))
                start = round_up(start + info.numel * info.dtype.itemsize, COPY_ALIGN)
        self.is_shown = False
        self.put_back: Callable[[], None] = lambda: None
        self.grads: list[tuple[nn.Parameter, ShardedGrad]] = []
        self._seen: list[object] = []  # ``storage.changes`` of the buckets when the copy equalled the masters

    def equals_masters(self, buckets: Sequence[Bucket]) -> None:
        """Record that the copy equals the masters of ``buckets`` at present."""
        self._seen = [bucket.storage.changes for bucket in buckets]

    def still_equals(self, buckets: Sequence[Bucket]) -> bool:
        """Return whether the copy equals this rank's masters of ``buckets``. Call only while no step runs."""
        if self._seen != [bucket.storage.changes for bucket in buckets]:
            return False
        # Where parameters are the masters themselves, user code can write to masters unseen: compare the values.
        for bucket, info, original, _ in self.params:
            if not bucket.plan.copies_master:
                for f in bucket.owned_fragments():
                    if f.index == info.slot:
                        now = bucket.master[f.start : f.start + f.numel].to("cpu", info.dtype)
                        if not same_bits(info.flattened(original)[f.offset : f.offset + f.numel], now):
                            return False
        return True

    def written(self) -> dict[int, Tensor]:
        """Return {index in ``params``: values on the host} for parameters that users have written to on this rank."""
        found = {}
        for number, (_, info, original, _) in enumerate(self.params):
            now = info.param.data.detach().to("cpu", info.dtype)
            if now.shape != info.shape or not same_bits(info.flattened(now), info.flattened(original)):
                found[number] = now
        return found


def nbytes_of(buckets: Iterable[Bucket]) -> int:
    return copy_nbytes(info.numel * info.dtype.itemsize for bucket in buckets for info in bucket.params)


def _mapped(info: ParamInfo, memory: mmap.mmap, start: int) -> Tensor:
    """Return a parameter's tensor at byte ``start`` of ``memory``. ``torch.save`` writes only this tensor's bytes."""
    if not info.numel:
        return torch.empty_strided(info.shape, info.strides, dtype=info.dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=info.numel * info.dtype.itemsize, offset=start)
    return flat.view(info.dtype).as_strided(info.shape, info.strides)
