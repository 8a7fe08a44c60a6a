"""Placeholders of sharded parameters, and a fence around calls that would see them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from lightning_zero.engine.units.bucket import Bucket, ParamInfo
from lightning_zero.engine.units.flat_buffer import placeholders


def make_placeholders(buckets: Sequence[Bucket]) -> None:
    """Give the parameters that can be absent what stands for their values: NaN in their shape."""
    by_dtype: dict[torch.dtype, list[ParamInfo]] = {}
    for bucket in buckets:
        if bucket.resharding or bucket.refreshed:
            by_dtype.setdefault(bucket.dtypes.compute, []).extend(bucket.params)
    for dtype, infos in by_dtype.items():
        shapes = [info.shape for info in infos]
        for info, placeholder in zip(infos, placeholders(shapes, dtype, buckets[0].comm.device), strict=True):
            info.placeholder = placeholder


class Fence:
    """Refuses operations on the module that would see placeholders, unless it is lowered.

    Args:
        shown: buckets inside a ``gather()``, as they are then.
        in_pass: whether a pass is open.
    """

    def __init__(self, buckets: Sequence[Bucket], shown: Collection[Bucket], in_pass: Callable[[], bool]) -> None:
        self._buckets, self._shown, self._in_pass = buckets, shown, in_pass
        self._lowered = False

    @property
    def is_lowered(self) -> bool:
        return self._lowered

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
