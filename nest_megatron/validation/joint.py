"""Joint choice of memory and time in sweeps with out-of-memory rows.

Does the pick run, how far is it from the measured best, and why is it not the best itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nest_megatron.validation.metrics import Record, Row, measured_step_s, sweeps_of

PickOutcome = Literal["ran", "oom", "none"]


@dataclass(frozen=True, slots=True)
class Pick:
    """The choice in one sweep: the fastest predicted row that FITS, or is feasible where none FITS.

    Args:
        outcome: the pick ``ran``, measured ``oom``, or nothing is predicted feasible (``none``).
        picked, best: layout of the pick and of the fastest row that ran, in the records' words.
        picked_s, best_s: their measured seconds; ``picked_s`` is None unless the pick ran.
        regret: percent above the best, of a pick that ran.
        reason: why the measured best was not picked.
    """

    sweep: str
    rows: int
    ran: int
    outcome: PickOutcome
    picked: str
    picked_s: float | None
    best: str
    best_s: float
    regret: float | None
    reason: str


def joint_choice(rows: Sequence[Row]) -> tuple[Pick, ...]:
    """Return the pick of every sweep that has timed and out-of-memory rows, by name."""
    found = []
    for name, members in sorted(sweeps_of(rows).items()):
        known = [row for row in members if row[0]["measured"].get("oom") or measured_step_s(row[0])]
        ran = [row for row in known if not row[0]["measured"].get("oom")]
        if ran and len(ran) < len(known):
            found.append(_pick(name, known, ran))
    return tuple(found)


def mean_pick_regret(picks: Sequence[Pick]) -> float | None:
    """Return the mean regret in percent of the picks that ran, None when none did."""
    regrets = [pick.regret for pick in picks if pick.regret is not None]
    return statistics.fmean(regrets) if regrets else None


def layout_words(record: Record) -> str:
    """Return the record's layout as one phrase, for example ``mbs1 TP2 PP4 DP8 SP rc:full``."""
    words = [f"mbs{record.get('micro_batch')}"]
    words += [f"{axis.upper()}{record[axis]}" for axis in ("tp", "pp", "dp") if record.get(axis)]
    words += [f"{axis.upper()}{record[axis]}" for axis in ("vpp", "cp", "ep") if (record.get(axis) or 1) > 1]
    recompute = record.get("recompute") or {}
    mode = recompute if isinstance(recompute, str) else recompute.get("mode")
    return " ".join([*words, *(["SP"] if record.get("sp") else []), f"rc:{mode or 'not printed'}"])


def _pick(name: str, known: Sequence[Row], ran: Sequence[Row]) -> Pick:
    best = min(ran, key=_seconds)
    able = [row for row in known if row[1].get("feasible") and row[1].get("step_time_s")]
    able = [row for row in able if row[1].get("band") == "FITS"] or able
    outcome: PickOutcome = "none"
    picked_s = regret = None
    picked, reason = "-", f"nothing is predicted feasible; the best is predicted {_memory(best[1])}"
    if able:
        least = min(row[1]["step_time_s"] for row in able)
        chosen = [row for row in able if row[1]["step_time_s"] == least]
        picked = layout_words(chosen[0][0])
        reason = _reason(best, able, chosen)
        outcome = "oom" if any(row[0]["measured"].get("oom") for row in chosen) else "ran"
        if outcome == "ran":
            picked_s = statistics.fmean(_seconds(row) for row in chosen)
            regret = 100 * (picked_s / _seconds(best) - 1)
    return Pick(
        sweep=name,
        rows=len(known),
        ran=len(ran),
        outcome=outcome,
        picked=picked,
        picked_s=picked_s,
        best=layout_words(best[0]),
        best_s=_seconds(best),
        regret=regret,
        reason=reason,
    )


def _seconds(row: Row) -> float:
    return measured_step_s(row[0]) or 0.0


def _memory(prediction: Record) -> str:
    """Return the predicted memory verdict of a row in one word."""
    if prediction.get("feasible") is None:
        return "not at all"
    return str(prediction.get("band")) if prediction["feasible"] else "OOM"


def _reason(best: Row, able: Sequence[Row], chosen: Sequence[Row]) -> str:
    """Return why the measured best is not the pick; ``able`` are the rows that the pick was made from."""
    if any(row is best for row in chosen):
        return "the best is picked" if len(chosen) == 1 else f"picked, tied with {len(chosen) - 1} more"
    if not any(row is best for row in able):
        return f"the best is predicted {_memory(best[1])}"
    slower = best[1]["step_time_s"] / chosen[0][1]["step_time_s"] - 1
    return f"the best is predicted {100 * slower:.1f} % slower"
