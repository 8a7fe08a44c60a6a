"""Save one file from all ranks: rank 0 writes it with holes for tensors, then each rank writes its parts of tensors.

::

    case                         tensors of the state dicts          hooks      who writes
      default                    have no values                                 rank 0 with holes, then all ranks
      users have hooks           values in a file beside the target  read them  rank 0, an ordinary file
      another CheckpointIO       whole, on rank 0                    read them  the CheckpointIO

Hooks may read and replace values, so they get tensors that are mapped from an unlinked file. This takes no memory, but
disk space for two files. If a rank does not see rank 0's folder, rank 0 writes everything, one bucket at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.archive import Piece, Record, Skeleton, WriteAt, write_values
from lightning_zero.checkpoint.durable import Part, aside, naming, write_at
from lightning_zero.checkpoint.sharded.index import refuse_other_folder
from lightning_zero.comm.agreements import broadcast_object, gather_objects, together
from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.master_storage import MasterStorage
from lightning_zero.engine.whole import state_dicts
from lightning_zero.engine.whole.state_dicts import fake_copy
from lightning_zero.engine.whole.values import (
    COPY,
    MASTER,
    Copies,
    FakeTensors,
    Range,
    Value,
    gathered_ranges,
    own_parts,
    own_ranges,
)
from lightning_zero.lightning_api import Callback, WeightAveraging, get_filesystem, is_local, is_overridden, pl
from lightning_zero.ranks.progress import Did
from lightning_zero.settings import CheckpointFormat
from lightning_zero.trainer.adapted import is_ours
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO, saves_as_torch, writes_files

T = TypeVar("T")
Noting = Callable[[], contextlib.AbstractContextManager[None]]
_HOOK = "on_save_checkpoint"


class _Place(NamedTuple):
    """Where ranks write. ``part``: the path of the unfinished file. ``identity``: its inode and size. ``holes``: each
    value's records in the file, with their dtypes."""

    part: str
    identity: tuple[int, int]
    holes: dict[Value, list[tuple[Record, torch.dtype]]]

    @property
    def dtypes(self) -> dict[Value, torch.dtype]:
        return {value: holes[0][1] for value, holes in self.holes.items()}


class RangeSave:
    """One save of a checkpoint as a file. Each rank writes its own ranges of the file.

    Args:
        io: checks the finished checkpoint by its ``look_at``.
        with_values: whether state dicts hold values, for hooks that read them.
        noting: returns a context manager that marks an exception in its body as one that all ranks raise.
        fakes: makes tensors without values.
    """

    def __init__(
        self,
        engine: Engine,
        io: ZeroCheckpointIO,
        path: Path,
        *,
        with_values: bool,
        noting: Noting,
        fakes: FakeTensors | None = None,
    ) -> None:
        self.engine, self._io = engine, io
        self._path, self._noting = path, noting
        self.with_values = with_values
        self.fakes = fakes if fakes is not None else FakeTensors()

    # -- what Lightning asks for ----------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        without_frozen = self.engine.config.checkpoint.exclude_frozen
        return self._of(lambda fakes: self.engine.state_dict(fakes=fakes, trainable_only=without_frozen))

    def copy_of_masters(self, storages: Sequence[MasterStorage]) -> dict[str, Any]:
        """Return the module's state dict with the values in ``storages``, one per bucket, instead of the masters."""
        without_frozen = self.engine.config.checkpoint.exclude_frozen
        return self._of(lambda fakes: fake_copy(self.engine, fakes, storages, trainable_only=without_frozen))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._of(lambda fakes: state_dicts.optimizer_state(self.engine, optimizer, fakes=fakes))

    def _of(self, ask: Callable[[FakeTensors], dict[str, Any]]) -> dict[str, Any]:
        if not self.with_values:
            return ask(self.fakes)
        fakes = FakeTensors()
        state = ask(fakes)
        tensors = [tensor for _, tensor in fakes.made]
        values = self._write(dict(enumerate(tensors)), fakes, keep=False)
        found: dict[str, Any] = _replaced(state, {id(tensor): values.get(n) for n, tensor in enumerate(tensors)})
        return found

    def write(self, checkpoint: dict[str, Any]) -> bool:
        """Write the checkpoint and return True. If its tensors already have values, only return False. Collective."""
        if self.with_values:
            return False
        self._write(checkpoint, self.fakes, keep=True)
        return True

    # -- writing --------------------------------------------------------------------------------------------------

    def _write(self, content: Any, fakes: FakeTensors, *, keep: bool) -> dict[int, Tensor]:
        """Write ``content``, with values in place of the tensors of ``fakes``. If writing fails, raise on all ranks.
        Collective.

        With ``keep``, return {}. Without it, unlink the written file, and return its tensors, mapped into memory, on
        rank 0 and {} on other ranks.
        """
        begun: list[tuple[Part, Skeleton, list[Piece]]] = []  # on rank 0

        def begin() -> _Place | None:
            if self.engine.comm.rank != 0:
                return None
            refuse_other_folder(self._path)
            part = stack.enter_context(aside(self._path, keep=keep))
            skeleton = Skeleton(content, part.fd)
            begun.append((part, skeleton, skeleton.fill()))
            holes: dict[Value, list[tuple[Record, torch.dtype]]] = {}
            for value, tensor in fakes.made:
                hole = skeleton.holes.get(tensor.untyped_storage()._cdata)
                if hole is not None:  # the user's state_dict may omit the tensor
                    holes.setdefault(value, []).append((hole, tensor.dtype))
            return _Place(str(part.path), _identity(part.fd), holes)

        def end(place: _Place, done: Sequence[Piece]) -> dict[int, Tensor]:
            values: dict[int, Tensor] = {}
            for part, skeleton, filled in begun:
                # Gaps are allowed where an optimizer has state for only some elements of a parameter; the rest is zero.
                states = {
                    hole.name
                    for v, holes in place.holes.items()
                    if v.name != MASTER and v.optimizer != COPY
                    for hole, _ in holes
                }
                skeleton.finish([*filled, *done], may_have_gaps=states.__contains__)
                if not keep:
                    values = torch.load(part.path, mmap=True, weights_only=True)
            stack.close()  # gives the file its name, or unlinks it
            if keep and self.engine.comm.rank == 0:
                self._io.look_at(content, str(self._path))
            return values

        with self._noting(), contextlib.ExitStack() as stack:
            made = self._together("beginning a checkpoint", begin)
            place = broadcast_object(dist.group.WORLD, made, 0, self.engine.comm.waits)
            assert place is not None
            fd = _open(place)
            if fd is not None:
                stack.callback(os.close, fd)
            shared = all(self._gather(fd is not None, "who sees the folder of a checkpoint"))
            if shared:
                done = self._together("writing a checkpoint", partial(self._write_own, fd, place, fakes.copies))
            else:
                done = self._write_all(fd, place, fakes.copies)
            found = self._gather(done, "checksums of a checkpoint")
            return self._together("ending a checkpoint", lambda: end(place, [*itertools.chain(*found)]))

    @outside_autograd
    def _write_own(self, fd: int | None, place: _Place, copies: Copies) -> list[Piece]:
        assert fd is not None
        done: list[Piece] = []
        long_work, name = self.engine.comm.long_work, self._path.name
        with long_work.bytes(f"saving {name}", partial(self._own_nbytes, place, copies)) as did:
            write = _telling(did, partial(write_at, fd))
            for part in own_ranges(self.engine, place.dtypes, copies):
                _write_range(write, place, done, part)
        # Each rank syncs its own writes: on a network file system rank 0 cannot do it for others.
        long_work.call(partial(os.fsync, fd), f"{name}, to the disk")
        return done

    def _own_nbytes(self, place: _Place, copies: Copies) -> int:
        sizes = {value: sum(dtype.itemsize for _, dtype in holes) for value, holes in place.holes.items()}
        return sum(part.source.numel * sizes.get(part.value, 0) for part in own_parts(self.engine, copies))

    @outside_autograd
    def _write_all(self, fd: int | None, place: _Place, copies: Copies) -> list[Piece]:
        """Write all ranks' ranges on rank 0, and return the pieces written. If a write fails, receive the remaining
        ranges before raising. Collective."""
        done: list[Piece] = []
        errors: list[Exception] = []
        total = sum(hole.nbytes for holes in place.holes.values() for hole, _ in holes)

        def raise_it() -> None:
            for error in errors:
                raise error

        with self.engine.comm.long_work.bytes(f"saving {self._path.name}", lambda: total) as did:
            for part in gathered_ranges(self.engine, place.dtypes, copies):
                if self.engine.comm.rank == 0 and not errors:
                    try:
                        assert fd is not None
                        _write_range(_telling(did, partial(write_at, fd)), place, done, part)
                    except Exception as error:
                        errors.append(error)
        self._together("writing a checkpoint", raise_it)
        return done

    # -- agreements -------------------------------------------------------------------------------------------------

    def _together(self, what: str, act: Callable[[], T]) -> T:
        def named() -> T:
            with naming(self._path):
                return act()

        return together(dist.group.WORLD, self.engine.comm.waits, what, named, patient=True)

    def _gather(self, value: T, what: str) -> list[T]:
        return gather_objects(dist.group.WORLD, value, self.engine.comm.waits, what, patient=True)


def _write_range(write: WriteAt, place: _Place, done: list[Piece], part: Range) -> None:
    for hole, dtype in place.holes[part.value]:
        done += write_values(write, hole, part.start * dtype.itemsize, part.values, dtype)


def _telling(did: Did, write: WriteAt) -> WriteAt:
    """Return a function that calls ``write``, then adds the number of written bytes to the progress display ``did``."""

    def both(data: memoryview, offset: int) -> None:
        write(data, offset)
        did(len(data))

    return both


def _identity(fd: int) -> tuple[int, int]:
    """Return the file's inode and size. If they equal rank 0's, a rank sees the same file as rank 0."""
    found = os.fstat(fd)
    return found.st_ino, found.st_size


def _open(place: _Place) -> int | None:
    """Open the file that rank 0 has made and return its descriptor; None if this rank does not see the same file."""
    try:
        fd = os.open(place.part, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if _identity(fd) == place.identity:
        return fd
    os.close(fd)
    return None


def _replaced(state: Any, values: Mapping[int, Any]) -> Any:
    """Return ``state`` with each tensor replaced by the value for its id in ``values``. Changes mappings in place."""
    if isinstance(state, Tensor):
        return values.get(id(state), state)
    if type(state) in (list, tuple):
        return type(state)(_replaced(value, values) for value in state)
    if isinstance(state, MutableMapping):
        for key, value in state.items():
            state[key] = _replaced(value, values)
    return state


# -- the Trainer ------------------------------------------------------------------------------------------------------


class SavesByRanges(pl.Trainer):
    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Save a checkpoint. First decide whether all ranks write ranges of the file, because this determines what
        state dicts hold. Collective."""
        checkpoints = cast(Any, self.strategy)._checkpoints if is_ours(self) else None
        if checkpoints is None or checkpoints.range_save is not None:
            super().save_checkpoint(filepath, weights_only, storage_options)
            return
        checkpoints.before_save()
        checkpoints.range_save = _choose(self, filepath) if storage_options is None else None
        try:
            super().save_checkpoint(filepath, weights_only, storage_options)
        finally:
            checkpoints.range_save = None


def _choose(trainer: pl.Trainer, filepath: Any) -> RangeSave | None:
    """Return a RangeSave if all ranks can write ranges of the file ``filepath``, else None. Collective."""
    module, strategy = trainer.lightning_module, cast(Any, trainer.strategy)
    engine = engine_of(module) if module is not None else None
    io = strategy.checkpoint_io
    folders = strategy.config.checkpoint.name is CheckpointFormat.sharded
    if engine is None or folders or not writes_files(io):
        return None
    if not is_local(filepath):
        return None
    path = Path(get_filesystem(filepath)._strip_protocol(str(filepath)))
    # Ranks may have different callbacks, but must choose the same way.
    found = strategy._gather_objects((_have_hooks(trainer), saves_as_torch()), "saving a checkpoint: who sees it")
    if not all(plain for _, plain in found):
        return None
    hooks = any(some for some, _ in found)
    checkpoints = strategy._checkpoints
    checkpoints.fakes = fakes = FakeTensors(checkpoints.fakes)
    return RangeSave(engine, io, path, with_values=hooks, noting=checkpoints.noting_failure, fakes=fakes)


def _have_hooks(trainer: pl.Trainer) -> bool:
    """Return whether the user has ``on_save_checkpoint`` hooks, which may read the values that are saved."""
    harmless = (Callback.on_save_checkpoint, WeightAveraging.on_save_checkpoint)  # these do not read values
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return any(part is not None and is_overridden(_HOOK, part) for part in (trainer.lightning_module, data)) or any(
        type(callback).on_save_checkpoint not in harmless or _HOOK in vars(callback)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )
