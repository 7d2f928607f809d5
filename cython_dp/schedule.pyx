"""Compiled pipeline schedules; ``cython_dp.reference`` is the readable twin."""

from libc.math cimport fmax
from libc.stdlib cimport free, malloc

import numpy as np

from cython_dp._typedefs cimport float64_t, int32_t, int64_t

cdef enum:
    FORWARD = 0
    BACKWARD = 4
    AGAIN = 8
    F_FIRST = 12
    B_FIRST = 13
    F_LAST = 14
    B_LAST = 15

cdef enum:
    UNIFORM = 1
    BLOCK = 2

cdef float64_t BOUND_SAFETY = 1.0 - 1e-9


cdef Chunk split_chunk(
    int size, int start, const int32_t[:, ::1] prefix, int mode, int num_recompute
) noexcept nogil:
    cdef Chunk chunk
    cdef int k, again = 0
    chunk.units = 0
    if mode == UNIFORM and size > 0:
        again = size
        chunk.units = (size + num_recompute - 1) // num_recompute
    elif mode == BLOCK:
        again = num_recompute if num_recompute < size else size
        chunk.units = again
    for k in range(NUM_KINDS):
        chunk.again[k] = prefix[k, start + again] - prefix[k, start]
        chunk.plain[k] = prefix[k, start + size] - prefix[k, start + again]
    return chunk


cdef int64_t alive_forwards(int p, int v, int m, int group, int rank, int chunk) noexcept nogil:
    cdef int64_t alive, cycles, rest
    if v == 1:
        return m if m < p - rank else p - rank
    alive = <int64_t>2 * (p - rank - 1) + <int64_t>(v - 1) * group + 1
    if alive > <int64_t>m * v:
        alive = <int64_t>m * v
    # Forward number i belongs to chunk (i // group) % v: whole cycles, then the rest.
    cycles = alive // (<int64_t>group * v)
    rest = alive - cycles * group * v - <int64_t>chunk * group
    if rest < 0:
        rest = 0
    elif rest > group:
        rest = group
    return cycles * group + rest


cdef void fill_times(
    const int32_t[::1] sizes, const int32_t[:, ::1] prefix, int p, int v, int mode, int num_recompute,
    const float64_t[::1] times, float64_t* forward, float64_t* backward
) noexcept nogil:
    cdef int j, k, start = 0
    cdef Chunk chunk
    cdef float64_t f, b
    cdef int64_t layers
    for j in range(p * v):
        chunk = split_chunk(sizes[j], start, prefix, mode, num_recompute)
        f = 0.0
        b = 0.0
        for k in range(NUM_KINDS):
            layers = chunk.plain[k] + chunk.again[k]
            f += layers * times[FORWARD + k]
            b += layers * times[BACKWARD + k] + chunk.again[k] * times[AGAIN + k]
        if j == 0:
            f += times[F_FIRST]
            b += times[B_FIRST]
        if j == p * v - 1:
            f += times[F_LAST]
            b += times[B_LAST]
        forward[j] = f
        backward[j] = b
        start += sizes[j]


cdef float64_t busy(
    const float64_t* forward, const float64_t* backward, int p, int v, int rank
) noexcept nogil:
    cdef float64_t total = 0.0
    cdef int chunk
    for chunk in range(v):
        total += forward[chunk * p + rank] + backward[chunk * p + rank]
    return total


cdef float64_t bound(
    const float64_t* forward, const float64_t* backward, int p, int v, int m, float64_t hop
) noexcept nogil:
    cdef float64_t best = 0.0, head = 0.0, trip
    cdef int rank, j
    for rank in range(p):
        best = fmax(best, head + m * busy(forward, backward, p, v, rank))
        if v == 1:
            trip = 2 * hop * (p - 1 - rank)
            for j in range(rank, p):
                trip += forward[j] + backward[j]
            best = fmax(best, head + ((m - 1) // (p - rank) + 1) * trip)
        head += forward[rank] + backward[rank] + 2 * hop
    return best * BOUND_SAFETY


cdef inline void forward_at(int number, int v, int m, int group, int* chunk, int* micro) noexcept nogil:
    # Forward number `number` of a rank: groups of micro-batches, chunk by chunk; the last may be short.
    cdef int first, members, inside
    if v == 1:
        chunk[0] = 0
        micro[0] = number
        return
    first = number // (group * v) * group
    members = group if group < m - first else m - first
    inside = number - first * v
    chunk[0] = inside // members
    micro[0] = first + inside % members


cdef float64_t run(
    const float64_t* forward, const float64_t* backward, int p, int v, int m, int group, float64_t hop,
    float64_t* end_f, float64_t* end_b, float64_t* clock, int32_t* position
) noexcept nogil:
    cdef int64_t total = <int64_t>m * v
    cdef int64_t left = 2 * total * p, before, i
    cdef int chunks = p * v
    cdef int rank, warmup, step, number, chunk, micro, j
    cdef bint is_forward
    cdef float64_t ready, last = 0.0
    for i in range(<int64_t>chunks * m):
        end_f[i] = -1.0
        end_b[i] = -1.0
    for rank in range(p):
        clock[rank] = 0.0
        position[rank] = 0
    while left > 0:
        before = left
        for rank in range(p):
            warmup = p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * group
            if warmup > total:
                warmup = <int>total
            while position[rank] < 2 * total:
                step = position[rank]
                # Order of a rank: `warmup` forwards, then forward / backward in turn, then backwards.
                if step < warmup:
                    is_forward = True
                    number = step
                elif step < 2 * total - warmup:
                    is_forward = (step - warmup) % 2 == 0
                    number = (step - warmup) // 2 + (warmup if is_forward else 0)
                else:
                    is_forward = False
                    number = <int>(step - total)
                forward_at(number, v, m, group, &chunk, &micro)
                if is_forward:
                    j = chunk * p + rank
                    ready = 0.0
                    if j > 0:
                        ready = end_f[<int64_t>(j - 1) * m + micro]
                        if ready < 0:
                            break
                        ready += hop
                    clock[rank] = fmax(clock[rank], ready) + forward[j]
                    end_f[<int64_t>j * m + micro] = clock[rank]
                else:
                    j = (v - 1 - chunk) * p + rank
                    if j == chunks - 1:
                        ready = end_f[<int64_t>j * m + micro]
                        if ready < 0:
                            break
                    else:
                        ready = end_b[<int64_t>(j + 1) * m + micro]
                        if ready < 0:
                            break
                        ready += hop
                    clock[rank] = fmax(clock[rank], ready) + backward[j]
                    end_b[<int64_t>j * m + micro] = clock[rank]
                position[rank] += 1
                left -= 1
        if left == before:
            return -1.0
    for rank in range(p):
        last = fmax(last, clock[rank])
    return last


def simulate(forward, backward, int p, int v, int m, int group, double p2p_s):
    """Return the makespan in seconds of one step's pipeline; see ``reference.simulate``."""
    cdef float64_t[::1] f = np.ascontiguousarray(forward, dtype=np.float64)
    cdef float64_t[::1] b = np.ascontiguousarray(backward, dtype=np.float64)
    if f.shape[0] != p * v or b.shape[0] != p * v or p < 1 or v < 1 or m < 1 or group < 1:
        raise ValueError(f"expected {p * v} chunk times, got {f.shape[0]} and {b.shape[0]}")
    cdef int64_t cells = <int64_t>p * v * m
    cdef float64_t* ends = <float64_t*>malloc((2 * cells + p) * sizeof(float64_t))
    cdef int32_t* position = <int32_t*>malloc(p * sizeof(int32_t))
    cdef float64_t result
    if ends == NULL or position == NULL:
        free(ends)
        free(position)
        raise MemoryError()
    with nogil:
        result = run(
            &f[0], &b[0], p, v, m, group, p2p_s if p > 1 else 0.0,
            ends, ends + cells, ends + 2 * cells, position
        )
    free(ends)
    free(position)
    if result < 0:
        raise RuntimeError(f"pipeline schedule deadlocks: p={p} v={v} m={m} group={group}")
    return result


def pipeline_bound(forward, backward, int p, int v, int m, double p2p_s):
    """Return a proven lower bound of ``simulate``; see ``reference.pipeline_bound``."""
    cdef float64_t[::1] f = np.ascontiguousarray(forward, dtype=np.float64)
    cdef float64_t[::1] b = np.ascontiguousarray(backward, dtype=np.float64)
    return bound(&f[0], &b[0], p, v, m, p2p_s if p > 1 else 0.0)


def in_flight(int p, int v, int m, int group, int rank):
    """Return the forwards alive at the peak on ``rank``, per chunk; see ``reference.in_flight``."""
    return [alive_forwards(p, v, m, group, rank, chunk) for chunk in range(v)]
