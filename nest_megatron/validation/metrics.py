"""The measured side of every table: what a record says it took, which rows count, relative errors.

Definitions are those of the public scoring script of the measured data, so that both print the same figures.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.units import GB, GIB

Record = Mapping[str, Any]
#: A record beside the prediction entry of ``validation.replay``, empty when there is none.
Row = tuple[Record, Record]

#: Families whose memory figure is what nvidia-smi shows.
DEVICE_FAMILIES = ("bigscience", "flagperf", "primus")
#: Families whose printed GB are 1e9 bytes.
DECIMAL_FAMILIES = ("bridge",)
#: Families whose times are not performance figures, and notes that disqualify a time.
UNTIMED_FAMILIES = ("mcoreci",)
UNTIMED_NOTES = ("CAUTION", "DOES NOT MATCH", "sanity run", "+/-40", "LoRA")
#: Measured differences below this are ties (noise floor of the measured data).
NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of one group, in percent."""

    count: int
    mape: float
    median: float
    p90: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        """Return the summary of relative errors (prediction / measurement - 1)."""
        ordered = sorted(abs(error) for error in errors)
        return cls(
            count=len(errors),
            mape=100 * statistics.fmean(ordered),
            median=100 * statistics.median(ordered),
            p90=100 * ordered[int(0.9 * (len(ordered) - 1))],
            bias=100 * statistics.fmean(errors),
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """One row with a usable measured time: ``predicted_s`` is None where the record cannot be predicted."""

    record: Record
    prediction: Record
    measured_s: float

    @property
    def predicted_s(self) -> float | None:
        """Predicted step seconds."""
        seconds = self.prediction.get("step_time_s")
        return float(seconds) if seconds else None

    @property
    def ratio(self) -> float:
        """Prediction over measurement.

        Raises:
            ValueError: there is no prediction.
        """
        if self.predicted_s is None:
            raise ValueError(f"{self.record['id']} has no prediction")
        return self.predicted_s / self.measured_s


def rows_of(records: Sequence[Record], predictions: Sequence[Record]) -> list[Row]:
    """Return each record beside its prediction."""
    by_id = {prediction["id"]: prediction for prediction in predictions}
    return [(record, by_id.get(record["id"], {})) for record in records]


def timed_rows(rows: Sequence[Row]) -> list[Timed]:
    """Return the rows whose time is a performance figure, predicted or not."""
    found = []
    for record, prediction in rows:
        seconds = measured_step_s(record)
        if seconds and is_timed(record):
            found.append(Timed(record, prediction, seconds))
    return found


def predicted_rows(rows: Sequence[Row]) -> list[Timed]:
    """Return the timed rows that have a prediction."""
    return [row for row in timed_rows(rows) if row.predicted_s is not None]


def sweeps_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the members of each layout sweep: only layout, batch split, recompute or sharding change."""
    sweeps: dict[str, list[Row]] = defaultdict(list)
    for record, prediction in rows:
        if record.get("group_kind") == "layout-sweep":
            sweeps[str(record["group"])].append((record, prediction))
    return sweeps


def measured_step_s(record: Record) -> float | None:
    """Return the measured step seconds, from tokens/s where only that is printed."""
    measured = record["measured"]
    if measured.get("step_time_s"):
        return float(measured["step_time_s"])
    rate = measured.get("tokens_per_s_per_gpu")
    if rate and record.get("global_batch") and record.get("seq_len") and record.get("num_gpus"):
        return float(record["global_batch"] * record["seq_len"] / (rate * record["num_gpus"]))
    return None


def measured_peak_bytes(record: Record) -> float | None:
    """Return the measured peak, bytes."""
    measured = record["measured"]
    if measured.get("peak_mem_bytes"):
        return float(measured["peak_mem_bytes"])
    if measured.get("peak_mem_gb"):
        return float(measured["peak_mem_gb"] * (GB if record["family"] in DECIMAL_FAMILIES else GIB))
    return None


def is_timed(record: Record) -> bool:
    """Return whether the record's time counts: its family is timed and no note disqualifies it."""
    notes = str(record.get("notes"))
    return (
        bool(record.get("seq_len"))
        and record["family"] not in UNTIMED_FAMILIES
        and not any(word in notes for word in UNTIMED_NOTES)
    )
