"""plan.json on disk: where it lies, how it is sealed, and what is written beside it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs

from nest_megatron.errors import BadInputError, Factor
from nest_megatron.launch.fingerprint import Fingerprint
from nest_megatron.launch.processes import job_key
from nest_megatron.launch.publish import (
    Published,
    PublishedFailure,
    publish_once,
    read_failure,
    write_atomically,
)
from nest_megatron.specs import codec
from nest_megatron.specs.plan import Plan

PLAN_NAME = "plan.json"
ENV_NAME = "env.sh"
#: Enough hex digits that two jobs of one cache never meet.
_FOLDER_DIGITS = 32
_SEAL_KEYS = ("fingerprint", "fingerprint_parts", "plan_digest")


def cache_folder(fingerprint: Fingerprint, environment: Mapping[str, str] = os.environ) -> Path:
    """Return ``$NEST_CACHE/<job id>-<restart count>-<fingerprint>``."""
    return cache_root(environment) / f"{job_key(environment)}-{fingerprint.digest[:_FOLDER_DIGITS]}"


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return ``$NEST_CACHE``, or the user's own cache folder."""
    given = environment.get("NEST_CACHE")
    root = Path(given).expanduser() if given else platformdirs.user_cache_path("nest-megatron")
    return root.absolute()


def plan_once(
    path: Path,
    make: Callable[[], Plan],
    *,
    fingerprint: Fingerprint,
    rank: int | None,
    timeout_s: float,
) -> Published[Plan]:
    """Return the sealed plan at ``path``; exactly one process of the job makes it.

    A plan with another fingerprint, or one that was changed or cut off, counts as absent and is replaced.
    """
    return publish_once(
        path,
        lambda: seal(make(), fingerprint),
        parse=lambda text: _parse(text, fingerprint, path),
        render=Plan.to_json,
        rank=rank,
        timeout_s=timeout_s,
    )


def read_given(path: Path, fingerprint: Fingerprint) -> Plan:
    """Read the plan that ``NEST_PLAN`` names; it is never made or repaired here.

    Raises:
        BadInputError: the file is absent, changed after planning, or made for another job.
        PublishedFailure: planning failed, and the file says why.
    """
    text = codec.read_text(path)
    failure = read_failure(text, source=str(path))
    if failure is not None:
        raise PublishedFailure(failure, path)
    return _parse(text, fingerprint, path)


def read_plan(path: Path) -> Plan:
    """Read a plan of any job, sealed or not.

    Raises:
        BadInputError: the file is absent or no plan.
        PublishedFailure: planning failed, and the file says why.
    """
    text = codec.read_text(path)
    failure = read_failure(text, source=str(path))
    if failure is not None:
        raise PublishedFailure(failure, path)
    return Plan.from_json(text, source=str(path))


def seal(plan: Plan, fingerprint: Fingerprint) -> Plan:
    """Return the plan with its job's fingerprint and its own digest in ``provenance``."""
    provenance = dict(unsealed(plan).provenance)
    provenance |= {"fingerprint": fingerprint.digest, "fingerprint_parts": fingerprint.parts}
    plain = dataclasses.replace(plan, provenance=provenance)
    sealed = dataclasses.replace(plain, provenance=provenance | {"plan_digest": _plan_digest(plain)})
    # What the maker uses is what readers get: tuples become lists, as in the file.
    return Plan.from_json(sealed.to_json())


def unsealed(plan: Plan) -> Plan:
    """Return the plan without the seal, for reports."""
    kept = {key: value for key, value in plan.provenance.items() if key not in _SEAL_KEYS}
    return dataclasses.replace(plan, provenance=kept)


def write_env(plan: Plan, plan_path: Path) -> Path:
    """Write ``env.sh`` beside the plan, to be sourced before the launch; return its path."""
    lines = ["# Written with plan.json; source it before srun or torchrun."]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.env.items()]
    lines.append(f"export NEST_PLAN={shlex.quote(str(plan_path))}")
    lines.append("unset NEST_MODE")
    path = plan_path.with_name(ENV_NAME)
    write_atomically(path, "\n".join(lines) + "\n")
    return path


def _parse(text: str, fingerprint: Fingerprint, path: Path) -> Plan:
    plan = Plan.from_json(text, source=str(path))
    recorded = plan.provenance.get("plan_digest")
    kept = {key: value for key, value in plan.provenance.items() if key != "plan_digest"}
    if recorded is None or recorded != _plan_digest(dataclasses.replace(plan, provenance=kept)):
        raise BadInputError(
            "NEST-L05",
            "the plan was changed after it was made; plan again, or change the configuration instead",
            factors=[Factor("NEST_PLAN", path)],
        )
    if plan.provenance.get("fingerprint") != fingerprint.digest:
        parts = plan.provenance.get("fingerprint_parts", {})
        raise BadInputError(
            "NEST-L06",
            "the plan was made for another job; plan again with NEST_MODE=plan",
            factors=[
                Factor("NEST_PLAN", path),
                Factor("different", ", ".join(fingerprint.differing(parts)) or "all"),
            ],
        )
    return plan


def _plan_digest(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(codec.to_plain(plan), sort_keys=True).encode()).hexdigest()
