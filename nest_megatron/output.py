"""Where the command line writes: reports, result files, messages."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from nest_megatron.errors import BadInputError, NestError, PlannerFault

if TYPE_CHECKING:
    from rich.console import Console

    from nest_megatron.specs.plan import PlanFailure

#: Set to 1 to see the traceback of a planner fault.
TRACEBACK_VARIABLE = "NEST_TRACEBACK"

STDOUT = "-"
_MIN_WIDTH, _MAX_WIDTH = 80, 160


def version() -> str:
    """Return the installed version of this package."""
    from importlib import metadata

    try:
        return metadata.version("nest-megatron")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def failure_record(error: NestError) -> PlanFailure:
    """Return what is published where the result would be."""
    from nest_megatron.specs.plan import PlanFailure

    message = error.render().removeprefix(f"{error.code}: ")
    return PlanFailure(code=error.code, message=message, exit_code=error.exit_code)


def report(render: Callable[[Console], None], arguments: argparse.Namespace) -> None:
    """Print a report; on standard error when standard output carries a result."""
    taken = STDOUT in (arguments.json, getattr(arguments, "write_config", None))
    stream = sys.stderr if taken else sys.stdout
    with _until_closed(stream):
        render(_console(stream))


def show(text: str) -> None:
    """Print a table on standard output."""
    with _until_closed(sys.stdout):
        print(text)


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


def write(target: str, text: str) -> None:
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


def fail(error: NestError, json_target: str | None) -> int:
    """Print an error without a traceback, publish it where the result would be, return its exit code."""
    from nest_megatron.report.page import escaped

    prefix = "planner fault" if isinstance(error, PlannerFault) else "error"
    text = "\n".join(escaped(line) for line in error.render().split("\n"))
    print(f"{prefix}: {text}", file=sys.stderr)
    if isinstance(error, PlannerFault):
        print(
            f"This is a defect of nest-megatron {version()}. Please report it with the command line, the "
            f"configuration and the traceback ({TRACEBACK_VARIABLE}=1 prints it).",
            file=sys.stderr,
        )
    if json_target is not None:
        try:
            write(json_target, failure_record(error).to_json())
        except BadInputError as unwritable:
            print(f"error: {unwritable.render()}", file=sys.stderr)
    return error.exit_code
