"""The numeric solver: pipeline schedules, memory peaks and best-first search over candidate layouts.

``NEST_DP_IMPL=python`` selects the slow twin; without it a missing compiled extension is an error, since a
search that is silently a hundred times slower is not what the caller asked for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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
from cython_dp.reference import LEAVES, Found, chunk_times, stage_features

IMPLEMENTATION = os.environ.get("NEST_DP_IMPL", "cython")

if TYPE_CHECKING or IMPLEMENTATION == "python":
    from cython_dp.reference import (
        Problem,
        best_first,
        bounds,
        cycle_period,
        in_flight,
        pipeline_bound,
        quick_bounds,
        simulate,
        smallest_block,
        step_time,
    )
elif IMPLEMENTATION == "cython":
    try:
        from cython_dp.problem import Problem, bounds, smallest_block, step_time
        from cython_dp.schedule import cycle_period, in_flight, pipeline_bound, simulate
        from cython_dp.search import best_first, quick_bounds
    except ImportError as error:
        raise ImportError(
            f"the compiled solver of cython_dp cannot be loaded ({error}); build it with "
            "`pip install -e .`, or set NEST_DP_IMPL=python for the slow twin"
        ) from error
else:
    raise ImportError(f"NEST_DP_IMPL is {IMPLEMENTATION!r}; known: cython, python")

__all__ = [
    "IMPLEMENTATION",
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
    "Found",
    "Param",
    "Problem",
    "best_first",
    "bounds",
    "chunk_times",
    "cycle_period",
    "in_flight",
    "pipeline_bound",
    "quick_bounds",
    "simulate",
    "smallest_block",
    "stage_features",
    "step_time",
]
