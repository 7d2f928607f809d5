"""How much of the memory accuracy is memory of the data: refit without one sweep or family, then predict it.

Sweeps (rows that ran or ran out of memory): the profile facts of GRID and the reserve outside the
allocator are
chosen again on the other sweeps; a sweep is one model on one number of GPUs.  Families (printed peaks): one
common factor is fitted on the other families; a factor away from 1 means that their mechanisms do not
transfer.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.units import GIB
from nest_megatron.validation.command import load_records
from nest_megatron.validation.metrics import measured_peak_bytes
from nest_megatron.validation.record_layout import NotComputable
from nest_megatron.validation.records import build
from nest_megatron.validation.replay import predict_record

#: Facts of a framework profile that the sweeps could have chosen.
GRID: dict[str, tuple[int, ...]] = {
    "loss_bytes_per_logit": (6, 10, 14, 18, 22),
    "gathers_logits": (0, 1),
    "unfused_norm_saved_bytes": (0, 6),
}
#: Allocated peak above which a row is called out of memory, GiB.
LIMITS_GIB = tuple(60 + 0.25 * step for step in range(81))
PEAK_FAMILIES = ("mcoreci", "simumax", "bridge", "bigscience")

Setting = tuple[int, ...]
Row = tuple[str, bool, dict[Setting, float]]


def peaks_of(record: dict[str, Any]) -> dict[Setting, float]:
    """Return the allocated peak in GiB under every setting of GRID."""
    built = build(record)
    peaks: dict[Setting, float] = {}
    for setting in itertools.product(*GRID.values()):
        facts: dict[str, Any] = dict(zip(GRID, setting, strict=True))
        job = replace(built.job, profile=replace(built.job.profile, **facts))
        prediction = Evaluator(job, built.cluster).predict([built.layout])[0]
        peaks[setting] = prediction.peak_allocated_bytes / GIB
    return peaks


def right(rows: Iterable[Row], setting: Setting, limit_gib: float) -> int:
    """Return how many rows are called as measured."""
    return sum((peaks[setting] > limit_gib) == out for _, out, peaks in rows)


def best(rows: Sequence[Row]) -> tuple[Setting, float]:
    """Return the setting and limit with the most rows right; of equals, the middle limit."""
    scores: dict[tuple[Setting, float], int] = {
        (setting, limit): right(rows, setting, limit)
        for setting in itertools.product(*GRID.values())
        for limit in LIMITS_GIB
    }
    top = max(scores.values())
    setting = next(setting for (setting, _), score in scores.items() if score == top)
    limits = [limit for (other, limit), score in scores.items() if score == top and other == setting]
    return setting, statistics.median_low(limits)


def sweeps(records: Sequence[dict[str, Any]], family: str) -> None:
    """Print the leave-one-sweep-out table of ``family``."""
    rows: list[Row] = []
    shipped: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        outcome = record["measured"].get("oom")
        if record["family"] != family or outcome is None:
            continue
        try:
            peaks = peaks_of(record)
        except NotComputable:
            continue
        name = f"{record['model']['name']}, {record['seq_len']} tokens, {record['num_gpus']} GPUs"
        rows.append((name, bool(outcome), peaks))
        shipped[name].append(predict_record(record)["feasible"] != bool(outcome))
    print(f"leave one sweep out, {family}: right of n; settings are {', '.join(GRID)}")
    print(f"  {'sweep':46s} {'n':>4s} {'shipped':>8s} {'left out':>8s}  chosen on the others")
    total = left_total = 0
    for name, verdicts in shipped.items():
        inside = [row for row in rows if row[0] == name]
        setting, limit = best([row for row in rows if row[0] != name])
        count = right(inside, setting, limit)
        total, left_total = total + sum(verdicts), left_total + count
        print(f"  {name:46s} {len(inside):4d} {sum(verdicts):8d} {count:8d}  {setting}, {limit:.2f} GiB")
    print(f"  {'all':46s} {len(rows):4d} {total:8d} {left_total:8d}")
    setting, limit = best(rows)
    print(f"  chosen on all of them: {setting}, {limit:.2f} GiB, {right(rows, setting, limit)} right")


def families(records: Sequence[dict[str, Any]]) -> None:
    """Print the leave-one-family-out table of the printed peaks."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for record in records:
        peak = measured_peak_bytes(record)
        measured = (
            record["family"] in PEAK_FAMILIES and peak is not None and not record["measured"].get("oom")
        )
        if not measured or record.get("num_gpus") is None:
            continue
        entry = predict_record(record)
        device = record["family"] == "bigscience"  # printed by nvidia-smi, not by the allocator
        predicted = entry.get("peak_device_bytes" if device else "peak_allocated_bytes")
        if predicted:
            ratios[record["family"]].append(peak / predicted)
    print("leave one family out: one factor fitted on the other families")
    print(f"  {'family':12s} {'n':>4s} {'MAPE %':>7s} {'factor of the others':>21s} {'MAPE % with it':>15s}")
    for family, own in ratios.items():
        others = [ratio for name, values in ratios.items() if name != family for ratio in values]
        factor = statistics.median(others)
        print(f"  {family:12s} {len(own):4d} {mape(own, 1.0):7.2f} {factor:21.4f} {mape(own, factor):15.2f}")


def mape(ratios: Sequence[float], factor: float) -> float:
    """Return the mean absolute error in % of the measured value."""
    return 100 * statistics.mean(abs(factor / ratio - 1) for ratio in ratios)


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--family", default="layouts23", help="the family with the sweeps")
    options = parser.parse_args()
    records = load_records(options.records)
    families(records)
    sweeps(records, options.family)
    return 0


if __name__ == "__main__":
    sys.exit(main())
