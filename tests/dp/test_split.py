"""Free splits: equal to trying every split and every recomputation, on both implementations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from cython_dp import reference
from cython_dp.columns import RECOMPUTE_BLOCK
from cython_dp.reference.problem import hop_s
from cython_dp.reference.reach import free_split
from cython_dp.reference.schedule import BOUND_SAFETY, pipeline_bound
from cython_dp.reference.split import (
    BISECTION_WIDTH,
    FreeSplit,
    feasible,
    first_split,
    smallest_limit,
    splits_within,
)
from cython_dp.reference.stages import chunk_times
from tests.dp.instances import compositions, free_problem, limit_of, peaks, solutions


@pytest.mark.parametrize("seed", range(32))
def test_search_equals_brute_force_over_splits(compiled, seed: int) -> None:
    """The fastest of all splits, choices and recomputed layers that fit, and a bound that meets it."""
    arrays = free_problem(seed)
    twin = reference.Problem(**arrays)
    limit = limit_of(twin, seed)
    best = min((seconds for seconds, _, _ in solutions(twin, limit)), default=math.inf)
    found = compiled.best_first(compiled.Problem(**arrays), limit, leaves=10**9)
    assert found.lower_bound_s == best
    assert found.unfinished == 0
    if math.isfinite(best):
        assert np.nanmin(found.time_s) == best
    else:
        assert not np.isfinite(found.time_s).any()


@pytest.mark.parametrize("seed", range(32, 40))
def test_no_solution_beats_its_bounds(solver, seed: int) -> None:
    """Quick bound and pipeline bound of a candidate never exceed the simulation of any of its splits."""
    arrays = free_problem(seed)
    twin = reference.Problem(**arrays)
    limit = limit_of(twin, seed)
    quick = solver.quick_bounds(solver.Problem(**arrays), limit)
    for seconds, bound, candidate in solutions(twin, limit):
        assert bound <= seconds
        assert quick[candidate] <= seconds


@pytest.mark.parametrize("seed", range(12))
def test_compiled_search_equals_its_twin(compiled, seed: int) -> None:
    """Times, splits, bounds and counts agree to the bit, with and without slack, leaves and budget."""
    arrays = free_problem(seed)
    problem, twin = compiled.Problem(**arrays), reference.Problem(**arrays)
    limit = limit_of(twin, seed)
    np.testing.assert_array_equal(compiled.quick_bounds(problem, limit), reference.quick_bounds(twin, limit))
    for options in ({}, {"leaves": 2}, {"budget": 3}, {"slack": 0.1}):
        fast = compiled.best_first(problem, limit, **options)
        slow = reference.best_first(twin, limit, **options)
        np.testing.assert_array_equal(fast.time_s, slow.time_s)
        np.testing.assert_array_equal(fast.num_recompute, slow.num_recompute)
        assert fast.sizes == slow.sizes
        for name in ("lower_bound_s", "evaluated", "unfinished", "out_of_memory"):
            assert getattr(fast, name) == getattr(slow, name)


@pytest.mark.parametrize("seed", range(8))
def test_a_budget_gives_a_bound_that_holds(solver, seed: int) -> None:
    """Stopped early, the search returns a bound below the optimum and a time above it."""
    arrays = free_problem(seed)
    twin = reference.Problem(**arrays)
    limit = 3 * peaks(twin)[-1]
    best = min(seconds for seconds, _, _ in solutions(twin, limit))
    found = solver.best_first(solver.Problem(**arrays), limit, budget=1)
    assert found.evaluated <= 1 + twin.prefix.shape[1]
    assert found.lower_bound_s <= best <= np.nanmin(found.time_s)


def uniform_split(costs: list[float], p: int, m: int, caps: list[int], least: int = 1) -> FreeSplit:
    """Return a free split of layers with these costs, of which rank r holds at most ``caps[r]``."""
    seconds = np.concatenate([[0.0], np.cumsum(costs)]).tolist()
    layers = len(costs)
    return FreeSplit(
        p=p,
        m=m,
        num_layers=layers,
        least=least,
        forward_s=seconds,
        backward_s=[2 * s for s in seconds],
        first_s=(0.0, 0.0),
        last_s=(0.0, 0.0),
        hop_s=0.0,
        again_s=[0.0],
        num_again=0,
        prefix=[list(range(layers + 1))],
        reach=[[min(layers, x + cap) for x in range(layers + 1)] for cap in caps],
    )


def smallest_by_brute_force(split: FreeSplit) -> float:
    """Return the least longest path over every split within reach."""
    best = math.inf
    for sizes in compositions(split.num_layers, split.p, split.least):
        x, worst = 0, 0.0
        for rank, size in enumerate(sizes):
            fits = x + size <= split.reach[rank][x]
            worst = max(worst, split.path_s(rank, x, x + size, others_s=None) if fits else math.inf)
            x += size
        best = min(best, worst)
    return best


def farthest_reach(split: FreeSplit, limit_s: float) -> bool:
    """Return whether taking the farthest end of every stage deals all layers: greedy, not exact."""
    x = 0
    for rank in range(split.p):
        ends = range(x + split.least, split.reach[rank][x] + 1)
        legal = [y for y in ends if split.path_s(rank, x, y, others_s=None) <= limit_s]
        if not legal:
            return False
        x = max(legal)
    return x == split.num_layers


def test_smallest_limit_equals_brute_force_and_greedy_does_not() -> None:
    """On 150 random layers and caps the bisection finds the least bottleneck; farthest reach misses some."""
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(150):
        layers, p = int(rng.integers(2, 9)), int(rng.integers(2, 5))
        p = min(p, layers)
        caps = rng.integers(1, layers + 1, p).tolist()
        split = uniform_split((0.2 + rng.random(layers)).tolist(), p, int(rng.integers(1, 20)), caps)
        best = smallest_by_brute_force(split)
        found = smallest_limit(split, split.ceiling_s())
        if not math.isfinite(best):
            assert found is None
            continue
        lower, limit = found
        assert lower * (1 - 1e-9) <= best <= limit * (1 + 1e-9)
        assert limit == pytest.approx(best, rel=BISECTION_WIDTH)
        sizes = first_split(split, limit)
        assert sum(sizes) == layers
        assert min(sizes) >= 1
        assert feasible(split, best * (1 + 1e-9))
        missed += not farthest_reach(split, best * (1 + 1e-9))
    assert missed > 0


def test_recomputation_of_other_stages_loses_no_split_and_cuts_some() -> None:
    """Every split whose pipeline bound keeps a limit lies within its windows; most that do not are cut."""
    within = missed = others = 0
    for seed in range(40):
        problem = reference.Problem(**free_problem(seed))
        num_layers = int(problem.prefix.shape[1] - 1)
        for i in np.flatnonzero(problem.free & (problem.mode == RECOMPUTE_BLOCK)):
            _, p, v, m, group, mode, _, node = problem.shape(int(i))
            times = problem.node_times[node]
            bounds = {}
            for sizes in compositions(num_layers, p, problem.least):
                forward, backward = chunk_times(sizes, problem.prefix, p, v, mode, 2, times)
                bounds[sizes] = pipeline_bound(forward, backward, p, v, m, group, hop_s(times, v))
            limit_s = float(np.median(list(bounds.values())))
            anywhere = [[num_layers] * (num_layers + 1)] * p
            split = free_split(problem, int(i), 2, anywhere)
            dealt = {
                tuple(s)
                for s in splits_within(split, limit_s / BOUND_SAFETY, itertools.repeat(limit_s).__next__)
            }
            wanted = {sizes for sizes, bound in bounds.items() if bound < limit_s * (1 - 1e-9)}
            assert wanted <= dealt
            within, missed = within + len(wanted), missed + len(dealt - wanted)
            others += len(bounds) - len(wanted)
    assert within > 300
    assert missed < others / 5


def test_an_empty_first_stage_serves_a_heavy_embedding(solver) -> None:
    """Where a stage may be empty, an embedding that outweighs two layers takes the first one alone."""
    arrays = free_problem(0, candidates=1)
    num_layers = arrays["prefix"].shape[1] - 1
    arrays["node_pp"][:], arrays["node_m"][:] = 2, 32
    arrays["node_times"][:] = 0.0
    arrays["node_times"][:, 0:8] = 1.0
    arrays["node_times"][:, 12:14] = 2.0 * num_layers
    arrays["node_times"][:, 22] = 1.0
    arrays["mode"][:], arrays["free"][:], arrays["vpp"][:] = 0, 1, 1
    arrays["sizes"] = np.array([1, num_layers - 1], dtype=np.int32)
    arrays["choices"] = arrays["split_start"] = arrays["choice_first"] = np.zeros(1, dtype=np.int32)
    arrays["choice_count"] = np.ones(1, dtype=np.int32)
    arrays["least"] = 0
    found = solver.best_first(solver.Problem(**arrays), 10**12)
    assert found.sizes[0] == (0, num_layers)
