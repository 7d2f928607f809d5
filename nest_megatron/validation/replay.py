"""Predict every record of a file: the output of ``nest-megatron validate``."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nest_megatron.cost.memory import device_bytes
from nest_megatron.errors import NestError
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.specs.plan import Prediction
from nest_megatron.validation.records import Built, NotComputable, build


def replay(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one prediction entry per record, in order.

    Each has ``id``, ``status`` (``computed``, ``bracket`` or ``unknown``), ``reason``; computable ones
    also the
    peak of the rank that the record's ``mem_scope`` names (else the worst), device peak, feasibility,
    band, step
    time with its band, and the memory terms in bytes.
    """
    return [predict_record(record) for record in records]


def predict_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction entry of one record."""
    try:
        return predict_built(record, build(record))
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
