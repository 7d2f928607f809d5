"""What the planner may change: pins of the command line, of the settings, and of the checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import AXES, Layout
from nest_megatron.specs.settings import PlanSettings
from nest_megatron.units import bytes_from_gib

#: Axes a checkpoint that cannot be resharded binds (DESIGN section 8).
CHECKPOINT_AXES = ("tp", "pp", "vpp", "ep", "etp", "layers")
SETTING = "setting pin"
_INTEGER_AXES = ("tp", "cp", "pp", "ep", "etp", "micro_batch", "vpp")
_GRANULARITIES = ("none", "selective", "full")


def apply_settings(job: TrainJob, settings: PlanSettings) -> TrainJob:
    """Return ``job`` with the settings' pins, freedoms and reserved memory, and the checkpoint's bindings.

    Raises:
        BadInputError: an unknown axis (with the nearest one), or a value the axis cannot take.
    """
    pins, bounds, origins = dict(job.pins), dict(job.bounds), dict(job.origins)
    for axis in (*settings.pin, *settings.free):
        _known(axis)
    for axis, released in settings.free.items():
        if released:
            pins.pop(axis, None)
            bounds.pop(axis, None)
        else:
            pins[axis] = getattr(job.user_layout, FIELDS[axis])
            origins[axis] = "setting free"
    for axis, value in settings.pin.items():
        values = _values(axis, value)
        origins[axis] = SETTING
        if len(values) == 1 and axis != "recompute":
            pins[axis] = values[0]
        else:
            bounds[axis] = values
    if job.checkpoint.resuming and not job.checkpoint.reshards:
        for axis in CHECKPOINT_AXES:
            pins[axis] = getattr(job.user_layout, FIELDS[axis])
            origins[axis] = f"checkpoint {job.checkpoint.source}".strip()
    return dataclasses.replace(
        job,
        pins=pins,
        bounds=bounds,
        origins=origins,
        reserved_bytes=job.reserved_bytes + bytes_from_gib(settings.reserved_gib),
    )


def unkept(job: TrainJob, layout: Layout) -> tuple[str, ...]:
    """Return the axes on which ``layout`` keeps a pin or bound of ``job`` not."""
    broken = [axis for axis, value in job.pins.items() if getattr(layout, FIELDS[axis]) != value]
    for axis, values in job.bounds.items():
        value = layout.recompute.granularity if axis == "recompute" else getattr(layout, FIELDS[axis])
        if value not in values:
            broken.append(axis)
    return tuple(broken)


def _known(axis: str) -> None:
    if axis not in AXES:
        raise BadInputError(
            "NEST-S01",
            f"{axis!r} is not an axis of a layout",
            factors=[Factor("axes", ", ".join(AXES), "DESIGN vocabulary")],
            nearest=nearest_names(axis, AXES),
        )


def _values(axis: str, value: Any) -> tuple[Any, ...]:
    """Return the allowed values of ``axis`` as a non-empty tuple of the axis' own type."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if axis in _INTEGER_AXES:
        good = all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values)
        expected = "a positive integer, or a list of them"
    elif axis == "sequence_parallel":
        good, expected = all(isinstance(v, bool) for v in values), "true or false"
    elif axis == "recompute":
        good = all(v in _GRANULARITIES for v in values)
        expected = f"one of {', '.join(_GRANULARITIES)}, or a list of them"
    elif axis in ("sharding", "order"):
        good, expected = all(isinstance(v, str) for v in values), "a name, or a list of them"
    else:
        good, expected = False, "set through the configuration's own keys"
    if not good or not values:
        raise BadInputError(
            "NEST-S02",
            f"the pin of {axis} is {value!r}; it must be {expected}",
            factors=[Factor(axis, value, SETTING)],
        )
    return values
