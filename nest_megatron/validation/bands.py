"""80 % bands of the step time: how many measured rows they cover, and how wide they are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nest_megatron.validation.metrics import Row, predicted_rows


@dataclass(frozen=True, slots=True)
class Coverage:
    """Bands of one group; ``coverage`` and ``median_width`` = (high - low) / prediction in percent."""

    count: int
    coverage: float
    median_width: float


def coverage(rows: Sequence[Row]) -> Coverage | None:
    """Return the coverage over the timed rows with a band, None when there is none."""
    inside, widths = [], []
    for row in predicted_rows(rows):
        band = row.prediction.get("step_time_band_s")
        if band:
            low, high = band
            inside.append(low <= row.measured_s <= high)
            widths.append((high - low) / row.prediction["step_time_s"])
    if not inside:
        return None
    return Coverage(len(inside), 100 * statistics.fmean(inside), 100 * statistics.median(widths))
