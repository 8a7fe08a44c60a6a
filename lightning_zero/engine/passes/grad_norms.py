"""Computes norms of gradients, of single parameters (``param.grad.norm()``) and of many together.

At every stage norms are computed for each shard and then joined, so all stages agree to the bit::

    gradient                                    norm of one parameter's gradient
    reduced, in shards                          ranks exchange the norms of all gradients once, until gradients change
    reduced, whole on all ranks (stage 0)       computed without messages
    unreduced (``no_sync`` at stages 0 and 1)   norm of this rank's undivided gradient, like DDP's ``param.grad``
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place, Shown
from lightning_zero.engine.units.grad_store import GradStore
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.planning.layout import Fragment, cut_runs


def alike(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Return the keys of ``tensors`` in groups of equal device and dtype, for torch's foreach operations."""
    kinds: dict[object, list[int]] = {}
    for key, tensor in tensors.items():
        kinds.setdefault((tensor.device, tensor.dtype), []).append(key)
    return list(kinds.values())


def norms_of(tensors: Mapping[int, Tensor], norm_type: float, device: torch.device) -> dict[int, Tensor]:
    """Compute each tensor's norm on its device, in fp32 (fp64 for fp64). Returns 0-d fp64 tensors on ``device``."""
    norms: dict[int, Tensor] = {}
    for same in alike(tensors):
        wide = torch.promote_types(tensors[same[0]].dtype, torch.float32)
        found = torch._foreach_norm([tensors[key] for key in same], norm_type, dtype=wide)
        norms |= zip(same, torch.stack(found).double().to(device).unbind(), strict=True)
    return norms


def slots_of(places: Iterable[Place]) -> dict[Bucket, set[int]]:
    slots: dict[Bucket, set[int]] = {}
    for bucket, info in places:
        slots.setdefault(bucket, set()).add(info.slot)
    return slots


def refuse_whole(places: Iterable[Place]) -> None:
    """Raise a RuntimeError if a ``param.grad`` at ``places`` is a plain tensor, because shards may lack its values."""
    for place in places:
        if place.bucket.shown is Shown.PLAIN and type(place.info.param.grad) is Tensor:
            raise RuntimeError(
                f"the gradient of {place.info.fqn} is a whole tensor here (inside gather(grads=True), or of your own "
                "between runs): use torch.nn.utils.get_total_norm and clip_grad_norm_, or leave the `with` block first."
            )


def views_of(grad: Tensor, fragments: Sequence[Fragment], slots: set[int]) -> list[Tensor]:
    """Return views of the elements of flat ``grad`` that belong to ``slots``, one view for each run of adjacent slots.
    ``fragments``: where each slot's elements lie in ``grad``, in order."""
    keys = [True if fragment.index in slots else None for fragment in fragments]
    return [grad[run.start : run.stop] for _, run in cut_runs(fragments, keys)]


def parts_of_shards(
    buckets: Iterable[Bucket], wanted: Mapping[Bucket, set[int]], look_up: Callable[[GradStore], Tensor | None]
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Find the parts of this rank's gradient shards that belong to ``wanted`` slots, and number them.

    Returns:
        Two dicts with part numbers as keys; each part is in one of them. The first has the result of ``look_up`` for
        each shard of which all slots are wanted, unless the result is None. This function does not wait for copies of
        these shards to the host. The second has views of all other parts."""
    known: dict[int, Tensor] = {}
    views: dict[int, Tensor] = {}
    for bucket in buckets:
        store = bucket.grad_store
        if not store.is_there or bucket not in wanted:
            continue
        is_whole = len(wanted[bucket]) == len(bucket.params)
        number = len(known) + len(views)
        if is_whole and (result := look_up(store)) is not None:
            known[number] = result
            continue
        assert store.value is not None
        shard = store.value[bucket.own_shard_of_owned]
        if is_whole:
            views[number] = shard
            continue
        views |= enumerate(views_of(shard, bucket.layout.fragments(bucket.comm.shard.index), wanted[bucket]), number)
    return known, views


class GradNorms:
    """Computes norms of one engine's gradients. Before each read of gradients it calls ``finish_pending``, which waits
    for optimizer steps and discards gradients of backwards that raised."""

    def __init__(self, reducer: Reducer, bucket_of: Mapping[int, Bucket], finish_pending: Callable[[], None]) -> None:
        self._reducer, self._comm = reducer, reducer.comm
        self._bucket_of, self._finish_pending = bucket_of, finish_pending
        # Norm type -> id(parameter) -> 0-d fp64. Cleared when gradients change, which they do on all ranks.
        self.tables: dict[float, dict[int, Tensor]] = {}

    @outside_autograd
    def norm(self, info: ParamInfo, norm_type: float, dtype: torch.dtype | None) -> Tensor:
        """Return the result [0-d] of ``param.grad.norm(norm_type)`` under DDP, which includes the loss scale.
        Collective. Raises RuntimeError after a backward that raised, and for a gradient that is only partly reduced."""
        if norm_type not in self.tables:
            self._finish_pending()
            self.tables[norm_type] = self._compute(norm_type)
        norm = self.tables[norm_type].get(id(info.param))
        if norm is None:
            raise self.mixed(info)
        return (norm * self._reducer.shown_scale(id(info.param))).to(dtype or self.dtype_of(info))

    @staticmethod
    def mixed(info: ParamInfo) -> RuntimeError:
        return RuntimeError(
            f"the gradient of {info.fqn} has parts that are reduced over the ranks and parts of backwards inside "
            "no_sync() that are not, so that it has neither values nor a norm yet. Run the last backward outside of "
            "no_sync() (sync_grad=True), or clear gradients before the first."
        )

    def dtype_of(self, info: ParamInfo) -> torch.dtype:
        return self._bucket_of[id(info.param)].dtypes.master.to_real()

    @outside_autograd
    def total(self, places: Iterable[Place], norm_type: float) -> Tensor:
        """Return the joint norm [0-d] of all reduced gradients at ``places``, in fp32 (fp64 for fp64). Collective.
        Raises RuntimeError on all ranks if gradients are not reduced yet, or if a ``param.grad`` is a whole tensor."""
        if not norm_type > 0.0:
            raise ValueError(
                f"the norm of gradients: expected a norm type above 0, or inf, got {norm_type}. Read gradients inside "
                "`with lightning_zero.gather(module, grads=True):`."
            )
        places = list(places)
        wanted = slots_of(places)
        self._finish_pending()
        refuse_whole(places)
        self._reducer.refuse_unreduced(places)
        device = self._comm.device
        # One element per rank, summed afterwards: a backend's order of ranks must not change the last bits.
        partial = torch.zeros(self._comm.world_size, dtype=torch.float64, device=device)
        counted = [bucket for bucket in self._reducer.grads if not bucket.comm.replicate.index]  # replicas are equal
        known, views = parts_of_shards(counted, wanted, lambda store: store.norm(norm_type))
        if known or views:
            parts = {number: norm.double() for number, norm in known.items()} | norms_of(views, norm_type, device)
            norms = torch.stack([parts[number] for number in range(len(parts))])
            partial[self._comm.rank] = norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
        with self._comm.set_place("the norm of gradients, which takes all ranks"):
            self._comm.sum_(partial)
        whole = partial.max() if math.isinf(norm_type) else partial.sum() ** (1.0 / norm_type)
        # The dtype must be equal on all ranks, also on a rank without gradients.
        dtypes = [bucket.dtypes.grad.to_real() for bucket in wanted]
        return whole.to(functools.reduce(torch.promote_types, dtypes, torch.float32))

    def total_shown(self, infos: Sequence[ParamInfo], norm_type: float) -> Tensor | None:
        """Return the joint norm of the gradients of ``infos``, with their loss scale. If the gradients have different
        loss scales, send no message and return None. Collective."""
        scales = {self._reducer.shown_scale(id(info.param)) for info in infos}
        if len(scales) != 1:
            return None
        places = [Place(self._bucket_of[id(info.param)], info) for info in infos]
        # Add parameters without gradients, as zeros: whole shards give the same bits as the norm of all parameters.
        empty = [
            Place(bucket, info)
            for bucket in slots_of(places)
            for info in bucket.params
            if info.slot not in self._reducer.grads[bucket].agreed
        ]
        return self.total([*places, *empty], norm_type) * scales.pop()

    def _compute(self, norm_type: float) -> dict[int, Tensor]:
        """Return the norm of each reduced gradient and, at stages 0 and 1, of this rank's unreduced gradients. The
        norms have no loss scale. Keys are parameter ids. Collective."""
        self._reducer.refuse_partial()
        comm = self._comm
        infos: list[ParamInfo] = []
        factors: list[float] = []
        shared: list[int] = []  # rows of gradients of which each rank has a part
        parts: dict[int, Tensor] = {}  # by index in the flattened table
        for bucket, grads in self._reducer.grads.items():
            if self._reducer.unreduced and bucket.plan.accumulates_locally:
                for slot, grad in grads.local_grads().items() if not bucket.grad_store.is_there else ():
                    parts[len(infos) * comm.world_size] = grad
                    infos.append(bucket.params[slot])
                    factors.append(self._reducer.local_scale(bucket))
                continue
            if not bucket.grad_store.is_there or not grads.agreed:
                continue
            rows = {slot: len(infos) + number for number, slot in enumerate(sorted(grads.agreed))}
            infos += [bucket.params[slot] for slot in rows]
            factors += [1.0] * len(rows)
            if bucket.plan.shards_master or bucket.comm.ranks.parts.size > 1:
                shared += rows.values()
            for rank, slot, part in _parts_of_reduced(bucket):
                if slot in rows and not (bucket.comm.replicate.index and bucket.plan.shards_master):
                    parts[rows[slot] * comm.world_size + bucket.comm.shard.ranks[rank]] = part
        table = torch.zeros(len(infos) * comm.world_size, dtype=torch.float64)
        if parts:
            norms = norms_of(parts, norm_type, comm.device)
            table[torch.tensor(list(norms))] = torch.stack(list(norms.values())).cpu()
        table = table.view(len(infos), comm.world_size)
        if shared:
            # Checked: a rank that makes another call finds out, and does not use this message.
            with comm.set_place("a read of .grad.norm(), which takes all ranks"):
                columns = comm.gather_checked(
                    table[shared, comm.rank].tolist(), f"the norms of gradients, of type {norm_type:g}"
                )
            table[shared] = torch.tensor(columns, dtype=torch.float64).T
        # A part that a tensor lacks has norm 0. Norms of type 0 count elements, so those of parts are added.
        joined = torch.linalg.vector_norm(table, norm_type, dim=1) if norm_type else table.sum(1)
        whole = joined * torch.tensor(factors, dtype=torch.float64)
        return {id(info.param): norm for info, norm in zip(infos, whole.to(comm.device), strict=True)}


def _parts_of_reduced(bucket: Bucket) -> Iterator[tuple[int, int, Tensor]]:
    """Cut the reduced gradients that this rank holds at the borders of shards and parameters. Yield (index of the
    shard's rank, slot of the parameter, values) for each part."""
    gradient, low = bucket.grad, bucket.owned_range[0]
    assert gradient is not None
    for rank in [bucket.comm.shard.index] if bucket.plan.shards_master else range(bucket.layout.world_size):
        start = bucket.layout.shard_range(rank)[0] - low
        for fragment in bucket.layout.fragments(rank):
            first = start + fragment.start
            yield rank, fragment.index, gradient[first : first + fragment.numel]
