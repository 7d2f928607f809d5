"""Compiled free split of one candidate, and the stages that fit in memory; twin: ``reference.reach``."""

from libc.math cimport fmin

import numpy as np

from cython_dp._typedefs cimport float64_t, int32_t, int64_t
from cython_dp.problem cimport (
    AGAIN,
    B_FIRST,
    B_LAST,
    BACKWARD,
    BLOCK,
    F_FIRST,
    F_LAST,
    FORWARD,
    NUM_FEATURES,
    UNIFORM,
    UNIT,
    Problem,
    hop_seconds,
    largest_phase,
    rank_features,
)
from cython_dp.schedule cimport NUM_KINDS
from cython_dp.split cimport FreeSplit, cheapest_kinds

cdef float64_t np_inf = np.inf


cdef void fill_split(Problem problem, Py_ssize_t i, int num_recompute, FreeSplit* split) noexcept nogil:
    cdef int node = problem.node[i], x, k
    cdef const float64_t[::1] times = problem.node_times[node]
    cdef bint uniform = problem.mode[i] == UNIFORM, blocks = problem.mode[i] == BLOCK
    cdef float64_t f, b, again
    split.p = problem.node_pp[node]
    split.m = problem.node_m[node]
    split.num_layers = problem.num_layers
    split.least = problem.least
    split.num_again = num_recompute if blocks else 0
    split.first_f = times[F_FIRST]
    split.first_b = times[B_FIRST]
    split.last_f = times[F_LAST]
    split.last_b = times[B_LAST]
    split.hop_s = hop_seconds(times, split.p, 1)
    split.again_s = np_inf if blocks else 0.0
    cheapest_kinds(times, split.kinds)
    for k in range(NUM_KINDS):
        split.kind_again_s[k] = times[AGAIN + k]
        if blocks and problem.prefix[k, problem.num_layers] > 0:
            split.again_s = fmin(split.again_s, times[AGAIN + k])
    for x in range(problem.num_layers + 1):
        f = 0.0
        b = 0.0
        split.again_before[x] = 0.0
        split.spread_before[x] = 0.0
        split.spread_after[x] = 0.0
        for k in range(NUM_KINDS):
            if blocks:
                split.again_before[x] += problem.prefix[k, x] * times[AGAIN + k]
            again = times[AGAIN + k] if uniform else 0.0
            f += problem.prefix[k, x] * times[FORWARD + k]
            b += problem.prefix[k, x] * (times[BACKWARD + k] + again)
        split.forward_s[x] = f
        split.backward_s[x] = b


cdef bint stage_fits(
    Problem problem, Py_ssize_t i, int rank, int x, int y, int num_recompute, bint units, int64_t limit_bytes,
    FreeSplit* split
) noexcept nogil:
    cdef int node = problem.node[i], p = problem.node_pp[node], k
    cdef int64_t row[NUM_FEATURES]
    cdef int32_t phase
    split.one_size[rank] = y - x
    split.one_start[rank] = x
    rank_features(
        split.one_size, split.one_start, problem.prefix, p, 1, problem.node_m[node], problem.group[i],
        problem.mode[i], num_recompute, rank, row
    )
    if not units:
        for k in range(NUM_KINDS):
            row[UNIT + k] = 0
    return largest_phase(problem.node_memory[node], row, &phase) <= limit_bytes


cdef void fill_reach(
    Problem problem, Py_ssize_t i, int num_recompute, int64_t limit_bytes, FreeSplit* split
) noexcept nogil:
    # Needs grow with the stage: ends grow with starts, so starts that no split has are left closed.
    cdef int p = problem.node_pp[problem.node[i]], width = problem.num_layers + 1, rank, x, y = 0, k
    cdef int kinds = 0, earliest = problem.num_layers
    cdef bint units
    cdef int32_t* reach
    cdef int32_t* latest = split.latest
    for k in range(NUM_KINDS):
        kinds += problem.prefix[k, problem.num_layers] > 0
    units = problem.mode[i] != BLOCK or kinds == 1
    for rank in range(p):
        reach = split.reach + rank * width
        for x in range(width):
            reach[x] = x - 1
    for rank in range(p):
        latest[rank] = y
        x = y
        while y < problem.num_layers and stage_fits(
            problem, i, rank, x, y + 1, num_recompute, units, limit_bytes, split
        ):
            y += 1
    if y < problem.num_layers:
        return
    for rank in range(p - 1, -1, -1):
        reach = split.reach + rank * width
        y = problem.num_layers if rank == p - 1 else latest[rank + 1]
        for x in range(latest[rank], -1, -1):
            while y >= x and not stage_fits(
                problem, i, rank, x, y, num_recompute, units, limit_bytes, split
            ):
                y -= 1
            if y < earliest or y < x:
                break
            reach[x] = y
        else:
            x = -1
        earliest = x + 1
