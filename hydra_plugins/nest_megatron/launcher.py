"""The launcher that plans each job of a sweep, then hands the jobs to the launcher that the user chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class NestLauncher(Launcher):
    """Never chosen by a user: the callback puts it around ``hydra/launcher`` when a sweep starts."""

    def __init__(self, chosen: Any) -> None:
        """Take the node of the wrapped launcher; ``setup`` instantiates it as Hydra would."""
        self._context: HydraContext
        self._config: DictConfig
        self._launcher: Launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Set the wrapped launcher up."""
        from hydra.core.plugins import Plugins

        from nest_megatron.launch.sweep import unwrap_launcher

        unwrap_launcher(config)
        self._context, self._config = hydra_context, config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Plan every job, then launch them all."""
        from nest_megatron.launch.sweep import prepare_jobs

        jobs = prepare_jobs(self._context.config_loader, self._config, job_overrides, initial_job_idx)
        return self._launcher.launch(jobs, initial_job_idx)
