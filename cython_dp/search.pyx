"""Compiled best-first search; twin, with the order of every step: ``cython_dp.reference.search``."""

from libc.math cimport fmin, isfinite
from libc.stdlib cimport free, malloc

import numpy as np

from cython_dp._typedefs cimport float64_t, int32_t, int64_t
from cython_dp.problem cimport (
    BLOCK,
    Bounded,
    Problem,
    Scratch,
    bound_of,
    fewest_recomputed,
    time_of,
)
from cython_dp.quick cimport extra_floor, fewest_with_room, has_room, quick_time
from cython_dp.reach cimport fill_reach, fill_split
from cython_dp.split cimport (
    FreeSplit,
    ceiling_seconds,
    feasible,
    first_split,
    path_seconds,
    smallest_limit,
)

from cython_dp.reference import BOUND_SAFETY as _BOUND_SAFETY
from cython_dp.reference import LEAVES, Found

cdef float64_t BOUND_SAFETY = _BOUND_SAFETY
cdef float64_t np_inf = np.inf


cdef inline const int32_t* chosen_sizes(Problem problem, Py_ssize_t i, int choice) noexcept nogil:
    return &problem.sizes[problem.choices[problem.choice_first[i] + choice]]


cdef bint listed(
    Problem problem, Scratch scratch, Py_ssize_t i, int choice, int64_t limit_bytes, float64_t cutoff_s,
    Bounded* found, int* num_recompute
) noexcept nogil:
    # Whether one listed split fits and may keep `cutoff_s`, with its bound and its recomputed layers.
    cdef const int32_t* sizes = chosen_sizes(problem, i, choice)
    num_recompute[0] = problem.num_recompute[i]
    if problem.mode[i] == BLOCK and num_recompute[0] == 0:
        num_recompute[0] = fewest_recomputed(problem, scratch, i, sizes, limit_bytes)
        if num_recompute[0] == 0:
            return False
    found[0] = bound_of(problem, scratch, i, sizes, num_recompute[0])
    return found.peak <= limit_bytes and found.bound_s <= cutoff_s


def quick_bounds(Problem problem, int64_t limit_bytes):
    """Return (C,) seconds that no split of a candidate can beat; see ``reference.quick_bounds``."""
    cdef Py_ssize_t count = problem.node.shape[0], i
    quick_s = np.full(count, np.inf)
    cdef float64_t[::1] view = quick_s
    cdef Scratch scratch = Scratch(problem.max_chunks, 1)
    cdef Bounded found
    cdef int num_recompute
    with nogil:
        for i in range(count):
            if problem.free[i] or problem.choice_count[i] != 1:
                if has_room(problem, i, limit_bytes, problem.num_recompute[i] or problem.num_layers):
                    view[i] = quick_time(problem, i, limit_bytes)
            elif listed(problem, scratch, i, 0, limit_bytes, np_inf, &found, &num_recompute):
                view[i] = found.bound_s
    return quick_s


cdef class _Search:
    """The state of one search."""

    cdef Problem problem
    cdef Scratch scratch
    cdef FreeSplit split
    cdef void* owned
    cdef int32_t* sizes
    cdef int32_t* start_at
    cdef int32_t* end_at
    cdef int64_t limit_bytes
    cdef float64_t slack, cutoff_s, best_s
    cdef int64_t leaves, budget, evaluated
    cdef Py_ssize_t unfinished
    cdef object time_s, num_recompute, found_sizes, open
    cdef float64_t[::1] times
    cdef int64_t[::1] recomputed

    def __cinit__(
        self, Problem problem, int64_t limit_bytes, double slack, double cutoff_s, int64_t leaves,
        int64_t budget
    ):
        cdef Py_ssize_t count = problem.node.shape[0]
        cdef int p = problem.max_chunks, width = problem.num_layers + 1
        cdef size_t floats = 5 * width, ints = 2 * p * width + width + 1 + 6 * p, chars = (p + 1) * width
        cdef float64_t* floating
        cdef int32_t* integers
        self.problem = problem
        self.scratch = Scratch(problem.max_chunks, problem.max_cells)
        self.owned = malloc(floats * sizeof(float64_t) + ints * sizeof(int32_t) + chars)
        if self.owned == NULL:
            raise MemoryError()
        floating = <float64_t*>self.owned
        self.split.forward_s = floating
        self.split.backward_s = floating + width
        self.split.again_before = floating + 2 * width
        self.split.spread_before = floating + 3 * width
        self.split.spread_after = floating + 4 * width
        self.split.prefix = &problem.prefix[0, 0]
        integers = <int32_t*>(floating + floats)
        self.split.reach = integers
        self.split.farthest = integers + p * width
        self.split.following = integers + 2 * p * width
        self.sizes = self.split.following + width + 1
        self.start_at = self.sizes + p
        self.end_at = self.start_at + p
        self.split.one_size = self.end_at + p
        self.split.one_start = self.split.one_size + p
        self.split.latest = self.split.one_start + p
        self.split.starts = <char*>(integers + ints)
        self.limit_bytes = limit_bytes
        self.slack = slack
        self.cutoff_s = cutoff_s
        self.leaves = leaves
        self.budget = budget
        self.best_s = np_inf
        self.evaluated = 0
        self.unfinished = 0
        self.time_s = np.full(count, np.nan)
        self.num_recompute = np.zeros(count, dtype=np.int64)
        self.times = self.time_s
        self.recomputed = self.num_recompute
        self.found_sizes = {}
        self.open = []

    def __dealloc__(self):
        free(self.owned)

    cdef inline float64_t keep_s(self) noexcept:
        return fmin(self.best_s * (1.0 + self.slack), self.cutoff_s)

    cdef inline float64_t beat_s(self) noexcept:
        return fmin(self.best_s, self.cutoff_s)

    cdef int simulate(
        self, Py_ssize_t i, int num_recompute, const int32_t* sizes, float64_t extra_s
    ) except -1:
        cdef float64_t seconds = time_of(self.problem, self.scratch, i, sizes, num_recompute, extra_s)
        cdef int chunks = self.problem.node_pp[self.problem.node[i]] * self.problem.vpp[i], j
        if seconds < 0:
            raise RuntimeError(f"pipeline schedule of candidate {i} deadlocks")
        self.evaluated += 1
        if not self.times[i] <= seconds:
            self.times[i] = seconds
            self.recomputed[i] = num_recompute
            self.found_sizes[i] = tuple([sizes[j] for j in range(chunks)])
        self.best_s = fmin(self.best_s, seconds)
        return 0

    cdef int visit(self, Py_ssize_t i) except -1:
        cdef int choice, num_recompute
        cdef Bounded found
        if self.problem.free[i]:
            return self.visit_counts(i)
        items = []
        for choice in range(self.problem.choice_count[i]):
            if listed(
                self.problem, self.scratch, i, choice, self.limit_bytes, self.keep_s(), &found,
                &num_recompute
            ):
                items.append((found.bound_s, i, num_recompute, choice))
        items.sort()
        if items:
            self.simulate_listed(items[0])
            self.open.extend(items[1:])
        return 0

    cdef int simulate_listed(self, item) except -1:
        cdef Py_ssize_t i = item[1]
        cdef int num_recompute = item[2]
        cdef const int32_t* sizes = chosen_sizes(self.problem, i, item[3])
        cdef Bounded found = bound_of(self.problem, self.scratch, i, sizes, num_recompute)
        return self.simulate(i, num_recompute, sizes, found.extra_s)

    cdef int visit_counts(self, Py_ssize_t i) except -1:
        # Every number of recomputed layers that may be fastest: from the fewest that fit, while one can.
        cdef Problem problem = self.problem
        cdef int low, high = problem.num_layers, middle, count
        if problem.mode[i] != BLOCK or problem.num_recompute[i]:
            return self.visit_free(i, problem.num_recompute[i])
        # The fewest by the cheap test; a split without any memory limit must keep the time with as many.
        low = fewest_with_room(problem, i, self.limit_bytes)
        if not self.in_time(i, low) or not self.fits(i, high):
            return 0
        while low < high:
            middle = (low + high) // 2
            if self.fits(i, middle):
                high = middle
            else:
                low = middle + 1
        for count in range(low, problem.num_layers + 1):
            if not self.in_time(i, count):
                return 0
            self.visit_free(i, count)
        return 0

    cdef bint in_time(self, Py_ssize_t i, int num_recompute) noexcept:
        # Whether some split keeps the time wanted, whatever memory it needs.
        cdef int cell, cells = self.problem.node_pp[self.problem.node[i]] * (self.problem.num_layers + 1)
        fill_split(self.problem, i, num_recompute, &self.split)
        for cell in range(cells):
            self.split.reach[cell] = self.problem.num_layers
        return feasible(&self.split, self.path_limit(i, self.keep_s()))

    cdef bint fits(self, Py_ssize_t i, int num_recompute) noexcept:
        fill_split(self.problem, i, num_recompute, &self.split)
        fill_reach(self.problem, i, num_recompute, self.limit_bytes, &self.split)
        return feasible(&self.split, ceiling_seconds(&self.split))

    cdef inline float64_t path_limit(self, Py_ssize_t i, float64_t seconds) noexcept:
        cdef float64_t floor_s = extra_floor(self.problem, self.problem.node[i])
        return fmin((seconds - floor_s) / BOUND_SAFETY, ceiling_seconds(&self.split))

    cdef int visit_free(self, Py_ssize_t i, int num_recompute) except -1:
        cdef float64_t limit_s, lower_s = 0.0, kept_s = 0.0
        fill_split(self.problem, i, num_recompute, &self.split)
        fill_reach(self.problem, i, num_recompute, self.limit_bytes, &self.split)
        limit_s = self.path_limit(i, self.keep_s())
        if not feasible(&self.split, limit_s):
            return 0
        if smallest_limit(&self.split, fmin(limit_s, self.path_limit(i, self.best_s)), &lower_s, &kept_s):
            limit_s = kept_s
            lower_s = lower_s * BOUND_SAFETY + extra_floor(self.problem, self.problem.node[i])
            self.open.append((lower_s, i, num_recompute, -1))
        first_split(&self.split, limit_s, self.sizes)
        return self.judge(i, num_recompute, self.keep_s())

    cdef int judge(self, Py_ssize_t i, int num_recompute, float64_t below_s) except -1:
        cdef Bounded found = bound_of(self.problem, self.scratch, i, self.sizes, num_recompute)
        if found.peak <= self.limit_bytes and found.bound_s < below_s:
            self.simulate(i, num_recompute, self.sizes, found.extra_s)
        return 0

    cdef bint finish(self, item) except *:
        cdef Py_ssize_t i = item[1]
        cdef int num_recompute = item[2], width = self.problem.num_layers + 1, rank, x, y
        cdef int64_t leaf = 0
        cdef float64_t floor_s = extra_floor(self.problem, self.problem.node[i])
        if item[3] >= 0:
            self.simulate_listed(item)
            return True
        fill_split(self.problem, i, num_recompute, &self.split)
        fill_reach(self.problem, i, num_recompute, self.limit_bytes, &self.split)
        if not feasible(&self.split, self.path_limit(i, self.beat_s())):
            return True
        rank = 0
        self.start_at[0] = 0
        self.end_at[0] = self.split.least - 1
        while rank >= 0:
            x = self.start_at[rank]
            self.end_at[rank] += 1
            y = self.end_at[rank]
            if y > self.split.farthest[rank * width + x]:
                rank -= 1
                continue
            if not self.split.starts[(rank + 1) * width + y]:
                continue
            if path_seconds(&self.split, rank, x, y, True) * BOUND_SAFETY >= self.beat_s() - floor_s:
                continue
            self.sizes[rank] = y - x
            if rank < self.split.p - 1:
                rank += 1
                self.start_at[rank] = y
                self.end_at[rank] = y + self.split.least - 1
                continue
            if leaf == self.leaves or self.evaluated >= self.budget:
                return False
            leaf += 1
            self.judge(i, num_recompute, self.beat_s())
        return True

    cdef object run(self):
        quick_s = quick_bounds(self.problem, self.limit_bytes)
        cdef float64_t[::1] quick = quick_s
        cdef const int64_t[::1] order = np.argsort(quick_s, kind="stable")
        cdef Py_ssize_t number, i
        cdef float64_t lower_s = np_inf
        for number in range(order.shape[0]):
            i = order[number]
            if quick[i] > self.keep_s() or not isfinite(quick[i]):
                break
            if self.evaluated >= self.budget:
                lower_s = fmin(lower_s, quick[i])
                break
            self.visit(i)
        for item in sorted(self.open):
            if item[0] >= self.beat_s():
                break
            if self.evaluated >= self.budget or not self.finish(item):
                self.unfinished += 1
                lower_s = fmin(lower_s, item[0])
        return Found(
            time_s=self.time_s,
            num_recompute=self.num_recompute,
            sizes=self.found_sizes,
            lower_bound_s=min(lower_s, self.best_s),
            evaluated=self.evaluated,
            unfinished=self.unfinished,
            out_of_memory=int(np.isinf(quick_s).sum()),
        )


def best_first(
    Problem problem, limit_bytes, slack=0.0, *, cutoff_s=np.inf, leaves=LEAVES, budget=2**62
):
    """Return the fastest candidates within memory; see ``reference.best_first``."""
    cdef _Search search = _Search(problem, limit_bytes, slack, cutoff_s, leaves, budget)
    return search.run()
