"""Puts the config group ``nest`` on Hydra's search path, so that ``+nest=auto`` composes in any app."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

PROVIDER = "nest-megatron"
PATH = "pkg://nest_megatron.conf.hydra"


class NestSearchPathPlugin(SearchPathPlugin):
    """Appends the shipped group last: an app's own configs keep precedence."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append ``pkg://nest_megatron.conf.hydra``."""
        search_path.append(PROVIDER, PATH)
