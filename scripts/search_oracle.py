"""The large counts of `make accept` for the solver: brute force over splits and recomputation, bounds, twins.

Exit code 1 when any instance or schedule differs.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from cython_dp import Problem, best_first, pipeline_bound, reference, simulate
from tests.dp.instances import free_problem, limit_of, random_schedule, solutions


def judge_instance(seed: int) -> tuple[bool, bool]:
    """Return (whether some solution fits, whether the search found the optimum and met it from below)."""
    arrays = free_problem(seed)
    twin = reference.Problem(**arrays)
    limit = limit_of(twin, seed)
    best = min((seconds for seconds, _, _ in solutions(twin, limit)), default=math.inf)
    found = best_first(Problem(**arrays), limit, leaves=10**9)
    times = found.time_s[np.isfinite(found.time_s)]
    least = float(times.min()) if len(times) else math.inf
    return math.isfinite(best), least == best == found.lower_bound_s


def main() -> int:
    """Judge the instances and schedules and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started = time.perf_counter()
    seeds = range(options.seed, options.seed + options.instances)
    with ProcessPoolExecutor(options.workers) as pool:
        verdicts = list(pool.map(judge_instance, seeds, chunksize=8))
    solvable = sum(fits for fits, _ in verdicts)
    wrong = [seed for seed, (_, right) in zip(seeds, verdicts, strict=True) if not right]
    print(
        f"{len(seeds)} random instances of up to 8 layers, 4 stages and 6 candidates, every split and "
        f"recomputation tried: {solvable} with a solution, {len(wrong)} where the search differs; "
        f"{time.perf_counter() - started:.0f} s"
    )
    rng = np.random.default_rng(options.seed)
    gaps, above, different = [], 0, 0
    for number in range(options.schedules):
        schedule = random_schedule(rng)
        simulated, bound = simulate(*schedule), pipeline_bound(*schedule)
        above += bound > simulated
        gaps.append(simulated / bound - 1)
        different += number < options.schedules // 4 and simulated != reference.simulate(*schedule)
    print(
        f"{options.schedules} random schedules: bound above the simulation {above}; "
        f"gap mean {np.mean(gaps):.1%}, largest {np.max(gaps):.1%}; "
        f"simulator unlike its twin {different} of {options.schedules // 4}"
    )
    for seed in wrong[:20]:
        print(f"  seed {seed}")
    return 1 if wrong or above or different else 0


if __name__ == "__main__":
    sys.exit(main())
