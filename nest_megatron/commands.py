"""What each command of ``nest-megatron`` does with its arguments; every function returns an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nest_megatron.errors import EXIT_OK, BadInputError
from nest_megatron.output import STDOUT, failure_record, report, show, write

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nest_megatron.pipeline import Check
    from nest_megatron.planner.explain import Explanation
    from nest_megatron.specs.plan import Plan
    from nest_megatron.specs.settings import PlanSettings

#: Type that an axis option demands -> how its value looks.
_FORMS: dict[type, str] = {bool: "true or false", object: "one value, or [a,b]"}


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan, write what was asked for, print the report."""
    # Bad input is answered before the solver loads.
    config, loading, settings = _inputs(arguments)

    import dataclasses
    from pathlib import Path

    from omegaconf import OmegaConf

    from nest_megatron.launch.hostfile import write_hostfiles
    from nest_megatron.launch.hydra import apply_plan
    from nest_megatron.pipeline import plan_config
    from nest_megatron.report.text import render_plan

    plan = plan_config(config, overrides=arguments.overrides, settings=settings, source=arguments.config)
    plan = dataclasses.replace(plan, assumptions=(*loading, *plan.assumptions))
    if arguments.write_config is not None:
        apply_plan(config, plan)
        write(arguments.write_config, OmegaConf.to_yaml(config))
    if arguments.json is not None:
        write(arguments.json, plan.to_json())
        if arguments.json != STDOUT:
            write_hostfiles(plan.rank_map, Path(arguments.json))
    report(lambda console: render_plan(plan, console=console), arguments)
    return EXIT_OK


def run_replan(arguments: argparse.Namespace) -> int:
    """Plan again after a change, write what was asked for, print the report."""
    from pathlib import Path

    from nest_megatron.cluster.changes import read_changes
    from nest_megatron.dialects.files import load_config
    from nest_megatron.dialects.overrides import apply_overrides
    from nest_megatron.launch.hostfile import write_hostfiles
    from nest_megatron.launch.planfile import read_plan
    from nest_megatron.pipeline import replan_config
    from nest_megatron.planner.headline import MINIMUM_GAIN
    from nest_megatron.planner.request import request_of
    from nest_megatron.report.replan import render_replan

    changes = read_changes(arguments.changed)
    old = read_plan(Path(arguments.plan))
    request = request_of(old, source=arguments.plan)
    source = arguments.config or _config_of(old, arguments.plan)
    config, _ = load_config(source)
    replan = replan_config(
        apply_overrides(config, list(request.overrides)),
        old,
        changes,
        request=request,
        source=source,
        minimum_gain=MINIMUM_GAIN if arguments.min_gain is None else arguments.min_gain,
        keep_layout=arguments.keep_layout,
    )
    if arguments.json is not None:
        write(arguments.json, replan.plan.to_json())
        if arguments.json != STDOUT:
            write_hostfiles(replan.plan.rank_map, Path(arguments.json))
    report(lambda console: render_replan(replan, console=console), arguments)
    return EXIT_OK


def _config_of(plan: Plan, source: str) -> str:
    """Return the configuration file that a plan was made from.

    Raises:
        BadInputError: it is not there, or the plan was made inside an application.
    """
    from pathlib import Path

    from nest_megatron.errors import Factor

    name = str(plan.provenance.get("source") or "")
    if not name or not Path(name).is_file():
        raise BadInputError(
            "NEST-R04",
            "the configuration of the plan is not where the plan says",
            factors=[Factor("source", name or "none", source)],
            nearest=["--config FILE: the configuration that the plan was made from"],
        )
    return name


def run_check(arguments: argparse.Namespace) -> int:
    """Judge the user's own layout, write what was asked for, print the report."""
    config, loading, settings = _inputs(arguments)

    from nest_megatron.pipeline import check_config
    from nest_megatron.report.text import render_check

    check = check_config(config, overrides=arguments.overrides, settings=settings, source=arguments.config)
    if arguments.json is not None:
        write(arguments.json, _check_json(check, loading))
    report(lambda console: render_check(check, console=console, assumptions=loading), arguments)
    return check.exit_code


def run_explain(arguments: argparse.Namespace) -> int:
    """Answer one question about a layout, write what was asked for, print the report."""
    why = _assignments("--why", arguments.why)
    config, loading, settings = _inputs(arguments)

    from nest_megatron.pipeline import explain_config
    from nest_megatron.report.explain import render_explanation

    explanation = explain_config(
        config,
        why=why,
        base=arguments.base,
        overrides=arguments.overrides,
        settings=settings,
        source=arguments.config,
    )
    if arguments.json is not None:
        write(arguments.json, _explanation_json(explanation, loading))
    report(lambda console: render_explanation(explanation, console=console, assumptions=loading), arguments)
    return EXIT_OK


def _explanation_json(explanation: Explanation, loading: Sequence[str]) -> str:
    import json

    from nest_megatron.specs import codec
    from nest_megatron.specs.plan import SCHEMA

    record = {"schema": SCHEMA, **codec.to_plain(explanation)}
    record["assumptions"] = [*loading, *explanation.assumptions]
    return json.dumps(record, indent=2) + "\n"


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Store what ``arguments.run_records`` teach."""
    from pathlib import Path

    paths = [Path(name) for name in arguments.run_records]
    if arguments.what == "step":
        from nest_megatron.calibration.step import calibrate_step

        show(calibrate_step(paths).render())
        return EXIT_OK

    from nest_megatron.calibration.memory import calibrate_memory
    from nest_megatron.errors import Factor

    if len(paths) > 1:
        factors = [Factor("RUN.json", str(path), "command line") for path in paths]
        raise BadInputError("NEST-K04", "calibrate memory takes one run", factors=factors)
    show(calibrate_memory(paths[0]).render())
    return EXIT_OK


def run_validate(arguments: argparse.Namespace) -> int:
    """Print the error tables of ``arguments.records``."""
    from nest_megatron.validation import command

    show(command.run(arguments, write=write))
    return EXIT_OK


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine this environment, print the findings, or with ``--quiet`` only what fails."""
    from nest_megatron.launch.doctor import examine
    from nest_megatron.report.doctor import render_examination, verdict

    examination = examine()
    if arguments.json is not None:
        import json

        from nest_megatron.specs import codec

        record = {"exit_code": examination.exit_code, **codec.to_plain(examination)}
        write(arguments.json, json.dumps(record, indent=2) + "\n")
    if not arguments.quiet:
        report(lambda console: render_examination(examination, console=console), arguments)
    elif examination.failed:
        from nest_megatron.report.page import escaped

        for finding in examination.failed:
            print(f"{finding.subject}: {escaped(finding.detail)}", file=sys.stderr)
        print(escaped(verdict(examination)), file=sys.stderr)
    return examination.exit_code


def _inputs(arguments: argparse.Namespace) -> tuple[DictConfig, tuple[str, ...], PlanSettings]:
    from nest_megatron.dialects.files import load_config
    from nest_megatron.dialects.overrides import apply_overrides
    from nest_megatron.specs.settings import PlanSettings

    config, loading = load_config(arguments.config)
    settings = PlanSettings(
        cluster=arguments.cluster,
        dialect=arguments.dialect,
        framework_version=arguments.framework_version,
        pin=_axes("--pin", arguments.pin),
        free=_axes("--free", arguments.free, only=bool),
        force=arguments.force,
        reserved_gib=arguments.reserved_gib,
        num_gpus=arguments.gpus,
        nodelist=arguments.nodelist,
        topology=arguments.topology,
        robust=getattr(arguments, "robust", None),
        budget=getattr(arguments, "budget", None),
    )
    return apply_overrides(config, arguments.overrides), loading, settings


def _axes(option: str, texts: Sequence[str], *, only: type = object) -> dict[str, Any]:
    """Return axis -> value of repeated ``--pin`` or ``--free`` options, in the grammar of the overrides."""
    from nest_megatron.errors import Factor, nearest_names
    from nest_megatron.specs.job import COMMAND_LINE
    from nest_megatron.specs.layout import AXES

    values = _assignments(option, texts)
    for axis, value in values.items():
        factors = [Factor(option, f"{axis}={value}", COMMAND_LINE)]
        if axis not in AXES:
            near = nearest_names(axis, AXES) or AXES
            raise BadInputError("NEST-I15", f"{axis!r} is not an axis", factors=factors, nearest=near)
        if not isinstance(value, only):
            raise BadInputError("NEST-I15", f"{option} {axis} takes {_FORMS[only]}", factors=factors)
    return values


def _assignments(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return key -> value of plain assignments, in the grammar of the overrides."""
    from nest_megatron.dialects.overrides import parse_override
    from nest_megatron.errors import Factor
    from nest_megatron.specs.job import COMMAND_LINE

    values: dict[str, Any] = {}
    for text in texts:
        override = parse_override(text)
        if override.is_add() or override.is_force_add() or override.is_delete():
            factors = [Factor(option, text, COMMAND_LINE)]
            axis = override.key_or_group
            raise BadInputError("NEST-I15", f"{option} {axis} takes {_FORMS[object]}", factors=factors)
        values[override.key_or_group] = override.value()
    return values


def _check_json(check: Check, loading: Sequence[str]) -> str:
    import json

    from nest_megatron.specs import codec
    from nest_megatron.specs.plan import SCHEMA

    record = {
        "schema": SCHEMA,
        "exit_code": check.exit_code,
        "user": codec.to_plain(check.user),
        "plan": codec.to_plain(check.plan) if check.plan else None,
        "failure": codec.to_plain(failure_record(check.failure)) if check.failure else None,
        "repair": codec.to_plain(check.repair) if check.repair else None,
        "assumptions": list(loading),
    }
    return json.dumps(record, indent=2) + "\n"
