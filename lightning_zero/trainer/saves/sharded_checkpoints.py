"""Map Lightning's checkpoints to folders in DCP's format, and back.

::

    of the Trainer         in the folder
    state_dict             state_dict.<name>                        in Lightning's FSDP folders: model.<name>
    optimizer_states[0]    optimizer_0.state.<name>.<entry>, optimizer_0.param_groups.<n>.<entry>
    values with parts of tensors (current_model_state of averaging callbacks)     under their own name
    the rest               meta.pt, and values of parameters in it: lightning_zero_held.<name>
    of Fabric: modules and optimizers under the user's names, in the same way
"""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.engine.whole.values import TensorParts
from lightning_zero.lightning_api import CheckpointIO, TorchCheckpointIO
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.ranks.progress import SILENT, LongWork
from lightning_zero.ranks.resume import refusal
from lightning_zero.settings import CheckpointConfig, CheckpointFormat, ConfigError
from lightning_zero.tiers.remote import place
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO, load, runs_code
from lightning_zero.trainer.saves.held import HELD

MODULE, OPTIMIZERS = "state_dict", "optimizer_states"
RECORD = "lightning_zero_sharded"  # in meta.pt: the number of optimizers, and a module's entries that are not tensors
_OPTIMIZER = re.compile(r"optimizer_(\d+)")


def refuse_writer(io: CheckpointIO | None, settings: CheckpointConfig) -> None:
    """Raise ConfigError if checkpoints are folders, but the user gave a CheckpointIO, which would never be called."""
    if io is not None and type(io) is not ZeroCheckpointIO and settings.name is CheckpointFormat.sharded:
        raise ConfigError(
            "zero/checkpoint=sharded: expected no CheckpointIO, because all ranks write the folder, and a CheckpointIO "
            f"writes only on rank 0, got {type(io).__name__}. Drop the plugin, or choose zero/checkpoint=full."
        )


def divide(checkpoint: Mapping[str, Any], named: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide ``checkpoint`` into the entries for DCP's files and the entries for ``meta.pt``. ``named``: keys of
    optimizers. Raises ConfigError for optimizer state that DCP's files would change."""
    state: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    record: dict[str, Any] = {"named": list(named)} if named else {}
    for key, value in checkpoint.items():
        if key in named:
            state[key] = _checked(value)
        elif key == HELD:
            state[key] = {name: tensor for name, (tensor, _) in value.items()}
            extra[key] = {name: param for name, (_, param) in value.items()}
        elif key == OPTIMIZERS:
            state |= {f"optimizer_{number}": _checked(entry) for number, entry in enumerate(value)}
            record["optimizers"] = len(value)
        elif key == MODULE or _has_parts(value):
            state[key] = value
            # DCP flattens mappings and turns keys into text, so extra states of modules are also stored whole.
            others = {n: v for n, v in value.items() if not isinstance(v, Tensor) and not _has_parts(v)}
            if others:
                record.setdefault("others", {})[key] = others
            if hasattr(value, "_metadata"):  # by which modules know values of older versions
                record.setdefault("versions", {})[key] = value._metadata
        else:
            extra[key] = value
    if record:
        extra[RECORD] = record
    return state, extra


def _checked(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's state dict. Raise ConfigError for nested keys that DCP would change to strings."""
    inside = [*optimizer.get("state", {}).values(), *optimizer.get("param_groups", ())]
    for value in inside:  # the loop adds the values inside of each value
        if isinstance(value, Mapping):
            if numbers := [key for key in value if not isinstance(key, str)]:
                raise ConfigError(
                    "zero/checkpoint=sharded: expected strings as keys in optimizer state, because files of DCP turn "
                    f"all keys into strings, got {numbers[0]!r}. Choose zero/checkpoint=full."
                )
            inside += value.values()
        elif isinstance(value, list | tuple):
            inside += value
    return optimizer


def _has_parts(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_parts(entry) for entry in value.values())
    return isinstance(value, TensorParts | StoredTensor)


def read(
    path: Any, weights_only: bool | None, *, of_trainer: bool = True, long_work: LongWork = SILENT
) -> dict[str, Any]:
    """Read a folder of this package or of Lightning's FSDP strategies. Return the checkpoint as Lightning loads it.

    Tensors of modules and of optimizer state are :class:`~lightning_zero.pretrained.stored.StoredTensor` s, whose
    values are not read yet. ``of_trainer``: whether to name the module's entry as in checkpoints of the Trainer.

    Raises:
        ConfigError: the folder would run code, or is not a complete checkpoint. The message names the file.
        OSError: reading failed, but another try may succeed. The message names the file.
    """
    try:
        folder = ShardedFolder(place(path))
        checkpoint = load(TorchCheckpointIO(), str(folder.extra), weights_only)
        held = checkpoint.pop(HELD, {})
        checkpoint |= _values(folder, checkpoint.pop(RECORD, None) or {}, weights_only, of_trainer, long_work)
        for name, value in checkpoint.pop(HELD, {}).items():
            held[name].data = value.whole()
        return checkpoint
    except OSError as error:
        raise OSError(error.errno, f"{path}: the checkpoint could not be read: {error}") from error


def read_module(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Return the checkpoint as :func:`read` does, but with the values of the module's tensors, for a process without a
    Trainer. ``map_location``: a device. Functions and mappings, which torch.load also accepts, mean the CPU here."""
    checkpoint = read(path, weights_only)
    device = map_location if isinstance(map_location, str | torch.device) else "cpu"
    state, made = checkpoint[MODULE], dict[int, Tensor]()
    for name, value in state.items():
        if isinstance(value, StoredTensor):  # tied parameters share one
            state[name] = made.get(id(value))
            if state[name] is None:
                state[name] = made[id(value)] = value.whole().to(device)
    return checkpoint


def _values(
    folder: ShardedFolder, record: Mapping[str, Any], weights_only: bool | None, of_trainer: bool, long_work: LongWork
) -> dict[str, Any]:
    named: Sequence[str] = record.get("named", ())
    flat: dict[str, Any] = {}
    for key in long_work.items(folder.keys, f"reading {folder.path.name}, in values"):
        if not folder.is_tensor(key):
            flat[key] = _value(folder, key, weights_only)
        else:
            tensor = folder.tensor(key)
            flat[key] = tensor if _is_copied_from(folder.path_of(key), named) else tensor.whole()
    found = unflatten_state_dict(flat, {key: folder.path_of(key) for key in flat})
    result: dict[str, Any] = {}
    optimizers: dict[int, Any] = {}
    for key, value in found.items():
        if key in named:
            result[key] = _with_numbers({"state": {}, "param_groups": [], **value})
        elif match := _OPTIMIZER.fullmatch(key):
            optimizers[int(match[1])] = _with_numbers({"state": {}, "param_groups": [], **value})
        else:
            result[MODULE if key == "model" and of_trainer else key] = value
    if of_trainer:
        result.setdefault(MODULE, {})
    for key, others in record.get("others", {}).items():
        result[key] = {**result.get(key, {}), **others}
    for key, versions in record.get("versions", {}).items():
        result[key] = OrderedDict(result.get(key, {}))
        result[key]._metadata = versions
    if optimizers or "optimizers" in record:
        count = record.get("optimizers", max(optimizers, default=-1) + 1)
        result[OPTIMIZERS] = [optimizers.get(number, {}) for number in range(count)]
    return result


def _is_copied_from(path: tuple[Any, ...], named: Sequence[str]) -> bool:
    """Return whether loading copies the tensor at the nested keys ``path``. Other tensors stay in use after loading, so
    they must be read at once, because the folder may be removed later."""
    if path[0] in named or _OPTIMIZER.fullmatch(str(path[0])):
        return len(path) < 3 or path[1] == "state"
    return len(path) < 3


def _with_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with parameters' keys, which the folder stores as text, turned back into integers."""
    groups = state["param_groups"]
    numbers = {str(key): key for group in groups for key in group.get("params", []) if isinstance(key, int)}
    return {**state, "state": {numbers.get(key, key): entry for key, entry in state["state"].items()}}


def _value(folder: ShardedFolder, key: str, weights_only: bool | None) -> Any:
    try:
        return folder.value(key, weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        found = re.findall(r"GLOBAL ([\w.]+)", str(error)) or [key]
        raise ConfigError(runs_code(folder.path, found)) from error
    except OSError:
        raise
    except Exception as error:
        raise ConfigError(refusal(folder.path, f"{key} cannot be read: {type(error).__name__}: {error}")) from error
