"""Pipeline schedules: exact small cases, bounds, and equality of the two implementations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cython_dp import reference


def balanced(p: int, v: int, f: float = 1.0, b: float = 2.0) -> tuple[list[float], list[float]]:
    """Return equal chunk times."""
    return [f / v] * (p * v), [b / v] * (p * v)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 7), (2, 2), (4, 4), (4, 16), (8, 9)])
def test_balanced_1f1b_takes_m_plus_p_minus_one_slots(solver, p: int, m: int) -> None:
    """Without latency a balanced 1F1B step lasts (m + p - 1)(F + B) (nest_paper.md 1.6)."""
    forward, backward = balanced(p, 1)
    assert solver.simulate(forward, backward, p, 1, m, p, 0.0) == pytest.approx((m + p - 1) * 3.0)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 16)])
def test_interleaving_divides_the_bubble_by_v(solver, p: int, v: int, m: int) -> None:
    """Interleaved 1F1B has a bubble of (p - 1)(F + B) / v (arXiv 2104.04473 section 2.2)."""
    forward, backward = balanced(p, v)
    expected = m * 3.0 + (p - 1) * 3.0 / v
    assert solver.simulate(forward, backward, p, v, m, p, 0.0) == pytest.approx(expected)


def test_p2p_latency_enters_the_steady_state(solver) -> None:
    """1F1B keeps p - q micro-batches in flight, so a round trip is not hidden (nest_paper.md 1.6)."""
    p, m, hop = 4, 64, 0.5
    forward, backward = balanced(p, 1)
    quiet = solver.simulate(forward, backward, p, 1, m, p, 0.0)
    noisy = solver.simulate(forward, backward, p, 1, m, p, hop)
    # More than the latency of one fill and drain: it repeats every period.
    assert noisy - quiet > 2 * (p - 1) * hop * 2


@pytest.mark.parametrize(("p", "v", "group"), [(1, 1, 1), (4, 1, 4), (4, 2, 4), (4, 3, 6), (2, 2, 2)])
def test_forwards_in_flight_match_the_simulated_order(solver, p: int, v: int, group: int) -> None:
    """The closed form of live forwards equals counting them along each rank's operation order."""
    m = 12
    for rank in range(p):
        live = [0] * v
        peak, at_peak = 0, [0] * v
        for is_forward, chunk, _ in reference.schedule_order(p, v, m, group, rank):
            live[chunk] += 1 if is_forward else -1
            if sum(live) > peak:
                peak, at_peak = sum(live), list(live)
        assert solver.in_flight(p, v, m, group, rank) == at_peak


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bound_never_exceeds_simulation(data: st.DataObject) -> None:
    """The pipeline bound is a lower bound of the event simulation on uneven chunks with latency."""
    p = data.draw(st.integers(1, 6))
    v = data.draw(st.integers(1, 3)) if p > 1 else 1
    m = data.draw(st.integers(p if v > 1 else 1, 12))
    times = st.floats(1e-6, 1.0)
    forward = data.draw(st.lists(times, min_size=p * v, max_size=p * v))
    backward = data.draw(st.lists(times, min_size=p * v, max_size=p * v))
    hop = data.draw(st.floats(0, 0.5))
    legal = [size for size in range(p, m + 1) if m % size == 0 or m % size >= p]
    group = p if v == 1 else data.draw(st.sampled_from(legal))
    simulated = reference.simulate(forward, backward, p, v, m, group, hop)
    assert reference.pipeline_bound(forward, backward, p, v, m, hop) <= simulated


def test_compiled_simulator_equals_its_twin(compiled) -> None:
    """Both simulators give the same bits on 300 random schedules, uneven chunks and groups included."""
    rng = np.random.default_rng(7)
    for _ in range(300):
        p = int(rng.integers(1, 7))
        v = int(rng.integers(1, 4)) if p > 1 else 1
        m = int(rng.integers(p, 14))
        # A short last group must still fill the pipeline (config_surface.md rule 24).
        group = int(rng.choice([size for size in range(p, m + 1) if m % size == 0 or m % size >= p]))
        forward, backward = rng.random(p * v), rng.random(p * v)
        hop = float(rng.random() * 0.3)
        slow = reference.simulate(list(forward), list(backward), p, v, m, group, hop)
        assert compiled.simulate(forward, backward, p, v, m, group, hop) == slow
        slow_bound = reference.pipeline_bound(list(forward), list(backward), p, v, m, hop)
        assert compiled.pipeline_bound(forward, backward, p, v, m, hop) == slow_bound


def test_a_short_last_group_deadlocks_visibly(solver) -> None:
    """A group remainder below p (illegal by rule 24) is reported, never timed."""
    with pytest.raises(RuntimeError, match="deadlocks"):
        solver.simulate([1.0] * 18, [1.0] * 18, 6, 3, 7, 6, 0.0)


def test_wrong_number_of_chunk_times_is_refused(compiled) -> None:
    """A chunk list that does not match p * v is an error, not memory damage."""
    with pytest.raises(ValueError, match="expected 4 chunk times"):
        compiled.simulate([1.0] * 3, [1.0] * 4, 2, 2, 4, 2, 0.0)
