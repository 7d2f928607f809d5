"""Step time formulas against the event simulation of 1F1B: the table of research/nest_paper.md 1.6."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cython_dp import cycle_period, simulate

FORMULAS = ("max * (m + p - 1)", "(m - 1) max + sum", "(m - 1) period + sum")


@dataclass(frozen=True, slots=True)
class Row:
    """One row: p stages, m micro-batches, spread of stage times, range of hop latency over forward time.

    Attributes:
        published: (mean, worst) error of each formula in percent, None where the row does not list it.
    """

    p: int
    m: int
    spread: float
    hop: tuple[float, float]
    published: tuple[tuple[float, float | None], ...]


ROWS = (
    Row(8, 16, 0.3, (0.0, 0.0), ((4.9, 10.8), (1.6, 5.4), (1.6, 5.4))),
    Row(8, 16, 0.6, (0.0, 0.0), ((9.0, 17.3), (2.9, 7.5), (2.9, 7.5))),
    Row(16, 256, 0.3, (0.0, 0.0), ((1.1, 1.8), (0.4, 0.9), (0.4, 0.9))),
    Row(8, 64, 0.3, (0.0, 0.3), ((6.3, 11.3), (-2.4, -6.1), (-1.3, -4.4))),
    Row(16, 256, 0.0, (0.5, 0.5), ((1.6, None), (-22.4, None), (0.01, None))),
    Row(16, 256, 0.2, (0.0, 0.5), ((8.4, 14.6), (-8.9, -12.9), (-2.8, -6.3))),
)


def errors(row: Row, draws: int, seed: int = 1) -> npt.NDArray[np.float64]:
    """Return (draws, formulas) errors in percent.

    Forward times are uniform in [1, 1 + spread], backward times twice as long, and every link has its own
    latency; the page does not say how it drew them.
    """
    rng = np.random.default_rng(seed)
    p, m, found = row.p, row.m, []
    for _ in range(draws):
        forward = 1 + row.spread * rng.random(p)
        backward = 2 * forward
        hop = row.hop[0] + (row.hop[1] - row.hop[0]) * rng.random(p)
        hop[-1] = 0.0
        load = forward + backward
        messages = hop + np.concatenate([[0.0], hop[:-1]])
        simulated = simulate(forward, backward, p, 1, m, p, hop)
        period = cycle_period(forward, backward, p, hop)
        formulas = (
            (load + messages).max() * (m + p - 1),
            (m - 1) * load.max() + load.sum(),
            (m - 1) * period + load.sum() + 2 * hop.sum(),
        )
        found.append([100 * (seconds / simulated - 1) for seconds in formulas])
    return np.array(found)


def summary(row: Row, draws: int) -> list[tuple[float, float]]:
    """Return the (mean, worst) error of each formula in percent; worst by size."""
    found = errors(row, draws)
    return [(float(e.mean()), float(e[np.abs(e).argmax()])) for e in found.T]
