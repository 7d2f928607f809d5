"""What the user tells NEST itself: cluster, pins, freedoms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from nest_megatron.errors import BadInputError, Factor

#: What a robust plan makes least over the cluster's scenarios: the slowest one, or CVaR at 80 %.
RobustMeasure = Literal["worst", "cvar"]


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
        nodelist: nodes of the job in Slurm bracket syntax; None for those of the cluster file.
        topology: file with Slurm's topology (``scontrol show topology``, topology.conf, topology.yaml), or
            ``-`` for standard input.
        robust: choose by this measure over the cluster's scenarios; None plans for the network as it is.
        budget: simulations of each memory band after which the search answers with the best so far; None
            searches to the end.
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
    nodelist: str | None = None
    topology: str | None = None
    robust: RobustMeasure | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that are none.

        Raises:
            BadInputError: a size that is negative or not finite, no GPU, or no simulation at all.
        """
        if not math.isfinite(self.reserved_gib) or self.reserved_gib < 0:
            factors = [Factor("reserved_gib", self.reserved_gib)]
            raise BadInputError("NEST-I17", "reserved_gib is not a size in GiB", factors=factors)
        for name, count in (("num_gpus", self.num_gpus), ("budget", self.budget)):
            if count is not None and count < 1:
                factors = [Factor(name, count)]
                raise BadInputError("NEST-I17", f"{name} is not a positive number", factors=factors)
