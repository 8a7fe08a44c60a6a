"""Run a step on a part of a batch: cut the batch, let attention see whole sequences, average losses over all tokens."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.comm.sequence import SequenceGroup, Sharers
from lightning_zero.sequence.attention import attention
from lightning_zero.sequence.check import leaves
from lightning_zero.sequence.part import SequencePart, WholeBatch, Window, current, set_current
from lightning_zero.settings import ConfigError

NAMES = ("cross_entropy", "nll_loss", "linear_cross_entropy")  # losses of torch that ignore and weigh tokens
IGNORED = -100  # the label that torch ignores by default
HOOK = "split_sequence"
_INPUTS = ("input_ids", "inputs_embeds")
_WHOLE = ("attention_mask",)
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


# -- cutting a batch --------------------------------------------------------------------------------------------------


def split_batch(module: nn.Module, batch: Any, part: SequencePart) -> Any:
    """Return this rank's part of ``batch``, or ``batch`` itself if the module leaves it whole (see below). Raises
    ConfigError for an unknown kind of batch.

    These batches are cut automatically::

        tokens [batch, length]                   for a model that is given labels=tokens, as models of transformers are
        (tokens [batch, length], labels [batch, length, ...])
        {"input_ids": [batch, length], ...}      every tensor [batch, length, ...], and position_ids in any form; but
                                                 attention_mask stays whole, because attention sees all positions

    Other batches need the module's ``split_sequence(batch, part)``. It returns a batch made by
    :meth:`SequencePart.of`, or ``batch`` itself, which every rank of the group then computes as a whole."""
    if callable(hook := getattr(module, HOOK, None)):
        return hook(batch, part)
    if isinstance(batch, Tensor) and _is_tokens(batch):
        return part.of(batch)
    if isinstance(batch, Mapping) and any(key in batch for key in _INPUTS):
        return _split_mapping(module, batch, part)
    if isinstance(batch, (list, tuple)) and len(batch) > 1 and all(isinstance(item, Tensor) for item in batch):
        inputs, *others = batch
        if _is_tokens(inputs) and all(item.shape[:2] == inputs.shape for item in others):
            parts = [part.of(item) for item in batch]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise ConfigError(
        "zero.sequence_parallel: expected a batch of a known kind: integer tokens [batch, length], a pair of tokens "
        f"and labels [batch, length], or a mapping with input_ids; got {_describe(batch)}. Define {HOOK}(self, batch, "
        f"part) in {type(module).__name__}: it returns the batch with part.of(tensor, dim=1) instead of each tensor "
        "along the sequence, and part.keep(tensor, dim) instead of each tensor that stays whole."
    )


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _split_mapping(module: nn.Module, batch: Mapping[str, Any], part: SequencePart) -> Any:
    inputs = next(batch[key] for key in _INPUTS if key in batch and batch[key] is not None)
    length = inputs.shape[1]
    changed: Any = copy.copy(batch)
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    _check_positions(batch, positions, mask)
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        if key in _WHOLE:
            changed[key] = part.keep(value, *(d for d in (-2, -1)[value.dim() == 2 :] if value.shape[d] == length))
        elif key == "position_ids":
            changed[key] = part.of(value, dim=-1)
        elif value.dim() >= 2 and value.shape[1] == length:
            changed[key] = part.of(value)
    # A transformers model that takes positions would start them at 0 in each part.
    models = (m for m in module.modules() if hasattr(m, "config") and hasattr(m, "loss_function"))
    takes = any("position_ids" in inspect.signature(type(model).forward).parameters for model in models)
    if positions is None and part.size > 1 and takes:
        changed["position_ids"] = part.of(torch.arange(length, device=inputs.device).expand(len(inputs), -1))
    return changed


def _check_positions(batch: Mapping[str, Any], positions: Any, mask: Any) -> None:
    """Raise ConfigError if a sequence holds several texts, or if padding precedes a text without ``position_ids``."""
    packed = [key for key in _PACKED if batch.get(key) is not None]
    if isinstance(positions, Tensor) and positions.dim() == 2 and mask is None and (positions.diff(dim=1) != 1).any():
        packed.append("position_ids that restart inside a sequence")
    if packed:
        raise ConfigError(
            f"zero.sequence_parallel: expected one text per sequence of a batch, got {packed[0]} (packed texts). Pad "
            "texts instead of packing them, or set zero.sequence_parallel=1."
        )
    if positions is None and isinstance(mask, Tensor) and mask.dim() == 2 and (mask[:, 1:] > mask[:, :-1]).any():
        raise ConfigError(
            "zero.sequence_parallel: expected position_ids in a batch with padding before a text, because models "
            "differ in whether they count padding, got none. Add position_ids in the collate function, as the model "
            "counts positions, or pad after the texts."
        )


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor {tuple(batch.shape)} of {batch.dtype}"
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__}({', '.join(f'{key}: {_describe(value)}' for key, value in batch.items())})"
    if isinstance(batch, (list, tuple)):
        return f"{type(batch).__name__}({', '.join(map(_describe, batch))})"
    return type(batch).__name__


# -- models of transformers. The package is not imported here. Their attention ("sdpa") is torch's, replaced below. ----


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
    """Return the mask of the whole sequence, made by ``maker`` of transformers from the arguments ``given``. Collective
    if the padding mask in ``given`` is that of a part."""
    part = current()
    if part is None or given["q_length"] != part.length:
        return maker(**given)
    if name == "eager":
        raise ConfigError(
            "zero.sequence_parallel: expected a model of transformers with attn_implementation='sdpa', got 'eager', "
            "whose attention sees only this rank's part. Load the model with attn_implementation='sdpa', or set "
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
    """Return the result of transformers' causal loss ``inner``, where a part's last token predicts the next part's
    first token. Collective inside a step."""
    part = current()
    if part is not None and labels is not None and shift_labels is None and logits.shape[1] == part.length:
        firsts, last = part.whole(labels[:, :1]), part.rank == part.size - 1
        following = torch.full_like(labels[:, :1], ignore_index) if last else firsts[:, part.rank + 1, None]
        shift_labels = torch.cat([labels[:, 1:], following], dim=1)
    return inner(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **more)


# -- losses -----------------------------------------------------------------------------------------------------------


def over_all_parts(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the loss ``function`` of torch so that inside a step its means are over the tokens of all parts (a mean over
    one part does not tell how many tokens it counts). Calls inside a step are collective: all ranks of a group must
    call these losses in the same order."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        old_names = given.arguments.get("size_average"), given.arguments.get("reduce")  # they win over ``reduction``
        takes_mean = given.arguments["reduction"] == "mean" and old_names == (None, None)
        part = set_current(None)  # torch may call this again for a mode of the user's
        weighs = part is not None and takes_mean and given.arguments.get("weight") is not None
        if weighs:  # weights that add up to 0 would give a mean's gradients NaN
            given.arguments["reduction"] = "sum"
        try:
            result = function(*given.args, **given.kwargs)
        finally:
            set_current(part)
        if part is None or not takes_mean:
            return result
        count = _count(given.arguments)
        # A part without tokens has a mean of NaN and gradients of 0.
        total = result if weighs else torch.where(count > 0, result.to(torch.float64) * count, 0.0)
        return part.mean_of(total, count, result.dtype)

    return loss


def _count(given: dict[str, Any]) -> Tensor:
    """Return the divisor of a loss's mean: the number of tokens that count, or the sum of these tokens' weights."""
    target: Tensor = given["target"]
    if target.is_floating_point():  # probabilities of classes
        return torch.full((), target[:, 0].numel() if target.dim() > 1 else 1, device=target.device)
    index = given.get("ignore_index")
    counts = target != (IGNORED if index is None else index)
    weight = given.get("weight")
    if weight is None:
        return counts.sum()
    # An ignored target may be outside the classes.
    return torch.where(counts, weight.detach()[torch.where(counts, target, 0)], 0).sum(dtype=torch.float64)


# -- the step ---------------------------------------------------------------------------------------------------------

# Replacements in ``torch.nn.functional`` while a step runs. torch's layers and losses call them there too.
_LOSSES = {name: over_all_parts(getattr(F, name)) for name in NAMES if hasattr(F, name)}
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
        """Run ``step`` on ``own``, the result of :meth:`cut`, and return its output, with the loss averaged over all
        parts' tokens. Collective. Raises ConfigError if attention cannot see whole sequences, or if the loss contains
        no mean over tokens."""
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
        """Return the loss of whole sequences. ``tokens``: the output's value of ``tokens``, or None. Collective."""
        return part.loss(loss)

    def evaluate(self, part: SequencePart | None, step: Callable[..., Any], own: Any, *more: Any) -> Any:
        """Run ``step`` on ``own``, which :meth:`cut` returned, and return the output of ``step`` unchanged."""
        with computing(part) if part is not None else contextlib.nullcontext():
            return step(own, *more)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Context manager in which a backward recomputes blocks on the part of a sequence that their forward had."""
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
        """Return this rank's :class:`SequencePart` and its slice of ``batch``; if the batch is not cut, return (None,
        ``batch``). ``window``: use only these positions. ``sharers``: ranks with the same batch; default: the run's."""
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
            f"{key}: expected the same batch on all {group.size} ranks of a group, got different batches. Use "
            "DistributedSampler(data, **trainer.distributed_sampler_kwargs) as sampler, divide an iterable dataset by "
            "the same two numbers, and draw the same random numbers on these ranks."
        )


def _fingerprint(batch: Any) -> int:
    """Hash a batch's shapes, and those values that are on the host: for values on a device the host would wait."""
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
