"""Instantiate objects from Hydra groups. A wrong key raises a ConfigError; errors of users' classes stay unchanged."""

from __future__ import annotations

import inspect
from functools import partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from hydra._internal.utils import _locate
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from lightning_zero.ranks.started_by import launched
from lightning_zero.settings import ConfigError, nearest

INSTALL = {"logger": " pip install 'lightning-zero[loggers]' brings those of logger=..."}  # by group
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
        raise ConfigError(f"{key}: cannot be imported, got {path!r}. {said} Change {key} or PYTHONPATH.") from None


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
    """Call the ``_target_`` of ``node`` with its other keys. Return the result; with ``_partial_``, a function for it.

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
            close = nearest(name, accepted)
            change = f"Write {key}.{close}" if close else f"Change {key}.{name}"
            raise ConfigError(
                f"{key}.{name}: {path} takes no such argument; it takes {', '.join(sorted(accepted)) or 'none'}. "
                f"{change}."
            )
        for name in sorted(needs_extra - accepted):
            raise ConfigError(
                f"{name}: {path} takes no argument {name!r}, so that {name}.* has no effect. Drop {name}.*, or let it "
                f"take {name}."
            )
        unused = unknown + [k for k in extra if k not in accepted]
        if unused and is_first():
            print(f"note: {path} takes no {', '.join(unused)}: not passed to it.", flush=True)
        node = {k: v for k, v in node.items() if k not in unknown}
    extra = {k: v for k, v in extra.items() if accepted is not None and k in accepted}
    if twice := next((name for name in extra if name in node), None):
        by, own = SET_BY.get(twice, twice), f"{key}.{twice}"
        raise ConfigError(
            f"{own}: expected none, as {by}=... sets it, got {node[twice]!r}. Choose {by}=..., drop {own}."
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
            raise ConfigError(f"{key}: {path}: {error}. Give it as +{key}.<name>=<value>.") from None
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
    """Raise ConfigError if an argument is of none of the types in its annotation and all of these are in ``TYPES``, or
    is text or a boolean although its default is a number. A whole float counts as int, null as false."""
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
    """Return objects built from the entries ``nodes`` (by name; null: skipped) of the Hydra group ``key``."""
    for name, node in nodes.items():
        if node is not None and not isinstance(node, dict):
            raise ConfigError(f"{key}.{name}: expected a mapping with _target_, or null, got {node!r}.")
    return [build(f"{key}.{name}", node) for name, node in nodes.items() if node is not None]
