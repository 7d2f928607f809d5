# Exact layer split of one layout without interleaving; fields and rules as in ``reference.split.FreeSplit``.
from cython_dp._typedefs cimport float64_t, int32_t, int64_t
from cython_dp.schedule cimport NUM_KINDS


cdef struct Stage:
    float64_t forward_s
    float64_t backward_s


cdef struct FreeSplit:
    int p
    int m
    int num_layers
    int least
    int num_again
    float64_t first_f
    float64_t first_b
    float64_t last_f
    float64_t last_b
    float64_t hop_s
    float64_t again_s        # the least of any layer
    float64_t* forward_s     # (num_layers + 1,)
    float64_t* backward_s
    int32_t* reach           # (p, num_layers + 1)
    int32_t* farthest        # (p, num_layers + 1) result of `feasible`
    char* starts             # (p + 1, num_layers + 1) result of `feasible`
    float64_t* again_before  # (num_layers + 1,) recomputation of every layer before each
    float64_t* spread_before  # (num_layers + 1,) results of `feasible`
    float64_t* spread_after
    const int32_t* prefix    # (NUM_KINDS, num_layers + 1)
    float64_t[NUM_KINDS] kind_again_s
    int[NUM_KINDS] kinds  # those with the least recomputation first
    int32_t* following       # (num_layers + 2,) scratch
    int32_t* latest          # (p,) scratch
    int32_t* one_size        # (p,) scratch
    int32_t* one_start       # (p,) scratch


# Slots of the layer kinds, those with the least recomputation first.
cdef void cheapest_kinds(const float64_t[::1] times, int* kinds) noexcept nogil
# Recomputation of the cheapest `count` of the layers x..y-1; `prefix`: (NUM_KINDS, width) layers before each.
cdef float64_t least_again(
    const int32_t* prefix, int width, const float64_t* again_s, const int* kinds, int x, int y, int64_t count
) noexcept nogil
# The longest path through a stage; `sharp`: with its own recomputation and the least of the other stages.
cdef float64_t path_seconds(const FreeSplit* split, int rank, int x, int y, bint sharp) noexcept nogil
cdef float64_t work_seconds(const FreeSplit* split) noexcept nogil
cdef float64_t ceiling_seconds(const FreeSplit* split) noexcept nogil
# Fills `farthest`, the spreads and `starts` for the limit; whether a split may exist.
cdef bint feasible(FreeSplit* split, float64_t limit_s) noexcept nogil
# Whether a split keeps `cutoff_s`; then the lower bound and a limit that some split keeps.
cdef bint smallest_limit(
    FreeSplit* split, float64_t cutoff_s, float64_t* lower_s, float64_t* limit_s) noexcept nogil
# Layers per stage of a split that keeps `limit_s`, as even as that allows; `feasible` is run again.
cdef void first_split(FreeSplit* split, float64_t limit_s, int32_t* sizes) noexcept nogil
