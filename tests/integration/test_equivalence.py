"""Plans run and do not change the mathematics: loss and gradient norm equal those of one process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.covering import VALUES, legal_targets, pairs_of
from tests.equivalence import TOLERANCE

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.xdist_group("training")]


@pytest.fixture(scope="module")
def runs(repository: Path) -> list[dict[str, Any]]:
    """Every run of the table, from a fresh process: ranks are forked, and threads do not survive that."""
    pytest.importorskip("megatron.core")
    command = [sys.executable, "-m", "scripts.equivalence_table", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode in (0, 1), done.stderr[-4000:]
    sys.stdout.write(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def plans(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs that the planner planned."""
    return [run for run in runs if run["kind"] == "plan"]


def test_three_steps_equal_the_one_process_run(plans: list[dict[str, Any]]) -> None:
    """Loss and gradient norm of every plan and step are those of the same model in one process."""
    off = [f"{run['name']}: {run['worst']} {run['refusal']}" for run in plans if not _equal(run)]
    assert not off
    assert len(plans) >= 25
    assert max(run["world"] for run in plans) == 16


def _equal(run: dict[str, Any]) -> bool:
    return run["worst"] is not None and run["worst"] <= TOLERANCE


def test_every_rank_is_in_the_groups_of_the_plan(plans: list[dict[str, Any]]) -> None:
    """Megatron's groups of every rank are those of the plan's rank map."""
    assert [run["name"] for run in plans if not run["groups_equal"]] == []


def test_every_legal_pair_of_axis_values_is_trained(plans: list[dict[str, Any]]) -> None:
    """The plans hold every pair of axis values that the planner's space holds for the tiny models."""
    trained = {pair for run in plans if run["point"] for pair in pairs_of(tuple(run["point"]))}
    legal = set(itertools.chain.from_iterable(pairs_of(target.point) for target in legal_targets()))
    assert legal <= trained
    seen = {(axis, value) for axis, value, _, _ in legal} | {(axis, value) for _, _, axis, value in legal}
    wanted = {(axis, value) for axis, values in enumerate(VALUES.values()) for value in values}
    assert wanted == seen, "an axis value is legal nowhere"


def test_both_dialects_are_trained(plans: list[dict[str, Any]]) -> None:
    """Edits of the NeMo and of the Megatron-LM dialect reach megatron-core."""
    assert {run["dialect"] for run in plans} == {"nemo", "megatron_lm"}


def test_forced_wrong_layouts_are_seen(runs: list[dict[str, Any]]) -> None:
    """What megatron-core trains wrong without a word is far from the reference, and breaks a rule."""
    forced = [run for run in runs if run["kind"] == "forced"]
    assert len(forced) == 3
    for run in forced:
        assert run["worst"] is not None, run["refusal"]
        assert run["worst"] > 10 * TOLERANCE, run["name"]
        assert run["rule"], f"no rule forbids {run['name']}"


def test_every_rank_refuses_another_place_than_planned(runs: list[dict[str, Any]]) -> None:
    """Another rank order, layer count or node than the plan's ends the job before the first step."""
    codes = {
        "another order of ranks": "NEST-L22",
        "another number of layers": "NEST-L23",
        "another node": "NEST-L20",
    }
    verified = {run["name"]: run for run in runs if run["kind"] == "verified"}
    assert verified.keys() == codes.keys()
    for name, code in codes.items():
        assert verified[name]["worst"] is None
        assert verified[name]["refusal"].startswith(code)
