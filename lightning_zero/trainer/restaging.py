"""Another stage or offload row for a run that goes on: what a strategy does around ``Engine.restage``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_zero.config import ConfigError, ZeroConfig, with_rows
from lightning_zero.engine import engine_of
from lightning_zero.lightning_api import CheckpointIO, rank_zero_info
from lightning_zero.trainer.callbacks import averaging
from lightning_zero.trainer.saves.checkpointing import CheckpointingStrategy
from lightning_zero.trainer.summary import print_units

# Hooks of Lightning outside of its steps. What a step has left open (a ``training_step`` that returned None) is over.
_BETWEEN_STEPS = ("on_train_", "on_validation_", "on_test_", "on_predict_", "on_fit_", "on_sanity_check_")


class RestagingStrategy(CheckpointingStrategy):
    """A strategy whose module may go on with other rows of ``zero/stage`` and ``zero/offload``."""

    def __init__(self, config: ZeroConfig, checkpoint_io: CheckpointIO | None, **arguments: Any) -> None:
        """See :class:`CheckpointingStrategy`."""
        super().__init__(config, checkpoint_io, **arguments)
        self._given_offload = config.offload  # with settings for rows that may be gone to

    def restage(self, stage: int | str | None = None, offload: str | Mapping[str, Any] | None = None) -> None:
        """Go on with another stage, another row of ``zero/offload``, or both. On all ranks, between two steps: in
        ``on_train_batch_end``, ``on_train_epoch_end`` and the like, or between two fits.

        Values go from shard to shard, a bucket at a time, and through no file. Parameters, optimizer state, gradients,
        averages of callbacks and all objects that hold them stay; losses are those of a run that had the rows all
        along. Before a module is sharded it only changes the settings.

        Args:
            stage: ``"zero0"`` .. ``"zero3"``, or 0 .. 3; default: as it is.
            offload: a row's name; settings that were given with the strategy count as far as they go with it. Or all
                settings of the group. Default: as it is.

        Raises:
            ConfigError: rows that do not go together or find no room, other ones on some ranks, or a step that is under
                way; on all ranks, and nothing has changed.
            Exception: while values moved. The engine then refuses to go on.
        """
        config = self.together("restaging: its rows", lambda: self._with_rows(stage, offload))
        self._move_to(config)
        self.config = config
        if offload is not None and not isinstance(offload, str):
            self._given_offload = config.offload

    def _with_rows(self, stage: Any, offload: Any) -> ZeroConfig:
        if self.range_save is not None:
            raise ConfigError(
                "restage: expected to be called between steps, got a call inside of trainer.save_checkpoint(). Call it "
                "before or after it."
            )
        return with_rows(self.config, stage, offload, settings=self._given_offload)

    def _move_to(self, config: ZeroConfig) -> None:
        """Move the module, if it is sharded yet."""
        module = self.lightning_module
        engine = engine_of(module) if module is not None else None
        if module is None or engine is None:
            return
        trainer = module._trainer
        self.wait_for_writes()
        if (module._current_fx_name or "").startswith(_BETWEEN_STEPS):
            engine.rest()
        before = engine.config
        follow = averaging.followers(trainer, engine) if trainer is not None else []
        engine.restage(config.stage.name, config.offload, follow=follow)
        if engine.config != before:
            old, new = ((c.stage.name.name, c.offload.name.name) for c in (before, engine.config))
            rank_zero_info(f"restaged from {old[0]} to {new[0]}, offload {old[1]} to {new[1]}")
            if config.summary and self.is_global_zero:
                print_units(engine)
