"""The engine's record of a parameter, and the classes of parameters that call the engine when users' code uses them.

An `nn.Parameter` always stays the same object. Only its class and its `.data` change (docs/architecture.md).
`PresentParameter` keeps torch's disabled `__torch_function__`: operators and `torch.compile` see a plain parameter.

[Note: placeholders]
While values are not gathered, `.data` is one NaN (0 for packed integers), expanded to the shape. So metadata is right,
and an operation that the engine does not notice results in NaN. The parameter's class calls the engine before
operations that need values. Parameters with a single element, or with integers that are not packed, have no
placeholder, because they are replicated.

[Note: version counters]
In-place operations increment `_version`, on views and on `detach()` too. `.data = value`, operations on `.data` (which
has its own counter), NumPy, collectives of c10d and kernels that update running statistics do not. The engine
increments `_version` when placeholders replace values, so that torch refuses the backward of a graph that saved the
parameter itself, and resets `_version` when values return. A `_version` that differs from `ParamInfo.version` means
that users have written to the parameter.

[Note: checksums of writes]
NumPy and collectives increment neither the parameter's counter nor the counter of `.data`. So when users' code reads
`.data`, the engine saves a checksum of the values, and compares checksums before the values are dropped.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.engine.units.packed import is_packed
from lightning_zero.mesh.split import Split
from lightning_zero.planning.boxes import memory_order
from lightning_zero.pretrained.stored import StoredTensor

# Functions that read only metadata or make a new tensor like the parameter.
_SIZES = {"size", "dim", "ndimension", "numel", "nelement", "storage_offset", "element_size", "__len__"}
_KINDS = {"get_device", "data_ptr", "has_names", "result_type", "can_cast", "_is_view"}
_HOOKS = {"requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "__hash__"}
_PASSIVE = frozenset(_SIZES | _KINDS | _HOOKS)
_LIKE_OTHER = frozenset({"view_as", "expand_as", "reshape_as", "type_as", "to"})  # x.view_as(p): only p's metadata
_ATTRIBUTES_OF_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})  # all others are metadata

_GATHER = "Do this inside `with lightning_zero.gather(module):`, on all ranks."

_get_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# torch's own `param.grad`. For an absent parameter call them inside `outside_autograd` only.
get_grad = torch.Tensor.grad.__get__  # type: ignore[union-attr]
set_grad = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_delete_grad = torch.Tensor.grad.__delete__  # type: ignore[union-attr]


class Owner(Protocol):
    """The interface of the engine object that a sharded parameter calls when users' code reads or writes it."""

    def reads_values(self, params: Sequence[nn.Parameter], operation: str, run: Callable[[], object]) -> object:
        """Gather `params`, of which some are placeholders. Then return `run()`, the result of the user's `operation`.
        Raises RuntimeError if `params` cannot be gathered now. The message names the parameter and a call that
        helps."""
        ...

    def strides(self, param: nn.Parameter) -> tuple[int, ...]:
        """Return the strides that `param` has while it is gathered. Its placeholder has other strides."""
        ...

    def hands_out(self, param: nn.Parameter, read: Callable[[], Tensor]) -> Tensor:
        """Called when users' code reads `param.data`. Gather `param`, then return `read()`, which is torch's
        `param.data`. The engine notices later writes to the result: see [Note: checksums of writes]."""
        ...

    def takes_grad(self, param: nn.Parameter, value: Tensor) -> bool:
        """Called for `param.grad = value` if torch would refuse the dtype of `value`. If `value` has the dtype of the
        masters and no backward is running, store it as the gradient and return True; otherwise return False."""
        ...

    def replaces(self, param: nn.Parameter, value: Tensor) -> bool:
        """Called for `param.data = value`. Return True if the engine has used `value`, or False to let torch assign."""
        ...


# Parameter -> weak reference to its owner. Keys are weak too; they compare by identity, because `==` compares elements.
_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def find_owner(param: Tensor) -> Owner | None:
    reference: ReferenceType[Owner] | None = _OWNERS.get(param)
    return reference() if reference is not None else None


Kind = Literal["plain", "present", "absent"]


class Classes(NamedTuple):
    plain: type
    present: type
    absent: type


class _Owned:
    # Without slots of its own, because Python changes an object's class only to one with the same memory layout.
    __slots__ = ()

    @property
    def data(self: Any) -> Tensor:
        def read() -> Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                values: Tensor = _get_data(self)
            return values

        owner = find_owner(self)
        return read() if owner is None else owner.hands_out(self, read)

    @data.setter
    def data(self: Any, value: Tensor) -> None:
        owner = find_owner(self)
        if owner is None or not owner.replaces(self, value):
            with torch._C.DisableTorchFunctionSubclass():
                _set_data(self, value)

    def _assign_grad(self: Any, value: Tensor | None) -> None:
        # torch takes gradients of the parameter's dtype only, which may be narrower here than that of its gradient.
        if value is not None and self.grad_dtype not in (None, value.dtype):
            owner = find_owner(self)
            if owner is not None and owner.takes_grad(self, value):
                return
        with torch._C.DisableTorchFunctionSubclass():
            set_grad(self, value)

    grad = property(get_grad, _assign_grad, _delete_grad)

    def __deepcopy__(self: Any, memo: dict[int, object]) -> object:
        """Return a copy, independent of the engine, that has the whole value and the class from before sharding."""
        if id(self) not in memo:
            plain: Any = _PLAIN[type(self)]
            if plain.__deepcopy__ is nn.Parameter.__deepcopy__:  # which reads `.data`, whose changes are looked for
                with torch.no_grad():
                    memo[id(self)] = plain(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
            else:
                memo[id(self)] = copied = plain.__deepcopy__(self, memo)
                copied.__class__ = plain
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> object:  # type: ignore[override]
        return copy.deepcopy(self).__reduce_ex__(protocol)


def give_own_memory(tensor: Tensor) -> None:
    """Move `tensor`, an earlier result of `param.data`, to new memory with the same values."""
    _set_data(tensor, tensor.clone())


class _Absent:
    """Base class of parameters that hold a placeholder. Operations that need values call the engine to gather them."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # Torch functions are disabled inside `run`, or the operation would call this method again for ever.
        def run() -> object:
            if not passive and [*_params_in(_targets(func, args, kwargs), _Absent)]:
                raise RuntimeError(f"{_name_of(func)!r} would write to a placeholder of a sharded parameter. {_GATHER}")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        if passive := _is_passive(func, args, kwargs):
            return run()
        by_owner: dict[Owner, list[nn.Parameter]] = {}
        # Present parameters too, because gathering one unit may hide others.
        for param in _params_in((args, kwargs or {}), _Owned):
            if (owner := find_owner(param)) is not None:
                by_owner.setdefault(owner, []).append(param)
        for owner, params in by_owner.items():
            run = partial(owner.reads_values, params, _name_of(func), run)
        return run()

    def stride(self: Any, dim: int | None = None) -> int | tuple[int, ...]:
        like = _without_values(self)
        return like.stride() if dim is None else like.stride(dim)

    def is_contiguous(self: Any, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        return _without_values(self).is_contiguous(memory_format=memory_format)

    def _read_grad(self: Any) -> Tensor | None:
        """Return torch's `grad`, without `__torch_function__`, which would take ten times as long."""
        with torch._C.DisableTorchFunctionSubclass():
            grad: Tensor | None = get_grad(self)
        return grad

    def _drop_grad(self: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _delete_grad(self)

    grad = property(_read_grad, _Owned._assign_grad, _drop_grad)

    def __repr__(self: Any, *, tensor_contents: object = None) -> str:
        return f"<a sharded parameter of shape {tuple(self.shape)}; lightning_zero.gather shows its values>"

    def __format__(self, spec: str) -> str:
        return repr(self)


def is_absent(param: Tensor) -> bool:
    return isinstance(param, _Absent)


def _without_values(param: nn.Parameter) -> Tensor:
    owner = find_owner(param)
    strides = param.data.stride() if owner is None else owner.strides(param)
    return torch.empty_strided(param.shape, strides, device="meta")


_CLASSES: dict[type, Classes] = {}
_PLAIN: dict[type, type] = {}  # present or absent class -> plain class


def classes_of(param: nn.Parameter) -> Classes:
    """Return the classes of ``param`` before sharding, while gathered, and while it holds a placeholder. All three are
    the same if the class overrides ``__torch_function__``, except for packed weights."""
    plain = type(param)
    if plain not in _CLASSES:
        if plain.__torch_function__ is not nn.Parameter.__torch_function__ and not is_packed(param):  # type: ignore
            _CLASSES[plain] = Classes(plain, plain, plain)
        else:
            # The class is named in `__qualname__` only: tensorboardX takes "torch" in a class name for a tensor.
            of = f"[{plain.__module__}.{plain.__qualname__}]"
            present = type("PresentParameter", (_Owned, plain), {"__qualname__": f"PresentParameter{of}"})
            absent = type("AbsentParameter", (_Absent, present), {"__qualname__": f"AbsentParameter{of}"})
            _CLASSES[plain] = Classes(plain, present, absent)
            _PLAIN.update({present: plain, absent: plain})
    return _CLASSES[plain]


def own(params: Iterable[nn.Parameter], owner: Owner) -> None:
    """Register `owner` (by a weak reference) to be called when users' code reads or writes `params`."""
    for param in params:
        _OWNERS[param] = ref(owner)


def disown(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        _OWNERS.pop(param, None)


def make_plain(params: Iterable[nn.Parameter]) -> None:
    """Restore the classes that `params` had before they were sharded. Leave their `.data` as it is."""
    for param in params:
        param.__class__ = _PLAIN.get(type(param), type(param))


def _is_passive(func: Any, args: Sequence[object], kwargs: Mapping[str, object] | None) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") not in _ATTRIBUTES_OF_VALUES
    if name == "type":
        return len(args) == 1 and not kwargs  # with arguments `type` converts
    if name.endswith("_like") or (name.startswith(("new", "is_")) and name != "is_nonzero"):
        return True
    return name in _PASSIVE or (name in _LIKE_OTHER and not isinstance(args[0], _Absent))


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return str(func.__self__.__name__) if name == "__get__" else name


def _targets(
    func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object] | None
) -> Sequence[object]:
    """Return the arguments that ``func`` writes to: the ones it changes in place, if any, and its ``out`` argument."""
    name = _name_of(func)
    operator = name == "__setitem__" or (name.startswith("__i") and len(args) > 1)  # x[0] = 1, x += 1
    in_place = operator or (name.endswith("_") and not name.endswith("__"))
    return (*args[: int(in_place)], (kwargs or {}).get("out"))


def _params_in(value: object, kind: type) -> Iterator[nn.Parameter]:
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, kind):
            if id(item) not in seen:
                seen.add(id(item))
                yield item  # type: ignore[misc]
        elif isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(reversed(list(item.values())))


T = TypeVar("T")
READ_CHUNK = 1 << 20  # elements read from a file at a time


@dataclass(slots=True, eq=False)
class ParamInfo:
    """The engine's record of one sharded parameter. Nothing is stored on the `nn.Parameter` itself."""

    param: nn.Parameter
    fqns: tuple[str, ...]  # every name; tied weights have several
    shape: torch.Size
    strides: tuple[int, ...]  # the flat buffer keeps the memory order, because it changes how kernels round
    dtype: torch.dtype  # before sharding: what checkpoints hold
    classes: Classes
    split: Split | None = None  # this rank's part under tensor parallelism; the other fields are those of the part
    slot: int = 0  # position in the bucket
    gathered: Tensor | None = None  # [shape] compute_dtype, a view of the bucket's full buffer
    version: int = 0  # version of the parameter up to which users' writes have been copied to the masters

    @property
    def fqn(self) -> str:
        return self.fqns[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """Return the shape in checkpoints: that of the whole tensor if tensor or expert parallelism splits it."""
        return self.split.shape if self.split is not None else tuple(self.shape)

    @property
    def saved_strides(self) -> tuple[int, ...]:
        return self.strides if self.split is None else torch.empty(self.split.shape, device="meta").stride()

    def part_of_saved(self, value: T) -> T | Tensor:
        """Return this rank's part of ``value`` if tensor or expert parallelism splits the parameter and ``value`` is a
        tensor of the whole shape; otherwise return ``value``."""
        if self.split is None or not isinstance(value, Tensor) or tuple(value.shape) != self.split.shape:
            return value
        if not isinstance(value, StoredTensor):
            return self.split.cut(value)
        split, read = self.split, value.read
        return StoredTensor(split.shape_of(split.part), value.dtype, lambda low, high, _: split.read(read, low, high))

    def check_shape(self, shape: torch.Size) -> None:
        """Raise RuntimeError if `shape`, of a new `param.data`, is not the parameter's shape."""
        if shape != self.shape:
            raise RuntimeError(
                f"{self.fqn}.data = ...: expected a tensor of shape {tuple(self.shape)}, got {tuple(shape)}. A sharded "
                "parameter keeps its shape: change the module before it is sharded (in __init__ or configure_model)."
            )

    def flattened(self, value: Tensor) -> Tensor:
        """Return the elements of `value` [shape], which can have any strides, as [numel] in the flat buffer's order."""
        return value.permute(self.order).reshape(-1)

    @property
    def order(self) -> tuple[int, ...]:
        """Return the parameter's dimensions in memory order: the dimension with the largest stride first."""
        return memory_order(self.strides)

    def copy_part(self, value: Tensor, start: int, target: Tensor) -> None:
        """Copy n elements of the flattened `value`, from element `start` on, to `target` [n]. If `value` is a tensor in
        a file, only these elements are read."""
        if not isinstance(value, StoredTensor):
            target.copy_(self.flattened(value)[start : start + len(target)])
            return
        for low in range(0, len(target), READ_CHUNK):
            piece = target[low : low + READ_CHUNK]
            piece.copy_(value.read(start + low, start + low + len(piece), self.order))


def set_values(infos: Iterable[ParamInfo], values: Iterable[Tensor], kind: Kind) -> None:
    """Set each parameter's `.data` to its tensor in `values`, and its class to the one for `kind`."""
    for info, value in zip(infos, values, strict=True):
        # The plain class first: an absent parameter would ask the owner, who is calling this.
        info.param.__class__ = info.classes.plain
        _set_data(info.param, value)
        info.param.__class__ = getattr(info.classes, kind)


def values_changed(infos: Sequence[ParamInfo]) -> None:
    """Increment the autograd versions of parameters whose values the engine has changed, so that torch refuses a
    backward that saved the old values. `passes.writes.Writes` does not treat the change as a user's write. See
    [Note: version counters]."""
    increment_version([info.param for info in infos])
    for info in infos:
        info.version += 1


def strides_of(param: Tensor) -> tuple[int, ...]:
    """Return the strides of `param` if its memory has neither gaps nor overlaps, else those of a contiguous tensor."""
    expected = 1
    for step, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if step != expected:
                return torch.empty(param.shape, device="meta").stride()
            expected *= size
    return param.stride()
