"""The answer to 'why not this layout' in words: verdict first, then the terms side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from nest_megatron.planner.explain import Explanation
from nest_megatron.report import page as fmt
from nest_megatron.report import tables
from nest_megatron.report.page import Page
from nest_megatron.report.repair import render_repair
from nest_megatron.report.text import render_not_checked, render_provenance, render_violations
from nest_megatron.specs.plan import Prediction, StagePrediction

_BASE = {"plan": "the plan's layout", "user": "your layout"}


def render_explanation(
    explanation: Explanation, *, console: Console, assumptions: Sequence[str] = ()
) -> None:
    """Print the answer, the two layouts, and whatever supports the answer.

    Args:
        assumptions: sentences from before the pipeline, for example about the file.
    """
    page = Page(console)
    page.verbatim(verdict(explanation), "bold")
    render_provenance(page, explanation.provenance)
    page.line()
    page.line(f"asked:    {explanation.layout.describe()}")
    page.line(f"compared: {explanation.reference.describe()} ({_BASE[explanation.base]})")
    if explanation.follows:
        page.line(f"follows:  {' '.join(explanation.follows)}")
    render_violations(page, explanation.violations, "The layout is illegal")
    if explanation.reasons:
        page.section("Reasons")
        page.bullets(explanation.reasons)
    prediction, reference = explanation.prediction, explanation.reference_prediction
    if prediction is not None:
        page.section("Memory of the worst stage, GiB")
        page.show(_memory_table(page, prediction, reference))
        page.section("Time per step, ms")
        page.show(_time_table(page, prediction, reference))
    if explanation.repair is not None:
        render_repair(page, explanation.repair, "To make it fit, change")
    page.section("Assumptions")
    page.bullets(list(dict.fromkeys((*assumptions, *explanation.assumptions))) or ["none"])
    render_not_checked(page)


def verdict(explanation: Explanation) -> str:
    """Return the first line: what was asked, and the answer with its number."""
    asked, base = " ".join(explanation.asked), _BASE[explanation.base]
    if explanation.answer == "same":
        return f"SAME: {base} already has {asked}"
    if explanation.answer == "illegal":
        return f"ILLEGAL: with {asked}, {explanation.violations[0]['message']}"
    prediction = explanation.prediction
    assert prediction is not None
    if explanation.answer == "does not fit":
        return f"DOES NOT FIT: with {asked}, {_missing(prediction)}"
    if explanation.answer == "not comparable":
        step = fmt.duration(prediction.step_time_s)
        return f"LEGAL AND FITS: with {asked} a step takes {step}; {base} itself is illegal"
    return f"{explanation.answer.upper()}: with {asked} a step takes {_ratio(explanation, base)}"


def _missing(prediction: Prediction) -> str:
    worst = _worst(prediction)
    term, size = max(worst.terms_bytes.items(), key=lambda item: item[1])
    return (
        f"stage {worst.stage} needs {fmt.gib(prediction.peak_device_bytes)} of "
        f"{fmt.gib(prediction.visible_bytes)} GiB on the device in {prediction.worst_phase}; "
        f"the largest term is {term}, {fmt.gib(size)} GiB"
    )


def _ratio(explanation: Explanation, base: str) -> str:
    """Return the ratio with its range and, of a slower layout, the term that grows most."""
    prediction, reference, ratio = (
        explanation.prediction,
        explanation.reference_prediction,
        explanation.ratio,
    )
    assert prediction is not None and reference is not None and ratio is not None
    low, high = (f"{share:.3f}" for share in ratio)
    text = f"{prediction.step_time_s / reference.step_time_s:.3f} of the time of {base}"
    if low != high:
        text += f" ({low} to {high})"
    if explanation.answer == "slower" and explanation.growth_s:
        term, seconds = next(iter(explanation.growth_s.items()))
        label = tables.TIME_LABELS.get(term, term)
        return f"{text}; {label} grows most, by {fmt.duration(seconds)}"
    return text


def _worst(prediction: Prediction) -> StagePrediction:
    return next(stage for stage in prediction.stages if stage.stage == prediction.worst_stage)


def _table(page: Page, names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(page.text("term"), no_wrap=True)
    for name in names:
        table.add_column(page.text(name), justify="right", no_wrap=True)
    return table


def _memory_table(page: Page, prediction: Prediction, reference: Prediction | None) -> Table:
    table = _table(page, ("asked", *(("compared",) if reference else ())))
    new, old = _worst(prediction).terms_bytes, _worst(reference).terms_bytes if reference else {}
    rows = [(term, new.get(term, 0), old.get(term, 0)) for term in dict.fromkeys((*new, *old))]
    rows.append(
        (
            "allocated",
            prediction.peak_allocated_bytes,
            reference.peak_allocated_bytes if reference else 0,
        )
    )
    rows.append(
        ("on the device", prediction.peak_device_bytes, reference.peak_device_bytes if reference else 0)
    )
    for name, mine, theirs in rows:
        cells = (name, fmt.gib(mine), *((fmt.gib(theirs),) if reference else ()))
        table.add_row(*(page.text(cell) for cell in cells))
    return table


def _time_table(page: Page, prediction: Prediction, reference: Prediction | None) -> Table:
    names = ("asked", "compared", "more") if reference else ("asked",)
    table = _table(page, names)
    new, old = tables.time_terms(prediction), tables.time_terms(reference) if reference else {}
    rows = {term: (new.get(term, 0.0), old.get(term, 0.0)) for term in dict.fromkeys((*new, *old))}
    rows["step"] = (prediction.step_time_s, reference.step_time_s if reference else 0.0)
    for name, (mine, theirs) in rows.items():
        cells = [name, fmt.milliseconds(mine)]
        if reference:
            cells += [fmt.milliseconds(theirs), fmt.milliseconds(mine - theirs)]
        table.add_row(*(page.text(cell) for cell in cells))
    return table
