# The arrays of one search, its working memory, and what one candidate with given layers per chunk needs.
from cython_dp._typedefs cimport float64_t, int32_t, int64_t
from cython_dp.schedule cimport NUM_KINDS

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
    FORWARD = 0
    BACKWARD = 4
    AGAIN = 8
    F_FIRST = 12
    B_FIRST = 13
    F_LAST = 14
    B_LAST = 15
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
    NONE = 0
    UNIFORM = 1
    BLOCK = 2


cdef class Problem:
    cdef readonly const int32_t[:, ::1] prefix
    cdef const int32_t[::1] node_pp, node_m
    cdef const int32_t[::1] node, vpp, group, mode, num_recompute, split_start, sizes
    cdef const int32_t[::1] free, choice_first, choice_count, choices, floor
    cdef const float64_t[:, ::1] node_times
    cdef const int64_t[:, ::1] node_params
    cdef const int64_t[:, :, ::1] node_memory
    cdef int least, num_layers, num_phases
    cdef int64_t max_cells
    cdef int max_chunks


cdef class Scratch:
    cdef float64_t* times
    cdef float64_t* ends
    cdef float64_t* clock
    cdef float64_t* hop
    cdef int32_t* position
    cdef int32_t* starts
    cdef int64_t cells
    cdef int chunks


# Bound, additive time, and peak with its rank and phase.
cdef struct Bounded:
    float64_t bound_s
    float64_t extra_s
    int64_t peak
    int32_t rank
    int32_t phase


# Counts of one rank whose chunks start at `starts` (by chunk j, model order) and hold `sizes` layers.
cdef void rank_features(
    const int32_t* sizes, const int32_t* starts, const int32_t[:, ::1] prefix, int p, int v, int m, int group,
    int mode, int num_recompute, int rank, int64_t* row) noexcept nogil

cdef int64_t largest_phase(const int64_t[:, ::1] memory, const int64_t* row, int32_t* phase) noexcept nogil

cdef float64_t hop_seconds(const float64_t[::1] times, int p, int v) noexcept nogil

cdef Bounded bound_of(
    Problem problem, Scratch scratch, Py_ssize_t i, const int32_t* sizes, int num_recompute) noexcept nogil

cdef int fewest_recomputed(
    Problem problem, Scratch scratch, Py_ssize_t i, const int32_t* sizes, int64_t limit_bytes) noexcept nogil

# Simulated pipeline plus `extra_s`; -1.0 on deadlock.
cdef float64_t time_of(
    Problem problem, Scratch scratch, Py_ssize_t i, const int32_t* sizes, int num_recompute,
    float64_t extra_s) noexcept nogil
