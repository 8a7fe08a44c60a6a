"""What callers from Python see of the settings: each as an argument, in signatures and in messages."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_type_hints

from lightning_zero.settings import names
from lightning_zero.settings.names import ROWS, ConfigError
from lightning_zero.settings.zero_config import ZeroConfig

_ENUMS = [kind for kind in vars(names).values() if isinstance(kind, type) and issubclass(kind, Enum)]
_CHOICES = "|".join({name for kind in _ENUMS for name in kind.__members__})
_SETTING = re.compile(
    r"(?<![\w./])(?P<shell>'\+)?zero[./](?P<key>\w+)(?P<inner>(?:\.\w+)*)"
    r"(?:=(?P<value>\[[^\]']*\]|\{[^}']*\}|[\w/~$-]+(?:\.[\w/~$-]+)*)"
    rf"(?P<more>(?:(?:, or|,| or) (?:{_CHOICES})\b)*))?(?(shell)')"
)
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}


def as_arguments(text: str) -> str:
    """Return ``text`` with settings as arguments: ``stage='zero2'`` for ``zero/stage=zero2``, ``unit['classes']`` for
    ``zero.unit.classes``."""
    known = {f.name for f in fields(ZeroConfig)}

    def argument(found: re.Match[str]) -> str:
        key, inner = found["key"], found["inner"].removesuffix(".name").split(".")[1:]
        if found.start() and key not in known:  # a path, or the like
            return found[0]
        if found["value"] is None:
            return key + "".join(f"[{name!r}]" for name in inner)
        value = _literal(found["value"]) + re.sub(rf"\b({_CHOICES})\b", r"'\1'", found["more"])
        if key in ROWS or not inner:
            return key + "".join(f"[{name!r}]" for name in inner) + f"={value}"
        return f"{key}={{{inner[0]!r}: {value}}}"

    text = _SETTING.sub(argument, text)
    return re.sub(r"\b(expected|got|or) (true|false|null)\b", lambda m: f"{m[1]} {_CONSTANTS[m[2]]}", text)


def _literal(value: str) -> str:
    if value[0] in "[{":  # a list or a mapping, as Hydra writes them
        return value[0] + re.sub(r"[^,: ][^,:]*", lambda item: _literal(item[0]), value[1:-1]) + value[-1]
    return _CONSTANTS.get(value) or (value if re.fullmatch(r"[\d.]+", value) else repr(value))


@contextlib.contextmanager
def names_arguments(config: ZeroConfig | None = None) -> Iterator[None]:
    """Let a ConfigError of the body name settings as arguments, unless the caller has given them as a ``config``, as an
    app with Hydra does."""
    try:
        yield
    except ConfigError as error:
        if config is None:
            error.args = (as_arguments(str(error.args[0])), *error.args[1:])
        raise


class Signature:
    """The ``__signature__`` of a class whose ``__init__`` takes ``**settings: Unpack[...]``: each setting is listed."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature | None:
        definer = next(of for of in owner.__mro__ if "__init__" in vars(of))
        if vars(definer).get("__signature__") is not self:
            return None  # a subclass has an __init__ of its own
        made = inspect.signature(definer.__init__, eval_str=True)  # type: ignore[misc]
        _, *own, settings = made.parameters.values()
        (keywords,) = get_args(settings.annotation)
        listed = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(name), annotation=kind)
            for name, kind in get_type_hints(keywords).items()
        ]
        return made.replace(parameters=[*own, *listed])


def _default(name: str) -> Any:
    value = getattr(ZeroConfig(), name)
    return None if is_dataclass(value) else value.name if isinstance(value, Enum) else value
