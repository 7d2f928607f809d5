"""The tables of a report: layout beside layout, memory per stage, time by term, runner-ups, rejections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nest_megatron.report import page as fmt
from nest_megatron.report.page import Page
from nest_megatron.specs.layout import Layout, Recompute
from nest_megatron.specs.plan import Candidate, Prediction, StagePrediction, UserSide

#: Column -> the memory terms it sums; every other term goes to the last column.
MEMORY_COLUMNS: dict[str, tuple[str, ...]] = {
    "weights": ("weights",),
    "grads": ("gradients",),
    "optim.": ("optimizer",),
    "activ.": ("activations",),
    "loss": ("loss",),
}
STATE_TERMS: tuple[str, ...] = ("weights", "gradients", "optimizer")

#: Term of the time split -> what a reader calls it, in printing order.
TIME_LABELS: dict[str, str] = {
    "compute": "compute",
    "recompute": "recompute",
    "bubble": "pipeline bubble",
    "tp": "TP communication",
    "cp": "CP communication",
    "ep": "EP communication",
    "pp": "PP communication",
    "dp": "DP communication",
    "optimizer": "optimizer",
    "overhead": "overhead",
}

#: Longest table of stages, and of rejection reasons.
MAX_STAGE_ROWS = 8
MAX_REJECTION_ROWS = 10

#: Band -> how many of the measured layouts in it ran out of memory (research/memory_model.md section 0).
BAND_FREQUENCY: dict[str, tuple[int, int]] = {"FITS": (5, 358), "TIGHT": (29, 82), "OOM": (219, 223)}

_SHARDING_NAMES = {
    "none": "none",
    "optim": "optimizer (ZeRO-1)",
    "optim_grads": "optimizer, gradients (ZeRO-2)",
    "optim_grads_params": "optimizer, gradients, weights (ZeRO-3)",
}


def _plain_table() -> Table:
    """Return a table without lines: the same text in a terminal, a log and an ASCII stream."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def layers_per_chunk(counts: Sequence[int]) -> str:
    """Return layer counts in model order, equal neighbours joined: ``9, 2 chunks of 10, 9``."""
    runs = [(layers, len(list(group))) for layers, group in groupby(counts)]
    texts = [str(layers) if times == 1 else f"{times} chunks of {layers}" for layers, times in runs]
    return ", ".join(texts) or "-"


def _recompute(recompute: Recompute) -> str:
    if recompute.granularity == "none":
        return "none"
    if recompute.granularity == "selective":
        return "selective: " + ", ".join(recompute.modules)
    return f"full, {recompute.method} {recompute.num_layers}"


def _overlap(layout: Layout) -> str:
    names = ("grad_reduce", "param_gather", "tp_comm", "p2p", "expert_all_to_all")
    return ", ".join(name for name in names if getattr(layout.overlap, name)) or "none"


def axis_rows(layout: Layout) -> dict[str, str]:
    """Return one row per axis, the derived degrees included."""
    return {
        "tensor parallel (tp)": str(layout.tp),
        "sequence parallel": "on" if layout.sequence_parallel else "off",
        "pipeline parallel (pp)": str(layout.pp),
        "virtual chunks (vpp)": str(layout.vpp),
        "context parallel (cp)": str(layout.cp),
        "expert parallel (ep)": str(layout.ep),
        "expert tensor par. (etp)": str(layout.etp),
        "data parallel (dp)": str(layout.dp),
        "expert data par. (edp)": str(layout.edp),
        "micro-batch size": str(layout.micro_batch),
        "micro-batches per step": str(layout.num_micro_batches),
        "layers per chunk": layers_per_chunk(layout.num_layers_per_chunk),
        "sharding": _SHARDING_NAMES[layout.sharding],
        "optimizer instances": str(layout.num_optimizer_instances),
        "recompute": _recompute(layout.recompute),
        "overlap": _overlap(layout),
        "rank order": layout.order,
    }


def memory_verdict(prediction: Prediction) -> str:
    """Return the risk label with its measured frequency, or that the layout does not fit."""
    failed, rows = BAND_FREQUENCY[prediction.band]
    seen = f"{failed} of {rows} measured layouts of this band ran out of memory"
    return f"{prediction.band} ({seen})" if prediction.feasible else f"DOES NOT FIT ({seen})"


def prediction_rows(prediction: Prediction | None) -> dict[str, str]:
    """Return what the layout is expected to do, each number with its unit; dashes when it cannot be built."""
    if prediction is None:
        return dict.fromkeys(_PREDICTION_NAMES, "-")
    low_s, high_s = prediction.step_time_band_s
    values = (
        fmt.duration(prediction.step_time_s),
        fmt.duration_band(low_s, high_s),
        fmt.count(prediction.tokens_per_s_per_gpu),
        fmt.percent(prediction.mfu),
        f"{fmt.gib(prediction.peak_allocated_bytes)} GiB",
        f"{fmt.gib(prediction.peak_device_bytes)} GiB",
        f"{fmt.gib(prediction.visible_bytes)} GiB",
        prediction.band if prediction.feasible else "DOES NOT FIT",
    )
    return dict(zip(_PREDICTION_NAMES, values, strict=True))


_PREDICTION_NAMES = (
    "step time",
    "80 % band",
    "tokens/s/GPU",
    "MFU",
    "peak allocated",
    "peak on device",
    "visible memory",
    "memory",
)


def layout_panel(page: Page, user: UserSide, plan: Candidate | None) -> Panel:
    """Return the panel 'your layout | plan'; rows whose values differ carry a mark and a colour."""
    table = _plain_table()
    table.add_column(page.text("axis"), no_wrap=True)
    table.add_column(page.text("your layout"), overflow="fold")
    if plan is not None:
        table.add_column(page.text("plan"), overflow="fold")
        table.add_column("", no_wrap=True)

    def add(name: str, yours: str, planned: str | None, *, mark: bool) -> None:
        if planned is None:
            table.add_row(page.text(name), page.text(yours))
            return
        differs = mark and yours != planned
        style = "bold yellow" if differs else ""
        row = (page.text(name), page.text(yours), page.text(planned, style))
        table.add_row(*row, page.text(page.mark if differs else "", style))

    planned_axes = axis_rows(plan.layout) if plan else {}
    for name, yours in axis_rows(user.layout).items():
        add(name, yours, planned_axes.get(name), mark=True)
    table.add_row()
    planned_numbers = prediction_rows(plan.prediction) if plan else {}
    for name, yours in prediction_rows(user.prediction).items():
        add(name, yours, planned_numbers.get(name), mark=False)
    title = "your layout | plan" if plan else "your layout"
    return Panel(table, title=page.text(title), title_align="left", box=box.ROUNDED, expand=False)


def memory_columns(terms_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by column of the stage table; they sum to the sum of all terms."""
    columns = {
        name: sum(terms_bytes.get(term, 0) for term in terms) for name, terms in MEMORY_COLUMNS.items()
    }
    columns["other"] = sum(terms_bytes.values()) - sum(columns.values())
    return columns


def _stage_runs(stages: Sequence[StagePrediction]) -> list[list[StagePrediction]]:
    """Join neighbouring stages that print the same numbers."""

    def printed(stage: StagePrediction) -> tuple[object, ...]:
        terms = tuple(stage.terms_bytes.items())
        return stage.num_layers, stage.allocated_bytes, stage.phase, stage.in_flight, terms

    return [list(group) for _, group in groupby(stages, key=printed)]


def stage_table(page: Page, prediction: Prediction) -> Table:
    """Return memory per pipeline stage; of a long pipeline only the first, the worst and the last stage.

    ``alive`` is the number of micro-batch chunks whose activations are alive at the peak.
    """
    table = _plain_table()
    table.add_column(page.text("stage"), no_wrap=True)
    for name in ("layers", *MEMORY_COLUMNS, "other", "alloc.", "alive"):
        table.add_column(page.text(name), justify="right", no_wrap=True)
    runs = _stage_runs(prediction.stages)
    shown = _shown_runs(runs, prediction.worst_stage)
    previous = -1
    for index in shown:
        if index > previous + 1:
            table.add_row(*_skipped(page, runs[previous + 1 : index]))
        table.add_row(*_stage_row(page, runs[index], prediction.worst_stage))
        previous = index
    return table


def _shown_runs(runs: Sequence[Sequence[StagePrediction]], worst_stage: int) -> list[int]:
    if len(runs) <= MAX_STAGE_ROWS:
        return list(range(len(runs)))
    worst = [i for i, run in enumerate(runs) if any(stage.stage == worst_stage for stage in run)]
    return sorted({0, *worst, len(runs) - 1})


def _stage_row(page: Page, run: Sequence[StagePrediction], worst_stage: int) -> list[Text]:
    first, last = run[0].stage, run[-1].stage
    worst = any(stage.stage == worst_stage for stage in run)
    style = "bold" if worst else ""
    name = str(first) if first == last else f"{first}-{last}"
    columns = [fmt.gib(num_bytes) for num_bytes in memory_columns(run[0].terms_bytes).values()]
    cells = [
        name + (page.mark if worst else ""),
        str(run[0].num_layers),
        *columns,
        fmt.gib(run[0].allocated_bytes),
        str(run[0].in_flight),
    ]
    return [page.text(cell, style) for cell in cells]


def _skipped(page: Page, runs: Sequence[Sequence[StagePrediction]]) -> list[Text]:
    """Return one row for stages that are left out: how many, and the range of their allocated memory."""
    stages = [stage for run in runs for stage in run]
    low = min(stage.allocated_bytes for stage in stages)
    high = max(stage.allocated_bytes for stage in stages)
    name, allocated = f"{page.dots} ({len(stages)})", f"{fmt.gib(low)}-{fmt.gib(high)}"
    return [page.text(cell, "dim") for cell in (name, *[""] * (len(MEMORY_COLUMNS) + 2), allocated, "")]


def time_table(page: Page, prediction: Prediction, other: Prediction | None) -> Table:
    """Return the step time by term, largest share visible as a bar, beside the user's when it has one.

    A remainder that no term explains is printed as such, so that the shares add up to the step.
    """
    table = _plain_table()
    table.add_column(page.text("term"), no_wrap=True)
    for name in ("ms", "share", *(("your ms",) if other else ())):
        table.add_column(page.text(name), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    split, other_split = time_terms(prediction), time_terms(other) if other else {}
    for term in dict.fromkeys((*split, *other_split)):
        seconds = split.get(term, 0.0)
        share = seconds / prediction.step_time_s
        cells = [term, fmt.milliseconds(seconds), fmt.percent(share)]
        if other:
            cells.append(fmt.milliseconds(other_split.get(term, 0.0)))
        table.add_row(*(page.text(cell) for cell in (*cells, page.bar(share))))
    total = ["step", fmt.milliseconds(prediction.step_time_s), fmt.percent(1.0)]
    if other:
        total.append(fmt.milliseconds(other.step_time_s))
    table.add_row(*(page.text(cell, "bold") for cell in (*total, "")))
    return table


def time_terms(prediction: Prediction) -> dict[str, float]:
    """Return label -> seconds for every term that takes time, in printing order, with the remainder."""
    split = prediction.time_split
    known = {label: split[term] for term, label in TIME_LABELS.items() if split.get(term)}
    unknown = {term: seconds for term, seconds in split.items() if term not in TIME_LABELS and seconds}
    terms = {**known, **unknown}
    remainder_s = prediction.step_time_s - sum(terms.values())
    if abs(remainder_s) > 0.005 * prediction.step_time_s:
        terms["not attributed"] = remainder_s
    return terms


def runner_up_table(page: Page, runner_ups: Sequence[Candidate], step_time_s: float) -> Table:
    """Return the next best layouts with their step time relative to the plan's."""
    table = _plain_table()
    table.add_column(page.text("layout"), overflow="fold")
    for name in ("time / plan", "alloc. GiB", "memory"):
        table.add_column(page.text(name), justify="right", no_wrap=True)
    for candidate in runner_ups:
        prediction = candidate.prediction
        table.add_row(
            page.text(candidate.layout.describe()),
            page.text(f"{prediction.step_time_s / step_time_s:.3f}"),
            page.text(fmt.gib(prediction.peak_allocated_bytes)),
            page.text(prediction.band if prediction.feasible else "DOES NOT FIT"),
        )
    return table


def rejection_table(page: Page, rejections: Mapping[str, int]) -> Table:
    """Return how many candidates each first true reason removed, most frequent first."""
    table = _plain_table()
    table.add_column(page.text("candidates"), justify="right", no_wrap=True)
    table.add_column(page.text("first true reason"), overflow="fold")
    ordered = sorted(rejections.items(), key=lambda item: (-item[1], item[0]))
    for reason, number in ordered[:MAX_REJECTION_ROWS]:
        table.add_row(page.text(fmt.count(number)), page.text(reason))
    rest = ordered[MAX_REJECTION_ROWS:]
    if rest:
        total = sum(number for _, number in rest)
        table.add_row(page.text(fmt.count(total)), page.text(f"{len(rest)} other reasons", "dim"))
    return table


def stage_phases(prediction: Prediction) -> str:
    """Return the phase of the peak by stage, neighbouring stages with the same phase joined."""
    by_phase = groupby(prediction.stages, key=lambda stage: stage.phase)
    runs = [(phase, list(group)) for phase, group in by_phase]
    if len(runs) == 1:
        return f"every stage peaks in {runs[0][0]}"
    spans = []
    for phase, group in runs:
        first, last = group[0].stage, group[-1].stage
        spans.append(f"{first if first == last else f'{first}-{last}'} in {phase}")
    return "peak of stage " + ", ".join(spans)
