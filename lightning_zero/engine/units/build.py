"""Builds units, from the description of a module, with buckets that hold rank 0's values."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Precision, ZeroConfig
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.describe import TRUE_DTYPES, UnitGroup
from lightning_zero.engine.units.home import Tiers
from lightning_zero.engine.units.materialise import materialise, move_param
from lightning_zero.engine.units.module_buffers import replicate_buffers
from lightning_zero.engine.units.unit import Unit
from lightning_zero.planning.buckets import place
from lightning_zero.planning.placement import STAGES, TierRow
from lightning_zero.ranks.progress import SILENT, LongWork


def build_units(
    module: nn.Module,
    groups: Sequence[UnitGroup],
    config: ZeroConfig,
    comm: Communicator,
    rows: Sequence[TierRow],
    tiers: Tiers,
    sources: Mapping[str, Tensor] | None = None,
    long_work: LongWork = SILENT,
) -> list[Unit]:
    """Units of ``module`` with filled buckets, at rest; the root first.

    Args:
        groups: what :func:`describe_units` said of the module.
        rows: of each unit, the tiers on which its roles rest.
        tiers: those that there are.
        sources: first values by name, for parameters and buffers that have one there; of parameters each rank reads
            its part.

    Raises:
        ConfigError: meta modules without ``reset_parameters`` and without sources; a disk that is full on any rank.
    """
    names = {group.name for group in groups if group.name}
    built: dict[int, Unit] = {}
    some_meta = comm.max_(torch.tensor([any(t.is_meta for t in _tensors_of(module))], dtype=torch.uint8)).item()
    in_order = [*list(enumerate(groups))[1:], (0, groups[0])]  # the root last: it owns what units share
    for index, group in long_work.items(in_order, "sharding, in units"):
        if some_meta and comm.device.type != "meta":
            make = functools.partial(materialise, module, group.name, names, comm.device, sources)
            comm.together(f"first values of unit {group.name or '(root)'}", make)
        unit = Unit(group.name, index, _build_buckets(group, index, config, rows[index], comm, tiers, sources or {}))
        unit.reshard()  # at once: the device need not hold more than one unit beside what rests
        built[index] = unit
    _fill_buffers(module, sources or {})
    replicate_buffers(module, comm, TRUE_DTYPES.get(config.precision.name or Precision.fp32))
    return [built[index] for index in range(len(groups))]


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _build_buckets(
    group: UnitGroup,
    unit: int,
    config: ZeroConfig,
    row: TierRow,
    comm: Communicator,
    tiers: Tiers,
    sources: Mapping[str, Tensor],
) -> list[Bucket]:
    buckets: list[Bucket] = []
    for part in group.buckets:
        stage, alone = STAGES[config.stage.name], config.comm.even_alone
        plan = place(part.shape(unit), stage, row, comm.shard_size, even_alone=alone)
        label = f"{group.name or '(root)'}#{len(buckets)}"
        bucket = Bucket(label, part.params, plan, part.dtypes, comm, tiers)
        _fill(bucket, sources)
        buckets.append(bucket)
    return buckets


def _fill(bucket: Bucket, sources: Mapping[str, Tensor]) -> None:
    """Put first values, unrounded, into the bucket of every rank: those of ``sources``, else rank 0's. On all ranks,
    bucket by bucket in one order."""
    comm, dtype = bucket.comm, bucket.dtypes.master if bucket.trainable else bucket.dtypes.compute
    found = {info.slot: sources[fqn] for info in bucket.params for fqn in info.fqns[::-1] if fqn in sources}
    if comm.device.type == "meta":
        found = {}
    low, high = bucket.owned_range
    own = torch.zeros(high - low, dtype=dtype, device=comm.device)
    if len(found) < len(bucket.params):
        values = torch.zeros(bucket.layout.numel, dtype=dtype, device=comm.device)
        for info in bucket.params:
            if info.slot not in found:
                bucket.part_of(values, info).copy_(info.param.detach())
        comm.broadcast(values)
        own.copy_(values[low:high])
        if not found and not bucket.reshards:
            bucket.full.data.copy_(values)
        del values
    if found:
        comm.together(f"first values of {bucket.label}", functools.partial(_read_own, bucket, found, own))
        bucket.share(own)
    fill = functools.partial(bucket.fill, own)
    if bucket.plan.tiers.leaves_device:
        # Room was asked for before, but others use host and disk too: where one rank finds none, all raise its error.
        bucket.comm.together(f"room for {bucket.label}", fill)
    else:
        fill()
    for info in bucket.params:
        if info.param.device != bucket.comm.device:
            move_param(info.param, torch.empty_like(info.param, device=bucket.comm.device))
        # After the move, which gives the parameter the counter of another tensor: with an older number here, the first
        # look at versions would take the difference for a write by the user.
        info.version = info.param._version
    bucket.show(gathered=True)


def _read_own(bucket: Bucket, found: Mapping[int, Tensor], own: Tensor) -> None:
    """Fill the parts of ``own`` [owned numel] whose slots are in ``found``."""
    for fragment in bucket.owned_fragments():
        if fragment.index in found:
            target = own[fragment.start : fragment.start + fragment.numel]
            bucket.params[fragment.index].copy_part(found[fragment.index], fragment.offset, target)


def _fill_buffers(module: nn.Module, sources: Mapping[str, Tensor]) -> None:
    for name, buffer in module.named_buffers():
        if name in sources and not buffer.is_meta:
            with torch.no_grad():
                buffer.copy_(sources[name])
