"""Tells a module's own tensors from those of a batch: a table may be as long as the batch is, and is still one."""

from __future__ import annotations

from weakref import ref

from torch import Tensor, nn


class Tables:
    """Parameters of any module and buffers of ``module``, and views of them (the first rows of a cache of rotations).

    Buffers may be replaced: :meth:`look` finds those of now. Views of parameters are found by what they are views of,
    as the memory of parameters comes and goes.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else ref(module)
        # Weakly: a buffer that is replaced may go. By its storage, which slices have in inference mode too.
        self._buffers: dict[int, ref[Tensor]] = {}
        self.look()

    def look(self) -> None:
        module = self._module() if self._module is not None else None
        self._buffers = {}
        for buffer in module.buffers() if module is not None else ():
            if buffer.ndim and (storage := _storage(buffer)) is not None:
                self._buffers[storage] = ref(buffer)

    def __contains__(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True
        storage = _storage(tensor)
        buffer = self._buffers[storage]() if storage in self._buffers else None
        return buffer is not None and _storage(buffer) == storage


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no storage
        return None
