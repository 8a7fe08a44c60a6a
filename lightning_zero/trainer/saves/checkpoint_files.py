"""Read and write files and folders of checkpoints, for the strategies of the Trainer and of Fabric."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.checkpoint.sharded.save import Behind, save_folder
from lightning_zero.checkpoint.verify import NOTHING, Report, check
from lightning_zero.engine import Engine
from lightning_zero.lightning_api import CheckpointIO, rank_zero_info
from lightning_zero.ranks.progress import SILENT, LongWork
from lightning_zero.ranks.resume import refusal
from lightning_zero.settings import CheckpointFormat, ConfigError
from lightning_zero.tiers.remote import INDEX, Place, is_folder, place
from lightning_zero.trainer.processes import Processes
from lightning_zero.trainer.saves.checkpoint_io import load, with_default
from lightning_zero.trainer.saves.held import Make, fake_values, put_values, values_in_folder, whole_values
from lightning_zero.trainer.saves.range_saves import RangeSave
from lightning_zero.trainer.saves.sharded_checkpoints import divide, read, refuse_writer

_ZIP = b"PK\x03\x04"  # first bytes of a torch.save file


class CheckpointFiles(Processes):
    """Base class of the Trainer's and Fabric's strategies: reads and writes checkpoint files and folders."""

    _checkpoint_io: CheckpointIO | None
    if TYPE_CHECKING:  # Lightning's
        is_global_zero: Any

    @property
    def _long_work(self) -> LongWork:
        return LongWork(self.is_global_zero)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Return the user's CheckpointIO, or a ZeroCheckpointIO if there is none. A wrapper without an inner
        CheckpointIO gets a ZeroCheckpointIO inside."""
        self._checkpoint_io = with_default(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        refuse_writer(io, self.config.checkpoint)
        self._checkpoint_io = io

    def _put_values(self, engines: Iterable[Engine], checkpoint: dict[str, Any], save: RangeSave | None = None) -> None:
        """Replace sharded parameters of ``engines`` in entries of ``checkpoint`` (hyperparameters, states of callbacks)
        by parameters that hold the values. Collective."""
        for engine in engines:
            make: Make = partial(whole_values, checkpoint)
            if self.config.checkpoint.name is CheckpointFormat.sharded:
                make = partial(values_in_folder, checkpoint)
            elif save is not None and save.engine is engine and not save.with_values:
                make = partial(fake_values, save.fakes)
            put_values(engine, checkpoint, make)

    def _write_folder(
        self, checkpoint: Mapping[str, Any], path: Any, options: Any, *, behind: Behind | None = None, **settings: Any
    ) -> None:
        """Save ``checkpoint`` as a folder; in the background if ``behind`` is given. Collective.

        ``settings``: arguments of :func:`divide`.

        Raises:
            ConfigError: there are storage ``options``.
            Exception: writing failed. All ranks raise this error, with the folder and the cause.
        """
        if options is not None:
            raise ConfigError(
                "zero/checkpoint=sharded: expected no storage_options, which only plugins of zero/checkpoint=full use, "
                f"got {options!r}. Drop storage_options, or choose zero/checkpoint=full."
            )
        folder = place(self.broadcast(str(path)))
        parts = self._together("dividing a checkpoint", lambda: divide(checkpoint, **settings))
        save_folder(*parts, folder, dist.group.WORLD, self._waits, behind=behind, long_work=self._long_work)

    def _read_checkpoint(
        self, path: Any, weights_only: bool | None, *, verified: bool, of_trainer: bool = True
    ) -> dict[str, Any]:
        """Return the checkpoint in a file or folder; if ``verified``, first compare it with its checksums.
        ``of_trainer``: whether to name the module's entry ``state_dict``, as the Trainer does. Collective."""
        if verified:
            self._verify(path)

        def act() -> dict[str, Any]:
            if is_folder(path):
                return read(path, weights_only, of_trainer=of_trainer, long_work=self._long_work)
            return load(self.checkpoint_io, path, weights_only)

        return self._together("reading a checkpoint", act)

    def _verify(self, path: Any) -> None:
        """Compare a checkpoint with its checksums. Ranks that see the same file each check a part of it. If the file is
        damaged, raise ConfigError with its name on all ranks. Collective."""
        name = place(path)
        found = self._gather_objects(_identity(name), "checksums")
        # Ranks that see different copies of a checkpoint check each copy.
        peers = [rank for rank, identity in enumerate(found) if identity == found[self.global_rank]]
        part = peers.index(self.global_rank)
        report = self._together("reading checksums", lambda: check_sums(name, part, len(peers), self._long_work))
        total = sum(r.checked for r in self._gather_objects(report, "checksums")) // max(1, len(found) // len(peers))
        if report.unknown:
            rank_zero_warn(
                f"{name} has parts without checksums, which are loaded without a check (zero.checkpoint.verify)."
            )
        elif total:
            rank_zero_info(f"{name} was not damaged since it was written: {total:,} bytes agree with their checksums")


def _identity(name: Place) -> tuple[int, ...] | None:
    try:
        found = name.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def check_sums(name: Place, part: int = 0, parts: int = 1, long_work: LongWork = SILENT) -> Report:
    """Compare every ``parts``-th record of the checkpoint ``name``, beginning at index ``part``, with its checksum.
    Return a report. Raise ConfigError if a record is damaged."""
    if not name.is_file() and not (name / INDEX).is_file():  # loading will say so
        return NOTHING
    try:
        report = check(name, part, parts, long_work)
    except zipfile.BadZipFile as error:
        with name.open("rb") as file:
            if file.read(len(_ZIP)) == _ZIP:  # torch might read wrong bytes as tensors
                raise ConfigError(refusal(name, f"it cannot be read: {error}")) from error
        return Report(0, 1, [])  # an older format, or no checkpoint
    if report.damage:
        raise ConfigError(
            f"ckpt_path (path of fabric.load): expected {name} as it was written, got other values in "
            f"{', '.join(report.damage[:5])}{' and more' if len(report.damage) > 5 else ''}: the checkpoint was "
            "damaged after it was written. Give another checkpoint (a restarted job takes an earlier one if you remove "
            f"{name}), or set zero.checkpoint.verify=false."
        )
    return report
