"""Layouts for a network that may be slower: the least worst case, or tail mean, over a cluster's scenarios.

A scenario multiplies the bandwidth of levels; memory and legality stay.  Every measure here grows with each
scenario's step time, so the measure of lower bounds is a lower bound of the measure, and the search below is
exact in the way of the nominal one (research/nest_paper.md 4.6, "Robust").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cython_dp import best_first, quick_bounds
from nest_megatron.cost.memory import memory_limits
from nest_megatron.cost.overlap import interval_ends
from nest_megatron.cost.tables import CostTables
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.planner.floors import StateFloor, work_floors
from nest_megatron.planner.search import SearchResult, candidate_problem
from nest_megatron.planner.space import NODE_AXES, Space, enumerate_space
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.plan import Robust, ScenarioPrice
from nest_megatron.specs.settings import RobustMeasure
from nest_megatron.units import BytesPerSecond

Float64 = npt.NDArray[np.float64]

#: CVaR is the mean step time of the slowest scenarios that hold this share of the weight (CVaR at 80 %).
TAIL = 0.2
#: Candidates solved under every scenario before the search answers with its gap.
BUDGET = 20_000
#: Simulated splits of one free split under one scenario; what is left unfinished bounds the rest.
LEAVES = 200
#: Times closer than this share are equal: the order of additions decides the last digits.
ROUNDING = 1e-12


def under(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """Return ``cluster`` with the bandwidth of levels multiplied.

    A level's factor also scales the uplinks that named units have toward it, and at level 0 the measured bus
    bandwidths.

    Args:
        factors: level name -> factor; levels that are not named keep their bandwidth.
    """
    levels, above = [], {}
    for inner, level in zip((None, *cluster.levels), cluster.levels, strict=False):
        factor = factors.get(level.name, 1.0)
        rate = BytesPerSecond(level.bandwidth_bytes_per_s * factor)
        levels.append(dataclasses.replace(level, bandwidth_bytes_per_s=rate))
        if inner is not None:
            above[inner.name] = factor
    units = [
        unit
        if unit.uplink_bytes_per_s is None
        else dataclasses.replace(
            unit, uplink_bytes_per_s=BytesPerSecond(unit.uplink_bytes_per_s * above[unit.level])
        )
        for unit in cluster.units
    ]
    inside = factors.get(cluster.levels[0].name, 1.0)
    measured = {n: rate * inside for n, rate in cluster.busbw_by_group_size_bytes_per_s.items()}
    return dataclasses.replace(
        cluster, levels=tuple(levels), units=tuple(units), busbw_by_group_size_bytes_per_s=measured
    )


def measure_of(times_s: Float64, measure: RobustMeasure) -> Float64:
    """Return the measure over scenarios, the first axis (K, ...) of ``times_s``.

    ``worst`` is the largest time.  ``cvar`` is the mean over the slowest scenarios, all of the same weight
    1/K, that together hold ``TAIL`` of it; the last of them counts with the part that is left (Rockafellar
    and Uryasev 2000).  With at most 1 / ``TAIL`` scenarios that is the worst one.
    """
    weights = _weights(len(times_s), measure)
    slowest = np.sort(times_s, axis=0)[::-1][: len(weights)]
    return np.asarray(np.tensordot(weights, slowest, axes=1))


def _weights(count: int, measure: RobustMeasure) -> Float64:
    """Return the weights of the slowest of ``count`` scenarios, slowest first; they sum to one."""
    if measure == "worst":
        return np.ones(1)
    held = np.minimum(np.arange(count + 1) / count, TAIL)
    weights = np.diff(held) / TAIL
    return weights[weights > 0]


class ScenarioPricer:
    """Prices layouts of one job under every scenario of one cluster."""

    def __init__(self, job: TrainJob, cluster: Cluster, measure: RobustMeasure) -> None:
        """Prepare one evaluator per scenario.

        Raises:
            BadInputError: the cluster has no scenarios.
        """
        if not cluster.scenarios:
            raise BadInputError(
                "NEST-S05",
                "robust planning needs scenarios, and the cluster has none",
                factors=[Factor("cluster", cluster.name, cluster.source)],
                nearest=[
                    f"scenarios: [{{}}, {{{cluster.levels[-1].name}: 0.5}}] in a cluster file: the network "
                    "as it is, and with half the bandwidth of one level"
                ],
            )
        self.measure = measure
        self.scenarios = cluster.scenarios
        self.evaluators = [Evaluator(job, under(cluster, factors)) for factors in cluster.scenarios]
        self._factor = 1.0 if job.step_scale is None else job.step_scale.factor

    def times_s(self, layouts: Sequence[Layout]) -> Float64:
        """Return (K, L) step times."""
        return np.array([evaluator.step_times_s(layouts) for evaluator in self.evaluators])

    def values_s(self, layouts: Sequence[Layout]) -> Float64:
        """Return (L) the measure of each layout."""
        return measure_of(self.times_s(layouts), self.measure)

    def cutoff_s(self, best_s: float, others_s: Float64) -> float:
        """Return the solver's seconds of one scenario above which the measure exceeds ``best_s``.

        Args:
            others_s: (K - 1) the solver's seconds of the other scenarios, or lower bounds of them.
        """
        weights = _weights(len(self.scenarios), self.measure)
        slowest = np.sort(others_s)[::-1]
        # Step time = slope * solver's seconds + offset.
        offset, high = (self._factor * float(self.evaluators[0].cost.step_time_s(x)) for x in (0.0, 1.0))
        left = (best_s - offset) / (high - offset) - float(weights[1:] @ slowest[: len(weights) - 1])
        # Below the slowest of the others it would not have the first weight.
        return float(max([left / float(weights[0]), *slowest[:1].tolist()]))

    def bound_s(self, solver_s: Float64) -> Float64:
        """Return the measure of (K, ...) seconds of the solver, as step times.

        The measure's weights sum to one and the step time is affine in the solver's: their order is free.
        """
        return self._factor * self.evaluators[0].cost.step_time_s(measure_of(solver_s, self.measure))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RobustChoice:
    """The layout of least measure within the memory band of the nominal plan.

    Attributes:
        lower_bound_s: no layout of the space has a smaller measure.
        visited: candidates that were solved under the scenarios.
    """

    measure: RobustMeasure
    layout: Layout
    value_s: float
    lower_bound_s: float
    configurations: int
    visited: int
    evaluated: int


def robust_choice(
    job: TrainJob,
    cluster: Cluster,
    nominal: SearchResult,
    measure: RobustMeasure,
    *,
    budget: int = BUDGET,
) -> RobustChoice:
    """Return the layout whose measure over ``cluster.scenarios`` is least.

    The layouts of ``nominal`` are candidates too, so the choice is never worse than the nominal plan in this
    measure, whatever the budget.  The memory band is that of the nominal plan: memory knows no scenario.

    Args:
        budget: candidates solved before the search stops; ``lower_bound_s`` says what the rest can hold.

    Raises:
        BadInputError: the cluster has no scenarios.
    """
    pricer = ScenarioPricer(job, cluster, measure)
    limit_bytes = _limit_bytes(job, cluster, nominal)
    state = StateFloor(job, limit_bytes)
    space = enumerate_space(job, state=state)
    if not _holds(space, nominal.best):
        space = enumerate_space(job, state=state, wide=True)
    search = _Search(job, pricer, space, limit_bytes)
    search.offer([nominal.best, nominal.fastest, *nominal.runner_ups])
    search.run(budget)
    return RobustChoice(
        measure=measure,
        layout=search.best,
        value_s=search.best_s,
        lower_bound_s=min(search.lower_s, search.best_s),
        configurations=len(space),
        visited=search.visited,
        evaluated=search.evaluated,
    )


def robust_report(
    job: TrainJob, cluster: Cluster, layout: Layout, nominal: Layout, choice: RobustChoice
) -> Robust:
    """Return what plan.json says: the times of the plan and of the nominal one under every scenario."""
    pricer = ScenarioPricer(job, cluster, choice.measure)
    times_s = pricer.times_s([layout, nominal])
    value_s, nominal_s = (float(value) for value in measure_of(times_s, choice.measure))
    return Robust(
        measure=choice.measure,
        value_s=value_s,
        nominal_layout=nominal,
        nominal_value_s=nominal_s,
        lower_bound_s=choice.lower_bound_s,
        gap=value_s / choice.lower_bound_s - 1.0,
        configurations=choice.configurations,
        visited=choice.visited,
        evaluated=choice.evaluated,
        scenarios=tuple(
            ScenarioPrice(factors=dict(factors), step_time_s=float(own), nominal_step_time_s=float(other))
            for factors, (own, other) in zip(pricer.scenarios, times_s, strict=True)
        ),
    )


def paired_measure(
    job: TrainJob, cluster: Cluster, best: Layout, other: Layout, measure: RobustMeasure
) -> tuple[float, float]:
    """Return the lowest and highest measure(best) / measure(other) over the overlap intervals.

    The counterpart of ``evaluate.paired_ratio`` for a robust plan.
    """
    ratios = []
    for variant in (job, *interval_ends(job)):
        best_s, other_s = ScenarioPricer(variant, cluster, measure).values_s([best, other])
        ratios.append(float(best_s / other_s))
    return min(ratios), max(ratios)


def _limit_bytes(job: TrainJob, cluster: Cluster, nominal: SearchResult) -> int:
    """Return the largest allocated peak of the band in which the nominal search chose."""
    if nominal.forced:
        return Evaluator(job, cluster).predict([nominal.best])[0].peak_allocated_bytes
    fits, runs = memory_limits(job, cluster.accelerator.visible_bytes)
    return runs if nominal.tight else fits


def _holds(space: Space, layout: Layout) -> bool:
    """Return whether the space has the degrees of ``layout``."""
    names = [FIELDS[axis] for axis in NODE_AXES]
    return any(all(getattr(node, name) == getattr(layout, name) for name in names) for node in space.nodes)


class _Search:
    """Candidates in ascending measure of their quick bounds, each solved exactly under every scenario."""

    def __init__(self, job: TrainJob, pricer: ScenarioPricer, space: Space, limit_bytes: int) -> None:
        self.job, self.pricer, self.space, self.limit_bytes = job, pricer, space, limit_bytes
        self.best: Layout = Layout()
        self.best_s = math.inf
        self.lower_s = math.inf
        self.visited = self.evaluated = 0
        self._seen: set[Layout] = set()

    def offer(self, layouts: Iterable[Layout]) -> None:
        """Price layouts under every scenario and keep the first of least measure."""
        fresh = [layout for layout in dict.fromkeys(layouts) if layout not in self._seen]
        if not fresh:
            return
        self._seen.update(fresh)
        self.evaluated += len(fresh) * len(self.pricer.evaluators)
        for layout, value_s in zip(fresh, self.pricer.values_s(fresh), strict=True):
            if value_s < self.best_s * (1.0 - ROUNDING):
                self.best, self.best_s = layout, float(value_s)

    def run(self, budget: int) -> None:
        """Visit every candidate whose bound is below the best, at most ``budget``."""
        part = self._part()
        if not len(part):
            return
        costs = [evaluator.cost for evaluator in self.pricer.evaluators]
        tables = [cost.tables(part.nodes) for cost in costs]
        quick_s = np.array(
            [quick_bounds(candidate_problem(self.job, table, part), self.limit_bytes) for table in tables]
        )
        lower_s = self.pricer.bound_s(quick_s)
        for i in np.argsort(lower_s, kind="stable"):
            if lower_s[i] >= self.best_s * (1.0 - ROUNDING):
                return
            if self.visited == budget:
                self.lower_s = min(self.lower_s, float(lower_s[i]))
                return
            self._visit(part, tables, int(i), quick_s[:, i])

    def _part(self) -> Space:
        """Return the candidates of nodes whose work alone leaves room below the best."""
        space = self.space
        interleaves = np.zeros(len(space.nodes), dtype=np.bool_)
        interleaves[space.node[space.vpp > 1]] = True
        floors = [
            work_floors(evaluator.cost, space.nodes, interleaves) for evaluator in self.pricer.evaluators
        ]
        wanted = self.pricer.bound_s(np.array(floors)) < self.best_s
        return space.only(np.flatnonzero(wanted))

    def _visit(self, part: Space, tables: Sequence[CostTables], i: int, quick_s: Float64) -> None:
        """Solve one candidate under each scenario, the slowest first, while it can still be better."""
        self.visited += 1
        one = part.alone(i)
        rows = [_row(table, int(part.node[i])) for table in tables]
        times_s, layouts = quick_s.copy(), []
        for k in np.argsort(-quick_s, kind="stable"):
            cutoff_s = self.pricer.cutoff_s(self.best_s, np.delete(times_s, k))
            problem = candidate_problem(self.job, rows[k], one)
            found = best_first(problem, self.limit_bytes, cutoff_s=cutoff_s, leaves=LEAVES)
            self.evaluated += found.evaluated
            if not math.isfinite(found.time_s[0]):
                return
            # Splits whose bound is above the cut-off were left out.
            times_s[k] = min(found.lower_bound_s, cutoff_s)
            layouts.append(one.layout(0, sizes=found.sizes[0], num_recompute=int(found.num_recompute[0])))
            if self.pricer.bound_s(times_s) >= self.best_s * (1.0 - ROUNDING):
                return
        self.offer(layouts)
        # Scenarios that disagree about the split leave a gap: no layout may have all these times at once.
        value_s = float(self.pricer.bound_s(times_s))
        if value_s < self.best_s * (1.0 - ROUNDING):
            self.lower_s = min(self.lower_s, value_s)


def _row(tables: CostTables, node: int) -> CostTables:
    """Return the tables of one node."""
    here = slice(node, node + 1)
    return dataclasses.replace(
        tables,
        node_times=tables.node_times[here],
        node_params=tables.node_params[here],
        node_memory=tables.node_memory[here],
        terms={name: values[here] for name, values in tables.terms.items()},
    )
