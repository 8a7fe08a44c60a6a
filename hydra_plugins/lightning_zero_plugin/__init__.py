"""Lets any Hydra app compose the groups of lightning_zero, by having it installed.

Hydra imports this at the start of every app: nothing here may import torch.
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lightning_zero.app.schema import register_schema

register_schema()


class LightningZeroSearchPath(SearchPathPlugin):
    """Adds the groups after the app's own, which therefore win where names are equal."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="lightning_zero", path="pkg://lightning_zero.conf")


class ProcessLauncher(Launcher):
    """``hydra/launcher=processes``, for our main job: each job of a sweep by a command of its own."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.loader = config, hydra_context.config_loader

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from lightning_zero.app.sweep import run_jobs

        config: Any = self.config
        return run_jobs(config, self.loader, job_overrides, initial_job_idx)
