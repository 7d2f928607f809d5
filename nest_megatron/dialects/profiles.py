"""Framework profiles: ``conf/framework/<name>.yaml``, one {value, source} per quantity, units in the keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nest_megatron import units
from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.specs import codec
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
}
#: Fields of the profile that count something.
_WHOLE = {field.name for field in fields(FrameworkProfile) if field.type == "int"}


def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles."""
    return tuple(sorted(path.stem for path in (CONF / "framework").glob("*.yaml")))


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
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key in (field.name for field in fields(_ProfileFile) if field.name != "name"):
        quantity: Quantity | None = getattr(entry, key)
        if quantity is None:
            continue
        target, factor = _CONVERTED.get(key, (key, 1.0))
        value = quantity.value * factor
        values[target] = round(value) if target in _WHOLE else value
        sources[target] = quantity.source
    return FrameworkProfile(name=entry.name, sources=sources, **values)


def load_yaml(path: Path) -> Any:
    """Return the plain content of a data file.

    Raises:
        BadInputError: the file is absent or not YAML.
    """
    try:
        return yaml.safe_load(codec.read_text(path))
    except yaml.YAMLError as error:
        raise BadInputError("NEST-D37", f"{path.name} is not YAML: {' '.join(str(error).split())}") from None
