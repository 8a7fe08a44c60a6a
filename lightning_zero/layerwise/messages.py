"""The messages that bring the tensors of an optimizer's step to their owners, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.layerwise.owned import Owned, WholeTensor
from lightning_zero.planning.owners import Piece, Route, Transfer

Flat = tuple[Tensor, Tensor | None]  # values and gradient, or None


class Message:
    """Sends ``tensors`` to their owners in one message, and back in another. Other ranks may own some of the tensors.
    ``used``: ids of the parameters that have a gradient. ``find``: returns this rank's route for given transfers."""

    def __init__(
        self,
        tensors: Sequence[WholeTensor],
        used: set[int],
        owned: Owned,
        comm: Communicator,
        find: Callable[[tuple[Bucket, ...], tuple[Transfer, ...]], Route],
    ) -> None:
        self._comm, self._owned, self.tensors = comm, owned, tensors
        self._with_grad = used & {id(t.info.param) for t in tensors if t.bucket.grad_store.is_there}
        self.buckets = tuple(dict.fromkeys(tensor.bucket for tensor in tensors))
        self._travel = [tensor for tensor in tensors if tensor.travels]
        self.here = [tensor for tensor in tensors if tensor.is_here]
        there = tuple(transfer_of(tensor, self.buckets, self._with_grad) for tensor in self._travel)
        self._route = find(self.buckets, there) if there else None
        first = self.buckets[0].label
        self._label = first if len(self.buckets) == 1 else f"{first} and {len(self.buckets) - 1} more"

    def begin_open(self) -> None:
        for bucket in self.buckets:
            bucket.storage.begin_open()

    def bring(self, *, state: bool = True) -> None:
        """Send shards of masters and gradients to the owners, and set this rank's full parameters. Collective.
        ``state``: False in the middle of a step, when the optimizer state already is where the step needs it."""
        for bucket in self.buckets:
            bucket.storage.open(to_write=True)
        came = {} if self._route is None else self._exchanged(self._route)
        for tensor in self.here:
            if tensor.travels:
                (values, grad), info = came.pop(id(tensor)), tensor.info
                shaped = None if grad is None else grad.as_strided(info.shape, info.strides)
                self._owned.show(tensor, values.as_strided(info.shape, info.strides), shaped, state=state)
            else:
                self._owned.show(tensor, *self._in_place(tensor), state=state)

    def _exchanged(self, route: Route) -> dict[int, Flat]:
        """Exchange shards along ``route``. Return {``id`` of a tensor owned here: (flat values, gradient or None)}."""
        data = torch.empty(sum(route.own_sizes), dtype=torch.uint8, device=self._comm.device)
        for piece, tensor in self._pieces(route.own):
            values, grad = self._shards(tensor)
            part = slice(piece.start, piece.start + piece.numel)
            _at(data, piece.value, piece.numel, values.dtype).copy_(values[part])
            if grad is not None:
                _at(data, piece.grad, piece.numel, grad.dtype).copy_(grad[part])
        label = f"{self._label} (whole tensors)"
        data = self._comm.exchange_parts(data, route.own_sizes, route.owned_sizes, label).wait()
        found: dict[int, Flat] = {}
        for tensor in self._travel:
            if tensor.is_here:
                whole = torch.empty(tensor.info.numel, dtype=tensor.bucket.dtypes.master, device=self._comm.device)
                found[id(tensor)] = whole, torch.empty_like(whole) if self._has_grad(tensor) else None
        for piece, tensor in self._pieces(route.owned):
            values, grad = found[id(tensor)]
            part = slice(piece.offset, piece.offset + piece.numel)
            values[part].copy_(_at(data, piece.value, piece.numel, values.dtype))
            if grad is not None:
                grad[part].copy_(_at(data, piece.grad, piece.numel, tensor.bucket.dtypes.grad))
        for piece, tensor in self._pieces(route.kept):
            own = slice(piece.start, piece.start + piece.numel)
            for target, shard in zip(found[id(tensor)], self._shards(tensor), strict=True):
                if target is not None and shard is not None:
                    target[piece.offset : piece.offset + piece.numel].copy_(shard[own])
        return found

    def _has_grad(self, tensor: WholeTensor) -> bool:
        return id(tensor.info.param) in self._with_grad

    def _shards(self, tensor: WholeTensor) -> Flat:
        """Return this rank's masters of the tensor's bucket, and their gradient if the tensor has one."""
        return tensor.bucket.master, tensor.bucket.grad if self._has_grad(tensor) else None

    def _in_place(self, tensor: WholeTensor) -> Flat:
        """Return (values, gradient or None) of a tensor whose masters are complete on this rank. The results are views
        if masters and gradients are on the device, else copies."""
        bucket, device = tensor.bucket, self._comm.device
        master, grad = self._shards(tensor)
        values = bucket.part_of(master, tensor.info).detach().to(device)
        return values, None if grad is None else bucket.part_of(grad, tensor.info).to(device, values.dtype)

    def give_back(self, *, state: bool = True) -> Exception | None:
        """Send the stepped values of this rank's tensors back to the ranks of their shards, and write masters and, with
        ``state``, optimizer state to storages. Collective. If a write fails, return the error, else None: this method
        must not raise, because other ranks wait for this rank."""
        for tensor in self.here:
            if not tensor.travels:
                place = tensor.bucket.part_of(tensor.bucket.master, tensor.info)
                if tensor.key.data_ptr() != place.data_ptr() or tensor.key.device != place.device:
                    place.copy_(tensor.key.detach())
        # Whole buckets: all ranks have the masters of other optimizers' tensors too, with the same values.
        for bucket, tensor in {t.bucket: t for t in self.tensors if t.is_broadcast}.items():
            bucket.master.copy_(broadcast_from_owner(tensor, bucket.master.to(self._comm.device)))
        if self._route is not None:
            self._return(self._route)
        for tensor in self.here:
            self._owned.hide(tensor)
        failed: Exception | None = None
        for bucket in self.buckets:
            try:
                if state:
                    self._owned.move_to_tier(bucket)
            except Exception as error:
                failed = error
            bucket.copy_master_to_params()
            bucket.storage.close(changed=True)
        return failed

    def _return(self, route: Route) -> None:
        flat = {id(tensor): tensor.info.flattened(tensor.key.detach()) for tensor in self.here if tensor.travels}
        data = torch.empty(sum(route.owned_back), dtype=torch.uint8, device=self._comm.device)
        for piece, tensor in self._pieces(route.owned):
            part = flat[id(tensor)][piece.offset : piece.offset + piece.numel]
            _at(data, piece.back, piece.numel, part.dtype).copy_(part)
        for piece, tensor in self._pieces(route.kept):
            part = flat[id(tensor)][piece.offset : piece.offset + piece.numel]
            tensor.bucket.master[piece.start : piece.start + piece.numel].copy_(part)
        del flat
        pending = self._comm.exchange_parts(data, route.owned_back, route.own_back, f"{self._label} (stepped)")
        data = pending.wait()
        for piece, tensor in self._pieces(route.own):
            master = tensor.bucket.master
            part = master[piece.start : piece.start + piece.numel]
            part.copy_(_at(data, piece.back, piece.numel, master.dtype))

    def wait_for_rest(self) -> None:
        for bucket in self.buckets:
            bucket.storage.wait_for_rest()

    def _pieces(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, WholeTensor]]:
        return ((piece, self._travel[piece.transfer]) for piece in pieces)


def broadcast_from_owner(tensor: WholeTensor, values: Tensor) -> Tensor:
    """Overwrite ``values`` on all ranks with those of the first replica's owner, and return them. Collective."""
    comm = tensor.bucket.comm
    comm.broadcast(values, comm.ranks.topology.shard_groups[0][tensor.owner])
    return values


def _at(data: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    return data[start : start + numel * dtype.itemsize].view(dtype)


def transfer_of(tensor: WholeTensor, buckets: Sequence[Bucket], with_grad: set[int]) -> Transfer:
    """Return a description of how ``tensor`` is sent to its owner. It refers to the tensor's bucket by its index in
    ``buckets``, the buckets of the message. ``with_grad``: ids of parameters whose gradient is sent too."""
    dtypes = tensor.bucket.dtypes
    grad = dtypes.grad.itemsize if id(tensor.info.param) in with_grad else 0
    return Transfer(buckets.index(tensor.bucket), tensor.info.slot, tensor.owner, dtypes.master.itemsize, grad)
