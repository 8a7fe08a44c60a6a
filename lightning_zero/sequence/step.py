"""One step on a part of a batch: the batch is cut, attention sees all of it, and the loss is that of all tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero.comm.sequence import SequenceGroup, Sharers
from lightning_zero.config import ConfigError
from lightning_zero.sequence.hugging_face import of_whole_sequences
from lightning_zero.sequence.part import SequencePart, current, set_current
from lightning_zero.sequence.split import split_batch
from lightning_zero.sequence.watch import Again, Watch, backwards_again, whole_attention

_ATTENTION = "scaled_dot_product_attention"


@contextlib.contextmanager
def computing(part: SequencePart, mode: Again) -> Iterator[None]:
    """Inside, modules compute with ``part``."""
    before, attention = set_current(part), getattr(F, _ATTENTION)
    # By its name too: torch's own functions call it where no mode sees it (in nn.MultiheadAttention).
    setattr(F, _ATTENTION, whole_attention)
    try:
        with of_whole_sequences(), backwards_again(), mode:
            yield
    finally:
        setattr(F, _ATTENTION, attention)
        set_current(before)


class SequenceSteps:
    """The steps of a run under ``zero.sequence_parallel``.

    Args:
        sharers: the ranks that share a sequence with this one.
    """

    def __init__(self, module: nn.Module, sharers: Sharers) -> None:
        self._module, self._sharers = module, sharers
        self._part: SequencePart | None = None  # of the last training step, whose backward may compute blocks again

    def training_step(self, step: Callable[..., Any], batch: Any, *more: Any) -> Any:
        """``step`` on this rank's part. A loss that it returns is the mean over the tokens of all parts.

        Raises:
            ConfigError: the batch cannot be cut, or something in the step would compute wrong numbers.
        """
        part, own = self._cut(batch)
        self._part = part
        if part is None:
            return step(own, *more)
        with computing(part, Watch(self._module)):
            output = step(own, *more)
            self._check_met(part, output is not None)
            return self._averaged(part, output)

    def evaluation_step(self, step: Callable[..., Any], batch: Any, *more: Any) -> Any:
        """``step`` on this rank's part; what it returns is as it is."""
        part, own = self._cut(batch)
        if part is None:
            return step(own, *more)
        with computing(part, Watch(self._module)):
            output = step(own, *more)
            self._check_met(part, output is not None)
            return output

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward: what is computed again is computed with the part of its forward."""
        if self._part is None or current() is not None:
            yield
        else:
            with computing(self._part, Again()):
                yield

    def manual_loss(self, loss: Tensor) -> Tensor:
        """A loss of manual optimization, inside of its step.

        Raises:
            ConfigError: see :meth:`SequencePart.loss`.
        """
        part = current()
        return loss if part is None else part.loss(loss)

    def _cut(self, batch: Any) -> tuple[SequencePart | None, Any]:
        part = SequencePart(self._sharers)
        own = split_batch(self._module, batch, part)
        return (None if own is batch and part.length is None else part), own

    def _averaged(self, part: SequencePart, output: Any) -> Any:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return output  # Lightning refuses it
        whole = part.loss(loss)
        return {**output, "loss": whole} if isinstance(output, Mapping) else whole

    def _check_met(self, part: SequencePart, computed: bool) -> None:
        if computed and not part.met:
            raise ConfigError(
                "zero.sequence_parallel: expected attention by F.scaled_dot_product_attention or by the attention "
                f"functions of transformers in the step of {type(self._module).__name__}, got a step without any: each "
                "part would be a sequence of its own. Use one of these, or set zero.sequence_parallel=1."
            )


def check_alike(batch: Any, group: SequenceGroup) -> None:
    """All ranks of a group call it with the batch that they have been given, before it goes to the device.

    Raises:
        ConfigError: they have other ones; on all ranks of the group.
    """
    found = group.gather_objects(_fingerprint(batch), "the comparison of batches (zero.sequence_parallel)")
    if any(other != found[0] for other in found):
        raise ConfigError(
            f"zero.sequence_parallel: expected one batch for all {group.size} ranks of a group, got other ones. A "
            "sampler of your own takes DistributedSampler(data, **trainer.distributed_sampler_kwargs), an iterable "
            "dataset the same two numbers; what is drawn at random must be the same on these ranks."
        )


def _fingerprint(batch: Any) -> int:
    """Of shapes, and of values on the host. (The host does not wait for what is on a device.)"""
    found = 0
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            found = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), found)
            if leaf.device.type == "cpu" and leaf.layout is torch.strided:
                data = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
                found = zlib.crc32(data.numpy().data, found)
        elif isinstance(leaf, (int, float, str, bool)):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


def _leaves(batch: Any) -> Iterator[Any]:
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):  # of a kind that torch does not know: BatchEncoding of transformers
            yield from _leaves(dict(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf
