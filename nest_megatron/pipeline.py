"""The only place that calls the rooms in order: read, load, judge, search, compare, write."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from omegaconf import DictConfig

from nest_megatron import rules
from nest_megatron.cluster.allocation import allocate
from nest_megatron.cluster.changes import Changes, degrade, described
from nest_megatron.cluster.load import resize
from nest_megatron.errors import EXIT_BAD_INPUT, EXIT_NO_PLAN, EXIT_OK, BadInputError, NestError, PlannerFault
from nest_megatron.inputs import Inputs, calibrated, load_for, provenance_of, read_inputs, read_job
from nest_megatron.planner.advise import Repair, advise
from nest_megatron.planner.change import parse_value, spelled
from nest_megatron.planner.environment import environment
from nest_megatron.planner.evaluate import Evaluator, paired_ratio
from nest_megatron.planner.explain import Base, Explanation, explain
from nest_megatron.planner.freedom import unkept
from nest_megatron.planner.headline import (
    MINIMUM_GAIN,
    map_gain,
    measured,
    plan_headline,
    selection_notes,
)
from nest_megatron.planner.rankmap import rank_map
from nest_megatron.planner.replan import (
    Site,
    World,
    bound_axes,
    bound_by_checkpoint,
    headline,
    only_layout,
    replan,
)
from nest_megatron.planner.request import PlanRequest, after, check_same_job
from nest_megatron.planner.robust import paired_measure, robust_choice, robust_report
from nest_megatron.planner.search import SearchResult, search
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import COMMAND_LINE, TrainJob
from nest_megatron.specs.layout import Layout, Order
from nest_megatron.specs.plan import Candidate, Outcome, Plan, UserSide
from nest_megatron.specs.settings import PlanSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Verdict on the user's own layout; ``plan`` and ``failure`` say what the planner would do instead.

    Args:
        repair: the smallest changes that make the user's layout fit, when it is legal and does not.
        assumptions, provenance: as in a plan; here too because there may be no plan.
    """

    user: UserSide
    plan: Plan | None
    failure: NestError | None
    exit_code: int
    repair: Repair | None = None
    assumptions: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """A plan for a changed cluster, and what it was weighed against.

    Args:
        plan: ``plan.user`` is the old layout after the change, ``plan.ratio`` the new layout's time over its.
        old: layout and prediction as the old plan says.
        changes: what changed, one sentence each.
        bound: axes that the checkpoint binds, with their values; empty where its format reshards.
        worlds: numbers of GPUs that were searched.
        seconds: of the whole of it.
    """

    plan: Plan
    old: Candidate
    changes: tuple[str, ...]
    bound: dict[str, str]
    worlds: tuple[World, ...]
    seconds: float


def plan_config(
    config: DictConfig,
    *,
    overrides: Sequence[str] = (),
    settings: PlanSettings | None = None,
    source: str = "",
) -> Plan:
    """Plan the job that ``config`` describes.

    Args:
        overrides: command-line ``key=value`` strings already applied to ``config``; they pin their axes.
        source: file or application the configuration came from, for messages.

    Raises:
        BadInputError: configuration, cluster or settings cannot be read.
        NoPlanError: no layout is legal and fits.
        PlannerFault: the plan breaks a rule (our defect; never launched).
    """
    settings = settings or PlanSettings()
    return _plan(read_inputs(config, overrides, settings, source), config, settings)


def check_config(
    config: DictConfig,
    *,
    overrides: Sequence[str] = (),
    settings: PlanSettings | None = None,
    source: str = "",
) -> Check:
    """Judge the layout that ``config`` already has, and compare it with the best one.

    Raises:
        BadInputError: configuration, cluster or settings cannot be read.
    """
    settings = settings or PlanSettings()
    inputs = read_inputs(config, overrides, settings, source)
    plan: Plan | None = None
    failure: NestError | None = None
    try:
        plan = _plan(inputs, config, settings)
    except PlannerFault:
        raise
    except NestError as error:
        failure = error
    user = plan.user if plan is not None else _user_side(inputs, Evaluator(inputs.job, inputs.cluster))
    runs = user.prediction is not None and user.prediction.feasible
    return Check(
        user=user,
        plan=plan,
        failure=failure,
        exit_code=EXIT_OK if runs else EXIT_NO_PLAN,
        repair=advise(inputs.job, inputs.cluster, user.layout) if user.prediction and not runs else None,
        assumptions=(*inputs.job.assumptions, *inputs.cluster.assumptions),
        provenance=provenance_of(inputs, settings),
    )


def explain_config(
    config: DictConfig,
    *,
    why: Mapping[str, Any],
    base: Base = "plan",
    overrides: Sequence[str] = (),
    settings: PlanSettings | None = None,
    source: str = "",
) -> Explanation:
    """Answer why the plan is not another layout: its own, or the user's, with some axes changed.

    Args:
        why: axis -> value in the grammar of the overrides, for example ``{"tp": 4}``.
        base: which layout is varied and compared with.

    Raises:
        BadInputError: configuration, cluster, settings or question cannot be read.
        NoPlanError: there is no plan to vary.
    """
    settings = settings or PlanSettings()
    asked = {axis: parse_value(axis, value, origin=COMMAND_LINE) for axis, value in why.items()}
    inputs = read_inputs(config, overrides, settings, source)
    reference = inputs.job.user_layout if base == "user" else _plan(inputs, config, settings).layout
    return replace(
        explain(inputs.job, inputs.cluster, reference, asked, base=base),
        assumptions=(*inputs.job.assumptions, *inputs.cluster.assumptions),
        provenance=provenance_of(inputs, settings),
    )


def replan_config(
    config: DictConfig,
    old: Plan,
    changes: Changes,
    *,
    request: PlanRequest,
    source: str = "",
    minimum_gain: float = MINIMUM_GAIN,
    keep_layout: bool = False,
) -> Replan:
    """Plan the job of ``old`` again on a changed cluster.

    Args:
        config: the configuration that ``old`` was made from, with the overrides of ``request`` applied.
        request: how ``old`` was asked for.
        minimum_gain: share of step time that another layout must save before the old one is given up.
        keep_layout: recompute the rank map only.

    Raises:
        BadInputError: the configuration is of another job, or a change cannot be used.
        NoPlanError: no layout is legal and fits, or the old one cannot be kept.
        PlannerFault: the plan breaks a rule.
    """
    started = time.perf_counter()
    dialect, job = read_job(config, request.overrides, request.settings)
    check_same_job(job, old, source)
    request, worlds = after(request, changes, job)
    settings = request.settings
    largest = replace(job, num_gpus=worlds[0])
    cluster = load_for(largest, settings, worlds[0] if settings.nodelist is None else None)
    allocated = allocate(cluster, nodelist=settings.nodelist, topology=settings.topology, num_gpus=worlds[0])
    changed = degrade(allocated, request.degraded)
    calibration = "off"

    @cache
    def site_of(num_gpus: int) -> Site:
        nonlocal calibration
        sized = resize(changed, num_gpus)
        here, calibration = calibrated(replace(job, num_gpus=num_gpus), sized, settings)
        return Site(bound_by_checkpoint(here, old.layout), sized)

    found = replan(site_of, worlds, old.layout, minimum_gain=minimum_gain, keep_layout=keep_layout)
    site, carried = found.site, found.carried
    orders = () if found.outcome == "kept" else _free_orders(site.job)
    placed = rank_map(site.job, site.cluster, found.layout, orders=orders)
    layout = replace(found.layout, order=placed.order)
    broken = rules.check(site.job, layout)
    if broken:
        raise PlannerFault("NEST-X02", f"the planned layout is illegal: {broken[0].render()}")
    runner_ups = found.result.runner_ups if found.result else ()
    prediction, *others = Evaluator(site.job, site.cluster).predict([layout, *runner_ups])
    inputs = Inputs(dialect, site.job, site.cluster, source, calibration, request.to_plain())
    plan = Plan(
        layout=layout,
        prediction=prediction,
        certificate=found.result.certificate if found.result else only_layout(prediction.step_time_s),
        outcome=found.outcome,
        headline=headline(found, minimum_gain) + map_gain(placed),
        ratio=found.ratio,
        rank_map=placed,
        env=environment(layout, site.cluster),
        # The configuration still asks for its own layout, whatever the old plan made of it.
        edits=dialect.write(config, replace(site.job, user_layout=job.user_layout), layout),
        user=UserSide(
            layout=carried.layout,
            prediction=carried.prediction,
            violations=tuple(violation.to_dict() for violation in carried.violations),
        ),
        runner_ups=tuple(
            Candidate(layout=x, prediction=p) for x, p in zip(runner_ups, others, strict=True) if x != layout
        ),
        rejections=found.result.rejections if found.result else {},
        assumptions=(*site.job.assumptions, *site.cluster.assumptions, *_world_notes(job, site, settings)),
        provenance=provenance_of(inputs, settings),
    )
    return Replan(
        plan=plan,
        old=Candidate(layout=old.layout, prediction=old.prediction),
        changes=described(changes),
        bound={axis: spelled(old.layout, axis) for axis in bound_axes(site.job)},
        worlds=found.worlds,
        seconds=time.perf_counter() - started,
    )


def _world_notes(job: TrainJob, site: Site, settings: PlanSettings) -> tuple[str, ...]:
    """Return what the user must know about the number of nodes, which no plan edits, and about scenarios."""
    notes = []
    if site.job.num_gpus != job.num_gpus:
        notes.append(
            f"the configuration asks for {job.num_gpus} GPUs: start the job on {site.job.num_gpus}, "
            f"{site.cluster.num_nodes} nodes"
        )
        if site.cluster.nodes:
            notes.append("where nodes are left over, the first in name order are used")
    if settings.robust is not None:
        notes.append(f"the old plan was robust ({settings.robust}): now the network as it is was planned for")
    return tuple(notes)


def exit_code_of(error: NestError) -> int:
    """Return the process exit code for ``error``: 2 for bad input, 1 for everything else."""
    return EXIT_BAD_INPUT if isinstance(error, BadInputError) else EXIT_NO_PLAN


def _user_side(inputs: Inputs, evaluator: Evaluator) -> UserSide:
    """Return the user's layout with its violations, and its prediction when it is legal."""
    layout = inputs.job.user_layout
    violations = rules.check(inputs.job, layout)
    prediction = None if violations else evaluator.predict([layout])[0]
    return UserSide(
        layout=layout,
        prediction=prediction,
        violations=tuple(violation.to_dict() for violation in violations),
    )


def _plan(inputs: Inputs, config: DictConfig, settings: PlanSettings) -> Plan:
    job, cluster = inputs.job, inputs.cluster
    evaluator = Evaluator(job, cluster)
    user = _user_side(inputs, evaluator)
    result = search(job, cluster, force=settings.force, budget=settings.budget)
    nominal, choice = result.best, None
    if settings.robust is not None:
        choice = robust_choice(job, cluster, result, settings.robust)
        result = replace(result, best=choice.layout, fastest=choice.layout)
    layout, outcome, ratio = _do_no_harm(job, cluster, user, result, settings)
    # A robust plan has its rank order from the scenarios; a map is priced on the network as it is.
    fixed_order = outcome == "kept" or choice is not None
    placed = rank_map(job, cluster, layout, orders=() if fixed_order else _free_orders(job))
    layout = replace(layout, order=placed.order)
    broken = rules.check(job, layout)
    if broken:
        raise PlannerFault("NEST-X02", f"the planned layout is illegal: {broken[0].render()}")
    prediction, *others = evaluator.predict([layout, *result.runner_ups])
    edits = {} if outcome == "kept" else inputs.dialect.write(config, job, layout)
    return Plan(
        layout=layout,
        prediction=prediction,
        certificate=result.certificate,
        outcome=outcome,
        headline=plan_headline(outcome, ratio, prediction, user, result)
        + measured(settings, cluster)
        + map_gain(placed),
        ratio=ratio,
        rank_map=placed,
        env=environment(layout, cluster),
        edits=edits,
        user=user,
        runner_ups=tuple(
            Candidate(layout=x, prediction=p)
            for x, p in zip(result.runner_ups, others, strict=True)
            if x != layout
        ),
        rejections=result.rejections,
        assumptions=(*job.assumptions, *cluster.assumptions, *selection_notes(result, settings)),
        provenance=provenance_of(inputs, settings),
        robust=robust_report(job, cluster, layout, nominal, choice) if choice else None,
    )


def _do_no_harm(
    job: TrainJob, cluster: Cluster, user: UserSide, result: SearchResult, settings: PlanSettings
) -> tuple[Layout, Outcome, tuple[float, float] | None]:
    """Return the layout to launch: the user's own unless another one surely gains (DESIGN section 7).

    The selected layout comes first; where only the fastest one gains enough, that one is taken.  A layout
    that breaks a pin is never kept.  A robust plan is compared in its own measure.
    """

    def ratio_to_user(layout: Layout) -> tuple[float, float]:
        if settings.robust is None:
            return paired_ratio(job, cluster, layout, user.layout)
        return paired_measure(job, cluster, layout, user.layout, settings.robust)

    if user.prediction is None:
        return result.best, "repaired", None
    if unkept(job, user.layout):
        return result.best, "rewritten", ratio_to_user(result.best)
    ratio = (1.0, 1.0)
    for layout in (result.best, result.fastest):
        if layout == user.layout:
            continue
        ratio = ratio_to_user(layout)
        if not user.prediction.feasible:
            return layout, "repaired", ratio
        if ratio[1] <= 1.0 - MINIMUM_GAIN:
            return layout, "rewritten", ratio
    return user.layout, "kept", ratio


def _free_orders(job: TrainJob) -> tuple[Order, ...]:
    """Return the rank orders that the dialect can write and no pin forbids."""
    allowed = job.bounds.get("order", (job.pins["order"],) if "order" in job.pins else None)
    return tuple(order for order in job.capabilities.orders if allowed is None or order in allowed)
