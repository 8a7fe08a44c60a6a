"""``zero.sequence_parallel`` under the Trainer: what a strategy does around its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.checkpoint.rng import Generators
from lightning_zero.comm.sequence import SequenceGroup, open_sequence_group
from lightning_zero.config import ConfigError
from lightning_zero.device import accelerator_of
from lightning_zero.engine import Engine
from lightning_zero.planning.topology import check_sequence_parallel
from lightning_zero.sequence.step import SequenceSteps, check_alike
from lightning_zero.trainer.sequence_check import SequenceCheck

LARGEST_SEED = 2**62


class LongSequences:
    """Steps on whole sequences, until :meth:`open` has made them steps on parts.

    Attributes:
        group: the ranks that share a sequence with this one; ``None``: sequences are whole.
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self.group: SequenceGroup | None = None
        self._steps: SequenceSteps | None = None
        self._check: SequenceCheck | None = None

    @classmethod
    def open(cls, module: nn.Module, engine: Engine, size: int) -> LongSequences:
        """All ranks call it together.

        Args:
            size: ranks that share a sequence.

        Raises:
            ConfigError: the ranks do not divide, or the module is compiled.
        """
        found = cls()
        check_sequence_parallel(size, engine.world_size)
        if size > 1:
            if engine.is_compiled:
                raise ConfigError(
                    "zero.sequence_parallel: expected a module that torch.compile has not made (attention is another "
                    f"function in a step, which graphs hide), got a compiled one with zero.sequence_parallel={size}. "
                    "Drop torch.compile, or zero.sequence_parallel."
                )
            found._device = engine.comm.device
            found.group = open_sequence_group(dist.group.WORLD, size, found._device, engine.comm.waits)
            found._steps = SequenceSteps(module, found.group)
            found._check = SequenceCheck(module, engine, found._steps, found.group)
        return found

    def check_alike(self, batch: Any) -> None:
        """See :func:`check_alike`."""
        if self.group is not None:
            check_alike(batch, self.group)

    @property
    def trying(self) -> SequenceCheck | None:
        """Tries a step now, which is not real."""
        return self._check if self._check is not None and self._check.found is not None else None

    def check(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any, *, together: bool = True) -> None:
        """Before a step, outside of its scope; see :meth:`SequenceCheck.before`."""
        if self._check is not None:
            self._check.before(name, step, (*args, *kwargs.values()), together=together)

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._steps is None:
            return step(*args, **kwargs)
        with self._random_numbers_of_a_part():
            batch, *more = (*args, *kwargs.values())
            part, own = self._steps.cut(batch)
            return self._steps.train(part, step, own, *more)

    def evaluation_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._steps is None:
            return step(*args, **kwargs)
        batch, *more = (*args, *kwargs.values())
        part, own = self._steps.cut(batch)
        return self._steps.evaluate(part, step, own, *more)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        if self._steps is None:
            yield
        else:
            with self._steps.backward():
                yield

    def manual_loss(self, loss: Tensor) -> Tensor:
        return loss if self._steps is None else self._steps.manual_loss(loss)

    @contextlib.contextmanager
    def _random_numbers_of_a_part(self) -> Iterator[None]:
        """Inside, torch draws other numbers on each rank of a group: dropout of different positions, or heads.

        Outside they draw the same ones, so that they make the same batches. What is drawn inside follows from the state
        outside, which checkpoints hold. Python's and NumPy's numbers stay the same: by them models choose layers, on
        all ranks alike.
        """
        assert self.group is not None
        seed = int(torch.randint(LARGEST_SEED, (1,), dtype=torch.int64))
        before, accelerator = Generators.now(self._device), accelerator_of(self._device)
        own = Generators.seeded(seed + self.group.rank, self._device)
        _set(own, accelerator)
        try:
            yield
        finally:
            _set(before, accelerator)


def _set(generators: Generators, accelerator: Any) -> None:
    torch.set_rng_state(generators.torch)
    if generators.cuda is not None:
        accelerator.set_rng_state(generators.cuda)
