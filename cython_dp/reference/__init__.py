"""Slow, obvious twin of the compiled solver: same names, same signatures, same results.

Index letters: p pipeline ranks, v chunks per rank, m micro-batches, L layers, C candidates, N nodes.
Chunk j (0 <= j < p*v, model order) runs on pipeline rank j % p.  Everything here is a number: bytes are
int64, times float64 seconds; the meaning of a coefficient is the caller's business.
"""

from cython_dp.columns import (
    NUM_COLUMNS,
    NUM_FEATURES,
    NUM_KINDS,
    NUM_PARAMS,
    RECOMPUTE_BLOCK,
    RECOMPUTE_NONE,
    RECOMPUTE_UNIFORM,
    Column,
    Feature,
    Param,
)
from cython_dp.reference.problem import (
    Float64,
    Int32,
    Int64,
    Problem,
    bounds,
    smallest_block,
    step_time,
)
from cython_dp.reference.schedule import (
    BOUND_SAFETY,
    cycle_period,
    in_flight,
    pipeline_bound,
    schedule_order,
    simulate,
)
from cython_dp.reference.search import LEAVES, Found, best_first, quick_bounds
from cython_dp.reference.stages import chunk_times, stage_features

__all__ = [
    "BOUND_SAFETY",
    "LEAVES",
    "NUM_COLUMNS",
    "NUM_FEATURES",
    "NUM_KINDS",
    "NUM_PARAMS",
    "RECOMPUTE_BLOCK",
    "RECOMPUTE_NONE",
    "RECOMPUTE_UNIFORM",
    "Column",
    "Feature",
    "Float64",
    "Found",
    "Int32",
    "Int64",
    "Param",
    "Problem",
    "best_first",
    "bounds",
    "chunk_times",
    "cycle_period",
    "in_flight",
    "pipeline_bound",
    "quick_bounds",
    "schedule_order",
    "simulate",
    "smallest_block",
    "stage_features",
    "step_time",
]
