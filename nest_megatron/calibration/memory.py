"""``nest-megatron calibrate memory RUN.json``: learn from one logged peak of device memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nest_megatron.calibration.runs import predict_run, read_run
from nest_megatron.calibration.store import MemoryCalibration, key_of, remember_memory
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.units import GIB, gib
from nest_megatron.validation.metrics import measured_peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What was learned and where it was stored."""

    key: str
    entry: MemoryCalibration
    predicted_allocated_bytes: int
    path: Path

    def render(self) -> str:
        """Return the result as text."""
        entry = self.entry
        measured, predicted = gib(entry.measured_allocated_bytes), gib(self.predicted_allocated_bytes)
        return (
            f"{self.key}: measured {measured:.2f} GiB allocated, predicted {predicted:.2f} GiB: "
            f"x {entry.allocated_ratio:.3f}; reserved / allocated {entry.reserved_ratio:.3f}\n"
            f"stored in {self.path}; every plan for this machine and stack uses it"
        )


def calibrate_memory(path: Path, *, store: Path | None = None) -> Calibrated:
    """Compare one run record with its prediction and remember the ratios.

    Args:
        path: one record of the measured schema, with ``measured.peak_mem_bytes`` (or ``peak_mem_gb``) and
            ``peak_reserved_bytes`` (what torch reports as max reserved).

    Raises:
        BadInputError: the record is unreadable, lacks a figure, or cannot be predicted.
    """
    run = read_run(path)
    record = run.record
    measured = measured_peak_bytes(record)
    if not measured or measured <= 0:
        raise BadInputError(
            "NEST-K01", f"{path} has no measured peak", factors=[Factor("measured.peak_mem_bytes", "missing")]
        )
    reserved = _reserved_bytes(record, path)
    prediction = predict_run(run)
    predicted = int(prediction["peak_allocated_bytes"])
    entry = MemoryCalibration(
        allocated_ratio=measured / predicted,
        reserved_ratio=reserved / measured,
        run=run.name,
        measured_allocated_bytes=round(measured),
    )
    key = key_of(run.built.job, run.built.cluster)
    stored = remember_memory(key, entry, store)
    return Calibrated(key=key, entry=entry, predicted_allocated_bytes=predicted, path=stored)


def _reserved_bytes(record: dict[str, Any], path: Path) -> float:
    """Return the reserved peak.

    Raises:
        BadInputError: it is missing, or smaller than the allocated one.
    """
    reserved = record.get("peak_reserved_bytes") or record["measured"].get("peak_reserved_bytes")
    if reserved is None and record["measured"].get("peak_reserved_gb"):
        reserved = record["measured"]["peak_reserved_gb"] * GIB
    allocated = measured_peak_bytes(record)
    if not isinstance(reserved, int | float) or not allocated or reserved < allocated:
        raise BadInputError(
            "NEST-K01",
            f"{path}: peak_reserved_bytes must be given, and not below the allocated peak",
            factors=[Factor("peak_reserved_bytes", reserved, str(path)), Factor("allocated", allocated)],
        )
    return float(reserved)
