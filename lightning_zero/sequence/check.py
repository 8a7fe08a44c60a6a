"""Compare a short step on parts of sequences with the same step on whole sequences: the loss and, for each parameter,
sums of its gradient's elements, each with a random sign. If results differ, the model mixes positions in a function
that sees only a part of the sequence."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_SUMS = 4  # of each gradient, with random signs
_PIECE = 1 << 22  # elements that are summed at once
_PATTERN = 64  # random numbers that are repeated along a tensor
_MATMULS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}  # rounding of fp32 products in torch
_LOOK_FOR = (
    "sums, means, norms or shifts along the positions (lightning_zero.mean_over_tokens is a mean over all of them; "
    "shift labels in the data, or in split_sequence); positions that begin at 0 in each part "
    "(lightning_zero.sequence_positions, batch['position_ids']); attention other than F.scaled_dot_product_attention, "
    "called by this name, or lightning_zero.attention (nn.MultiheadAttention takes need_weights=False, transformers "
    "attn_implementation='sdpa'); a loss that is no mean over tokens"
)


class Agreeing(TorchDispatchMode):
    """Context manager in which random numbers (for example of dropout) are equal in a whole sequence and in its parts.
    Each random tensor is filled with repetitions of a short random pattern. The pattern's length divides ``length``,
    the number of positions of a part, so each part begins with a new repetition."""

    supports_higher_order_operators = True

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length, self._seed = 1, seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if "dropout_p" in given:  # inside an attention kernel
            return func(**{**given, "dropout_p": 0.0})
        if given.get("generator") is not None:
            given["generator"] = None
        self._seed += 1
        torch.manual_seed(self._seed)
        return self._draw(func, given)

    def _draw(self, func: Any, given: dict[str, Any]) -> Any:
        count = math.gcd(self.length, _PATTERN)
        if func is _aten.native_dropout.default and given["train"] is not False:
            kept = torch.empty_like(given["input"], dtype=torch.bool)
            _repeat(kept, torch.rand(count, device=kept.device) >= given["p"])
            return given["input"] * kept / max(1.0 - given["p"], 1e-6), kept
        if func is _aten.bernoulli.default:
            return (_repeat(torch.empty_like(given["self"]), torch.rand(count)) < given["self"]).to(given["self"].dtype)
        name, tensors = func._schema.name, sum(isinstance(value, Tensor) for value in given.values())
        if "size" in given:
            pattern = func(**{**given, "size": [count]})
        elif tensors == 1 and "self" in given and (name.endswith(("_", "_like")) or func is _aten.bernoulli.p):
            pattern = func(**{**given, "self": given["self"].new_empty(count)})
        else:
            return func(**given)
        return _repeat(func(**given), pattern)


def _repeat(tensor: Tensor, pattern: Tensor) -> Tensor:
    many = pattern.to(tensor.device).repeat(-(-tensor.numel() // len(pattern)))
    return tensor.copy_(many[: tensor.numel()].view(tensor.shape))


class Sums:
    """Holds, by parameter name, sums of each gradient's elements with random signs, and the gradient's sum of squares.
    The signed sums of several ranks add up to those of the summed gradients. If two gradients differ, their signed sums
    differ by about the norm of the difference. ``rounding``: rounding error of the coarsest dtype of gradients."""

    def __init__(self) -> None:
        self.rounding = 0.0
        self._of: dict[str, Tensor] = {}

    def add(self, name: str, grad: Tensor) -> None:
        with torch.no_grad(), _disable_current_modes():  # random signs are no numbers of the step
            self.rounding = max(self.rounding, torch.finfo(grad.dtype).eps)
            found = torch.zeros(_SUMS + 1, dtype=torch.float64, device=grad.device)
            signs = torch.Generator(grad.device).manual_seed(len(name) + sum(map(ord, name)))
            for piece in grad.reshape(-1).split(_PIECE):
                piece = piece.to(torch.promote_types(piece.dtype, torch.float32))
                bits = torch.randint(1 << _SUMS, piece.shape, generator=signs, device=piece.device, dtype=torch.uint8)
                for number in range(_SUMS):
                    sign = (bits >> number & 1).to(piece.dtype).mul_(2).sub_(1)
                    found[number] += torch.dot(piece, sign)
                found[_SUMS] += torch.dot(piece, piece)
            self._of[name] = self._of[name] + found if name in self._of else found

    def values(self) -> dict[str, list[float]]:
        return {name: found.tolist() for name, found in self._of.items()}


@dataclasses.dataclass
class Found:
    """The results of one trial step, to be compared with the results of another step.

    Attributes:
        losses: values on which backward was called.
        sums: sums of the parameters' gradients; see :class:`Sums`.
        output: what an evaluation step has returned.
        logged: logged values, each with the name of its reduction.
        rounding: rounding error of the coarsest dtype seen.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    sums: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    output: Any = None
    logged: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    rounding: float = 0.0

    @property
    def says_something(self) -> bool:
        """Return whether this step can be compared: whether losses are finite, and some gradient is not zero."""
        squares = sum(values[_SUMS] for values in self.sums.values())
        return all(map(math.isfinite, (*self.losses, squares))) and squares > 0

    @property
    def has_zeros(self) -> bool:
        """Return whether the gradient of some parameter is zero."""
        return not all(values[_SUMS] for values in self.sums.values())


def unit(found: Iterable[Found]) -> float:
    """Return the eps of the coarsest dtype in the steps ``found``, or of torch's fp32 matmuls if that is larger."""
    return max(_MATMULS[torch.get_float32_matmul_precision()], *(one.rounding for one in found))


def difference(whole: Found, parts: Sequence[Found], rounding: float) -> str | None:
    """Describe how a training step in parts differs from the same step on whole sequences; return None if it does not.
    Sums must agree to half the digits of their dtype, because rounding errors grow from layer to layer. Losses must
    agree to two thirds of the digits, because errors average out. A gradient that is zero up to rounding (bias of keys
    in attention) is compared with the norm of all gradients. ``parts``: results of all ranks of the group."""
    found = []
    for number, (expected, got) in enumerate(zip(whole.losses, parts[0].losses, strict=False)):
        if not near(got, expected, rounding):
            which = f"loss {number + 1}" if len(whole.losses) > 1 else "loss"
            found.append(f"the {which} is {got:.6g} instead of {expected:.6g}")
            break
    total = math.sqrt(sum(values[_SUMS] for values in whole.sums.values()))
    zeros = [0.0] * (_SUMS + 1)
    for name in dict.fromkeys([*whole.sums, *(name for one in parts for name in one.sums)]):
        expected_sums = whole.sums.get(name, zeros)
        norm = math.sqrt(expected_sums[_SUMS])
        means = [sum(column) / len(parts) for column in zip(*(one.sums.get(name, zeros) for one in parts), strict=True)]
        apart = max(abs(a - b) for a, b in zip(means[:_SUMS], expected_sums[:_SUMS], strict=True))
        if not apart <= math.sqrt(rounding) * norm + 2 * rounding * total:
            how = f"by {100 * apart / norm:.2g} % of its norm" if norm else "which is zero"
            found.append(f"the first parameter whose gradient differs is {name} ({how})")
            break
    return " and ".join(found) or None


def difference_of_evaluations(whole: Found, parts: Sequence[Found], rank: int, rounding: float) -> str | None:
    """Describe how an evaluation in parts differs from one on whole sequences; return ``None`` if it does not.

    A logged value must equal the mean over parts, or their sum, minimum or maximum if the value is logged with this
    reduction. A tensor that this rank returned must equal the tensor of the evaluation on whole sequences, or this
    rank's part of that tensor. ``parts``: results of all ranks of the group."""
    for name, (expected, how) in whole.logged.items():
        got = [one.logged[name][0] for one in parts if name in one.logged] or [math.nan]
        value = max(got) if how == "max" else min(got) if how == "min" else math.fsum(got)
        value = value if how in ("sum", "max", "min") else value / len(got)
        if len(got) == len(parts) and not near(value, expected, rounding):
            return f"{name}, which is logged, is {value:.6g} over the parts instead of {expected:.6g}"
    for expected_leaf, leaf in zip(leaves(whole.output), leaves(parts[rank].output), strict=False):
        if isinstance(leaf, Tensor) and isinstance(expected_leaf, Tensor) and leaf.numel() > 1:
            piece = _piece(expected_leaf, leaf, rank, len(parts))
            if piece is None or not _alike(piece, leaf, rounding):
                return f"a returned tensor {tuple(leaf.shape)} equals neither that of whole sequences nor its part"
    return None


def near(got: float, expected: float, rounding: float) -> bool:
    if not math.isfinite(expected):
        return True  # nothing to compare with
    return abs(got - expected) <= rounding ** (2 / 3) * abs(expected) + 8 * rounding


def _piece(whole: Tensor, part: Tensor, rank: int, size: int) -> Tensor | None:
    """Return what ``part`` should equal: this rank's slice of ``whole``, or ``whole`` if their shapes are equal;
    ``None`` if ``part`` has neither shape."""
    if whole.shape == part.shape:
        return whole
    if whole.dim() != part.dim():
        return None
    dims = [d for d in range(whole.dim()) if whole.shape[d] != part.shape[d]]
    if len(dims) != 1 or whole.shape[dims[0]] != size * part.shape[dims[0]]:
        return None
    return whole.chunk(size, dims[0])[rank]


def _alike(expected: Tensor, got: Tensor, rounding: float) -> bool:
    if not expected.is_floating_point():
        return float((expected != got).double().mean()) <= math.sqrt(rounding)
    a, b = expected.double().nan_to_num(), got.double().nan_to_num()
    return bool((a - b).norm() <= math.sqrt(rounding) * a.norm() + 8 * rounding)


def refusal(step: str, what: str) -> str:
    return (
        f"zero.sequence_parallel: expected {step} to give the same results on parts of sequences as on whole ones, got "
        f"others (both were tried on a short piece of the first batch): {what}. Look in {step} and the modules that it "
        f"calls for {_LOOK_FOR}. Or set zero.sequence_parallel=1."
    )


def kind_of(batch: Any) -> str:
    """Return the keys, types and numbers of dimensions of ``batch`` as text. The check runs once for each such text."""
    if isinstance(batch, Tensor):
        return f"{batch.dim()} {batch.dtype}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {kind_of(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (list, tuple)):
        return f"[{', '.join(map(kind_of, batch))}]"
    return type(batch).__name__


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of a batch of nested containers, also of dataclasses and transformers' BatchEncoding."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):
            yield from leaves(dict(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


_TRYING: ContextVar[bool] = ContextVar("a trial runs", default=False)


def is_trying() -> bool:
    """Return whether this thread is inside :func:`trying`, where modules run for a check, not to train or evaluate."""
    return _TRYING.get()


@contextlib.contextmanager
def trying() -> Iterator[None]:
    token = _TRYING.set(True)
    try:
        yield
    finally:
        _TRYING.reset(token)
