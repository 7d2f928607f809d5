"""The tables of ``nest-megatron validate`` as text; this module formats, it computes no figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from nest_megatron.validation.bands import Coverage
from nest_megatron.validation.curves import SPAN, Curve
from nest_megatron.validation.joint import Pick, mean_pick_regret
from nest_megatron.validation.metrics import Errors
from nest_megatron.validation.peak_memory import MemoryTable
from nest_megatron.validation.ranking import Ranking, Sweep, mean_regret, pair_order
from nest_megatron.validation.scores import ClassScores, Scores
from nest_megatron.validation.step_time import TimeTable


def render(scores: Scores, *, sweeps: bool = False) -> str:
    """Return the tables as text.

    Args:
        sweeps: also one line per layout sweep and one per scale curve.
    """
    lines = [*_time(scores.time), *_memory(scores.memory), *_ranking(scores.ranking)]
    if sweeps:
        lines += [_sweep(sweep, scores.ranking) for sweep in scores.ranking.sweeps]
    lines += _joint(scores.joint)
    lines += _curves(scores.curves, each=sweeps)
    lines += _bands(scores)
    for name, class_scores in scores.classes.items():
        lines += _class(name, class_scores)
    lines += _missing(scores)
    return "\n".join(lines)


def errors_line(name: str, e: Errors) -> str:
    """Return one row of an error table, in percent."""
    return (
        f"  {name:16s} n={e.count:4d} MAPE={e.mape:6.2f} median={e.median:6.2f} "
        f"p90={e.p90:6.1f} bias={e.bias:+6.1f}"
    )


def error_table(title: str, table: Iterable[tuple[str, Errors]]) -> list[str]:
    """Return a titled table of errors, nothing when it has no row."""
    lines = [errors_line(name, errors) for name, errors in table]
    return [title, *lines] if lines else []


def _time(time: TimeTable) -> list[str]:
    rows = list(time.families.items())
    lines = error_table("step time, %", [*rows, *([("all", time.all)] if time.all else [])])
    if time.after_scalar is not None:
        scalar = "step time MAPE after one scalar per accelerator, precision and family"
        lines.append(f"{scalar}: {time.after_scalar:.2f} %")
    return lines


def _memory(memory: MemoryTable) -> list[str]:
    lines = error_table("peak memory, %", memory.families.items())
    if memory.oom:
        lines.append("out of memory (measured -> predicted)")
    for family, c in memory.oom.items():
        lines.append(
            f"  {family:16s} OOM->OOM {c.oom_oom:4d} OOM->fits {c.oom_fits:4d} ran->OOM {c.ran_oom:4d} "
            f"ran->fits {c.ran_fits:4d} accuracy {c.accuracy:.1f} %"
        )
    for name, (total, oom) in memory.risk.items():
        share = 100 * oom / total
        lines.append(f"  band {name:11s} rows {total:4d}, of which out of memory {oom:4d} ({share:.1f} %)")
    return lines


def _ranking(ranking: Ranking) -> list[str]:
    if not ranking.sweeps:
        return []
    lines = ["ranking of layout sweeps"]
    parts = [("all", ranking.sweeps), ("4 rows and more", ranking.large)]
    if ranking.unpredictable:
        parts.append(("without the unpredictable", ranking.predictable))
    for name, sweeps in parts:
        if not sweeps:
            continue
        order, pairs = pair_order(sweeps), sum(sweep.pairs for sweep in sweeps)
        lines.append(
            f"  {name:26s} {len(sweeps):3d} sweeps, regret mean {mean_regret(sweeps):5.2f} % "
            f"max {max(sweep.regret for sweep in sweeps):5.1f} %, {pairs:4d} pairs, order {_share(order)}"
        )
    if ranking.large:
        top = [sweep.top_three for sweep in ranking.large]
        lines.append(
            f"best of the top three: {len(top)} sweeps of 4 rows and more, mean {statistics.fmean(top):.2f} "
            f"%, worst {max(top):.2f} % above the optimum"
        )
    return lines


def _sweep(sweep: Sweep, ranking: Ranking) -> str:
    mark = " unpredictable" if sweep.name in ranking.unpredictable else ""
    return (
        f"  {sweep.name} n={sweep.count} regret={sweep.regret:.1f} top three={sweep.top_three:.1f} "
        f"order={_share(sweep.order)}{mark}"
    )


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.3f}"


def _joint(picks: Sequence[Pick]) -> list[str]:
    if not picks:
        return []
    count = {name: sum(pick.outcome == name for pick in picks) for name in ("ran", "oom", "none")}
    lines = [
        f"joint choice: {len(picks)} sweeps with OOM rows: ran {count['ran']}, picked an OOM row "
        f"{count['oom']}, found nothing {count['none']}, mean regret of those that ran "
        f"{mean_pick_regret(picks) or 0.0:.2f} %"
    ]
    for pick in picks:
        ended = {"oom": "ran OUT OF MEMORY", "none": "nothing found"}.get(pick.outcome)
        measured = ended or f"{pick.picked_s:.2f} s, {pick.regret:.1f} % above the best"
        lines += [
            f"  {pick.sweep} ({pick.ran} of {pick.rows} ran)",
            f"    picked {pick.picked}: {measured}",
            f"    best   {pick.best}: {pick.best_s:.2f} s; {pick.reason}",
        ]
    return lines


def _curves(curves: Sequence[Curve], *, each: bool) -> list[str]:
    if not curves:
        return []
    errors = [abs(curve.error) for curve in curves]
    lines = [
        f"scale curves ({SPAN}x GPUs and more): {len(curves)}, error of the parallel efficiency median "
        f"{statistics.median(errors):.1f} %, mean {statistics.fmean(errors):.1f} %"
    ]
    if each:
        lines += [f"  {c.name}: {c.num_gpus[0]} -> {c.num_gpus[1]} GPUs {c.error:+.1f} %" for c in curves]
    return lines


def _bands(scores: Scores) -> list[str]:
    if scores.bands is None:
        return []
    lines = ["80 % bands of the step time"]
    lines += [_coverage(family, covered) for family, covered in scores.family_bands.items()]
    return [*lines, _coverage("all", scores.bands)]


def _coverage(name: str, covered: Coverage) -> str:
    return (
        f"  {name:16s} n={covered.count:4d} cover {covered.coverage:5.1f} %, "
        f"median width {covered.median_width:.1f} %"
    )


def _class(name: str, scores: ClassScores) -> list[str]:
    lines = [f"class {name}"]
    if scores.time.all is not None:
        lines.append(errors_line("step time, %", scores.time.all))
        lines.append(f"  {'after one scalar':16s} MAPE={scores.time.after_scalar:6.2f}")
    if scores.bands is not None:
        lines.append(_coverage("80 % bands", scores.bands))
    lines += [errors_line(f"memory {family}", errors) for family, errors in scores.memory.families.items()]
    return lines if len(lines) > 1 else []


def _missing(scores: Scores) -> list[str]:
    counts = [f"{family} time {count}" for family, count in scores.time.missing.items()]
    counts += [f"{family} memory {count}" for family, count in scores.memory.missing.items()]
    return [f"not predicted: {', '.join(counts)}"] if counts else []
