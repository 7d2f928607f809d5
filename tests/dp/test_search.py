"""Bounds, memory peaks and best-first search on random problems, both implementations."""

from __future__ import annotations

import numpy as np
import pytest

from cython_dp import reference
from cython_dp.columns import NUM_KINDS, Feature
from tests.dp.conftest import random_problem
from tests.dp.instances import prefix_of


@pytest.mark.parametrize("seed", range(30))
def test_compiled_bounds_equal_the_twin(compiled, seed: int) -> None:
    """Bounds, additive times, peaks, worst ranks and phases agree to the bit."""
    arrays = random_problem(seed)
    fast = compiled.bounds(compiled.Problem(**arrays))
    slow = reference.bounds(reference.Problem(**arrays))
    for left, right in zip(fast, slow, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("seed", range(20))
def test_search_finds_the_brute_force_optimum(solver, seed: int) -> None:
    """Best-first over fixed splits returns the candidate that simulating everything returns."""
    problem = solver.Problem(**random_problem(seed))
    bound_s, extra_s, peak, *_ = solver.bounds(problem)
    everything = [solver.step_time(problem, i, float(extra_s[i])) for i in range(len(bound_s))]
    found = solver.best_first(problem, int(peak.max()))
    assert np.nanmin(found.time_s) == min(everything) == found.lower_bound_s
    assert np.isfinite(found.time_s).sum() == found.evaluated < len(everything)


@pytest.mark.parametrize("seed", range(10))
def test_slack_keeps_every_near_optimum(solver, seed: int) -> None:
    """With slack 5 % every candidate within 5 % of the optimum has been simulated."""
    problem = solver.Problem(**random_problem(seed))
    bound_s, extra_s, peak, *_ = solver.bounds(problem)
    everything = np.array([solver.step_time(problem, i, float(extra_s[i])) for i in range(len(bound_s))])
    found = solver.best_first(problem, int(peak.max()), 0.05)
    near = everything <= everything.min() * 1.05
    assert np.isfinite(found.time_s[near]).all()


def test_features_account_for_every_layer() -> None:
    """The layers counted over all ranks are the model's, for every recompute mode."""
    kinds = [0, 1, 0, 1, 2, 0, 3, 0]
    for mode in (0, 1, 2):
        features = reference.stage_features([3, 1, 2, 2], prefix_of(kinds), 2, 2, 4, 2, mode, 2)
        held = features[:, Feature.HELD : Feature.HELD + NUM_KINDS].sum(axis=0)
        assert held.tolist() == [4, 2, 1, 1]
        assert features[:, Feature.FIRST].tolist() == [1, 0]
        assert features[:, Feature.LAST].tolist() == [0, 1]


def test_full_recompute_keeps_units_instead_of_layers() -> None:
    """Uniform recompute of one layer keeps one unit per layer in flight and no plain layer."""
    prefix = prefix_of([0] * 8)
    plain = reference.stage_features([4, 4], prefix, 2, 1, 8, 2, 0, 1)
    again = reference.stage_features([4, 4], prefix, 2, 1, 8, 2, 1, 1)
    np.testing.assert_array_equal(again[:, Feature.LIVE_UNITS], plain[:, Feature.LIVE])
    assert again[:, Feature.LIVE].sum() == 0
    assert again[:, Feature.UNIT].tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_smallest_block_is_the_smallest_that_fits(compiled, seed: int) -> None:
    """Bisection finds what trying every number of recomputed layers finds."""
    arrays = random_problem(seed)
    # A recomputed layer keeps its input only, which is never more than what the layer would have saved.
    memory = arrays["node_memory"]
    least = memory[:, :, Feature.LIVE : Feature.LIVE + NUM_KINDS].min(axis=2)
    memory[:, :, Feature.LIVE_UNITS] = least // 3
    memory[:, :, Feature.UNIT : Feature.UNIT + NUM_KINDS] = 0
    peaks = reference.bounds(reference.Problem(**arrays))[2]
    limit = int(np.median(peaks))
    fast = compiled.smallest_block(compiled.Problem(**arrays), limit)
    np.testing.assert_array_equal(fast, reference.smallest_block(reference.Problem(**arrays), limit))
