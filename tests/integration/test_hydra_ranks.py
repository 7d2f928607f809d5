"""Many processes of one job: one plans, all agree, and a plan file serves only the job it was made for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from nest_megatron.specs.plan import Plan
from tests.integration.hydra_app import LLAMA, App, Ended, assert_applied, plan_of

pytestmark = pytest.mark.integration

PLANNED = "nest: planned by process"


@pytest.fixture
def app(tmp_path: Path, repository: Path) -> App:
    """A plain app in an empty folder."""
    return App(tmp_path, repository / "scripts" / "conf")


def planned_by(ended: list[Ended]) -> int:
    """Number of processes that planned; the planning process writes one line."""
    return sum(one.err.count(PLANNED) for one in ended)


@pytest.mark.slow
def test_sixteen_processes_without_ranks_plan_once(app: App) -> None:
    """Sixteen processes at once, none with a rank: one plans, all tasks receive the same configuration."""
    ended = app.run_many([*LLAMA, "+nest=auto", "hydra.run.dir=run"], [{}] * 16)
    plans = [plan_of(one) for one in ended]
    assert planned_by(ended) == 1
    assert all(plan == plans[0] for plan in plans)
    configs = [one.received["config"] for one in ended if one.received]
    assert configs == [configs[0]] * 16


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_rank_zero_plans_and_prints(app: App, variable: str) -> None:
    """Whatever launcher gives the ranks: rank 0 plans and prints, the others read the same plan silently."""
    ended = app.run_many(
        [*LLAMA, "+nest=auto", "hydra.run.dir=run"], [{variable: str(r)} for r in (3, 2, 1, 0)]
    )
    plans = [plan_of(one) for one in ended]
    assert [one.err.count(PLANNED) for one in ended] == [0, 0, 0, 1]
    assert [one.out.count(plans[0].headline) for one in ended] == [0, 0, 0, 1]
    assert all(plan == plans[0] for plan in plans)


def test_failure_reaches_every_rank(app: App) -> None:
    """When planning fails, no rank waits or trains: each ends with the planner's exit code and message."""
    arguments = [*LLAMA, "+nest=auto", "model.tensor_model_parallel_size=3"]
    ended = app.run_many(arguments, [{"RANK": str(rank)} for rank in (2, 1, 0)])
    assert [(one.code, one.received) for one in ended] == [(ended[-1].code, None)] * 3
    assert ended[-1].code in (1, 2)
    first_line = ended[-1].err.splitlines()[-1].removeprefix("nest: ")
    assert all(first_line in one.err for one in ended), ended[0].err


def test_rank_without_rank_zero_times_out(app: App) -> None:
    """A rank whose rank 0 never starts ends after the time-out and says where it looked."""
    ended = app.run(*LLAMA, "+nest=auto", "+nest.timeout_s=1", environment={"RANK": "1"})
    assert (ended.code, ended.received) == (2, None)
    assert "no plan appeared in 1 s" in ended.err
    assert str(app.folder / "cache") in ended.err


@pytest.mark.parametrize("left_over", ["", '{"schema": 1, "layout": {', '{"schema": 99}'])
def test_half_written_plan_is_replaced(app: App, left_over: str) -> None:
    """A cut-off or foreign file in the cache is planned again, never read and never a crash."""
    first = plan_of(app.run(*LLAMA, "+nest=auto"))
    (path,) = app.folder.glob("cache/*/plan.json")
    path.write_text(left_over)
    again = app.run(*LLAMA, "+nest=auto")
    assert plan_of(again).edits == first.edits
    assert planned_by([again]) == 1


def test_same_job_reuses_its_plan_and_a_changed_one_does_not(app: App) -> None:
    """A second run with equal inputs reads the cached plan; a changed override plans again."""
    first, second = app.run(*LLAMA, "+nest=auto"), app.run(*LLAMA, "+nest=auto")
    third = app.run(*LLAMA, "+nest=auto", "model.global_batch_size=256")
    assert (planned_by([first]), planned_by([second]), planned_by([third])) == (1, 0, 1)
    assert plan_of(first) == plan_of(second)
    assert plan_of(third).layout.global_batch == 256


def test_environment_read_by_the_configuration_counts(app: App) -> None:
    """A variable that ${oc.env:} puts into the configuration is part of the plan's identity."""
    arguments = [*LLAMA, "+nest=auto", "model.global_batch_size='${oc.decode:${oc.env:BATCH}}'"]
    small = app.run(*arguments, environment={"BATCH": "128"})
    large = app.run(*arguments, environment={"BATCH": "256"})
    assert (plan_of(small).layout.global_batch, plan_of(large).layout.global_batch) == (128, 256)


def test_plan_before_launch(app: App) -> None:
    """NEST_MODE=plan writes plan.json and env.sh and never starts the task; ranks then only read the file."""
    planned = app.run(*LLAMA, "+nest=auto", environment={"NEST_MODE": "plan"})
    assert (planned.code, planned.received) == (0, None), planned.text
    plan = Plan.load(app.folder / "nest_plan" / "plan.json")
    sourced = subprocess.run(
        ["bash", "-c", "set -eu; . nest_plan/env.sh; env -0"],
        cwd=app.folder,
        env={"NEST_MODE": "plan"},
        capture_output=True,
        text=True,
        check=True,
    )
    environment = dict(line.split("=", 1) for line in sourced.stdout.split("\0") if line)
    assert "NEST_MODE" not in environment
    assert plan.env.items() <= environment.items()
    ended = app.run_many(
        [*LLAMA, "+nest=auto", "hydra.run.dir=run"],
        [{"NEST_PLAN": environment["NEST_PLAN"], "RANK": str(rank)} for rank in (0, 1)],
    )
    assert planned_by(ended) == 0
    for one in ended:
        assert plan_of(one) == plan
        assert_applied(one, plan)


@pytest.fixture
def made(app: App) -> Path:
    """A plan made ahead for the example configuration."""
    path = app.folder / "made" / "plan.json"
    ended = app.run(*LLAMA, "+nest=auto", environment={"NEST_MODE": "plan", "NEST_PLAN": str(path)})
    assert ended.code == 0, ended.text
    return path


def test_changed_plan_is_refused(app: App, made: Path) -> None:
    """A plan whose content was edited by hand is refused: exit 2, the task never runs."""
    plain = json.loads(made.read_text())
    plain["edits"]["model.tensor_model_parallel_size"] = 8
    made.write_text(json.dumps(plain))
    ended = app.run(*LLAMA, "+nest=auto", environment={"NEST_PLAN": str(made)})
    assert (ended.code, ended.received) == (2, None)
    assert "was changed after it was made" in ended.err


@pytest.mark.parametrize(
    ("override", "parts"),
    [("model.num_layers=16", "configuration, overrides"), ("+nest.reserved_gib=4", "settings")],
)
def test_plan_of_another_job_is_refused(app: App, made: Path, override: str, parts: str) -> None:
    """A plan for another configuration or other settings is refused; the message says what differs."""
    ended = app.run(*LLAMA, "+nest=auto", override, environment={"NEST_PLAN": str(made)})
    assert (ended.code, ended.received) == (2, None)
    assert f"different={parts}" in ended.err


def test_missing_plan_is_refused(app: App) -> None:
    """A NEST_PLAN that does not exist ends the run; nothing is planned in its place."""
    ended = app.run(*LLAMA, "+nest=auto", environment={"NEST_PLAN": "absent.json"})
    assert (ended.code, ended.received, planned_by([ended])) == (2, None, 0)
    assert "absent.json" in ended.err
    assert "Traceback" not in ended.text


def test_unknown_mode_is_refused(app: App) -> None:
    """A misspelled NEST_MODE must not start the task unplanned."""
    ended = app.run(*LLAMA, "+nest=auto", environment={"NEST_MODE": "plna"})
    assert (ended.code, ended.received) == (2, None)
    assert "NEST_MODE" in ended.err
