"""Lets any Hydra app compose the groups of lightning_zero, by having it installed.

Hydra imports this at the start of every app: nothing here may import torch.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_zero.app.schema import register_schema

register_schema()


class LightningZeroSearchPath(SearchPathPlugin):
    """Adds the groups after the app's own, which therefore win where names are equal."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="lightning_zero", path="pkg://lightning_zero.conf")
