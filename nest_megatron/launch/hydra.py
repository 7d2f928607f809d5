"""Hydra interception: plans in ``on_run_start``, the last moment when an edit reaches the task."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypedDict

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from rich.console import Console

from nest_megatron.errors import EXIT_BAD_INPUT, EXIT_OK, BadInputError, Factor
from nest_megatron.launch import planfile
from nest_megatron.launch.callback_settings import CallbackSettings, is_setting, take_settings
from nest_megatron.launch.environment import apply_environment
from nest_megatron.launch.faults import errors_as_exit, leave, say
from nest_megatron.launch.fingerprint import Fingerprint, fingerprint_of
from nest_megatron.launch.overrides import override_strings
from nest_megatron.launch.processes import process_rank
from nest_megatron.launch.publish import Origin, Published, publish_once, write_atomically
from nest_megatron.specs import codec
from nest_megatron.specs.plan import Plan
from nest_megatron.specs.settings import PlanSettings

#: Folder of the record inside Hydra's run directory, and of NEST_MODE=plan in the working directory.
FOLDER_NAME = "nest_plan"
_VERDICT_NAME = "check.json"
_LOG_COLUMNS = 120


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
    """Plans (``mode: auto``) or judges (``mode: check``) a run before its task starts.

    Every failure ends the process: exit 1 without a plan, 2 for bad input.
    """

    def __init__(self, **settings: Any) -> None:
        """Keep the settings of ``hydra.callbacks.nest``; they are checked when the run starts."""
        self._given = settings

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Rewrite ``config`` in place, or end the process before the task runs.

        Raises:
            SystemExit: planning failed, the checked layout does not run, or ``NEST_MODE=plan``.
        """
        with errors_as_exit(Path(FOLDER_NAME).absolute()), _hydra_resolvers(config):
            run = _Run.of(self._given, config)
            if run.settings.mode == "check":
                _check(run)
            elif _plan_only():
                _write_plan(run)
            else:
                _plan(run)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse sweeps: Hydra composes each job anew, so edits made here would be lost silently.

        Raises:
            SystemExit: always.
        """
        leave("sweeps (--multirun) are not planned yet; run each job alone, or drop +nest", EXIT_BAD_INPUT)


class _Question(TypedDict):
    overrides: list[str]
    settings: PlanSettings
    source: str


@dataclass(frozen=True, slots=True)
class _Run:
    """One start of the app: its configuration, and what the planner may know about it."""

    config: DictConfig
    task: DictConfig
    overrides: list[str]
    settings: CallbackSettings
    fingerprint: Fingerprint
    rank: int | None

    @classmethod
    def of(cls, given: dict[str, Any], config: DictConfig) -> _Run:
        settings = take_settings(given, config)
        overrides = [text for text in config.hydra.overrides.task if not is_setting(text)]
        task = copy.deepcopy(config)
        with read_write(task), open_dict(task):
            del task["hydra"]
        fingerprint = fingerprint_of(
            task, overrides=overrides, settings=settings.planner(), mode=settings.mode
        )
        return cls(config, task, overrides, settings, fingerprint, process_rank())

    @property
    def question(self) -> _Question:
        """The arguments that planning and checking share."""
        source = str(OmegaConf.select(self.config, "hydra.job.config_name") or "")
        return {"overrides": self.overrides, "settings": self.settings.planner(), "source": source}

    def speaks(self, origin: Origin) -> bool:
        """Whether this process prints: rank 0, or without ranks the one that did not wait for another."""
        return self.rank == 0 or (self.rank is None and origin != "awaited")


def _plan(run: _Run) -> None:
    """Get the plan, apply it, and leave the record that NeMo's runner would not."""
    given = os.environ.get("NEST_PLAN")
    if given:
        path = Path(given).absolute()
        published = Published(planfile.read_given(path, run.fingerprint), path, "reused")
    else:
        published = _published(run, planfile.cache_folder(run.fingerprint) / planfile.PLAN_NAME)
    plan, speaks = published.value, run.speaks(published.origin)
    if speaks and given:
        say(plan.headline, stream=sys.stdout)
    elif speaks:
        _print_report(plan)
    replaced = apply_environment(plan.env)
    apply_plan(run.config, plan)
    _record_overrides(run.config, plan)
    os.environ["NEST_PLAN"] = str(published.path)
    if speaks:
        for name, value in replaced.items():
            say(f"{name}={plan.env[name]} replaces {value} (environment)", stream=sys.stderr)
        say(f"plan file {published.path}", stream=sys.stdout)
        say(f"record {_write_record(run.config, plan)}", stream=sys.stdout)


def _write_plan(run: _Run) -> None:
    """Plan, write plan.json and env.sh, and end: the step before srun or torchrun."""
    path = Path(os.environ.get("NEST_PLAN") or Path(FOLDER_NAME) / planfile.PLAN_NAME).absolute()
    published = _published(run, path)
    if run.speaks(published.origin):
        _print_report(published.value)
        say(f"plan file {path}", stream=sys.stdout)
        say(f"environment {planfile.write_env(published.value, path)}", stream=sys.stdout)
    raise SystemExit(EXIT_OK)


def _published(run: _Run, path: Path) -> Published[Plan]:
    def make() -> Plan:
        # Imported here: ranks that only read a plan need neither the solver nor numpy.
        from nest_megatron.pipeline import plan_config

        start = time.monotonic()
        plan = plan_config(run.task, **run.question)
        _say_planned("planned", start)
        return plan

    return planfile.plan_once(
        path, make, fingerprint=run.fingerprint, rank=run.rank, timeout_s=run.settings.timeout_s
    )


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What ``+nest=check`` publishes for the other ranks."""

    exit_code: int
    report: str

    def to_json(self) -> str:
        return json.dumps(codec.to_plain(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> _Verdict:
        return codec.from_plain(cls, codec.parse_json(text, source=_VERDICT_NAME), source=_VERDICT_NAME)


def _check(run: _Run) -> None:
    """Print the verdict; return only when the task may run with its configuration unchanged."""
    path = planfile.cache_folder(run.fingerprint) / _VERDICT_NAME

    def make() -> _Verdict:
        from nest_megatron.pipeline import check_config
        from nest_megatron.report.text import render_check

        start = time.monotonic()
        check = check_config(run.task, **run.question)
        report = io.StringIO()
        render_check(check, console=_console(report))
        _say_planned("checked", start)
        return _Verdict(check.exit_code, report.getvalue())

    published = publish_once(
        path,
        make,
        parse=_Verdict.from_json,
        render=_Verdict.to_json,
        rank=run.rank,
        timeout_s=run.settings.timeout_s,
    )
    verdict = published.value
    if run.speaks(published.origin):
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(verdict.report.encode(encoding, "backslashreplace").decode(encoding))
    if verdict.exit_code != EXIT_OK:
        leave(verdict.report.partition("\n")[0], verdict.exit_code)
    if _plan_only():
        raise SystemExit(EXIT_OK)


def _plan_only() -> bool:
    mode = os.environ.get("NEST_MODE", "")
    if mode not in ("", "plan"):
        factor = Factor("NEST_MODE", mode, "environment")
        raise BadInputError("NEST-L09", "NEST_MODE has an unknown value", factors=[factor], nearest=["plan"])
    return mode == "plan"


def _record_overrides(config: DictConfig, plan: Plan) -> None:
    """Append the edits to the recorded command line; keep ``hydra.job.env_set`` from undoing the plan's."""
    with read_write(config), open_dict(config), read_write(config.hydra), open_dict(config.hydra):
        config.hydra.overrides.task.extend(override_strings(plan.edits))
        env_set = config.hydra.job.env_set
        for name in set(plan.env) & set(env_set):
            env_set[name] = plan.env[name]


def _write_record(config: DictConfig, plan: Plan) -> Path:
    """Write plan and overrides into the run directory: NeMo's runner turns Hydra's own record off."""
    folder = Path(str(OmegaConf.select(config, "hydra.run.dir"))).absolute() / FOLDER_NAME
    write_atomically(folder / planfile.PLAN_NAME, plan.to_json())
    write_atomically(folder / "overrides.yaml", OmegaConf.to_yaml(config.hydra.overrides.task))
    return folder


@contextlib.contextmanager
def _hydra_resolvers(config: DictConfig) -> Iterator[None]:
    """Let ``${hydra:...}`` resolve: Hydra itself sets this singleton only after ``on_run_start``."""
    singleton = HydraConfig.instance()
    previous = singleton.cfg
    singleton.set_config(config)
    try:
        yield
    finally:
        singleton.cfg = previous


def _print_report(plan: Plan) -> None:
    from nest_megatron.report.text import render_plan

    render_plan(planfile.unsealed(plan), console=_console(sys.stdout))


def _console(file: TextIO) -> Console:
    """A log has no width of its own; 80 columns would fold the tables."""
    return Console(file=file) if file.isatty() else Console(file=file, width=_LOG_COLUMNS)


def _say_planned(verb: str, start: float) -> None:
    where = f"process {os.getpid()} on {socket.gethostname()}"
    say(f"{verb} by {where} in {time.monotonic() - start:.2f} s", stream=sys.stderr)
