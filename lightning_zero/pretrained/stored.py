"""Tensors whose values stay in files until they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Read = Callable[[int, int, Sequence[int] | None], Tensor]


class StoredTensor(Tensor):
    """A tensor whose values are in a file. The engine reads only this rank's ranges of the values. Any other use, such
    as an operation in a hook that reads a checkpoint, loads the whole tensor to the host each time."""

    _read: Read

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, read: Read) -> StoredTensor:
        """``read(start, stop, order)`` must return elements ``[start, stop)`` of the flattened tensor in ``dtype``, on
        the host. ``order``: the order of dimensions in which the tensor is flattened; None: row-major."""
        made: StoredTensor = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device="cpu")  # type: ignore
        made._read = read
        return made

    def read(self, start: int, stop: int, order: Sequence[int] | None = None) -> Tensor:
        """Read elements ``[start, stop)`` of the tensor, flattened with its dimensions in ``order`` (None: row-major),
        and return them on the host."""
        return self._read(start, stop, order)

    def whole(self) -> Tensor:
        return self._read(0, self.numel(), None).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> StoredTensor:
        return self  # nobody can write to it

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor({tuple(self.shape)}, {self.dtype})"


class KeptTensor(StoredTensor):
    """The state dict entry of a frozen parameter that a checkpoint lacks. Loading it leaves the parameter as it is."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype) -> KeptTensor:
        def read(start: int, stop: int, order: Any) -> Tensor:
            raise RuntimeError("the checkpoint has no values of this frozen parameter (zero.checkpoint.exclude_frozen)")

        made = StoredTensor.__new__(cls, shape, dtype, read)
        assert isinstance(made, KeptTensor)
        return made
