"""What the strategies of the Trainer and of Fabric do alike with files and folders of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from lightning_zero.checkpoint.sharded.save import Behind, save_folder
from lightning_zero.comm.agreements import gather_objects, together
from lightning_zero.config import ConfigError, ZeroConfig
from lightning_zero.lightning_api import CheckpointIO
from lightning_zero.ranks.progress import LongWork
from lightning_zero.ranks.waits import Waits
from lightning_zero.trainer.saves.checkpoint_io import load, with_default
from lightning_zero.trainer.saves.sharded_checkpoints import divide, is_folder, local_path, read, refuse_writer
from lightning_zero.trainer.saves.verified_loads import verify

T = TypeVar("T")


class CheckpointFiles:
    """A strategy, as far as files are concerned."""

    config: ZeroConfig
    if TYPE_CHECKING:  # the strategy's
        _checkpoint_io: CheckpointIO | None
        global_rank: Any
        is_global_zero: Any
        broadcast: Any

        @property
        def _waits(self) -> Waits | None: ...

    @property
    def long_work(self) -> LongWork:
        """Shows what takes long, on rank 0."""
        return LongWork(self.is_global_zero and self.config.summary)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, else ours; an AsyncCheckpointIO without one of its own writes by ours too."""
        self._checkpoint_io = with_default(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        refuse_writer(io, self.config.checkpoint)
        self._checkpoint_io = io

    def _write_folder(
        self, checkpoint: Mapping[str, Any], path: Any, options: Any, *, behind: Behind | None = None, **settings: Any
    ) -> None:
        """Save ``checkpoint`` as a folder. Collective.

        Args:
            options: of a plugin.
            settings: of :func:`divide`.

        Raises:
            ConfigError: there are ``options``, or the path is not on a mounted file system.
            Exception: on all ranks, with folder and cause: it could not be written.
        """
        if options is not None:
            raise ConfigError(
                "zero/checkpoint=sharded: expected no storage_options, which only plugins use, got "
                f"{options!r}. Leave them out, or choose zero/checkpoint=full."
            )
        folder = local_path(self.broadcast(str(path)))
        parts, waits = divide(checkpoint, **settings), self._waits
        save_folder(*parts, folder, dist.group.WORLD, waits, behind=behind, long_work=self.long_work)

    def _read_checkpoint(
        self, path: Any, weights_only: bool | None, *, verified: bool, of_trainer: bool = True
    ) -> dict[str, Any]:
        """Read a file or a folder. Collective.

        Args:
            verified: it is compared with its checksums before.
            of_trainer: the module is wanted under the name that it has in checkpoints of the Trainer.
        """
        if verified:
            verify(path, self.global_rank, self.gather_objects, self.together, self.long_work)

        def act() -> dict[str, Any]:
            if is_folder(path):
                return read(path, weights_only, of_trainer=of_trainer, long_work=self.long_work)
            return load(self.checkpoint_io, path, weights_only)

        return self.together("reading a checkpoint", act)

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Gather a small object from each rank. Collective."""
        waits = self._waits
        return [value] if waits is None else gather_objects(dist.group.WORLD, value, waits, what, patient=True)

    def together(self, what: str, act: Callable[[], T]) -> T:
        """Do this, without messages; where it fails on one rank, all raise, and none waits for it. Collective."""
        waits = self._waits
        return act() if waits is None else together(dist.group.WORLD, waits, what, act, patient=True)
