"""What is wrong with overrides on the command line: what was expected, what was given, and what to write instead.

::

    check_arguments   before Hydra composes: what it would answer with a traceback
    hydra_raises      while it composes: what it refuses is raised, and not printed
    explain           what it has refused, in our words
    check_keys        after it has composed: what a ``+``, or a file, has added to a typed part
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from lightning_zero.config import ConfigError, choose, nearest, parse_bytes

# Groups that must have a file, and values that Hydra does not take for the name of one (it ends in a traceback).
GROUPS = ("zero/comm", "cluster", "model", "data", "optimizer", "trainer", "callbacks", "logger")
NOT_A_NAME = r"[\d.]*|null|true|false"
FULL_ERROR = "HYDRA_FULL_ERROR"

# What OmegaConf says, and what a user would call it.
KINDS = {
    "Integer": "a whole number",
    "Float": "a number",
    "Boolean": "true or false",
    "bool": "true or false",
    "String": "text",
}

_silenced = False  # we have set FULL_ERROR


@contextlib.contextmanager
def hydra_raises() -> Iterator[None]:
    """Have Hydra raise what it would print and end the process with, until :func:`hydra_prints`."""
    global _silenced
    if FULL_ERROR not in os.environ:
        os.environ[FULL_ERROR], _silenced = "1", True
    try:
        yield
    finally:
        hydra_prints()


def hydra_prints() -> None:
    """Let Hydra print exceptions as it always does, without its own frames."""
    global _silenced
    if _silenced:
        os.environ.pop(FULL_ERROR, None)
        _silenced = False


# -- before and after -------------------------------------------------------------------------------------------------


def check_arguments(arguments: list[str]) -> None:
    """What Hydra itself would answer with a traceback or with a name of its own.

    Raises:
        ConfigError: a row of a group that is not there yet, or that is written as a number or null.
    """
    for argument in arguments:
        if argument in ("experiment=null", "debug=null", "hparams_search=null"):
            raise ConfigError(f"{argument}: this is the default, and Hydra cannot read it here. Drop {argument}.")
        match = re.fullmatch(rf"({'|'.join(GROUPS)})=({NOT_A_NAME})", argument)
        if match is not None:
            none = " (none switches it off)" if match[1] in ("callbacks", "logger") else ""
            raise ConfigError(
                f"{match[1]}: expected the name of a file of the group{none}, got {match[2]}. Change {match[1]}."
            )
        match = re.fullmatch(r"\+?zero/(stage|precision|offload|checkpoint)(?:@[\w.]+)?=([^,]*)", argument)
        if match is None:
            continue
        group, value = match.groups()
        row = choose(group, value).name if _hydra_cannot_read(value) else value
        if row != value:
            raise ConfigError(f"zero/{group}: write zero/{group}={row}, got zero/{group}={value}.")


def _hydra_cannot_read(value: str) -> bool:
    """Whether only we can say what is wrong; files of a user's own in the group are Hydra's affair."""
    return re.fullmatch(NOT_A_NAME, value) is not None


def check_keys(node: Any, path: str = "") -> None:
    """Refuse what a ``+`` on the command line, or a file, has added to a typed part.

    Raises:
        ConfigError: a key that the schema does not have, or that is a misspelt group.
    """
    if not isinstance(node, DictConfig):
        return
    kind = OmegaConf.get_type(node)
    known = {f.name for f in fields(kind)} if is_dataclass(kind) else None
    for key in map(str, node):
        full = f"{path}{key}"
        if "/" in key:
            raise ConfigError(f"{full}: there is no such group; --help lists them. Change {full}.")
        if known is not None and key not in known:
            close = nearest(key, known)
            change = f"Write {path}{close}" if close else f"Change {full}"
            raise ConfigError(f"{full}: no such setting; there are {', '.join(sorted(known))}. {change}.")
        if not OmegaConf.is_interpolation(node, key) and not OmegaConf.is_missing(node, key):
            check_keys(node[key], f"{full}.")


# -- what Hydra has refused -------------------------------------------------------------------------------------------


class _Conf(NamedTuple):
    """What can be written: groups with their files, and settings with their defaults (None for those that hold others).

    Keys have slashes and dots, as on the command line.
    """

    groups: dict[str, list[str]]
    settings: dict[str, Any]

    def inside(self, key: str) -> list[str]:
        """The names of the settings beside ``key``."""
        parent = key.rpartition(".")[0]
        return sorted({k.rpartition(".")[2] for k in self.settings if k.rpartition(".")[0] == parent})


def explain(error: Exception, config_name: str, arguments: list[str]) -> str:
    """Say what Hydra, or OmegaConf below it, has refused.

    Args:
        config_name: the file of ``conf`` that was composed.
        arguments: of the command.
    """
    text = str(error)
    conf = _known(config_name)
    found: str | None = None
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        found = _missing_file(error, conf)
    elif match := re.search(r"Could not (?:override|delete)(?: from config\.)? '([^']+)'", text):
        found = _unknown_key(_given(match[1], arguments), conf)
    elif match := re.search(r"Error merging override (.+)", text):
        found = _wrong_value(match[1].strip(), error.__cause__ or error, conf)
    elif match := re.search(r"An item is already at '([^']+)'", text):
        given = _given(match[1], arguments)
        found = f"{match[1]}: this setting is there already, got {given}. Write {given.lstrip('+')}."
    elif isinstance(error, OverrideParseException):
        said = error.message.splitlines()[0]
        found = f"{error.override}: expected key=value, with quotes around a value with '=', spaces or commas: {said}."
    return found if found is not None else " ".join(line.strip() for line in text.splitlines() if line.strip())


def _given(key: str, arguments: list[str]) -> str:
    """The override of ``key``, as it was written."""
    starts = tuple(f"{sign}{key}" for sign in ("", "+", "++", "~"))
    return next((a for a in arguments if re.split(r"[=@]", a)[0] in starts), key)


def _known(config_name: str) -> _Conf:
    import lightning_zero.conf

    folder = Path(next(iter(lightning_zero.conf.__path__)))
    groups: dict[str, list[str]] = {}
    for file in sorted(folder.resolve().rglob("*.yaml")):
        group = file.relative_to(folder.resolve()).parent.as_posix()
        if group != ".":
            groups.setdefault(group, []).append(file.stem)
    GlobalHydra.instance().clear()
    with initialize_config_module("lightning_zero.conf", version_base="1.3"):
        cfg = compose(config_name)
    GlobalHydra.instance().clear()
    settings: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        for key, inner in value.items():
            settings[f"{path}{key}"] = None if isinstance(inner, dict) else inner
            if isinstance(inner, dict):
                walk(inner, f"{path}{key}.")

    walk(OmegaConf.to_container(cfg, resolve=False), "")
    return _Conf(groups, settings)


def _missing_file(error: MissingConfigException, conf: _Conf) -> str:
    """A group without this file, or no such group."""
    group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
    options = list(error.options or conf.groups.get(group) or ())
    if not options:
        return _unknown_key(f"{group}={name}", conf)
    close = nearest(name, options)
    write = f"Write {group}={close}" if close else f"Change {group}"
    return f"{group}: expected one of {', '.join(options)}, got {name!r} (there is no {group}/{name}). {write}."


def _unknown_key(given: str, conf: _Conf) -> str:
    """Neither a group nor a setting of this name."""
    key, is_given, value = given.lstrip("+~").partition("=")
    what = f"got {given}" if is_given else f"got {key}"
    if key == "machine":
        return f"machine: lightning_zero.plan and lightning_zero.submit have this group, {what}. Drop {given}."
    if key.replace(".", "/") in conf.groups:  # a group's name with a dot
        return _group_by_slash(key.replace(".", "/"), value, what, conf)
    group, _, inside = key.partition(".")
    if (file := inside.partition(".")[0]) != inside and file in conf.groups.get(group, ()):
        return f"{key}: there is no {group}.{file} without {group}={file}, {what}. Add {group}={file}."
    if (dotted := key.replace("/", ".")) in conf.settings:
        return f"{key}: expected a group before a slash, {what}. {dotted} is a setting: write {dotted}={value}."
    if "/" in key:
        close = nearest(key, conf.groups)
        groups = f"there are {', '.join(sorted(conf.groups))}"
        return f"{key}: no such group, {what}; {groups}. {f'Write {close}={value}' if close else f'Change {key}'}."
    path, _, last = key.rpartition(".")
    close = nearest(last, conf.inside(key))
    right: str | None = f"{path}.{close}" if path and close else close
    if right is None:  # in another part, or a group's last name
        right = next((k for k in conf.settings if k.rpartition(".")[2] == last), None)
    same_name = next((g for g in conf.groups if g.rpartition("/")[2] == last), None)
    if same_name is not None and not path:
        return _group_by_slash(same_name, value, what, conf)
    beside = conf.inside(key)
    there = f"; there are {', '.join(beside)}" if beside else ""
    where = f" in {path}" if path else ""
    return f"{key}: no such setting{where}, {what}{there}. {f'Write {right}={value}' if right else f'Change {key}'}."


def _group_by_slash(group: str, value: str, what: str, conf: _Conf) -> str:
    files = conf.groups[group]
    close = value if value in files else nearest(value, files)
    return (
        f"{group}: expected the file of a group ({', '.join(files)}), which a slash chooses, {what}. "
        f"Write {group}={close or files[0]}."
    )


def _wrong_value(given: str, cause: BaseException, conf: _Conf) -> str | None:
    """A setting that is there, with a value that it cannot have."""
    key, _, value = given.lstrip("+~").partition("=")
    if key.replace(".", "/") in conf.groups:
        return _group_by_slash(key.replace(".", "/"), value, f"got {given}", conf)
    said = str(cause).splitlines()[0]
    if match := re.search(r"expected one of \[([^\]]*)\]", said):
        options = match[1].split(", ")
        close = nearest(value, options)
        return f"{key}: expected one of {', '.join(options)}, got {value!r}. {_write(key, close)}."
    if match := re.search(r"could not be converted to (\w+)|is not a valid (\w+)", said):
        expected = KINDS.get(match[1] or match[2], match[1] or match[2])
        default = conf.settings.get(key)
        right = _bytes_of(key, value)
        if right is None and default is not None:
            return f"{key}: expected {expected}, such as the default {default}, got {value!r}. Change {key}."
        return f"{key}: expected {expected}, got {value!r}. {_write(key, right)}."
    inner = sorted(k for k in conf.settings if k.startswith(f"{key}."))
    if inner:
        return f"{key}: expected settings of its own ({', '.join(inner)}), got {given}. Write {inner[0]}=..."
    return f"{key}: {said.rstrip('.')}, got {given}. Change {key}."


def _write(key: str, value: str | None) -> str:
    return f"Write {key}={value}" if value is not None else f"Change {key}"


def _bytes_of(key: str, value: str) -> str | None:
    """``256MiB`` as the number that a setting in bytes takes."""
    if not key.endswith(("_bytes", "_budget")):
        return None
    with contextlib.suppress(ConfigError):
        return str(parse_bytes(key, value))
    return None
