"""Compiled floors of time and memory of one candidate; twin: ``cython_dp.reference.quick``."""

from libc.math cimport fmax, fmin

import numpy as np

from cython_dp._typedefs cimport float64_t, int64_t
from cython_dp.problem cimport (
    AGAIN,
    B_FIRST,
    B_LAST,
    BACKWARD,
    BLOCK,
    DENSE_PARAMS,
    EXPERT_PARAMS,
    F_FIRST,
    F_LAST,
    FIRST,
    FIRST_PARAMS,
    FORWARD,
    HELD,
    LAST,
    LAST_PARAMS,
    LIVE,
    LIVE_CHUNKS,
    LIVE_FIRST,
    LIVE_UNITS,
    ONE,
    OPTIMIZER_DENSE,
    OPTIMIZER_EXPERT,
    SYNC_BETA_DENSE,
    SYNC_BETA_EXPERT,
    SYNC_HIDDEN,
    UNIFORM,
    Problem,
    hop_seconds,
)
from cython_dp.schedule cimport NUM_KINDS, alive_forwards
from cython_dp.split cimport cheapest_kinds, least_again

from cython_dp.reference import BOUND_SAFETY as _BOUND_SAFETY

cdef float64_t BOUND_SAFETY = _BOUND_SAFETY
cdef float64_t np_inf = np.inf


cdef float64_t extra_floor(Problem problem, int node) noexcept nogil:
    cdef const float64_t[::1] times = problem.node_times[node]
    cdef int64_t held = problem.node_params[node, FIRST_PARAMS] + problem.node_params[node, LAST_PARAMS]
    cdef float64_t dense = <float64_t>held, expert = 0.0, shown, total
    cdef int k
    cdef int64_t count
    for k in range(NUM_KINDS):
        count = problem.prefix[k, problem.num_layers]
        if count > 0:
            dense += <float64_t>(count * problem.node_params[node, DENSE_PARAMS + k])
            expert += <float64_t>(count * problem.node_params[node, EXPERT_PARAMS + k])
    shown = 1.0 - times[SYNC_HIDDEN]
    total = dense * (shown * times[SYNC_BETA_DENSE] + times[OPTIMIZER_DENSE])
    total += expert * (shown * times[SYNC_BETA_EXPERT] + times[OPTIMIZER_EXPERT])
    return total / problem.node_pp[node] * BOUND_SAFETY


cdef int64_t fewest_with_room(Problem problem, Py_ssize_t i, int64_t limit_bytes) noexcept nogil:
    cdef int64_t low = 1, high = problem.num_layers, middle
    while low < high:
        middle = (low + high) // 2
        if has_room(problem, i, limit_bytes, middle):
            high = middle
        else:
            low = middle + 1
    return low


cdef float64_t least_recomputed_seconds(Problem problem, Py_ssize_t i, int64_t limit_bytes) noexcept nogil:
    # The layers that have no room without recomputation, the cheapest ones.
    cdef const float64_t[::1] times = problem.node_times[problem.node[i]]
    cdef int64_t count = problem.num_recompute[i], plain
    cdef int[NUM_KINDS] kinds
    if problem.mode[i] != BLOCK:
        return 0.0
    if count == 0:
        count = fewest_with_room(problem, i, limit_bytes)
    room(problem, i, limit_bytes, count, &plain)
    count = problem.num_layers - plain
    cheapest_kinds(times, kinds)
    return least_again(
        &problem.prefix[0, 0], problem.num_layers + 1, &times[AGAIN], kinds, 0, problem.num_layers, count
    )


cdef float64_t quick_time(Problem problem, Py_ssize_t i, int64_t limit_bytes) noexcept nogil:
    cdef int node = problem.node[i], p = problem.node_pp[node], v = problem.vpp[i], m = problem.node_m[node]
    cdef const float64_t[::1] times = problem.node_times[node]
    cdef float64_t f = times[F_FIRST] + times[F_LAST], b = times[B_FIRST] + times[B_LAST]
    cdef float64_t least = np_inf, layer_f, layer_b, hop, seconds, chunk
    cdef int k
    cdef int64_t count
    for k in range(NUM_KINDS):
        count = problem.prefix[k, problem.num_layers]
        if count > 0:
            layer_f = times[FORWARD + k]
            layer_b = times[BACKWARD + k]
            if problem.mode[i] == UNIFORM:
                layer_b = layer_b + times[AGAIN + k]
            f = f + count * layer_f
            b = b + count * layer_b
            least = fmin(least, layer_f + layer_b)
    b = b + least_recomputed_seconds(problem, i, limit_bytes)
    hop = hop_seconds(times, p, v)
    if v == 1:
        seconds = f + b + (m - 1) * ((f + b) if m > p else fmax(f, b)) / p + 2 * hop * (p - 1)
    else:
        chunk = problem.floor[i] * least + 2 * hop
        seconds = m * (f + b) / p + chunk * (p - 1) / 2
        seconds += (times[F_FIRST] + times[B_FIRST]) * (p - 1) / p
    return seconds * BOUND_SAFETY + extra_floor(problem, node)


cdef bint has_room(Problem problem, Py_ssize_t i, int64_t limit_bytes, int64_t count) noexcept nogil:
    cdef int64_t plain
    return room(problem, i, limit_bytes, count, &plain) >= problem.num_layers


cdef int64_t room(
    Problem problem, Py_ssize_t i, int64_t limit_bytes, int64_t count, int64_t* plain_layers
) noexcept nogil:
    # `count`: recomputed layers of each chunk in block mode.
    cdef int node = problem.node[i], p = problem.node_pp[node], v = problem.vpp[i], m = problem.node_m[node]
    cdef int group = problem.group[i], mode = problem.mode[i], rank, chunk, phase, k
    cdef int64_t held = 0, most, fixed, plain, again, saved, unit, alive, alive_first, alive_last, layers
    cdef int64_t each = count if mode == BLOCK else 0, unstored
    count = each * v
    plain_layers[0] = 0
    for rank in range(p):
        alive = 0
        for chunk in range(v):
            alive += alive_forwards(p, v, m, group, rank, chunk)
        alive_last = alive_forwards(p, v, m, group, rank, v - 1)
        most = unstored = problem.num_layers
        for phase in range(problem.num_phases):
            fixed = problem.node_memory[node, phase, ONE]
            fixed += alive * problem.node_memory[node, phase, LIVE_CHUNKS]
            if rank == 0:
                fixed += problem.node_memory[node, phase, FIRST]
                alive_first = alive_forwards(p, v, m, group, rank, 0)
                fixed += alive_first * problem.node_memory[node, phase, LIVE_FIRST]
            if rank == p - 1:
                fixed += problem.node_memory[node, phase, LAST]
            if fixed > limit_bytes:
                return -1
            plain = again = -1
            for k in range(NUM_KINDS):
                if problem.prefix[k, problem.num_layers] == 0:
                    continue
                saved = problem.node_memory[node, phase, LIVE + k]
                unit = problem.node_memory[node, phase, LIVE_UNITS]
                if mode == UNIFORM:
                    saved = unit = unit // problem.num_recompute[i]
                saved = problem.node_memory[node, phase, HELD + k] + alive_last * saved
                unit = problem.node_memory[node, phase, HELD + k] + alive_last * unit
                if plain < 0 or saved < plain:
                    plain = saved
                if again < 0 or unit < again:
                    again = unit
            if again > plain:
                again = plain
            # The recomputed layers first, then as many plain ones as still fit.
            layers = count
            if again > 0 and (limit_bytes - fixed) // again < count:
                layers = (limit_bytes - fixed) // again
            elif plain > 0:
                layers += (limit_bytes - fixed - count * again) // plain
            else:
                layers = most
            if layers < most:
                most = layers
            # A chunk that keeps a layer recomputes `each` others.
            if plain > 0 and limit_bytes - fixed < each * again:
                unstored = 0
            elif plain > 0 and (limit_bytes - fixed - each * again) // plain < unstored:
                unstored = (limit_bytes - fixed - each * again) // plain
        held += most
        plain_layers[0] += unstored
    if plain_layers[0] > problem.num_layers:
        plain_layers[0] = problem.num_layers
    return held
