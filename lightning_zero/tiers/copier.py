"""Copies between host and device memory, behind the caller's stream and without stopping the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Copier:
    """Copies between host and device, on streams of its own where the device is CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, Any] = {}
        if device.type == "cuda":
            self._streams = {"h2d": torch.cuda.Stream(device), "d2h": torch.cuda.Stream(device)}

    def mark(self) -> Any:
        """An event behind what the caller's stream has queued so far; None without streams."""
        return torch.cuda.current_stream(self._device).record_event() if self._streams else None

    def copy(self, out: Tensor, value: Tensor, after: Sequence[Any] = ()) -> Any:
        """Queue the copy behind the events ``after``; gives the event of its end, None if it has ended."""
        out, value = flat(out), flat(value)
        if not self._streams or (out.device.type == "cpu" and value.device.type == "cpu"):
            out.copy_(value)
            return None
        stream = self._streams["d2h" if out.device.type == "cpu" else "h2d"]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            out.copy_(value, non_blocking=True)
            return stream.record_event()

    def copy_in_thread(self, out: Tensor, value: Tensor, after: Any) -> None:
        """Copy bytes and wait for the end, from a thread of ours."""
        if out.device.type == "cpu" and value.device.type == "cpu":
            # Not copy_: in each thread it would start a team of intra-op threads, beyond the rank's thread budget.
            ctypes.memmove(out.data_ptr(), value.data_ptr(), out.numel() * out.element_size())
        elif (event := self.copy(out, value, (after,))) is not None:
            event.synchronize()

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor as [numel], without history."""
    return tensor.detach().view(-1)
