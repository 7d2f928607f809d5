"""The hostile inputs of `make accept`: mutated files and strings, and what each kind of input leads to.

Exit code 1 when one of them gives a traceback, a wrong exit code, no sentence, or a file that is not whole.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.hostile import KINDS, hostile_input, judge

#: A mutated size must be refused before it is allocated.
_MEMORY_BYTES = 6 * 2**30


def judge_seed(seed: int) -> tuple[str, str, str]:
    """Return (kind, outcome, problem) of one seed."""
    hostile = hostile_input(seed)
    verdict = judge(hostile)
    problem = (
        f"{hostile.kind}, {hostile.mutation}, {hostile.texts}: {verdict.problem}" if verdict.problem else ""
    )
    return hostile.kind, verdict.outcome, problem


def limit_memory() -> None:
    """Let a worker fail alone."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def main() -> int:
    """Judge the inputs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started = time.perf_counter()
    seeds = range(options.seed, options.seed + options.inputs)
    table: Counter[tuple[str, str]] = Counter()
    problems: list[str] = []
    with ProcessPoolExecutor(options.workers, initializer=limit_memory) as pool:
        results = pool.map(judge_seed, seeds, chunksize=8)
        for seed, (kind, outcome, problem) in zip(seeds, results, strict=True):
            table[kind, outcome] += 1
            if problem:
                problems.append(f"seed {seed}: {problem}")
    duration_s = time.perf_counter() - started
    print(f"{options.inputs} hostile inputs, seeds {seeds.start}-{seeds.stop - 1}, {duration_s:.0f} s")
    outcomes = sorted({outcome for _, outcome in table})
    print("  " + "".join(f"{name:>18}" for name in ("kind", *outcomes)))
    for kind in KINDS:
        print("  " + f"{kind:>18}" + "".join(f"{table[kind, outcome]:>18}" for outcome in outcomes))
    print(f"tracebacks and other faults: {len(problems)}")
    for line in problems[:40]:
        print("  " + ascii(line)[1:-1])  # a problem quotes what was hostile
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
