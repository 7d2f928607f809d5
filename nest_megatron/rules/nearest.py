"""Nearest legal choices: change one axis at a time and keep what repairs a broken rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

from nest_megatron.rules.base import FIELDS, Rule, data_parallel, expert_data_parallel
from nest_megatron.rules.versions import VersionFacts, facts_for
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import AXES, Layout, Order, Overlap, Recompute, Sharding

#: Choices named per violation.
COUNT = 3

#: A switch is a smaller change than halving a degree.
_SWITCH = math.log(2) / 2
_ORDERS: tuple[Order, ...] = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
_SHARDINGS: tuple[Sharding, ...] = ("none", "optim", "optim_grads", "optim_grads_params")
_OVERLAPS = tuple(Overlap.__dataclass_fields__)


def depth(rule: Rule) -> int:
    """Return the position in AXES of the last axis the rule reads, 0 when it reads none."""
    return max((AXES.index(axis) for axis in rule.axes), default=0)


def nearest(rule: Rule, job: TrainJob, layout: Layout, rules: tuple[Rule, ...]) -> tuple[str, ...]:
    """Return up to COUNT changes, each of one axis the rule reads, nearest first.

    A change counts when the rule holds after it and no rule of the same or lower depth breaks by it; changes
    that break no rule at all come first, then the smaller ones (logarithmic distance of degrees).
    """
    facts = facts_for(job.megatron_core_version)
    restated = _with_derived(job, layout)
    if restated != layout and rule.function(job, restated, facts) is None:
        return (f"dp={restated.dp} edp={restated.edp}",)
    broken = {r.code for r in rules if r.function(job, layout, facts)}
    found: list[tuple[int, float, str]] = []
    for axis in AXES:
        if axis not in rule.axes:
            continue
        for text, distance, changed in alternatives(job, layout, axis):
            new = _newly_broken(rule, job, changed, facts, rules, broken)
            if new is not None:
                found.append((min(new, 1), distance, text))
    return tuple(text for _, _, text in sorted(found, key=lambda f: f[:2])[:COUNT])


def _newly_broken(
    rule: Rule, job: TrainJob, layout: Layout, facts: VersionFacts, rules: tuple[Rule, ...], before: set[str]
) -> int | None:
    """Return how many rules above ``rule`` the change breaks, None when it does not repair ``rule``."""
    if rule.function(job, layout, facts) is not None:
        return None
    count = 0
    for other in rules:
        if other.code not in before and other.function(job, layout, facts) is not None:
            if depth(other) <= depth(rule):
                return None
            count += 1
    return count


def alternatives(job: TrainJob, layout: Layout, axis: str) -> Iterator[tuple[str, float, Layout]]:
    """Yield (text, distance, layout) for every other value in the natural domain of ``axis``.

    What follows from the axis follows along: dp and edp, the layer counts when pp or vpp change.  What
    Megatron itself would change is changed and named: sequence parallelism ends with tp = 1, p2p overlap with
    vpp = 1, and etp is tied to tp in dialects without it.
    """
    old = getattr(layout, FIELDS[axis])
    for value, text, distance in _domain(job, layout, axis):
        if value != old:
            companions, changed = _changed(job, layout, axis, value)
            yield text + companions, distance, changed


def _changed(job: TrainJob, layout: Layout, axis: str, value: Any) -> tuple[str, Layout]:
    """Return the companions of a change, as text, and the layout with everything changed."""
    changes: dict[str, Any] = {FIELDS[axis]: value}
    companions = ""
    if axis == "sharding":
        changes = {"sharding": value[0], "num_optimizer_instances": value[1]}
    tied = job.model.moe is None or not job.capabilities.expert_tensor_parallel
    if axis == "tp" and layout.etp == layout.tp and tied:
        changes["etp"] = value
        companions += f" etp={value}" if job.model.moe else ""
    if axis == "tp" and value == 1 and layout.sequence_parallel:
        changes["sequence_parallel"] = False
        companions += " sequence_parallel=false"
    if axis == "vpp" and value == 1 and layout.overlap.p2p:
        changes["overlap"] = replace(layout.overlap, p2p=False)
        companions += " overlap.p2p=false"
    changed = replace(layout, **changes)
    if axis in ("pp", "vpp"):
        shapes = layer_shapes(job.model.num_layers, changed.pp, changed.vpp)
        changed = replace(changed, num_layers_per_chunk=shapes[0] if shapes else ())
    return companions, _with_derived(job, changed)


def _with_derived(job: TrainJob, layout: Layout) -> Layout:
    """Return ``layout`` with dp and edp as the world leaves them, as they were where it does not divide."""
    if min(layout.tp, layout.pp, layout.cp, layout.ep, layout.etp) < 1:
        return layout
    dp, edp = data_parallel(job, layout), expert_data_parallel(job, layout)
    return replace(layout, dp=dp or layout.dp, edp=edp or layout.edp)


def _domain(job: TrainJob, layout: Layout, axis: str) -> Iterator[tuple[Any, str, float]]:
    """Yield (value, text, distance) over the natural domain of one axis."""
    match axis:
        case "sequence_parallel":
            for flag in (False, True):
                yield flag, f"sequence_parallel={str(flag).lower()}", _SWITCH
        case "order":
            for order in _ORDERS:
                yield order, f"order={order}", _SWITCH
        case "sharding":
            yield from _sharding_domain(job, layout)
        case "overlap":
            for name in _OVERLAPS:
                flag = not getattr(layout.overlap, name)
                text = f"overlap.{name}={str(flag).lower()}"
                yield replace(layout.overlap, **{name: flag}), text, _SWITCH
        case "recompute":
            yield from _recompute_domain(job, layout)
        case "layers":
            for shape in layer_shapes(job.model.num_layers, layout.pp, layout.vpp):
                yield shape, f"layers={shape_text(shape)}", math.log(1 + max(shape) - min(shape))
        case _:
            old = max(1, getattr(layout, axis))
            for value in _degree_domain(job, layout, axis):
                yield value, f"{axis}={value}", abs(math.log(value / old))


def _degree_domain(job: TrainJob, layout: Layout, axis: str) -> tuple[int, ...]:
    """Return the divisors a degree is chosen from."""
    if axis == "micro_batch":
        return _divisors(job.global_batch)
    if axis == "ep":
        return _divisors(job.model.moe.num_experts if job.model.moe else 1)
    if axis == "vpp":
        return tuple(range(1, job.model.num_layers // max(1, layout.pp) + 1))
    if axis == "pp":
        return tuple(d for d in _divisors(job.num_gpus) if d <= job.model.num_layers)
    return _divisors(job.num_gpus)


def _sharding_domain(job: TrainJob, layout: Layout) -> Iterator[tuple[Any, str, float]]:
    """Yield (sharding, number of optimizer instances) pairs: one of the two changes."""
    for sharding in _SHARDINGS:
        if sharding != layout.sharding:
            far = abs(_SHARDINGS.index(sharding) - _SHARDINGS.index(layout.sharding)) * _SWITCH
            yield (sharding, layout.num_optimizer_instances), f"sharding={sharding}", far
    old = max(1, layout.num_optimizer_instances)
    for instances in _divisors(job.num_gpus):
        if instances != layout.num_optimizer_instances:
            text = f"num_optimizer_instances={instances}"
            yield (layout.sharding, instances), text, abs(math.log(instances / old))


def _recompute_domain(job: TrainJob, layout: Layout) -> Iterator[tuple[Recompute, str, float]]:
    """Yield other recomputations: fewer layers or modules of the same kind are nearer than another kind."""
    chosen = layout.recompute
    most = max(layout.num_layers_per_chunk, default=1)
    for method in ("uniform", "block"):
        for count in range(1, most + 1):
            far = abs(math.log(count / max(1, chosen.num_layers)))
            if chosen.granularity != "full" or chosen.method != method:
                far += 2 * _SWITCH
            value = Recompute(granularity="full", method=method, num_layers=count)
            yield value, f"recompute=full/{method}/{count}", far
    usable = tuple(m for m in chosen.modules if m in job.capabilities.recompute_modules)
    for modules in dict.fromkeys((usable, *((m,) for m in job.capabilities.recompute_modules))):
        kept = len(set(modules) & set(chosen.modules))
        far = _SWITCH * (1 if kept else 1.5) + (0 if chosen.granularity == "selective" else _SWITCH)
        text = f"recompute=selective:{'+'.join(modules)}"
        yield Recompute(granularity="selective", modules=modules), text, far
    yield Recompute(), "recompute=none", 3 * _SWITCH


@cache
def layer_shapes(num_layers: int, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """Return layer counts per chunk that hold ``num_layers``, in every split form, the evenest first."""
    pieces = pp * vpp
    if pieces < 1 or pieces > num_layers:
        return ()
    found: dict[tuple[int, ...], None] = {}
    base, rest = divmod(num_layers, pieces)
    if rest == 0:
        found[(base,) * pieces] = None
    for first, last in ((0, 1), (1, 0), (1, 1)):
        each, left = divmod(num_layers + first + last, pieces)
        if left == 0 and each > 1 and pieces > 1:
            found[(each - first, *(each,) * (pieces - 2), each - last)] = None
    if num_layers % vpp == 0 and pp > 1:
        for stage_counts in _uneven_ends(num_layers // vpp, pp):
            found[stage_counts * vpp] = None
    found[(base + 1,) * rest + (base,) * (pieces - rest)] = None
    return tuple(sorted(found, key=lambda shape: (max(shape) - min(shape), max(shape))))


def _uneven_ends(num_layers: int, pp: int) -> Iterator[tuple[int, ...]]:
    """Yield stage counts where the first, the last, or both ends differ from equal middle stages."""
    for middle in range(max(1, num_layers // pp - 1), -(-num_layers // pp) + 2):
        ends = num_layers - middle * (pp - 2)
        for first in {middle, ends - middle, ends // 2}:
            if first >= 1 and ends - first >= 1:
                yield (first, *(middle,) * (pp - 2), ends - first)


def shape_text(shape: tuple[int, ...]) -> str:
    """Return run lengths, for example ``4+8*7``."""
    runs = ((count, len(list(group))) for count, group in groupby(shape))
    return "+".join(str(count) if times == 1 else f"{count}*{times}" for count, times in runs)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)
