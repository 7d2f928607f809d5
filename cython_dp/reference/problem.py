"""The arrays of one search, and the bounds, memory peaks and step times of its candidates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cython_dp.columns import RECOMPUTE_BLOCK, Column
from cython_dp.reference.schedule import busy_time, pipeline_bound, simulate
from cython_dp.reference.stages import chunk_times, peak_memory, stage_features, sync_times

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


class Problem:
    """The arrays of one search: N nodes (degrees) and C candidates (a node with chunks, splits, recompute).

    Args:
        prefix: (NUM_KINDS, L + 1) int32, layers of each kind before each layer.
        node_pp, node_m: (N,) int32.
        node_times: (N, NUM_COLUMNS) float64 seconds, see ``columns.Column``.
        node_params: (N, NUM_PARAMS) int64 elements per rank.
        node_memory: (N, phases, NUM_FEATURES) int64 bytes per feature.
        node, vpp, group, mode, num_recompute, split_start: (C,) int32; ``num_recompute`` 0 in block mode
        means
            as few layers as the memory limit needs.
        sizes: concatenated layer counts per chunk; candidate i owns ``sizes[split_start[i]:][:p*v]``.
        free: (C,) int32, 1 where the layers may be dealt to the stages (vpp = 1) in any way.
        choice_first, choice_count: (C,) int32, the other candidates choose among the splits that start at
            ``choices[choice_first[i]:][:choice_count[i]]``; by default their own only.
        choices: (S,) int32 starts in ``sizes``.
        floor: (C,) int32, the fewest layers of a chunk of the first pp among the choices.
        least: fewest layers of a chunk of a free split.
    """

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
    ) -> None:
        count = len(node)
        self.prefix = prefix
        self.node_pp, self.node_m = node_pp, node_m
        self.node_times, self.node_params, self.node_memory = node_times, node_params, node_memory
        self.node, self.vpp, self.group = node, vpp, group
        self.mode, self.num_recompute = mode, num_recompute
        self.split_start, self.sizes = split_start, sizes
        self.free = np.zeros(count, np.int32) if free is None else free
        self.choice_first = np.arange(count, dtype=np.int32) if choice_first is None else choice_first
        self.choice_count = np.ones(count, np.int32) if choice_count is None else choice_count
        self.choices = split_start if choices is None else choices
        self.floor = np.zeros(count, np.int32) if floor is None else floor
        self.least = least

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.node)

    def shape(self, i: int) -> tuple[Int32, int, int, int, int, int, int, int]:
        """Return (sizes, p, v, m, group, mode, num_recompute, node) of candidate ``i``."""
        node = int(self.node[i])
        p, v = int(self.node_pp[node]), int(self.vpp[i])
        start = int(self.split_start[i])
        sizes = self.sizes[start : start + p * v]
        return (
            sizes,
            p,
            v,
            int(self.node_m[node]),
            int(self.group[i]),
            int(self.mode[i]),
            int(self.num_recompute[i]),
            node,
        )


def hop_s(times: Sequence[float] | Float64, v: int) -> float:
    """Return the latency between neighbouring ranks that is not hidden."""
    hidden = times[Column.P2P_HIDDEN] if v > 1 else 0.0
    return float(times[Column.P2P]) * (1.0 - hidden)


def bound_of(
    problem: Problem, i: int, sizes: Sequence[int] | Int32, num_recompute: int
) -> tuple[float, float, tuple[int, int, int]]:
    """Return (bound s, sync + optimizer s, (peak bytes, rank, phase)) of candidate ``i`` with these sizes."""
    _, p, v, m, group, mode, _, node = problem.shape(i)
    times = problem.node_times[node]
    features = stage_features(sizes, problem.prefix, p, v, m, group, mode, num_recompute)
    forward, backward = chunk_times(sizes, problem.prefix, p, v, mode, num_recompute, times)
    busy = [busy_time(forward, backward, p, v, rank) for rank in range(p)]
    sync, optimizer = sync_times(features, busy, times, problem.node_params[node])
    extra = sync + optimizer
    bound = pipeline_bound(forward, backward, p, v, m, group, hop_s(times, v)) + extra
    return bound, extra, peak_memory(features, problem.node_memory[node])


def bounds(problem: Problem) -> tuple[Float64, Float64, Int64, Int32, Int32]:
    """Return per candidate: lower bound (s), additive sync + optimizer time (s), peak bytes, rank, phase."""
    count = len(problem)
    bound_s, extra_s = np.empty(count), np.empty(count)
    peak = np.empty(count, dtype=np.int64)
    worst_rank, worst_phase = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    for i in range(count):
        sizes, num_recompute = problem.shape(i)[0], problem.shape(i)[6]
        bound_s[i], extra_s[i], (peak[i], worst_rank[i], worst_phase[i]) = bound_of(
            problem, i, sizes, num_recompute
        )
    return bound_s, extra_s, peak, worst_rank, worst_phase


def fewest_recomputed(problem: Problem, i: int, sizes: Sequence[int] | Int32, limit_bytes: int) -> int:
    """Return the fewest recomputed layers per chunk, below the largest chunk, that keep the limit; else 0."""
    for layers in range(1, int(max(sizes))):
        if bound_of(problem, i, sizes, layers)[2][0] <= limit_bytes:
            return layers
    return 0


def smallest_block(problem: Problem, limit_bytes: int) -> Int32:
    """Return per candidate the fewest recomputed layers per chunk whose peak is at most ``limit_bytes``.

    Only candidates in block mode are searched, between 1 and the largest chunk less one; 0 means none is
    enough, or another mode.  Memory never grows with the number of layers, so bisection is exact.
    """
    found = np.zeros(len(problem), dtype=np.int32)
    for i in range(len(problem)):
        if problem.mode[i] == RECOMPUTE_BLOCK:
            found[i] = fewest_recomputed(problem, i, problem.shape(i)[0], limit_bytes)
    return found


def time_of(
    problem: Problem, i: int, sizes: Sequence[int] | Int32, num_recompute: int, extra_s: float
) -> float:
    """Return the simulated step time of candidate ``i`` with these sizes and this recomputation."""
    _, p, v, m, group, mode, _, node = problem.shape(i)
    times = problem.node_times[node]
    forward, backward = chunk_times(sizes, problem.prefix, p, v, mode, num_recompute, times)
    return simulate(forward, backward, p, v, m, group, hop_s(times, v)) + extra_s


def step_time(problem: Problem, i: int, extra_s: float) -> float:
    """Return the simulated step time of candidate ``i``: pipeline makespan plus its additive part."""
    sizes, num_recompute = problem.shape(i)[0], problem.shape(i)[6]
    return time_of(problem, i, sizes, num_recompute, extra_s)
