"""Build the parts of a run (optimizer, model, loggers, data) from their Hydra groups. A wrong key raises a ConfigError;
errors of users' classes are not changed."""

from __future__ import annotations

import inspect
import os
from functools import partial
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from hydra._internal.utils import _locate
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from lightning_zero.app.schema import Task, TrainConfig
from lightning_zero.planning.topology import Ranks, flat
from lightning_zero.ranks.started_by import launched
from lightning_zero.settings import ConfigError, Precision, change, check_installed, nearest

INSTALL = {"logger": " Run pip install 'lightning-zero[loggers]' for all choices of logger=..."}  # by group
TYPES = {bool: "true or false", int: "a whole number", float: "a number", NoneType: "null"}  # in messages
SET_BY = {"strategy": "zero/stage", "plugins": "cluster", "default_root_dir": "run_dir"}  # others: their own group


def is_first() -> bool:
    """Return whether this process is rank 0, or the one from which Lightning starts the other ranks' processes."""
    place = launched()
    return place is None or not (place.rank or place.local_rank)


def locate(key: str, path: Any) -> Any:
    """Return the object at the dotted path ``path``. Raise ConfigError about the setting ``key`` if there is none."""
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(f"{key}: expected the dotted path of a class, got {path!r}. Change {key}.")
    try:
        return _locate(path)
    except (ImportError, ValueError) as error:
        cause, said = error.__cause__, str(error).splitlines()[-1]
        is_inside = isinstance(cause, ModuleNotFoundError) and not f"{path}.".startswith(f"{cause.name}.")
        if cause is not None and (is_inside or not isinstance(cause, (AttributeError, ModuleNotFoundError))):
            raise cause from None
        raise ConfigError(
            f"{key}: expected a class that can be imported, got {path!r}. {said} Change {key} or PYTHONPATH."
        ) from None


def accepted_arguments(target: Any) -> set[str] | None:
    """Return the names of the arguments that a function or class takes; ``None`` if it may take any. If a class takes
    ``**kwargs``, the arguments of its base class count too."""
    names: set[str] = set()
    for of in target.__mro__ if inspect.isclass(target) else [target]:
        if inspect.isclass(of) and ("__init__" not in of.__dict__ or of is object):
            continue
        try:
            own = inspect.signature(of.__dict__["__init__"] if inspect.isclass(of) else of).parameters.values()
        except ValueError:  # a builtin
            return None
        names |= {p.name for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"self"}
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            return names
        if of is target and (_is_library(of) or not inspect.isclass(of)):
            return None  # its **kwargs go to another library, such as wandb.init
        if _is_library(of):
            # That a library's base class takes **kwargs does not mean that its subclass takes any argument.
            return names or None
    return names


def _is_library(target: Any) -> bool:
    return str(getattr(target, "__module__", None)).split(".")[0] in ("torch", "lightning", "pytorch_lightning")


def build(
    key: str,
    node: dict[str, Any],
    *,
    droppable: set[str] | frozenset[str] = frozenset(),
    extra: dict[str, Any] | None = None,
    needs_extra: set[str] | frozenset[str] = frozenset(),
) -> Any:
    """Call the ``_target_`` of ``node`` with its other keys, and return the result; with ``_partial_``, a function.

    Args:
        key: path of ``node`` in the configuration, for messages.
        droppable: arguments that are dropped, with a note, if the target does not take them.
        extra: arguments that are passed if the target takes them.
        needs_extra: the arguments of ``extra`` that the target must take.

    Raises ConfigError if the target does not exist, refuses an argument or lacks one.
    """
    path = node.get("_target_")
    target = locate(f"{key}._target_", path)
    extra, accepted = extra or {}, accepted_arguments(target)
    if accepted is not None:
        unknown = [k for k in node if k not in accepted and not k.startswith("_")]
        for name in (k for k in unknown if k not in droppable):
            raise ConfigError(
                f"{key}.{name}: {path} takes no such argument; its arguments are "
                f"{', '.join(sorted(accepted)) or 'none'}. {change(f'{key}.', name, accepted)}"
            )
        for name in sorted(needs_extra - accepted):
            raise ConfigError(
                f"{name}: {path} takes no argument {name!r}, so that {name}.* has no effect. Drop {name}.*, or give "
                f"the class an argument {name}."
            )
        unused = unknown + [k for k in extra if k not in accepted]
        if unused and is_first():
            print(f"note: {path} takes no {', '.join(unused)}: not passed to it.", flush=True)
        node = {k: v for k, v in node.items() if k not in unknown}
    extra = {k: v for k, v in extra.items() if accepted is not None and k in accepted}
    if twice := next((name for name in extra if name in node), None):
        by, own = SET_BY.get(twice, twice), f"{key}.{twice}"
        raise ConfigError(
            f"{own}: expected none, because {by}=... sets {own}, got {node[twice]!r}. Drop {own}, and choose {by}=..."
        )
    try:
        given = instantiate(node, _convert_="all", _partial_=True)
    except InstantiationException as error:  # raised by a nested object
        if isinstance(error.__cause__, (ImportError, TypeError)):
            raise ConfigError(f"{key}: {' '.join(str(error).split())}. Change {key}.*.") from error
        raise
    if accepted is not None and _is_library(target):
        check_values(key, given.keywords, target)
    make = partial(target, *given.args, **given.keywords, **extra)
    return make if node.get("_partial_") else _made(key, path, target, make)


def _made(key: str, path: Any, target: Any, make: partial[Any]) -> Any:
    """Call ``make`` to construct ``target``. If a class of torch or Lightning refuses arguments, raise ConfigError."""
    try:
        return make()
    except Exception as error:
        assert error.__traceback__ is not None
        if isinstance(error, TypeError) and error.__traceback__.tb_next is None:  # raised by the call itself
            raise ConfigError(f"{key}: {path}: {error}. Give arguments as +{key}.<name>=<value>.") from None
        said = " ".join(str(error).split()).rstrip(".")
        if not _is_library(target) or isinstance(error, ConfigError):
            raise
        if isinstance(error, ModuleNotFoundError):
            install = INSTALL.get(key.split(".")[0], "")
            raise ConfigError(f"{key}: {path} needs a package that is not installed: {said}.{install}") from error
        if not isinstance(error, (ValueError, TypeError)) and type(error).__name__ != "MisconfigurationException":
            raise
        named = next((name for name in make.keywords if f"`{name}" in said), "*")
        raise ConfigError(f"{key}: {path} refuses these settings: {said}. Change {key}.{named}.") from error


def check_values(key: str, arguments: dict[str, Any], target: Any) -> None:
    """Raise ConfigError if an argument has none of its annotated types. If some annotated type is not in ``TYPES``,
    only refuse text or a boolean where the default is a number. A whole float counts as int, null as a boolean."""
    for name, parameter in inspect.signature(target).parameters.items():
        value, of = arguments.get(name), parameter.annotation
        types = get_args(of) if get_origin(of) in (Union, UnionType) else (of,)
        if not all(kind in TYPES for kind in types):
            types = (float,) if type(value) in (str, bool) and type(parameter.default) in (int, float) else (object,)
        is_number = isinstance(value, (int, float)) and (float in types or value % 1 == 0)
        is_null = value is None and (bool in types or name not in arguments)
        fits = {bool, object} & {*types} if isinstance(value, bool) else is_number or isinstance(value, types)
        if not (fits or is_null):
            expected = " or ".join(TYPES[kind] for kind in types if kind is not int or float not in types)
            raise ConfigError(f"{key}.{name}: expected {expected}, got {value!r}. Change {key}.{name}.")


def build_all(key: str, nodes: dict[str, Any]) -> list[Any]:
    """Build and return an object for each non-null entry in ``nodes``, the content of the Hydra group ``key``."""
    for name, node in nodes.items():
        if node is not None and not isinstance(node, dict):
            raise ConfigError(f"{key}.{name}: expected a mapping with _target_, or null, got {node!r}.")
    return [build(f"{key}.{name}", node) for name, node in nodes.items() if node is not None]


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
    """Raise ConfigError if a package that the configured ``groups`` (model, data) need is missing. The packages are not
    imported."""
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
        way = f"Write zero/precision={row}" if row not in (None, name.name) else "Drop trainer.precision"
        raise ConfigError(
            f"trainer.precision: expected {expected} under zero/precision={name.name}, got {asked}. {way}."
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
            "optimizer._partial_: expected true (the model passes the parameters later), got "
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
    """Build the LightningModule of the group ``model``, and pass it the optimizer if it takes one."""
    optimizer = build_optimizer(config) if config.optimizer else None
    asked_for_optimizer = any(k == "optimizer" or k.startswith("optimizer.") for k in explicit)
    needed = {"optimizer"} if asked_for_optimizer else set()
    return _build_part("model", config.model, explicit, extra={"optimizer": optimizer}, needs_extra=needed)


def build_data(config: TrainConfig, explicit: set[str]) -> LightningDataModule:
    return _build_part("data", config.data, explicit)


def _build_part(group: str, node: dict[str, Any], explicit: set[str], **extra: Any) -> Any:
    """Build ``node``. Arguments that its class does not take are dropped, unless the user gave them (``explicit``),
    because files of this package may set arguments that only other classes take."""
    target = str(node.get("_target_"))
    if is_first() and not target.startswith("lightning_zero."):
        values = ", ".join(f"{key}={value!r}" for key, value in node.items() if key != "_target_")
        print(f"note: {target} gets {values or 'none'} of {group}.*: the values that you have set.", flush=True)
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
            f"{key}: expected an account of wandb, got none: {error} Log in with wandb login or WANDB_API_KEY, or set "
            f"{key}.offline=true."
        ) from error


def check_data(config: TrainConfig, data: LightningDataModule, world_size: int) -> None:
    """Check that the ranks of the run can share the data.

    Raises ConfigError if the size of sequence, tensor or expert parallelism does not divide the number of ranks. For
    data classes of this package, also raises it if ``sequence_parallel`` does not divide the sequence length, or if the
    data of a fit is less than one batch per rank.
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
            f"data.block_size: expected a multiple of zero.sequence_parallel ({n}), because ranks have equal parts of "
            f"a sequence, got {block_size}. Change data.block_size or zero.sequence_parallel."
        )
    if config.task is Task.fit and isinstance(data, (TextData, SyntheticData)):
        data.check(ranks.batch.size)
