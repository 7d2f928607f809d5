"""Run all ranks of a job as forked processes of this one: torch is imported once, not once per rank."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from nest_megatron.errors import EXIT_NO_PLAN, NestError

T = TypeVar("T")


class RankFailure(NestError):
    """A rank ended without a result; the message is the rank's own."""


def run_ranks(task: Callable[[int, str], T], num_ranks: int, *, timeout_s: float) -> list[T]:
    """Return ``task(rank, store)`` of every rank, each in a forked process.

    Only for ranks without CUDA, which does not survive a fork.  The caller must not have run a backward pass:
    its threads would be missing in the children.

    Args:
        task: what one rank does; ``store`` is an ``init_method`` that all ranks share.
        timeout_s: seconds without a result of any rank after which all are ended.

    Raises:
        RankFailure: a rank raised, died (the message has its last stacks), or said nothing for too long; the
            other ranks are ended.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="nest-ranks-") as folder:
        store = f"file://{folder}/store"
        channels: dict[Connection, tuple[int, Any]] = {}
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (task, rank, store, theirs, _stacks(folder, rank))
            process = context.Process(target=_child, args=arguments, daemon=True)
            process.start()
            theirs.close()
            channels[ours] = (rank, process)
        try:
            return _collect(channels, Path(folder), timeout_s)
        finally:
            for _, process in channels.values():
                if process.is_alive():
                    process.kill()
                process.join()


def _stacks(folder: str | Path, rank: int) -> Path:
    """Return where a rank that the system ends leaves its stacks."""
    return Path(folder) / f"stacks.{rank}"


def _child(task: Callable[[int, str], T], rank: int, store: str, channel: Connection, stacks: Path) -> None:
    faulthandler.enable(stacks.open("w"))
    try:
        channel.send((True, task(rank, store)))
    except NestError as error:
        channel.send((False, (error.code, error.render().removeprefix(f"{error.code}: "))))
    except BaseException:
        channel.send((False, ("NEST-T02", traceback.format_exc())))
    channel.close()
    os._exit(0)  # skip the parent's exit handlers, which the child inherited


def _collect(channels: dict[Connection, tuple[int, Any]], folder: Path, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    open_channels = dict(channels)
    while open_channels:
        ready = wait(list(open_channels), timeout=timeout_s)
        if not ready:
            missing = sorted(rank for rank, _ in open_channels.values())
            raise RankFailure("NEST-T03", f"ranks {missing} gave no result in {timeout_s:g} s")
        for channel in ready:
            assert isinstance(channel, Connection)
            rank, process = open_channels.pop(channel)
            try:
                good, value = channel.recv()
            except EOFError:
                process.join()
                message = f"rank {rank} died, exit code {process.exitcode}"
                stacks = _stacks(folder, rank).read_text()
                raise RankFailure("NEST-T02", f"{message}\n{stacks}".strip()) from None
            if not good:
                failure = RankFailure(value[0], f"rank {rank}: {value[1]}")
                failure.exit_code = EXIT_NO_PLAN
                raise failure
            results[rank] = value
    return [results[rank] for rank in sorted(results)]
