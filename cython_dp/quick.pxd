# Floors of one candidate over all its splits; meaning as in ``reference.quick``.
from cython_dp._typedefs cimport float64_t, int64_t
from cython_dp.problem cimport Problem


cdef float64_t extra_floor(Problem problem, int node) noexcept nogil
cdef float64_t quick_time(Problem problem, Py_ssize_t i, int64_t limit_bytes) noexcept nogil
# Fewest recomputed layers of each chunk with room for all layers, up to all of them.
cdef int64_t fewest_with_room(Problem problem, Py_ssize_t i, int64_t limit_bytes) noexcept nogil
cdef bint has_room(Problem problem, Py_ssize_t i, int64_t limit_bytes, int64_t count) noexcept nogil
