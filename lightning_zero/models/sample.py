"""A callback that lets the model write a few lines when training ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_zero.config import ConfigError


class SampleText(Callback):
    """Prints text that the model continues from ``prompt``, at the end of training.

    Every rank makes the same calls of ``pl_module.generate(tokens, n, temperature=, seed=)``, which a sharded model
    needs: each call gathers. Rank 0 prints. A module without ``generate`` is left alone. What cannot be sampled or
    decoded is a warning: a sample ends no run.
    """

    def __init__(self, prompt: str = "def ", new_tokens: int = 200, temperature: float = 0.8, seed: int = 0) -> None:
        if not prompt:
            raise ConfigError("callbacks.sample.prompt: expected at least one character, got none.")
        if new_tokens < 1:
            raise ConfigError(f"callbacks.sample.new_tokens: expected a number > 0, got {new_tokens}.")
        if temperature <= 0:
            raise ConfigError(f"callbacks.sample.temperature: expected a number > 0, got {temperature}.")
        self.prompt = prompt
        self.new_tokens = new_tokens
        self.temperature = temperature
        self.seed = seed

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        generate = getattr(pl_module, "generate", None)
        if generate is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        data = getattr(trainer, "datamodule", None)
        encode = getattr(data, "encode", lambda text: list(text.encode()))
        decode = getattr(data, "decode", lambda tokens: bytes(tokens).decode("utf-8", "replace"))
        prompt = list(encode(self.prompt))
        if (why := self._why_not(generate, prompt, getattr(pl_module, "vocab_size", None))) is not None:
            rank_zero_warn(f"callbacks.sample: {why}. No sample is made; callbacks.sample=null leaves it out.")
            return
        tokens = torch.tensor([prompt], device=pl_module.device)
        training = pl_module.training
        pl_module.eval()
        try:
            with _inside_engine(trainer), trainer.precision_plugin.forward_context():
                tokens = generate(tokens, self.new_tokens, temperature=self.temperature, seed=self.seed)
        finally:
            pl_module.train(training)
        if trainer.is_global_zero:
            text = _decoded(decode, tokens[0].tolist())
            print(f"\n--- sample of generated text ---\n{text}\n--------------------------------", flush=True)

    def _why_not(self, generate: Callable[..., Any], prompt: list[int], vocab_size: object) -> str | None:
        """Why nothing can be sampled, seen in the same way by all ranks before any of them gathers."""
        if not prompt:
            return f"the data's tokenizer makes no token of the prompt {self.prompt!r}"
        if isinstance(vocab_size, int) and max(prompt) >= vocab_size:
            return f"the prompt has the token {max(prompt)}, and the model knows {vocab_size}"
        try:
            inspect.signature(generate).bind(None, self.new_tokens, temperature=self.temperature, seed=self.seed)
        except (TypeError, ValueError) as error:
            return f"expected generate(tokens, n, temperature=, seed=) of the model: {error}"
        return None


def _decoded(decode: Callable[[list[int]], str], tokens: list[int]) -> str:
    try:
        return decode(tokens)
    except Exception as error:  # bytes of a model with more tokens than 256, a tokenizer with fewer than the model
        rank_zero_warn(f"callbacks.sample: some tokens cannot be decoded: {type(error).__name__}: {error}")
    text = ""
    for token in tokens:
        try:
            text += decode([token])
        except Exception:
            text += "\N{REPLACEMENT CHARACTER}"
    return text


def _inside_engine(trainer: Trainer) -> AbstractContextManager[object]:
    """Where a sharded module may be called outside of Lightning's steps; other strategies need nothing."""
    scope = getattr(trainer.strategy, "step_scope", None)
    return scope() if scope is not None else nullcontext()
