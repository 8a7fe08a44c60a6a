"""transformers inside of a step: its attention functions, masks and losses, of the whole sequence.

Models of transformers ask a registry for their attention, make masks by one function, and take losses from a table.
These are others while a step runs, and theirs again after it. Nothing is imported: where transformers is not, there is
none of its models.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_zero.config import ConfigError
from lightning_zero.sequence.attention import as_it_is, attend, is_as_it_is
from lightning_zero.sequence.part import SequencePart, current
from lightning_zero.sequence.split import IGNORED

_BY_TOKEN = {"ForMaskedLM", "ForTokenClassification"}  # losses that are means over tokens as they are
_SHIFTED = "ForCausalLMLoss"


@contextlib.contextmanager
def of_whole_sequences() -> Iterator[None]:
    """Inside, what models of transformers ask for is for the whole sequence."""
    with contextlib.ExitStack() as undo:
        models = sys.modules.get("transformers.modeling_utils")
        if models is not None and (registry := getattr(models, "AttentionInterface", None)) is not None:
            undo.enter_context(_replaced(registry, "get_interface", _get_interface(registry.get_interface)))
        masks = sys.modules.get("transformers.masking_utils")
        if masks is not None and hasattr(masks, "_preprocess_mask_arguments"):
            name = "_preprocess_mask_arguments"
            undo.enter_context(_replaced(masks, name, _mask_arguments(masks._preprocess_mask_arguments)))
        losses = sys.modules.get("transformers.loss.loss_utils")
        if losses is not None:
            undo.enter_context(_replaced_losses(losses.LOSS_MAPPING))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _replaced_losses(table: dict[str, Any]) -> Iterator[None]:
    before = dict(table)
    for name, loss in before.items():
        if getattr(loss, "__name__", "") == _SHIFTED:
            table[name] = functools.partial(_causal_loss, loss)
        elif name not in _BY_TOKEN:
            table[name] = functools.partial(_no_loss, name)
    try:
        yield
    finally:
        table.update(before)


# -- attention --------------------------------------------------------------------------------------------------------


def _get_interface(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def get_interface(self: Any, name: Any, default: Any, *args: Any, **kwargs: Any) -> Any:
        found = inner(self, name, default, *args, **kwargs)
        return functools.partial(_attention, found)

    return get_interface


def _attention(
    inner: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *args: Any,
    **more: Any,
) -> Any:
    """An attention function of transformers, which gives ``[batch, length, heads, width]``."""
    part = current()
    if part is None or is_as_it_is():
        return inner(module, query, key, value, mask, *args, **more)
    for name in ("position_bias", "s_aux"):
        if more.get(name) is not None:
            raise ConfigError(
                f"zero.sequence_parallel: expected attention without {name}, which {type(module).__name__} passes: it "
                "belongs to all heads. Choose another model, or set zero.sequence_parallel=1."
            )
    more.pop("position_ids", None)  # those of a part; some kernels find packed texts by them, which are refused

    def whole(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        with _groups_of_heads(module, query.shape[1] // key.shape[1]):
            result: Tensor = inner(module, query, key, value, mask, *args, **more)[0]
        return result.transpose(1, 2)

    if isinstance(mask, Tensor) and mask.dim() == 2:  # which texts are how long, as kernels of flash attention take it
        inner_mask, mask = mask, None
        inner = _with_mask(inner, inner_mask)
    return attend(part, whole, query, key, value, mask).transpose(1, 2).contiguous(), None


def _with_mask(inner: Callable[..., Any], mask: Tensor) -> Callable[..., Any]:
    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, *args: Any, **more: Any) -> Any:
        return inner(module, query, key, value, mask, *args, **more)

    return attention


@contextlib.contextmanager
def _groups_of_heads(module: Any, groups: int) -> Iterator[None]:
    """``module`` reads from itself how many queries share a key; where keys were repeated these are fewer."""
    before = getattr(module, "num_key_value_groups", groups)
    if before == groups:
        yield
        return
    module.num_key_value_groups = groups
    try:
        yield
    finally:
        module.num_key_value_groups = before


# -- masks ------------------------------------------------------------------------------------------------------------


def _mask_arguments(inner: Callable[..., Any]) -> Callable[..., Any]:
    """What masks are made of: lengths, padding and positions of the whole sequence."""
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def arguments(*args: Any, **kwargs: Any) -> Any:
        part = current()
        given = signature.bind(*args, **kwargs)
        embeddings = given.arguments["inputs_embeds"]
        if part is None or is_as_it_is() or embeddings.shape[1] != part.length:
            return inner(*args, **kwargs)
        mask = given.arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == part.length:
            given.arguments["attention_mask"] = part.whole(mask)
        # Its sizes, dtype and device are all that is read.
        given.arguments["inputs_embeds"] = embeddings.new_empty(1).expand(len(embeddings), part.whole_length, 1)
        given.arguments["position_ids"] = part.whole_positions
        with as_it_is():
            found = inner(*given.args, **given.kwargs)
        if not found[0] and found[2] is not None:
            raise ConfigError(
                "zero.sequence_parallel: expected one text in each row of a batch, got position_ids that begin anew "
                "inside of a row (packed texts). Pad texts in the place of packing them, or set "
                "zero.sequence_parallel=1."
            )
        return found

    return arguments


# -- losses -----------------------------------------------------------------------------------------------------------


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
    """The mean over the tokens of all parts; a part's last token is to predict the next part's first."""
    part = current()
    if part is None or logits.shape[1] != part.length:
        return inner(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **more)
    if num_items_in_batch is not None:
        raise ConfigError(
            "zero.sequence_parallel: expected no num_items_in_batch (the loss is the mean over the tokens of the whole "
            "sequence by itself), got one. Drop it."
        )
    if shift_labels is None:
        assert labels is not None
        shift_labels = _next_labels(part, labels, ignore_index)
    count = (shift_labels != ignore_index).sum()
    # As a sum: a part without labels would have a mean of NaN.
    total = inner(logits, shift_labels, vocab_size, 1, ignore_index, shift_labels, **more)
    return part.mean_of(total, count, total.dtype)


def _next_labels(part: SequencePart, labels: Tensor, ignore_index: int) -> Tensor:
    firsts = part.whole(labels[:, :1])
    ends = part.rank == part.size - 1
    following = torch.full_like(labels[:, :1], ignore_index) if ends else firsts[:, part.rank + 1 : part.rank + 2]
    return torch.cat([labels[:, 1:], following], dim=1)


def _no_loss(name: str, *_: Any, **__: Any) -> Any:
    raise ConfigError(
        f"zero.sequence_parallel: expected a loss of each token (language modelling, classification of tokens), got "
        f"{name} of transformers, which needs the whole sequence. Set zero.sequence_parallel=1."
    )
