"""Fit and judge the 80 % bands of the step time, without and with a calibration scalar.

The coefficients of ``nest_megatron/cost/band.py`` minimise the mean interval score (width plus 10 times the
miss, in log), which is least where 80 % are covered.  Every table also refits them without the family that it
judges.  Calibration is replayed on the records: the scalar of a row comes from other rows of its family on
the same accelerator, release of the framework and precision, never from the row itself.

The time model was fitted on these families too, so its errors, and with them the bands, are smaller than
those of an unseen stack; `--predictions` takes a file of left-out predictions instead (id -> seconds).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nest_megatron.cost.band import CALIBRATED, UNCALIBRATED, band_amounts, least_half_width
from nest_megatron.dialects.profiles import CONF
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.validation.command import load_records
from nest_megatron.validation.metrics import is_timed, measured_step_s
from nest_megatron.validation.record_layout import NotComputable
from nest_megatron.validation.records import build

Array = npt.NDArray[np.float64]
Coefficients = npt.NDArray[np.float64]

OUT = CONF / "validation" / "step_time_bands.yaml"
#: Weight of a miss in the interval score of an 80 % interval: 2 / (1 - 0.80).
MISS = 10.0
#: Numbers of calibration runs that are replayed; the last stands for every other run.
RUNS = (1, 2, 4, 10**6)
#: Seeded draws of the runs per row and number.
DRAWS = 8
#: Share of the uncalibrated width at which coverage is printed too.
NARROW = 0.60
#: Search of the coefficients: first and last step.
STEPS = (0.08, 0.001)


@dataclass(frozen=True, slots=True)
class Point:
    """One timed record: log(measured / predicted), amounts of its band, and what it may be calibrated by."""

    family: str
    machine: str
    model: str
    experts: bool
    error: float
    log2_micro_batch: float
    amounts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A point under a scalar from ``runs``; equal draws of one point share its weight of 1."""

    point: Point
    runs: tuple[Point, ...]
    weight: float

    @property
    def error(self) -> float:
        """log(measured / predicted) that the median of the runs leaves."""
        return self.point.error - statistics.median(run.error for run in self.runs)

    @property
    def amounts(self) -> dict[str, float]:
        """Amounts of the band, with the distance to the runs as in ``band_amounts``."""

        def change(name: str) -> float:
            mean = statistics.fmean(run.amounts[name] for run in self.runs)
            return abs(self.point.amounts[name] - mean)

        batch = statistics.fmean(run.log2_micro_batch for run in self.runs)
        return self.point.amounts | {
            "runs": 1 / math.sqrt(len(self.runs)),
            "communication_change": change("communication"),
            "bubble_change": change("bubble"),
            "batch_change": abs(self.point.log2_micro_batch - batch),
        }


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows to fit: amounts (n, terms) in the order of ``terms``, errors, weights, least half widths."""

    terms: tuple[str, ...]
    amounts: Array
    errors: Array
    weights: Array
    least: Array
    families: npt.NDArray[np.str_]

    def only(self, mask: npt.NDArray[np.bool_]) -> Sample:
        """Return the rows of ``mask``."""
        return Sample(
            self.terms,
            self.amounts[mask],
            self.errors[mask],
            self.weights[mask],
            self.least[mask],
            self.families[mask],
        )

    def half(self, coefficients: Coefficients) -> Array:
        """Return the half widths in log."""
        return np.maximum(self.least, np.sqrt(self.amounts**2 @ coefficients**2))


def collect(records: Sequence[dict[str, Any]], left_out: Mapping[str, float]) -> list[Point]:
    """Return the timed records that can be predicted."""
    points = []
    for record in records:
        measured_s = measured_step_s(record)
        if not measured_s or not is_timed(record):
            continue
        try:
            built = build(record)
        except NotComputable:
            continue
        prediction = Evaluator(built.job, built.cluster).predict([built.layout])[0]
        step_s, model = prediction.step_time_s, built.job.model
        words = [str(record[key]) for key in ("family", "accelerator", "framework", "precision")]
        points.append(
            Point(
                family=record["family"],
                machine=" / ".join(words),
                model=f"{model.num_layers} layers of {model.hidden_size}, sequence {record['seq_len']}",
                experts=model.moe is not None,
                log2_micro_batch=math.log2(built.layout.micro_batch),
                error=math.log(measured_s / left_out.get(record["id"], step_s)),
                amounts=band_amounts(built.job, built.layout, step_s, prediction.time_split),
            )
        )
    return points


def uncalibrated(points: Sequence[Point], weights: Sequence[float] | None = None) -> Sample:
    """Return every point as it is; MoE bands are held at their least width."""
    return Sample(
        UNCALIBRATED,
        np.array([[point.amounts[term] for term in UNCALIBRATED] for point in points]),
        np.array([point.error for point in points]),
        np.ones(len(points)) if weights is None else np.array(weights),
        np.array([least_half_width(experts=point.experts, calibrated=False) for point in points]),
        np.array([point.family for point in points]),
    )


def calibrated(rows: Sequence[Drawn]) -> Sample:
    """Return every draw as it is."""
    return Sample(
        CALIBRATED,
        np.array([[row.amounts[term] for term in CALIBRATED] for row in rows]),
        np.array([row.error for row in rows]),
        np.array([row.weight for row in rows]),
        np.array([least_half_width(experts=row.point.experts, calibrated=True) for row in rows]),
        np.array([row.point.family for row in rows]),
    )


def score(data: Sample, coefficients: Coefficients) -> float:
    """Return the weighted mean interval score."""
    half = data.half(coefficients)
    loss = 2 * half + MISS * np.maximum(0.0, np.abs(data.errors) - half)
    return float(np.average(loss, weights=data.weights))


def fit(data: Sample) -> Coefficients:
    """Return the coefficients with the least score, by coordinate search with shrinking steps."""
    found = np.zeros(len(data.terms))
    found[0] = 0.1
    best, step = score(data, found), STEPS[0]
    while step > STEPS[1]:
        moved = False
        for k in range(len(found)):
            for change in (step, -step):
                trial = found.copy()
                trial[k] = max(0.0, trial[k] + change)
                value = score(data, trial)
                if value < best - 1e-9:
                    best, found, moved = value, trial, True
        step = step if moved else step / 2
    return found


def quantile(values: Array, weights: Array, share: float) -> float:
    """Return the weighted quantile."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, share * total[-1])])


def summary(data: Sample, half: Array) -> tuple[float, float]:
    """Return coverage and median width (high - low) / prediction, both in percent."""
    covered = float(np.average(np.abs(data.errors) <= half, weights=data.weights))
    return 100 * covered, 100 * quantile(2 * np.sinh(half), data.weights, 0.5)


def fits_without(data: Sample) -> dict[str, Coefficients]:
    """Return family -> coefficients fitted without it."""
    return {str(family): fit(data.only(data.families != family)) for family in np.unique(data.families)}


def left_out_half(data: Sample, fits: Mapping[str, Coefficients]) -> Array:
    """Return the half width of every row under the coefficients fitted without its family."""
    half = np.zeros(len(data.errors))
    for family, coefficients in fits.items():
        inside = data.families == family
        half[inside] = data.only(inside).half(coefficients)
    return half


def draws(
    points: Sequence[Point], *, runs: int, take: Callable[[Point, Point], bool], seed: int = 0
) -> list[Drawn]:
    """Return each point with ``runs`` other points of its machine that ``take`` accepts, drawn by seed."""
    generator = np.random.default_rng(seed)
    machines: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        machines[point.machine].append(point)
    rows = []
    for point in points:
        near = machines[point.machine]
        others = [other for other in near if other is not point and take(point, other)]
        if not others or (runs > 1 and len(others) < 2):
            continue
        count = 1 if runs >= len(others) else DRAWS
        for _ in range(count):
            chosen = generator.choice(len(others), min(runs, len(others)), replace=False)
            rows.append(Drawn(point, tuple(others[i] for i in chosen), 1 / count))
    return rows


def same_model(point: Point, other: Point) -> bool:
    """Tell whether both are of one model."""
    return point.model == other.model


def other_model(point: Point, other: Point) -> bool:
    """Tell whether they are of two models."""
    return point.model != other.model


def print_scalars(points: Sequence[Point]) -> None:
    """Print what a scalar from the same and from another model does to the error."""
    print("what a scalar is worth: |log error|, median and 80 % quantile, before -> after")
    for name, take in (("same model", same_model), ("another model", other_model)):
        for runs in RUNS:
            rows = draws(points, runs=runs, take=take)
            weights = np.array([row.weight for row in rows])
            before = np.abs(np.array([row.point.error for row in rows]))
            after = np.abs(np.array([row.error for row in rows]))
            text = [
                f"{quantile(before, weights, share):.3f} -> {quantile(after, weights, share):.3f}"
                for share in (0.5, 0.8)
            ]
            print(f"  {name:14s} {_runs(runs):10s} rows {weights.sum():5.0f}  {'   '.join(text)}")


def _runs(runs: int) -> str:
    return "all others" if runs == RUNS[-1] else f"{runs} run{'s' * (runs > 1)}"


def print_families(data: Sample, half: Array, left_out: Array) -> None:
    """Print coverage and width by family, fitted with and without it."""
    print("80 % bands without calibration: all families fitted | this family left out of the fit")
    for family in [*np.unique(data.families), "all"]:
        inside = (data.families == family) | (family == "all")
        rows = data.only(inside)
        fitted, out = summary(rows, half[inside]), summary(rows, left_out[inside])
        print(
            f"  {family:12s} n={len(rows.errors):4d} cover {fitted[0]:5.1f} % width {fitted[1]:5.1f} % | "
            f"cover {out[0]:5.1f} % width {out[1]:5.1f} %"
        )


def print_calibrated(
    points: Sequence[Point],
    plain: Coefficients,
    scaled: Coefficients,
    without: Mapping[str, Coefficients],
) -> None:
    """Print bands after calibration, over the rows that have another run of their model.

    Args:
        without: family -> calibrated coefficients fitted without it.
    """
    print("80 % bands after a scalar from other runs of the same model")
    for runs in RUNS:
        rows = draws(points, runs=runs, take=same_model)
        after = calibrated(rows)
        before = uncalibrated([row.point for row in rows], [row.weight for row in rows])
        wide, fitted = summary(before, before.half(plain)), summary(after, after.half(scaled))
        out = summary(after, left_out_half(after, without))
        print(
            f"  {_runs(runs):10s} rows {after.weights.sum():4.0f} before: cover {wide[0]:5.1f} % width "
            f"{wide[1]:5.1f} %, after: cover {fitted[0]:5.1f} % width {fitted[1]:5.1f} % "
            f"({fitted[1] / wide[1]:.0%} of it) | family left out of the fit: cover {out[0]:5.1f} % "
            f"width {out[1]:5.1f} %"
        )
        held = after.half(scaled) * NARROW * wide[1] / fitted[1]
        print(f"{'':13s}held at {NARROW:.0%} of the width before: cover {summary(after, held)[0]:.1f} %")


def narrowed(points: Sequence[Point], plain: Coefficients, scaled: Coefficients) -> Coefficients:
    """Return ``scaled``, reduced until bands after one run have NARROW of the width before.

    The bands then cover less than the nominal 80 %; the tables say how much.
    """
    rows = draws(points, runs=1, take=same_model)
    before = uncalibrated([row.point for row in rows], [row.weight for row in rows])
    wide = summary(before, before.half(plain))[1]
    for _ in range(8):  # the width is nearly proportional: the noise floor of a band is not
        after = calibrated(rows)
        share = summary(after, after.half(scaled))[1] / wide
        scaled = scaled * min(1.0, NARROW / share)
    return scaled


def text_of(plain: Coefficients, scaled: Coefficients, source: str) -> str:
    """Return the data file."""
    lines = [
        "# Half width in log of the 80 % band of a step time, per unit of each term's amount; terms add as",
        "# squares (nest_megatron/cost/band.py explains them).  Written by scripts/bench_bands.py --write.",
    ]
    sets = (("uncalibrated", UNCALIBRATED, plain), ("calibrated", CALIBRATED, scaled))
    for name, terms, values in sets:
        pairs = ", ".join(f"{term}: {value:.3f}" for term, value in zip(terms, values, strict=True))
        lines += [f"{name}:", f"  value: {{{pairs}}}", f'  source: "{source}"']
    return "\n".join(lines) + "\n"


def main() -> int:
    """Fit, print the tables, write the data file if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--predictions", type=Path, help="JSON object of record id -> predicted step seconds")
    parser.add_argument("--write", action="store_true", help=f"write conf/validation/{OUT.name}")
    options = parser.parse_args()
    left_out = json.loads(options.predictions.read_text()) if options.predictions else {}
    points = collect(load_records(options.records), left_out)
    data = uncalibrated(points)
    plain = np.round(fit(data), 3)
    half, without = data.half(plain), left_out_half(data, fits_without(data))
    print_families(data, half, without)
    print_scalars(points)
    replayed = calibrated([row for runs in RUNS for row in draws(points, runs=runs, take=same_model)])
    scaled = np.round(narrowed(points, plain, fit(replayed)), 3)
    print_calibrated(points, plain, scaled, fits_without(replayed))
    (covered, width), (out, _) = summary(data, half), summary(data, without)
    source = (
        f"scripts/bench_bands.py, least interval score over {len(points)} published steps of "
        f"{len(np.unique(data.families))} families; uncalibrated bands cover {covered:.1f} % at a median "
        f"width of {width:.1f} %, {out:.1f} % with the family left out of the fit"
    )
    text = text_of(plain, scaled, source)
    print(text, end="")
    if options.write:
        OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
