"""What step-time calibration does to the error of runs that it has not seen.

Runs of one family, machine, stack, precision, model and dispatcher are one group.  Pairs of its runs, one at
micro-batch 1 and one at 4, calibrate the others: the first run alone gives one scalar, both give GPU time and
host floor of a mixture-of-experts model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nest_megatron.calibration.runs import Run, predict_run
from nest_megatron.calibration.step import fit_step, one_factor, predicted_s
from nest_megatron.calibration.store import StepCalibration, step_key_of, with_step
from nest_megatron.validation.command import load_records
from nest_megatron.validation.metrics import is_timed, measured_step_s
from nest_megatron.validation.record_layout import NotComputable
from nest_megatron.validation.records import build

Group = tuple[str, str, str]
#: Micro-batches of the two calibration runs, and the most pairs per group (seeded).
MICRO_BATCHES, PAIRS = (1, 4), 6


@dataclass(frozen=True, slots=True)
class Trial:
    """Relative errors of one unseen run: as predicted, after one factor, after two, inside the last band."""

    before: float
    one: float
    two: float
    inside: bool


def groups_of(records: Sequence[dict[str, Any]]) -> dict[Group, list[Run]]:
    """Return the timed runs that can be predicted, by what a calibration covers."""
    groups: dict[Group, list[Run]] = defaultdict(list)
    for record in records:
        if not measured_step_s(record) or not is_timed(record):
            continue
        try:
            run = Run(Path(str(record["id"])), record, build(record))
        except NotComputable:
            continue
        dispatcher = str((record.get("features") or {}).get("dispatcher") or "")
        key = step_key_of(run.built.job, run.built.cluster)
        groups[str(record["family"]), key, dispatcher].append(run)
    return groups


def trials(runs: Sequence[Run]) -> Iterator[Trial]:
    """Yield one trial per unseen run and pair of calibration runs."""
    batches = {run.name: run.built.layout.micro_batch for run in runs}
    pairs = [(x, y) for x in runs for y in runs if (batches[x.name], batches[y.name]) == MICRO_BATCHES]
    for first, second in random.Random(0).sample(pairs, min(PAIRS, len(pairs))):
        one, two = one_factor([first]), fit_step([first, second])
        for run in runs:
            if run is not first and run is not second:
                yield _trial(run, one, two)


def _trial(run: Run, one: StepCalibration, two: StepCalibration) -> Trial:
    measured_s = measured_step_s(run.record) or 0.0
    low_s, high_s = predict_run(run, with_step(run.built.job, two))["step_time_band_s"]
    return Trial(
        before=predicted_s(run) / measured_s - 1,
        one=predicted_s(run, one) / measured_s - 1,
        two=predicted_s(run, two) / measured_s - 1,
        inside=low_s <= measured_s <= high_s,
    )


def line(name: str, found: Sequence[Trial]) -> str:
    """Return one row of the table."""
    mape = [100 * statistics.fmean(abs(getattr(t, x)) for t in found) for x in ("before", "one", "two")]
    inside = 100 * statistics.fmean(trial.inside for trial in found)
    return (
        f"  {name:78s} trials {len(found):4d} MAPE {mape[0]:5.1f} | one run {mape[1]:5.1f} | two runs "
        f"{mape[2]:5.1f}, band covers {inside:5.1f} %"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--family", action="append", default=[], help="only this family; may be repeated")
    options = parser.parse_args()
    records = [
        record
        for record in load_records(options.records)
        if not options.family or record["family"] in options.family
    ]
    print("error of unseen runs, %: before | one run at micro-batch 1 | two runs, at micro-batch 1 and 4")
    every: list[Trial] = []
    for (family, key, dispatcher), runs in sorted(groups_of(records).items()):
        found = list(trials(runs))
        if found:
            print(line(f"{family} {key} {dispatcher}".strip(), found))
            every += found
    if every:
        print(line("all", every))
    return 0


if __name__ == "__main__":
    sys.exit(main())
