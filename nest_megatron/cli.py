"""The command line: ``nest-megatron plan``, ``check``, ``explain``, ``doctor``, ``validate`` and others.

Imports stay light, so that ``--help`` answers at once: everything else is imported when a command runs.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from nest_megatron.commands import (
    run_calibrate,
    run_check,
    run_doctor,
    run_explain,
    run_plan,
    run_replan,
    run_validate,
)
from nest_megatron.errors import NestError, PlannerFault
from nest_megatron.output import TRACEBACK_VARIABLE, fail, version

_EXIT_CODES = """exit codes:
  0  plan, replan: a plan was made   check: the layout is legal and fits   explain: answered
  1  plan, replan, explain: no layout is legal and fits, or a defect of the planner
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
        return fail(error, arguments.json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            traceback.print_exc()
        fault = PlannerFault("NEST-F00", f"{type(error).__name__}: {error}")
        return fail(fault, arguments.json)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nest-megatron",
        description="Plan the parallel layout of Megatron and NeMo training.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = _job_command(commands, "plan", "find the layout, show why, and write it", run_plan)
    plan.add_argument(
        "--write-config", metavar="OUT", help="write the configuration with the plan's edits as YAML"
    )
    plan.add_argument(
        "--robust",
        choices=("worst", "cvar"),
        help="plan for the scenarios of the cluster file: least worst case, or least CVaR at 80 %%",
    )
    plan.add_argument(
        "--budget",
        type=count,
        metavar="N",
        help="stop after N simulations of each memory band: the best so far, and how far off it can be",
    )
    _job_command(commands, "check", "judge the layout of the configuration as it is", run_check)
    why = _job_command(commands, "explain", "answer why the plan is not another layout", run_explain)
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
    _replan_command(commands)
    return parser


def _replan_command(commands: Any) -> None:
    purpose = "plan again after a change: a lost node, a slow link, other nodes, another size"
    command = _command(commands, "replan", purpose, run_replan)
    add = command.add_argument
    add("--plan", required=True, metavar="PLAN.json", help="the plan that is running")
    add(
        "--changed",
        action="extend",
        nargs="+",
        default=[],
        metavar="KIND=VALUE",
        help="lost=NODES, degraded=NAME:FACTOR, nodes=NODES, topology=FILE, cluster=C, gpus=N",
    )
    add("--config", metavar="FILE", help="the plan's configuration; default: where the plan says it was")
    add("--keep-layout", action="store_true", help="recompute only the rank map, as after a requeue")
    add(
        "--min-gain",
        type=percent,
        metavar="PERCENT",
        help="step time that another layout must save before the old one is given up (default: 3)",
    )
    add("--json", metavar="OUT", help="write the new plan, or the failure, as JSON; - is standard output")


def _calibrate_command(commands: Any) -> None:
    purpose = "learn from one measured run; every later plan for that machine and stack uses it"
    command = _command(commands, "calibrate", purpose, run_calibrate)
    command.add_argument("what", choices=("memory", "step"), help="the quantity that the run measured")
    command.add_argument(
        "run_records",
        nargs="+",
        metavar="RUN.json",
        help="one record of the measured schema; step takes several runs of one model",
    )
    command.set_defaults(json=None)


def _validate_command(commands: Any) -> None:
    purpose = "replay published runs and print how far the predictions are off"
    command = _command(commands, "validate", purpose, run_validate)
    command.add_argument(
        "--records",
        metavar="FILE",
        help="file of measured records (default: those that ship with the package)",
    )
    command.add_argument("--family", action="append", default=[], help="only this family; may be repeated")
    command.add_argument("--exclude", default="", help="record ids to leave out, separated by commas")
    command.add_argument("--where", metavar="FIELD", help="only records in which this field is not null")
    command.add_argument(
        "--subsets", metavar="FILE", help="JSON of named lists of record ids: one more table for each"
    )
    command.add_argument(
        "--calibrated", action="store_true", help="use the stored calibration, which is ignored otherwise"
    )
    command.add_argument(
        "--sweeps", action="store_true", help="also one line per layout sweep and scale curve"
    )
    command.add_argument("--json", metavar="OUT", help="write every prediction with its memory terms")


def _doctor_command(commands: Any) -> None:
    purpose = "prove that +nest=auto plans in this environment"
    doctor = _command(commands, "doctor", purpose, run_doctor)
    doctor.add_argument("--quiet", action="store_true", help="print only what fails")
    doctor.add_argument("--json", metavar="OUT", help="write the findings as JSON; - is standard output")


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
    command.set_defaults(run=run)
    return command


def _job_command(
    commands: Any, name: str, purpose: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A command about one configuration, with the options that say what may change."""
    command = _command(commands, name, purpose, run)
    add = command.add_argument
    add("--config", required=True, metavar="FILE", help="YAML configuration of the training job")
    add("--dialect", metavar="D", help="configuration style; default: detected")
    add("--cluster", metavar="C", help="name of a shipped cluster, or a cluster file")
    add("--nodelist", metavar="NODES", help='nodes of the job, gpu[001-004,009]: "$SLURM_JOB_NODELIST"')
    add("--topology", metavar="FILE", help="`scontrol show topology`, topology.conf or .yaml; - reads stdin")
    add("--gpus", type=count, metavar="N", help="world size, when the configuration does not say it")
    add("--framework-version", metavar="V", help="version of the framework that will train")
    add("--reserved-gib", type=gib, default=0.0, metavar="X", help="device memory that other processes hold")
    add("--force", action="store_true", help="accept a fully pinned layout although it does not fit")
    add("--pin", action="append", default=[], metavar="AXIS=VALUE", help="fix an axis: tp=4, or pp=[2,4]")
    add("--free", action="append", default=[], metavar="AXIS=BOOL", help="release (true) or freeze (false)")
    add("--json", metavar="OUT", help="write the result, or the failure, as JSON; - is standard output")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra-style overrides: a.b=1 +a.b=1 ++a.b=1 ~a.b")
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


def percent(text: str) -> float:
    """Return a percentage from 0 to 100 as a share."""
    value = float(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not a percentage from 0 to 100")
    return value / 100


if __name__ == "__main__":
    raise SystemExit(main())
