"""Types of the compiled problem; meaning and units: ``cython_dp.reference.problem``."""

from cython_dp.reference import Float64, Int32, Int64

class Problem:
    def __init__(
        self,
        *,
        prefix: Int32,
        node_pp: Int32,
        node_m: Int32,
        node_times: Float64,
        node_params: Int64,
        node_memory: Int64,
        node: Int32,
        vpp: Int32,
        group: Int32,
        mode: Int32,
        num_recompute: Int32,
        split_start: Int32,
        sizes: Int32,
        free: Int32 | None = None,
        choice_first: Int32 | None = None,
        choice_count: Int32 | None = None,
        choices: Int32 | None = None,
        floor: Int32 | None = None,
        least: int = 1,
    ) -> None: ...
    def __len__(self) -> int: ...

def bounds(problem: Problem) -> tuple[Float64, Float64, Int64, Int32, Int32]: ...
def smallest_block(problem: Problem, limit_bytes: int) -> Int32: ...
def step_time(problem: Problem, i: int, extra_s: float) -> float: ...
