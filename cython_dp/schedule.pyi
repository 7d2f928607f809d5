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
    p2p_s: float | Sequence[float] | Float64,
) -> float: ...
def cycle_period(
    forward: Sequence[float] | Float64,
    backward: Sequence[float] | Float64,
    p: int,
    p2p_s: float | Sequence[float] | Float64,
) -> float: ...
def hop_times(p2p_s: float | Sequence[float] | Float64, p: int) -> Float64: ...
def pipeline_bound(
    forward: Sequence[float] | Float64,
    backward: Sequence[float] | Float64,
    p: int,
    v: int,
    m: int,
    group: int,
    p2p_s: float | Sequence[float] | Float64,
) -> float: ...
def in_flight(p: int, v: int, m: int, group: int, rank: int) -> list[int]: ...
