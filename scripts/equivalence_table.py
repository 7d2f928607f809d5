"""Do plans change the mathematics? Train the covering design and print every run beside one process.

python -m scripts.equivalence_table            # table; exit 1 when a plan differs, two minutes on two cores
python -m scripts.equivalence_table --json     # one JSON object per run, the table on stderr
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

from tests.covering import covering_design, legal_targets
from tests.equivalence import (
    TOLERANCE,
    Run,
    Trainings,
    run_design,
    run_forced,
    run_nemo,
    run_verified,
)

#: Of the first sixteen seeds the one whose design needs the fewest ranks.
SEED = 4


def main() -> None:
    """Print the runs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the covering design")
    parser.add_argument("--json", action="store_true", help="machine-readable runs on stdout")
    arguments = parser.parse_args()
    table = sys.stderr if arguments.json else sys.stdout
    started, off = time.perf_counter(), 0

    def show(kind: str, run: Run, **more: Any) -> None:
        if arguments.json:
            print(json.dumps({"kind": kind, **dataclasses.asdict(run), **more}), flush=True)
        worst = "refused" if run.worst is None else f"{run.worst:.1e}"
        tail = " ".join(filter(None, (run.name, *more.values(), run.refusal)))
        print(f"{kind:8s} {run.world:3d} {worst:>8s} {run.seconds:6.1f} s  {tail}", file=table, flush=True)

    print("kind   ranks    worst  seconds  layout", file=table)
    trainings = Trainings()
    design = covering_design(seed=arguments.seed, targets=legal_targets())
    for runs in (run_design(trainings, design), run_nemo(trainings)):
        for run in runs:
            show("plan", run)
            off += run.worst is None or run.worst > TOLERANCE or not run.groups_equal
    for run, rule in run_forced(trainings):
        show("forced", run, rule=rule)
    for run in run_verified(trainings):
        show("verified", run)
    print(f"total {time.perf_counter() - started:.0f} s, {off} plans differ", file=table)
    raise SystemExit(off > 0)


if __name__ == "__main__":
    main()
