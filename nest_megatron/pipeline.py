"""The only place that calls the rooms in order: read, load, judge, search, compare, write."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig

from nest_megatron import rules
from nest_megatron.calibration.store import apply, load_store
from nest_megatron.cluster.load import load_cluster
from nest_megatron.dialects import registry
from nest_megatron.dialects.base import Dialect
from nest_megatron.errors import EXIT_BAD_INPUT, EXIT_NO_PLAN, EXIT_OK, BadInputError, NestError, PlannerFault
from nest_megatron.planner.advise import Repair, advise
from nest_megatron.planner.change import parse_value
from nest_megatron.planner.environment import environment
from nest_megatron.planner.evaluate import Evaluator, paired_ratio
from nest_megatron.planner.explain import Base, Explanation, explain
from nest_megatron.planner.freedom import apply_settings, unkept
from nest_megatron.planner.search import SearchResult, search
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import COMMAND_LINE, TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.plan import Candidate, Outcome, Plan, Prediction, UserSide
from nest_megatron.specs.settings import PlanSettings

#: The best plan must beat the user's by this share at both ends of every overlap interval (DESIGN section 7).
MINIMUM_GAIN = 0.03


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


@dataclass(frozen=True, slots=True)
class _Inputs:
    dialect: Dialect
    job: TrainJob
    cluster: Cluster
    source: str
    calibration: str


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
    return _plan(_read(config, overrides, settings, source), config, settings)


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
    inputs = _read(config, overrides, settings, source)
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
        provenance=_provenance(inputs, settings),
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
    inputs = _read(config, overrides, settings, source)
    reference = inputs.job.user_layout if base == "user" else _plan(inputs, config, settings).layout
    return replace(
        explain(inputs.job, inputs.cluster, reference, asked, base=base),
        assumptions=(*inputs.job.assumptions, *inputs.cluster.assumptions),
        provenance=_provenance(inputs, settings),
    )


def exit_code_of(error: NestError) -> int:
    """Return the process exit code for ``error``: 2 for bad input, 1 for everything else."""
    return EXIT_BAD_INPUT if isinstance(error, BadInputError) else EXIT_NO_PLAN


def _read(config: DictConfig, overrides: Sequence[str], settings: PlanSettings, source: str) -> _Inputs:
    dialect = registry.by_name(settings.dialect) if settings.dialect else registry.detect(config)
    job = apply_settings(dialect.read(config, overrides=overrides, settings=settings), settings)
    # Fewer GPUs than one node is the cluster's own business; whole nodes use `gpus_per_node` of each.
    ranks_per_node = job.gpus_per_node if job.num_gpus >= job.gpus_per_node else None
    cluster = load_cluster(settings.cluster, num_gpus=job.num_gpus, ranks_per_node=ranks_per_node)
    calibration = "off"
    if settings.calibration:
        job, calibration = apply(job, cluster, load_store())
    return _Inputs(dialect, job, cluster, source, calibration)


def _user_side(inputs: _Inputs, evaluator: Evaluator) -> UserSide:
    """Return the user's layout with its violations, and its prediction when it is legal."""
    layout = inputs.job.user_layout
    violations = rules.check(inputs.job, layout)
    prediction = None if violations else evaluator.predict([layout])[0]
    return UserSide(
        layout=layout,
        prediction=prediction,
        violations=tuple(violation.to_dict() for violation in violations),
    )


def _plan(inputs: _Inputs, config: DictConfig, settings: PlanSettings) -> Plan:
    job, cluster = inputs.job, inputs.cluster
    evaluator = Evaluator(job, cluster)
    user = _user_side(inputs, evaluator)
    result = search(job, cluster, force=settings.force)
    layout, outcome, ratio = _do_no_harm(job, cluster, user, result)
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
        headline=_headline(outcome, ratio, prediction, user, result),
        ratio=ratio,
        rank_map={"strategy": "scheduler order", "order": layout.order, "nodes": list(cluster.nodes)},
        env=environment(layout, cluster),
        edits=edits,
        user=user,
        runner_ups=tuple(
            Candidate(layout=x, prediction=p)
            for x, p in zip(result.runner_ups, others, strict=True)
            if x != layout
        ),
        rejections=result.rejections,
        assumptions=(*job.assumptions, *cluster.assumptions, *_selection_notes(result)),
        provenance=_provenance(inputs, settings),
    )


def _do_no_harm(
    job: TrainJob, cluster: Cluster, user: UserSide, result: SearchResult
) -> tuple[Layout, Outcome, tuple[float, float] | None]:
    """Return the layout to launch: the user's own unless another one surely gains (DESIGN section 7).

    The selected layout comes first; where only the fastest one gains enough, that one is taken.  A layout
    that breaks a pin is never kept.
    """
    if user.prediction is None:
        return result.best, "repaired", None
    if unkept(job, user.layout):
        return result.best, "rewritten", paired_ratio(job, cluster, result.best, user.layout)
    ratio = (1.0, 1.0)
    for layout in (result.best, result.fastest):
        if layout == user.layout:
            continue
        ratio = paired_ratio(job, cluster, layout, user.layout)
        if not user.prediction.feasible:
            return layout, "repaired", ratio
        if ratio[1] <= 1.0 - MINIMUM_GAIN:
            return layout, "rewritten", ratio
    return user.layout, "kept", ratio


def _headline(
    outcome: Outcome,
    ratio: tuple[float, float] | None,
    prediction: Prediction,
    user: UserSide,
    result: SearchResult,
) -> str:
    text = {
        "kept": "Your layout is kept",
        "rewritten": "Rewritten to your pins"
        if ratio and ratio[1] > 1 - MINIMUM_GAIN
        else "Rewritten to a faster layout",
        "repaired": "Repaired: your layout "
        + ("is illegal" if user.violations else "does not fit in memory"),
    }[outcome]
    if outcome == "kept" and ratio is not None and ratio != (1.0, 1.0):
        text += f": the fastest found takes {_span(ratio)} of its time, not surely {MINIMUM_GAIN:.0%} less"
    elif outcome == "kept":
        text += ": the search found nothing faster"
    elif outcome == "rewritten" and ratio is not None:
        text += f": {_span(ratio)} of your step time"
    if result.forced:
        return f"FORCED, does not fit in memory. {text}"
    if prediction.band == "TIGHT":
        return f"TIGHT on memory, out-of-memory is possible. {text}"
    return text


def _span(ratio: tuple[float, float]) -> str:
    low, high = (f"{share:.1%}" for share in ratio)
    return low if low == high else f"{low} to {high}"


def _selection_notes(result: SearchResult) -> tuple[str, ...]:
    notes = ["among layouts within 3 % of the fastest, more memory head-room wins, then fewer changes"]
    if result.tight:
        notes.append("no layout within the safe memory band comes within 10 % of the chosen one")
    return tuple(notes)


def _provenance(inputs: _Inputs, settings: PlanSettings) -> dict[str, Any]:
    job, cluster = inputs.job, inputs.cluster
    return {
        "nest_megatron": importlib.metadata.version("nest-megatron"),
        "source": inputs.source,
        "dialect": job.dialect,
        "framework": job.framework,
        "framework_version": job.framework_version,
        "megatron_core_version": job.megatron_core_version,
        "model": job.model.name,
        "num_gpus": job.num_gpus,
        "sequence_length": job.sequence_length,
        "recipe": job.recipe.name,
        "cluster": cluster.name,
        "cluster_source": cluster.source,
        "accelerator": cluster.accelerator.name,
        "pins": {axis: str(value) for axis, value in job.pins.items()},
        "force": settings.force,
        "calibration": inputs.calibration,
    }
