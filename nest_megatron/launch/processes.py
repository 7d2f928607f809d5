"""Which process of which job this is, read from the environment of the common launchers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from nest_megatron.errors import BadInputError, Factor

#: First match wins; the order of megatron-core's ``safe_get_rank``, then the MPI launchers.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
_RESTART_VARIABLES = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")

#: Values that differ between the ranks of one job; a fingerprint must not depend on them.
PER_PROCESS_VARIABLES = frozenset(
    (
        *RANK_VARIABLES,
        "LOCAL_RANK",
        "GROUP_RANK",
        "NODE_RANK",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_GTIDS",
        "SLURMD_NODENAME",
        "SLURM_STEP_ID",
        "SLURM_STEP_GPUS",
        "SLURM_TASK_PID",
        "SLURM_TOPOLOGY_ADDR",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_NODE_RANK",
        "PMI_LOCAL_RANK",
        "CUDA_VISIBLE_DEVICES",
        "HOSTNAME",
    )
)


def process_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the global rank of this process, or None when no launcher says it.

    Raises:
        BadInputError: the variable is not a non-negative integer.
    """
    for name in RANK_VARIABLES:
        text = environment.get(name)
        if text is None:
            continue
        if not text.strip().isdecimal():
            factor = Factor(name, text, "environment")
            raise BadInputError("NEST-L01", "the rank is not a number", factors=[factor])
        return int(text)
    return None


def job_key(environment: Mapping[str, str] = os.environ) -> str:
    """Return ``<job id>-<restart count>``, safe as a folder name; ``local-0`` outside a job."""
    job = next((environment[name] for name in _JOB_VARIABLES if environment.get(name)), "local")
    restart = next((environment[name] for name in _RESTART_VARIABLES if environment.get(name)), "0")
    return re.sub(r"[^A-Za-z0-9._]", "_", job) + "-" + re.sub(r"[^0-9]", "_", restart)
