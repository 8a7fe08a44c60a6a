"""One window of a step of whole tensors: from flat shards to their owners, and back.

::

    main     | arrive 0 | step 0 ............ | arrive 1 | land 0 | step 1 ............ | arrive 2 ...
    messages | there 0  | there 1 ..          | back 0 ..         | there 2 ..          | back 1 ..

There go masters and gradients, back go masters. What is replicated, or all on one rank, is stepped where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.reduction import Pending
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.layerwise.owned import Owned, WholeTensor
from lightning_zero.planning.owners import Piece, Route, Traveller


class Window:
    """Tensors that are stepped at a time. The methods are called in their order here, on all ranks.

    Attributes:
        completes: buckets that are stepped when this window is; those of a later one are not.

    Args:
        tensors: the same on all ranks, those of other owners too.
        used: ids of the parameters that have a gradient.
        find: the way of what travels, on this rank.
    """

    def __init__(
        self,
        tensors: Sequence[WholeTensor],
        used: set[int],
        owned: Owned,
        comm: Communicator,
        find: Callable[[Sequence[Bucket], Sequence[Traveller]], Route],
    ) -> None:
        self._comm, self._owned = comm, owned
        self._with_grad = used & {id(t.info.param) for t in tensors if t.bucket.grad_store.is_there}
        self.buckets = list(dict.fromkeys(tensor.bucket for tensor in tensors))
        self._travel = [tensor for tensor in tensors if tensor.travels]
        self.here = [tensor for tensor in tensors if tensor.is_here]
        there = [traveller_of(tensor, self.buckets, self._with_grad) for tensor in self._travel]
        self._route = find(self.buckets, there) if there else None
        self._pending: Pending | None = None
        self._flat: dict[int, tuple[Tensor, Tensor | None]] = {}  # of what has travelled: values and gradient
        self.completes = set(self.buckets)
        first = self.buckets[0].label
        self._label = first if len(self.buckets) == 1 else f"{first} and {len(self.buckets) - 1} more"

    # -- there ----------------------------------------------------------------------------------------------------

    def begin_open(self) -> None:
        """Start reading what rests in files."""
        for bucket in self.buckets:
            bucket.home.begin_open()

    def open(self) -> None:
        for bucket in self.buckets:
            bucket.home.open(to_write=True)

    def send(self) -> None:
        """Send shards of masters and gradients to the owners."""
        if (route := self._route) is None:
            return
        data = torch.empty(sum(route.own_sizes), dtype=torch.uint8, device=self._comm.device)
        for piece, tensor in self._pieces(route.own):
            part = slice(piece.start, piece.start + piece.numel)
            master = tensor.bucket.master
            _at(data, piece.value, piece.numel, master.dtype).copy_(master[part])
            if id(tensor.info.param) in self._with_grad:
                grad = tensor.bucket.grad
                assert grad is not None
                _at(data, piece.grad, piece.numel, grad.dtype).copy_(grad[part])
        self._pending = self._comm.exchange_parts(
            data, route.own_sizes, route.owned_sizes, f"{self._label} (whole tensors)"
        )

    def arrive(self) -> None:
        """Give the stand-ins of this rank their values and gradients."""
        if self._pending is not None and self._route is not None:
            data, self._pending = self._pending.wait(), None
            for tensor in self._travel:
                if tensor.is_here:
                    self._flat[id(tensor)] = self._room(tensor)
            for piece, tensor in self._pieces(self._route.owned):
                values, grad = self._flat[id(tensor)]
                part = slice(piece.offset, piece.offset + piece.numel)
                values[part].copy_(_at(data, piece.value, piece.numel, values.dtype))
                if grad is not None:
                    grad[part].copy_(_at(data, piece.grad, piece.numel, tensor.bucket.dtypes.grad))
            del data
            for piece, tensor in self._pieces(self._route.kept):
                values, grad = self._flat[id(tensor)]
                part = slice(piece.offset, piece.offset + piece.numel)
                own = slice(piece.start, piece.start + piece.numel)
                values[part].copy_(tensor.bucket.master[own])
                if grad is not None and tensor.bucket.grad is not None:
                    grad[part].copy_(tensor.bucket.grad[own])
        for tensor in self.here:
            values, grad = self._flat[id(tensor)] if tensor.travels else self._in_place(tensor)
            shaped = values.as_strided(tensor.info.shape, tensor.info.strides) if tensor.travels else values
            if grad is not None and tensor.travels:
                grad = grad.as_strided(tensor.info.shape, tensor.info.strides)
            self._owned.show(tensor, shaped, grad)

    def _room(self, tensor: WholeTensor) -> tuple[Tensor, Tensor | None]:
        numel, dtype = tensor.info.numel, tensor.bucket.dtypes.master
        values = torch.empty(numel, dtype=dtype, device=self._comm.device)
        return values, torch.empty_like(values) if id(tensor.info.param) in self._with_grad else None

    def _in_place(self, tensor: WholeTensor) -> tuple[Tensor, Tensor | None]:
        """Values and gradient of a tensor all of which is on this rank: views where they rest on the device."""
        bucket, device = tensor.bucket, self._comm.device
        values = bucket.part_of(bucket.master, tensor.info).detach().to(device)
        if id(tensor.info.param) not in self._with_grad:
            return values, None
        assert bucket.grad is not None
        return values, bucket.part_of(bucket.grad, tensor.info).to(device, values.dtype)

    # -- and back ---------------------------------------------------------------------------------------------------

    def send_back(self) -> None:
        """Send new values of this rank's tensors to where their shards rest."""
        self._flat = {}  # gradients go now; stand-ins hold the values
        for tensor in self.here:
            tensor.key.grad = None
            if not tensor.travels:
                place = tensor.bucket.part_of(tensor.bucket.master, tensor.info)
                if tensor.key.data_ptr() != place.data_ptr() or tensor.key.device != place.device:
                    place.copy_(tensor.key.detach())
        if (route := self._route) is not None:
            flat = {id(tensor): tensor.info.flattened(tensor.key.detach()) for tensor in self.here if tensor.travels}
            data = torch.empty(sum(route.owned_back), dtype=torch.uint8, device=self._comm.device)
            for piece, tensor in self._pieces(route.owned):
                part = flat[id(tensor)][piece.offset : piece.offset + piece.numel]
                _at(data, piece.back, piece.numel, part.dtype).copy_(part)
            for piece, tensor in self._pieces(route.kept):
                part = flat[id(tensor)][piece.offset : piece.offset + piece.numel]
                tensor.bucket.master[piece.start : piece.start + piece.numel].copy_(part)
            del flat
            label = f"{self._label} (stepped)"
            self._pending = self._comm.exchange_parts(data, route.owned_back, route.own_back, label)
        for tensor in self.here:
            self._owned.hide(tensor)

    def land(self) -> Exception | None:
        """Have new masters and new state where they rest. Files are still being written afterwards.

        Returns:
            Why state has found no room. It is not raised: other ranks wait for the messages of this one.
        """
        failed: Exception | None = None
        if self._pending is not None and self._route is not None:
            data, self._pending = self._pending.wait(), None
            for piece, tensor in self._pieces(self._route.own):
                master = tensor.bucket.master
                part = master[piece.start : piece.start + piece.numel]
                part.copy_(_at(data, piece.back, piece.numel, master.dtype))
        for bucket in self.buckets:
            try:
                self._owned.settle(bucket, self.here)
            except Exception as error:
                failed = error
            # Once: what a push sends may be on its way to the device for long, and is not written to meanwhile.
            if bucket in self.completes:
                bucket.push()
            bucket.home.close(changed=True)
        return failed

    def settle(self) -> None:
        """Wait until files are written."""
        for bucket in self.buckets:
            bucket.home.settle()

    def _pieces(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, WholeTensor]]:
        return ((piece, self._travel[piece.traveller]) for piece in pieces)


def _at(data: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Elements [numel] at a byte of a message."""
    return data[start : start + numel * dtype.itemsize].view(dtype)


def traveller_of(tensor: WholeTensor, buckets: Sequence[Bucket], with_grad: set[int]) -> Traveller:
    """A tensor of a window of these buckets.

    Args:
        with_grad: ids of the parameters that have a gradient.
    """
    dtypes = tensor.bucket.dtypes
    grad = dtypes.grad.itemsize if id(tensor.info.param) in with_grad else 0
    return Traveller(buckets.index(tensor.bucket), tensor.info.slot, tensor.owner, dtypes.master.itemsize, grad)
