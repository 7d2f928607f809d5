"""Pipeline schedules: exact small cases, bounds, and equality of the two implementations."""

from __future__ import annotations

import numpy as np
import pytest

from cython_dp import reference
from tests.dp.instances import random_schedule


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


def test_bound_never_exceeds_simulation(compiled) -> None:
    """The pipeline bound stays below the event simulation on 1,000 random schedules, and close to it."""
    rng = np.random.default_rng(11)
    gaps = []
    for _ in range(1000):
        schedule = random_schedule(rng)
        simulated = compiled.simulate(*schedule)
        bound = compiled.pipeline_bound(*schedule)
        assert bound <= simulated
        gaps.append(simulated / bound - 1)
    assert np.mean(gaps) < 0.03


def test_bound_is_exact_on_balanced_stages(solver) -> None:
    """Without latency the bound of balanced stages is the makespan, interleaved or not."""
    for p, v, m in ((4, 1, 16), (8, 1, 9), (4, 2, 8), (8, 4, 16)):
        forward, backward = balanced(p, v)
        simulated = solver.simulate(forward, backward, p, v, m, p, 0.0)
        assert solver.pipeline_bound(forward, backward, p, v, m, p, 0.0) == pytest.approx(simulated, rel=2e-9)


def test_compiled_simulator_equals_its_twin(compiled) -> None:
    """Both implementations give the same bits on 300 random schedules, uneven chunks and groups included."""
    rng = np.random.default_rng(7)
    for _ in range(300):
        schedule = random_schedule(rng)
        assert compiled.simulate(*schedule) == reference.simulate(*schedule)
        assert compiled.pipeline_bound(*schedule) == reference.pipeline_bound(*schedule)
        forward, backward, p, v, *_, hop = schedule
        if v == 1:
            fast = compiled.cycle_period(forward, backward, p, hop)
            assert fast == reference.cycle_period(forward, backward, p, hop)


def test_period_never_exceeds_the_slope_of_a_long_run(compiled) -> None:
    """The cycle-mean period is at most what a further micro-batch costs, and just that when balanced."""
    rng = np.random.default_rng(5)
    more = 60 * 60
    for spread in (0.0, 1.0) * 20:
        p = int(rng.integers(1, 7))
        forward, backward = 1 + spread * rng.random(p), 2 + spread * rng.random(p)
        hop = np.full(p, float(rng.choice([0.0, 0.4, 1.0])))
        short, long = (compiled.simulate(forward, backward, p, 1, m, p, hop) for m in (more, 2 * more))
        slope, period = (long - short) / more, compiled.cycle_period(forward, backward, p, hop)
        assert period <= slope * (1 + 1e-9)
        if not spread:
            assert slope == pytest.approx(period, rel=1e-9)


def test_one_latency_or_one_per_link(solver) -> None:
    """A single latency means the same on every link; a wrong number of links is refused."""
    forward, backward = [1.0, 1.5, 2.0, 1.0], [2.0, 2.5, 1.0, 3.0]
    one = solver.simulate(forward, backward, 2, 2, 4, 2, 0.25)
    assert solver.simulate(forward, backward, 2, 2, 4, 2, [0.25, 0.25]) == one
    assert solver.simulate(forward, backward, 2, 2, 4, 2, [0.25, 0.5]) > one


def test_a_short_last_group_deadlocks_visibly(solver) -> None:
    """A group remainder below p (illegal by rule 24) is reported, never timed."""
    with pytest.raises(RuntimeError, match="deadlocks"):
        solver.simulate([1.0] * 18, [1.0] * 18, 6, 3, 7, 6, 0.0)


def test_wrong_number_of_chunk_times_is_refused(compiled) -> None:
    """A chunk list that does not match p * v is an error, not memory damage."""
    with pytest.raises(ValueError, match="expected 4 chunk times"):
        compiled.simulate([1.0] * 3, [1.0] * 4, 2, 2, 4, 2, 0.0)
    with pytest.raises(ValueError, match="expected 2 link latencies"):
        compiled.simulate([1.0] * 4, [1.0] * 4, 2, 2, 4, 2, [0.1])
