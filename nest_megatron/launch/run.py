"""One start of a Hydra app: its question to the planner, and the one published answer."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypedDict

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from rich.console import Console

from nest_megatron.errors import BadInputError, Factor
from nest_megatron.launch import planfile
from nest_megatron.launch.callback_settings import (
    CallbackSettings,
    is_setting,
    take_settings,
    task_overrides,
)
from nest_megatron.launch.faults import say
from nest_megatron.launch.fingerprint import Fingerprint, fingerprint_of
from nest_megatron.launch.processes import process_rank
from nest_megatron.launch.publish import Origin, Published, publish_once
from nest_megatron.specs import codec
from nest_megatron.specs.plan import Plan
from nest_megatron.specs.settings import PlanSettings

_VERDICT_NAME = "check.json"
_LOG_COLUMNS = 120


class _Question(TypedDict):
    overrides: list[str]
    settings: PlanSettings
    source: str


@dataclass(frozen=True, slots=True)
class Run:
    """One start of the app, or one job of a sweep: its configuration, and what the planner may know."""

    config: DictConfig
    task: DictConfig
    overrides: list[str]
    settings: CallbackSettings
    fingerprint: Fingerprint
    rank: int | None

    @classmethod
    def of(cls, given: Mapping[str, Any], config: DictConfig) -> Run:
        """Read the settings and take them out of ``config``.

        Args:
            given: the entries of ``hydra.callbacks.nest``, without ``_target_``.
            config: the whole composed configuration, with its ``hydra`` node; loses its node ``nest``.

        Raises:
            BadInputError: settings that do not exist, or a rank that is no number.
        """
        settings = take_settings(given, config)
        overrides = [text for text in task_overrides(config) if not is_setting(text)]
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

    @property
    def cached_plan(self) -> Path:
        """Where the plan lies that all processes of this job read."""
        return planfile.cache_folder(self.fingerprint) / planfile.PLAN_NAME

    def speaks(self, origin: Origin) -> bool:
        """Whether this process prints: rank 0, or without ranks the one that did not wait for another."""
        return self.rank == 0 or (self.rank is None and origin != "awaited")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ``+nest=check`` publishes for the other ranks."""

    exit_code: int
    report: str

    @property
    def headline(self) -> str:
        """The first line of the report."""
        return self.report.partition("\n")[0]

    def to_json(self) -> str:
        """Return the record as a JSON document."""
        return json.dumps(codec.to_plain(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Read a record.

        Raises:
            BadInputError: not a verdict.
        """
        return codec.from_plain(cls, codec.parse_json(text, source=_VERDICT_NAME), source=_VERDICT_NAME)


def published_plan(run: Run, path: Path) -> Published[Plan]:
    """Return the sealed plan at ``path``; one process of the job makes it.

    Raises:
        NestError: there is no plan, here or in the process that tried to make it.
    """

    def make() -> Plan:
        # Imported here: ranks that only read a plan need neither the solver nor numpy.
        from nest_megatron.pipeline import plan_config

        start = time.monotonic()
        plan = plan_config(run.task, **run.question)
        _say_done("planned", start)
        return plan

    return planfile.plan_once(
        path, make, fingerprint=run.fingerprint, rank=run.rank, timeout_s=run.settings.timeout_s
    )


def published_verdict(run: Run) -> Published[Verdict]:
    """Return the verdict on the run's own layout; one process of the job makes it.

    Raises:
        NestError: there is no verdict, here or in the process that tried to make it.
    """

    def make() -> Verdict:
        from nest_megatron.pipeline import check_config
        from nest_megatron.report.text import render_check

        start = time.monotonic()
        check = check_config(run.task, **run.question)
        report = io.StringIO()
        render_check(check, console=console_on(report))
        _say_done("checked", start)
        return Verdict(check.exit_code, report.getvalue())

    return publish_once(
        planfile.cache_folder(run.fingerprint) / _VERDICT_NAME,
        make,
        parse=Verdict.from_json,
        render=Verdict.to_json,
        rank=run.rank,
        timeout_s=run.settings.timeout_s,
    )


def print_plan(plan: Plan) -> None:
    """Print the report of a sealed plan."""
    from nest_megatron.report.text import render_plan

    render_plan(planfile.unsealed(plan), console=console_on(sys.stdout))


def print_verdict(verdict: Verdict) -> None:
    """Print a report that another process may have made for another encoding."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(verdict.report.encode(encoding, "backslashreplace").decode(encoding))


def plan_only() -> bool:
    """Return whether ``NEST_MODE=plan`` asks for a plan without the task.

    Raises:
        BadInputError: another value.
    """
    mode = os.environ.get("NEST_MODE", "")
    if mode not in ("", "plan"):
        factor = Factor("NEST_MODE", mode, "environment")
        raise BadInputError("NEST-L09", "NEST_MODE has an unknown value", factors=[factor], nearest=["plan"])
    return mode == "plan"


@contextlib.contextmanager
def hydra_resolvers(config: DictConfig) -> Iterator[None]:
    """Let ``${hydra:...}`` resolve: Hydra itself sets this singleton only when a job starts."""
    singleton = HydraConfig.instance()
    previous = singleton.cfg
    singleton.set_config(config)
    try:
        yield
    finally:
        singleton.cfg = previous


def console_on(file: TextIO) -> Console:
    """Return a console; a log has no width of its own, and 80 columns would fold the tables."""
    return Console(file=file) if file.isatty() else Console(file=file, width=_LOG_COLUMNS)


def _say_done(verb: str, start: float) -> None:
    where = f"process {os.getpid()} on {socket.gethostname()}"
    say(f"{verb} by {where} in {time.monotonic() - start:.2f} s", stream=sys.stderr)
