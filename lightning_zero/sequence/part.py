"""Describe which part of a sequence this rank has, and compute means over the tokens of all parts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.comm.sequence import OnPaper, Sharers
from lightning_zero.settings import ConfigError

TOKENS, PARTS, REFUSED = 1, 2, 3  # kind of a mean; ranks send it along, to notice if kinds differ


class Window(NamedTuple):
    """Describes the short piece of each sequence in a batch that the check before training uses.

    Attributes:
        parts: number of parts into which the short piece divides.
        at: position of the piece in the sequence, from 0 (at the beginning) to 1 (at the end).
    """

    parts: int
    at: float

    def cut(self, whole: int) -> tuple[int, int]:
        """Return (start, length) of the piece of a sequence of ``whole`` positions. It is short enough for one rank to
        compute, and its parts are long enough to reveal a step that shifts tokens or convolves over positions."""
        length = self.parts * min(whole // self.parts, max(8, 64 // self.parts))
        return int((whole - length) * self.at), length


class SequencePart:
    """This rank's part of the sequences of a batch. Parts have equal lengths and are in rank order.

    Attributes:
        sharers: the ranks that share the sequences, one part each.
        window: the positions of each sequence that are used; ``None``: all.
        length: number of positions of a part; ``None`` before the first cut.
        rounding: rounding error of the coarsest dtype in which attention was computed.
        empty_is_zero: whether a mean over no tokens is 0, not NaN.
    """

    def __init__(self, sharers: Sharers, window: Window | None = None) -> None:
        self.sharers, self.window = sharers, window
        self.rank, self.size = sharers.rank, sharers.size
        self.length: int | None = None
        self.rounding = 0.0
        self.empty_is_zero = False
        self._means: list[weakref.ref[Tensor]] = []  # made by :meth:`mean_of`, over all parts

    @property
    def whole_length(self) -> int | None:
        return None if self.length is None else self.length * self.size

    def of(self, tensor: Tensor, dim: int = 1, *, overlap: int = 0) -> Tensor:
        """Cut this rank's part out of ``tensor``: ``length + overlap`` positions along ``dim``. Raises ConfigError if
        the positions do not divide into equal parts, or tensors of one batch differ in length. ``overlap``: number of
        positions of the next part to include; ``tensor`` has this many more positions at its end. With an overlap of 1,
        a tensor of ``length + 1`` tokens gives each part its inputs and, shifted by one, its labels."""
        whole = tensor.shape[dim] - overlap
        if whole % self.size or whole < self.size:
            raise ConfigError(
                f"zero.sequence_parallel: expected sequences whose length is a multiple of {self.size}, got {whole} "
                f"positions (dimension {dim} of {tuple(tensor.shape)}). Pad or cut them in the collate function, or "
                "change zero.sequence_parallel."
            )
        start, whole = (0, whole) if self.window is None else self.window.cut(whole)
        length = whole // self.size
        if self.length not in (None, length):
            raise ConfigError(
                f"zero.sequence_parallel: expected tensors of {self.whole_length} positions in one batch, got {whole} "
                f"(dimension {dim} of {tuple(tensor.shape)}). Cut tensors of other sequences in split_sequence."
            )
        self.length = length
        # Contiguous, as a whole batch is: steps call ``labels.view(-1)``.
        return tensor.narrow(dim, start + self.rank * length, length + overlap).contiguous()

    def keep(self, tensor: Tensor, *dims: int) -> Tensor:
        """Return ``tensor``, such as an attention mask, of which every part needs all positions along ``dims``. In the
        check before training, which uses short sequences, return only the positions in ``window``."""
        if self.window is not None:
            for dim in dims:
                tensor = tensor.narrow(dim, *self.window.cut(tensor.shape[dim]))
        return tensor

    def positions(self, length: int, device: Any = None) -> Tensor:
        """Return ``[length] int64``: the positions of this part's tokens in the whole sequence."""
        if self.length not in (None, length):
            raise ConfigError(
                f"lightning_zero.sequence_positions: expected {self.length} positions, the length of a part of this "
                f"batch, got {length}. Pass the length of the tensor that forward got."
            )
        return torch.arange(self.rank * length, (self.rank + 1) * length, device=device)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all parts of ``tensor [batch, length]`` joined, detached: ``[batch, length * size]``. Collective."""
        rows = tensor.detach().contiguous().view(1, -1).expand(self.size, -1).contiguous()
        parts = self.sharers.exchange(rows, "parts of a small tensor").view(self.size, *tensor.shape)
        return torch.cat(list(parts), dim=1)

    def mean_of(
        self, total: Tensor, count: Tensor, dtype: torch.dtype, kind: int = TOKENS, *, is_feature: bool = False
    ) -> Tensor:
        """Return the mean over the tokens of all parts, with gradients. If no part has tokens, the mean is NaN, or 0
        with :attr:`empty_is_zero`. Collective.

        Raises ConfigError, on all ranks, if another rank computes another kind of mean at the same time.

        Args:
            total: sums over ``count`` tokens of this part, in the shape of ``count``. Both may be weighted.
            dtype: dtype of the result, which is computed in fp64: half precision cannot hold sums and counts.
            is_feature: whether ranks compute different values from the mean. Then all or no ranks must run a backward.
        """
        sums = torch.stack([total.to(torch.float64), count.to(torch.float64)])
        totals, counts = _SumOfParts.apply(sums.flatten(), self.sharers, kind, is_feature).view(sums.shape)  # type: ignore
        if self.empty_is_zero:
            counts = torch.where(counts > 0, counts, 1.0)
        mean: Tensor = (totals / counts).to(dtype)
        if kind == TOKENS:
            self._means.append(weakref.ref(mean))
        return mean

    def mean_over(self, mean: Tensor, tokens: Any) -> Tensor:
        """Return the mean over all parts' tokens. Collective. ``mean``: the mean over this part's ``tokens`` tokens."""
        if isinstance(tokens, bool) or not isinstance(tokens, (int, float, Tensor)):
            raise ConfigError(
                'zero.loss=tokens: expected a number or a tensor of one element for "tokens", which training_step '
                f"returns, got {type(tokens).__name__}. Return the number of tokens."
            )
        count = torch.as_tensor(tokens, dtype=torch.float64, device=mean.device).detach().reshape(())
        total = torch.where(count > 0, mean.reshape(()).to(torch.float64) * count, 0.0)
        return self.mean_of(total, count, mean.dtype)

    def loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the whole sequences, computed from ``loss``, which a step has computed on this part.
        Collective. Terms that ``loss`` adds to a mean over the tokens of all parts are averaged over the parts. Raises
        ConfigError on all ranks if ``loss`` contains no such mean."""
        if any(made() is loss for made in self._means):
            return loss
        known = next(_counts_in(loss), None) is not None
        value = loss.reshape(()).to(torch.float64)
        ones = torch.ones_like(value, requires_grad=False)
        found = self.mean_of(value, ones, loss.dtype, PARTS if known else REFUSED)
        if not known:
            raise ConfigError(
                "zero.sequence_parallel: expected a loss that is a mean over the tokens of all parts, got one that is "
                "computed from this rank's part alone. Call F.cross_entropy or F.nll_loss by these names, with "
                "reduction='mean'; or average the losses of tokens with lightning_zero.mean_over_tokens(values, where)."
            )
        return found

    def count(self, loss: Tensor) -> Tensor:
        """Return the number of tokens, over all parts, of which ``loss`` is a mean: 0-d, fp64. Weighted tokens count as
        their weights. Raises ConfigError if ``loss`` contains no mean over tokens, or means over different numbers."""
        counts = list(_counts_in(loss))
        if len(counts) == 1 or (counts and bool((torch.stack(counts) == counts[0]).all())):
            return counts[0]
        got = (
            f"means over {', '.join(f'{float(n):g}' for n in counts)} tokens"
            if counts
            else "one without a known number"
        )
        raise ConfigError(
            f"zero.loss=tokens: expected a training loss whose number of tokens is known, got {got}. "
            "Call F.cross_entropy or F.nll_loss by these names, with reduction='mean'; or average the losses of tokens "
            'with lightning_zero.mean_over_tokens(values, where); or return {"loss": mean, "tokens": number} from '
            "training_step."
        )


class WholeBatch(SequencePart):
    """A :class:`SequencePart` for sequences that are not divided, with which the tokens of losses can be counted."""

    def __init__(self) -> None:
        super().__init__(OnPaper(1))


def _counts_in(loss: Tensor) -> Iterator[Tensor]:
    """Yield the number of tokens of each mean over tokens from which ``loss`` is computed."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == f"{_SumOfParts.__name__}Backward":
            if node.count is not None:  # type: ignore[attr-defined]
                yield node.count  # type: ignore[attr-defined]
            continue
        nodes += [following for following, _ in node.next_functions]


class _SumOfParts(torch.autograd.Function):
    """Sums values over the ranks of a group. If all ``size`` ranks compute one loss from the sums, the backward
    multiplies the gradient by ``size``, because the engine later averages gradients over ranks. If ranks compute
    different values from the sums (``is_feature``), the backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sharers: Sharers, kind: int, is_feature: bool) -> Tensor:
        ctx.sharers, ctx.kind, ctx.is_feature = sharers, kind, is_feature
        summed = sharers.sum_alike(values.detach(), kind)
        # Parts may compute anything with a feature, so it is no loss.
        ctx.count = None if is_feature else summed[-1].clone()
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = ctx.sharers.sum_alike(grads[0], ctx.kind) if ctx.is_feature else grads[0] * ctx.sharers.size
        return grad, None, None, None


# -- the step that runs -----------------------------------------------------------------------------------------------

_current: SequencePart | None = None  # one per process, not per thread: threads of autograd recompute blocks


def current() -> SequencePart | None:
    """Return the part of the running step; ``None`` if sequences are whole."""
    return _current


def set_current(part: SequencePart | None) -> SequencePart | None:
    """Set the part of the running step; return the part that was set before."""
    global _current
    before, _current = _current, part
    return before


# -- for users --------------------------------------------------------------------------------------------------------


def sequence_positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Return the positions of ``length`` tokens in their sequence: ``[length] int64``.

    Call this function instead of ``torch.arange(length)``. Inside a step under ``zero.sequence_parallel`` it returns
    the positions of this rank's part, and raises ConfigError if ``length`` is not that of the part."""
    part = current()
    return torch.arange(length, device=device) if part is None else part.positions(length, device)


def mean_over_tokens(values: Tensor, where: Tensor | None = None, *, dim: int | None = None) -> Tensor:
    """Return the mean of ``values [batch, length, ...]`` over all tokens. Collective.

    Under ``zero.sequence_parallel`` the mean is over all parts, with each token counted once, and equal on all ranks of
    a group. A loss that ``training_step`` computes from this mean needs no further averaging. The result is 0-d; with
    ``dim`` it has the shape of ``values`` without that dimension. A mean over no tokens is NaN.

    Args:
        where: the tokens that count, a ``bool`` tensor that is expandable to ``values``. Default: all tokens.
        dim: average only along this dimension (the sequence), for example to get one mean per text. Default: all
            dimensions.
    """
    part = current()
    dims = tuple(range(values.dim())) if dim is None else (dim,)
    if part is None and where is None:
        return values.mean(dims)
    kept = values if where is None else torch.where(where.expand_as(values), values, torch.zeros_like(values))
    dtype = torch.promote_types(values.dtype, torch.float32)  # half precision does not hold sums and counts
    total = kept.sum(dims, dtype=dtype)
    if where is None:
        count = torch.full_like(total, values.numel() / max(1, total.numel()), requires_grad=False)
    else:
        count = where.expand_as(values).sum(dims, dtype=dtype)
    if part is None:
        return (total / count).to(values.dtype)
    return part.mean_of(total, count, values.dtype, is_feature=dim is not None)
