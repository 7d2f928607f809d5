"""Compare our legality verdicts with Megatron's on seeded random layouts and print every disagreement.

The judge is megatron-core from TransformerConfig on (``tests/oracle.py``).  With ``--judge validate_args`` it
is megatron.training from the command line on (``tests/validate_args.py``); run that as ``-m
scripts.oracle_table`` with the python of ``make env-megatron-0.19``.

Exit code 1 when a layout we call legal is refused or cannot be written, or one we refuse is accepted for a
reason that the judge's file does not list.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from nest_megatron import rules
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from tests.oracle import ORACLE_CANNOT_SEE, accepted_by_megatron
from tests.random_layouts import random_case
from tests.validate_args import (
    OURS,
    VALIDATE_ARGS_CANNOT_SEE,
    VERSION,
    Judgement,
    judged_by_arguments,
)


def judged_by_core(job: TrainJob, layout: Layout) -> Judgement:
    """Return the verdict of megatron-core alone."""
    accepted, objection = accepted_by_megatron(job, layout)
    return Judgement() if accepted else Judgement("megatron-core", objection)


#: --judge -> (judge, rule -> why it cannot see a breach, megatron-core version of the jobs).
JUDGES = {
    "core": (judged_by_core, ORACLE_CANNOT_SEE, "0.16.1"),
    "validate_args": (judged_by_arguments, VALIDATE_ARGS_CANNOT_SEE, VERSION),
}


@dataclass
class Table:
    """Counts of one comparison.

    Args:
        blind: rule -> why the judge cannot see that it is broken.
        verdicts: our verdict and the judge's -> layouts.
        broken: rule -> layouts that break it; ``alone`` those refused that break nothing else; ``unwritten``
            those that break nothing else and never reach Megatron; ``accepted`` those it lets pass.
        wrong: one line per unexplained disagreement.
    """

    blind: dict[str, str]
    verdicts: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    unwritten: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, job: TrainJob, layout: Layout, judgement: Judgement) -> None:
        """Count one layout."""
        broken = [violation.rule for violation in rules.check(job, layout)]
        verdict = f"refused by {judgement.by}" if judgement.by else "accepted"
        self.verdicts[f"ours {'illegal' if broken else 'legal'}, {verdict}"] += 1
        self.broken.update(broken)
        if judgement.accepted:
            self.accepted.update(broken)
        elif len(broken) == 1:
            (self.unwritten if judgement.by in OURS else self.alone)[broken[0]] += 1
        unexplained = [name for name in broken if judgement.accepted and name not in self.blind]
        if unexplained or (not broken and not judgement.accepted):
            where = f"{job.model.name} on {job.num_gpus}"
            self.wrong.append(f"{where}: {layout} | {broken} | {judgement.by}: {judgement.objection}")

    def print(self) -> None:
        """Print the verdicts, a row per rule, and the first disagreements."""
        for name, count in sorted(self.verdicts.items()):
            print(f"  {count:6d}  {name}")
        print("rule: broken / alone and refused by Megatron / alone and not writable / accepted by Megatron")
        for rule in rules.RULES:
            columns = (self.broken, self.alone, self.unwritten, self.accepted)
            counts = " ".join(f"{column[rule.name]:6d}" for column in columns)
            reason = self.blind.get(rule.name, "")
            print(f"  {counts}  {rule.code} {rule.name}{': ' + reason if reason else ''}")
        print(f"unexplained disagreements: {len(self.wrong)}")
        for line in self.wrong[:20]:
            print("  " + line)


def main() -> int:
    """Judge the layouts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge", choices=sorted(JUDGES), default="core")
    parser.add_argument("--layouts", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    judge, blind, version = JUDGES[options.judge]
    rng = random.Random(options.seed)
    table = Table(blind)
    start = time.perf_counter()
    for _ in range(options.layouts):
        job, layout = random_case(rng, version)
        table.add(job, layout, judge(job, layout))
    spent_s = time.perf_counter() - start
    print(f"{options.layouts} layouts, seed {options.seed}, megatron-core {version}, {spent_s:.1f} s")
    table.print()
    return 1 if table.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
