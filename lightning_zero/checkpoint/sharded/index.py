"""Make and read ``.metadata``, the index of a checkpoint folder, and check it against the files. It is a pickle, as DCP
requires. Only plain values and the classes of DCP's index are unpickled, so that reading runs no code from the file."""

from __future__ import annotations

import dataclasses
import errno
import io
import pickle
import posixpath
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_zero.checkpoint.sharded.items import Entry
from lightning_zero.ranks.resume import refusal
from lightning_zero.settings import ConfigError
from lightning_zero.tiers.remote import INDEX, Place

SUFFIX = ".distcp"
EXTRA = "meta.pt"  # Lightning's name for all but modules and optimizers
_EXTRA_FORM = re.compile(r"meta(_\w+)?\.pt")
_TRAILER, _TRAILER_NBYTES = b"\ncrc32 %08x", 15
_TRAILER_FORM = re.compile(rb"\ncrc32 [0-9a-f]{8}")
_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # of older versions
_OF_METADATA = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex TensorProperties "
    "StorageMeta _MEM_FORMAT_ENCODING"
)
ALLOWED = {
    *(f"{_DCP}.metadata.{name}" for name in _OF_METADATA.split()),
    f"{_DCP}.filesystem._StorageInfo",
    f"{_DCP}._hf_utils._HFStorageInfo",
    f"{_SHARDED}.MEM_FORMAT_ENCODING",
    f"{_SHARDED}.TensorProperties",
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "builtins.set",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}


def make_index(entries: Iterable[Entry], folder: str, extra: str = EXTRA) -> Metadata:
    """Return DCP's index of the checkpoint ``folder``. ``entries``: what all ranks have written. ``extra``: the name of
    the file in ``folder`` that has the content of ``meta.pt``."""
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Any] = {}
    for entry in entries:
        info = _StorageInfo(entry.file, entry.start, entry.length)
        chunk = ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes))
        for key, path in zip(entry.keys, entry.paths, strict=True):
            paths[key] = path
            if entry.dtype is None:
                state[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = info
                continue
            if key not in state:
                properties = TensorProperties(dtype=entry.dtype)
                state[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), [])
            state[key].chunks.append(chunk)
            storage[MetadataIndex(key, entry.offsets)] = info
    return Metadata(state, paths, storage, StorageMeta(folder, save_id=extra), CURRENT_DCP_VERSION)


def as_bytes(index: Metadata) -> bytes:
    """Return the bytes of ``.metadata``: ``index`` as a pickle, then a checksum of it, which other readers ignore."""
    data = pickle.dumps(index)
    return data + _TRAILER % zlib.crc32(data)


def extra_of(index: Metadata) -> str:
    """Return the name of the checkpoint's file for all but modules and optimizers: ``meta.pt``, or in an object store
    ``meta_<token>.pt``, with a token for each save."""
    name = str(index.storage_meta.save_id) if index.storage_meta is not None else ""
    return name if _EXTRA_FORM.fullmatch(name) else EXTRA  # other writers put other things there


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        kind = type(self.stack[-2])  # type: ignore[attr-defined]
        if not dataclasses.is_dataclass(kind):  # a pickle can set attributes of classes too
            raise pickle.UnpicklingError(f"it changes a {kind.__name__}, which no index does")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]

    def find_class(self, module: str, name: str) -> Any:
        allowed = f"{module}.{name}" in ALLOWED and "." not in name  # a name with dots would lead to attributes
        if allowed or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no index has")


def read_index(folder: Place) -> Metadata:
    """Read, check and return the index of the checkpoint ``folder``, without running code from the file. Raises
    ConfigError, which names the file, if the index is missing or damaged, if another file is missing or too short, or
    if it is not a checkpoint of Lightning."""
    path = folder / INDEX
    try:
        data = path.read_bytes()
        trailer = data[-_TRAILER_NBYTES:]
        if _TRAILER_FORM.fullmatch(trailer) and trailer != _TRAILER % zlib.crc32(data[:-_TRAILER_NBYTES]):
            raise ConfigError(refusal(path, "it was damaged since it was written"))
        index = _Unpickler(io.BytesIO(data)).load()
    except FileNotFoundError as error:
        raise ConfigError(refusal(folder, f"it has no {INDEX}, which is written last")) from error
    except (OSError, ConfigError):
        raise
    except Exception as error:  # unpickling other bytes raises almost anything
        raise ConfigError(refusal(path, f"it cannot be read: {type(error).__name__}: {error}")) from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ConfigError(refusal(path, f"it holds no index but a {type(index).__name__}"))
    try:
        if not (folder / (extra := extra_of(index))).is_file():
            raise ConfigError(refusal(folder, f"it has no {extra}, so it is no checkpoint of Lightning"))
        _check_files(folder, index)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # malformed entries
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(refusal(path, f"it cannot be read: {type(error).__name__}: {error}")) from error
    return index


def refuse_other_folder(target: Place) -> None:
    """Raise IsADirectoryError if ``target`` is a folder that has files other than those of a checkpoint folder, because
    a save to ``target`` would remove these files."""
    if not target.is_dir() or (isinstance(target, Path) and target.is_symlink()):
        return
    ours = re.compile(rf"{re.escape(INDEX)}|.*{re.escape(SUFFIX)}|{_EXTRA_FORM.pattern}")
    others = [path.name for path in target.iterdir() if not ours.fullmatch(path.name)]
    if others:
        shown = ", ".join(sorted(others)[:3])
        raise IsADirectoryError(errno.EISDIR, f"a folder with other files ({shown}), which a save would remove")


def _check_files(folder: Place, index: Metadata) -> None:
    """Raise ConfigError if a file that ``index`` names is not in ``folder``, is shorter than ``index`` says or is
    encoded by an extension of DCP, or if the boxes in ``index`` do not fill its tensors."""
    ends: dict[str, int] = {}
    for info in index.storage_data.values():
        if getattr(info, "transform_descriptors", None):
            kinds = ", ".join(info.transform_descriptors)
            raise ConfigError(refusal(folder, f"its files are encoded by extensions ({kinds}), which is not supported"))
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        path = folder / name
        if name != posixpath.basename(name) or name in ("", ".."):
            raise ConfigError(refusal(folder / INDEX, f"it names {name}, which is not in the folder"))
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise ConfigError(refusal(path, "this file of the checkpoint is missing")) from error
        if size < end:
            raise ConfigError(refusal(path, f"this file has {size:,} bytes, fewer than the {end:,} in the index"))
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            missing = [c for c in entry.chunks if MetadataIndex(key, c.offsets) not in index.storage_data]
            filled = sum(c.sizes.numel() for c in entry.chunks)
            if missing or filled != entry.size.numel():
                cause = f"its index has {filled:,} of the {entry.size.numel():,} elements of {key}"
                raise ConfigError(refusal(folder, cause))
        elif MetadataIndex(key) not in index.storage_data:
            raise ConfigError(refusal(folder, f"its index has no place for {key}"))
