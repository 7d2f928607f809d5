"""Step-time error: by family, over all rows, and after one scalar per machine, precision and family."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nest_megatron.validation.metrics import Errors, Row, Timed, predicted_rows, timed_rows


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Relative errors of the step time.

    Args:
        families: family -> its errors, by name; ``all`` over every row, None when there is none.
        after_scalar: MAPE in percent after one factor per accelerator, precision and family, the median
            ratio of those rows themselves (in-sample).
        missing: family -> timed rows that have no prediction.
    """

    families: dict[str, Errors]
    all: Errors | None
    after_scalar: float | None
    missing: dict[str, int]


def time_table(rows: Sequence[Row]) -> TimeTable:
    """Return the table of ``rows``."""
    timed = predicted_rows(rows)
    families: dict[str, list[float]] = defaultdict(list)
    missing: dict[str, int] = defaultdict(int)
    for row in timed_rows(rows):
        family = str(row.record["family"])
        if row.predicted_s is None:
            missing[family] += 1
        else:
            families[family].append(row.ratio - 1)
    return TimeTable(
        families={family: Errors.of(errors) for family, errors in sorted(families.items())},
        all=Errors.of([row.ratio - 1 for row in timed]) if timed else None,
        after_scalar=_after_scalar(timed),
        missing=dict(missing),
    )


def _after_scalar(timed: Sequence[Timed]) -> float | None:
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in timed:
        record = row.record
        groups[str(record["accelerator"]), str(record["precision"]), str(record["family"])].append(row.ratio)
    left = [abs(ratio / statistics.median(ratios) - 1) for ratios in groups.values() for ratio in ratios]
    return 100 * statistics.fmean(left) if left else None
