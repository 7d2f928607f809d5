"""Rank and job of a process, from the environments that launchers set."""

from __future__ import annotations

import pytest

from nest_megatron.errors import BadInputError
from nest_megatron.launch.environment import apply_environment
from nest_megatron.launch.processes import job_key, process_rank


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"RANK": "3", "SLURM_PROCID": "0"}, 3),
        ({"SLURM_PROCID": "5", "OMPI_COMM_WORLD_RANK": "1"}, 5),
        ({"OMPI_COMM_WORLD_RANK": "7"}, 7),
        ({"PMI_RANK": "2"}, 2),
    ],
)
def test_first_known_variable_gives_the_rank(environment: dict[str, str], rank: int | None) -> None:
    """RANK of torchrun comes before Slurm's, Slurm's before MPI's; without any there is no rank."""
    assert process_rank(environment) == rank


@pytest.mark.parametrize("text", ["", "-1", "one", "1.0"])
def test_rank_that_is_no_number_is_refused(text: str) -> None:
    """A rank variable with another content is named instead of being read as rank 0."""
    with pytest.raises(BadInputError, match="RANK"):
        process_rank({"RANK": text})


def test_restart_of_a_job_has_its_own_folder() -> None:
    """A requeued job and another job never share a folder, and an odd job id stays one path component."""
    keys = [
        job_key({}),
        job_key({"SLURM_JOB_ID": "12"}),
        job_key({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}),
        job_key({"PBS_JOBID": "12[3].host/x"}),
    ]
    assert len(set(keys)) == len(keys)
    assert not any(set("/[]") & set(key) for key in keys)


def test_replaced_variables_are_returned() -> None:
    """Variables are set; only those that had another value are reported as replaced."""
    environment = {"A": "1", "B": "2"}
    assert apply_environment({"A": "1", "B": "3", "C": "4"}, environment) == {"B": "2"}
    assert environment == {"A": "1", "B": "3", "C": "4"}
