"""Encode messages between ranks as JSON. Anybody who can reach the store or a port of a rank can send bytes, and
unpickling these bytes would run code. Decoding makes only plain values and value classes of this package."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any, cast

import torch
from torch import Tensor

_PACKAGE = __name__.partition(".")[0]
_JSON = (type(None), bool, int, float, str)


def dumps(value: Any) -> bytes:
    """Return ``value`` encoded as JSON; tensors are detached. Raises TypeError for objects that are not plain values,
    tensors, containers, or value classes of this package."""
    return json.dumps(_encoded(value)).encode()


def loads(message: bytes) -> Any:
    """Return the value that :func:`dumps` has encoded, without running code. Raises ValueError for other bytes."""
    try:
        return json.loads(message, object_hook=_made)
    except Exception as error:
        raise ValueError(
            f"expected a message of another rank, got {len(message)} bytes that none sends "
            f"({type(error).__name__}: {error}). Keep others from the ports of this job, and start all ranks with one "
            "version of lightning_zero."
        ) from error


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in _JSON:
        return value
    if kind is list:
        return [_encoded(entry) for entry in value]
    if kind.__name__ in _KINDS and kind is _KINDS[kind.__name__][0]:
        return {kind.__name__: _encoded(_KINDS[kind.__name__][1](value))}
    if _is_ours(kind):
        return {"ours": [kind.__module__, kind.__qualname__, *map(_encoded, _parts(value))]}
    raise TypeError(
        "expected None, numbers, text, bytes, paths, dtypes, tensors, and lists, tuples, sets and dicts of these to "
        f"send to other ranks, got a {kind.__module__}.{kind.__qualname__}. Send what it is made of, such as its "
        "state_dict(), or tolist() of an array; torch.distributed.broadcast_object_list sends any object, by pickle, "
        "which runs whatever arrives."
    )


def _made(found: dict[str, Any]) -> Any:
    ((name, parts),) = found.items()
    if name != "ours":
        return _KINDS[name][2](parts)
    kind: Any = sys.modules[parts[0]]
    for part in parts[1].split("."):
        kind = vars(kind)[part]
    if not _is_ours(kind):
        raise TypeError(f"{kind} is no class of values")
    return kind(*parts[2:])


def _is_ours(kind: Any) -> bool:
    """Return whether ``kind`` is a class of this package that only holds values, so that decoding may construct it."""
    if not isinstance(kind, type) or kind.__module__.partition(".")[0] != _PACKAGE:
        return False
    if dataclasses.is_dataclass(kind):
        return bool(cast(Any, kind).__dataclass_params__.frozen)
    return issubclass(kind, enum.Enum) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, enum.Enum):
        return [value.value]
    if isinstance(value, tuple):
        return list(value)
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def _encoded_tensor(tensor: Tensor) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"expected a dense tensor to send to other ranks, got one of {tensor.layout}. Send to_dense().")
    host = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return [tensor.dtype, tensor.shape, tensor.device.type, bytes(host.numpy())]


def _made_tensor(parts: list[Any]) -> Tensor:
    dtype, shape, device, data = parts
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(shape).to(device)  # sent without an index, so it is the receiver's current device


def _dtype(name: str) -> torch.dtype:
    found = vars(torch)[name]
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return found


_Kind = tuple[type, Callable[[Any], Any], Callable[[Any], Any]]  # type, its packer, its maker
_KINDS: dict[str, _Kind] = {
    kind.__name__: (kind, pack, make)
    for kind, pack, make in (
        (tuple, list, tuple),
        (set, list, set),
        (frozenset, list, frozenset),
        (dict, lambda value: [[k, v] for k, v in value.items()], dict),
        (OrderedDict, lambda value: [[k, v] for k, v in value.items()], OrderedDict),
        (bytes, lambda value: base64.b64encode(value).decode(), lambda text: base64.b64decode(text, validate=True)),
        (PosixPath, str, Path),
        (torch.Size, list, torch.Size),
        (torch.dtype, lambda value: str(value).removeprefix("torch."), _dtype),
        (torch.device, str, torch.device),
        (Tensor, _encoded_tensor, _made_tensor),
    )
}
