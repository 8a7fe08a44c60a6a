"""Refuses calls that would see the placeholders of sharded parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from lightning_zero.engine.units.bucket import Bucket


class Fence:
    """Refuses operations on the module that would see placeholders, unless it is lowered.

    Args:
        in_pass: whether a pass is open.
    """

    def __init__(self, buckets: Sequence[Bucket], in_pass: Callable[[], bool]) -> None:
        self._buckets, self._in_pass = buckets, in_pass
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
            and all(bucket.plan.params_are_masters for bucket in self._buckets)
        )
        if plain or all(bucket.is_plain for bucket in self._buckets):
            return
        raise RuntimeError(
            f"{what} of a sharded module would read or write placeholders instead of parameters. Use "
            "trainer.save_checkpoint(path) and trainer.fit(model, ckpt_path=path), or fabric.save and fabric.load, or "
            "trainer.strategy.export(folder) for a model of transformers, or wrap the call in "
            "`with lightning_zero.gather(model):`, on all ranks."
        )
