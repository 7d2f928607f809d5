"""Why not this layout: illegal, does not fit, slower and by which term, or equal and then what decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nest_megatron import rules
from nest_megatron.planner.advise import Repair, advise
from nest_megatron.planner.change import changed, differences, spelled
from nest_megatron.planner.domains import MAX_MICRO_BATCH, Domains
from nest_megatron.planner.evaluate import Evaluator, paired_ratio
from nest_megatron.planner.search import TIE, TIGHT_GAIN, changes
from nest_megatron.rules.base import FIELDS, Violation
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import AXES, Layout
from nest_megatron.specs.plan import Prediction
from nest_megatron.units import gib

Base = Literal["plan", "user"]
Answer = Literal["same", "illegal", "does not fit", "slower", "equal", "faster", "not comparable"]

#: Head-room below this share of the visible memory does not separate two layouts (planner.search).
HEADROOM_STEP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer to one question.

    Attributes:
        base: which layout was varied; ``reference`` is that layout, ``layout`` the one asked about.
        asked: the axes of the question, spelled; ``follows``: what had to change with them.
        violations: of ``layout``; its prediction is None when there are any.
        ratio: step time of ``layout`` over ``reference``, paired: (low, high) over the overlap interval.
        growth_s: term -> seconds more than in the reference, largest growth first.
        reasons: what decided, beyond the verdict itself.
        repair: what would make ``layout`` fit, when it does not.
    """

    base: Base
    asked: tuple[str, ...]
    follows: tuple[str, ...]
    answer: Answer
    reference: Layout
    reference_prediction: Prediction | None
    layout: Layout
    prediction: Prediction | None
    violations: tuple[dict[str, Any], ...]
    ratio: tuple[float, float] | None
    growth_s: dict[str, float]
    reasons: tuple[str, ...]
    repair: Repair | None
    assumptions: tuple[str, ...] = ()
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)


def explain(
    job: TrainJob, cluster: Cluster, reference: Layout, why: Mapping[str, Any], *, base: Base
) -> Explanation:
    """Return why the planner does not choose ``reference`` with the axes of ``why`` changed.

    Args:
        why: axis -> value as a layout holds it (``planner.change.parse_value``).
    """
    layout = changed(job, reference, why)
    evaluator = Evaluator(job, cluster)
    violations = rules.check(job, layout)
    prediction = None if violations else evaluator.predict([layout])[0]
    reference_legal = layout == reference or not rules.check(job, reference)
    against = evaluator.predict([reference])[0] if reference_legal and prediction else None
    ratio = paired_ratio(job, cluster, layout, reference) if prediction and against else None
    answer = _answer(layout, reference, violations, prediction, against)
    return Explanation(
        base=base,
        asked=tuple(spelled(layout, axis) for axis in why),
        follows=differences(job, reference, layout, besides=why),
        answer=answer,
        reference=reference,
        reference_prediction=against,
        layout=layout,
        prediction=prediction,
        violations=tuple(violation.to_dict() for violation in violations),
        ratio=ratio,
        growth_s=_growth(prediction, against),
        reasons=_reasons(job, cluster, answer, layout, reference, prediction, against, base),
        repair=advise(job, cluster, layout) if answer == "does not fit" else None,
    )


def _answer(
    layout: Layout,
    reference: Layout,
    violations: tuple[Violation, ...],
    prediction: Prediction | None,
    against: Prediction | None,
) -> Answer:
    if violations or prediction is None:
        return "illegal"
    if not prediction.feasible:
        return "does not fit"
    if layout == reference:
        return "same"
    if against is None:
        return "not comparable"
    ratio = prediction.step_time_s / against.step_time_s
    if ratio > 1.0 + TIE:
        return "slower"
    return "faster" if ratio < 1.0 - TIE else "equal"


def _growth(prediction: Prediction | None, against: Prediction | None) -> dict[str, float]:
    if prediction is None or against is None:
        return {}
    new, old = prediction.time_split, against.time_split
    grown = {term: new.get(term, 0.0) - old.get(term, 0.0) for term in {**old, **new}}
    return dict(sorted(grown.items(), key=lambda item: -item[1]))


def _reasons(
    job: TrainJob,
    cluster: Cluster,
    answer: Answer,
    layout: Layout,
    reference: Layout,
    prediction: Prediction | None,
    against: Prediction | None,
    base: Base,
) -> tuple[str, ...]:
    """Return what the planner weighs besides the time, in the order it does."""
    found = _not_free(job, layout, reference)
    if against is not None and not against.feasible:
        found.append(f"the {base} layout itself does not fit in memory")
    if base == "user" or answer in ("same", "illegal", "does not fit") or prediction is None:
        return tuple(found)
    found += _not_searched(job, layout)
    if against is None or answer == "slower":
        return tuple(found)
    if prediction.band == "TIGHT" and against.band == "FITS":
        found.append(
            f"it is TIGHT on memory; such a plan must gain more than {TIGHT_GAIN:.0%} over one that FITS"
        )
    more_bytes = prediction.peak_allocated_bytes - against.peak_allocated_bytes
    if more_bytes > HEADROOM_STEP * cluster.accelerator.visible_bytes:
        found.append(f"within {TIE:.0%} head-room decides: it needs {gib(more_bytes):.1f} GiB more")
    theirs, ours = changes(job.user_layout, layout), changes(job.user_layout, reference)
    if reference == job.user_layout:
        found.append(f"your own layout is kept unless another surely gains {TIE:.0%}")
    elif theirs > ours:
        found.append(f"it changes {theirs} axes of your layout, the plan {ours}")
    if answer == "equal" and prediction.step_time_s >= against.step_time_s:
        found.append("among equals the shorter predicted step wins")
    return tuple(found)


def _not_free(job: TrainJob, layout: Layout, reference: Layout) -> list[str]:
    """Say which axes the question moves although they are pinned, bound or not planned."""
    moved = [axis for axis in AXES if getattr(layout, FIELDS[axis]) != getattr(reference, FIELDS[axis])]
    if layout.etp == layout.tp and "etp" in moved:
        moved.remove("etp")
    found = [f"{axis} is pinned ({job.origin(axis)})" for axis in moved if axis in job.pins]
    for axis in moved:
        held = layout.recompute.granularity if axis == "recompute" else getattr(layout, FIELDS[axis])
        if axis in job.bounds and held not in job.bounds[axis]:
            allowed = ", ".join(str(value) for value in job.bounds[axis])
            found.append(f"{axis} may only be {allowed} ({job.origin(axis)})")
        if axis in job.not_planned:
            found.append(f"{axis} is not planned here: {job.not_planned[axis]}")
    return found


def _not_searched(job: TrainJob, layout: Layout) -> list[str]:
    """Say where the layout lies outside of the space that the search enumerates."""
    domains = Domains(job)
    found = []
    if layout.micro_batch > MAX_MICRO_BATCH:
        found.append(f"micro-batches above {MAX_MICRO_BATCH} are not searched")
    if not domains.searches_split(layout.num_layers_per_chunk, layout.pp, layout.vpp):
        found.append(
            "this split of the layers is not searched: interleaved chunks differ by more, or other forms"
        )
    natural = Domains(dataclasses.replace(job, pins={}, bounds={}))
    for axis, values in (("tp", natural.tp()), ("cp", natural.cp(layout.tp))):
        if getattr(layout, axis) > max(values, default=1):
            found.append(f"{axis} this large is searched only when nothing else fits")
    chosen = layout.recompute
    if chosen.granularity == "selective" and chosen not in domains.selective():
        found.append("selective recomputation of these modules is not searched")
    equal = len(set(layout.num_layers_per_chunk)) == 1
    if chosen.method == "uniform" and chosen.num_layers > 1 and not equal:
        found.append("uniform recomputation of several layers at once is searched with equal chunks")
    if layout.sharding not in domains.shardings():
        found.append(f"sharding {layout.sharding} is not searched")
    return found
