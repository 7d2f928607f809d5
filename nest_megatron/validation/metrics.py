"""Errors of predictions against measured records: memory, out-of-memory, time, order, joint choice.

Definitions (those of the public scoring script of the measured data): memory error on allocated bytes, or
on device bytes where the source prints nvidia-smi figures; time error on rows whose notes do not disqualify
them; order over pairs of one layout sweep that differ by more than 3 %, a predicted tie counts half; regret =
measured time of the predicted-best row over the measured best; joint choice = the fastest predicted row that
FITS (or is feasible, where none FITS) in sweeps with out-of-memory rows: did it run, and what is its regret.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nest_megatron.units import GB, GIB

Record = Mapping[str, Any]

#: Families whose memory figure is what nvidia-smi shows.
DEVICE_FAMILIES = ("bigscience", "flagperf", "primus")
#: Families whose printed GB are 1e9 bytes.
DECIMAL_FAMILIES = ("bridge",)
#: Families whose times are not performance figures, and notes that disqualify a time.
UNTIMED_FAMILIES = ("mcoreci",)
UNTIMED_NOTES = ("CAUTION", "DOES NOT MATCH", "sanity run", "+/-40", "LoRA")
#: Measured differences below this are ties (noise floor of the measured data).
NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of one group, in percent."""

    count: int
    mape: float
    median: float
    p90: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        """Return the summary of relative errors (prediction / measurement - 1)."""
        ordered = sorted(abs(error) for error in errors)
        return cls(
            count=len(errors),
            mape=100 * statistics.fmean(ordered),
            median=100 * statistics.median(ordered),
            p90=100 * ordered[int(0.9 * (len(ordered) - 1))],
            bias=100 * statistics.fmean(errors),
        )


@dataclass(frozen=True, slots=True)
class Confusion:
    """Out-of-memory outcomes: first the measured, then the predicted one."""

    oom_oom: int = 0
    oom_fits: int = 0
    ran_oom: int = 0
    ran_fits: int = 0

    @property
    def accuracy(self) -> float:
        """Share of right verdicts, percent."""
        right = self.oom_oom + self.ran_fits
        return 100 * right / (right + self.oom_fits + self.ran_oom)


@dataclass(slots=True)
class Scores:
    """All tables; families in order of name."""

    time: dict[str, Errors] = field(default_factory=dict)
    memory: dict[str, Errors] = field(default_factory=dict)
    oom: dict[str, Confusion] = field(default_factory=dict)
    bands: dict[str, tuple[int, int]] = field(default_factory=dict)
    ranking: dict[str, float] = field(default_factory=dict)
    joint: dict[str, float] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)


def measured_step_s(record: Record) -> float | None:
    """Return the measured step seconds, from tokens/s where only that is printed."""
    measured = record["measured"]
    if measured.get("step_time_s"):
        return float(measured["step_time_s"])
    rate = measured.get("tokens_per_s_per_gpu")
    if rate and record.get("global_batch") and record.get("seq_len") and record.get("num_gpus"):
        return float(record["global_batch"] * record["seq_len"] / (rate * record["num_gpus"]))
    return None


def measured_peak_bytes(record: Record) -> float | None:
    """Return the measured peak, bytes."""
    measured = record["measured"]
    if measured.get("peak_mem_bytes"):
        return float(measured["peak_mem_bytes"])
    if measured.get("peak_mem_gb"):
        return float(measured["peak_mem_gb"] * (GB if record["family"] in DECIMAL_FAMILIES else GIB))
    return None


def _timed(record: Record) -> bool:
    notes = str(record.get("notes"))
    return (
        bool(record.get("seq_len"))
        and record["family"] not in UNTIMED_FAMILIES
        and not any(word in notes for word in UNTIMED_NOTES)
    )


def score(records: Iterable[Record], predictions: Iterable[Record]) -> Scores:
    """Return every table for ``records``; a record without a prediction counts as missing."""
    by_id = {prediction["id"]: prediction for prediction in predictions}
    rows = [(record, by_id.get(record["id"], {})) for record in records]
    scores = Scores()
    time: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    missing: dict[str, int] = defaultdict(int)
    for record, prediction in rows:
        family, seconds, peak = record["family"], measured_step_s(record), measured_peak_bytes(record)
        if seconds and _timed(record):
            if prediction.get("step_time_s"):
                time[family].append(prediction["step_time_s"] / seconds - 1)
            else:
                missing[f"{family}: time"] += 1
        if peak and not record["measured"].get("oom"):
            key = "peak_device_bytes" if family in DEVICE_FAMILIES else "peak_allocated_bytes"
            if prediction.get(key):
                memory[family].append(prediction[key] / peak - 1)
            else:
                missing[f"{family}: memory"] += 1
    scores.time = {family: Errors.of(errors) for family, errors in sorted(time.items())}
    scores.memory = {family: Errors.of(errors) for family, errors in sorted(memory.items())}
    scores.oom, scores.bands = _outcomes(rows)
    scores.ranking = _ranking(rows)
    scores.joint = _joint(rows)
    scores.missing = dict(missing)
    return scores


def _outcomes(
    rows: Sequence[tuple[Record, Record]],
) -> tuple[dict[str, Confusion], dict[str, tuple[int, int]]]:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    bands: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record, prediction in rows:
        ran_out, fits = record["measured"].get("oom"), prediction.get("feasible")
        if ran_out is None or fits is None:
            continue
        counts[record["family"]][(0 if ran_out else 2) + int(fits)] += 1
        band = bands[str(prediction.get("band"))]
        band[0] += 1
        band[1] += int(ran_out)
    confusions = {family: Confusion(*values) for family, values in sorted(counts.items())}
    return confusions, {name: (total, oom) for name, (total, oom) in sorted(bands.items())}


def _sweeps(rows: Sequence[tuple[Record, Record]]) -> dict[str, list[tuple[Record, Record]]]:
    sweeps: dict[str, list[tuple[Record, Record]]] = defaultdict(list)
    for record, prediction in rows:
        if record.get("group_kind") == "layout-sweep":
            sweeps[str(record["group"])].append((record, prediction))
    return sweeps


def _ranking(rows: Sequence[tuple[Record, Record]]) -> dict[str, float]:
    """Return sweeps, mean and largest regret (percent), pairs and order."""
    regrets: list[float] = []
    pairs = right = 0.0
    for members in _sweeps(rows).values():
        timed = [
            (prediction["step_time_s"], seconds)
            for record, prediction in members
            if prediction.get("step_time_s") and _timed(record) and (seconds := measured_step_s(record))
        ]
        if len(timed) < 2:
            continue
        regrets.append(_regret(timed, min(seconds for _, seconds in timed)))
        for i, (predicted, seconds) in enumerate(timed):
            for other_predicted, other_seconds in timed[:i]:
                if abs(seconds / other_seconds - 1) > NOISE:
                    pairs += 1
                    agree = (predicted < other_predicted) == (seconds < other_seconds)
                    right += 0.5 if predicted == other_predicted else float(agree)
    if not regrets:
        return {}
    found = {"sweeps": len(regrets), "mean_regret": statistics.fmean(regrets), "max_regret": max(regrets)}
    return found | {"pairs": pairs, "order": right / pairs if pairs else float("nan")}


def _regret(timed: Sequence[tuple[float, float]], best_s: float) -> float:
    least = min(predicted for predicted, _ in timed)
    chosen = statistics.fmean(seconds for predicted, seconds in timed if predicted == least)
    return 100 * (chosen / best_s - 1)


def _joint(rows: Sequence[tuple[Record, Record]]) -> dict[str, float]:
    """Return how the joint choice of memory and time ends in sweeps that have out-of-memory rows."""
    found = {"sweeps": 0.0, "ran": 0.0, "oom": 0.0, "none": 0.0}
    regrets: list[float] = []
    for members in _sweeps(rows).values():
        outcomes = [
            (prediction, None if record["measured"].get("oom") else measured_step_s(record))
            for record, prediction in members
            if record["measured"].get("oom") or measured_step_s(record)
        ]
        ran = [seconds for _, seconds in outcomes if seconds is not None]
        if not ran or len(ran) == len(outcomes):
            continue
        found["sweeps"] += 1
        able = [(p, s) for p, s in outcomes if p.get("feasible") and p.get("step_time_s")]
        able = [(p, s) for p, s in able if p.get("band") == "FITS"] or able
        if not able:
            found["none"] += 1
            continue
        least = min(p["step_time_s"] for p, _ in able)
        chosen = [seconds for p, seconds in able if p["step_time_s"] == least]
        if any(seconds is None for seconds in chosen):
            found["oom"] += 1
            continue
        found["ran"] += 1
        regrets.append(100 * (statistics.fmean(s for s in chosen if s is not None) / min(ran) - 1))
    return found | ({"mean_regret": statistics.fmean(regrets)} if regrets else {}) if found["sweeps"] else {}


def render(scores: Scores) -> str:
    """Return the tables as text."""
    lines: list[str] = []
    for title, table in (("step time, %", scores.time), ("peak memory, %", scores.memory)):
        if table:
            lines.append(title)
        for family, e in table.items():
            lines.append(
                f"  {family:12s} n={e.count:4d} MAPE={e.mape:6.2f} median={e.median:6.2f} "
                f"p90={e.p90:6.1f} bias={e.bias:+6.1f}"
            )
    if scores.oom:
        lines.append("out of memory (measured -> predicted)")
    for family, c in scores.oom.items():
        lines.append(
            f"  {family:12s} OOM->OOM {c.oom_oom:4d} OOM->fits {c.oom_fits:4d} ran->OOM {c.ran_oom:4d} "
            f"ran->fits {c.ran_fits:4d} accuracy {c.accuracy:.1f} %"
        )
    for name, (total, oom) in scores.bands.items():
        share = 100 * oom / total
        lines.append(f"  band {name:6s} rows {total:4d}, of which out of memory {oom:4d} ({share:.1f} %)")
    if scores.ranking:
        r = scores.ranking
        lines.append(
            f"ranking: {r['sweeps']:.0f} sweeps, regret mean {r['mean_regret']:.2f} % "
            f"max {r['max_regret']:.1f} %, "
            f"{r['pairs']:.0f} pairs, order {r['order']:.3f}"
        )
    if scores.joint:
        j = scores.joint
        lines.append(
            f"joint choice: {j['sweeps']:.0f} sweeps with OOM rows: ran {j['ran']:.0f}, picked an OOM row "
            f"{j['oom']:.0f}, found nothing {j['none']:.0f}, mean regret {j.get('mean_regret', 0.0):.2f} %"
        )
    if scores.missing:
        counts = ", ".join(f"{name} {count}" for name, count in scores.missing.items())
        lines.append(f"not predicted: {counts}")
    return "\n".join(lines)
