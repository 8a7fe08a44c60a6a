"""Placeholders of sharded parameters: finds writes that reached them, and refuses calls that would read them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from lightning_zero.engine.bucket import Bucket, ParamInfo
from lightning_zero.memory.buffers import Guard


class PlaceholderGuard:
    """Gives parameters their placeholders, one guard vector for each dtype, and checks them."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        by_dtype: dict[torch.dtype, list[ParamInfo]] = {}
        for bucket in buckets:
            if bucket.resharding or bucket.refreshed:
                by_dtype.setdefault(bucket.dtypes.compute, []).extend(bucket.params)
        self._guards: list[tuple[Guard, list[ParamInfo]]] = []
        for dtype, infos in by_dtype.items():
            guard = Guard(len(infos), dtype, buckets[0].comm.device)
            for index, info in enumerate(infos):
                info.placeholder = guard.placeholder(index, info.shape)
            if buckets[0].comm.device.type != "meta":  # nothing has values there
                self._guards.append((guard, infos))
        self._in_flight: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def check(self) -> None:
        """Raise if a placeholder was written to. On a device this reads the flags of the previous check.

        Raises:
            RuntimeError: names the parameters.
        """
        flags = self._in_flight
        self._in_flight = [self._read(guard) for guard, _ in self._guards]
        if any(event is None for _, event in self._in_flight):
            flags = self._in_flight  # host memory: known at once
        for (flag, event), (guard, infos) in zip(flags, self._guards, strict=False):
            if event is not None:
                event.synchronize()
            if bool(flag):
                names = ", ".join(infos[i].fqn for i in guard.written())
                raise RuntimeError(
                    f"{names}: written to while sharded, where the write is lost. Change parameters inside "
                    "`with lightning_zero.gather(module):`."
                )

    @staticmethod
    def _read(guard: Guard) -> tuple[Tensor, torch.cuda.Event | None]:
        flag = guard.touched()
        if flag.device.type == "cpu":
            return flag, None
        host = torch.empty((), dtype=flag.dtype, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event


class Fence:
    """Refuses operations on the module that would see placeholders, unless it is lowered.

    Args:
        shown: buckets inside a ``gather()``, as they are then.
        in_pass: whether a pass is open.
    """

    def __init__(self, buckets: Sequence[Bucket], shown: Collection[Bucket], in_pass: Callable[[], bool]) -> None:
        self._buckets, self._shown, self._in_pass = buckets, shown, in_pass
        self._lowered = False

    @contextlib.contextmanager
    def lowered(self) -> Iterator[None]:
        """Inside, nothing is refused."""
        previous, self._lowered = self._lowered, True
        try:
            yield
        finally:
            self._lowered = previous

    def refuse(self, what: str) -> None:
        """Raise where ``what`` would see placeholders.

        Raises:
            RuntimeError: names the right way.
        """
        if self._lowered:
            return
        plain = (
            what == "state_dict()"
            and not self._in_pass()
            and not any(b.resharding or b.refreshed or (b.has_master and b.trainable) for b in self._buckets)
        )
        if plain or all(bucket in self._shown for bucket in self._buckets):
            return
        raise RuntimeError(
            f"{what} of a sharded module would read or write placeholders instead of parameters. Use "
            "trainer.save_checkpoint() and trainer.fit(ckpt_path=), or engine.state_dict() and "
            "engine.load_state_dict(), or wrap the call in `with lightning_zero.gather(module):`."
        )
