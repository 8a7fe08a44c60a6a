"""Run the Trainer's steps on parts of sequences, for ``zero.sequence_parallel``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.checkpoint.rng import Generators
from lightning_zero.comm.sequence import SequenceGroup, open_sequence_group
from lightning_zero.device import accelerator_of
from lightning_zero.engine import Engine
from lightning_zero.planning.topology import Ranks
from lightning_zero.sequence.part import SequencePart, WholeBatch
from lightning_zero.sequence.step import SequenceSteps, check_alike
from lightning_zero.settings import ConfigError
from lightning_zero.trainer.sequence_check import SequenceCheck
from lightning_zero.trainer.shared_batches import SharedBatches, seed_alike
from lightning_zero.trainer.step_tokens import StepTokens

LARGEST_SEED = 2**62


class LongSequences(SequenceSteps):
    """Runs the module's steps: on whole sequences if ``group`` is None, else on one part of a sequence per rank."""

    def __init__(
        self,
        module: Any = None,
        engine: Engine | None = None,
        ranks: Ranks | None = None,
        tokens: StepTokens | None = None,
    ) -> None:
        """Open the group of the ranks that share a sequence or a batch, if ``ranks`` has one. Raise ConfigError if a
        module with parts of sequences is compiled. ``tokens``: counts the tokens of training steps. Collective."""
        self.group: SequenceGroup | None = None
        self.tokens = tokens
        self._check: SequenceCheck | None = None
        self._shared_batches: SharedBatches | None = None
        if engine is None or ranks is None or ranks.same_batch.size == 1:
            super().__init__(module, None)
            return
        divides = ranks.sequence.size > 1
        if divides and engine.compiled.are_there:
            raise ConfigError(
                "zero.sequence_parallel: expected a module that is not compiled (a compiled graph would not call "
                "the attention that exchanges heads), got a compiled one with "
                f"zero.sequence_parallel={ranks.sequence.size}. Drop torch.compile, or zero.sequence_parallel."
            )
        group = open_sequence_group(dist.group.WORLD, ranks.same_batch, engine.comm.device, engine.comm.waits)
        super().__init__(module, group if divides else None)
        if divides:
            self.group, self._check = group, SequenceCheck(module, engine, self, group)
        else:
            self._shared_batches = shared = SharedBatches(group)
            engine.passes.on_grad = lambda info, grad: shared.note(info.fqn, grad) if info.split is None else None

    def check_alike(self, batch: Any) -> None:
        if self.group is not None:
            check_alike(batch, self.group)
        if self._shared_batches is not None:
            self._shared_batches.check_alike(batch)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        with super().backward():
            yield
        if self._shared_batches is not None:
            self._shared_batches.check_grads()

    def seed_alike(self) -> None:
        group = self.group if self._shared_batches is None else self._shared_batches.group
        if group is not None:
            seed_alike(group)

    @property
    def trying(self) -> SequenceCheck | None:
        """Return the SequenceCheck while it runs a trial step, else None."""
        return self._check if self._check is not None and self._check.found is not None else None

    def check(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any, *, together: bool = True) -> None:
        """Before the step ``name`` runs, try it on whole sequences and on parts. See :meth:`SequenceCheck.before`."""
        if self._check is not None:
            self._check.before(name, step, (*args, *kwargs.values()), together=together)

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch, *more = (*args, *kwargs.values())
        with self._random_numbers_of_a_part():
            part, own = self.cut(batch)
            if self.tokens is not None:
                part = part or WholeBatch()
                part.empty_is_zero = True
            return self.train(part, step, own, *more)

    def whole_loss(self, part: SequencePart, loss: Tensor, tokens: Any) -> Tensor:
        if self.tokens is None:
            return super().whole_loss(part, loss, tokens)
        if tokens is not None:
            loss = part.mean_over(loss, tokens)
        if self.trying is None and loss.requires_grad:  # else none of its own: what manual optimization returns
            self.tokens.of_next_backward = part.count(loss)
        return loss if isinstance(part, WholeBatch) else part.loss(loss)

    def evaluation_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch, *more = (*args, *kwargs.values())
        part, own = self.cut(batch)
        return self.evaluate(part, step, own, *more)

    @contextlib.contextmanager
    def _random_numbers_of_a_part(self) -> Iterator[None]:
        """Let torch draw, in the body, different numbers on each rank that shares a sequence, so that dropout differs.

        Seed: a number from torch's generator (equal on these ranks, and in checkpoints), plus the rank.
        Python's and NumPy's generators stay equal on these ranks: models may choose layers by them.
        """
        if self.group is None:
            yield
            return
        seed = int(torch.randint(LARGEST_SEED, (1,), dtype=torch.int64))
        device = self.group.device
        before, accelerator = Generators.now(device), accelerator_of(device)
        own = Generators.seeded(seed + self.group.rank, device)
        _set(own, accelerator)
        try:
            yield
        finally:
            _set(before, accelerator)


def _set(generators: Generators, accelerator: Any) -> None:
    torch.set_rng_state(generators.torch)
    if generators.cuda is not None:
        accelerator.set_rng_state(generators.cuda)
