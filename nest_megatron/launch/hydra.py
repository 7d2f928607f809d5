"""Hydra interception: plans in ``on_run_start``, the last moment when an edit reaches the task."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from nest_megatron.errors import EXIT_OK, NestError, NothingToPlanError
from nest_megatron.launch import planfile
from nest_megatron.launch.environment import apply_environment
from nest_megatron.launch.faults import errors_as_exit, leave, say
from nest_megatron.launch.hostfile import write_hostfiles
from nest_megatron.launch.overrides import override_strings
from nest_megatron.launch.publish import Published, write_atomically
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

#: Folder of the record inside Hydra's run directory, and of NEST_MODE=plan in the working directory.
FOLDER_NAME = "nest_plan"


def apply_plan(config: DictConfig, plan: Plan) -> None:
    """Write the plan's edits into ``config`` in place; for users of the compose API, where no callback runs.

    Struct and read-only flags stay as they were; keys that are absent are added.

    Raises:
        omegaconf.errors.ValidationError: a schema forbids a value.
    """
    with read_write(config), open_dict(config):
        for key, value in plan.edits.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)


class NestCallback(Callback):
    """Plans (``mode: auto``) or judges (``mode: check``) a run or each job of a sweep before its task starts.

    Every failure ends the process: exit 1 without a plan, 2 for bad input.
    """

    def __init__(self, **settings: Any) -> None:
        """Keep the settings of ``hydra.callbacks.nest``; they are checked when the run starts."""
        self._given = settings

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Rewrite ``config`` in place, or end the process before the task runs.

        A configuration that asks for no training is said and left unchanged.

        Raises:
            SystemExit: planning failed, the checked layout does not run, or ``NEST_MODE=plan``.
        """
        with errors_as_exit(Path(FOLDER_NAME).absolute()), hydra_resolvers(config):
            run = Run.of(self._given, config)
            try:
                _act(run)
            except NestError as error:
                # By its code: in the other processes of a job it is a published failure.
                if error.code != NothingToPlanError.CODE or plan_only():
                    raise
                if run.rank in (None, 0):
                    say(error.render(), stream=sys.stdout)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Put a launcher that plans in front of the one the user chose.

        Hydra composes each job of a sweep anew, so edits of ``config`` itself would be lost.
        """
        from nest_megatron.launch.sweep import wrap_launcher

        with errors_as_exit(Path(FOLDER_NAME).absolute()):
            wrap_launcher(config)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Leave the record of a sweep's job in its own folder; nothing to do in a single run.

        Raises:
            SystemExit: CUDA runs in this process with the variables of another job.
        """
        from nest_megatron.launch.sweep import begin_job

        with errors_as_exit(Path(FOLDER_NAME).absolute()):
            begin_job(config)


def _act(run: Run) -> None:
    if run.settings.mode == "check":
        _check(run)
    elif plan_only():
        _write_plan(run)
    else:
        _plan(run)


def _plan(run: Run) -> None:
    """Get the plan, apply it, and leave the record that NeMo's runner would not."""
    given = os.environ.get("NEST_PLAN")
    if given:
        path = Path(given).absolute()
        published = Published(planfile.read_given(path, run.fingerprint), path, "reused")
    else:
        published = published_plan(run, run.cached_plan)
    plan, speaks = published.value, run.speaks(published.origin)
    if speaks and given:
        say(plan.headline, stream=sys.stdout)
    elif speaks:
        print_plan(plan)
    replaced = apply_environment(plan.env)
    apply_plan(run.config, plan)
    _record_overrides(run.config, plan)
    os.environ["NEST_PLAN"] = str(published.path)
    if speaks:
        for name, value in replaced.items():
            say(f"{name}={plan.env[name]} replaces {value} (environment)", stream=sys.stderr)
        say(f"plan file {published.path}", stream=sys.stdout)
        folder = Path(str(OmegaConf.select(run.config, "hydra.run.dir"))).absolute() / FOLDER_NAME
        write_record(run.config, plan, folder)
        say(f"record {folder}", stream=sys.stdout)


def _write_plan(run: Run) -> None:
    """Plan, write plan.json and env.sh, and end: the step before srun or torchrun."""
    path = Path(os.environ.get("NEST_PLAN") or Path(FOLDER_NAME) / planfile.PLAN_NAME).absolute()
    published = published_plan(run, path)
    if run.speaks(published.origin):
        print_plan(published.value)
        say(f"plan file {path}", stream=sys.stdout)
        say(f"environment {planfile.write_env(published.value, path)}", stream=sys.stdout)
        for hostfile in write_hostfiles(published.value.rank_map, path):
            say(f"host file {hostfile}", stream=sys.stdout)
    raise SystemExit(EXIT_OK)


def _check(run: Run) -> None:
    """Print the verdict; return only when the task may run with its configuration unchanged."""
    published = published_verdict(run)
    verdict = published.value
    if run.speaks(published.origin):
        print_verdict(verdict)
    if verdict.exit_code != EXIT_OK:
        leave(verdict.headline, verdict.exit_code)
    if plan_only():
        raise SystemExit(EXIT_OK)


def _record_overrides(config: DictConfig, plan: Plan) -> None:
    """Append the edits to the recorded command line; keep ``hydra.job.env_set`` from undoing the plan's."""
    with read_write(config), open_dict(config), read_write(config.hydra), open_dict(config.hydra):
        config.hydra.overrides.task.extend(override_strings(plan.edits))
        env_set = config.hydra.job.env_set
        for name in set(plan.env) & set(env_set):
            env_set[name] = plan.env[name]


def write_record(config: DictConfig, plan: Plan, folder: Path) -> None:
    """Write plan and overrides into ``folder``: NeMo's runner turns Hydra's own record off.

    Raises:
        BadInputError: the folder cannot be written.
    """
    write_atomically(folder / planfile.PLAN_NAME, plan.to_json())
    write_atomically(folder / "overrides.yaml", OmegaConf.to_yaml(config.hydra.overrides.task))
