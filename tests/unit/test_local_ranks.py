"""Forked ranks: results in rank order, and what is said of one that raises or dies."""

from __future__ import annotations

import os
import signal

import pytest

from nest_megatron.errors import BadInputError
from scripts.training.local import RankFailure, run_ranks


def test_results_come_in_rank_order() -> None:
    """Every rank's own value, whichever ends first."""
    assert run_ranks(lambda rank, store: (rank, store), 3, timeout_s=30)[2][0] == 2


def test_a_rank_that_the_system_ends_leaves_its_stack() -> None:
    """The signal's number and the Python stack at which it came are in the message."""

    def die_in_this_function(rank: int, store: str) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankFailure) as caught:
        run_ranks(die_in_this_function, 2, timeout_s=30)
    assert caught.value.code == "NEST-T02"
    assert "rank 1 died, exit code -11" in caught.value.message
    assert "in die_in_this_function" in caught.value.message


def test_a_refusal_keeps_its_code() -> None:
    """What a rank refuses is refused with the same code, and says which rank it was."""

    def refuse(rank: int, store: str) -> None:
        raise BadInputError("NEST-I17", "this size is none")

    with pytest.raises(RankFailure) as caught:
        run_ranks(refuse, 1, timeout_s=30)
    assert caught.value.code == "NEST-I17"
    assert caught.value.message.startswith("rank 0: this size is none")
