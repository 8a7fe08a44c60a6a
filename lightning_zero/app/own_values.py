"""Tell what the user has set from what our files have, so that a user's class gets no value that was meant for ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

PARTS = ("model", "data")  # the groups whose _target_ may be a user's class
OURS = re.compile(r"lightning_zero\.conf|hydra\.conf|lightning_zero://")


def explicit_keys() -> set[str]:
    """Return the keys that the command line sets, groups such as ``zero/stage`` among them, and the keys of settings in
    the user's own files."""
    return _keys_of_command_line() | set(_values_of_files())


def _keys_of_command_line() -> set[str]:
    return {re.split(r"[=@]", override.lstrip("+~"))[0] for override in HydraConfig.get().overrides.task}


def _values_of_files() -> dict[str, Any]:
    """Return the settings, by their keys with dots, in those files of the defaults list that lie outside of this
    package. Of several files the last counts, as for Hydra."""
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
    """Remove from each of ``PARTS`` whose ``_target_`` is not from this package what the user has not set. In place.

    A value that our files take from another group (``block_size: ${data.block_size}``) counts as the user's if the user
    has set it there.
    """
    for group in PARTS:
        node = OmegaConf.to_container(cfg[group], resolve=False)
        assert isinstance(node, dict)
        if not str(node.get("_target_", "lightning_zero.")).startswith("lightning_zero."):
            cfg[group] = _own(node, group, _keys_of_command_line(), _values_of_files())


def _own(node: dict[Any, Any], path: str, given: Set[str], of_files: Mapping[str, Any]) -> dict[Any, Any]:
    """Return what the user has set of ``node``: by keys of the command line (``given``), or in files, whose values then
    count also where one of our experiments has another value."""
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
