"""Sweeps (``--multirun``): all jobs are planned first, then the launcher that the user chose starts them.

Hydra composes every job of a sweep anew from strings, so a plan reaches its job as ``++key=value`` strings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import filter_overrides
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from nest_megatron.errors import (
    EXIT_BAD_INPUT,
    EXIT_NO_PLAN,
    EXIT_OK,
    BadInputError,
    Factor,
    NestError,
    NothingToPlanError,
)
from nest_megatron.launch import planfile
from nest_megatron.launch.callback_settings import NODE, is_setting, resolved
from nest_megatron.launch.environment import require_environment
from nest_megatron.launch.faults import errors_as_exit, faults_as_errors, leave, say
from nest_megatron.launch.hostfile import write_hostfiles
from nest_megatron.launch.hydra import FOLDER_NAME, write_record
from nest_megatron.launch.overrides import override_strings
from nest_megatron.launch.run import (
    Run,
    hydra_resolvers,
    plan_only,
    print_plan,
    print_verdict,
    published_plan,
    published_verdict,
)
from nest_megatron.specs.plan import Plan

LAUNCHER = "hydra_plugins.nest_megatron.launcher.NestLauncher"
_ENV_SET = "hydra.job.env_set"
_PLAN_VARIABLE = "NEST_PLAN"
_DIRNAME_EXCLUDES = "hydra.job.config.override_dirname.exclude_keys"


def wrap_launcher(config: DictConfig) -> None:
    """Replace ``config.hydra.launcher`` by the planning launcher around it, before Hydra instantiates it."""
    chosen = OmegaConf.to_container(config.hydra.launcher, resolve=False)
    with read_write(config), open_dict(config), read_write(config.hydra), open_dict(config.hydra):
        # Without _recursive_, Hydra would instantiate the chosen launcher too, and not as a plugin.
        config.hydra.launcher = {"_target_": LAUNCHER, "_recursive_": False, "chosen": chosen}


def unwrap_launcher(config: DictConfig) -> None:
    """Put the launcher that the user chose back into ``config.hydra.launcher``."""
    with read_write(config), open_dict(config), read_write(config.hydra), open_dict(config.hydra):
        config.hydra.launcher = config.hydra.launcher.chosen


def prepare_jobs(
    loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]], first_number: int
) -> list[list[str]]:
    """Plan or judge every job, and return its override strings extended by its plan.

    Args:
        loader: composes the configuration of a job, as the launchers do.
        master: the configuration of the sweep.
        jobs: the override strings of each job.
        first_number: number of the first job; a sweeper with batches calls more than once.

    Raises:
        SystemExit: a job has no plan or does not run (nothing was launched), or ``NEST_MODE=plan``.
    """
    with errors_as_exit(Path(FOLDER_NAME).absolute()):
        plans_only = plan_only()
        if os.environ.get(_PLAN_VARIABLE) and not plans_only:
            raise BadInputError(
                "NEST-L11",
                "one plan file cannot serve the jobs of a sweep",
                factors=[Factor(_PLAN_VARIABLE, os.environ[_PLAN_VARIABLE], "environment")],
                nearest=["unset NEST_PLAN: each job of a sweep is planned when the sweep starts"],
            )
        prepared: list[_Job] = []
        failures: dict[str, list[_Failure]] = {}
        for number, texts in enumerate(jobs, first_number):
            name = f"job {number} ({' '.join(filter_overrides(texts))})"
            try:
                prepared.append(_prepare(loader, master, number, name, texts, plans_only))
            except NestError as error:
                failures.setdefault(error.render(), []).append(_Failure(name, error.exit_code))
        if failures:
            _leave(failures, len(jobs))
        if plans_only:
            raise SystemExit(EXIT_OK)
        _say_environments(prepared)
    return [job.overrides for job in prepared]


def begin_job(config: DictConfig) -> None:
    """Check the environment of a sweep's job and write its record, in the process that runs it.

    A single run has neither.

    Raises:
        NestError: CUDA runs in this process with the variables of another job.
        BadInputError: the record cannot be written.
    """
    path = OmegaConf.select(config, f"{_ENV_SET}.{_PLAN_VARIABLE}")
    if path is None:
        return
    plan = Plan.load(Path(path))
    require_environment(plan.env)
    write_record(config, plan, Path(config.hydra.runtime.output_dir) / FOLDER_NAME)


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    overrides: list[str]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Failure:
    name: str
    exit_code: int


def _prepare(
    loader: ConfigLoader,
    master: DictConfig,
    number: int,
    name: str,
    texts: Sequence[str],
    plans_only: bool,
) -> _Job:
    texts = [_long_spelling(text) for text in texts]
    with faults_as_errors(Path(FOLDER_NAME).absolute()):
        config = loader.load_sweep_config(master, texts)
        with read_write(config), open_dict(config), read_write(config.hydra), open_dict(config.hydra):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        given = resolved(config.hydra.callbacks[NODE])
        settings = {str(key): value for key, value in given.items() if not str(key).startswith("_")}
        with hydra_resolvers(config):
            run = Run.of(settings, config)
            try:
                return _answered(run, name, texts, number, plans_only)
            except NestError as error:
                if error.code != NothingToPlanError.CODE or plans_only:
                    raise
                if run.rank in (None, 0):
                    say(f"{name}: {error.render()}", stream=sys.stdout)
                return _Job(name, texts, {})


def _answered(run: Run, name: str, texts: list[str], number: int, plans_only: bool) -> _Job:
    if run.settings.mode == "check":
        _judge(run, name)
    elif plans_only:
        _write_plan(run, name, number)
    else:
        return _planned(run, name, texts)
    return _Job(name, texts, {})


def _judge(run: Run, name: str) -> None:
    """Print the verdict on one job.

    Raises:
        NestError: the job does not run.
    """
    published = published_verdict(run)
    verdict = published.value
    if run.speaks(published.origin):
        say(f"{name}:", stream=sys.stdout)
        print_verdict(verdict)
    if verdict.exit_code != EXIT_OK:
        raise NestError("NEST-L12", verdict.headline)


def _write_plan(run: Run, name: str, number: int) -> None:
    path = (Path(FOLDER_NAME) / str(number) / planfile.PLAN_NAME).absolute()
    published = published_plan(run, path)
    if run.speaks(published.origin):
        say(f"{name}:", stream=sys.stdout)
        print_plan(published.value)
        say(f"plan file {path}", stream=sys.stdout)
        planfile.write_env(published.value, path)
        write_hostfiles(published.value.rank_map, path)


def _planned(run: Run, name: str, texts: list[str]) -> _Job:
    """Return the job with its plan: edits, environment, and folders named as without a plan."""
    published = published_plan(run, run.cached_plan)
    plan = published.value
    if run.speaks(published.origin):
        say(f"{name}: {plan.headline}; plan file {published.path}", stream=sys.stdout)
    # Hydra sets and unsets these around the job, in the process that runs it.
    variables = {
        f"{_ENV_SET}.{key}": value for key, value in {**plan.env, _PLAN_VARIABLE: str(published.path)}.items()
    }
    parser = OverridesParser.create()
    given = {parser.parse_override(text).key_or_group for text in texts}
    excluded = list(OmegaConf.select(run.config, _DIRNAME_EXCLUDES) or ())
    excluded += [key for key in plan.edits if key not in given]
    added = override_strings({**plan.edits, **variables, _DIRNAME_EXCLUDES: excluded})
    return _Job(name, [*texts, *added], plan.env)


def _long_spelling(text: str) -> str:
    """Return a setting ``+nest.key=value`` as ``++hydra.callbacks.nest.key=value``: no task must see it."""
    short = text.lstrip("+")
    return f"++hydra.callbacks.{short}" if is_setting(text) and short.startswith(f"{NODE}.") else text


def _leave(failures: dict[str, list[_Failure]], num_jobs: int) -> None:
    """End the sweep with every reason once, and the jobs it concerns."""
    lines = [f"{'; '.join(job.name for job in jobs)}: {reason}" for reason, jobs in failures.items()]
    codes = {job.exit_code for jobs in failures.values() for job in jobs}
    num_failed = sum(map(len, failures.values()))
    lines.append(f"{num_failed} of {num_jobs} jobs cannot run as asked; nothing was launched")
    leave("\n".join(lines), EXIT_BAD_INPUT if EXIT_BAD_INPUT in codes else EXIT_NO_PLAN)


def _say_environments(jobs: Sequence[_Job]) -> None:
    """Say which variables differ between jobs: CUDA reads them once per process."""
    names = sorted({name for job in jobs for name in job.env})
    different = [name for name in names if len({job.env.get(name) for job in jobs}) > 1]
    if different:
        say(
            f"the jobs differ in {', '.join(different)}, which CUDA reads once per process: a launcher that "
            "runs them in one process (basic, joblib) ends before the second job that uses CUDA; "
            "hydra/launcher=submitit_local gives each job its own",
            stream=sys.stderr,
        )
