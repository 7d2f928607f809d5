"""What the user tells NEST itself: cluster, pins, freedoms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of one planning run.

    Args:
        cluster: name of a shipped cluster, path of a cluster file, or None for the embedded default.
        dialect: name of the configuration dialect, None to detect it.
        framework_version: overrides what is installed and what the dialect assumes.
        pin: axis -> one value, or a list of allowed values.
        free: axis -> True releases a pin that came from the command line; False freezes the axis at the
            user's value.
        force: launch a fully pinned layout although it does not fit.
        reserved_gib: device memory that other processes hold.
        num_gpus: world size, when the configuration does not say it.
        calibration: use stored calibration.
    """

    cluster: str | None = None
    dialect: str | None = None
    framework_version: str | None = None
    pin: dict[str, Any] = field(default_factory=dict)
    free: dict[str, bool] = field(default_factory=dict)
    force: bool = False
    reserved_gib: float = 0.0
    num_gpus: int | None = None
    calibration: bool = True
