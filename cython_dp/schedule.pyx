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
    const int32_t* sizes, const int32_t[:, ::1] prefix, int p, int v, int mode, int num_recompute,
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


cdef float64_t plain_paths(
    const float64_t* forward, const float64_t* backward, int p, int m, const float64_t* hop
) noexcept nogil:
    cdef float64_t best = 0.0, head = 0.0, trip = 0.0, f, b, edges
    cdef int rank, j, window, cycles
    for j in range(1, p):
        trip += forward[j] + backward[j] + 2 * hop[j - 1]
    for rank in range(p):
        f = forward[rank]
        b = backward[rank]
        window = p - rank
        if m > window:
            edges = fmax((window - 1) * f, trip) + fmax((window - 1) * b, trip)
            best = fmax(best, head + (m - window + 1) * (f + b) + edges)
            cycles = (m - 1) // window
            best = fmax(
                best, head + (1 + cycles) * trip + (m - <int64_t>cycles * (window - 1)) * (f + b)
            )
        else:
            best = fmax(best, head + f + b + fmax((m - 1) * (f + b), trip + (m - 1) * fmax(f, b)))
        head += f + b + 2 * hop[rank]
        if rank + 1 < p:
            trip -= forward[rank + 1] + backward[rank + 1] + 2 * hop[rank]
    return best


cdef float64_t interleaved_paths(
    const float64_t* forward, const float64_t* backward, int p, int v, int m, int group, const float64_t* hop
) noexcept nogil:
    cdef float64_t best = 0.0, head = 0.0, down = 0.0, up = 0.0, work, edges, local_f, local_b
    cdef int rank, j, chunk, last = (v - 1) * p
    cdef int64_t count
    for j in range(1, p * v):
        down += forward[j] + hop[(j - 1) % p]
        up += backward[j] + hop[(j - 1) % p]
        if j > last:
            down += backward[j] + hop[j - last - 1]
            up += forward[j] + hop[j - last - 1]
    for rank in range(p):
        work = m * busy(forward, backward, p, v, rank)
        edges = 0.0
        if m % group == 0 and <int64_t>m * v > 2 * (p - rank - 1) + <int64_t>(v - 1) * group + 1:
            local_f = -forward[rank]
            local_b = -backward[rank]
            for chunk in range(v):
                count = alive_forwards(p, v, m, group, rank, chunk)
                local_f += count * forward[chunk * p + rank]
                local_b += count * backward[chunk * p + rank]
            edges = fmax(0.0, down - local_f) + fmax(0.0, up - local_b)
        best = fmax(best, head + work + edges)
        head += forward[rank] + backward[rank] + 2 * hop[rank]
        if rank + 1 < p:
            down -= forward[rank + 1] + hop[rank] + backward[last + rank + 1] + hop[rank]
            up -= backward[rank + 1] + hop[rank] + forward[last + rank + 1] + hop[rank]
    return best


cdef float64_t bound(
    const float64_t* forward, const float64_t* backward, int p, int v, int m, int group, const float64_t* hop
) noexcept nogil:
    if v == 1:
        return plain_paths(forward, backward, p, m, hop) * BOUND_SAFETY
    return interleaved_paths(forward, backward, p, v, m, group, hop) * BOUND_SAFETY


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
    const float64_t* forward, const float64_t* backward, int p, int v, int m, int group,
    const float64_t* hop, float64_t* end_f, float64_t* end_b, float64_t* clock, int32_t* position
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
                        ready += hop[rank - 1 if rank > 0 else p - 1]
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
                        ready += hop[rank]
                    clock[rank] = fmax(clock[rank], ready) + backward[j]
                    end_b[<int64_t>j * m + micro] = clock[rank]
                position[rank] += 1
                left -= 1
        if left == before:
            return -1.0
    for rank in range(p):
        last = fmax(last, clock[rank])
    return last


def hop_times(p2p_s, int p):
    """Return the latency of each link as (p,) float64; see ``reference.hop_times``."""
    if p == 1:
        return np.zeros(1)
    if isinstance(p2p_s, (int, float)):
        return np.full(p, float(p2p_s))
    hops = np.ascontiguousarray(p2p_s, dtype=np.float64)
    if hops.shape != (p,):
        raise ValueError(f"expected {p} link latencies, got {hops.shape}")
    return hops


def simulate(forward, backward, int p, int v, int m, int group, p2p_s):
    """Return the makespan in seconds of one step's pipeline; see ``reference.simulate``."""
    cdef float64_t[::1] f = np.ascontiguousarray(forward, dtype=np.float64)
    cdef float64_t[::1] b = np.ascontiguousarray(backward, dtype=np.float64)
    check_chunks(f.shape[0], b.shape[0], p, v, m, group)
    cdef float64_t[::1] hop = hop_times(p2p_s, p)
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
            &f[0], &b[0], p, v, m, group, &hop[0], ends, ends + cells, ends + 2 * cells, position
        )
    free(ends)
    free(position)
    if result < 0:
        raise RuntimeError(f"pipeline schedule deadlocks: p={p} v={v} m={m} group={group}")
    return result


cdef int check_chunks(
    Py_ssize_t forwards, Py_ssize_t backwards, int p, int v, int m, int group
) except -1:
    if forwards != p * v or backwards != p * v or p < 1 or v < 1 or m < 1 or group < 1:
        raise ValueError(f"expected {p * v} chunk times, got {forwards} and {backwards}")
    return 0


def cycle_period(forward, backward, int p, p2p_s):
    """Return the steady-state seconds per micro-batch of 1F1B; see ``reference.cycle_period``."""
    cdef float64_t[::1] f = np.ascontiguousarray(forward, dtype=np.float64)
    cdef float64_t[::1] b = np.ascontiguousarray(backward, dtype=np.float64)
    check_chunks(f.shape[0], b.shape[0], p, 1, 1, 1)
    cdef float64_t[::1] hop = hop_times(p2p_s, p)
    cdef float64_t period = 0.0, trip = 0.0, load
    cdef int rank
    for rank in range(p - 1, -1, -1):
        load = f[rank] + b[rank]
        trip += load + (2 * hop[rank] if rank < p - 1 else 0.0)
        period = fmax(period, fmax(load, trip / (p - rank)))
    return period


def pipeline_bound(forward, backward, int p, int v, int m, int group, p2p_s):
    """Return a proven lower bound of ``simulate``; see ``reference.pipeline_bound``."""
    cdef float64_t[::1] f = np.ascontiguousarray(forward, dtype=np.float64)
    cdef float64_t[::1] b = np.ascontiguousarray(backward, dtype=np.float64)
    check_chunks(f.shape[0], b.shape[0], p, v, m, group)
    cdef float64_t[::1] hop = hop_times(p2p_s, p)
    return bound(&f[0], &b[0], p, v, m, group, &hop[0])


def in_flight(int p, int v, int m, int group, int rank):
    """Return the forwards alive at the peak on ``rank``, per chunk; see ``reference.in_flight``."""
    return [alive_forwards(p, v, m, group, rank, chunk) for chunk in range(v)]
