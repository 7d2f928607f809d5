"""Scale curves: same layout on more GPUs, predicted against measured parallel efficiency."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nest_megatron.validation.metrics import Row, predicted_rows

#: A curve spans at least this factor of GPUs.
SPAN = 4


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve from its smallest to its largest world.

    Args:
        error: predicted over measured parallel efficiency, minus 1, in percent.
    """

    name: str
    num_gpus: tuple[int, int]
    error: float


def scale_curves(rows: Sequence[Row]) -> tuple[Curve, ...]:
    """Return every curve of ``rows``; efficiency is sequences per second and GPU, largest over smallest."""
    points: dict[str, list[tuple[int, int, float, float]]] = defaultdict(list)
    for row in predicted_rows(rows):
        record = row.record
        if record.get("scale_group") and record.get("num_gpus") and record.get("global_batch"):
            point = (record["num_gpus"], record["global_batch"], row.predicted_s or 0.0, row.measured_s)
            points[record["scale_group"]].append(point)
    curves = []
    for name, members in sorted(points.items()):
        # Equal worlds are told apart by batch and time, as in the public scoring script.
        small, large = min(members), max(members)
        if large[0] >= SPAN * small[0]:
            # Worlds and batches cancel in the ratio of the two efficiencies.
            error = (small[2] / large[2]) / (small[3] / large[3]) - 1
            curves.append(Curve(name, (small[0], large[0]), 100 * error))
    return tuple(curves)
