"""Make masks and causal losses of transformers span the whole sequence inside a step. Attention is replaced in
``step.py``, for models with ``attn_implementation="sdpa"``. This file does not import transformers."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_zero.sequence.losses import IGNORED
from lightning_zero.sequence.part import current
from lightning_zero.settings import ConfigError


@contextlib.contextmanager
def of_whole_sequences() -> Iterator[None]:
    """In the body, let models of transformers compute masks and causal losses for the whole sequence."""
    masks = sys.modules.get("transformers.masking_utils")
    losses = sys.modules.get("transformers.loss.loss_utils")
    makers = {name: masks.ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "eager")} if masks else {}
    table = losses.LOSS_MAPPING if losses else {}
    causal = {name: loss for name, loss in table.items() if getattr(loss, "__name__", "") == "ForCausalLMLoss"}
    for name, maker in makers.items():
        masks.AttentionMaskInterface.register(name, functools.partial(_mask, name, maker))  # type: ignore[union-attr]
    table.update({name: functools.partial(_causal_loss, loss) for name, loss in causal.items()})
    try:
        yield
    finally:
        table.update(causal)
        for name, maker in makers.items():
            masks.AttentionMaskInterface.register(name, maker)  # type: ignore[union-attr]


def _mask(name: str, maker: Callable[..., Any], **given: Any) -> Any:
    """Let ``maker`` of transformers make a mask of the whole sequence. Collective if it gets a part's padding mask."""
    part = current()
    if part is None or given["q_length"] != part.length:
        return maker(**given)
    if name == "eager":
        raise ConfigError(
            "zero.sequence_parallel: expected a model of transformers with attn_implementation='sdpa', got 'eager', "
            "whose attention sees this rank's part alone. Load it with attn_implementation='sdpa', or set "
            "zero.sequence_parallel=1."
        )
    padding = given.get("attention_mask")
    if isinstance(padding, Tensor) and padding.dim() == 2 and padding.shape[1] == part.length:
        given["attention_mask"] = part.whole(padding)
    whole = part.whole_length
    return maker(**{**given, "q_length": whole, "kv_length": whole, "q_offset": 0, "kv_offset": 0})


def _causal_loss(
    inner: Callable[..., Tensor],
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Compute ``ForCausalLMLoss``. A part's last token predicts the next part's first token. Collective in a step."""
    part = current()
    if part is not None and labels is not None and shift_labels is None and logits.shape[1] == part.length:
        firsts, last = part.whole(labels[:, :1]), part.rank == part.size - 1
        following = torch.full_like(labels[:, :1], ignore_index) if last else firsts[:, part.rank + 1, None]
        shift_labels = torch.cat([labels[:, 1:], following], dim=1)
    return inner(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **more)
