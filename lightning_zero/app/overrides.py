"""Explain mistakes in command-line overrides by Hydra's own message and the valid override nearest to the given one.
Find the values that the user has set, because a user's class gets only these, and none from files of this package.

::

    hydra_raises      while Hydra composes: raise its errors instead of printing them
    explain           add a suggestion to Hydra's error
    check_keys        after composing: refuse unknown keys that a ``+`` or a file has added
    explicit_keys, drop_values_of_ours    what the user has set
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from hydra import compose, initialize_config_module
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_zero.settings import ConfigError, change, nearest

FULL_ERROR = "HYDRA_FULL_ERROR"
NO_NAME = "Config group override must be"  # start of Hydra's message for zero/stage=3 without the group

_silenced = False  # whether this module has set FULL_ERROR


@contextlib.contextmanager
def hydra_raises() -> Iterator[None]:
    """During the body, until :func:`hydra_prints` is called, let Hydra raise errors instead of printing and exiting."""
    global _silenced
    if FULL_ERROR not in os.environ:
        os.environ[FULL_ERROR], _silenced = "1", True
    try:
        yield
    finally:
        hydra_prints()


def hydra_prints() -> None:
    """Undo :func:`hydra_raises`: Hydra prints exceptions again, with tracebacks that leave out Hydra's own frames."""
    global _silenced
    if _silenced:
        os.environ.pop(FULL_ERROR, None)
        _silenced = False


def check_keys(node: Any, path: str = "") -> None:
    """Raise ConfigError if a key at any depth of ``node`` contains a ``/`` or is not a field of the node's dataclass.
    ``path``: the key of ``node`` in the configuration, with a final dot."""
    if not isinstance(node, DictConfig):
        return
    kind = OmegaConf.get_type(node)
    known = {f.name for f in fields(kind)} if is_dataclass(kind) else None
    for key in map(str, node):
        full = f"{path}{key}"
        if "/" in key:
            raise ConfigError(f"{full}: there is no such group; --help lists all groups. Change {full}.")
        if known is not None and key not in known:
            raise ConfigError(
                f"{full}: no such setting; there are {', '.join(sorted(known))}. {change(path, key, known)}"
            )
        if not OmegaConf.is_interpolation(node, key) and not OmegaConf.is_missing(node, key):
            check_keys(node[key], f"{full}.")


class _Conf(NamedTuple):
    """The groups and settings that an override can name."""

    groups: dict[str, list[str]]  # files of each group, such as zero/stage
    settings: set[str]  # paths with dots of all settings and groups, such as zero.stage

    def inside(self, path: str) -> list[str]:
        """Return the names of the settings one level below ``path``; ``""`` is the top level."""
        start = f"{path}." if path else ""
        return sorted({k[len(start) :].partition(".")[0] for k in self.settings if k.startswith(start)})

    def named(self, last: str) -> str | None:
        """Return the path of the group whose last name is ``last``. Without such a group, return the path of the
        setting with that name; return None if several settings have the name or none has."""
        same = [k for k in sorted(self.settings) if nearest(last, [k.rpartition(".")[2]], exact=True)]
        groups = [k for k in same if k.replace(".", "/") in self.groups]
        return groups[0] if groups else same[0] if len(same) == 1 else None


def explain(error: Exception, config_name: str, arguments: list[str]) -> str:
    """Return the text of ``error``, which Hydra or OmegaConf raised for an override, and suggest a valid override."""
    conf = _known(config_name)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        conf.groups[error.missing_cfg_file.removesuffix(".yaml").rpartition("/")[0]] = list(error.options)
    if isinstance(error, OverrideParseException) and (joined := _without_spaces(error.override, arguments)):
        return f"{error.override}: expected key=value without spaces. Write {joined}."
    cause = str(error.__cause__ or error)
    said, *more = [line.strip().rstrip(".") for line in str(error).splitlines()]
    given = _refused(f"{error}\n{cause}", arguments, conf)
    if isinstance(error, OverrideParseException):
        said = f"{error.override}: {said}"
    if isinstance(error, OverrideParseException) or said.startswith("Ambiguous value"):
        return ". ".join([said, *more]) + "."
    if key := re.search(r"Key '(\w+)' not in '\w+Config'", str(error)):  # a file of a group that this command lacks
        other = " lightning-zero plan and lightning-zero submit have it." if key[1] == "machine" else ""
        return f"{given}: this command has no group or setting {key[1]}.{other} Drop {given}."
    if said.startswith(NO_NAME):
        said = f"{given}: {said}"
    elif said.startswith("Error merging"):
        said = f"{said}: {cause.splitlines()[0].rstrip('.')}"
    elif said.endswith("config:"):
        said = f"{said} {more[0]}"
    options = re.search(r"expected one of \[(.*?)\]", cause)
    sentences = [f"{said}.", meant(given, conf, options[1].split(", ") if options else [])]
    if said.startswith("Error merging") and "is not a ListConfig" in cause:
        sentences.append(f"Write {given.replace('=', '=[', 1)}].")
    if "not in struct" in cause:  # keys can be added here with +
        sentences += [f"{line}VALUE." if line.endswith("=") else f"{line}." for line in more[:1]]
    return " ".join(filter(None, sentences))


def _without_spaces(given: str, arguments: list[str]) -> str:
    """Return the setting that spaces around ``=`` have split into several arguments, joined again; "" if there are no
    such spaces. ``given``: one of these arguments."""
    first = last = arguments.index(given) if given in arguments else 0
    while first and (arguments[first - 1].endswith("=") or arguments[first].startswith("=")):
        first -= 1
    while last + 1 < len(arguments) and (arguments[last].endswith("=") or arguments[last + 1].startswith("=")):
        last += 1
    return "".join(arguments[first : last + 1]) if last > first else ""


def explain_flag(arguments: list[str], config_name: str) -> str:
    """Return a sentence that suggests an override for a flag such as ``--max_steps 5``; "" if no setting is similar."""
    conf = _known(config_name)
    said = (meant(a.lstrip("-"), conf) for a in arguments if a.startswith("--"))
    return next((f"a setting is written key=value, without dashes. {s}" for s in said if s.startswith("Did")), "")


def _refused(text: str, arguments: list[str], conf: _Conf) -> str:
    """Return the command-line argument that the error ``text`` is about; if none matches, the key in ``text``, or
    ""."""
    for argument in arguments:
        key, _, value = argument.lstrip("+~").partition("=")
        key = key.partition("@")[0]
        no_name = re.fullmatch(r"[\d.]*|null|true|false", value) and key in conf.groups
        if (NO_NAME in text and no_name) or re.search(rf"[' ]{re.escape(key)}([='/]|\.\s)", text):
            return argument
    match = re.search(r"full_key: (\S+)", text)
    return match[1] if match else ""


def meant(given: str, conf: _Conf, options: list[str] | None = None) -> str:
    """Return a sentence that suggests the valid override nearest to ``given``, or lists valid ones; "" if none is
    known."""
    key, equals, value = given.lstrip("+~").partition("=")
    path, parts = "", re.split(r"[./]", key.partition("@")[0])
    for part in parts:
        beside = conf.inside(path)
        if part not in beside and part in conf.groups.get(path, ()):  # choosing this file adds the setting
            return f"Did you mean {path}={part} {given}?"
        if part not in beside and (elsewhere := conf.named(parts[-1])):
            path = elsewhere
            break
        close = part if part in beside else nearest(part, beside)
        if close is None:
            return f"There are {', '.join(beside)}{f' in {path}' if path else ''}." if beside else ""
        path = f"{path}.{close}" if path else close
    group = path.replace(".", "/")
    options = conf.groups.get(group, options or [])
    there = ""
    if options and equals and value not in options:
        if group in conf.groups and not nearest(value, options, exact=True):
            there = f"There are {', '.join(f'{group}={o}' for o in options)}."
        value = nearest(value, options) or ""
        if not value:
            return there
    elif group not in conf.groups and (below := conf.inside(path)):
        for inner, files in conf.groups.items():
            if inner.startswith(f"{group}/") and (choice := nearest(value, files, exact=True)):
                return f"Did you mean {inner}={choice}?"
        return f"There are {', '.join(below)} in {path}."
    right = f"{'~' * given.startswith('~')}{group if group in conf.groups else path}{equals}{value}"
    return f"Did you mean {right}? {there}".rstrip() if right != given else ""


def _known(config_name: str) -> _Conf:
    GlobalHydra.instance().clear()
    with initialize_config_module("lightning_zero.conf.app", version_base="1.3"):
        cfg = compose(config_name, return_hydra_config=True)
        options = GlobalHydra.instance().config_loader().get_group_options
        groups = {group: options(group) for group in cfg.hydra.runtime.choices if not group.startswith("hydra/")}
    GlobalHydra.instance().clear()
    settings = {group.replace("/", ".") for group in groups}

    def walk(value: Any, path: str) -> None:
        for key, inner in value.items():
            settings.add(f"{path}{key}")
            if isinstance(inner, dict):
                walk(inner, f"{path}{key}.")

    found = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(found, dict)
    walk({key: inner for key, inner in found.items() if key != "hydra"}, "")
    return _Conf(groups, settings)


# -- what the user has set --------------------------------------------------------------------------------------------

PARTS = ("model", "data")  # the groups whose _target_ may be a user's class
OURS = re.compile(r"lightning_zero\.conf|hydra\.conf|lightning_zero://")


def explicit_keys() -> set[str]:
    """Return the keys, such as ``zero/stage``, that the command line or the user's own configuration files set."""
    return _keys_of_command_line() | set(_values_of_files())


def _keys_of_command_line() -> set[str]:
    return {re.split(r"[=@]", override.lstrip("+~"))[0] for override in HydraConfig.get().overrides.task}


def _values_of_files() -> dict[str, Any]:
    """Return the settings in files of the defaults list that lie outside of this package, by dotted key. If several
    files set a key, the last file counts, as for Hydra."""
    job = HydraConfig.get()
    places = [place for place in job.runtime.config_sources if place.schema != "structured"]
    sources = [SourcesRegistry.instance().resolve(p.schema)(p.provider, f"{p.schema}://{p.path}") for p in places]
    if not GlobalHydra.instance().is_initialized() or all(OURS.search(source.full_path()) for source in sources):
        return {}
    found: dict[str, Any] = {}
    overrides = [*job.overrides.hydra, *job.overrides.task]
    loader = GlobalHydra.instance().config_loader()
    for entry in loader.compute_defaults_list(job.job.config_name, overrides, RunMode.RUN).defaults:
        path = str(entry.config_path)
        source = next((source for source in sources if source.is_config(path)), None)
        if source is not None and not OURS.search(source.full_path()):
            content = OmegaConf.to_container(source.load_config(path).config, resolve=False)
            found |= _leaves(content, entry.package or "")
    return found


def _leaves(node: Any, path: str) -> dict[str, Any]:
    if not isinstance(node, dict) or not node:
        return {path: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= _leaves(value, f"{path}.{key}" if path else str(key))
    return found


def drop_values_of_ours(cfg: DictConfig) -> None:
    """In each group of ``PARTS`` whose ``_target_`` is not from this package, keep only values that the user has set.

    A value that our files take from another group (``block_size: ${data.block_size}``) counts as the user's if the user
    has set it there.
    """
    for group in PARTS:
        node = OmegaConf.to_container(cfg[group], resolve=False)
        assert isinstance(node, dict)
        if not str(node.get("_target_", "lightning_zero.")).startswith("lightning_zero."):
            cfg[group] = _own(node, group, _keys_of_command_line(), _values_of_files())


def _own(node: dict[Any, Any], path: str, given: Set[str], of_files: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the entries of ``node``, whose key is ``path``, that the user has set or that link to a key which the user
    has set, and the ``_target_`` of a part. ``given``: keys set on the command line. ``of_files``: values that files
    set, by key; they replace values in ``node``, which an experiment of this package may have changed."""
    kept = {}
    for key, value in node.items():
        inner = f"{path}.{key}"
        link = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
        if inner in given or (key == "_target_" and path in PARTS):
            kept[key] = value
        elif inner in of_files:
            kept[key] = of_files[inner]
        elif link is not None and (link[1] in given or link[1] in of_files):
            kept[key] = value
        elif isinstance(value, dict) and (own := _own(value, inner, given, of_files)):
            kept[key] = own
    return kept
