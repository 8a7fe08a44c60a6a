"""Check whether a checkpoint fits this model and these optimizers, and warn of settings that it overrides."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_zero.engine import engine_of
from lightning_zero.engine.units.packed import prefixes_beside
from lightning_zero.engine.whole.state_dicts import parts_of_saved, versioned
from lightning_zero.pretrained import some
from lightning_zero.settings import ConfigError, ZeroConfig
from lightning_zero.trainer.callbacks.averaging import EXCLUDES_FROZEN

_VERSION = "pytorch-lightning_version"  # Lightning upgrades older checkpoints by it
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})  # change how a step is computed, not its result
_CYCLED = frozenset({"betas", "momentum"})  # changed by schedulers that cycle momentum


class OtherModelError(ConfigError, RuntimeError):
    """Raised if the checkpoint is of another model. It is also a RuntimeError, like the error of torch and DDP."""


class OnlyWeightsError(ConfigError, KeyError):
    """Raised if the checkpoint has no optimizer states to resume from. It is also a KeyError, like Lightning's."""

    __str__ = Exception.__str__


def of_lightning(loaded: Any, path: Any) -> dict[str, Any]:
    """Return ``loaded`` if it is a checkpoint of Lightning; raise ConfigError otherwise."""
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), Mapping) and _VERSION in loaded:
        return loaded
    what = f"a {type(loaded).__name__}"
    if isinstance(loaded, Mapping):
        what += f" with {some(map(str, loaded))}" if loaded else " with nothing in it"
        if "state_dict" in loaded and _VERSION not in loaded:
            what += f" and no {_VERSION}"
    raise ConfigError(
        f"ckpt_path: expected a checkpoint of Lightning, got {path}, which holds {what}. Change ckpt_path; load "
        "weights alone into the module before the run (load_state_dict), and load what fabric.save has written by "
        "fabric.load."
    )


def check_states(checkpoint: Mapping[str, Any], path: Any) -> None:
    if "optimizer_states" in checkpoint:
        return
    raise OnlyWeightsError(
        f"ckpt_path: expected a checkpoint with the states of optimizers, got {path}, which has weights only "
        "(save_weights_only=True of a ModelCheckpoint). Change ckpt_path, or load the weights into the module before "
        "the run (load_from_checkpoint)."
    )


class _WritesNothing(TorchFunctionMode):
    """Lets ``Module.load_state_dict`` in the body check everything, but copy no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            return args[0]
        return func(*args, **(kwargs or {}))


def check_model(module: nn.Module, state: Mapping[str, Any], path: Any, *, strict: bool) -> None:
    """Raise OtherModelError if ``module.load_state_dict`` would refuse ``state``, before anything is loaded."""
    engine = engine_of(module)
    with engine.passes.fence.lowered() if engine is not None else contextlib.nullcontext():
        beside = prefixes_beside(module)  # their sizes may differ, and bitsandbytes does not load them
        state = versioned({key: value for key, value in state.items() if not key.startswith(beside)}, state)
        if engine is not None:
            state = parts_of_saved(engine, state)
        own = {key: value for key, value in module.state_dict(keep_vars=True).items() if not key.startswith(beside)}
        found = _differences(own, state, strict)
        if not found:
            return
        # The module's hooks may fix the differences, for example by renaming old keys. They run only now, because they
        # may have side effects.
        try:
            with warnings.catch_warnings(), _WritesNothing(), torch.no_grad():
                warnings.simplefilter("ignore")
                module.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            raise OtherModelError(
                f"ckpt_path (path of fabric.load): expected a checkpoint of this {type(module).__name__}, got {path}: "
                f"{'; '.join(found)}. Give a checkpoint of this model; if only names differ, set "
                "strict_loading=False in the LightningModule (fabric.load: strict=False)."
            ) from error


def check_frozen(checkpoint: Mapping[str, Any], on_meta: Collection[str], path: Any, config: ZeroConfig) -> None:
    """Raise ConfigError if the checkpoint lacks frozen parameters named in ``on_meta``, and ``init_from`` is not set,
    because these parameters have no values in the module either, and would be initialized anew."""
    lacking = sorted(name for name in on_meta if name not in checkpoint["state_dict"])
    if checkpoint.get(EXCLUDES_FROZEN) and lacking and config.init_from is None:
        raise ConfigError(
            f"ckpt_path: expected a module with values for its frozen parameters, which {path} does not have "
            f"(zero.checkpoint.exclude_frozen), got {some(lacking)} on the meta device. Set zero.init_from to the "
            "folder of the model, or do not build the module on meta."
        )


def warn_of_overruled(
    pairs: Sequence[tuple[Optimizer, Mapping[str, Any]]], scheduled: Sequence[Optimizer], path: object
) -> None:
    """Warn of optimizer settings, such as ``lr``, that the loaded states are about to replace.

    ``pairs``: each optimizer and its saved state. ``scheduled``: optimizers whose learning rate a scheduler changes.
    """
    changed = []
    for optimizer, state in pairs:
        # A class's own state dict may be a list.
        groups = state.get("param_groups", ()) if isinstance(state, Mapping) else ()
        for number, (given, saved) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
            ignored = _HOW | (_CYCLED if "max_momentum" in {*given, *saved} else set())
            for name in sorted((optimizer.defaults.keys() & given.keys() & saved.keys()) - ignored):
                has_first = name == "lr" and "initial_lr" in given.keys() & saved.keys()
                if name == "lr" and optimizer in scheduled and not has_first:
                    continue
                key = "initial_lr" if has_first else name  # a scheduler may have changed lr
                before, now = _plain(saved[key]), _plain(given[key])
                if before != now:
                    group = f" of param group {number}" if len(optimizer.param_groups) > 1 else ""
                    changed.append(f"{name}{group}: {before} (given: {now})")
    if changed:
        rank_zero_warn(
            f"ckpt_path: {path}: the optimizer uses the settings in the checkpoint, as under every strategy, and not "
            f"the given ones: {', '.join(dict.fromkeys(changed))}. To use other settings, set optimizer.param_groups "
            "in on_train_start (and lr_scheduler.base_lrs if a scheduler sets lr), or load only the weights "
            "(load_state_dict) into a new run."
        )


def _plain(value: Any) -> Any:
    value = value.tolist() if isinstance(value, Tensor) else value
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _differences(own: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> list[str]:
    shapes = [
        f"{name} has shape {tuple(value.shape)} in the checkpoint and {tuple(own[name].shape)} in the model"
        for name, value in state.items()
        if isinstance(value, Tensor)
        and isinstance(own.get(name), Tensor)
        and not isinstance(own[name], UninitializedParameter | UninitializedBuffer)
        and value.shape != own[name].shape
    ]
    found = []
    if strict and (missing := [name for name in own if name not in state]):
        found.append(f"the checkpoint lacks {some(missing)}")
    if strict and (more := [name for name in state if name not in own]):
        found.append(f"the model lacks {some(more)}")
    return [*found, *([some(shapes)] if shapes else [])]
