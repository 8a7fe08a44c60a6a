"""Train causal language models of transformers: ``model=hf``, from a folder or a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.models.language_model import LanguageModel, MakeOptimizer
from lightning_zero.settings import ConfigError, change, check_installed


class LitCausalLM(LanguageModel):
    """Any ``AutoModelForCausalLM``, trained as :class:`LanguageModel` describes.

    Under ``ZeroStrategy`` the model is built on the meta device, and each rank reads its shards from the folder
    (``zero.init_from``), so that no rank holds the whole model. Under other strategies ``from_pretrained`` loads it.

    Args:
        path: a folder as ``save_pretrained`` writes it. Nothing is downloaded.
        config: settings that replace those in ``path``. Without ``path``: all settings, including ``model_type``.
        optimizer, warmup_steps, min_lr_ratio: see :class:`LanguageModel`.

    Raises ConfigError if the folder, the kind of model or a setting is unknown.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        config: dict[str, Any] | None = None,
        optimizer: MakeOptimizer | None = None,
        warmup_steps: int = 20,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__(optimizer, warmup_steps, min_lr_ratio)
        self.save_hyperparameters(ignore=["optimizer"])
        self.path = path
        self.config = read_config(path, dict(config or {}))
        self.model: nn.Module | None = None
        self.vocab_size = int(self.config.vocab_size)

    def configure_model(self) -> None:
        if self.model is not None:
            return
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM  # it has no types
        dtype = torch.get_default_dtype()  # set by Trainer(precision=), not by the dtype in the files
        if self._shards():
            with torch.device("meta"):
                self.model = auto.from_config(self.config, dtype=dtype)
        elif self.path is not None:
            self.model = auto.from_pretrained(self.path, config=self.config, dtype=dtype, local_files_only=True)
        else:
            self.model = auto.from_config(self.config, dtype=dtype)
        assert self.model is not None
        self.model.train()  # from_pretrained leaves the model in eval mode

    def _shards(self) -> bool:
        """Return whether to build on meta, for ZeroStrategy or a plan. Raise ConfigError without ``zero.init_from``."""
        from lightning_zero.trainer.strategy import ZeroStrategy

        if torch.get_default_device().type == "meta":
            return True
        strategy = self._trainer.strategy if self._trainer is not None else None
        if not isinstance(strategy, ZeroStrategy):
            return False
        if self.path is not None and strategy.config.init_from is None:
            raise ConfigError(
                f"zero.init_from: expected the folder of model.path ({self.path}), from which ZeroStrategy reads the "
                "initial values, got null. Set zero.init_from to this folder."
            )
        return True

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.model is not None, "configure_model comes first"
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def read_config(path: str | None, settings: dict[str, Any]) -> Any:
    """Return the transformers configuration for ``path`` and ``settings``. Raises ConfigError as LitCausalLM does."""
    folder = None if path is None else Path(path).expanduser()
    if folder is not None and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: expected a folder with a config.json, as save_pretrained writes it, got {path!r}. Change "
            "model.path."
        )
    check_installed("model", ["transformers"])
    from transformers import AutoConfig

    if folder is not None:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _check_settings(config, settings)
        for key, value in settings.items():
            setattr(config, key, value)
        return config
    kind = settings.pop("model_type", None)
    if kind is None:
        raise ConfigError(
            "model.path: expected a folder with a model of transformers, or model.config with a model_type, got "
            "neither. Set model.path=/folder, or choose model=llama."
        )
    try:
        config = AutoConfig.for_model(kind)
    except ValueError as error:
        raise ConfigError(
            f"model.config.model_type: expected a kind of model that transformers knows (llama, gpt2, ...), got "
            f"{kind!r}. Change model.config.model_type."
        ) from error
    _check_settings(config, settings)
    try:
        return AutoConfig.for_model(kind, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model.config: {type(config).__name__} refuses these settings: {error}. Change model.config."
        ) from error


def _check_settings(config: Any, settings: dict[str, Any]) -> None:
    """Raise ConfigError for settings that ``config`` does not have, because transformers would ignore them."""
    for key in settings:
        if not hasattr(config, key):
            way = change("model.config.", key, set(config.to_dict()))
            raise ConfigError(f"model.config.{key}: {type(config).__name__} has no such setting. {way}")
