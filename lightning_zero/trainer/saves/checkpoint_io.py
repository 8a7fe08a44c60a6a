"""Write, read and remove checkpoint files. ``checkpoint/durable.py`` explains how writes are atomic."""

from __future__ import annotations

import contextlib
import errno
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_zero.checkpoint.archive import write_archive
from lightning_zero.checkpoint.durable import naming, remove_whole, written_aside
from lightning_zero.checkpoint.sharded.index import refuse_other_folder
from lightning_zero.engine.passes.containers import find_tensors
from lightning_zero.lightning_api import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO, get_filesystem, is_local
from lightning_zero.planning.memory import SPARE
from lightning_zero.ranks.progress import SILENT, LongWork
from lightning_zero.ranks.resume import damage, refusal
from lightning_zero.settings import MIB, ConfigError
from lightning_zero.tiers.limits import available_host_memory
from lightning_zero.tiers.remote import RemotePath, place


class ZeroCheckpointIO(TorchCheckpointIO):
    """Writes a local file completely or not at all. Writes other files as Lightning does, or in parts if memory does
    not suffice for Lightning's copies. ``long_work`` shows the progress."""

    long_work: LongWork = SILENT
    _looked: frozenset[bool] = frozenset()  # which kinds of files :meth:`look_at` has checked

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None or not is_local(path) or not saves_as_torch():
            found, nbytes = place(path), _nbytes(checkpoint)
            as_usual = storage_options is not None or not saves_as_torch() or not lacks_memory(2 * nbytes)
            if isinstance(found, RemotePath) and not as_usual:
                with found.uploading(nbytes) as file:  # slower than Lightning, which makes two copies
                    torch.save(checkpoint, file)  # type: ignore[arg-type]
            else:
                super().save_checkpoint(checkpoint, path, storage_options)
            if isinstance(found, RemotePath):
                found.remove_folder()  # a checkpoint of this name that was one
            return
        name = get_filesystem(path)._strip_protocol(str(path))  # also handles file:///folder/last.ckpt
        with naming(Path(name)):
            refuse_other_folder(Path(name))
        with written_aside(name) as part:
            write_archive(checkpoint, part.fd, Path(name).name, self.long_work)
        self.look_at(checkpoint, name)

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file and return its content. Large tensors are memory-mapped, so each rank reads only its ranges."""
        name = get_filesystem(path)._strip_protocol(str(path)) if is_local(path) else None
        if name is None or not zipfile.is_zipfile(name):  # an older format cannot be mapped
            return super().load_checkpoint(path, map_location, weights_only is not False)

        def mapped(storage: Any, location: str) -> Any:
            return map_location(storage if storage.nbytes() > _SMALL_NBYTES else storage.clone(), location)

        loaded: dict[str, Any] = torch.load(name, mapped, weights_only=weights_only is not False, mmap=True)
        if isinstance(loaded, dict):  # else it is no checkpoint, which the caller reports
            _bring_to_memory({key: value for key, value in loaded.items() if key not in _COPIED_FROM})
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        if isinstance(found := place(path), RemotePath):
            found.remove_folder()
            if found.is_file():
                found.unlink()
            return
        with contextlib.suppress(FileNotFoundError):
            remove_whole(get_filesystem(path)._strip_protocol(str(path)))

    def look_at(self, checkpoint: Mapping[str, Any], path: str) -> None:
        """Warn if loading the file ``path``, to which ``checkpoint`` was saved, might run code and is thus refused."""
        whole = "optimizer_states" in checkpoint
        if whole in self._looked:
            return
        self._looked |= {whole}
        if found := _classes(path):
            warnings.warn(
                f"{path} holds {', '.join(found)}. A run cannot resume from this file, because loading these classes "
                f"can run code. Do not save them in hyperparameters and states, or {way_out(found)}.",
                stacklevel=2,
            )


# Large entries, which loading copies from the mapped file. Other entries may outlive the file: reading a mapping whose
# file another node has removed from a network file system kills the process.
_COPIED_FROM = ("state_dict", "optimizer_states", "current_model_state")
_SMALL_NBYTES = MIB  # smaller storages are copied at once


def _bring_to_memory(loaded: Mapping[str, Any]) -> None:
    storages: dict[int, Any] = {}
    for tensor in find_tensors(loaded):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            copy = storages.setdefault(
                storage._cdata, storage if storage.nbytes() <= _SMALL_NBYTES else storage.clone()
            )
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
                copy, tensor.storage_offset(), tensor.shape, tensor.stride()
            )


def _nbytes(checkpoint: Any) -> int:
    storages = (t.untyped_storage() for t in find_tensors(checkpoint) if t.layout is torch.strided)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def lacks_memory(nbytes: int) -> bool:
    """Return whether allocating ``nbytes`` more bytes might exhaust this host's memory."""
    return nbytes > SPARE * available_host_memory()


def writes_files(io: CheckpointIO) -> TypeGuard[ZeroCheckpointIO]:
    """Return whether ``io`` saves as ZeroCheckpointIO does: only files, in torch.save's format."""
    return type(io).save_checkpoint is ZeroCheckpointIO.save_checkpoint


_TORCHS = torch.save


def saves_as_torch() -> bool:
    """Return whether ``torch.save`` is torch's own function. If it is a mock, it must be called, with all values."""
    return torch.save is _TORCHS


def with_default(io: CheckpointIO | None) -> CheckpointIO:
    """Return ``io``, or a ZeroCheckpointIO if it is None. Put a ZeroCheckpointIO into a wrapper that wraps nothing."""
    if io is None:
        return ZeroCheckpointIO()
    if _is_wrapper(io):
        io.checkpoint_io = ZeroCheckpointIO()  # type: ignore[attr-defined]  # does nothing where there is one
    return io


def _is_wrapper(io: CheckpointIO | None) -> bool:
    return hasattr(type(io), "checkpoint_io")


def load(io: CheckpointIO, path: Any, weights_only: bool | None) -> dict[str, Any]:
    """Return the checkpoint at ``path``, a file or a URL. Code in it can run only if ``weights_only`` is False.

    Raises:
        ConfigError: the file would run code, or is not a complete checkpoint. The message names the file.
        OSError: reading failed, but another try may succeed. The message names the file.
    """
    try:
        return io.load_checkpoint(path, weights_only=weights_only is not False)
    except MemoryError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. Change ckpt_path (path of fabric.load).") from error
    except OSError as error:
        if error.errno in _LASTING:
            raise ConfigError(_damaged(path, error)) from error
        raise OSError(error.errno, f"{path}: the checkpoint could not be read: {error}") from error
    except Exception as error:  # unpickling a damaged file can raise almost anything
        found = [] if weights_only is False else _refused(path, error)
        if not found:
            raise ConfigError(_damaged(path, error)) from error
        raise ConfigError(runs_code(path, found)) from error


# Errors that another try cannot fix. torch raises EINVAL for a truncated file.
_LASTING = (errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM)
_NOT_ALLOWED = "Weights only load failed"


def runs_code(path: Any, found: Sequence[str]) -> str:
    """Return an error message for the checkpoint ``path``, which holds the classes ``found``."""
    return (
        f"ckpt_path (path of fabric.load): expected a checkpoint of tensors and plain values, got {path} with "
        f"{', '.join(found)}: loading these classes can run any code in the file. If you trust the file, "
        f"{way_out(found)}."
    )


def way_out(found: Iterable[str]) -> str:
    names = ", ".join(name.rpartition(".")[2] for name in found)
    return (
        "pass weights_only=False to Trainer.fit (validate, test, predict) or fabric.load, or weights_only=false to "
        f"lightning_zero.train, or first allow the classes: torch.serialization.add_safe_globals([{names}])"
    )


def _damaged(path: Any, error: Exception) -> str:
    with contextlib.suppress(OSError, TypeError):
        if cause := damage(path):
            return refusal(path, cause)
    said = str(error).partition(" In PyTorch 2.6")[0]  # without torch's advice to give weights_only=False
    return refusal(path, f"it cannot be read: {type(error).__name__}: {said}".rstrip(": ."))


def _refused(path: Any, error: Exception) -> list[str]:
    """Return the names of the classes that made torch refuse to load the file; [] if ``error`` has another cause."""
    if not isinstance(error, pickle.UnpicklingError) or _NOT_ALLOWED not in str(error):
        return []
    return _classes(path) or re.findall(r"GLOBAL ([\w.]+)", str(error))


def _classes(path: Any) -> list[str]:
    """Return the names that loading the file would import or call, without loading it; [] if it cannot be examined."""
    try:
        with get_filesystem(path).open(str(path), "rb") as file:
            return sorted(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # an older format, whose error names the first class
        return []


def wait_for_writes(io: CheckpointIO, long_work: LongWork) -> None:
    """If ``io`` writes asynchronously, wait until it has written all queued checkpoints. Raise the writer's error."""
    writer = async_writer(io)
    if writer is not None:
        if writer._executor is not None:
            long_work.wait(writer._executor.submit(lambda: None), "the save before")
        if (error := writer._error) is not None:
            writer._error = None  # raised once; later saves are tried again
            raise error


def after_writes(io: CheckpointIO, act: Callable[[], None]) -> None:
    """Call ``act`` after the queued writes, or never if one of them failed. The writer's single thread keeps the order.

    AsyncCheckpointIO alone would remove old files at once. If the process were then killed, no file would be left.
    """
    writer = async_writer(io)
    executor = writer._executor if writer is not None else None
    if writer is None or executor is None:
        act()
    else:
        executor.submit(lambda: act() if writer._error is None else None)


def async_writer(io: CheckpointIO | None) -> AsyncCheckpointIO | None:
    """Return the AsyncCheckpointIO in ``io``: ``io`` itself, or one that it wraps. None if there is none."""
    while _is_wrapper(io) and not isinstance(io, AsyncCheckpointIO):
        io = io.checkpoint_io  # type: ignore[union-attr]
    return io if isinstance(io, AsyncCheckpointIO) else None


def remove(io: CheckpointIO, path: Any) -> None:
    """Remove the checkpoint ``path``. If this fails, only warn, because training can continue."""
    try:
        io.remove_checkpoint(path)
    except Exception as error:
        rank_zero_warn(f"{path}: this checkpoint could not be removed: {type(error).__name__}: {error}")
