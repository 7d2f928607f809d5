"""Compiled bounds, memory and best-first simulation of many candidates; twin: ``cython_dp.reference``."""

from libc.math cimport ceil, fmax, fmin, sqrt
from libc.stdlib cimport free, malloc

import numpy as np

from cython_dp._typedefs cimport float64_t, int32_t, int64_t
from cython_dp.schedule cimport NUM_KINDS, Chunk, alive_forwards, bound, busy, fill_times, run, split_chunk

from cython_dp.columns import NUM_FEATURES as _NUM_FEATURES
from cython_dp.columns import NUM_KINDS as _NUM_KINDS

# Must equal ``columns.Feature`` / ``Column`` / ``Param``; tests compare both implementations on every column.
cdef enum:
    ONE = 0
    FIRST = 1
    LAST = 2
    ANY = 3
    LIVE_FIRST = 4
    LIVE_UNITS = 5
    LIVE_CHUNKS = 6
    LIVE_EDGES = 7
    HELD = 8
    LIVE = 12
    HAS = 16
    UNIT = 20
    NUM_FEATURES = 24

cdef enum:
    P2P = 16
    P2P_HIDDEN = 17
    SYNC_ALPHA_DENSE = 18
    SYNC_BETA_DENSE = 19
    SYNC_ALPHA_EXPERT = 20
    SYNC_BETA_EXPERT = 21
    BUCKET = 22
    SYNC_HIDDEN = 23
    OPTIMIZER_DENSE = 24
    OPTIMIZER_EXPERT = 25

cdef enum:
    DENSE_PARAMS = 0
    EXPERT_PARAMS = 4
    FIRST_PARAMS = 8
    LAST_PARAMS = 9

cdef enum:
    UNIFORM = 1
    BLOCK = 2

cdef float64_t DP_WINDOW_SHARE = 0.8
cdef float64_t FILL_WEIGHT = 0.75

if NUM_FEATURES != _NUM_FEATURES or NUM_KINDS != _NUM_KINDS:
    raise ImportError("cython_dp.search was built against another columns.py: rebuild the extension")


cdef void rank_features(
    const int32_t[::1] sizes, const int32_t[::1] starts, const int32_t[:, ::1] prefix,
    int p, int v, int m, int group, int mode, int num_recompute, int rank, int64_t* row
) noexcept nogil:
    cdef int i, k, chunk, j
    cdef int64_t alive, unit
    cdef Chunk part
    for i in range(NUM_FEATURES):
        row[i] = 0
    row[ONE] = 1
    row[FIRST] = rank == 0
    row[LAST] = rank == p - 1
    for chunk in range(v):
        j = chunk * p + rank
        part = split_chunk(sizes[j], starts[j], prefix, mode, num_recompute)
        alive = alive_forwards(p, v, m, group, rank, chunk)
        row[LIVE_UNITS] += alive * part.units
        row[LIVE_CHUNKS] += alive
        if sizes[j] > 0:
            row[LIVE_EDGES] += alive
        if j == 0:
            row[LIVE_FIRST] += alive
        unit = 1
        if mode == UNIFORM:
            unit = num_recompute if num_recompute < sizes[j] else sizes[j]
        for k in range(NUM_KINDS):
            row[HELD + k] += part.plain[k] + part.again[k]
            row[LIVE + k] += alive * part.plain[k]
            if part.again[k] > 0 and unit > row[UNIT + k]:
                row[UNIT + k] = unit
    for k in range(NUM_KINDS):
        if row[HELD + k] > 0:
            row[HAS + k] = 1
            row[ANY] = 1


cdef float64_t bucketed(float64_t params, float64_t alpha, float64_t beta, float64_t bucket) noexcept nogil:
    cdef float64_t buckets, each
    if params <= 0 or (alpha == 0 and beta == 0):
        return 0.0
    buckets = ceil(params / bucket)
    each = params / buckets * beta
    return buckets * (alpha + each + FILL_WEIGHT * sqrt(alpha * each))


cdef class Problem:
    """The arrays of one search; meaning and shapes as in ``reference.Problem``."""

    cdef const int32_t[:, ::1] prefix
    cdef const int32_t[::1] node_pp, node_m
    cdef const int32_t[::1] node, vpp, group, mode, num_recompute, split_start, sizes
    cdef const float64_t[:, ::1] node_times
    cdef const int64_t[:, ::1] node_params
    cdef const int64_t[:, :, ::1] node_memory
    cdef int64_t max_cells
    cdef int max_chunks

    def __init__(
        self, *, prefix, node_pp, node_m, node_times, node_params, node_memory, node, vpp, group, mode,
        num_recompute, split_start, sizes
    ):
        self.prefix = prefix
        self.node_pp = node_pp
        self.node_m = node_m
        self.node_times = node_times
        self.node_params = node_params
        self.node_memory = node_memory
        self.node = node
        self.vpp = vpp
        self.group = group
        self.mode = mode
        self.num_recompute = num_recompute
        self.split_start = split_start
        self.sizes = sizes
        count = len(node)
        for name, array in (("vpp", vpp), ("group", group), ("mode", mode), ("num_recompute", num_recompute)):
            if len(array) != count:
                raise ValueError(f"{name} has {len(array)} entries for {count} candidates")
        self.max_chunks = 1
        self.max_cells = 1
        if count:
            chunks = np.asarray(node_pp, dtype=np.int64)[node] * vpp
            if int(np.max(np.asarray(split_start) + chunks)) > len(sizes):
                raise ValueError("a candidate's split reaches past the end of sizes")
            self.max_chunks = int(chunks.max())
            self.max_cells = int((chunks * np.asarray(node_m)[node]).max())

    def __len__(self):
        """Return the number of candidates."""
        return self.node.shape[0]


cdef class Scratch:
    """Working memory of one thread: chunk times, chunk starts, event times."""

    cdef float64_t* times
    cdef float64_t* ends
    cdef float64_t* clock
    cdef int32_t* position
    cdef int64_t cells
    cdef int chunks
    cdef object starts_owner
    cdef int32_t[::1] starts

    def __cinit__(self, int chunks, int64_t cells):
        self.chunks = chunks
        self.cells = cells
        self.times = <float64_t*>malloc(2 * chunks * sizeof(float64_t))
        self.ends = <float64_t*>malloc(2 * cells * sizeof(float64_t))
        self.clock = <float64_t*>malloc(chunks * sizeof(float64_t))
        self.position = <int32_t*>malloc(chunks * sizeof(int32_t))
        if self.times == NULL or self.ends == NULL or self.clock == NULL or self.position == NULL:
            raise MemoryError()
        self.starts_owner = np.zeros(chunks + 1, dtype=np.int32)
        self.starts = self.starts_owner

    def __dealloc__(self):
        free(self.times)
        free(self.ends)
        free(self.clock)
        free(self.position)


cdef int64_t peak_of(
    Problem problem, Scratch scratch, Py_ssize_t i, int num_recompute
) noexcept nogil:
    # Largest allocated bytes over ranks and phases; `scratch.starts` must be filled.
    cdef int node = problem.node[i], p = problem.node_pp[node], v = problem.vpp[i], m = problem.node_m[node]
    cdef int offset = problem.split_start[i], rank, phase, k
    cdef const int32_t[::1] sizes = problem.sizes[offset:offset + p * v]
    cdef int64_t row[NUM_FEATURES]
    cdef int64_t value, peak = -1
    for rank in range(p):
        rank_features(
            sizes, scratch.starts, problem.prefix, p, v, m, problem.group[i], problem.mode[i],
            num_recompute, rank, row
        )
        for phase in range(problem.node_memory.shape[1]):
            value = 0
            for k in range(NUM_FEATURES):
                value += row[k] * problem.node_memory[node, phase, k]
            if value > peak:
                peak = value
    return peak


cdef int fill_starts(Problem problem, Scratch scratch, Py_ssize_t i) noexcept nogil:
    # Layer index of each chunk's first layer; returns the largest chunk.
    cdef int chunks = problem.node_pp[problem.node[i]] * problem.vpp[i]
    cdef int offset = problem.split_start[i], j, largest = 0
    scratch.starts[0] = 0
    for j in range(chunks):
        scratch.starts[j + 1] = scratch.starts[j] + problem.sizes[offset + j]
        if problem.sizes[offset + j] > largest:
            largest = problem.sizes[offset + j]
    return largest


cdef void bound_one(
    Problem problem, Scratch scratch, Py_ssize_t i,
    float64_t* bound_s, float64_t* extra_s, int64_t* peak, int32_t* worst_rank, int32_t* worst_phase
) noexcept nogil:
    cdef int node = problem.node[i], p = problem.node_pp[node], v = problem.vpp[i], m = problem.node_m[node]
    cdef int group = problem.group[i], mode = problem.mode[i], num_recompute = problem.num_recompute[i]
    cdef int offset = problem.split_start[i], rank, phase, k
    cdef const int32_t[::1] sizes = problem.sizes[offset:offset + p * v]
    cdef const float64_t[::1] times = problem.node_times[node]
    cdef float64_t* forward = scratch.times
    cdef float64_t* backward = scratch.times + scratch.chunks
    cdef int64_t row[NUM_FEATURES]
    cdef int64_t value, held, held_expert
    cdef float64_t dense, expert, comm, sync = 0.0, optimizer = 0.0, hop
    fill_starts(problem, scratch, i)
    fill_times(sizes, problem.prefix, p, v, mode, num_recompute, times, forward, backward)
    peak[0] = -1
    for rank in range(p):
        rank_features(
            sizes, scratch.starts, problem.prefix, p, v, m, group, mode, num_recompute, rank, row
        )
        for phase in range(problem.node_memory.shape[1]):
            value = 0
            for k in range(NUM_FEATURES):
                value += row[k] * problem.node_memory[node, phase, k]
            if value > peak[0]:
                peak[0] = value
                worst_rank[0] = rank
                worst_phase[0] = phase
        held = row[FIRST] * problem.node_params[node, FIRST_PARAMS]
        held += row[LAST] * problem.node_params[node, LAST_PARAMS]
        held_expert = 0
        for k in range(NUM_KINDS):
            held += row[HELD + k] * problem.node_params[node, DENSE_PARAMS + k]
            held_expert += row[HELD + k] * problem.node_params[node, EXPERT_PARAMS + k]
        dense = <float64_t>held
        expert = <float64_t>held_expert
        comm = bucketed(dense, times[SYNC_ALPHA_DENSE], times[SYNC_BETA_DENSE], times[BUCKET])
        comm += bucketed(expert, times[SYNC_ALPHA_EXPERT], times[SYNC_BETA_EXPERT], times[BUCKET])
        sync = fmax(
            sync,
            comm - fmin(comm * times[SYNC_HIDDEN], DP_WINDOW_SHARE * busy(forward, backward, p, v, rank)),
        )
        optimizer = fmax(optimizer, dense * times[OPTIMIZER_DENSE] + expert * times[OPTIMIZER_EXPERT])
    extra_s[0] = sync + optimizer
    hop = hop_time(times, p, v)
    bound_s[0] = bound(forward, backward, p, v, m, hop) + extra_s[0]


cdef inline float64_t hop_time(const float64_t[::1] times, int p, int v) noexcept nogil:
    if p == 1:
        return 0.0
    return times[P2P] * (1.0 - (times[P2P_HIDDEN] if v > 1 else 0.0))


cdef float64_t simulate_one(Problem problem, Scratch scratch, Py_ssize_t i, float64_t extra_s) noexcept nogil:
    cdef int node = problem.node[i], p = problem.node_pp[node], v = problem.vpp[i], m = problem.node_m[node]
    cdef int offset = problem.split_start[i]
    cdef const float64_t[::1] times = problem.node_times[node]
    cdef float64_t* forward = scratch.times
    cdef float64_t* backward = scratch.times + scratch.chunks
    cdef float64_t makespan
    fill_times(
        problem.sizes[offset:offset + p * v], problem.prefix, p, v, problem.mode[i],
        problem.num_recompute[i], times, forward, backward
    )
    makespan = run(
        forward, backward, p, v, m, problem.group[i], hop_time(times, p, v),
        scratch.ends, scratch.ends + scratch.cells, scratch.clock, scratch.position
    )
    return makespan + extra_s if makespan >= 0 else -1.0


def bounds(Problem problem):
    """Return (bound_s, extra_s, peak_bytes, rank, phase) per candidate; see ``reference.bounds``."""
    cdef Py_ssize_t count = problem.node.shape[0], i
    bound_s, extra_s = np.empty(count), np.empty(count)
    peak = np.empty(count, dtype=np.int64)
    rank, phase = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    cdef float64_t[::1] bound_view = bound_s, extra_view = extra_s
    cdef int64_t[::1] peak_view = peak
    cdef int32_t[::1] rank_view = rank, phase_view = phase
    cdef Scratch scratch = Scratch(problem.max_chunks, 1)
    with nogil:
        for i in range(count):
            bound_one(
                problem, scratch, i,
                &bound_view[i], &extra_view[i], &peak_view[i], &rank_view[i], &phase_view[i]
            )
    return bound_s, extra_s, peak, rank, phase


def smallest_block(Problem problem, int64_t limit_bytes):
    """Return the fewest recomputed layers per chunk that keep the limit; see ``reference.smallest_block``."""
    cdef Py_ssize_t count = problem.node.shape[0], i
    found = np.zeros(count, dtype=np.int32)
    cdef int32_t[::1] view = found
    cdef Scratch scratch = Scratch(problem.max_chunks, 1)
    cdef int low, high, middle
    with nogil:
        for i in range(count):
            if problem.mode[i] != BLOCK:
                continue
            low = 1
            high = fill_starts(problem, scratch, i) - 1
            if high < 1 or peak_of(problem, scratch, i, high) > limit_bytes:
                continue
            while low < high:
                middle = (low + high) // 2
                if peak_of(problem, scratch, i, middle) <= limit_bytes:
                    high = middle
                else:
                    low = middle + 1
            view[i] = low
    return found


def step_time(Problem problem, Py_ssize_t i, double extra_s):
    """Return the simulated step time of candidate ``i``; see ``reference.step_time``."""
    cdef Scratch scratch = Scratch(problem.max_chunks, problem.max_cells)
    cdef float64_t result = simulate_one(problem, scratch, i, extra_s)
    if result < 0:
        raise RuntimeError(f"pipeline schedule of candidate {i} deadlocks")
    return result


def best_first(Problem problem, order, bound_s, extra_s, double slack):
    """Simulate in ascending bounds until none can come within ``slack``; see ``reference.best_first``."""
    cdef const int64_t[::1] order_view = np.ascontiguousarray(order, dtype=np.int64)
    cdef const float64_t[::1] bound_view = bound_s, extra_view = extra_s
    simulated = np.full(len(problem), np.nan)
    cdef float64_t[::1] simulated_view = simulated
    cdef Scratch scratch = Scratch(problem.max_chunks, problem.max_cells)
    cdef Py_ssize_t number, i, evaluated = 0, failed = -1
    cdef float64_t best = np.inf
    with nogil:
        for number in range(order_view.shape[0]):
            i = order_view[number]
            if bound_view[i] > best * (1.0 + slack):
                break
            simulated_view[i] = simulate_one(problem, scratch, i, extra_view[i])
            if simulated_view[i] < 0:
                failed = i
                break
            best = fmin(best, simulated_view[i])
            evaluated += 1
    if failed >= 0:
        raise RuntimeError(f"pipeline schedule of candidate {failed} deadlocks")
    return simulated, evaluated
