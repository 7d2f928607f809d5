"""The environment variables a plan needs: set before CUDA starts, or refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping

from nest_megatron.errors import Factor, NestError

#: What the last job of a sweep in this process needed.
_required: dict[str, str] = {}


def apply_environment(
    needed: Mapping[str, str], environment: MutableMapping[str, str] = os.environ
) -> dict[str, str]:
    """Set ``needed`` in this process; return the values that were replaced.

    CUDA and NCCL read their variables once, so a change after CUDA started would have no effect.

    Raises:
        NestError: CUDA runs already and a variable differs.
    """
    different = {name: value for name, value in needed.items() if environment.get(name) != value}
    if different and _cuda_started():
        raise NestError(
            "NEST-L07",
            "CUDA has started before the plan was applied, and it does not read these variables again",
            factors=[
                Factor(name, environment.get(name, "unset"), f"the plan needs {value}")
                for name, value in different.items()
            ],
            nearest=["plan with NEST_MODE=plan and source env.sh before the launch"],
        )
    replaced = {name: environment[name] for name in different if name in environment}
    environment.update(different)
    return replaced


def require_environment(needed: Mapping[str, str]) -> None:
    """Check that CUDA, if it runs already, was started by a job with the same variables.

    Jobs of a sweep may share a process; Hydra has set the variables of this job before.

    Raises:
        NestError: CUDA runs and the last job needed other values.
    """
    if needed != _required and _cuda_started():
        raise NestError(
            "NEST-L07",
            "CUDA has started in this process before this job, and it does not read its variables again",
            factors=[
                Factor(name, _required.get(name, "unset"), f"this job needs {needed.get(name, 'none')}")
                for name in sorted({*needed, *_required})
                if needed.get(name) != _required.get(name)
            ],
            nearest=["hydra/launcher=submitit_local, which gives each job a process of its own"],
        )
    _required.clear()
    _required.update(needed)


def _cuda_started() -> bool:
    """Look only at a torch that is loaded already: importing it costs seconds in every rank."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())
