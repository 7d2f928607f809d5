"""Compare our legality verdicts with Megatron's on seeded random layouts and print every disagreement.

The judge is megatron-core from TransformerConfig on (``tests/oracle.py``), or with ``--judge validate_args`` the
command line of megatron.training as well (``tests/validate_args.py``; run it with the python of
``make env-megatron-0.19``).  Exit code 1 when a layout we call legal is refused or cannot be written, or one we
refuse is accepted for a reason that the judge's file does not list.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from nest_megatron import rules
from tests.oracle import ORACLE_CANNOT_SEE, accepted_by_megatron
from tests.random_layouts import random_case


def main() -> int:
    """Judge the layouts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    verdicts: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    invisible: Counter[str] = Counter()
    wrong: list[str] = []
    start = time.perf_counter()
    for _ in range(options.layouts):
        job, layout = random_case(rng)
        broken = [rule.rule for rule in rules.check(job, layout)]
        accepted, objection = accepted_by_megatron(job, layout)
        verdicts[
            f"ours {'illegal' if broken else 'legal'}, megatron {'accepts' if accepted else 'refuses'}"
        ] += 1
        seen.update(broken)
        if len(broken) == 1 and not accepted:
            alone[broken[0]] += 1
        unexplained = [name for name in broken if accepted and name not in ORACLE_CANNOT_SEE]
        if accepted:
            invisible.update(broken)
        if unexplained or (not broken and not accepted):
            wrong.append(f"{job.model.name} on {job.num_gpus}: {layout} | {broken} | {objection}")
    print(f"{options.layouts} layouts, seed {options.seed}, {time.perf_counter() - start:.1f} s")
    for name, count in sorted(verdicts.items()):
        print(f"  {count:6d}  {name}")
    print("rule: broken / broken alone and refused by megatron / broken and accepted by megatron")
    for rule in rules.RULES:
        reason = ORACLE_CANNOT_SEE.get(rule.name, "")
        counts = f"{seen[rule.name]:6d} {alone[rule.name]:6d} {invisible[rule.name]:6d}"
        print(f"  {counts}  {rule.code} {rule.name}{': ' + reason if reason else ''}")
    print(f"unexplained disagreements: {len(wrong)}")
    for line in wrong[:20]:
        print("  " + line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
