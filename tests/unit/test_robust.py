"""Robust plans: measures, scenarios, equal to trying everything, never worse than the nominal plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_dp import bounds
from nest_megatron.cli import main
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cost.memory import memory_limits
from nest_megatron.errors import EXIT_BAD_INPUT, EXIT_OK
from nest_megatron.planner.evaluate import Evaluator, problem_of
from nest_megatron.planner.robust import TAIL, ScenarioPricer, measure_of, robust_choice, under
from nest_megatron.planner.search import search
from nest_megatron.planner.space import enumerate_space
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.plan import Plan
from nest_megatron.specs.settings import RobustMeasure
from nest_megatron.units import GIB
from tests import builders
from tests.unit.test_planner import job_of, splits_of

MEASURES: tuple[RobustMeasure, ...] = ("worst", "cvar")
#: Scenarios that disagree: a slow NVLink favours pipelines, a slow fabric favours tensor parallelism.
CONFLICT = (
    {"nvlink": 0.1},
    {"leaf": 0.05},
    {},
    {"nvlink": 0.5, "leaf": 0.5},
    {"leaf": 0.2},
    {"nvlink": 0.25},
)
#: Two nodes of two GPUs: both levels carry traffic, and everything can still be tried.
SMALL_NODES = """\
base: dgx-h100
gpus_per_node: 2
num_nodes: 2
levels:
  - {name: nvlink, gpus: 2, bandwidth_GB_per_s_per_gpu: 450, efficiency: 0.813, latency_us: 2.7}
  - {name: leaf, gpus: 8, bandwidth_GB_per_s_per_gpu: 50, efficiency: 0.96, latency_us: 3.0}
"""
#: A dialect without layout string and partial recomputation: few enough layouts to try them all.
PLAIN = dataclasses.replace(
    builders.EVERYTHING, layout_string=False, full_recompute=False, recompute_modules=("core_attn",)
)
JOBS = (
    job_of(builders.llama8b(num_layers=4), num_gpus=4, gpus_per_node=2, capabilities=PLAIN),
    job_of(builders.llama8b(num_layers=5), num_gpus=4, gpus_per_node=2, global_batch=12, capabilities=PLAIN),
    job_of(
        builders.mixtral(
            num_layers=4, moe=dataclasses.replace(builders.mixtral().moe, layer_pattern=(0, 1, 1, 1))
        ),
        num_gpus=4,
        gpus_per_node=2,
        reserved_bytes=20 * GIB,
        capabilities=PLAIN,
    ),
    job_of(
        builders.llama8b(num_layers=4),
        num_gpus=4,
        gpus_per_node=2,
        pins={"tp": 1, "micro_batch": 4},
        capabilities=builders.EVERYTHING,
    ),
)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Two small nodes with conflicting scenarios."""
    (tmp_path / "small.yaml").write_text(SMALL_NODES)
    return dataclasses.replace(load_cluster(tmp_path / "small.yaml"), scenarios=CONFLICT)


times = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=13)


@given(times)
def test_measures_follow_their_definitions(seconds: list[float]) -> None:
    """The worst case is the maximum, CVaR the least of Rockafellar and Uryasev's function."""
    values = np.array(seconds)
    assert measure_of(values, "worst") == pytest.approx(max(seconds))
    # c + E[max(0, T - c)] / tail is piecewise linear, so its minimum is at one of the times.
    cvar = min(c + np.maximum(0.0, values - c).mean() / TAIL for c in seconds)
    assert measure_of(values, "cvar") == pytest.approx(cvar)


@given(times, st.data())
def test_measures_grow_with_every_time(seconds: list[float], data: st.DataObject) -> None:
    """Bounds of times are bounds of measures."""
    shares = data.draw(st.lists(st.floats(0.1, 1.0), min_size=len(seconds), max_size=len(seconds)))
    values = np.array(seconds)
    for measure in MEASURES:
        assert measure_of(values * shares, measure) <= measure_of(values, measure) * (1 + 1e-12)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("job", JOBS, ids=["dense", "uneven", "experts", "recompute"])
def test_the_choice_equals_trying_everything(job: TrainJob, measure: RobustMeasure, cluster: Cluster) -> None:
    """All layouts of the memory band under all scenarios: none is better, and the bound says so."""
    nominal = search(job, cluster)
    choice = robust_choice(job, cluster, nominal, measure)
    limit = memory_limits(job, cluster.accelerator.visible_bytes)[1 if nominal.tight else 0]
    layouts = layouts_within(job, cluster, limit)
    assert len(layouts) > 100
    pricer = ScenarioPricer(job, cluster, measure)
    values_s = pricer.values_s(layouts)
    assert choice.value_s == pytest.approx(float(values_s.min()), rel=1e-12)
    assert choice.lower_bound_s <= values_s.min() * (1 + 1e-12)
    assert choice.lower_bound_s == pytest.approx(choice.value_s, rel=1e-12)
    assert choice.layout in layouts
    assert choice.value_s <= pricer.values_s([nominal.best])[0]


def layouts_within(job: TrainJob, cluster: Cluster, limit_bytes: int) -> list[Layout]:
    """Return every layout of the space whose peak is within the limit: all splits, all block sizes."""
    space = enumerate_space(job)
    layouts: list[Layout] = []
    for i in range(len(space)):
        for sizes in splits_of(space, i, job.model.num_layers):
            layout = space.layout(i, sizes=sizes)
            open_count = layout.recompute.method == "block" and not space.num_recompute[i]
            for count in range(1, max(sizes) + 1) if open_count else [layout.recompute.num_layers]:
                block = dataclasses.replace(layout.recompute, num_layers=count)
                layouts.append(dataclasses.replace(layout, recompute=block))
    evaluator = Evaluator(job, cluster)
    peaks = bounds(problem_of(job, evaluator.cost.tables(layouts), layouts))[2]
    return [layout for layout, peak in zip(layouts, peaks.tolist(), strict=True) if peak <= limit_bytes]


@pytest.mark.parametrize("measure", MEASURES)
def test_the_scenarios_decide(measure: RobustMeasure, cluster: Cluster) -> None:
    """On these scenarios the nominal plan is not the robust one: the tests above would see a stub."""
    nominal = search(JOBS[0], cluster)
    choice = robust_choice(JOBS[0], cluster, nominal, measure)
    assert choice.value_s < ScenarioPricer(JOBS[0], cluster, measure).values_s([nominal.best])[0] * 0.99
    only_nominal = dataclasses.replace(cluster, scenarios=({},))
    same = robust_choice(JOBS[0], only_nominal, nominal, measure)
    assert same.value_s == Evaluator(JOBS[0], cluster).step_times_s([nominal.fastest])[0]


def test_a_budget_leaves_an_honest_gap(cluster: Cluster) -> None:
    """After one candidate the choice is still no worse than the nominal plan, and the bound holds."""
    nominal = search(JOBS[0], cluster)
    full = robust_choice(JOBS[0], cluster, nominal, "worst")
    early = robust_choice(JOBS[0], cluster, nominal, "worst", budget=1)
    assert early.visited == 1
    assert early.lower_bound_s <= full.value_s <= early.value_s
    assert early.value_s <= ScenarioPricer(JOBS[0], cluster, "worst").values_s([nominal.best])[0]
    assert early.lower_bound_s < early.value_s


def test_a_factor_scales_levels_uplinks_and_measured_rates(tmp_path: Path) -> None:
    """A slow level slows every unit's uplink toward it alike, and nothing else."""
    (tmp_path / "named.yaml").write_text(
        SMALL_NODES.replace("num_nodes: 2", "nodes: [a, b]")
        + "units:\n  - {level: nvlink, name: broken, nodes: [a], uplink_GB_per_s_per_gpu: 20}\n"
        + "busbw_by_group_size: {2: 300}\n"
    )
    named = load_cluster(tmp_path / "named.yaml")
    slow = under(named, {"leaf": 0.5})
    assert [level.bandwidth_bytes_per_s for level in slow.levels] == [450e9, 25e9]
    assert slow.units[0].uplink_bytes_per_s == 10e9
    assert slow.busbw_by_group_size_bytes_per_s == {2: 300e9}
    assert under(named, {"nvlink": 0.5}).busbw_by_group_size_bytes_per_s == {2: 150e9}
    assert under(named, {"nvlink": 0.5}).units == named.units
    assert under(named, {}) == named


@pytest.mark.parametrize("measure", MEASURES)
def test_plan_prints_every_scenario(
    measure: str, tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """plan.json holds the plan's and the nominal plan's time per scenario; the report prints them."""
    config = repository / "scripts" / "conf" / "megatron_llama3_8b.yaml"
    (tmp_path / "c.yaml").write_text("base: dgx-h100\nscenarios: [{}, {leaf: 0.25}, {nvlink: 0.2}]\n")
    command = ["plan", "--config", str(config), "--cluster", str(tmp_path / "c.yaml"), "--robust", measure]
    assert main([*command, "--json", str(tmp_path / "plan.json")]) == EXIT_OK
    plan, text = Plan.load(tmp_path / "plan.json"), capsys.readouterr().out
    assert plan.robust is not None
    assert [price.factors for price in plan.robust.scenarios] == [{}, {"leaf": 0.25}, {"nvlink": 0.2}]
    assert plan.robust.scenarios[0].step_time_s == plan.prediction.step_time_s
    assert plan.robust.value_s == max(price.step_time_s for price in plan.robust.scenarios)
    assert plan.robust.lower_bound_s <= plan.robust.value_s
    assert plan.outcome == "kept" or plan.robust.value_s <= plan.robust.nominal_value_s
    assert "leaf x 0.25" in text
    assert "of 3 scenarios" in text.splitlines()[0]


def test_a_cluster_without_scenarios_is_bad_input(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what to write, and where."""
    config = repository / "scripts" / "conf" / "megatron_llama3_8b.yaml"
    command = ["plan", "--config", str(config), "--cluster", "dgx-h100", "--robust", "worst"]
    assert main(command) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert "NEST-S05" in error
    assert "scenarios: [{}, {spine: 0.5}]" in error
