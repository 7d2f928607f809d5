"""Print how far step time formulas are from the event simulation, and the time of one simulation."""

from __future__ import annotations

import time

import numpy as np

from cython_dp import pipeline_bound, simulate
from tests.dp.formula_table import FORMULAS, ROWS, summary

DRAWS = 400
#: p, v, m of the timed schedules.
SHAPES = ((8, 1, 64), (16, 6, 96), (16, 1, 1024), (64, 2, 512))


def main() -> None:
    """Print both tables."""
    print(f"{'p, m, spread, hop / F':28s}" + "".join(f"{name:>34s}" for name in FORMULAS))
    for row in ROWS:
        cells = []
        for (mean, worst), (published, published_worst) in zip(
            summary(row, DRAWS), row.published, strict=True
        ):
            wanted = f"{published:+.1f}" + ("" if published_worst is None else f" / {published_worst:+.1f}")
            cells.append(f"{mean:+.1f} / {worst:+.1f} (page {wanted})")
        name = f"{row.p}, {row.m}, {row.spread}, {row.hop[0]}-{row.hop[1]}"
        print(f"{name:28s}" + "".join(f"{cell:>34s}" for cell in cells))
    print(f"\n{'p, v, m':28s}{'simulation us':>16s}{'bound us':>12s}")
    rng = np.random.default_rng(0)
    for p, v, m in SHAPES:
        forward, backward = 1 + rng.random(p * v), 2 + rng.random(p * v)
        arguments = forward, backward, p, v, m, p, 0.1
        seconds = [_cpu_s(run, arguments) for run in (simulate, pipeline_bound)]
        print(f"{f'{p}, {v}, {m}':28s}{seconds[0] * 1e6:16.1f}{seconds[1] * 1e6:12.1f}")


def _cpu_s(run, arguments) -> float:
    """Return the CPU seconds of one call, the least of five series."""
    series = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(20):
            run(*arguments)
        series.append((time.process_time() - started) / 20)
    return min(series)


if __name__ == "__main__":
    main()
