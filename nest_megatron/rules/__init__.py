"""Legality: which layouts a job may run, why not, and what is nearest.

``check`` explains a layout, ``first_code`` judges it fast, ``rules_by_depth`` orders the rules for a search
that binds one axis after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nest_megatron.errors import Factor, PlannerFault
from nest_megatron.rules import (  # noqa: F401  (importing a family registers its rules, in this order)
    attention,
    batch,
    grid,
    layers,
    moe,
    overlap,
    recompute,
    sharding,
)
from nest_megatron.rules.base import Broken, Rule, Violation, registered
from nest_megatron.rules.nearest import nearest
from nest_megatron.rules.versions import VersionFacts, facts_for
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import AXES, Layout

__all__ = [
    "RULES",
    "Broken",
    "Rule",
    "VersionFacts",
    "Violation",
    "check",
    "facts_for",
    "first_code",
    "rules_by_depth",
]

_FAMILIES = ("grid", "batch", "layers", "attention", "moe", "sharding", "recompute", "overlap")

#: Every rule, family by family; ``grid.degrees`` is first, the others presume positive degrees.
RULES: tuple[Rule, ...] = tuple(sorted(registered(), key=lambda r: (_FAMILIES.index(r.family), r.code)))

_DEGREES = RULES[0]


def check(job: TrainJob, layout: Layout) -> tuple[Violation, ...]:
    """Return everything that is illegal about ``layout``, in rule order; empty when it is legal.

    A layout with a degree below 1 has that violation only: no other rule has a meaning then.

    Raises:
        BadInputError: the job's megatron-core version cannot be read.
    """
    facts = facts_for(job.megatron_core_version)
    broken = _DEGREES.function(job, layout, facts)
    if broken is not None:
        return (_violation(_DEGREES, broken, job, layout, RULES[:1]),)
    return tuple(
        _violation(rule, verdict, job, layout, RULES)
        for rule in RULES
        if (verdict := rule.function(job, layout, facts)) is not None
    )


def _violation(
    rule: Rule, broken: Broken, job: TrainJob, layout: Layout, rules: tuple[Rule, ...]
) -> Violation:
    return Violation(
        code=rule.code,
        rule=rule.name,
        message=broken.message,
        factors=broken.factors,
        nearest=nearest(rule, job, layout, rules),
        source=rule.source,
    )


def first_code(job: TrainJob, layout: Layout, rules: Iterable[Rule] = RULES) -> str | None:
    """Return the code of the first of ``rules`` that ``layout`` breaks, None when it keeps them all.

    Degrees must be positive; dp must be right as soon as tp, pp and cp are bound, edp with etp, ep and pp.

    Raises:
        BadInputError: the job's megatron-core version cannot be read.
    """
    facts = facts_for(job.megatron_core_version)
    for rule in rules:
        if rule.function(job, layout, facts) is not None:
            return rule.code
    return None


def rules_by_depth(axes: Sequence[str]) -> tuple[tuple[Rule, ...], ...]:
    """Return, for each position of ``axes``, the rules that become decidable when that axis is bound.

    Each rule appears exactly once: at the last of its axes.  Axes missing from ``axes`` count as bound from
    the start (frozen or pinned ones), so a rule that reads none of ``axes`` is decidable at position 0.

    Raises:
        PlannerFault: an unknown or repeated axis, or none at all.
    """
    if not axes or len(set(axes)) != len(axes) or not set(axes) <= set(AXES):
        raise PlannerFault(
            "NEST-RX02", "the binding order is no list of axes", factors=[Factor("axes", axes)]
        )
    position = {axis: i for i, axis in enumerate(axes)}
    levels: list[list[Rule]] = [[] for _ in axes]
    for rule in RULES:
        levels[max((position.get(axis, 0) for axis in rule.axes), default=0)].append(rule)
    return tuple(tuple(level) for level in levels)
