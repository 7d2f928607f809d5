"""Our verdicts and command lines against megatron.training 0.19.2, in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.environments import missing, optional_python
from tests.validate_args import OURS, VALIDATE_ARGS_CANNOT_SEE

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("validate_args")]

LAYOUTS = 60
SEED = 3


class Seen(NamedTuple):
    """One layout: the rules it breaks, who refused it (empty: nobody) and the words."""

    case: str
    broken: list[str]
    by: str
    objection: str


@pytest.fixture(scope="module")
def report(repository: Path) -> dict[str, list[Seen]]:
    """What one process of ``make env-megatron-0.19`` says about seeded layouts and the written-down cases."""
    if reason := missing("env-megatron-0.19"):
        pytest.skip(reason)
    options = ("--layouts", str(LAYOUTS), "--seed", str(SEED))
    run = subprocess.run(
        [str(optional_python("env-megatron-0.19")), "-m", "tests.validate_args", *options],
        cwd=repository,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    return {name: [Seen(*row) for row in rows] for name, rows in found.items()}


@pytest.mark.parametrize("kind", ["random", "cases"])
def test_every_disagreement_is_explained(report: dict[str, list[Seen]], kind: str) -> None:
    """Legal layouts are written, accepted and read back as they are; blind spots are listed."""
    for seen in report[kind]:
        if not seen.broken:
            assert (seen.by, seen.objection) == ("", ""), seen.case
        elif not seen.by:
            assert set(seen.broken) <= VALIDATE_ARGS_CANNOT_SEE.keys(), seen.case


def test_both_verdicts_occur(report: dict[str, list[Seen]]) -> None:
    """The random layouts are often legal, and often illegal by Megatron's own words."""
    verdicts = Counter("legal" if not seen.broken else seen.by for seen in report["random"])
    assert verdicts["legal"] > LAYOUTS / 10
    assert sum(count for by, count in verdicts.items() if by not in ("legal", "", *OURS)) > LAYOUTS / 10
    assert {"validate_args", "TransformerConfig", "initialize_model_parallel"} <= verdicts.keys()


@pytest.mark.parametrize("rule", sorted(VALIDATE_ARGS_CANNOT_SEE))
def test_every_blind_spot_is_real(report: dict[str, list[Seen]], rule: str) -> None:
    """Each rule in the table has a written-down layout that Megatron accepts, so no entry hides a defect."""
    assert any(rule in seen.broken and not seen.by for seen in report["cases"])
