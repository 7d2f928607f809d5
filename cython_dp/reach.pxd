# What a free split needs from its candidate; meaning as in ``reference.reach``.
from cython_dp._typedefs cimport int64_t
from cython_dp.problem cimport Problem
from cython_dp.split cimport FreeSplit


# Seconds of the layers with `num_recompute` of each stage recomputed; everything but `reach`.
cdef void fill_split(Problem problem, Py_ssize_t i, int num_recompute, FreeSplit* split) noexcept nogil
# Farthest ends within memory of the starts that some split has.
cdef void fill_reach(
    Problem problem, Py_ssize_t i, int num_recompute, int64_t limit_bytes, FreeSplit* split) noexcept nogil
