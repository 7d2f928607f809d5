"""What the user tells NEST itself: cluster, pins, freedoms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from nest_megatron.errors import BadInputError, Factor


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

    def __post_init__(self) -> None:
        """Refuse sizes that are none.

        Raises:
            BadInputError: a size that is negative or not finite, or no GPU at all.
        """
        if not math.isfinite(self.reserved_gib) or self.reserved_gib < 0:
            factors = [Factor("reserved_gib", self.reserved_gib)]
            raise BadInputError("NEST-I17", "reserved_gib is not a size in GiB", factors=factors)
        if self.num_gpus is not None and self.num_gpus < 1:
            factors = [Factor("num_gpus", self.num_gpus)]
            raise BadInputError("NEST-I17", "num_gpus is not a positive number", factors=factors)
