"""The command line: ``nest-megatron plan``, ``check``, ``explain``, ``doctor``.

Imports stay light, so that ``--help`` answers at once: everything else is imported when a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from nest_megatron.errors import EXIT_OK, BadInputError, NestError, PlannerFault

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

    from nest_megatron.pipeline import Check
    from nest_megatron.planner.explain import Explanation
    from nest_megatron.specs.plan import PlanFailure
    from nest_megatron.specs.settings import PlanSettings

#: Set to 1 to see the traceback of a planner fault.
TRACEBACK_VARIABLE = "NEST_TRACEBACK"

STDOUT = "-"
_MIN_WIDTH, _MAX_WIDTH = 80, 160
#: Type that an axis option demands -> how its value looks.
_FORMS: dict[type, str] = {bool: "true or false", object: "one value, or [a,b]"}

_EXIT_CODES = """exit codes:
  0  plan: a plan was made           check: the layout is legal and fits    explain: answered
  1  plan, explain: no layout is legal and fits, or a defect of the planner
     check: the layout is illegal or does not fit
  2  the input cannot be used: file, key, value or option
  doctor: 0 a run can be planned in this environment, 1 it cannot
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors leave through ``SystemExit(2)``."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    options = [text for text in rest if text.startswith("-")]
    if options:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    if rest and "overrides" not in arguments:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    # argparse ends a list of positionals at the first option; what follows it arrives here, in order.
    arguments.overrides = [*getattr(arguments, "overrides", ()), *rest]
    try:
        code: int = arguments.run(arguments)
    except NestError as error:
        return _fail(error, arguments.json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            traceback.print_exc()
        fault = PlannerFault("NEST-F00", f"{type(error).__name__}: {error}")
        return _fail(fault, arguments.json)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nest-megatron",
        description="Plan the parallel layout of Megatron and NeMo training.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = _command(commands, "plan", "find the layout, show why, and write it", run_plan)
    plan.add_argument(
        "--write-config", metavar="OUT", help="write the configuration with the plan's edits as YAML"
    )
    _command(commands, "check", "judge the layout of the configuration as it is", run_check)
    why = _command(commands, "explain", "answer why the plan is not another layout", run_explain)
    why.add_argument(
        "--why",
        action="extend",
        nargs="+",
        required=True,
        metavar="AXIS=VALUE",
        help="the axes that are different in the layout you ask about; overrides go before this option",
    )
    why.add_argument(
        "--from",
        dest="base",
        choices=("plan", "user"),
        default="plan",
        help="the layout that is varied and compared with: the plan's, or the configuration's own",
    )
    _doctor_command(commands)
    _validate_command(commands)
    _calibrate_command(commands)
    return parser


def _calibrate_command(commands: Any) -> None:
    purpose = "learn from one measured run; every later plan for that machine and stack uses it"
    command = commands.add_parser(
        "calibrate",
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("what", choices=("memory",), help="the quantity that the run measured")
    command.add_argument("run_record", metavar="RUN.json", help="one record of the measured schema")
    command.set_defaults(run=run_calibrate, json=None)


def _validate_command(commands: Any) -> None:
    purpose = "replay published runs and print how far the predictions are off"
    command = commands.add_parser(
        "validate",
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument(
        "--records",
        metavar="FILE",
        help="file of measured records (default: those that ship with the package)",
    )
    command.add_argument("--family", action="append", default=[], help="only this family; may be repeated")
    command.add_argument("--exclude", default="", help="record ids to leave out, separated by commas")
    command.add_argument("--where", metavar="FIELD", help="only records in which this field is not null")
    command.add_argument("--json", metavar="OUT", help="write every prediction with its memory terms")
    command.set_defaults(run=run_validate)


def _doctor_command(commands: Any) -> None:
    purpose = "prove that +nest=auto plans in this environment"
    doctor = commands.add_parser(
        "doctor",
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    doctor.add_argument("--quiet", action="store_true", help="print only what fails")
    doctor.add_argument("--json", metavar="OUT", help="write the findings as JSON; - is standard output")
    doctor.set_defaults(run=run_doctor)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("nest-megatron")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _command(
    commands: Any, name: str, purpose: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = command.add_argument
    add("--config", required=True, metavar="FILE", help="YAML configuration of the training job")
    add("--dialect", metavar="D", help="configuration style; default: detected")
    add("--cluster", metavar="C", help="name of a shipped cluster, or a cluster file")
    add("--gpus", type=count, metavar="N", help="world size, when the configuration does not say it")
    add("--framework-version", metavar="V", help="version of the framework that will train")
    add("--reserved-gib", type=gib, default=0.0, metavar="X", help="device memory that other processes hold")
    add("--force", action="store_true", help="accept a fully pinned layout although it does not fit")
    add("--pin", action="append", default=[], metavar="AXIS=VALUE", help="fix an axis: tp=4, or pp=[2,4]")
    add("--free", action="append", default=[], metavar="AXIS=BOOL", help="release (true) or freeze (false)")
    add("--json", metavar="OUT", help="write the result, or the failure, as JSON; - is standard output")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra-style overrides: a.b=1 +a.b=1 ++a.b=1 ~a.b")
    command.set_defaults(run=run)
    return command


def count(text: str) -> int:
    """Return a positive number of GPUs."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def gib(text: str) -> float:
    """Return a finite size that is not negative."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a size in GiB")
    return value


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan, write what was asked for, print the report."""
    # Bad input is answered before the solver loads.
    config, loading, settings = _inputs(arguments)

    import dataclasses

    from omegaconf import OmegaConf

    from nest_megatron.launch.hydra import apply_plan
    from nest_megatron.pipeline import plan_config
    from nest_megatron.report.text import render_plan

    plan = plan_config(config, overrides=arguments.overrides, settings=settings, source=arguments.config)
    plan = dataclasses.replace(plan, assumptions=(*loading, *plan.assumptions))
    if arguments.write_config is not None:
        apply_plan(config, plan)
        _write(arguments.write_config, OmegaConf.to_yaml(config))
    if arguments.json is not None:
        _write(arguments.json, plan.to_json())
    _report(lambda console: render_plan(plan, console=console), arguments)
    return EXIT_OK


def run_check(arguments: argparse.Namespace) -> int:
    """Judge the user's own layout, write what was asked for, print the report."""
    config, loading, settings = _inputs(arguments)

    from nest_megatron.pipeline import check_config
    from nest_megatron.report.text import render_check

    check = check_config(config, overrides=arguments.overrides, settings=settings, source=arguments.config)
    if arguments.json is not None:
        _write(arguments.json, _check_json(check, loading))
    _report(lambda console: render_check(check, console=console, assumptions=loading), arguments)
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
        _write(arguments.json, _explanation_json(explanation, loading))
    _report(lambda console: render_explanation(explanation, console=console, assumptions=loading), arguments)
    return EXIT_OK


def _explanation_json(explanation: Explanation, loading: Sequence[str]) -> str:
    import json

    from nest_megatron.specs import codec
    from nest_megatron.specs.plan import SCHEMA

    record = {"schema": SCHEMA, **codec.to_plain(explanation)}
    record["assumptions"] = [*loading, *explanation.assumptions]
    return json.dumps(record, indent=2) + "\n"


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Store what ``arguments.run_record`` teaches."""
    from pathlib import Path

    from nest_megatron.calibration.memory import calibrate_memory

    print(calibrate_memory(Path(arguments.run_record)).render())
    return EXIT_OK


def run_validate(arguments: argparse.Namespace) -> int:
    """Print the error tables of ``arguments.records``."""
    from nest_megatron.validation import command

    print(command.run(arguments, write=_write))
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
        _write(arguments.json, json.dumps(record, indent=2) + "\n")
    if not arguments.quiet:
        _report(lambda console: render_examination(examination, console=console), arguments)
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
        "failure": codec.to_plain(_record(check.failure)) if check.failure else None,
        "repair": codec.to_plain(check.repair) if check.repair else None,
        "assumptions": list(loading),
    }
    return json.dumps(record, indent=2) + "\n"


def _record(error: NestError) -> PlanFailure:
    from nest_megatron.specs.plan import PlanFailure

    message = error.render().removeprefix(f"{error.code}: ")
    return PlanFailure(code=error.code, message=message, exit_code=error.exit_code)


def _report(render: Callable[[Console], None], arguments: argparse.Namespace) -> None:
    """Print a report; on standard error when standard output carries a result."""
    taken = STDOUT in (arguments.json, getattr(arguments, "write_config", None))
    stream = sys.stderr if taken else sys.stdout
    with _until_closed(stream):
        render(_console(stream))


@contextlib.contextmanager
def _until_closed(stream: TextIO) -> Iterator[None]:
    """Stop writing, without an error, when the reader of a pipe (``head``, ``less``) has seen enough."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        # The interpreter flushes once more on exit; that must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _console(stream: TextIO) -> Console:
    """Return a console between 80 and 160 columns; rich itself drops colours when nobody watches."""
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            # Rich would exit 1 here; the verdict's own exit code counts.
            raise BrokenPipeError

    console = PipeConsole(file=stream, highlight=False, emoji=False, markup=False)
    console.width = min(max(console.width, _MIN_WIDTH), _MAX_WIDTH)
    return console


def _write(target: str, text: str) -> None:
    """Write a whole file or nothing: a reader never sees half of it.

    Raises:
        BadInputError: the target cannot be written.
    """
    from pathlib import Path

    from nest_megatron.launch.publish import write_atomically

    if target == STDOUT:
        with _until_closed(sys.stdout):
            sys.stdout.buffer.write(text.encode())
        return
    try:
        write_atomically(Path(target), text)
    except BadInputError as error:
        raise BadInputError("NEST-I16", f"cannot write {target}: {error.message}") from None


def _fail(error: NestError, json_target: str | None) -> int:
    """Print an error without a traceback, publish it where the result would be, return its exit code."""
    from nest_megatron.report.page import escaped

    prefix = "planner fault" if isinstance(error, PlannerFault) else "error"
    text = "\n".join(escaped(line) for line in error.render().split("\n"))
    print(f"{prefix}: {text}", file=sys.stderr)
    if isinstance(error, PlannerFault):
        print(
            f"This is a defect of nest-megatron {_version()}. Please report it with the command line, the "
            f"configuration and the traceback ({TRACEBACK_VARIABLE}=1 prints it).",
            file=sys.stderr,
        )
    if json_target is not None:
        try:
            _write(json_target, _record(error).to_json())
        except BadInputError as unwritable:
            print(f"error: {unwritable.render()}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
