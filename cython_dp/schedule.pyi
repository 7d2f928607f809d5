"""Types of the compiled schedules; meaning and units: ``cython_dp.reference``."""

from collections.abc import Sequence

from cython_dp.reference import Float64

def simulate(
    forward: Sequence[float] | Float64,
    backward: Sequence[float] | Float64,
    p: int,
    v: int,
    m: int,
    group: int,
    p2p_s: float,
) -> float: ...
def pipeline_bound(
    forward: Sequence[float] | Float64,
    backward: Sequence[float] | Float64,
    p: int,
    v: int,
    m: int,
    p2p_s: float,
) -> float: ...
def in_flight(p: int, v: int, m: int, group: int, rank: int) -> list[int]: ...
