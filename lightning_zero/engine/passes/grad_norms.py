"""Norms of gradients: of each parameter's, for users' code that asks ``param.grad`` for it, and of many together.

A norm is a sum over ranks of what each finds of its shards. The cuts are those of the shards at every stage, also where
gradients rest replicated, so all stages agree to the bit.

That of many is one message, of a number from each rank. Asked for that of one parameter, those of all are found: one
exchange of the norms of all parts. These are kept until gradients change.

::

    gradient                                    what is asked for
    reduced, in shards                          its norm; all ranks take part in the exchange
    reduced, whole on all ranks (stage 0)       its norm; nothing is sent
    of backwards inside ``no_sync`` (0 and 1)   this rank's own, not divided, as DDP's ``param.grad`` has it then
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.grad_store import GradStore
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.planning.layout import cut_runs


def alike(tensors: Mapping[int, Tensor]) -> dict[object, list[int]]:
    """Places of tensors by device and dtype: torch's operations on many tensors take them together."""
    places: dict[object, list[int]] = {}
    for place, tensor in tensors.items():
        places.setdefault((tensor.device, tensor.dtype), []).append(place)
    return places


def norms_of(tensors: Mapping[int, Tensor], norm_type: float, device: torch.device) -> dict[int, Tensor]:
    """The norm of each, found in fp32 (fp64 of fp64) where it rests: 0-d fp64 on ``device``, by place."""
    norms: dict[int, Tensor] = {}
    for same in alike(tensors).values():
        wide = torch.promote_types(tensors[same[0]].dtype, torch.float32)
        found = torch._foreach_norm([tensors[place] for place in same], norm_type, dtype=wide)
        norms |= zip(same, torch.stack(found).double().to(device).unbind(), strict=True)
    return norms


def slots_of(places: Iterable[Place]) -> dict[Bucket, set[int]]:
    """Parameters by bucket."""
    slots: dict[Bucket, set[int]] = {}
    for bucket, info in places:
        slots.setdefault(bucket, set()).add(info.slot)
    return slots


def shows_whole(place: Place) -> bool:
    """Whether ``param.grad`` is a whole gradient: inside ``gather(grads=True)``, or users' own between runs."""
    return place.bucket.is_plain and type(place.info.param.grad) is Tensor


def refuse_whole(places: Iterable[Place]) -> None:
    """
    Raises:
        RuntimeError: on all ranks: ``param.grad`` holds whole gradients, of which shards know nothing yet.
    """
    for place in places:
        if shows_whole(place):
            raise RuntimeError(
                f"the gradient of {place.info.fqn} is a whole tensor here (inside gather(grads=True), or of your own "
                "between runs): use torch.nn.utils.get_total_norm and clip_grad_norm_, or leave the `with` block first."
            )


class Part(NamedTuple):
    """A part of this rank's shards, or what was found out about it when it was on its way."""

    grad: Tensor | None
    found: Tensor | None = None


def parts_of_shards(
    buckets: Iterable[Bucket], wanted: Mapping[Bucket, set[int]], found: Callable[[GradStore], Tensor | None]
) -> list[Part]:
    """This rank's part of the reduced gradients of ``wanted`` slots, in views that tile its shards, in order.

    Args:
        found: gives what is known of a bucket's shard already; what is known of is not waited for.
    """
    parts: list[Part] = []
    for bucket in buckets:
        store = bucket.grad_store
        if not store.is_there or bucket not in wanted:
            continue
        is_whole = len(wanted[bucket]) == len(bucket.params)
        if is_whole and (known := found(store)) is not None:
            parts.append(Part(None, known))
            continue
        assert store.value is not None
        shard = store.value[bucket.own_shard_of_owned]
        if is_whole:
            parts.append(Part(shard))
            continue
        fragments = bucket.layout.fragments(bucket.comm.shard_rank)
        keys = [True if f.index in wanted[bucket] else None for f in fragments]
        parts += [Part(shard[run.start : run.stop]) for _, run in cut_runs(fragments, keys)]
    return parts


class GradNorms:
    """The norms of one engine's gradients, as far as they have been asked for.

    Args:
        settle: waits until gradients are what users' code has left of them, before they are looked at.
    """

    def __init__(self, reducer: Reducer, comm: Communicator, settle: Callable[[], None]) -> None:
        self._reducer, self._comm = reducer, comm
        self._known: dict[float, dict[int, Tensor]] = {}  # norm type -> id of the parameter -> 0-d fp64
        self._bucket_of = {id(info.param): bucket for bucket in reducer.grads for info in bucket.params}
        self._settle = settle

    def changed(self) -> None:
        """Gradients are about to change, or have changed: on all ranks alike."""
        self._known.clear()

    @outside_autograd
    def norm(self, info: ParamInfo, norm_type: float, dtype: torch.dtype | None) -> Tensor:
        """``param.grad.norm(norm_type)`` of DDP: 0-d, in the dtype that the gradient has there, on the device.

        All ranks ask for the norm of any parameter, or none does: the first time after a backward they exchange values.
        As under DDP, gradients are multiplied by the loss scale until ``Reducer.unscale``.

        Raises:
            ValueError: a norm of a type that does not add up over parts.
            RuntimeError: the gradient lacks some of a backward that has raised, or some of it is reduced and some is of
                this rank alone.
            StallError, ApartError: other ranks are somewhere else.
        """
        if not norm_type >= 0.0:
            raise ValueError(
                f"the norm of the gradient of {info.fqn}: expected a norm type of 0 or more, or inf, got {norm_type}. "
                "Read the gradient inside `with lightning_zero.gather(module, grads=True):`."
            )
        if norm_type not in self._known:
            self._settle()
            self._known[norm_type] = self._find(norm_type)
        found = self._known[norm_type].get(id(info.param))
        if found is None:
            raise RuntimeError(
                f"the gradient of {info.fqn} has parts that are reduced over the ranks and parts of backwards inside "
                "no_sync() that are not, so that it has no norm yet. Run the last backward outside of no_sync() "
                "(sync_grad=True), or clear gradients before the first."
            )
        scaled = found * self._reducer.shown_scale(id(info.param))
        return scaled.to(dtype or self.dtype_of(info))

    def dtype_of(self, info: ParamInfo) -> torch.dtype:
        """Of the norm of one parameter's gradient."""
        return self._bucket_of[id(info.param)].dtypes.master.to_real()

    @outside_autograd
    def total(self, places: Iterable[Place], norm_type: float) -> Tensor:
        """The norm of the reduced gradients at ``places`` together: 0-d, fp32 (fp64 of fp64). On all ranks.

        Raises:
            ValueError: a norm of a type that does not add up over parts.
            RuntimeError: on all ranks: gradients wait for a backward that reduces them, or are shown whole.
        """
        if not norm_type > 0.0:
            raise ValueError(
                f"the norm of gradients: expected a norm type above 0, or inf, got {norm_type}. Read gradients inside "
                "`with lightning_zero.gather(module, grads=True):`."
            )
        places = list(places)
        refuse_whole(places)
        wanted = slots_of(places)
        self._settle()
        self._reducer.refuse_unreduced(places)
        device = self._comm.device
        # A place for each rank, where the others add zeros, and the sum over places afterwards: the order in which a
        # backend adds up ranks would otherwise be seen in the last bits.
        partial = torch.zeros(self._comm.shard_size, dtype=torch.float64, device=device)
        cell = partial[self._comm.shard_rank]
        own = parts_of_shards(self._reducer.grads, wanted, lambda store: store.norm(norm_type))
        if own and self._comm.replica == 0:  # the other replicas hold the same
            norms = _norms_of_parts(own, norm_type, device)  # of all buckets at once: a GPU is asked a few times
            cell.copy_(norms.max() if math.isinf(norm_type) else (norms**norm_type).sum())
        with self._comm.at("the norm of gradients, which takes all ranks"):
            self._comm.sum_(partial)
        whole = partial.max() if math.isinf(norm_type) else partial.sum() ** (1.0 / norm_type)
        # At least fp32, and the same on all ranks, also on one that holds no gradient.
        dtypes = [bucket.dtypes.grad.to_real() for bucket in wanted]
        return whole.to(functools.reduce(torch.promote_types, dtypes, torch.float32))

    def total_shown(self, infos: Sequence[ParamInfo], norm_type: float) -> Tensor | None:
        """As :meth:`total`, multiplied by the loss scale as under DDP; None where that is not one for all."""
        scales = {self._reducer.shown_scale(id(info.param)) for info in infos}
        if len(scales) != 1:
            return None
        places = [Place(self._bucket_of[id(info.param)], info) for info in infos]
        # Those without a gradient are zeros in its buckets: with them it is the norm of whole shards, as that of all
        # the module's parameters is, whose last bits it then has.
        empty = [
            Place(bucket, info)
            for bucket in slots_of(places)
            for info in bucket.params
            if info.slot not in self._reducer.grads[bucket].agreed
        ]
        return self.total([*places, *empty], norm_type) * scales.pop()

    def _find(self, norm_type: float) -> dict[int, Tensor]:
        """All that are known on this rank or after an exchange, unscaled but for those of this rank alone."""
        self._reducer.refuse_partial()
        size = self._comm.shard_size
        infos: list[ParamInfo] = []
        factors: list[float] = []
        shared: list[int] = []  # those of which each rank has a part
        pieces: dict[int, Tensor] = {}  # by place in the table
        for bucket, grads in self._reducer.grads.items():
            if self._reducer.unreduced and grads.accumulates:
                # Some may be reduced, of backwards before: parts of two kinds have no norm together.
                for slot, part in grads.local_parts().items() if not bucket.grad_store.is_there else ():
                    pieces[len(infos) * size] = part
                    infos.append(bucket.params[slot])
                    factors.append(grads.factor / grads.scale / self._reducer.loss_scale)
                continue
            if not bucket.grad_store.is_there or not grads.agreed:
                continue
            first = {slot: len(infos) + number for number, slot in enumerate(sorted(grads.agreed))}
            infos += [bucket.params[slot] for slot in first]
            factors += [1.0] * len(first)
            if bucket.plan.shards_master:
                shared += first.values()
            for rank, slot, part in _reduced_parts(bucket, self._comm.shard_rank):
                if slot in first:
                    pieces[first[slot] * size + rank] = part
        table = torch.zeros(len(infos) * size, dtype=torch.float64)
        if pieces:
            found = norms_of(pieces, norm_type, self._comm.device)
            table[torch.tensor(list(found))] = torch.stack(list(found.values())).cpu()
        table = table.view(len(infos), size)
        if shared:
            self._exchange(table, shared, norm_type)
        whole = _joined(table, norm_type) * torch.tensor(factors, dtype=torch.float64)
        return {id(info.param): norm for info, norm in zip(infos, whole.to(self._comm.device), strict=True)}

    def _exchange(self, table: Tensor, shared: Sequence[int], norm_type: float) -> None:
        """Fill the rows ``shared`` of ``table`` [gradients, ranks] with what the other ranks have. On all ranks."""
        comm = self._comm
        # The other replicas hold the same shards.
        own = table[shared, comm.shard_rank].tolist() if comm.replica == 0 else []
        # Over the ranks' agreements, where each says what it is there for: where other ranks are at another agreement,
        # all find out; and where they are anywhere else, none takes this message for one of its own.
        with comm.at("a read of .grad.norm(), which takes all ranks"):
            rows = comm.meet(own, f"the norms of gradients, of type {norm_type:g}")
        for number, rank in enumerate(comm.topology.shard_groups[0]):
            table[shared, number] = torch.tensor(rows[rank], dtype=torch.float64)


def _norms_of_parts(parts: Sequence[Part], norm_type: float, device: torch.device) -> Tensor:
    """The norm of each, in order, wherever they rest: [len(parts)] fp64 on ``device``."""
    norms = {place: part.found.double() for place, part in enumerate(parts) if part.found is not None}
    left = {place: part.grad for place, part in enumerate(parts) if part.grad is not None}
    norms |= norms_of(left, norm_type, device)
    return torch.stack([norms[place] for place in range(len(parts))])


def _reduced_parts(bucket: Bucket, rank: int) -> list[tuple[int, int, Tensor]]:
    """Rank, slot and values of the parts of parameters, as the ranks' shards cut them, of what this rank holds."""
    value = bucket.grad_store.value
    assert value is not None
    low = bucket.owned_range[0]
    ranks = [rank] if bucket.plan.shards_master else range(bucket.layout.world_size)
    parts = []
    for owner in ranks:
        start = bucket.layout.shard_range(owner)[0] - low
        for fragment in bucket.layout.fragments(owner):
            first = start + fragment.start
            parts.append((owner, fragment.index, value[first : first + fragment.numel]))
    return parts


def _joined(parts: Tensor, norm_type: float) -> Tensor:
    """Norms of whole tensors out of those of their parts, ``[tensors, parts]`` fp64; 0 where there is no part."""
    if norm_type == 0.0:
        return parts.sum(1)
    if math.isinf(norm_type):
        return parts.amax(1)
    return (parts**norm_type).sum(1) ** (1.0 / norm_type)
