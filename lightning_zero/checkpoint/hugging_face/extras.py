"""What a Hugging Face folder holds besides tensors."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch

# Files of tokenizers and processors.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


def write_extras(model: Any, folder: Path, dtype: torch.dtype | None, source: str | None, *, adapters: bool) -> None:
    """Write the configuration of ``model`` (transformers or PEFT, or None) and copy companion files from ``source``,
    the folder it came from."""
    if adapters:
        config = copy.copy(model.peft_config[model.active_adapter])
        config.inference_mode = True
        config.save_pretrained(folder)
    elif model is not None:
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)
    for origin in (source, getattr(getattr(model, "config", None), "_name_or_path", None)):
        if origin and Path(origin).expanduser().is_dir():
            _copy(Path(origin).expanduser(), folder)
            return


def _copy(source: Path, folder: Path) -> None:
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
