"""Best-first search over candidates, each with the splits and recomputation it leaves open.

1. ``quick_bounds``: a time that no split of a candidate can beat, infinite where memory cannot suffice.
2. Candidates in ascending quick bounds, until none can come within ``slack`` of the best: the sharper bound
over
   all its splits, and one simulated split.
3. Splits whose bound is still below the best, in ascending bounds: simulated one by one, at most ``leaves``
of a
   free split.  What is left unfinished bounds the optimum from below.

Ties are broken by candidate, recomputed layers and split, in this order, so that every implementation returns
the same solution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cython_dp.columns import RECOMPUTE_BLOCK
from cython_dp.reference.problem import (
    Float64,
    Int64,
    Problem,
    bound_of,
    fewest_recomputed,
    time_of,
)
from cython_dp.reference.quick import (
    extra_floor,
    fewest_with_room,
    has_room,
    quick_time,
)
from cython_dp.reference.reach import free_split, reach_of
from cython_dp.reference.schedule import BOUND_SAFETY
from cython_dp.reference.split import (
    FreeSplit,
    feasible,
    first_split,
    smallest_limit,
    splits_within,
)

#: Simulated splits of one free split before it is left unfinished.
LEAVES = 2000


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search.

    Attributes:
        time_s: (C,) least simulated step time, NaN where not needed.
        num_recompute: (C,) recomputed layers of that solution; ``sizes``: its layers per chunk, by candidate.
        lower_bound_s: no candidate within the memory limit is faster.
        evaluated: simulations; ``unfinished``: free splits given up after ``leaves`` simulations.
        out_of_memory: candidates that cannot fit.
    """

    time_s: Float64
    num_recompute: Int64
    sizes: dict[int, tuple[int, ...]]
    lower_bound_s: float
    evaluated: int
    unfinished: int
    out_of_memory: int


@dataclass(frozen=True, slots=True, order=True)
class _Open:
    """A split, or all free splits (``choice`` -1), of one candidate whose bound may be below the best."""

    lower_s: float
    candidate: int
    num_recompute: int
    choice: int


def chosen_sizes(problem: Problem, i: int, choice: int) -> tuple[int, ...]:
    """Return the layers per chunk of one of the candidate's listed splits."""
    _, p, v, *_ = problem.shape(i)
    start = int(problem.choices[int(problem.choice_first[i]) + choice])
    return tuple(int(size) for size in problem.sizes[start : start + p * v])


def quick_bounds(problem: Problem, limit_bytes: int) -> Float64:
    """Return (C,) seconds that no split of a candidate can beat; infinite when it cannot fit.

    Exact pipeline bound and memory for a candidate without a choice.
    """
    found = np.empty(len(problem))
    for i in range(len(problem)):
        if problem.free[i] or problem.choice_count[i] != 1:
            count = int(problem.num_recompute[i]) or problem.prefix.shape[1] - 1
            found[i] = (
                quick_time(problem, i, limit_bytes) if has_room(problem, i, limit_bytes, count) else math.inf
            )
            continue
        item = _listed(problem, i, 0, limit_bytes, math.inf)
        found[i] = math.inf if item is None else item.lower_s
    return found


def _listed(problem: Problem, i: int, choice: int, limit_bytes: int, cutoff_s: float) -> _Open | None:
    """Return the item of one listed split, None when it does not fit or cannot keep ``cutoff_s``."""
    sizes = chosen_sizes(problem, i, choice)
    num_recompute = int(problem.num_recompute[i])
    if problem.mode[i] == RECOMPUTE_BLOCK and num_recompute == 0:
        num_recompute = fewest_recomputed(problem, i, sizes, limit_bytes)
        if num_recompute == 0:
            return None
    bound, _, (peak, _, _) = bound_of(problem, i, sizes, num_recompute)
    if peak > limit_bytes or bound > cutoff_s:
        return None
    return _Open(bound, i, num_recompute, choice)


class _Search:
    """The state of one search."""

    def __init__(
        self, problem: Problem, limit_bytes: int, slack: float, cutoff_s: float, leaves: int, budget: int
    ) -> None:
        self.problem, self.limit_bytes = problem, limit_bytes
        self.slack, self.cutoff_s, self.leaves, self.budget = slack, cutoff_s, leaves, budget
        self.time_s = np.full(len(problem), np.nan)
        self.num_recompute = np.zeros(len(problem), dtype=np.int64)
        self.sizes: dict[int, tuple[int, ...]] = {}
        self.best_s = math.inf
        self.evaluated = self.unfinished = 0
        self.open: list[_Open] = []

    def keep_s(self) -> float:
        """Return the time above which nothing is wanted."""
        return min(self.best_s * (1.0 + self.slack), self.cutoff_s)

    def beat_s(self) -> float:
        """Return the time that a further split must beat to be wanted."""
        return min(self.best_s, self.cutoff_s)

    def simulate(self, i: int, num_recompute: int, sizes: tuple[int, ...], extra_s: float) -> None:
        """Simulate one split and remember it when it is the candidate's fastest so far."""
        seconds = time_of(self.problem, i, sizes, num_recompute, extra_s)
        self.evaluated += 1
        if not self.time_s[i] <= seconds:
            self.time_s[i], self.num_recompute[i], self.sizes[i] = seconds, num_recompute, sizes
        self.best_s = min(self.best_s, seconds)

    def visit(self, i: int) -> None:
        """Bound all splits of a candidate, simulate one, and leave the others open."""
        problem = self.problem
        if problem.free[i]:
            for num_recompute in self.block_counts(i):
                self.visit_free(i, num_recompute)
            return
        items = []
        for choice in range(int(problem.choice_count[i])):
            item = _listed(problem, i, choice, self.limit_bytes, self.keep_s())
            if item is not None:
                items.append(item)
        items.sort()
        for item in items[:1]:
            self.simulate_listed(item)
        self.open.extend(items[1:])

    def simulate_listed(self, item: _Open) -> None:
        """Simulate one listed split."""
        i = item.candidate
        sizes = chosen_sizes(self.problem, i, item.choice)
        extra_s = bound_of(self.problem, i, sizes, item.num_recompute)[1]
        self.simulate(i, item.num_recompute, sizes, extra_s)

    def block_counts(self, i: int) -> Iterator[int]:
        """Yield the recomputed layers per stage that may be fastest: from the fewest that fit on."""
        problem = self.problem
        if problem.mode[i] != RECOMPUTE_BLOCK or problem.num_recompute[i]:
            yield int(problem.num_recompute[i])
            return
        num_layers = int(problem.prefix.shape[1] - 1)
        # The fewest by the cheap test; a split without any memory limit must keep the time with as many.
        low = fewest_with_room(problem, i, self.limit_bytes)
        if not self.in_time(i, low) or not self.fits(i, num_layers):
            return
        low = next(n for n in range(low, num_layers + 1) if self.fits(i, n))
        for count in range(low, num_layers + 1):
            if not self.in_time(i, count):
                return
            yield count

    def in_time(self, i: int, num_recompute: int) -> bool:
        """Return whether some split keeps the time wanted, whatever memory it needs."""
        num_layers = int(self.problem.prefix.shape[1] - 1)
        anywhere = [[num_layers] * (num_layers + 1)] * int(self.problem.node_pp[self.problem.node[i]])
        split = free_split(self.problem, i, num_recompute, anywhere)
        return feasible(split, self.path_limit(split, i, self.keep_s()))

    def fits(self, i: int, num_recompute: int) -> bool:
        """Return whether some free split fits in memory."""
        reach = reach_of(self.problem, i, num_recompute, self.limit_bytes)
        split = free_split(self.problem, i, num_recompute, reach)
        return feasible(split, split.ceiling_s())

    def path_limit(self, split: FreeSplit, i: int, seconds: float) -> float:
        """Return the longest path of a split that can keep a step of ``seconds``."""
        floor_s = extra_floor(self.problem, int(self.problem.node[i]))
        return min((seconds - floor_s) / BOUND_SAFETY, split.ceiling_s())

    def visit_free(self, i: int, num_recompute: int) -> None:
        """Bound all free splits of one number of recomputed layers and simulate an even one."""
        reach = reach_of(self.problem, i, num_recompute, self.limit_bytes)
        split = free_split(self.problem, i, num_recompute, reach)
        limit_s = self.path_limit(split, i, self.keep_s())
        if not feasible(split, limit_s):
            return
        sharp = smallest_limit(split, min(limit_s, self.path_limit(split, i, self.best_s)))
        if sharp is not None:
            lower_s, limit_s = sharp
            floor_s = extra_floor(self.problem, int(self.problem.node[i]))
            self.open.append(_Open(lower_s * BOUND_SAFETY + floor_s, i, num_recompute, -1))
        self.judge(i, num_recompute, tuple(first_split(split, limit_s)), self.keep_s())

    def judge(self, i: int, num_recompute: int, sizes: tuple[int, ...], below_s: float) -> None:
        """Simulate a free split that fits and whose own bound is below ``below_s``."""
        bound, extra_s, (peak, _, _) = bound_of(self.problem, i, sizes, num_recompute)
        if peak <= self.limit_bytes and bound < below_s:
            self.simulate(i, num_recompute, sizes, extra_s)

    def finish(self, item: _Open) -> bool:
        """Simulate every split of an open item that can beat the best; False when given up."""
        if item.choice >= 0:
            self.simulate_listed(item)
            return True
        i, num_recompute = item.candidate, item.num_recompute
        reach = reach_of(self.problem, i, num_recompute, self.limit_bytes)
        split = free_split(self.problem, i, num_recompute, reach)
        floor_s = extra_floor(self.problem, int(self.problem.node[i]))
        limit_s = self.path_limit(split, i, self.beat_s())
        for leaf, sizes in enumerate(splits_within(split, limit_s, lambda: self.beat_s() - floor_s)):
            if leaf == self.leaves or self.evaluated >= self.budget:
                return False
            self.judge(i, num_recompute, tuple(sizes), self.beat_s())
        return True

    def run(self) -> Found:
        """Search the whole problem."""
        quick_s = quick_bounds(self.problem, self.limit_bytes)
        lower_s = math.inf
        for i in np.argsort(quick_s, kind="stable"):
            if quick_s[i] > self.keep_s() or not math.isfinite(quick_s[i]):
                break
            if self.evaluated >= self.budget:
                lower_s = min(lower_s, float(quick_s[i]))
                break
            self.visit(int(i))
        for item in sorted(self.open):
            if item.lower_s >= self.beat_s():
                break
            if self.evaluated >= self.budget or not self.finish(item):
                self.unfinished += 1
                lower_s = min(lower_s, item.lower_s)
        return Found(
            time_s=self.time_s,
            num_recompute=self.num_recompute,
            sizes=self.sizes,
            lower_bound_s=min(lower_s, self.best_s),
            evaluated=self.evaluated,
            unfinished=self.unfinished,
            out_of_memory=int(np.isinf(quick_s).sum()),
        )


def best_first(
    problem: Problem,
    limit_bytes: int,
    slack: float = 0.0,
    *,
    cutoff_s: float = math.inf,
    leaves: int = LEAVES,
    budget: int = 2**62,
) -> Found:
    """Return the fastest candidates within memory: the best, and all whose bound is within ``slack``.

    Args:
        cutoff_s: nothing slower is of interest.
        budget: simulations after which the search stops with what it has; its lower bound says how good.
    """
    return _Search(problem, limit_bytes, slack, cutoff_s, leaves, budget).run()
