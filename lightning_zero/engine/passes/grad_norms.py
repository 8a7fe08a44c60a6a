"""Norms of gradients: of each parameter's, for users' code that asks ``param.grad`` for it, and of many together.

Both add up what each rank finds of its shards. The cuts are those of the shards at every stage, also where gradients
rest replicated, so all stages agree to the bit.

::

    gradient                                    norm of one
    reduced, in shards                          a row of a table that all ranks exchange and keep until gradients change
    reduced, whole on all ranks (stage 0)       nothing is sent
    of backwards inside ``no_sync`` (0 and 1)   this rank's own, not divided, as DDP's ``param.grad`` has it then
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.grad_store import GradStore
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.planning.layout import Fragment, cut_runs


def alike(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Keys of tensors of one device and dtype: torch's operations on many tensors take them together."""
    kinds: dict[object, list[int]] = {}
    for key, tensor in tensors.items():
        kinds.setdefault((tensor.device, tensor.dtype), []).append(key)
    return list(kinds.values())


def norms_of(tensors: Mapping[int, Tensor], norm_type: float, device: torch.device) -> dict[int, Tensor]:
    """The norm of each, computed in fp32 (fp64 of fp64) where it rests: 0-d fp64 on ``device``."""
    norms: dict[int, Tensor] = {}
    for same in alike(tensors):
        wide = torch.promote_types(tensors[same[0]].dtype, torch.float32)
        found = torch._foreach_norm([tensors[key] for key in same], norm_type, dtype=wide)
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


def views_of(grad: Tensor, fragments: Sequence[Fragment], slots: set[int]) -> list[Tensor]:
    """The parts of ``grad``, which ``fragments`` tile, that belong to ``slots``: views, adjacent ones in one."""
    keys = [True if fragment.index in slots else None for fragment in fragments]
    return [grad[run.start : run.stop] for _, run in cut_runs(fragments, keys)]


def parts_of_shards(
    buckets: Iterable[Bucket], wanted: Mapping[Bucket, set[int]], look_up: Callable[[GradStore], Tensor | None]
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Cut this rank's shards of the reduced gradients of ``wanted`` slots into parts, numbered in order.

    Args:
        look_up: what is known of a bucket's whole shard already; what is known of is not waited for.

    Returns:
        What is known of parts, and views of the other parts.
    """
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
        views |= enumerate(views_of(shard, bucket.layout.fragments(bucket.comm.shard_rank), wanted[bucket]), number)
    return known, views


class GradNorms:
    """The norms of one engine's gradients; those of single ones are kept until gradients change.

    Args:
        settle: waits until gradients are what users' code has left of them.
    """

    def __init__(self, reducer: Reducer, bucket_of: Mapping[int, Bucket], settle: Callable[[], None]) -> None:
        self._reducer, self._comm = reducer, reducer.comm
        self._bucket_of, self._settle = bucket_of, settle
        self._tables: dict[float, dict[int, Tensor]] = {}  # norm type -> id of the parameter -> 0-d fp64

    def forget(self) -> None:
        """Drop the norms that are kept: gradients change, on all ranks alike."""
        self._tables.clear()

    @outside_autograd
    def norm(self, info: ParamInfo, norm_type: float, dtype: torch.dtype | None) -> Tensor:
        """``param.grad.norm(norm_type)`` of DDP: 0-d, in the dtype that the gradient has there, on the device.

        All ranks ask for the norm of any parameter, or none does: the first time after a change they exchange values.
        As under DDP, gradients are multiplied by the loss scale until ``Reducer.unscale``. Collective.

        Raises:
            RuntimeError: the gradient lacks some of a backward that has raised, or some of it is reduced and some is of
                this rank alone.
            StallError, ApartError: other ranks are somewhere else.
        """
        if norm_type not in self._tables:
            self._settle()
            self._tables[norm_type] = self._compute(norm_type)
        norm = self._tables[norm_type].get(id(info.param))
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
        """Of the norm of one parameter's gradient."""
        return self._bucket_of[id(info.param)].dtypes.master.to_real()

    @outside_autograd
    def total(self, places: Iterable[Place], norm_type: float) -> Tensor:
        """The norm of the reduced gradients at ``places`` together: 0-d, fp32 (fp64 of fp64). Collective.

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
        known, views = parts_of_shards(self._reducer.grads, wanted, lambda store: store.norm(norm_type))
        if (known or views) and self._comm.replica == 0:  # the other replicas hold the same
            # Of all buckets at once: a GPU is asked a few times.
            parts = {number: norm.double() for number, norm in known.items()} | norms_of(views, norm_type, device)
            norms = torch.stack([parts[number] for number in range(len(parts))])
            partial[self._comm.shard_rank] = norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
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

    def _compute(self, norm_type: float) -> dict[int, Tensor]:
        """Compute the norms of all gradients, without the loss scale; of mixed ones none. Collective."""
        self._reducer.refuse_partial()
        comm = self._comm
        infos: list[ParamInfo] = []
        factors: list[float] = []
        shared: list[int] = []  # numbers of those of which each rank has a part
        parts: dict[int, Tensor] = {}  # by place in the table
        for bucket, grads in self._reducer.grads.items():
            if self._reducer.unreduced and grads.accumulates:
                for slot, grad in grads.local_grads().items() if not bucket.grad_store.is_there else ():
                    parts[len(infos) * comm.shard_size] = grad
                    infos.append(bucket.params[slot])
                    factors.append(self._reducer.local_scale(bucket))
                continue
            if not bucket.grad_store.is_there or not grads.agreed:
                continue
            rows = {slot: len(infos) + number for number, slot in enumerate(sorted(grads.agreed))}
            infos += [bucket.params[slot] for slot in rows]
            factors += [1.0] * len(rows)
            if bucket.plan.shards_master:
                shared += rows.values()
            for rank, slot, part in _parts_of_reduced(bucket):
                if slot in rows:
                    parts[rows[slot] * comm.shard_size + rank] = part
        table = torch.zeros(len(infos) * comm.shard_size, dtype=torch.float64)
        if parts:
            norms = norms_of(parts, norm_type, comm.device)
            table[torch.tensor(list(norms))] = torch.stack(list(norms.values())).cpu()
        table = table.view(len(infos), comm.shard_size)
        if shared:
            # Other replicas hold the same shards.
            column = table[shared, comm.shard_rank].tolist() if comm.replica == 0 else []
            # By the ranks' agreements, where each says what it is there for: where other ranks are at another
            # agreement, all find out; and where they are anywhere else, none takes this message for one of its own.
            with comm.at("a read of .grad.norm(), which takes all ranks"):
                columns = comm.meet(column, f"the norms of gradients, of type {norm_type:g}")
            for number, rank in enumerate(comm.topology.shard_groups[0]):
                table[shared, number] = torch.tensor(columns[rank], dtype=torch.float64)
        whole = _joined(table, norm_type) * torch.tensor(factors, dtype=torch.float64)
        return {id(info.param): norm for info, norm in zip(infos, whole.to(comm.device), strict=True)}


def _parts_of_reduced(bucket: Bucket) -> Iterator[tuple[int, int, Tensor]]:
    """What this rank holds of a reduced gradient, cut as the ranks' shards are: rank, slot and values of each part."""
    gradient, low = bucket.grad, bucket.owned_range[0]
    assert gradient is not None
    for rank in [bucket.comm.shard_rank] if bucket.plan.shards_master else range(bucket.layout.world_size):
        start = bucket.layout.shard_range(rank)[0] - low
        for fragment in bucket.layout.fragments(rank):
            first = start + fragment.start
            yield rank, fragment.index, gradient[first : first + fragment.numel]


def _joined(parts: Tensor, norm_type: float) -> Tensor:
    """Norms of whole tensors out of those of their parts, ``[tensors, parts]`` fp64; 0 where there is no part."""
    if norm_type == 0.0:
        return parts.sum(1)
    if math.isinf(norm_type):
        return parts.amax(1)
    return (parts**norm_type).sum(1) ** (1.0 / norm_type)
