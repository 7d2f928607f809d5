"""The published errors of step time formulas are reproduced by the simulator."""

from __future__ import annotations

import pytest

from tests.dp.formula_table import ROWS, Row, summary

#: Percentage points by which mean and worst may differ: the page does not give the draws.
MEAN_POINTS, WORST_POINTS = 1.5, 3.5


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"p{row.p}-m{row.m}-s{row.spread}-c{row.hop[1]}")
def test_published_errors_are_reproduced(row: Row) -> None:
    """Mean and worst error of each formula agree with research/nest_paper.md 1.6."""
    for (mean, worst), (published_mean, published_worst) in zip(
        summary(row, 150), row.published, strict=True
    ):
        assert mean == pytest.approx(published_mean, abs=MEAN_POINTS)
        if published_worst is not None:
            assert worst == pytest.approx(published_worst, abs=WORST_POINTS)
