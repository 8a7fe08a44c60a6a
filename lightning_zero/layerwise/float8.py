"""Let linear layers compute in float8, by torchao. Weights remain plain parameters, and no name changes."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from lightning_zero.device.cuda import capability
from lightning_zero.settings import ConfigError, Float8, PrecisionConfig

LEAST = (8, 9)  # compute capability of GPUs that multiply in float8
GIVEN = "_given_for_float8"  # attribute of a layer: the names of its attributes that come from here


def check_torchao(precision: PrecisionConfig) -> None:
    """Raise ConfigError if ``precision.float8`` needs torchao and it is not installed."""
    if precision.float8 is not Float8.none and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"zero.precision.float8: {precision.float8.name} needs torchao, which is not installed. Run pip install "
            "torchao (or lightning_zero[float8]), or choose zero/precision=bf16."
        )


def convert(module: nn.Module, precision: PrecisionConfig, device: torch.device) -> None:
    """Make linear layers of ``module`` compute in float8: those that ``precision`` selects get torchao's Float8Linear
    as their class, but stay the same objects, with their hooks. Layers that only an earlier run selected become
    nn.Linear again. Subclasses of nn.Linear (also parametrized layers) are not selected: they have their own forward.

    Raises ConfigError without torchao, on a GPU that cannot multiply in float8, or if no layer is chosen."""
    for linear in module.modules():
        for key in vars(linear).pop(GIVEN, ()):  # of an earlier run
            linear.__class__ = nn.Linear
            delattr(linear, key)
    if precision.float8 is Float8.none:
        return
    recipe, on_gpu = precision.float8.name, device.type == "cuda"
    if on_gpu and (found := capability(device)) < LEAST:
        raise ConfigError(
            f"zero.precision.float8: expected none on a GPU of compute capability {found[0]}.{found[1]}, got {recipe}: "
            "GPUs multiply in float8 from 8.9 on. Choose zero/precision=bf16."
        )
    check_torchao(precision)
    from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe, convert_to_float8_training

    pays = _auto_filter_for_recipe(recipe, []) if on_gpu else lambda *_: True
    chosen = [
        linear
        for name, linear in module.named_modules()
        if type(linear) is nn.Linear
        and linear.in_features % 16 == linear.out_features % 16 == 0
        and not any(fnmatchcase(name, pattern) for pattern in precision.float8_exclude)
        and pays(linear, name)
    ]
    if not chosen:
        raise ConfigError(
            "zero.precision.float8: expected layers of nn.Linear with sizes that are multiples of "
            f"16{', large enough to be faster in float8' * on_gpu}, outside of "
            f"zero.precision.float8_exclude={precision.float8_exclude}, got none in {type(module).__name__}. Change "
            "zero.precision.float8_exclude, or choose zero/precision=bf16."
        )
    # Padded, because a product in the backward sums over the rows of the batch, of which GPUs take multiples of 16.
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not on_gpu, pad_inner_dim=True)
    example = convert_to_float8_training(nn.Linear(16, 16, device="meta"), config=config)
    for linear in chosen:
        given = {key: value for key, value in vars(example).items() if key not in vars(linear)}
        vars(linear).update(given, **{GIVEN: list(given)})
        linear.__class__ = type(example)
