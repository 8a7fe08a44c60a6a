"""Build the parts of a run from their Hydra groups: precision, optimizer, model, loggers and data."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lightning_zero.app.instantiate import build, build_all, check_values, is_first
from lightning_zero.app.schema import Task, TrainConfig
from lightning_zero.planning.topology import Ranks, flat
from lightning_zero.settings import ConfigError, Precision, check_installed, nearest

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule


TEXT_DATA = "lightning_zero.data.text.TextData"
OUR_DATA = (  # batches are tensors [batch_size, block_size + 1] of tokens
    TEXT_DATA,
    "lightning_zero.data.dataset.DatasetText",
    "lightning_zero.data.synthetic.SyntheticData",
)
PACKAGES = {"lightning_zero.models.hugging_face.LitCausalLM": "transformers", OUR_DATA[1]: "datasets"}  # of classes
PRECISION_ALIASES = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "16": "16-mixed"}


def check_packages(config: TrainConfig, *groups: str) -> None:
    """Raise ConfigError if a package is missing that ``groups``, of model and data, need. Nothing is imported."""
    nodes = [getattr(config, group) for group in groups]
    needed = [PACKAGES[node["_target_"]] for node in nodes if node.get("_target_") in PACKAGES]
    needed += ["transformers"] if "data" in groups and config.data.get("tokenizer") is not None else []
    check_installed(" and ".join(groups), dict.fromkeys(needed))


def agreed_precision(config: TrainConfig) -> str | None:
    """Return the Trainer's precision: that of ``zero/precision`` if given, else ``trainer.precision``, else None. Raise
    ConfigError if both are given and differ."""
    name = config.zero.precision.name
    asked = config.trainer.get("precision")
    if name is None:
        return asked
    expected = name.value
    if asked is not None and PRECISION_ALIASES.get(asked, asked) != expected:
        row = nearest(asked, Precision.__members__)
        change = f"Write zero/precision={row}" if row not in (None, name.name) else "Drop trainer.precision"
        raise ConfigError(
            f"trainer.precision: expected {expected} under zero/precision={name.name}, got {asked}. {change}."
        )
    return expected


def build_optimizer(config: TrainConfig) -> Any:
    """Return a function that makes an optimizer from param groups.

    The function is tried on a vector, then on a matrix if the optimizer refuses vectors (Muon). Raises ConfigError if
    the optimizer refuses its settings or does not work with the settings ``zero.optimizer``.
    """
    import torch

    from lightning_zero.optimizers.refused import check_optimizer

    if not config.optimizer.get("_partial_"):
        raise ConfigError(
            "optimizer._partial_: expected true (the parameters come later), got "
            f"{config.optimizer.get('_partial_')!r}. Change optimizer._partial_."
        )
    make = build("optimizer", config.optimizer)
    refused: list[Exception] = []
    for shape in ((1,), (2, 2)):
        try:
            tried = make([torch.nn.Parameter(torch.zeros(shape))])
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            refused.append(error)
            continue
        zero = config.zero
        check_optimizer(tried, zero.optimizer, stochastic_rounding=zero.precision.stochastic_rounding)
        return make
    check_values("optimizer", config.optimizer, make.func)
    raise ConfigError(
        f"optimizer: {config.optimizer['_target_']} refuses these settings: {refused[0]}. Change optimizer.*."
    ) from refused[0]


def build_model(config: TrainConfig, explicit: set[str]) -> LightningModule:
    """Build the LightningModule of the group ``model``, with the optimizer if it takes one."""
    optimizer = build_optimizer(config) if config.optimizer else None
    asked_for_optimizer = any(k == "optimizer" or k.startswith("optimizer.") for k in explicit)
    needed = {"optimizer"} if asked_for_optimizer else set()
    return _build_part("model", config.model, explicit, extra={"optimizer": optimizer}, needs_extra=needed)


def build_data(config: TrainConfig, explicit: set[str]) -> LightningDataModule:
    return _build_part("data", config.data, explicit)


def _build_part(group: str, node: dict[str, Any], explicit: set[str], **extra: Any) -> Any:
    """Build ``node``. Arguments of ours that its class does not take are dropped: an experiment may set them for the
    class of another file. Those that the user gave (``explicit``) are never dropped."""
    target = str(node.get("_target_"))
    if is_first() and not target.startswith("lightning_zero."):
        values = ", ".join(f"{key}={value!r}" for key, value in node.items() if key != "_target_")
        print(f"note: {target} gets {values or 'none'} of {group}.*: what you have set.", flush=True)
    given = {key.split(".")[1] for key in explicit if key.startswith(f"{group}.")}
    return build(group, node, droppable=set(node) - given, **extra)


def build_loggers(config: TrainConfig) -> list[Any]:
    """Build the loggers. Raises ConfigError if a package is missing, or for wandb if nobody is logged in."""
    loggers = build_all("logger", config.logger)
    for name, logger in zip((n for n, node in config.logger.items() if node is not None), loggers, strict=True):
        if type(logger).__name__ == "WandbLogger" and not logger._offline and is_first():
            _log_in(f"logger.{name}")
    return loggers


def _log_in(key: str) -> None:
    """Log in to wandb before the run starts; later, wandb would prompt for an account while other ranks wait."""
    import wandb

    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    try:
        wandb.login()
    except wandb.Error as error:
        raise ConfigError(
            f"{key}: expected an account of wandb, got none: {error} Log in by wandb login or WANDB_API_KEY, or give "
            f"{key}.offline=true."
        ) from error


def check_data(config: TrainConfig, data: LightningDataModule, world_size: int) -> None:
    """Check that the ranks of the run can share the data.

    Raises ConfigError if ``zero.sequence_parallel`` does not divide the number of ranks. With data classes of this
    package, also if it does not divide the sequence length, or if the data of a fit is less than one batch per rank.
    """
    from lightning_zero.data.synthetic import SyntheticData
    from lightning_zero.data.text import TextData

    n = config.zero.sequence_parallel
    ranks = Ranks.locate(0, flat(world_size), config.zero)
    if config.data.get("_target_") not in OUR_DATA:
        return
    block_size = config.data["block_size"]
    if block_size % n:
        raise ConfigError(
            f"data.block_size: expected a multiple of zero.sequence_parallel ({n}), whose ranks have equal parts of a "
            f"sequence, got {block_size}. Change data.block_size or zero.sequence_parallel."
        )
    if config.task is Task.fit and isinstance(data, (TextData, SyntheticData)):
        data.check(ranks.batch.size)
