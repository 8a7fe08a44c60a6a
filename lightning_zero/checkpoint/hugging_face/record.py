"""Record which transformers model a checkpoint holds, so that it can be converted without the user's code."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_zero.pretrained.conversions import hugging_face_model

RECORD = "lightning_zero_hugging_face"


def record_of(module: nn.Module, source: str | None) -> dict[str, str] | None:
    """Return plain values that describe the transformers model in ``module``. ``source``: its folder."""
    model, prefix = hugging_face_model(module)
    if model is None or prefix.endswith("base_model.model."):  # with adapters
        return None
    config = json.dumps(model.config.to_diff_dict(), default=str)
    origin = source or getattr(model.config, "_name_or_path", "") or ""
    return {"prefix": prefix, "class": type(model).__name__, "config": config, "source": str(origin)}


def model_of(record: Mapping[str, str]) -> Any:
    """Build the model without values; None if transformers is not installed or does not have the class."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return None
    kind = getattr(transformers, record["class"], None)
    if kind is None:
        return None
    config = kind.config_class.from_dict(json.loads(record["config"]))
    with torch.device("meta"):
        return kind(config)
