"""Measured rows as a least-squares problem in the logarithms of the constants."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nest_megatron.errors import NestError
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.validation.metrics import is_timed, measured_step_s
from nest_megatron.validation.record_layout import NotComputable
from nest_megatron.validation.records import Built, build
from scripts.step_time.constants import Constant, current_value, load_exclusion, replaced

Vector = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

#: Log errors beyond this count linearly, not squared: some rows are wrong for reasons of their own.
HUBER = 0.06
#: Standard deviation of one row's log error, against which the priors weigh.
NOISE = 0.08
#: A family of fewer rows counts as so many: single published anchors are not outvoted by long tables.
LEAST_ROWS = 36
#: Weight of the deviations from a sweep's mean error.
SWEEP_WEIGHT = 1.0
STEP = 0.02
#: No constant moves further than this in one iteration.
LONGEST_STEP = 0.3


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One record that has a usable step time."""

    record: Mapping[str, Any]
    built: Built
    measured_s: float


def fitted_mask(rows: Sequence[MeasuredRow]) -> Mask:
    """Return the rows to fit on: all whose source reports no fault (``not_fitted`` of the priors)."""
    left_out = load_exclusion()
    return np.array(
        [not re.search(left_out["match"], str(row.record.get(left_out["field"]))) for row in rows]
    )


def measured_rows(records: Sequence[dict[str, Any]]) -> list[MeasuredRow]:
    """Return the rows that can be predicted and whose notes do not disqualify the time."""
    rows = []
    for record in records:
        seconds = measured_step_s(record)
        if not seconds or not is_timed(record):
            continue
        try:
            rows.append(MeasuredRow(record, build(record), seconds))
        except (NotComputable, NestError):
            continue
    return rows


class Problem:
    """Log errors of all rows as a function of the log constants."""

    def __init__(self, rows: Sequence[MeasuredRow], constants: Sequence[Constant]) -> None:
        self.rows, self.constants = rows, constants
        self._fitted = fitted_mask(rows)
        sizes = Counter(row.record["family"] for row in rows)
        self._weight = np.array([max(1.0, LEAST_ROWS / sizes[row.record["family"]]) for row in rows])
        self._affected: list[Mask] | None = None
        sweeps: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            if row.record.get("group_kind") == "layout-sweep":
                sweeps.setdefault(str(row.record["group"]), []).append(i)
        self.sweeps = [np.array(members) for members in sweeps.values() if len(members) > 1]

    def current(self) -> Vector:
        """Return the log of the values in conf/ now."""
        return np.log([current_value(constant) for constant in self.constants])

    def errors(self, logs: Vector, only: Mask | None = None) -> Vector:
        """Return log(predicted / measured) of every row, or of ``only`` some."""
        rows = self.rows if only is None else [row for row, keep in zip(self.rows, only, strict=True) if keep]
        values = np.exp(logs)
        return np.array([self._error(row, values) for row in rows])

    def _error(self, row: MeasuredRow, values: Vector) -> float:
        job, cluster = replaced(row.built.job, row.built.cluster, self.constants, values.tolist())
        return float(np.log(Evaluator(job, cluster).step_times_s([row.built.layout])[0] / row.measured_s))

    def _may_affect(self, constant: Constant) -> Mask:
        """Return the rows whose accelerator or stack has ``constant`` at all."""
        if constant.scope == "time":
            return np.ones(len(self.rows), dtype=bool)
        if constant.scope == "profile":
            return np.array([row.built.job.profile.name in constant.profiles for row in self.rows])
        return np.array([row.built.cluster.accelerator.generation == constant.scope for row in self.rows])

    def jacobian(self, logs: Vector, errors: Vector) -> Vector:
        """Return d error / d log constant, (rows, constants); rows that a constant missed once stay 0."""
        found = np.zeros((len(self.rows), len(self.constants)))
        affected = self._affected or [self._may_affect(constant) for constant in self.constants]
        for j, mask in enumerate(affected):
            moved = logs.copy()
            moved[j] += STEP
            found[mask, j] = (self.errors(moved, mask) - errors[mask]) / STEP
        self._affected = self._affected or [column != 0 for column in found.T]
        return found

    def fit(self, start: Vector, *, iterations: int, refresh: int = 2) -> Vector:
        """Return the log constants that minimise the weighted errors and the prior.

        Args:
            refresh: iterations that share one Jacobian; the errors are new in each.
        """
        logs = start
        for number in range(iterations):
            errors = self.errors(logs)
            if number % refresh == 0:
                slope = self.jacobian(logs, errors)
            logs = self._step(logs, errors, slope, self._fitted)
        return logs

    def fit_without(self, left_out: Mask, start: Vector, slope: Vector, *, iterations: int = 2) -> Vector:
        """Return the constants fitted without ``left_out`` rows, by steps with the Jacobian at ``start``."""
        logs, train = start, ~left_out & self._fitted
        for _ in range(iterations):
            errors = np.zeros(len(self.rows))
            errors[train] = self.errors(logs, train)
            logs = self._step(logs, errors, slope, train)
        return logs

    def _step(self, logs: Vector, errors: Vector, slope: Vector, rows: Mask) -> Vector:
        """Return one Gauss-Newton step from ``logs`` on ``rows``."""
        centre = np.log([constant.centre for constant in self.constants])
        sigma = np.array([constant.sigma for constant in self.constants])
        ceiling = np.log([constant.ceiling for constant in self.constants])
        lhs, rhs = self._normal_equations(errors, slope, rows)
        lhs += np.diag(1 / sigma**2)
        rhs -= (logs - centre) / sigma**2
        step = np.clip(np.linalg.solve(lhs, rhs), -LONGEST_STEP, LONGEST_STEP)
        return np.minimum(logs + step, ceiling)

    def _normal_equations(self, errors: Vector, slope: Vector, rows: Mask) -> tuple[Vector, Vector]:
        """Return J'WJ and -J'We of row errors and of the deviations inside sweeps."""
        blocks = [(errors[rows], slope[rows], self._weight[rows])]
        for members in self.sweeps:
            kept = members[rows[members]]
            if len(kept) > 1:
                centred = errors[kept] - errors[kept].mean(), slope[kept] - slope[kept].mean(axis=0)
                blocks.append((*centred, np.full(len(kept), SWEEP_WEIGHT)))
        size = slope.shape[1]
        lhs, rhs = np.zeros((size, size)), np.zeros(size)
        for error, jacobian, share in blocks:
            weight = share / NOISE**2 * np.minimum(1.0, HUBER / np.maximum(np.abs(error), 1e-9))
            lhs += jacobian.T @ (weight[:, None] * jacobian)
            rhs -= jacobian.T @ (weight * error)
        return lhs, rhs

    def predictions(self, errors: Vector) -> dict[str, Any]:
        """Return the predictions file of ``errors``, for the scoring script."""
        found = [
            {"id": row.record["id"], "step_time_s": float(np.exp(error) * row.measured_s)}
            for row, error in zip(self.rows, errors, strict=True)
            if np.isfinite(error)
        ]
        return {"records": found}
