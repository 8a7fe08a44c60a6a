"""Build the units of a module from their descriptions, and fill their buckets with rank 0's values.

Tensors on meta get memory and first values unit by unit; parameters stay the same objects. Buffers (running statistics)
get rank 0's values at the start and before steps, as under DDP. Between steps buffers can differ between ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.describe import TRUE_DTYPES, UnitGroup
from lightning_zero.engine.units.master_storage import Tiers
from lightning_zero.engine.units.packed import replicate_beside
from lightning_zero.engine.units.unit import Unit
from lightning_zero.mesh.local_leaves import split_of
from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.topology import Ranks, by_part
from lightning_zero.pretrained.first import ADAPTER, reset_adapter, resetter
from lightning_zero.settings import ConfigError, Precision, ZeroConfig


def materialise(
    module: nn.Module, unit: str, units: Collection[str], device: torch.device, sources: Mapping[str, Tensor]
) -> None:
    """Allocate a unit's parameters and buffers that are on the meta device, and initialize them. Tied parameters stay
    tied. Parameters in `sources` (initial values by name) stay on meta, because each rank reads only its part of them.
    If the engine's own `device` is meta (simulated scale), nothing changes."""
    if device.type == "meta":
        return
    sourced = {id(p) for fqn, p in module.named_parameters(remove_duplicate=False) if fqn in sources}
    adapters: list[tuple[str, nn.Module]] = []
    own = list(_own_modules(module, unit, units))
    # Only tensors that were on meta are checked: others may hold NaN on purpose.
    were_meta = {(name, key) for name, inner in own for key, tensor in _own_tensors(inner).items() if tensor.is_meta}
    for name, inner in own:
        of_adapter = (p for key, p in inner.named_parameters() if any(k.startswith("lora_") for k in key.split(".")))
        if hasattr(inner, ADAPTER) and any(p.is_meta and id(p) not in sourced for p in of_adapter):
            adapters.append((name, inner))
        for key, buffer in inner.named_buffers(recurse=False):
            if buffer.is_meta and (source := sources.get(f"{name}.{key}" if name else key)) is not None:
                inner._buffers[key] = torch.empty_like(buffer, device=device).copy_(source)
        lacking = {key: t for key, t in _own_tensors(inner).items() if t.is_meta and id(t) not in sourced}
        if lacking:
            _reset(module, name, inner, lacking, device)
    for name, inner in adapters:
        reset_adapter(module, name, inner)
    for name, inner in own:
        for key, tensor in _own_tensors(inner).items():
            if (name, key) not in were_meta or tensor.is_meta or not (tensor.is_floating_point() and tensor.numel()):
                continue
            if bool(tensor.isnan().all()):
                raise ConfigError(
                    f"{f'{name}.{key}' if name else key} was on the meta device, and {type(inner).__name__} has not "
                    "initialized it. Have its reset_parameters() do that, or build it off meta."
                )


def _reset(module: nn.Module, name: str, inner: nn.Module, lacking: Mapping[str, Tensor], device: torch.device) -> None:
    """Allocate on `device` the tensors of `inner` that are in `lacking`. Then call the `reset_parameters` of `inner`,
    or the equivalent that this package knows for the module's class. Raises ConfigError if neither exists."""
    reset = resetter(module, name, inner)
    if reset is None:
        key = next(iter(lacking))
        raise ConfigError(
            f"module {name or '(root)'} ({type(inner).__name__}) holds parameters or buffers on the meta device "
            f"({key}) and has no reset_parameters() to initialize them, nor has {f'{name}.{key}' if name else key} a "
            "source in zero.init_from. Give it that method, a source, or build it off meta."
        )
    for key, tensor in lacking.items():
        split = split_of(tensor)  # of a split parameter the whole tensor for now: first values depend on sizes
        like = tensor if split is None else torch.empty(split.shape, dtype=tensor.dtype, device="meta")
        value = torch.empty_like(like, device=device)
        if value.is_floating_point():
            value.fill_(torch.nan)  # so that missing initialization is found
        if isinstance(tensor, nn.Parameter):
            move_param(tensor, value)
        else:
            inner._buffers[key] = value
    with torch.no_grad():
        reset()
        for tensor in lacking.values():
            if (split := split_of(tensor)) is not None:
                tensor.data = split.cut(tensor.data).contiguous()


def move_param(param: nn.Parameter, value: Tensor) -> None:
    """Give `param` the memory of `value`, on another device. The parameter stays the same object, with its hooks."""
    if torch._has_compatible_shallow_copy_type(param, value):
        grad, param.grad = param.grad, None
        param.data = value
        param.grad = None if grad is None else grad.to(value.device)
        return
    # torch refuses `.data =` from or to meta. `torch.utils.swap_tensors` swaps class and attributes too, and refuses
    # the weak references that `nn.LSTM` holds.
    hooks, grad_hooks = param._backward_hooks, param._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(param, nn.Parameter(value, requires_grad=param.requires_grad))
    # The hook tables stay with the object; autograd's references to them do not. Setting None first restores them.
    for name, table in (("_backward_hooks", hooks), ("_post_accumulate_grad_hooks", grad_hooks)):
        setattr(param, name, None)
        setattr(param, name, table)


def _own_modules(module: nn.Module, unit: str, units: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for each module inside `unit` (a name), without modules inside units nested in `unit`."""
    for name, inner in module.named_modules():
        parts = name.split(".") if name else []
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        if next((p for p in prefixes if p in units), "") == unit:
            yield name, inner


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def kinds_of(buffers: Iterable[tuple[str, Tensor]]) -> list[tuple[str, tuple[int, ...], str]]:
    """Return (name, shape, dtype) of each of the named ``buffers`` that has elements."""
    return [(name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in buffers if buffer.numel()]


def replicate_buffers(module: nn.Module, comm: Communicator, dtype: torch.dtype | None) -> None:
    """Move all buffers to the engine's device, cast floating-point buffers to `dtype` (None: no cast), and give all
    ranks rank 0's values. A buffer whose shape or dtype differs between ranks is not sent. Collective."""
    moved: dict[int, Tensor] = {}
    table = comm.all_gather_objects(kinds_of(module.named_buffers()), "which buffers ranks have")
    everywhere = {name for name, *_ in set(table[0]).intersection(*table)}
    for prefix, inner in module.named_modules():
        for key, buffer in inner._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                wanted = dtype if buffer.is_floating_point() else None
                normal = buffer.clone() if buffer.is_inference() else buffer  # an evaluation has replaced it
                moved[id(buffer)] = on_device = normal.to(comm.device, wanted)
                if (f"{prefix}.{key}" if prefix else key) in everywhere:
                    data = on_device.contiguous()
                    comm.broadcast(data)
                    if any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)):
                        moved[id(buffer)] = data  # an expanded buffer cannot be written to
                    else:
                        on_device.copy_(data)
            inner._buffers[key] = moved[id(buffer)]


def build_units(
    module: nn.Module,
    groups: Sequence[UnitGroup],
    config: ZeroConfig,
    comm: Communicator,
    plans: Sequence[BucketPlan],
    tiers: Tiers,
    sources: Mapping[str, Tensor],
) -> list[Unit]:
    """Build and return the units of `module`, the root first. Initialize masters, parameters and buffers, and free full
    values of units that are gathered for each use. Collective. `plans`: a plan for each bucket, in the order of
    `groups`. `sources`: initial values by name; each rank reads its own parts only. Raises ConfigError for a meta
    module with neither `reset_parameters` nor sources, and if a disk is full on any rank."""
    names = {group.name for group in groups if group.name}
    built: dict[int, Unit] = {}
    is_meta = any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    some_meta = comm.max_(torch.tensor([is_meta], dtype=torch.uint8)).item()
    in_order = [*list(enumerate(groups))[1:], (0, groups[0])]  # root last: it owns what units share
    for index, group in comm.long_work.items(in_order, "sharding, in units"):
        if some_meta and comm.device.type != "meta":
            make = functools.partial(materialise, module, group.name, names, comm.device, sources)
            comm.together(f"first values of unit {group.name or '(root)'}", make)
        buckets: list[Bucket] = []
        for part, plan in zip(group.buckets, (plan for plan in plans if plan.unit == index), strict=True):
            label = f"{group.name or '(root)'}#{len(buckets)}"
            among = comm
            if part.parts > 1:
                among = comm.with_ranks(Ranks.locate(comm.rank, by_part(comm.ranks.topology, part.parts), config))
            bucket = Bucket(label, part.params, plan, part.dtypes, among, tiers)
            _fill(bucket, sources)
            buckets.append(bucket)
        unit = Unit(group.name, index, buckets)
        unit.reshard()  # at once, so that the device holds only one whole unit at a time
        built[index] = unit
    for name, buffer in module.named_buffers():
        if name in sources and not buffer.is_meta:
            with torch.no_grad():
                buffer.copy_(sources[name])
    replicate_buffers(module, comm, TRUE_DTYPES.get(config.precision.name or Precision.fp32))
    replicate_beside(module, comm)
    return [built[index] for index in range(len(groups))]


def _fill(bucket: Bucket, sources: Mapping[str, Tensor]) -> None:
    """Initialize the bucket's masters and parameters: from `sources` (tensors by parameter name) where these have the
    parameter, otherwise with rank 0's values. Move the parameters to the engine's device. Collective."""
    comm, dtype = bucket.comm, bucket.dtypes.master if bucket.plan.trainable else bucket.dtypes.compute
    found = {
        info.slot: info.part_of_saved(sources[fqn])
        for info in bucket.params
        for fqn in info.fqns[::-1]
        if fqn in sources
    }
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
        if not found and not bucket.plan.reshards:
            bucket.full.data.copy_(values)
        del values
    if found:

        def read_own_parts() -> None:
            for fragment in bucket.owned_fragments():
                if fragment.index in found:
                    target = own[fragment.start : fragment.start + fragment.numel]
                    bucket.params[fragment.index].copy_part(found[fragment.index], fragment.offset, target)

        comm.together(f"first values of {bucket.label}", read_own_parts)
        bucket.share(own)
    fill = functools.partial(bucket.fill, own)
    if bucket.plan.tiers.uses_host_or_files:
        # Room was checked before, but others use host and disk too. If one rank finds no room, all raise its error.
        bucket.comm.together(f"room for {bucket.label}", fill)
    else:
        fill()
    for info in bucket.params:
        if info.param.device != bucket.comm.device:
            move_param(info.param, torch.empty_like(info.param, device=bucket.comm.device))
        # After the move, which gives the parameter another version: an older one here would look like a user's write.
        info.version = info.param._version
    bucket.show(gathered=True)
