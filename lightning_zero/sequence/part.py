"""The part of a sequence that a rank computes with: where it lies, and means over the tokens of all parts."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.comm.sequence import Sharers
from lightning_zero.config import ConfigError

TOKENS, PARTS, REFUSED = 1, 2, 3  # what a mean is over: kinds of messages


class Window(NamedTuple):
    """Where a check takes short sequences out of those of a batch.

    Attributes:
        parts: they divide into so many.
        at: from the beginning of a sequence (0) to its end (1).
    """

    parts: int
    at: float

    def cut(self, whole: int) -> tuple[int, int]:
        """The first position, and how many, of ``whole``: so few that one rank can compute them, and enough for a shift
        or the window of a convolution to show in each part."""
        length = self.parts * min(whole // self.parts, max(8, 64 // self.parts))
        return int((whole - length) * self.at), length


class SequencePart:
    """This rank's part of the sequences of a batch: equal parts, in the order of the ranks.

    Attributes:
        sharers: the ranks that have the other parts.
        window: of the sequences only this; ``None``: all of them.
        length: positions of one part; ``None``: nothing was cut yet.
        rounding: of the coarsest dtype that attention was computed in.
    """

    def __init__(self, sharers: Sharers, window: Window | None = None) -> None:
        self.sharers, self.window = sharers, window
        self.rank, self.size = sharers.rank, sharers.size
        self.length: int | None = None
        self.rounding = 0.0
        self._means: list[weakref.ref[Tensor]] = []  # over all parts

    @property
    def whole_length(self) -> int | None:
        return None if self.length is None else self.length * self.size

    def of(self, tensor: Tensor, dim: int = 1, *, overlap: int = 0) -> Tensor:
        """This rank's part of ``tensor``: ``length + overlap`` positions along ``dim``.

        Args:
            overlap: positions of the next part that come too; ``tensor`` has as many more at its end. With 1, a tensor
                of ``length + 1`` tokens gives each part its inputs and, shifted by one, its labels.

        Raises:
            ConfigError: the positions do not divide into equal parts, or tensors of one batch have other lengths.
        """
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
                f"(dimension {dim} of {tuple(tensor.shape)}). Cut what belongs to other sequences in split_sequence."
            )
        self.length = length
        # In memory of its own, as a whole batch is: steps call ``labels.view(-1)``.
        return tensor.narrow(dim, start + self.rank * length, length + overlap).contiguous()

    def keep(self, tensor: Tensor, *dims: int) -> Tensor:
        """``tensor``, which each part has for the whole sequence along ``dims``: a mask of attention, say.

        Before training a step is checked on short sequences, and what is kept whole must be as short.
        """
        if self.window is not None:
            for dim in dims:
                tensor = tensor.narrow(dim, *self.window.cut(tensor.shape[dim]))
        return tensor

    def positions(self, length: int, device: Any = None) -> Tensor:
        """``[length] int64``: where the tokens of this part are in the whole sequence."""
        if self.length not in (None, length):
            raise ConfigError(
                f"lightning_zero.sequence_positions: expected {self.length} positions, as many as a part of this batch "
                f"has, got {length}. Pass the length of what forward was given."
            )
        return torch.arange(self.rank * length, (self.rank + 1) * length, device=device)

    def whole(self, tensor: Tensor) -> Tensor:
        """All parts of ``tensor [batch, length]`` together, without gradients: ``[batch, length * size]``."""
        rows = tensor.detach().contiguous().view(1, -1).expand(self.size, -1).contiguous()
        parts = self.sharers.exchange(rows, "parts of a small tensor").view(self.size, *tensor.shape)
        return torch.cat(list(parts), dim=1)

    def mean_of(
        self, total: Tensor, count: Tensor, dtype: torch.dtype, kind: int = TOKENS, *, is_feature: bool = False
    ) -> Tensor:
        """The mean over the tokens of all parts, with gradients: NaN where no part has any.

        Args:
            total: sums over ``count`` tokens of this part, in one shape with it. (Or both are of tokens' weights.)
            dtype: of the mean. It is made in fp64, since half precision does not hold sums and counts.
            is_feature: parts compute other things with it; all ranks run a backward then, or none does.

        Raises:
            ConfigError: another rank makes a mean of another kind now; on all ranks.
        """
        sums = torch.stack([total.to(torch.float64), count.to(torch.float64)])
        totals, counts = _SumOfParts.apply(sums.flatten(), self.sharers, kind, is_feature).view(sums.shape)  # type: ignore
        mean: Tensor = (totals / counts).to(dtype)
        if kind == TOKENS:
            self._means.append(weakref.ref(mean))
        return mean

    def loss(self, loss: Tensor) -> Tensor:
        """The loss of the whole sequences, of ``loss`` that a step has made of this part. Collective.

        A term beside a mean over the tokens of all parts is taken for a mean over as many values in each part.

        Raises:
            ConfigError: there is no mean over the tokens of all parts in it; on all ranks.
        """
        if any(made() is loss for made in self._means):
            return loss
        known = _has_mean(loss)
        value = loss.reshape(()).to(torch.float64)
        ones = torch.ones_like(value, requires_grad=False)
        found = self.mean_of(value, ones, loss.dtype, PARTS if known else REFUSED)
        if not known:
            raise ConfigError(
                "zero.sequence_parallel: expected a loss that is a mean over the tokens of all parts, got one that is "
                "made of this rank's part alone. Call F.cross_entropy or F.nll_loss by these names, with "
                "reduction='mean'; or make a mean of the losses of each token: lightning_zero.mean_over_tokens(values, "
                "where)."
            )
        return found


def _has_mean(loss: Tensor) -> bool:
    """Whether a mean over the tokens of all parts is among what ``loss`` is computed from."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == f"{_SumOfParts.__name__}Backward":
            if not node.is_feature:  # type: ignore[attr-defined]  # a feature is no loss: parts may compute anything with it
                return True
            continue
        nodes += [following for following, _ in node.next_functions]
    return False


class _SumOfParts(torch.autograd.Function):
    """The sum over the ranks of a group. Each of them has the result as (a part of) its loss, or as a feature.

    The engine divides the sum of all ranks' gradients by their number. A group's loss is there ``size`` times, and so
    is what comes back from it. What each rank makes something else of gets back the sum of what comes to the ranks.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, sharers: Sharers, kind: int, is_feature: bool) -> Tensor:
        ctx.sharers, ctx.kind, ctx.is_feature = sharers, kind, is_feature
        return sharers.sum_alike(values.detach(), kind)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = ctx.sharers.sum_alike(grads[0], ctx.kind) if ctx.is_feature else grads[0] * ctx.sharers.size
        return grad, None, None, None


# -- the step that runs -----------------------------------------------------------------------------------------------

_current: SequencePart | None = None  # of this process: threads of autograd compute blocks again


def current() -> SequencePart | None:
    """The part of the step that runs; ``None`` where sequences are whole."""
    return _current


def set_current(part: SequencePart | None) -> SequencePart | None:
    """Returns the one before."""
    global _current
    before, _current = _current, part
    return before


# -- for users --------------------------------------------------------------------------------------------------------


def sequence_positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Where the tokens of a forward are in their sequence: ``[length] int64``.

    ``0 .. length - 1``, but under ``zero.sequence_parallel`` inside of a step: those of this rank's part. For models
    that make positions themselves, in the place of ``torch.arange(length)``.

    Raises:
        ConfigError: inside of a step, another length than that of a part.
    """
    part = current()
    return torch.arange(length, device=device) if part is None else part.positions(length, device)


def mean_over_tokens(values: Tensor, where: Tensor | None = None, *, dim: int | None = None) -> Tensor:
    """The mean of ``values [batch, length, ...]`` over all tokens, in one process and under ``zero.sequence_parallel``.

    There it is the mean over the tokens of all parts, each token counted once, the same on all ranks of a group, and a
    loss that ``training_step`` makes of it is taken as it is.

    Args:
        where: ``bool``, of the same shape or one that expands to it: those that count. Default: all.
        dim: only along this dimension, that of the sequence: one mean for each text, say. Default: along all.

    Returns:
        A 0-d tensor; with ``dim``, ``values`` without that dimension. NaN where nothing counts.
    """
    part = current()
    dims = tuple(range(values.dim())) if dim is None else (dim,)
    if part is None and where is None:
        return values.mean(dims)
    kept = values if where is None else torch.where(where.expand_as(values), values, torch.zeros_like(values))
    dtype = torch.promote_types(values.dtype, torch.float32)  # sums and counts that half precision does not hold
    total = kept.sum(dims, dtype=dtype)
    if where is None:
        count = torch.full_like(total, values.numel() / max(1, total.numel()), requires_grad=False)
    else:
        count = where.expand_as(values).sum(dims, dtype=dtype)
    if part is None:
        return (total / count).to(values.dtype)
    return part.mean_of(total, count, values.dtype, is_feature=dim is not None)
