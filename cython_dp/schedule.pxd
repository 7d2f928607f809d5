# Pipeline schedules: what is in flight, how long a step takes, how long it takes at least.
from cython_dp._typedefs cimport float64_t, int32_t, int64_t


cdef enum:
    NUM_KINDS = 4            # columns.NUM_KINDS

cdef struct Chunk:
    int64_t plain[NUM_KINDS]     # layers of each kind whose activations are kept
    int64_t again[NUM_KINDS]     # layers of each kind recomputed in backward
    int64_t units                # checkpointed units (each keeps its input)


cdef Chunk split_chunk(
    int size, int start, const int32_t[:, ::1] prefix, int mode, int num_recompute) noexcept nogil

# Forwards of chunk `chunk` alive at the peak on `rank`.
cdef int64_t alive_forwards(int p, int v, int m, int group, int rank, int chunk) noexcept nogil

cdef void fill_times(
    const int32_t* sizes, const int32_t[:, ::1] prefix, int p, int v, int mode, int num_recompute,
    const float64_t[::1] times, float64_t* forward, float64_t* backward) noexcept nogil

cdef float64_t busy(
    const float64_t* forward, const float64_t* backward, int p, int v, int rank) noexcept nogil

cdef float64_t bound(
    const float64_t* forward, const float64_t* backward, int p, int v, int m, int group,
    const float64_t* hop) noexcept nogil

# `hop`: p link latencies, entry r from rank r to (r + 1) % p.
# `end_f`, `end_b`: p*v*m scratch; `clock`: p scratch; `position`: p scratch.  Returns -1.0 on deadlock.
cdef float64_t run(
    const float64_t* forward, const float64_t* backward, int p, int v, int m, int group, const float64_t* hop,
    float64_t* end_f, float64_t* end_b, float64_t* clock, int32_t* position) noexcept nogil
