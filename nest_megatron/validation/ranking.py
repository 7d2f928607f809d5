"""Layout sweeps: regret of the predicted-best row, order of the pairs, best of the top three."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nest_megatron.validation.metrics import NOISE, Row, predicted_rows, sweeps_of

#: Sweeps of at least this many timed rows are counted apart, and only they have a top three.
LARGE_SWEEP = 4


@dataclass(frozen=True, slots=True)
class Sweep:
    """One layout sweep with at least two timed and predicted rows.

    Args:
        regret: measured time of the predicted-best row over the measured best, percent above it.
        pairs: pairs that differ by more than the noise floor; ``right``: how many are in the right order, a
            predicted tie counts half.
        top_three: best measured row of the three best predicted, percent above the measured best.
    """

    name: str
    count: int
    regret: float
    pairs: int
    right: float
    top_three: float

    @property
    def order(self) -> float | None:
        """Share of pairs in the right order, None without pairs."""
        return self.right / self.pairs if self.pairs else None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Sweeps by name; ``unpredictable`` are those that a source fault or a software effect touches."""

    sweeps: tuple[Sweep, ...]
    unpredictable: frozenset[str] = frozenset()

    @property
    def large(self) -> tuple[Sweep, ...]:
        """Sweeps of four or more rows."""
        return tuple(sweep for sweep in self.sweeps if sweep.count >= LARGE_SWEEP)

    @property
    def predictable(self) -> tuple[Sweep, ...]:
        """Sweeps without those that no layout model can know."""
        return tuple(sweep for sweep in self.sweeps if sweep.name not in self.unpredictable)


def ranking(rows: Sequence[Row], *, unpredictable: Collection[str] = ()) -> Ranking:
    """Return every sweep of ``rows`` that has two or more timed and predicted rows."""
    found = []
    for name, members in sorted(sweeps_of(rows).items()):
        timed = [(row.predicted_s or 0.0, row.measured_s) for row in predicted_rows(members)]
        if len(timed) >= 2:
            found.append(_sweep(name, timed))
    return Ranking(tuple(found), frozenset(unpredictable))


def mean_regret(sweeps: Sequence[Sweep]) -> float | None:
    """Return the mean regret in percent, None without sweeps."""
    return statistics.fmean(sweep.regret for sweep in sweeps) if sweeps else None


def pair_order(sweeps: Sequence[Sweep]) -> float | None:
    """Return the share of all pairs in the right order, None without pairs."""
    pairs = sum(sweep.pairs for sweep in sweeps)
    return sum(sweep.right for sweep in sweeps) / pairs if pairs else None


def chosen_s(timed: Sequence[tuple[float, float]]) -> float:
    """Return the measured seconds of the smallest prediction, the mean where predictions tie.

    Args:
        timed: (predicted, measured) seconds, at least one.
    """
    least = min(predicted for predicted, _ in timed)
    return statistics.fmean(measured for predicted, measured in timed if predicted == least)


def _sweep(name: str, timed: Sequence[tuple[float, float]]) -> Sweep:
    best = min(measured for _, measured in timed)
    pairs, right = 0, 0.0
    for i, (predicted, measured) in enumerate(timed):
        for other_predicted, other_measured in timed[:i]:
            if abs(measured / other_measured - 1) <= NOISE:
                continue
            pairs += 1
            agree = (predicted < other_predicted) == (measured < other_measured)
            right += 0.5 if predicted == other_predicted else float(agree)
    # Ties among the three are broken by the measured time, as in the public scoring script.
    top = min(measured for _, measured in sorted(timed)[:3])
    return Sweep(
        name=name,
        count=len(timed),
        regret=100 * (chosen_s(timed) / best - 1),
        pairs=pairs,
        right=right,
        top_three=100 * (top / best - 1),
    )
