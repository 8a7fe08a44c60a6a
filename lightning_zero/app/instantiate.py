"""Objects from the mappings of Hydra groups, with errors that name the key to change.

``hydra.utils.instantiate`` does this too, but wraps every exception; here a wrong key is told from an exception of the
user's own class, which is passed on with its traceback.
"""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

from lightning_zero.config import ConfigError, nearest
from lightning_zero.ranks.started_by import launched

INSTALL = {"logger": " pip install 'lightning-zero[loggers]' brings those of logger=..."}  # by group


def is_first() -> bool:
    """Whether this is the process that Lightning starts others from, or rank 0 of those that a launcher has started."""
    place = launched()
    return place is None or not (place.rank or place.local_rank)


def locate(key: str, path: Any) -> Any:
    """The object with a dotted path.

    Raises:
        ConfigError: there is no such module or attribute. An import that fails inside the module is passed on.
    """
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(f"{key}: expected the dotted path of a class, got {path!r}. Change {key}.")
    parts = path.split(".")
    for n in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:n])
        try:
            found = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue  # perhaps a class in the module above
            raise
        for i, part in enumerate(parts[n:], start=n):
            if not hasattr(found, part):
                raise ConfigError(f"{key}: {'.'.join(parts[:i])} has no {part!r}, got {path!r}. Change {key}.")
            found = getattr(found, part)
        return found
    raise ConfigError(f"{key}: there is no module {parts[0]!r} to import, got {path!r}. Change {key} or PYTHONPATH.")


def accepted_arguments(target: Any) -> set[str] | None:
    """Names of the arguments that a class or function takes; ``None`` where it takes any.

    ``**kwargs`` of an ``__init__`` are taken to go to the next class of the MRO.
    """
    if not inspect.isclass(target):
        return _names(target)
    names: set[str] = set()
    for cls in target.__mro__:
        if "__init__" in cls.__dict__ and cls is not object:
            own = inspect.signature(cls.__dict__["__init__"]).parameters.values()
            if cls is target and _is_library(cls) and any(p.kind is p.VAR_KEYWORD for p in own):
                return None  # it hands them on: wandb.init(**kwargs)
            names |= {p.name for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"self"}
            if not any(p.kind is p.VAR_KEYWORD for p in own):
                return names
            if _is_library(cls):
                return names or None  # a base that takes anything is no reason to pass anything
    return names


def _is_library(target: Any) -> bool:
    return str(getattr(target, "__module__", None)).split(".")[0] in ("torch", "lightning", "pytorch_lightning")


def _names(function: Any) -> set[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters}


def build(
    key: str,
    node: dict[str, Any],
    *,
    droppable: set[str] | frozenset[str] = frozenset(),
    extra: dict[str, Any] | None = None,
    needs_extra: set[str] | frozenset[str] = frozenset(),
) -> Any:
    """The object that ``node`` describes: ``_target_``, perhaps ``_partial_``, and its arguments.

    Args:
        key: where the node is in the configuration, for messages.
        droppable: arguments that are left out, with a note, where the target does not take them.
        extra: arguments that are passed where the target takes them.
        needs_extra: those of them that it must take.

    Raises:
        ConfigError: no such target, an argument that it does not take, or one that is missing.
    """
    arguments = {k: _nested(f"{key}.{k}", v) for k, v in node.items() if k not in ("_target_", "_partial_")}
    target = locate(f"{key}._target_", node.get("_target_"))
    accepted = accepted_arguments(target)
    if accepted is not None:
        unknown = [k for k in arguments if k not in accepted]
        refused = [k for k in unknown if k not in droppable]
        if refused:
            close = nearest(refused[0], accepted)
            change = f"Write {key}.{close}" if close else f"Change {key}.{refused[0]}"
            raise ConfigError(
                f"{key}.{refused[0]}: {node['_target_']} takes no such argument; it takes "
                f"{', '.join(sorted(accepted)) or 'none'}. {change}."
            )
        for k in unknown:
            del arguments[k]
        unused = unknown + [k for k in extra or {} if k not in accepted | needs_extra]
        if unused and is_first():
            print(f"note: {node['_target_']} takes no {', '.join(unused)}: not passed to it.", flush=True)
        for k in sorted(needs_extra - accepted):
            raise ConfigError(
                f"{k}: {node['_target_']} takes no argument {k!r}, so that {k}.* has no effect. "
                f"Drop {k}.*, or let it take {k}."
            )
    arguments |= {k: v for k, v in (extra or {}).items() if accepted is not None and k in accepted}
    if node.get("_partial_"):
        return partial(target, **arguments)
    _check_complete(key, node["_target_"], target, arguments)
    if not _is_library(target):
        return target(**arguments)  # whose exceptions keep their traceback
    return _built_by_library(key, node["_target_"], target, arguments)


def _built_by_library(key: str, name: str, target: Any, arguments: dict[str, Any]) -> Any:
    """What it refuses is an error of the settings."""
    try:
        return target(**arguments)
    except ModuleNotFoundError as error:
        said = str(error).splitlines()[0].rstrip(".")
        install = INSTALL.get(key.split(".")[0], "")
        raise ConfigError(f"{key}: {name} needs a package that is not installed: {said}.{install}") from error
    except Exception as error:
        if not isinstance(error, (ValueError, TypeError)) and type(error).__name__ != "MisconfigurationException":
            raise
        check_numbers(key, arguments, target)
        said = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{key}: {name} refuses these settings: {said}. Change {key}.*.") from error


def check_numbers(key: str, arguments: dict[str, Any], target: Any) -> None:
    """Of arguments that ``target`` has refused.

    Raises:
        ConfigError: one is text, and its default is a number.
    """
    for name, parameter in inspect.signature(target).parameters.items():
        value = arguments.get(name)
        if isinstance(value, str) and type(parameter.default) in (int, float):
            raise ConfigError(f"{key}.{name}: expected a number, got {value!r}. Change {key}.{name}.")


def build_all(key: str, nodes: dict[str, Any]) -> list[Any]:
    """One object for each entry; an entry that is null is left out."""
    built = []
    for name, node in nodes.items():
        if node is None:
            continue
        if not isinstance(node, dict):
            raise ConfigError(f"{key}.{name}: expected a mapping with _target_, or null, got {node!r}.")
        built.append(build(f"{key}.{name}", node))
    return built


def _check_complete(key: str, path: str, target: Any, arguments: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except ValueError:
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{key}: {path}: {error}. Give it as +{key}.<name>=<value>.") from None


def _nested(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        if "_target_" in value:
            return build(key, value)
        return {k: _nested(f"{key}.{k}", v) for k, v in value.items()}
    if isinstance(value, list):
        return [_nested(f"{key}.{i}", v) for i, v in enumerate(value)]
    return value
