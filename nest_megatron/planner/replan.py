"""Plan again after a change: the running layout goes on unless another one surely gains.

The old layout, with another data parallel size where the world changed, is priced on the changed cluster
first.  It is what everything else must beat (DESIGN section 7, "Do no harm"; research/nest_paper.md 4.6,
hysteresis).  After a lost node the full world often has no legal layout; then fewer nodes are tried.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from nest_megatron import rules
from nest_megatron.cost.memory import memory_limits
from nest_megatron.cost.overlap import interval_ends
from nest_megatron.errors import Factor, NoPlanError
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.planner.floors import StateFloor, work_floors
from nest_megatron.planner.freedom import CHECKPOINT_AXES
from nest_megatron.planner.search import SearchResult, search
from nest_megatron.planner.space import enumerate_space
from nest_megatron.rules import Violation
from nest_megatron.rules.base import FIELDS, data_parallel, expert_data_parallel
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.plan import Certificate, Outcome, Prediction


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The job on one number of GPUs, and the cluster of that size."""

    job: TrainJob
    cluster: Cluster


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What was found on one number of GPUs.

    Args:
        step_time_s: of the best new layout there; None when there is none or it is proven slower.
        reason: why there is no time.
    """

    num_gpus: int
    step_time_s: float | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The old layout after the change: on the largest world where it runs, else on the largest world.

    Args:
        prediction: None where it is illegal; ``violations`` say why.
    """

    site: Site
    layout: Layout
    prediction: Prediction | None
    violations: tuple[Violation, ...]

    @property
    def runs(self) -> bool:
        """It is legal and fits."""
        return self.prediction is not None and self.prediction.feasible


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    site: Site
    result: SearchResult
    step_time_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The layout to train on with, and what it was weighed against.

    Args:
        site: where ``layout`` runs.
        best: the selected new layout of the fastest world; None when nothing was searched or found.
        ratio: time(new layout) / time(carried), lowest and highest over the overlap intervals; None when one
            of them is missing.
        result: the search that ``best`` is from.
    """

    site: Site
    layout: Layout
    outcome: Outcome
    carried: Carried
    best: Layout | None
    ratio: tuple[float, float] | None
    result: SearchResult | None
    worlds: tuple[World, ...]


def bound_by_checkpoint(job: TrainJob, old: Layout) -> TrainJob:
    """Return ``job`` as it goes on from a checkpoint that ``old`` wrote.

    A format that does not reshard binds tp, pp, vpp, ep, etp and the split of the layers (DESIGN section 8).
    """
    pins, origins = dict(job.pins), dict(job.origins)
    for axis in bound_axes(job):
        pins[axis] = getattr(old, FIELDS[axis])
        origins[axis] = "checkpoint of the plan, whose format does not reshard"
    bounds = {axis: values for axis, values in job.bounds.items() if axis not in pins}
    # A pin of the layers reads the user's layout, and near ties go to the fewest changes from it.
    return dataclasses.replace(job, pins=pins, bounds=bounds, origins=origins, user_layout=old)


def bound_axes(job: TrainJob) -> tuple[str, ...]:
    """Return the axes that the checkpoint of ``job`` binds when training goes on."""
    return () if job.checkpoint.reshards else CHECKPOINT_AXES


def replan(
    site_of: Callable[[int], Site],
    worlds: Sequence[int],
    old: Layout,
    *,
    minimum_gain: float,
    keep_layout: bool = False,
) -> Replanned:
    """Return the layout to go on with.

    Args:
        site_of: number of GPUs -> job, bound by its checkpoint, and cluster.
        worlds: numbers of GPUs that may be used, largest first.
        minimum_gain: share of the old layout's step time that a new one must save at every end.
        keep_layout: search nothing: the old layout goes on where it can.

    Raises:
        NoPlanError: no world has a layout that is legal and fits, or the old layout cannot be kept.
    """
    old_side = _carried(site_of, worlds, old)
    if keep_layout and not old_side.runs:
        raise _cannot_keep(old_side)
    smallest = old_side.site.job.num_gpus if old_side.runs else 1
    tried: tuple[World, ...] = ()
    found: _Found | None = None
    if not keep_layout:
        wanted = [n for n in worlds if n >= smallest]
        tried, found = _search_worlds(site_of, wanted, wide=False)
        if found is None and not old_side.runs:
            tried, found = _search_worlds(site_of, wanted, wide=True)
        if found is None and not old_side.runs:
            first = site_of(worlds[0])
            search(first.job, first.cluster)  # raises, and says what is nearest
    site, layout, outcome, ratio = _weigh(old_side, found, minimum_gain)
    return Replanned(
        site=site,
        layout=layout,
        outcome=outcome,
        carried=old_side,
        best=found.result.best if found else None,
        ratio=ratio,
        result=found.result if found else None,
        worlds=tried,
    )


def _carried(site_of: Callable[[int], Site], worlds: Sequence[int], old: Layout) -> Carried:
    """Return the old layout on the largest world where it runs; only its data parallel size changes."""
    first: Carried | None = None
    for num_gpus in worlds:
        site = site_of(num_gpus)
        layout = dataclasses.replace(
            old, dp=data_parallel(site.job, old), edp=expert_data_parallel(site.job, old)
        )
        if first is not None and rules.first_code(site.job, layout) is not None:
            continue  # only the largest world's violations are told
        violations = rules.check(site.job, layout)
        prediction = None if violations else Evaluator(site.job, site.cluster).predict([layout])[0]
        here = Carried(site=site, layout=layout, prediction=prediction, violations=violations)
        if here.runs:
            return here
        first = first or here
    assert first is not None
    return first


def _cannot_keep(old: Carried) -> NoPlanError:
    factors = [Factor("layout", old.layout.describe(), "plan"), Factor("num_gpus", old.site.job.num_gpus)]
    reason = old.violations[0].message if old.violations else "it does not fit in memory"
    return NoPlanError(
        "NEST-P03",
        f"the layout of the plan cannot be kept: {reason}",
        factors=factors,
        nearest=["replan without --keep-layout"],
    )


def _search_worlds(
    site_of: Callable[[int], Site], worlds: Sequence[int], *, wide: bool
) -> tuple[tuple[World, ...], _Found | None]:
    """Return what every world holds, and the fastest; worlds whose work alone is slower are not searched.

    Args:
        wide: also worlds that have layouts of extreme degrees only (``space.enumerate_space``).
    """
    tried: list[World] = []
    best: _Found | None = None
    for num_gpus in worlds:
        site = site_of(num_gpus)
        best_s = best.step_time_s if best else math.inf
        floor_s = _floor_s(site, needed=best is not None, wide=wide)
        if floor_s >= best_s:
            reason = "no layout" if math.isinf(floor_s) else "slower: its work alone takes longer"
            tried.append(World(num_gpus=num_gpus, step_time_s=None, reason=reason))
            continue
        try:
            result = search(site.job, site.cluster)
        except NoPlanError as error:
            tried.append(World(num_gpus=num_gpus, step_time_s=None, reason=error.code))
            continue
        (step_time_s,) = Evaluator(site.job, site.cluster).step_times_s([result.best])
        tried.append(World(num_gpus=num_gpus, step_time_s=step_time_s))
        if step_time_s < best_s:
            best = _Found(site, result, step_time_s)
    return tuple(tried), best


def _floor_s(site: Site, *, needed: bool, wide: bool) -> float:
    """Return a step time that no layout of the world can beat; infinite when no layout is legal and can fit.

    Args:
        needed: False asks only whether there is a layout.
    """
    job = site.job
    runs_below = memory_limits(job, site.cluster.accelerator.visible_bytes)[1]
    state = StateFloor(job, runs_below)
    space = enumerate_space(job, state=state)
    if wide and not len(space):
        space = enumerate_space(job, state=state, wide=True)
    if not len(space):
        return math.inf
    if not needed:
        return 0.0
    evaluator = Evaluator(job, site.cluster)
    interleaves = np.zeros(len(space.nodes), dtype=np.bool_)
    interleaves[space.node[space.vpp > 1]] = True
    floor_s = work_floors(evaluator.cost, space.nodes, interleaves).min()
    factor = 1.0 if job.step_scale is None else job.step_scale.factor
    return factor * float(evaluator.cost.step_time_s(floor_s))


def _weigh(
    old: Carried, found: _Found | None, minimum_gain: float
) -> tuple[Site, Layout, Outcome, tuple[float, float] | None]:
    """Return what goes on: the old layout, unless it cannot run or the new one surely gains."""
    if found is None:
        return old.site, old.layout, "kept", None
    if not old.runs:
        return found.site, found.result.best, "repaired", None
    ratio = (1.0, 1.0)
    for layout in (found.result.best, found.result.fastest):
        if (found.site.job.num_gpus, layout) == (old.site.job.num_gpus, old.layout):
            continue
        ratio = _paired(found.site, layout, old)
        if ratio[1] <= 1.0 - minimum_gain:
            return found.site, layout, "rewritten", ratio
    return old.site, old.layout, "kept", ratio


def _paired(site: Site, layout: Layout, old: Carried) -> tuple[float, float]:
    """Return the lowest and highest time(layout) / time(old layout) at the ends of overlap."""
    new_jobs, old_jobs = (site.job, *interval_ends(site.job)), (old.site.job, *interval_ends(old.site.job))
    ratios = []
    for new_job, old_job in zip(new_jobs, old_jobs, strict=True):
        (new_s,) = Evaluator(new_job, site.cluster).step_times_s([layout])
        (old_s,) = Evaluator(old_job, old.site.cluster).step_times_s([old.layout])
        ratios.append(new_s / old_s)
    return min(ratios), max(ratios)


def only_layout(step_time_s: float) -> Certificate:
    """Return the certificate of a space of one layout: nothing was searched."""
    return Certificate(
        search_s=0.0,
        configurations=1,
        evaluated=1,
        pruned={},
        lower_bound_s=step_time_s,
        objective_s=step_time_s,
        gap=0.0,
    )


def headline(found: Replanned, minimum_gain: float) -> str:
    """Return the first line of the report: what goes on, on how many GPUs, and why."""
    where = f"on {found.site.job.num_gpus} GPUs"
    old = found.carried
    if found.outcome == "repaired":
        why = "is illegal" if old.violations else "does not fit in memory"
        return f"Another layout {where}: the old one {why} there"
    if found.outcome == "rewritten":
        return f"Another layout {where}: {_span(found.ratio)} of the old one's step time"
    if found.result is None:
        return f"The old layout stays {where}: nothing else was tried"
    if found.ratio in (None, (1.0, 1.0)):
        return f"The old layout stays {where}: the search found nothing faster"
    return (
        f"The old layout stays {where}: the fastest found takes {_span(found.ratio)} of its time, "
        f"not surely {minimum_gain:.0%} less"
    )


def _span(ratio: tuple[float, float] | None) -> str:
    low, high = (f"{share:.1%}" for share in ratio or (1.0, 1.0))
    return low if low == high else f"{low} to {high}"
