"""Lets any Hydra app compose the group ``zero`` of lightning_zero, because the package is installed.

Hydra imports this file at the start of every app of the environment: nothing here may import torch, and no other name
than ``zero`` may become visible to an app that has not asked for it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.utils import JobReturn
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from lightning_zero.settings import ConfigError, ZeroConfig
from lightning_zero.settings.names import CONF

ConfigStore.instance().store(group="zero", name="schema", node=ZeroConfig, provider="lightning_zero")


class ZeroGroup(ConfigSource):
    """Shows the folder ``conf/zero`` as the group ``zero``, and nothing else of ``conf``."""

    @staticmethod
    def scheme() -> str:
        return "lightning_zero"

    def available(self) -> bool:
        return True

    def _place(self, config_path: str) -> Path | None:
        """Return the file or folder of ``config_path``; None outside of ``zero``. Raise ConfigError if the package was
        installed without its groups: Hydra would take ``+zero/stage=zero2`` for a new key."""
        path = config_path.strip("/")
        if path.split("/")[0] != "zero":
            return None
        if not (CONF / "zero").is_dir():
            raise ConfigError(
                f"{path}: expected the groups of lightning_zero in {CONF}, got no folder there. Install lightning_zero "
                "again."
            )
        return CONF / path

    def is_group(self, config_path: str) -> bool:
        place = self._place(config_path)
        return config_path == "" if place is None else place.is_dir()

    def is_config(self, config_path: str) -> bool:
        place = self._place(self._normalize_file_name(config_path))
        return place is not None and place.is_file()

    def load_config(self, config_path: str) -> ConfigResult:
        file = CONF / self._normalize_file_name(config_path)
        text = file.read_text()
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(text), self._get_header_dict(text))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        place = self._place(config_path)
        names = ["zero"] if place is None else [each.name for each in place.iterdir() if not each.name.startswith("_")]
        found: list[str] = []
        for name in names:
            self._list_add_result(found, f"{config_path}/{name}".strip("/"), name, results_filter)
        return sorted(set(found))


class ZeroSearchPath(SearchPathPlugin):
    """Adds the group ``zero`` after the app's own groups, which win where names are equal."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="lightning_zero", path="lightning_zero://conf")


class ProcessLauncher(Launcher):
    """``hydra/launcher=processes`` of our main job: each job of a sweep is run by a command of its own."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.loader = config, hydra_context.config_loader

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from lightning_zero.app.sweep import run_jobs

        config: Any = self.config
        return run_jobs(config, self.loader, job_overrides, initial_job_idx)
