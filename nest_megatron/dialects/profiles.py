"""Framework profiles: ``conf/framework/<name>.yaml``, one {value, source} per quantity, units in the keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nest_megatron import units
from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.specs import codec
from nest_megatron.specs.constants import StepConstants
from nest_megatron.specs.job import FrameworkProfile

#: The data folder that editable installs and wheels carry inside the package.
CONF = Path(__file__).resolve().parent.parent / "conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number of a data file, with where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProfileFile:
    """The exact keys of a profile file; GiB and ms are converted on loading."""

    name: str
    device_factor: Quantity
    device_fixed_GiB: Quantity
    tp_overlap_share: Quantity
    tp_async_backward_share: Quantity
    dp_overlap_share: Quantity
    p2p_overlap_share: Quantity
    ep_overlap_share: Quantity
    host_floor_ms: Quantity
    moe_host_factor: Quantity
    step_overhead_ms: Quantity
    time: dict[str, Quantity] = field(default_factory=dict)
    scatters_pipeline_messages: Quantity | None = None
    shard_broadcast_ms: Quantity | None = None
    pipeline_buffers: Quantity | None = None
    keeps_stage_outputs: Quantity | None = None
    caches_dummy_wgrads: Quantity | None = None
    loss_bytes_per_logit: Quantity | None = None
    gathers_logits: Quantity | None = None
    unfused_norm_saved_bytes: Quantity | None = None
    rotary_saved_bytes: Quantity | None = None
    score_saved_bytes: Quantity | None = None
    score_transient_bytes: Quantity | None = None
    boundary_transients: Quantity | None = None
    fixed_workspace_MiB: Quantity | None = None
    selective_kept_share: Quantity | None = None
    unsharded_weight_units: Quantity | None = None
    unsharded_grad_units: Quantity | None = None
    unsharded_with_pipeline: Quantity | None = None
    small_world_gpus: Quantity | None = None
    device_fixed_small_GiB: Quantity | None = None


#: File key -> field of the profile and factor, where the unit changes on loading.
_CONVERTED: dict[str, tuple[str, float]] = {
    "device_fixed_GiB": ("device_fixed_bytes", units.GIB),
    "device_fixed_small_GiB": ("device_fixed_small_bytes", units.GIB),
    "fixed_workspace_MiB": ("fixed_workspace_bytes", units.MIB),
    "host_floor_ms": ("host_floor_s", units.MILLI),
    "step_overhead_ms": ("step_overhead_s", units.MILLI),
    "shard_broadcast_ms": ("shard_broadcast_s", units.MILLI),
    "dispatch_start_us": ("dispatch_start_s", units.MICRO),
}
#: Keys of a profile file that hold no quantity of the profile itself.
_NESTED = ("name", "time")
#: The constants of the step-time formulas, shared by all profiles.
_COMMON = "common"
#: Fields of the profile that count something.
_WHOLE = {field.name for field in fields(FrameworkProfile) if field.type == "int"}


def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles."""
    return tuple(sorted(path.stem for path in (CONF / "framework").glob("*.yaml") if path.stem != _COMMON))


@cache
def load_profile(name: str) -> FrameworkProfile:
    """Return the profile in ``conf/framework/<name>.yaml``, in bytes and seconds.

    Raises:
        BadInputError: no such profile (with the nearest names), or a key that is unknown, missing or of
            another type.
    """
    known = profile_names()
    if name not in known:
        raise BadInputError(
            "NEST-D36",
            f"there is no framework profile {name!r}",
            factors=[Factor("known", ", ".join(known), "conf/framework")],
            nearest=nearest_names(name, known),
        )
    path = CONF / "framework" / f"{name}.yaml"
    entry = codec.from_plain(_ProfileFile, load_yaml(path), source=path.name)
    given = {
        name: getattr(entry, name) for name in (f.name for f in fields(_ProfileFile)) if name not in _NESTED
    }
    values, sources = _converted(given)
    time, constant_sources = step_constants(entry.time, source=path.name)
    return FrameworkProfile(name=entry.name, time=time, sources=constant_sources | sources, **values)


def step_constants(
    own: Mapping[str, Quantity] | None = None, *, source: str = ""
) -> tuple[StepConstants, dict[str, str]]:
    """Return the constants of the step-time formulas, ``own`` laid over the common ones, and their sources.

    Raises:
        BadInputError: a key that is unknown, or missing in both.
    """
    values, sources = _converted(_common() | dict(own or {}))
    try:
        return StepConstants(**values), sources
    except TypeError as error:
        raise BadInputError("NEST-D36", f"{source or _COMMON}: {str(error).split('() ')[-1]}") from None


@cache
def _common() -> dict[str, Quantity]:
    path = CONF / "framework" / f"{_COMMON}.yaml"
    return codec.from_plain(dict[str, Quantity], load_yaml(path), source=path.name)


def _converted(given: Mapping[str, Quantity | None]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (values in SI units, sources) by field; what a file leaves out is left out here."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, quantity in given.items():
        if quantity is None:
            continue
        target, factor = _CONVERTED.get(key, (key, 1.0))
        value = quantity.value * factor
        values[target] = round(value) if target in _WHOLE else value
        sources[target] = quantity.source
    return values, sources


def load_yaml(path: Path) -> Any:
    """Return the plain content of a data file.

    Raises:
        BadInputError: the file is absent or not YAML.
    """
    try:
        return yaml.safe_load(codec.read_text(path))
    except yaml.YAMLError as error:
        raise BadInputError("NEST-D37", f"{path.name} is not YAML: {' '.join(str(error).split())}") from None
