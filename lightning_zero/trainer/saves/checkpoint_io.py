"""Writes, reads and removes checkpoints. ``checkpoint/durable.py`` says why it does not write them in torch's way."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_zero.checkpoint.archive import write_archive
from lightning_zero.checkpoint.durable import naming, remove_whole, written_aside
from lightning_zero.checkpoint.sharded.index import refuse_other_folder
from lightning_zero.config import MIB, ConfigError
from lightning_zero.lightning_api import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO, get_filesystem, is_local
from lightning_zero.ranks.progress import SILENT, LongWork


class ZeroCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's file so that it is whole or not there. Where the path is not local, Lightning writes it.

    Attributes:
        long_work: shows how far a file is, where the user waits for it.
    """

    long_work: LongWork = SILENT
    _looked: frozenset[bool] = frozenset()  # what files of weights only, and whole ones, of this run hold

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None or not is_local(path) or not saves_as_torch():
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        name = get_filesystem(path)._strip_protocol(str(path))  # of file:///folder/last.ckpt too
        with naming(Path(name)):
            refuse_other_folder(Path(name))
        with written_aside(name) as part:
            write_archive(checkpoint, part.fd, Path(name).name, self.long_work)
        self.look_at(checkpoint, name)

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Weights and optimizer states are mapped: who loads them touches what it takes, a rank its own ranges."""
        name = get_filesystem(path)._strip_protocol(str(path)) if is_local(path) else None
        if name is None or not zipfile.is_zipfile(name):  # an older format cannot be mapped
            return super().load_checkpoint(path, map_location, weights_only is not False)

        def mapped(storage: Any, location: str) -> Any:
            return map_location(storage if storage.nbytes() > _SMALL_NBYTES else storage.clone(), location)

        loaded: dict[str, Any] = torch.load(name, mapped, weights_only=weights_only is not False, mmap=True)
        if isinstance(loaded, dict):  # else it is no checkpoint, which who loads it says
            _bring_to_memory({key: value for key, value in loaded.items() if key not in _COPIED_FROM})
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        if not is_local(path):
            super().remove_checkpoint(path)
            return
        with contextlib.suppress(FileNotFoundError):
            remove_whole(get_filesystem(path)._strip_protocol(str(path)))

    def look_at(self, checkpoint: Mapping[str, Any], path: str) -> None:
        """Warn of a file from which a job could not go on, when it is written and not when it is needed."""
        whole = "optimizer_states" in checkpoint
        if whole in self._looked:
            return
        self._looked |= {whole}
        if found := _classes(path):
            warnings.warn(
                f"{path} holds {', '.join(found)}, and going on from it is refused: loading these can run code. "
                f"Keep them out of hyperparameters and states, or {way_out(found)}.",
                stacklevel=2,
            )


# Where a checkpoint is large, and is copied from when it is loaded. The rest may be kept for longer than there is this
# file: where another node removes it from a network's file system, a process that reads on in it is killed.
_COPIED_FROM = ("state_dict", "optimizer_states", "current_model_state")
_SMALL_NBYTES = MIB  # below this it is not worth a thought


def _bring_to_memory(loaded: Mapping[str, Any]) -> None:
    storages: dict[int, Any] = {}
    for tensor in _tensors_in(loaded, set()):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            copy = storages.setdefault(
                storage._cdata, storage if storage.nbytes() <= _SMALL_NBYTES else storage.clone()
            )
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
                copy, tensor.storage_offset(), tensor.shape, tensor.stride()
            )


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in mappings, sequences and dataclasses; these may be frozen, and hold themselves."""
    if isinstance(value, Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = vars(value).values() if hasattr(value, "__dict__") else ()
    if id(value) not in seen:
        seen.add(id(value))
        for entry in inner:
            yield from _tensors_in(entry, seen)


def writes_files(io: CheckpointIO) -> TypeGuard[ZeroCheckpointIO]:
    """Whether files of torch.save are all that ``io`` writes: it is ours, and not one of the user's."""
    return type(io).save_checkpoint is ZeroCheckpointIO.save_checkpoint


_TORCHS = torch.save


def saves_as_torch() -> bool:
    """Whether ``torch.save`` is torch's own: a mock of it is called as by Lightning, with all values."""
    return torch.save is _TORCHS


def with_default(io: CheckpointIO | None) -> CheckpointIO:
    """``io``, or ours where the user has chosen none; also inside of a wrapper such as AsyncCheckpointIO."""
    if io is None:
        return ZeroCheckpointIO()
    if _is_wrapper(io):
        io.checkpoint_io = ZeroCheckpointIO()  # type: ignore[attr-defined]  # does nothing where there is one
    return io


def _is_wrapper(io: CheckpointIO | None) -> bool:
    """Whether ``io`` is one of Lightning's that hand over to another one."""
    return hasattr(type(io), "checkpoint_io")


def load(io: CheckpointIO, path: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        weights_only: but for ``False``, no code that is in the file is run: Lightning's own default is another one for
            a path of http.

    Raises:
        ConfigError: what the file holds would run code, or it is no whole checkpoint; with the file.
        OSError: the system's, which another try may not meet; with the file.
    """
    try:
        return io.load_checkpoint(path, weights_only=weights_only is not False)
    except MemoryError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. Give another ckpt_path (path of fabric.load).") from error
    except OSError as error:
        if error.errno in _LASTING:
            raise ConfigError(_damaged(path, error)) from error
        raise OSError(error.errno, f"{path}: the checkpoint could not be read: {error}") from error
    except Exception as error:  # of files that are none, unpickling raises almost any
        found = [] if weights_only is False else _refused(path, error)
        if not found:
            raise ConfigError(_damaged(path, error)) from error
        raise ConfigError(
            f"ckpt_path (path of fabric.load): expected a checkpoint of tensors and plain values, got {path} with "
            f"{', '.join(found)}: loading these can run any code in the file. If you trust it, {way_out(found)}."
        ) from error


# Errors that stay until the user does something; the first is torch's, of a file that was cut off.
_LASTING = (errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM)
_NOT_ALLOWED = "Weights only load failed"


def way_out(found: Iterable[str]) -> str:
    names = ", ".join(name.rpartition(".")[2] for name in found)
    return (
        "give weights_only=False to Trainer.fit (validate, test, predict) or fabric.load, or weights_only=false to "
        "lightning_zero.train, "
        f"or allow the classes before: torch.serialization.add_safe_globals([{names}])"
    )


def _damaged(path: Any, error: Exception) -> str:
    said = str(error).partition(" In PyTorch 2.6")[0]  # without torch's advice to give weights_only=False
    cause = f"{type(error).__name__}: {said}".rstrip(": .")
    return (
        f"ckpt_path (path of fabric.load): expected a whole checkpoint, got {path}, which cannot be read: {cause}. "
        "Give another one."
    )


def _refused(path: Any, error: Exception) -> list[str]:
    """The classes for which torch has refused the file; none where it has failed for another reason."""
    if not isinstance(error, pickle.UnpicklingError) or _NOT_ALLOWED not in str(error):
        return []
    return _classes(path) or re.findall(r"GLOBAL ([\w.]+)", str(error))


def _classes(path: Any) -> list[str]:
    """The names that loading the file would import or call. Nothing is run here."""
    try:
        with get_filesystem(path).open(str(path), "rb") as file:
            return sorted(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # an older format; the first of them is in the error
        return []


def wait_for_writes(io: CheckpointIO, long_work: LongWork) -> None:
    """Wait until what is in the writer's queue is done: each save in it holds a whole checkpoint.

    Raises:
        Exception: what the writer has failed with, earlier than with the next save.
    """
    writer = async_writer(io)
    if writer is not None:
        if writer._executor is not None:
            long_work.wait(writer._executor.submit(lambda: None), "the save before")
        if (error := writer._error) is not None:
            writer._error = None  # said once: what follows is tried again, as without the plugin
            raise error


def after_writes(io: CheckpointIO, act: Callable[[], None]) -> None:
    """Do this when all earlier writes in the writer's queue are done; not at all if one of them failed.

    Removals, for one: AsyncCheckpointIO would remove at once, and a process that is killed then has neither the old
    checkpoint nor the new one. The executor of AsyncCheckpointIO has one thread, which takes what it is given in order.
    """
    writer = async_writer(io)
    executor = writer._executor if writer is not None else None
    if writer is None or executor is None:
        act()
    else:
        executor.submit(lambda: act() if writer._error is None else None)


def async_writer(io: CheckpointIO | None) -> AsyncCheckpointIO | None:
    """The plugin that writes in a thread, if any, inside of whatever wrappers."""
    while _is_wrapper(io) and not isinstance(io, AsyncCheckpointIO):
        io = io.checkpoint_io  # type: ignore[union-attr]
    return io if isinstance(io, AsyncCheckpointIO) else None


def remove(io: CheckpointIO, path: Any) -> None:
    """Remove a checkpoint. Where that fails it only warns: training can go on."""
    try:
        io.remove_checkpoint(path)
    except Exception as error:
        rank_zero_warn(f"{path}: this checkpoint could not be removed: {type(error).__name__}: {error}")
