"""One process makes a record, every process of the job reads it; needs no torch and no network.

The maker holds a file lock; the file appears by rename, so no reader ever sees half of it.  A failure is
published like a result: otherwise the other ranks would wait for the time-out.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

import filelock

from nest_megatron.errors import BadInputError, Factor, NestError
from nest_megatron.launch.faults import faults_as_errors
from nest_megatron.specs import codec
from nest_megatron.specs.plan import SCHEMA, PlanFailure

T = TypeVar("T")

#: made: by this process; awaited: by another one while this one waited; reused: it was there already.
Origin = Literal["made", "awaited", "reused"]

#: A failure that was there before this rank looked may belong to an earlier start; rank 0 removes such a one
#: when it begins, so a failure that stays this long is believed.
_SETTLE_S = 10.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Published(Generic[T]):
    """A record, where it lies, and who made it."""

    value: T
    path: Path
    origin: Origin


class PublishedFailure(NestError):
    """Another process of this job failed to make the record; carries its message and exit code."""

    def __init__(self, failure: PlanFailure, path: Path) -> None:
        super().__init__(failure.code, failure.message, factors=[Factor("published in", path)])
        self.exit_code = failure.exit_code


def publish_once(
    path: Path,
    make: Callable[[], T],
    *,
    parse: Callable[[str], T],
    render: Callable[[T], str],
    rank: int | None,
    timeout_s: float,
) -> Published[T]:
    """Return the record at ``path``; exactly one process makes it.

    Args:
        path: the record's file; all processes of a job must name the same one.
        make: called in one process only; what it raises is published for the others, an unexpected exception
            as a planner fault with its traceback beside ``path``.
        parse: raises BadInputError for text that is no valid record, which then counts as absent.
        render: the text that ``parse`` reads.
        rank: ranks above 0 only wait; rank 0 and processes without a rank compete for the lock.
        timeout_s: longest wait for another process.

    Raises:
        NestError: what ``make`` raised, here or in the process that made the record.
        BadInputError: nothing was published in ``timeout_s``, or the folder cannot be used.
    """
    ready = _read(path, parse)
    if ready is not None and not isinstance(ready, PlanFailure):
        return Published(ready, path, "reused")
    if rank is not None and rank > 0:
        return Published(_await(path, parse, rank, timeout_s), path, "awaited")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path.parent, error) from None
    lock = filelock.FileLock(path.with_suffix(".lock"))
    waited = _acquire(lock, path, timeout_s)
    try:
        ready = _read(path, parse)
        if ready is not None and not isinstance(ready, PlanFailure):
            return Published(ready, path, "awaited" if waited else "reused")
        if isinstance(ready, PlanFailure) and waited:
            raise PublishedFailure(ready, path)
        return _make(path, make, render)
    finally:
        lock.release()


def read_failure(text: str, *, source: str) -> PlanFailure | None:
    """Return the failure that ``text`` records, or None when it records something else.

    Raises:
        BadInputError: ``text`` is not JSON, or a malformed failure record.
    """
    plain = codec.parse_json(text, source=source)
    if plain.get("failed") is not True:
        return None
    codec.check_schema(plain, SCHEMA, source=source)
    return codec.from_plain(PlanFailure, plain, source=source)


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the whole new one.

    Raises:
        BadInputError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unusable(path.parent, error) from None


def _make(path: Path, make: Callable[[], T], render: Callable[[T], str]) -> Published[T]:
    """Make and publish; an old failure goes first, or a waiting rank would believe it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(path.parent, error) from None
    try:
        with faults_as_errors(path.parent):
            value = make()
            text = render(value)
    except NestError as error:
        failure = PlanFailure(code=error.code, message=_without_code(error), exit_code=error.exit_code)
        write_atomically(path, failure.to_json())
        raise
    write_atomically(path, text)
    return Published(value, path, "made")


def _without_code(error: NestError) -> str:
    return error.render().removeprefix(f"{error.code}: ")


def _read(path: Path, parse: Callable[[str], T]) -> T | PlanFailure | None:
    """Return what lies at ``path``; a file that is stale, foreign or cut off counts as absent."""
    try:
        # Listing the folder first refreshes the attribute cache of network file systems.
        if path not in path.parent.iterdir():
            return None
        text = codec.read_text(path)
        failure = read_failure(text, source=str(path))
        return parse(text) if failure is None else failure
    except (OSError, BadInputError):
        return None


def _await(path: Path, parse: Callable[[str], T], rank: int, timeout_s: float) -> T:
    start = time.monotonic()
    first = _signature(path)
    while True:
        found, waited_s = _read(path, parse), time.monotonic() - start
        if isinstance(found, PlanFailure):
            if _signature(path) != first or waited_s > _SETTLE_S:
                raise PublishedFailure(found, path)
        elif found is not None:
            return found
        if waited_s > timeout_s:
            raise _timed_out(path, timeout_s, f"rank {rank} waits for rank 0")
        time.sleep(_POLL_S)


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _acquire(lock: filelock.BaseFileLock, path: Path, timeout_s: float) -> bool:
    """Take the lock; return whether another process held it."""
    try:
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            lock.acquire(timeout=timeout_s, poll_interval=_POLL_S)
            return True
    except filelock.Timeout:
        raise _timed_out(path, timeout_s, "another process holds the lock") from None
    except (OSError, NotImplementedError) as error:
        raise _unusable(path.parent, error) from None
    return False


def _timed_out(path: Path, timeout_s: float, who: str) -> BadInputError:
    return BadInputError(
        "NEST-L03",
        f"no plan appeared in {timeout_s:g} s: {who}",
        factors=[Factor("file", path), Factor("timeout_s", timeout_s, "hydra.callbacks.nest")],
        nearest=[
            "plan before the launch with NEST_MODE=plan",
            "one NEST_CACHE for all ranks, on a shared file system",
        ],
    )


def _unusable(folder: Path, error: Exception) -> BadInputError:
    return BadInputError(
        "NEST-L04",
        f"the plan folder cannot be written or locked: {error}",
        factors=[Factor("folder", folder)],
        nearest=["set NEST_CACHE to a writable folder that all nodes share"],
    )
