"""Save and load the mapping of objects that users give to fabric.save, as one file or as a folder in DCP's format.

The file equals that of Fabric under DDP. All ranks write it if it holds exactly one sharded module, else rank 0 does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.engine import Engine
from lightning_zero.engine.whole import state_dicts
from lightning_zero.engine.whole.state_dicts import (
    check_optimizer,
    keeping_frozen,
    sharded_optimizer_state,
    sharded_state_dict,
)
from lightning_zero.fabric.module import ZeroModule
from lightning_zero.lightning_api import get_filesystem, is_local
from lightning_zero.settings import CheckpointFormat
from lightning_zero.trainer.saves.checkpoint_files import CheckpointFiles
from lightning_zero.trainer.saves.checkpoint_fits import check_model
from lightning_zero.trainer.saves.checkpoint_io import writes_files
from lightning_zero.trainer.saves.range_saves import RangeSave

T = TypeVar("T")
Filter = Mapping[str, Callable[[str, Any], bool]]


class Checkpoints(CheckpointFiles):
    if TYPE_CHECKING:  # the strategy's
        engine_of_optimizer: Callable[[Optimizer], Engine]
        steps_shards: Callable[[Any], bool]
        _engines: list[Engine]

    # -- states ---------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """Return the module's state dict with full tensors, on all ranks. Collective."""
        if not isinstance(module, ZeroModule):
            return module.state_dict()
        return module.engine.state_dict(only_rank_0=False, trainable_only=self.config.checkpoint.exclude_frozen)

    def load_module_state_dict(self, module: Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load full tensors, which are the same on all ranks, into the module's shards. Collective."""
        if not isinstance(module, ZeroModule):
            module.load_state_dict(state_dict, strict=strict)
            return
        module.engine.load_state_dict(self._with_frozen(module, state_dict), strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's unsharded state on all ranks. Collective."""
        if not self.steps_shards(optimizer):
            return optimizer.state_dict()
        return state_dicts.optimizer_state(self.engine_of_optimizer(optimizer), optimizer, only_rank_0=False)

    def _with_frozen(self, module: ZeroModule, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return keeping_frozen(module.module, state) if self.config.checkpoint.exclude_frozen else state

    # -- save -----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: Mapping[str, Any], storage_options: Any | None = None, filter: Filter | None = None
    ) -> None:
        """Save the modules, optimizers and other objects in ``state``. Raise on all ranks if writing fails. Collective.

        Args:
            filter: functions by key of ``state``. Each gets an entry's name and value on rank 0, and returns whether to
                save it. If a folder is saved, the value has only a shape and a dtype.
        """
        path = self.broadcast(path)
        filter = filter or {}
        if self.config.checkpoint.name is CheckpointFormat.sharded:
            self._save_folder(path, state, filter, storage_options)
            return
        save = self._save_by_ranges(path, state, filter) if storage_options is None else None
        without_frozen = self.config.checkpoint.exclude_frozen
        if save is None:
            content = _converted(
                state,
                lambda module: module.engine.state_dict(trainable_only=without_frozen),
                lambda optimizer: state_dicts.optimizer_state(self.engine_of_optimizer(optimizer), optimizer),
                self.steps_shards,
            )
        else:
            content = _converted(state, lambda _: save.module_state(), save.optimizer_state, self.steps_shards)
        content = self._filtered(content, filter)
        self._put_values(self._engines, content, save)
        if save is None or not save.write(content):
            self._together("writing a checkpoint", lambda: self._write(content, path, storage_options))

    def _write(self, content: dict[str, Any], path: Any, storage_options: Any) -> None:
        if self.is_global_zero:
            if writes_files(self.checkpoint_io):
                self.checkpoint_io.long_work = self._long_work
            self.checkpoint_io.save_checkpoint(content, path, storage_options)

    def _save_by_ranges(self, path: Any, state: Mapping[str, Any], filter: Filter) -> RangeSave | None:
        """Return a RangeSave if all ranks can write ranges of the file; None if rank 0 must write all values."""
        owners = {module.engine for module in state.values() if isinstance(module, ZeroModule)}
        owners |= {self.engine_of_optimizer(entry) for entry in state.values() if self.steps_shards(entry)}
        io = self.checkpoint_io
        if len(owners) != 1 or not writes_files(io) or not is_local(path):
            return None
        file = Path(get_filesystem(path)._strip_protocol(str(path)))
        # A filter may look at values.
        return RangeSave(owners.pop(), io, file, with_values=bool(filter), noting=contextlib.nullcontext)

    def _filtered(self, content: dict[str, Any], filter: Filter) -> dict[str, Any]:
        """Leave out the entries that ``filter`` leaves out on rank 0, which alone has the values of a file."""

        def ask() -> dict[str, list[str]]:
            parts = {key: content[key] for key in filter if self.is_global_zero and isinstance(content.get(key), dict)}
            return {key: [n for n, part in of.items() if filter[key](n, part)] for key, of in parts.items()}

        if filter:
            kept = self.broadcast(self._together("filtering a checkpoint", ask))
            for key, names in kept.items():
                content[key] = {name: content[key][name] for name in names if name in content[key]}
        return {key: value for key, value in content.items() if key not in filter or value != {}}

    def _save_folder(self, path: Any, state: Mapping[str, Any], filter: Filter, options: Any) -> None:
        without_frozen = self.config.checkpoint.exclude_frozen
        content = _converted(
            state,
            lambda module: sharded_state_dict(module.engine, trainable_only=without_frozen),
            lambda optimizer: sharded_optimizer_state(self.engine_of_optimizer(optimizer), optimizer),
            self.steps_shards,
        )
        content = self._filtered(content, filter)
        self._put_values(self._engines, content)
        optimizers = [key for key, entry in state.items() if self.steps_shards(entry)]
        self._write_folder(content, path, options, named=optimizers)

    # -- load -----------------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file or a folder, saved at any stage by any number of ranks, into ``state``. Return the entries whose
        keys are not in ``state``. Collective.

        Args:
            state: a mapping with keys as saved; or one module or optimizer, if the checkpoint is its state alone.
            strict: require that the checkpoint has all keys of ``state``, and exactly the entries of each module.

        Raises:
            ConfigError: the checkpoint is damaged or of another model. All ranks raise, and nothing is loaded.
            KeyError: the checkpoint lacks a key of ``state``, and ``strict`` is true.
        """
        path = self.broadcast(path)
        checkpoint = self._read_checkpoint(
            path, weights_only, verified=bool(self.config.checkpoint.verify), of_trainer=False
        )
        if not state:
            return checkpoint
        if isinstance(state, Module | Optimizer):
            self._load_into({"": state}, {"": checkpoint}, path, strict)
            return {}
        missing = [key for key in state if key not in checkpoint]
        if strict and missing:
            raise KeyError(
                f"fabric.load: {path}: expected {missing[0]!r} in the checkpoint, got none. Leave it out of the state, "
                "or pass strict=False."
            )
        found = {key: checkpoint.pop(key) for key in list(state) if key in checkpoint}
        self._load_into(state, found, path, strict)
        return checkpoint

    def _load_into(self, state: Any, found: Mapping[str, Any], path: Any, strict: bool) -> None:
        optimizers = {key: entry for key, entry in state.items() if self.steps_shards(entry) and key in found}
        modules = {key: entry for key, entry in state.items() if isinstance(entry, Module) and key in found}

        def check() -> None:
            for key, module in modules.items():
                if isinstance(module, ZeroModule):
                    check_model(module.module, self._with_frozen(module, found[key]), path, strict=strict)
            for key, optimizer in optimizers.items():
                engine = self.engine_of_optimizer(optimizer)
                check_optimizer(engine, optimizer, found[key], f"fabric.load: {path}")

        self._together("comparing a checkpoint with what it is loaded into", check)
        # First optimizers, which give what is frozen, and was not when it was saved, masters for the module's values.
        for key in sorted(found, key=lambda key: key not in optimizers):
            entry, value = state[key], found[key]
            if key in modules:
                self.load_module_state_dict(entry, value, strict=strict)
            elif key in optimizers:
                state_dicts.load_optimizer_state(self.engine_of_optimizer(entry), entry, value)
            elif isinstance(entry, Stateful):
                entry.load_state_dict(value)
            else:
                state[key] = value


def _converted(
    state: Mapping[str, Any],
    of_module: Callable[[ZeroModule], dict[str, Any]],
    of_optimizer: Callable[[Optimizer], dict[str, Any]],
    steps_shards: Callable[[Any], bool],
) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, entry in state.items():
        value: Any = entry
        if isinstance(entry, ZeroModule):
            value = of_module(entry)
        elif steps_shards(entry):
            value = of_optimizer(entry)
        elif isinstance(entry, Stateful):
            value = entry.state_dict()
        content[key] = value
    return content
