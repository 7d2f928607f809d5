"""Types of the compiled search; meaning and units: ``cython_dp.reference.search``."""

from cython_dp.problem import Problem
from cython_dp.reference import Float64, Found

def quick_bounds(problem: Problem, limit_bytes: int) -> Float64: ...
def best_first(
    problem: Problem,
    limit_bytes: int,
    slack: float = 0.0,
    *,
    cutoff_s: float = ...,
    leaves: int = ...,
    budget: int = ...,
) -> Found: ...
