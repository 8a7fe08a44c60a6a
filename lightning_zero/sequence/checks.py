"""What would compute wrong numbers on a part of a sequence, as far as the calls of a step tell of it.

Positions are dimension 1, and a tensor is taken for one of the part by its sizes: ``[batch, length, ...]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.config import ConfigError
from lightning_zero.sequence.part import SequencePart

Check = Callable[[SequencePart, Any, Any], None]

_ITSELF = "a step that looks at each position by itself, but in attention"
_ATTENTION = "attention by F.scaled_dot_product_attention, or by the attention functions of transformers"
_POSITIONS = "a model that is told the positions of its part"
_KERNELS = ("scaled_dot_product", "flex_attention", "flash_att", "efficient_attention", "varlen_att", "sageatt")
_SAME_VALUES = ("View", "Reshape", "Transpose", "TBack", "Permute", "Unsqueeze", "Squeeze", "Expand", "ToCopy", "Alias")


def check_positions(part: SequencePart, args: Any, kwargs: Any, made: Tensor) -> None:
    """``torch.arange(length)`` of a part: nearly always positions, which begin at 0 in each part."""
    start = args[0] if len(args) > 1 else kwargs.get("start", 0)
    step = args[2] if len(args) > 2 else kwargs.get("step", 1)
    if part.knows_positions or made.shape != (part.length,) or start != 0 or step != 1:
        return
    _refuse(
        _POSITIONS,
        f"torch.arange({part.length}) inside of a step, the positions of the first part",
        "Make them by lightning_zero.sequence_positions(length, device); a model of transformers takes "
        "batch['position_ids']; where these are no positions, call sequence_positions before",
    )


def check_index(part: SequencePart, tensor: Tensor, index: Any, is_table: Callable[[Tensor], bool]) -> None:
    """``tensor[index]``.

    Args:
        is_table: whether the module holds a tensor, which may be a table of positions.
    """
    if part.length is None:
        return
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, slice) or type(item) is int for item in items):
        return
    dim = 0
    for place, item in enumerate(items):
        if item is None:
            continue
        if item is Ellipsis:
            dim = tensor.dim() - sum(other is not None for other in items[place + 1 :])
            continue
        if dim < tensor.dim():
            if isinstance(item, slice):
                _check_slice(part, tensor, dim, item, is_table)
            elif type(item) is int:
                check_place(part, tensor, dim)
        dim += item.dim() if isinstance(item, Tensor) and item.dtype is torch.bool else 1


def check_place(part: SequencePart, tensor: Tensor, dim: int) -> None:
    """``tensor.select(dim, ...)``: one position of the whole sequence is in one part only."""
    if dim == 1 and _of_part(part, tensor):
        _refuse(
            _ITSELF,
            f"one of the positions of {tuple(tensor.shape)}, the first or the last of a part, say",
            "Take a mean over positions (lightning_zero.mean_over_tokens(x, where, dim=1))",
        )


def _check_slice(part: SequencePart, tensor: Tensor, dim: int, item: slice, is_table: Callable[[Tensor], bool]) -> None:
    if item.step not in (None, 1):
        return
    # With a start and a stop it is one of several chunks, which may be computed one by one.
    of_chunks = isinstance(item.start, int) and isinstance(item.stop, int) and item.start >= 0 and item.stop > 0
    if (
        dim == 1
        and _of_part(part, tensor)
        and not of_chunks
        and len(range(*item.indices(part.length or 0))) != part.length
    ):
        _refuse(
            _ITSELF,
            f"a slice that shifts {tuple(tensor.shape)}, or takes some of its positions, inside of a part",
            "Shift labels in the data, or in split_sequence: part.of(tokens[:, 1:])",
        )
    if item.start in (None, 0) and isinstance(item.stop, int):
        check_table(part, tensor, dim, item.stop, is_table)


def check_table(part: SequencePart, tensor: Tensor, dim: int, rows: int, is_table: Callable[[Tensor], bool]) -> None:
    """The first ``rows`` of ``tensor``, along ``dim``."""
    if rows != part.length or part.knows_positions or tensor.shape[dim] <= rows or not is_table(tensor):
        return
    _refuse(
        _POSITIONS,
        f"the first {part.length} rows of a table {tuple(tensor.shape)} inside of a step",
        "Index it by lightning_zero.sequence_positions(length, device)",
    )


def hides_attention(function: Any) -> bool:
    """Whether ``function`` is a kernel of attention, by its name."""
    name = f"{getattr(function, '__name__', '')} {function}"
    return any(kernel in name for kernel in _KERNELS)


def check_hidden(part: SequencePart, args: Any, kwargs: Any) -> None:
    _refuse(_ATTENTION, "another kernel of attention, which would see a part", "Call F.scaled_dot_product_attention")


def _of_part(part: SequencePart, tensor: Tensor) -> bool:
    """Whether ``tensor`` is ``[batch, length, ...]``, of all of the batch or of a micro-batch."""
    if tensor.dim() < 2 or part.length in (None, 1) or tensor.shape[1] != part.length:
        return False
    return part.batch is None or part.batch % max(1, tensor.shape[0]) == 0


def _refuse(expected: str, got: str, change: str) -> None:
    raise ConfigError(f"zero.sequence_parallel: expected {expected}, got {got}. {change}, or set it to 1.")


def _given(args: Any, kwargs: Any, place: int, *names: str, default: Any = None) -> Any:
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), default)


def _dims(tensor: Tensor, given: Any) -> set[int]:
    dims = given if isinstance(given, (tuple, list)) else (given,)
    return {d % max(1, tensor.dim()) for d in dims if type(d) is int}


# -- checks by functions ----------------------------------------------------------------------------------------------


def _check_softmax(part: SequencePart, args: Any, kwargs: Any) -> None:
    scores, dim = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "dim")
    if part.length in (None, 1):
        return
    if scores.dim() >= 3 and list(scores.shape[1:]).count(part.length) > 1:
        _refuse(
            _ATTENTION,
            f"a softmax of {tuple(scores.shape)}, which looks like attention inside of a part",
            "Call F.scaled_dot_product_attention",
        )
    over_positions = scores.dim() == 3 or (scores.dim() == 2 and scores.shape[0] == part.batch)
    if over_positions and _dims(scores, dim) == {1} and _of_part(part, scores):
        _refuse(_ITSELF, f"a softmax over the positions of {tuple(scores.shape)}, inside of a part", "Use attention")


def _check_multi_head(part: SequencePart, args: Any, kwargs: Any) -> None:
    if kwargs.get("need_weights", True):
        _refuse(
            "need_weights=False in nn.MultiheadAttention, whose weights are those of a part of the heads",
            "need_weights=True",
            "Pass need_weights=False",
        )


def _along(place: int, *names: str) -> Check:
    """Of functions that bring values from one position to another, whose dimensions are argument ``place``."""

    def check(part: SequencePart, args: Any, kwargs: Any) -> None:
        tensor, dims = _given(args, kwargs, 0, "input"), _given(args, kwargs, place, *names)
        if len(args) > place + 1 and type(dims) is int:  # flip(0, 1)
            dims = args[place:]
        if 1 in _dims(tensor, dims) and _of_part(part, tensor):
            _refuse(
                _ITSELF,
                f"a sum, a shift or a turn along the positions of {tuple(tensor.shape)}, inside of a part",
                "Do it in split_sequence, where sequences are whole",
            )

    return check


def _check_over(part: SequencePart, args: Any, kwargs: Any) -> None:
    """Functions that make one value of all positions: features of a text, say. (A loss is a mean over texts too.)"""
    tensor, dims = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "dim", "axis")
    features = isinstance(tensor, Tensor) and tensor.dim() == 3 and tensor.shape[2] > 1 and tensor.is_floating_point()
    if features and dims is not None and _dims(tensor, dims) == {1} and _of_part(part, tensor):
        _refuse(
            _ITSELF,
            f"a mean, a sum or a maximum over the positions of {tuple(tensor.shape)}, inside of a part",
            "Take lightning_zero.mean_over_tokens(x, where, dim=1)",
        )


def _check_pad(part: SequencePart, args: Any, kwargs: Any) -> None:
    tensor, pad = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "pad", default=())
    first = 2 * (tensor.dim() - 2)  # pairs come from the last dimension on
    if _of_part(part, tensor) and any(pad[first : first + 2]):
        _refuse(
            _ITSELF,
            f"padding along the positions of {tuple(tensor.shape)}, inside of a part",
            "Shift or pad in the data, or in split_sequence: part.of(tokens[:, 1:])",
        )


def _check_convolution(part: SequencePart, args: Any, kwargs: Any) -> None:
    given, weight = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "weight")
    kernel = weight.shape[-1]
    if kernel > 1 and part.length is not None and part.length <= given.shape[-1] < part.length + kernel:
        _refuse(_ITSELF, f"a convolution of {tuple(given.shape)} along the positions of a part", "Use another layer")


def _check_pool(part: SequencePart, args: Any, kwargs: Any) -> None:
    given = _given(args, kwargs, 0, "input")
    if given.dim() == 3 and _of_part(part, given.transpose(1, 2)):
        _refuse(_ITSELF, f"pooling of {tuple(given.shape)} along the positions of a part", "Use another layer")


def _check_product(part: SequencePart, args: Any, kwargs: Any) -> None:
    """Attention by hand: a product of two tensors of the part that has all pairs of positions, or sums over them."""
    left, right = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "other", "mat2", "tensor2")
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or min(left.dim(), right.dim()) < 3:
        return
    names = _names("...qc", left), _names("...ck", right)
    _check_terms(part, (left, right), names, {*names[0], *names[1]} - {"c"})


def _check_einsum(part: SequencePart, args: Any, kwargs: Any) -> None:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        return
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    names = [_names(term, tensor) for term, tensor in zip(terms, operands, strict=False)]
    seen = list(itertools.chain(*names))
    kept = set(output.replace("...", "")) if arrow else {name for name in seen if seen.count(name) == 1}
    _check_terms(part, operands, names, kept | {name for name in seen if name.startswith(".")})


def _names(term: str, tensor: Tensor) -> list[str]:
    before, _, after = term.partition("...")
    between = tensor.dim() - len(before) - len(after)
    return [*before, *(f".{between - i}" for i in range(between)), *after]


def _check_terms(part: SequencePart, operands: Sequence[Tensor], names: Sequence[list[str]], kept: set[str]) -> None:
    """
    Args:
        names: of each operand's dimensions; those with one name are one.
        kept: names of the result.
    """
    if part.length in (None, 1):
        return
    found = [
        dict(zip(dims, tensor.shape, strict=True))
        for dims, tensor in zip(names, operands, strict=False)
        if tensor.dim() >= 3 and not _is_weight(tensor)
    ]
    for left, right in itertools.combinations(found, 2):
        summed = (left.keys() & right.keys()) - kept
        rows, columns = left.keys() - right.keys(), right.keys() - left.keys()
        pairs = any(left[n] == part.length for n in rows & kept) and any(
            right[n] == part.length for n in columns & kept
        )
        if any(left[n] == part.length for n in summed) or (pairs and any(left[n] > 1 for n in summed)):
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in operands)
            _refuse(
                _ATTENTION,
                f"a product of {shapes}, which looks like attention inside of a part",
                "Call F.scaled_dot_product_attention",
            )


def _is_weight(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter, a view of one, or one in another dtype."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name().startswith(_SAME_VALUES) and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is not None and "AccumulateGrad" in node.name()


def _functions(name: str, *owners: Any) -> list[Any]:
    return [getattr(owner, name) for owner in owners if hasattr(owner, name)]


BEFORE: dict[Any, Check] = {F.multi_head_attention_forward: _check_multi_head, F.conv1d: _check_convolution}
for _check, _names_of in {
    _check_softmax: ("softmax",),
    _along(1, "dim"): ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "unfold", "sort", "argsort"),
    _along(1, "dims"): ("flip",),
    _along(2, "dims"): ("roll",),
    _along(2, "dim"): ("diff", "topk"),
    _check_over: ("mean", "sum", "amax", "amin", "max", "min", "logsumexp"),
    _check_pad: ("pad",),
    _check_pool: ("avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d"),
    _check_product: ("matmul", "__matmul__", "bmm"),
    _check_einsum: ("einsum",),
}.items():
    for _name in _names_of:
        BEFORE.update(dict.fromkeys(_functions(_name, torch, F, Tensor), _check))
