"""Let linear layers compute in float8, by torchao. Their weights stay ordinary parameters, with the names they had."""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatchcase

import torch
from torch import nn

from lightning_zero.config import ConfigError, Float8, PrecisionConfig
from lightning_zero.device.cuda import capability

LEAST = (8, 9)  # compute capability of GPUs that multiply in float8


def check_torchao(precision: PrecisionConfig) -> None:
    """Raise ConfigError if ``precision.float8`` needs torchao and it is not installed."""
    if precision.float8 is not Float8.none and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"zero.precision.float8: {precision.float8.name} needs torchao, which is not installed. Install it (pip "
            "install torchao, or lightning_zero[float8]), or choose zero/precision=bf16."
        )


def convert(module: nn.Module, precision: PrecisionConfig, device: torch.device) -> None:
    """Replace linear layers inside of ``module`` by torchao's Float8Linear, if ``precision.float8`` asks for it.

    Raises ConfigError without torchao, on a GPU that cannot multiply in float8, or if no layer is chosen.
    """
    if precision.float8 is Float8.none:
        return
    recipe, on_gpu = precision.float8.name, device.type == "cuda"
    if on_gpu and (found := capability(device)) < LEAST:
        raise ConfigError(
            f"zero.precision.float8: expected none on a GPU of compute capability {found[0]}.{found[1]}, got {recipe}: "
            "GPUs multiply in float8 from 8.9 on. Choose zero/precision=bf16."
        )
    check_torchao(precision)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    pays = _auto_filter_for_recipe(recipe, []) if on_gpu else lambda *_: True
    chosen: list[str] = []

    def is_chosen(linear: nn.Module, name: str) -> bool:
        assert isinstance(linear, nn.Linear)
        fits = linear.in_features % 16 == 0 and linear.out_features % 16 == 0 and pays(linear, name)
        if not name or not fits or any(fnmatchcase(name, pattern) for pattern in precision.float8_exclude):
            return False
        chosen.append(name)
        return not isinstance(linear, Float8Linear)  # of an earlier run

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", not on_gpu)  # it is frozen, and recipes have no such argument
    convert_to_float8_training(module, config=config, module_filter_fn=is_chosen)
    if not chosen:
        raise ConfigError(
            f"zero.precision.float8: expected linear layers whose sizes 16 divides, outside of "
            f"zero.precision.float8_exclude={precision.float8_exclude}, got none in {type(module).__name__}. Change "
            "zero.precision.float8_exclude, or choose zero/precision=bf16."
        )
