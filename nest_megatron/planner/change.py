"""Change some axes of a layout, let the others follow, and spell what changed.

``spelled`` and ``parse_value`` are inverse: what a report prints, ``explain --why`` accepts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.planner.domains import Domains
from nest_megatron.rules import RULES, facts_for, first_code
from nest_megatron.rules.base import FIELDS, common_sequence, data_parallel, expert_data_parallel
from nest_megatron.rules.layers import split_form
from nest_megatron.rules.nearest import layer_shapes, shape_text
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import AXES, Layout, Recompute

_INTEGERS = ("tp", "cp", "pp", "ep", "etp", "micro_batch", "vpp")
#: Largest degree or layer count that a question may name; beyond it lies a typing error.
MAX_DEGREE = 100_000
_NAMES: dict[str, tuple[str, ...]] = {
    "sharding": ("none", "optim", "optim_grads", "optim_grads_params"),
    "order": ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
}
_FORMS = {
    "sequence_parallel": "true or false",
    "layers": "a list of layer counts per chunk, or runs such as 4+8*7",
    "recompute": "none, full/uniform/N, full/block/N or selective:MODULE+MODULE",
    **dict.fromkeys(_INTEGERS, "a positive integer"),
    **{axis: f"one of {', '.join(names)}" for axis, names in _NAMES.items()},
}
#: What can forbid a number of chunks while the other axes stay.
_INTERLEAVING = tuple(rule for rule in RULES if "vpp" in rule.axes and "layers" not in rule.axes)
_METHODS = re.compile(r"full/(uniform|block)/([1-9]\d{0,4})")
_MODULES = re.compile(r"selective:(\w+(?:\+\w+)*)")
_RUN = re.compile(r"(\d{1,5})(?:\*(\d{1,5}))?")


def changed(job: TrainJob, layout: Layout, values: Mapping[str, Any]) -> Layout:
    """Return ``layout`` with the axes of ``values`` changed and everything that depends on them.

    dp and edp follow from the world.  Unless ``values`` names them: etp stays tied to tp, or falls to what
    divides it; sequence parallelism ends at tp = 1 and comes with the first tp > 1; vpp follows a list of
    layers, and falls to what is legal; the layers are dealt anew when pp or vpp change; recomputed layers are
    cut to a chunk; overlap flags keep their conditions.

    Args:
        values: axis -> value of the type the layout holds; ``overlap`` is not an axis to ask for.
    """
    new = dataclasses.replace(layout, **{FIELDS[axis]: value for axis, value in values.items()})
    if min(new.tp, new.pp, new.vpp, new.cp, new.ep, new.etp) < 1:
        return new
    if "etp" not in values:
        new = dataclasses.replace(new, etp=_expert_tensor(job, layout, new.tp))
    if "sequence_parallel" not in values:
        new = dataclasses.replace(new, sequence_parallel=_sequence_parallel(job, layout, new))
    dp, edp = data_parallel(job, new), expert_data_parallel(job, new)
    new = dataclasses.replace(new, dp=dp or new.dp, edp=edp or new.edp)
    if "vpp" not in values and "layers" in values and len(new.num_layers_per_chunk) % new.pp == 0:
        new = dataclasses.replace(new, vpp=len(new.num_layers_per_chunk) // new.pp)
    if "vpp" in values or "layers" in values or new.vpp == 1:
        return _with_pipeline(job, layout, new, values)
    as_before = {layout.vpp} if new.pp == layout.pp else set()
    fewer = (
        _with_pipeline(job, layout, dataclasses.replace(new, vpp=vpp), values)
        for vpp in range(new.vpp, 1, -1)
        if new.pp > 1 and (vpp in as_before or job.model.num_layers % (new.pp * vpp) == 0)
    )
    legal = (x for x in fewer if first_code(job, x, _INTERLEAVING) is None)
    flat = dataclasses.replace(new, vpp=1)
    return next(legal, None) or _with_pipeline(job, layout, flat, values)


def _with_pipeline(job: TrainJob, old: Layout, new: Layout, values: Mapping[str, Any]) -> Layout:
    """Let layers, recomputation, optimizer instances and overlap follow the degrees of ``new``."""
    if "layers" not in values and (new.pp, new.vpp) != (old.pp, old.vpp):
        new = dataclasses.replace(new, num_layers_per_chunk=_dealt(job, new))
    if "recompute" not in values and new.num_layers_per_chunk != old.num_layers_per_chunk:
        new = dataclasses.replace(new, recompute=_recompute(new))
    if new.sharding == "none":
        new = dataclasses.replace(new, num_optimizer_instances=1)
    if _overlap_conditions(new) != _overlap_conditions(old):
        free = dataclasses.replace(job, pins={}, bounds={})
        new = dataclasses.replace(new, overlap=Domains(free).overlap(new, vpp=new.vpp))
    return new


def _expert_tensor(job: TrainJob, old: Layout, tp: int) -> int:
    if tp == old.tp:
        return old.etp
    if job.model.moe is None or not job.capabilities.expert_tensor_parallel or old.etp == old.tp:
        return tp
    return math.gcd(old.etp, tp)


def _sequence_parallel(job: TrainJob, old: Layout, new: Layout) -> bool:
    """Off at tp = 1; kept above; the first tp > 1 brings it, because it costs nothing (cases.md row 8)."""
    if new.tp == 1:
        return False
    if old.tp > 1:
        return old.sequence_parallel
    return common_sequence(job) % (new.cp * new.tp) == 0


def _dealt(job: TrainJob, new: Layout) -> tuple[int, ...]:
    """Return the evenest layer counts that the dialect can write, else the evenest ones."""
    facts = facts_for(job.megatron_core_version)
    shapes = layer_shapes(job.model.num_layers, new.pp, new.vpp)
    for shape in shapes:
        if split_form(job, dataclasses.replace(new, num_layers_per_chunk=shape), facts) is not None:
            return shape
    return shapes[0] if shapes else ()


def _recompute(new: Layout) -> Recompute:
    """Cut a full recomputation to the new chunks: a block to its size, uniform groups to a divisor."""
    chosen, counts = new.recompute, new.num_layers_per_chunk
    if chosen.granularity != "full" or not counts:
        return chosen
    most = max(counts) if chosen.method == "block" else math.gcd(*counts, chosen.num_layers)
    return dataclasses.replace(chosen, num_layers=min(chosen.num_layers, most))


def _overlap_conditions(layout: Layout) -> tuple[bool, ...]:
    return (
        layout.sharding != "none",
        layout.sequence_parallel,
        layout.ep > 1,
        layout.pp == 1,
        layout.vpp > 1,
    )


def spelled(layout: Layout, axis: str) -> str:
    """Return ``axis=value`` as ``parse_value`` reads it."""
    value = getattr(layout, FIELDS[axis])
    if axis == "layers":
        return f"layers={shape_text(value)}"
    if axis == "recompute":
        return f"recompute={_recompute_text(value)}"
    if axis == "overlap":
        flags = [name for name in value.__dataclass_fields__ if getattr(value, name)]
        return f"overlap={'+'.join(flags) or 'none'}"
    return f"{axis}={str(value).lower() if isinstance(value, bool) else value}"


def _recompute_text(chosen: Recompute) -> str:
    if chosen.granularity == "full":
        return f"full/{chosen.method}/{chosen.num_layers}"
    return "none" if chosen.granularity == "none" else f"selective:{'+'.join(chosen.modules)}"


def differences(job: TrainJob, old: Layout, new: Layout, *, besides: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the axes that differ, as in ``new``; not those of ``besides``, not etp without experts."""
    skipped = {*besides, *(("etp",) if job.model.moe is None else ())}
    return tuple(
        spelled(new, axis)
        for axis in AXES
        if axis not in skipped and getattr(old, FIELDS[axis]) != getattr(new, FIELDS[axis])
    )


def parse_value(axis: str, value: Any, *, origin: str) -> Any:
    """Return ``value`` as the layout holds it.

    Args:
        value: as the override grammar reads it: an integer, a flag, a list or a text.

    Raises:
        BadInputError: an unknown axis (with the nearest), one nobody may ask for, or another kind of value.
    """
    if axis not in _FORMS:
        known = tuple(_FORMS)
        raise BadInputError(
            "NEST-S03",
            f"{axis!r} is not an axis that can be asked for",
            factors=[Factor("axes", ", ".join(known), origin)],
            nearest=nearest_names(axis, known),
        )
    parsed = _parsed(axis, value)
    if parsed is None:
        raise BadInputError("NEST-S04", f"{axis} takes {_FORMS[axis]}", factors=[Factor(axis, value, origin)])
    return parsed


def _parsed(axis: str, value: Any) -> Any:
    """Return the value of ``axis``, None when it has no meaning."""
    if axis in _INTEGERS:
        good = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_DEGREE
        return value if good else None
    if axis == "sequence_parallel":
        return value if isinstance(value, bool) else None
    if axis == "layers":
        return _layers(value)
    if axis == "recompute":
        return _parsed_recompute(str(value).lower()) if isinstance(value, str | None) else None
    return value if value in _NAMES[axis] else None


def _layers(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list | tuple):
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
        return tuple(value) if value and whole and len(value) <= MAX_DEGREE else None
    counts: list[int] = []
    for part in str(value).split("+"):
        run = _RUN.fullmatch(part)
        if run is None or len(counts) + int(run[2] or 1) > MAX_DEGREE:
            return None
        counts += [int(run[1])] * int(run[2] or 1)
    return tuple(counts)


def _parsed_recompute(text: str) -> Recompute | None:
    if text == "none":
        return Recompute()
    if found := _METHODS.fullmatch(text):
        method, count = ("uniform", "block")[found[1] == "block"], int(found[2])
        return Recompute(granularity="full", method=method, num_layers=count)  # type: ignore[arg-type]
    if found := _MODULES.fullmatch(text):
        return Recompute(granularity="selective", modules=tuple(found[1].split("+")))
    return None
