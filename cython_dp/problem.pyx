"""Compiled bounds, memory peaks and step times of candidates; twin: ``cython_dp.reference.problem``."""

from libc.math cimport ceil, fmax, fmin, sqrt
from libc.stdlib cimport free as release
from libc.stdlib cimport malloc

import numpy as np

from cython_dp._typedefs cimport float64_t, int32_t, int64_t
from cython_dp.schedule cimport NUM_KINDS, Chunk, alive_forwards, bound, busy, fill_times, run, split_chunk

from cython_dp.columns import NUM_FEATURES as _NUM_FEATURES
from cython_dp.columns import NUM_KINDS as _NUM_KINDS

cdef float64_t DP_WINDOW_SHARE = 0.8
cdef float64_t FILL_WEIGHT = 0.75

if NUM_FEATURES != _NUM_FEATURES or NUM_KINDS != _NUM_KINDS:
    raise ImportError("cython_dp.problem was built against another columns.py: rebuild the extension")


cdef void rank_features(
    const int32_t* sizes, const int32_t* starts, const int32_t[:, ::1] prefix,
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


cdef int64_t largest_phase(const int64_t[:, ::1] memory, const int64_t* row, int32_t* phase) noexcept nogil:
    cdef int64_t value, largest = -1
    cdef int k, number
    for number in range(memory.shape[0]):
        value = 0
        for k in range(NUM_FEATURES):
            value += row[k] * memory[number, k]
        if value > largest:
            largest = value
            phase[0] = number
    return largest


cdef float64_t bucketed(float64_t params, float64_t alpha, float64_t beta, float64_t bucket) noexcept nogil:
    cdef float64_t buckets, each
    if params <= 0 or (alpha == 0 and beta == 0):
        return 0.0
    buckets = ceil(params / bucket)
    each = params / buckets * beta
    return buckets * (alpha + each + FILL_WEIGHT * sqrt(alpha * each))


def _own(values, count, default):
    """Return one int32 per candidate, ``default`` when not given."""
    return np.full(count, default, dtype=np.int32) if values is None else values


cdef class Problem:
    """The arrays of one search; meaning and shapes as in ``reference.Problem``."""

    def __init__(
        self, *, prefix, node_pp, node_m, node_times, node_params, node_memory, node, vpp, group, mode,
        num_recompute, split_start, sizes, free=None, choice_first=None, choice_count=None, choices=None,
        floor=None, least=1
    ):
        count = len(node)
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
        self.free = _own(free, count, 0)
        self.floor = _own(floor, count, 0)
        self.choice_count = _own(choice_count, count, 1)
        first = np.arange(count, dtype=np.int32) if choice_first is None else choice_first
        starts = split_start if choices is None else choices
        self.choice_first = first
        self.choices = starts
        self.least = least
        self.num_layers = prefix.shape[1] - 1
        self.num_phases = node_memory.shape[1]
        for name, array in (
            ("vpp", vpp), ("group", group), ("mode", mode), ("num_recompute", num_recompute),
            ("split_start", split_start), ("free", self.free), ("floor", self.floor),
            ("choice_first", first), ("choice_count", self.choice_count),
        ):
            if len(array) != count:
                raise ValueError(f"{name} has {len(array)} entries for {count} candidates")
        self.max_chunks = 1
        self.max_cells = 1
        if count:
            chunks = np.asarray(node_pp, dtype=np.int64)[node] * vpp
            if int((first + np.asarray(self.choice_count)).max()) > len(starts):
                raise ValueError("a candidate's choices reach past the end of choices")
            longest = int(chunks.max())
            if int(np.max(np.asarray(split_start) + chunks)) > len(sizes):
                raise ValueError("a candidate's split reaches past the end of sizes")
            self.max_chunks = longest
            self.max_cells = int((chunks * np.asarray(node_m)[node]).max())

    def __len__(self):
        """Return the number of candidates."""
        return self.node.shape[0]


cdef class Scratch:
    """Working memory of one thread: chunk times, chunk starts, event times."""

    def __cinit__(self, int chunks, int64_t cells):
        self.chunks = chunks
        self.cells = cells
        self.times = <float64_t*>malloc(2 * chunks * sizeof(float64_t))
        self.ends = <float64_t*>malloc(2 * cells * sizeof(float64_t))
        self.clock = <float64_t*>malloc(chunks * sizeof(float64_t))
        self.hop = <float64_t*>malloc(chunks * sizeof(float64_t))
        self.position = <int32_t*>malloc(chunks * sizeof(int32_t))
        self.starts = <int32_t*>malloc((chunks + 1) * sizeof(int32_t))
        if self.times == NULL or self.ends == NULL or self.clock == NULL or self.hop == NULL:
            raise MemoryError()
        if self.position == NULL or self.starts == NULL:
            raise MemoryError()

    def __dealloc__(self):
        release(self.times)
        release(self.ends)
        release(self.clock)
        release(self.hop)
        release(self.position)
        release(self.starts)


cdef void fill_starts(const int32_t* sizes, int chunks, int32_t* starts) noexcept nogil:
    # Layer index of each chunk's first layer.
    cdef int j
    starts[0] = 0
    for j in range(chunks):
        starts[j + 1] = starts[j] + sizes[j]


cdef int64_t peak_of(
    Problem problem, Scratch scratch, Py_ssize_t i, const int32_t* sizes, int num_recompute
) noexcept nogil:
    # Largest allocated bytes over ranks and phases.
    cdef int node = problem.node[i], p = problem.node_pp[node], v = problem.vpp[i], m = problem.node_m[node]
    cdef int rank
    cdef int32_t phase
    cdef int64_t row[NUM_FEATURES]
    cdef int64_t value, peak = -1
    fill_starts(sizes, p * v, scratch.starts)
    for rank in range(p):
        rank_features(
            sizes, scratch.starts, problem.prefix, p, v, m, problem.group[i], problem.mode[i],
            num_recompute, rank, row
        )
        value = largest_phase(problem.node_memory[node], row, &phase)
        if value > peak:
            peak = value
    return peak


cdef Bounded bound_of(
    Problem problem, Scratch scratch, Py_ssize_t i, const int32_t* sizes, int num_recompute
) noexcept nogil:
    cdef int node = problem.node[i], p = problem.node_pp[node], v = problem.vpp[i], m = problem.node_m[node]
    cdef int group = problem.group[i], mode = problem.mode[i], rank, k
    cdef const float64_t[::1] times = problem.node_times[node]
    cdef float64_t* forward = scratch.times
    cdef float64_t* backward = scratch.times + scratch.chunks
    cdef int64_t row[NUM_FEATURES]
    cdef int64_t value, held, held_expert
    cdef int32_t phase
    cdef float64_t dense, expert, comm, sync = 0.0, optimizer = 0.0
    cdef Bounded found
    fill_starts(sizes, p * v, scratch.starts)
    fill_times(sizes, problem.prefix, p, v, mode, num_recompute, times, forward, backward)
    found.peak = -1
    for rank in range(p):
        rank_features(
            sizes, scratch.starts, problem.prefix, p, v, m, group, mode, num_recompute, rank, row
        )
        value = largest_phase(problem.node_memory[node], row, &phase)
        if value > found.peak:
            found.peak = value
            found.rank = rank
            found.phase = phase
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
    found.extra_s = sync + optimizer
    fill_hops(times, p, v, scratch.hop)
    found.bound_s = bound(forward, backward, p, v, m, group, scratch.hop) + found.extra_s
    return found


cdef float64_t hop_seconds(const float64_t[::1] times, int p, int v) noexcept nogil:
    if p == 1:
        return 0.0
    return times[P2P] * (1.0 - (times[P2P_HIDDEN] if v > 1 else 0.0))


cdef inline void fill_hops(const float64_t[::1] times, int p, int v, float64_t* hop) noexcept nogil:
    cdef float64_t seconds = hop_seconds(times, p, v)
    cdef int rank
    for rank in range(p):
        hop[rank] = seconds


cdef int fewest_recomputed(
    Problem problem, Scratch scratch, Py_ssize_t i, const int32_t* sizes, int64_t limit_bytes
) noexcept nogil:
    cdef int chunks = problem.node_pp[problem.node[i]] * problem.vpp[i]
    cdef int j, low = 1, high = 0, middle
    for j in range(chunks):
        if sizes[j] > high:
            high = sizes[j]
    high -= 1
    if high < 1 or peak_of(problem, scratch, i, sizes, high) > limit_bytes:
        return 0
    while low < high:
        middle = (low + high) // 2
        if peak_of(problem, scratch, i, sizes, middle) <= limit_bytes:
            high = middle
        else:
            low = middle + 1
    return low


cdef float64_t time_of(
    Problem problem, Scratch scratch, Py_ssize_t i, const int32_t* sizes, int num_recompute, float64_t extra_s
) noexcept nogil:
    cdef int node = problem.node[i], p = problem.node_pp[node], v = problem.vpp[i], m = problem.node_m[node]
    cdef const float64_t[::1] times = problem.node_times[node]
    cdef float64_t* forward = scratch.times
    cdef float64_t* backward = scratch.times + scratch.chunks
    cdef float64_t makespan
    fill_times(sizes, problem.prefix, p, v, problem.mode[i], num_recompute, times, forward, backward)
    fill_hops(times, p, v, scratch.hop)
    makespan = run(
        forward, backward, p, v, m, problem.group[i], scratch.hop,
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
    cdef Bounded found
    with nogil:
        for i in range(count):
            found = bound_of(
                problem, scratch, i, &problem.sizes[problem.split_start[i]], problem.num_recompute[i]
            )
            bound_view[i] = found.bound_s
            extra_view[i] = found.extra_s
            peak_view[i] = found.peak
            rank_view[i] = found.rank
            phase_view[i] = found.phase
    return bound_s, extra_s, peak, rank, phase


def smallest_block(Problem problem, int64_t limit_bytes):
    """Return the fewest recomputed layers per chunk that keep the limit; see ``reference.smallest_block``."""
    cdef Py_ssize_t count = problem.node.shape[0], i
    found = np.zeros(count, dtype=np.int32)
    cdef int32_t[::1] view = found
    cdef Scratch scratch = Scratch(problem.max_chunks, 1)
    with nogil:
        for i in range(count):
            if problem.mode[i] == BLOCK:
                view[i] = fewest_recomputed(
                    problem, scratch, i, &problem.sizes[problem.split_start[i]], limit_bytes
                )
    return found


def step_time(Problem problem, Py_ssize_t i, double extra_s):
    """Return the simulated step time of candidate ``i``; see ``reference.step_time``."""
    cdef Scratch scratch = Scratch(problem.max_chunks, problem.max_cells)
    cdef float64_t result = time_of(
        problem, scratch, i, &problem.sizes[problem.split_start[i]], problem.num_recompute[i], extra_s
    )
    if result < 0:
        raise RuntimeError(f"pipeline schedule of candidate {i} deadlocks")
    return result
