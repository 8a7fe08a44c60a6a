"""One step on a part of a batch: cut the batch, let attention see all of it, and average the loss over all tokens."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.comm.sequence import SequenceGroup, Sharers
from lightning_zero.sequence import losses
from lightning_zero.sequence.attention import attention
from lightning_zero.sequence.check import leaves
from lightning_zero.sequence.hugging_face import of_whole_sequences
from lightning_zero.sequence.part import SequencePart, WholeBatch, Window, current, set_current
from lightning_zero.sequence.split import split_batch
from lightning_zero.settings import ConfigError

# Replacements in ``torch.nn.functional`` while a step runs. torch's layers and losses call them there too.
_LOSSES = {name: losses.over_all_parts(getattr(F, name)) for name in losses.NAMES if hasattr(F, name)}
_FUNCTIONS = {**_LOSSES, "scaled_dot_product_attention": attention}


@contextlib.contextmanager
def computing(part: SequencePart) -> Iterator[None]:
    """Let modules called in the body compute on ``part``: replace losses of torch and transformers and, if sequences
    are divided, also attention."""
    divided = not isinstance(part, WholeBatch)
    replaced = _FUNCTIONS if divided else _LOSSES
    before, functions = set_current(part), {name: getattr(F, name) for name in replaced}
    fast = torch.backends.mha.get_fastpath_enabled()
    # torch's fast path would hide attention in kernels, in evaluation.
    torch.backends.mha.set_fastpath_enabled(fast and not divided)
    vars(F).update(replaced)
    try:
        with of_whole_sequences() if divided else contextlib.nullcontext():
            yield
    finally:
        vars(F).update(functions)
        torch.backends.mha.set_fastpath_enabled(fast)
        set_current(before)


class SequenceSteps:
    """Runs steps on parts of sequences. ``sharers``: ranks that share a sequence; ``None``: sequences stay whole."""

    def __init__(self, module: nn.Module, sharers: Sharers | None) -> None:
        self._module, self._sharers = module, sharers
        self._part: SequencePart | None = None  # of the last training step, whose backward may recompute blocks

    def train(self, part: SequencePart | None, step: Callable[..., Any], own: Any, *more: Any) -> Any:
        """Run ``step`` on ``own``, which :meth:`cut` returned, and return its output, with the loss averaged over all
        parts' tokens. Collective. Raises ConfigError if attention cannot get the whole sequence, or the loss has no
        mean over tokens."""
        self._part = part
        if part is None:
            return step(own, *more)
        with computing(part):
            output = step(own, *more)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                return output  # Lightning refuses it
            whole = self.whole_loss(part, loss, output.get("tokens") if isinstance(output, Mapping) else None)
            return {**output, "loss": whole} if isinstance(output, Mapping) else whole

    def whole_loss(self, part: SequencePart, loss: Tensor, tokens: Any) -> Tensor:
        """Return the loss of whole sequences. ``tokens``: what the step returned as ``tokens``. Collective."""
        return part.loss(loss)

    def evaluate(self, part: SequencePart | None, step: Callable[..., Any], own: Any, *more: Any) -> Any:
        """Run ``step`` on ``own``, which :meth:`cut` returned, and return the output of ``step`` unchanged."""
        with computing(part) if part is not None else contextlib.nullcontext():
            return step(own, *more)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Let a backward in the body recompute blocks on the part of a sequence that the blocks' forward had."""
        if self._part is None or current() is not None:
            yield
        else:
            with computing(self._part):
                yield

    def manual_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of whole sequences in manual optimization; see :meth:`SequencePart.loss`. Collective."""
        part = current()
        return loss if part is None else self.whole_loss(part, loss, None)

    def cut(
        self, batch: Any, window: Window | None = None, sharers: Sharers | None = None
    ) -> tuple[SequencePart | None, Any]:
        """Return this rank's :class:`SequencePart` and its slice of ``batch``; ``None`` and ``batch`` if that stays
        whole. ``window``: cut only these positions out. ``sharers``: ranks with the same batch; default: the run's."""
        sharers = sharers or self._sharers
        if sharers is None:
            return None, batch
        part = SequencePart(sharers, window)
        own = split_batch(self._module, batch, part)
        return (None if own is batch and part.length is None else part), own


def check_alike(batch: Any, group: SequenceGroup, key: str = "zero.sequence_parallel") -> None:
    """Check that all ranks of ``group`` have the same batch, before it goes to the device. Collective. Raises
    ConfigError with ``key`` on all ranks of the group if the batches differ."""
    found = group.gather_objects(_fingerprint(batch), f"the comparison of batches ({key})")
    if any(other != found[0] for other in found):
        raise ConfigError(
            f"{key}: expected one batch for all {group.size} ranks of a group, got other ones. A "
            "sampler of your own takes DistributedSampler(data, **trainer.distributed_sampler_kwargs), an iterable "
            "dataset the same two numbers; what is drawn at random must be the same on these ranks."
        )


def _fingerprint(batch: Any) -> int:
    """Hash a batch's shapes and its values on the host. Values on a device are skipped: the host would wait."""
    found = 0
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            found = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), found)
            if leaf.device.type == "cpu" and leaf.layout is torch.strided:
                data = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
                found = zlib.crc32(data.numpy().data, found)
        elif isinstance(leaf, (int, float, str, bool)):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found
