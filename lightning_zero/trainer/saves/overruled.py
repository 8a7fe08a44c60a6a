"""Says which settings of optimizers a checkpoint overrules: who resumes with another ``lr`` is not told by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})  # a step is computed, not what
CYCLED = frozenset({"betas", "momentum"})  # by schedulers that keep the bounds in the group


def warn_of_overruled(
    pairs: Sequence[tuple[Optimizer, Mapping[str, Any]]], scheduled: Sequence[Optimizer], path: object
) -> None:
    """Warn where an optimizer, before it loads its state, has other settings than the state.

    Args:
        pairs: optimizers, with their saved states.
        scheduled: those whose learning rate a scheduler changes.
        path: of the checkpoint.
    """
    found = [text for optimizer, state in pairs for text in overruled(optimizer, state, optimizer in scheduled)]
    if found:
        rank_zero_warn(
            f"ckpt_path: {path}: the optimizer goes on with the settings of the checkpoint, as under every strategy, "
            f"and not with those that were given: {', '.join(dict.fromkeys(found))}. To change them, set "
            "optimizer.param_groups in on_train_start (and lr_scheduler.base_lrs where a scheduler sets lr), or load "
            "the weights alone (load_state_dict) and start anew."
        )


def overruled(optimizer: Optimizer, state: Mapping[str, Any], scheduled: bool) -> list[str]:
    """``name: of the checkpoint (given: of the optimizer)`` for each setting that differs, by param groups."""
    found = []
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=False)):
        names = [name for name in optimizer.defaults if name not in HOW and name in own and name in saved]
        if "max_momentum" in saved or "max_momentum" in own:
            names = [name for name in names if name not in CYCLED]
        for name in names:
            key = name
            if name == "lr":  # a scheduler has changed it since; what it started from is kept beside it
                key = "initial_lr" if "initial_lr" in own and "initial_lr" in saved else "lr"
                if scheduled and key == "lr":
                    continue
            theirs, ours = _plain(saved[key]), _plain(own[key])
            if theirs != ours:
                group = f" of param group {number}" if len(optimizer.param_groups) > 1 else ""
                found.append(f"{name}{group}: {theirs} (given: {ours})")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
