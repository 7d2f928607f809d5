"""A seeded slice of the random jobs of `make accept`, judged by our rules and by megatron-core itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.random_jobs import judge, random_job

pytestmark = pytest.mark.integration

#: Seeds of the slice; `make accept` takes 2,000 others of the same generator.
SLICE = range(10_000, 10_040)


def test_every_plan_is_legal_executable_and_written_back() -> None:
    """Each plan passes the rules and megatron-core, fits, keeps pins and layers, and the edits ask for it."""
    kinds: Counter[str] = Counter()
    problems = []
    for seed in SLICE:
        verdict = judge(random_job(random.Random(seed)))
        kinds[verdict.kind] += 1
        if verdict.problem:
            problems.append(f"seed {seed}: {verdict.problem}")
    assert problems == []
    # The generator must keep exercising plans, not only refusals.
    assert kinds["rewritten"] + kinds["repaired"] + kinds["kept"] > len(SLICE) // 2
