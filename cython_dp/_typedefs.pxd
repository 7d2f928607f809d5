# The C types of every array that crosses the boundary.  Bytes need 64 bits; counts fit 32.
from libc.stdint cimport int32_t, int64_t

ctypedef double float64_t
