"""Predict every record of a file: the output of ``nest-megatron validate``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from nest_megatron.cost.memory import device_bytes
from nest_megatron.errors import NestError
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.plan import Prediction
from nest_megatron.validation.record_layout import NotComputable
from nest_megatron.validation.records import Built, build

#: What lays a calibration over the job of a record.
Calibrate = Callable[[TrainJob, Cluster], TrainJob]


def replay(records: list[dict[str, Any]], *, calibrate: Calibrate | None = None) -> list[dict[str, Any]]:
    """Return one prediction entry per record, in order.

    Each has ``id``, ``status`` (``computed``, ``bracket`` or ``unknown``), ``reason``; computable ones also
    the peak of the rank that the record's ``mem_scope`` names (else the worst), device peak, feasibility,
    band, step time with its band and its terms in seconds, and the memory terms in bytes.

    Args:
        calibrate: lays a calibration over the job of each record.
    """
    return [predict_record(record, calibrate=calibrate) for record in records]


def predict_record(record: dict[str, Any], *, calibrate: Calibrate | None = None) -> dict[str, Any]:
    """Return the prediction entry of one record."""
    try:
        built = build(record)
        if calibrate is not None:
            built = dataclasses.replace(built, job=calibrate(built.job, built.cluster))
        return predict_built(record, built)
    except NotComputable as reason:
        return {"id": record["id"], "status": "unknown", "reason": str(reason)}
    except NestError as error:
        return {"id": record["id"], "status": "unknown", "reason": error.message}


def predict_built(record: dict[str, Any], built: Built) -> dict[str, Any]:
    """Return the prediction entry of a record that was built already.

    Raises:
        NestError: the job cannot be priced.
    """
    prediction = Evaluator(built.job, built.cluster).predict([built.layout])[0]
    stage = prediction.stages[_scope(record, prediction)]
    device = int(device_bytes(np.array([stage.allocated_bytes]), built.job)[0])
    return {
        "id": record["id"],
        "status": "bracket" if built.brackets else "computed",
        "reason": "; ".join(built.brackets),
        "peak_allocated_bytes": stage.allocated_bytes,
        "peak_device_bytes": device,
        "worst_allocated_bytes": prediction.peak_allocated_bytes,
        "feasible": prediction.feasible,
        "band": prediction.band,
        "step_time_s": prediction.step_time_s,
        "step_time_band_s": list(prediction.step_time_band_s),
        "time_split": prediction.time_split,
        "terms": stage.terms_bytes,
    }


def _scope(record: dict[str, Any], prediction: Prediction) -> int:
    """Return the stage whose memory the source printed."""
    scope = str((record.get("measured") or {}).get("mem_scope") or "")
    if "last rank" in scope:
        return len(prediction.stages) - 1
    if re.search(r"rank-?0", scope):
        return 0
    return max(range(len(prediction.stages)), key=lambda i: prediction.stages[i].allocated_bytes)
