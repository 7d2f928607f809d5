"""What must hold for every optimum, before the final selection among near ties (DESIGN section 7)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cython_dp import Found, best_first, quick_bounds
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cost.memory import memory_limits
from nest_megatron.cost.tables import CostModel
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.planner.floors import StateFloor
from nest_megatron.planner.search import candidate_problem, search
from nest_megatron.planner.space import Space, enumerate_space
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.units import GIB, BytesPerSecond
from tests import builders

DEFAULTS: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "sharding": "optim"}
few = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
#: Axes whose pins are values; a pin of layers or recompute reads the user's layout.
VALUE_AXES = ("tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch", "sequence_parallel", "sharding", "order")


def job_of(
    num_layers: int, num_gpus: int, sequence: int, *, experts: bool = False, **fields: Any
) -> TrainJob:
    """Return a small dense job, or one with experts in every layer."""
    model = builders.llama8b(num_layers=num_layers)
    if experts:
        moe = dataclasses.replace(builders.mixtral().moe, layer_pattern=(1,) * num_layers)
        model = builders.mixtral(num_layers=num_layers, moe=moe)
    return builders.make_job(
        DEFAULTS, model=model, num_gpus=num_gpus, global_batch=16, sequence_length=sequence, **fields
    )


jobs = st.builds(
    job_of,
    st.sampled_from([3, 4, 8]),
    st.sampled_from([4, 8]),
    st.sampled_from([2048, 8192]),
    experts=st.booleans(),
)


def cluster_of(job: TrainJob) -> Cluster:
    """Return an H100 cluster of the job's size."""
    return load_cluster("dgx-h100", num_gpus=job.num_gpus)


def fastest(job: TrainJob, cluster: Cluster) -> tuple[float, Layout | None, Found, Space]:
    """Return (seconds, layout) of the fastest layout that runs, infinite and None when none does."""
    space = enumerate_space(job)
    tables = CostModel(job, cluster).tables(space.nodes)
    limit = memory_limits(job, cluster.accelerator.visible_bytes)[1]
    found = best_first(candidate_problem(job, tables, space), limit)
    if not np.isfinite(found.time_s).any():
        return math.inf, None, found, space
    best = int(np.nanargmin(found.time_s))
    layout = space.layout(best, sizes=found.sizes[best], num_recompute=int(found.num_recompute[best]))
    return float(found.time_s[best]), layout, found, space


@few
@given(job=jobs, reserved=st.lists(st.integers(0, 70), min_size=2, max_size=2, unique=True))
def test_more_memory_never_makes_the_optimum_slower(job: TrainJob, reserved: list[int]) -> None:
    """With less memory held by others the fastest layout that runs is at least as fast."""
    less, more = sorted(reserved)
    cluster = cluster_of(job)
    roomy, tight = (
        fastest(dataclasses.replace(job, reserved_bytes=n * GIB), cluster)[0] for n in (less, more)
    )
    assert roomy <= tight


@few
@given(job=jobs, factor=st.floats(1.05, 4.0), level=st.integers(0, 1))
def test_a_faster_network_never_makes_the_optimum_slower(job: TrainJob, factor: float, level: int) -> None:
    """More bandwidth on a level leaves the optimum as fast or faster."""
    job = dataclasses.replace(job, num_gpus=16)
    cluster = load_cluster("dgx-h100", num_gpus=16)
    levels = list(cluster.levels)
    wide = BytesPerSecond(levels[level].bandwidth_bytes_per_s * factor)
    levels[level] = dataclasses.replace(levels[level], bandwidth_bytes_per_s=wide)
    faster = dataclasses.replace(cluster, levels=tuple(levels))
    assert fastest(job, faster)[0] <= fastest(job, cluster)[0] * (1 + 1e-12)


@few
@given(job=jobs, axis=st.sampled_from(["tp", "pp", "micro_batch", "vpp"]), value=st.sampled_from([1, 2, 4]))
@example(job=job_of(3, 4, 2048, experts=False), axis="pp", value=4)  # a pin that no layout keeps
def test_freedom_never_makes_the_optimum_slower(job: TrainJob, axis: str, value: int) -> None:
    """The optimum under a pin is never faster than without it."""
    cluster = cluster_of(job)
    pinned = dataclasses.replace(job, pins={axis: value})
    assert fastest(job, cluster)[0] <= fastest(pinned, cluster)[0]


@few
@given(job=jobs)
def test_pinning_the_optimum_returns_it(job: TrainJob) -> None:
    """With every axis of the fastest layout pinned, the search finds the same layout at the same time."""
    cluster = cluster_of(job)
    seconds, layout, *_ = fastest(job, cluster)
    if layout is None:
        return
    pins = {axis: getattr(layout, FIELDS[axis]) for axis in (*VALUE_AXES, "layers", "recompute", "overlap")}
    again = dataclasses.replace(job, pins=pins, user_layout=layout)
    pinned_s, pinned, *_ = fastest(again, cluster)
    assert pinned == layout
    assert pinned_s == seconds


@few
@given(job=jobs)
def test_quick_bounds_and_states_never_exceed_the_layouts(job: TrainJob) -> None:
    """Floors of time and memory lie below what the evaluator says of the space's own example layouts."""
    cluster = cluster_of(job)
    space = enumerate_space(job)
    tables = CostModel(job, cluster).tables(space.nodes)
    quick_s = quick_bounds(candidate_problem(job, tables, space), 2**62)
    chosen = range(0, len(space), max(1, len(space) // 40))
    layouts = [space.layout(i, num_recompute=1) for i in chosen]
    evaluator = Evaluator(job, cluster)
    predictions = evaluator.predict(layouts)
    for i, layout, prediction in zip(chosen, layouts, predictions, strict=True):
        floor_s = float(evaluator.cost.step_time_s(quick_s[i]))
        assert floor_s <= prediction.step_time_s * (1 + 1e-12)
        assert StateFloor(job, prediction.peak_allocated_bytes).fits(layout)


def test_a_budget_stops_the_search_and_says_so() -> None:
    """After two simulations the search answers with its best so far and an honest gap."""
    job = job_of(8, 8, 2048)
    full = search(job, cluster_of(job)).certificate
    early = search(job, cluster_of(job), budget=2).certificate
    assert early.evaluated < full.evaluated
    assert early.lower_bound_s <= full.objective_s <= early.objective_s
    assert full.gap == 0.0
