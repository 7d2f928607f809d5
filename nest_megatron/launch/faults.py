"""Failures that end the process: Hydra turns a callback's exception into a warning and trains unplanned."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TextIO

from nest_megatron.errors import Factor, NestError, PlannerFault

FAULT_NAME = "fault.txt"


@contextlib.contextmanager
def faults_as_errors(folder: Path) -> Iterator[None]:
    """Turn an unexpected exception into a PlannerFault, with the traceback in ``folder``."""
    try:
        yield
    except NestError:
        raise
    except Exception as error:
        raise _planner_fault(error, folder) from error


@contextlib.contextmanager
def errors_as_exit(folder: Path) -> Iterator[None]:
    """Turn every failure into SystemExit with its exit code and its message on stderr.

    Args:
        folder: where the traceback of an unexpected exception goes.
    """
    try:
        with faults_as_errors(folder):
            yield
    except NestError as error:
        leave(error.render(), error.exit_code)


def leave(message: str, exit_code: int) -> NoReturn:
    """Print ``message`` to stderr and end the process.

    Raises:
        SystemExit: always.
    """
    # Earlier output comes first, whatever the buffering of a pipe.
    sys.stdout.flush()
    say(message, stream=sys.stderr)
    raise SystemExit(exit_code)


def say(message: str, *, stream: TextIO) -> None:
    """Write one line that a reader of a mixed log can attribute to NEST."""
    stream.write(f"nest: {message}\n")
    stream.flush()


def _planner_fault(error: Exception, folder: Path) -> PlannerFault:
    path = folder / FAULT_NAME
    text = "".join(traceback.format_exception(error))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        where = Factor("traceback", path)
    except OSError as failed:
        sys.stderr.write(text)
        where = Factor("traceback", "above", f"no file: {failed}")
    reason = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    message = f"planner fault: {reason}; the task was not started"
    return PlannerFault("NEST-X01", message, factors=[where])
