"""The large counts of `make accept`: random jobs whose plans must be legal, feasible and written back.

Exit code 1 when any invariant breaks.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.random_jobs import Verdict, judge, random_job


def judge_seed(seed: int) -> Verdict:
    """Judge the job of one seed."""
    return judge(random_job(random.Random(seed)))


def main() -> int:
    """Judge the jobs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started = time.perf_counter()
    kinds: Counter[str] = Counter()
    problems: list[str] = []
    seeds = range(options.seed, options.seed + options.jobs)
    with ProcessPoolExecutor(options.workers) as pool:
        for seed, verdict in zip(seeds, pool.map(judge_seed, seeds, chunksize=8), strict=True):
            kinds[verdict.kind] += 1
            if verdict.problem:
                problems.append(f"seed {seed}: {verdict.problem}")
    print(
        f"{options.jobs} random jobs, seeds {seeds.start}-{seeds.stop - 1}, "
        f"{time.perf_counter() - started:.0f} s"
    )
    for kind, count in kinds.most_common():
        print(f"  {count:6d}  {kind}")
    print(f"plans or refusals that break an invariant: {len(problems)}")
    for problem in problems[:20]:
        print("  " + problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
