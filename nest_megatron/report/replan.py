"""A plan after a change in words: the old layout before and after it, the new one, and which one stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from nest_megatron.launch.overrides import override_strings
from nest_megatron.report import page as fmt
from nest_megatron.report.page import Page
from nest_megatron.report.rankmap import render_rank_map
from nest_megatron.report.text import (
    certificate_sentence,
    render_not_checked,
    render_provenance,
    render_violations,
)
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.plan import Prediction

if TYPE_CHECKING:
    from rich.console import Console

    from nest_megatron.pipeline import Replan


def render_replan(replan: Replan, *, console: Console) -> None:
    """Print the verdict, old beside new, what the checkpoint binds, and what is not vouched for."""
    page, plan = Page(console), replan.plan
    page.verbatim(plan.headline, "bold")
    render_provenance(page, plan.provenance)
    page.section("Changes")
    page.bullets(replan.changes or ["none: the plan is priced again"])
    page.section("Old and new")
    page.show(_layouts(page, replan))
    if plan.ratio is not None and plan.ratio != (1.0, 1.0):
        low, high = plan.ratio
        page.line(f"Fastest layout found / old layout, under the same assumptions: {low:.3f} to {high:.3f}")
    render_violations(page, plan.user.violations, "The old layout cannot run")
    page.section("What the checkpoint binds")
    page.bullets(list(replan.bound.values()) or ["nothing: its format reshards"])
    page.section("Numbers of GPUs")
    page.bullets(_worlds(replan))
    for title, lines in (
        ("Changed keys", override_strings(plan.edits)),
        ("Environment", [f"{name}={value}" for name, value in plan.env.items()]),
    ):
        page.section(title)
        for line in lines or ("none",):
            page.verbatim(f"  {line}")
    render_rank_map(page, plan.rank_map)
    page.section("Search")
    page.bullets([certificate_sentence(plan.certificate), f"planned again in {fmt.duration(replan.seconds)}"])
    page.section("Assumptions")
    page.bullets(list(plan.assumptions) or ["none"])
    render_not_checked(page)


def _layouts(page: Page, replan: Replan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    for name in ("", "layout"):
        table.add_column(page.text(name), overflow="fold")
    for name in ("GPUs", "step", "tokens/s/GPU", "memory"):
        table.add_column(page.text(name), justify="right", no_wrap=True)
    plan = replan.plan
    rows: list[tuple[str, Layout, Prediction | None]] = [
        ("before", replan.old.layout, replan.old.prediction),
        ("old layout now", plan.user.layout, plan.user.prediction),
        ("from now on", plan.layout, plan.prediction),
    ]
    for name, layout, prediction in rows:
        cells = [name, layout.describe(), str(layout.world)]
        if prediction is None:
            cells += ["", "", "illegal"]
        else:
            cells += [
                fmt.duration(prediction.step_time_s),
                fmt.count(prediction.tokens_per_s_per_gpu),
                f"{prediction.band}, {fmt.gib(prediction.peak_device_bytes)} GiB",
            ]
        table.add_row(*(page.text(cell) for cell in cells))
    return table


def _worlds(replan: Replan) -> list[str]:
    """Return the worlds with a time, and how many had none, by reason."""
    timed = [
        f"{world.num_gpus}: {fmt.duration(world.step_time_s)}"
        for world in replan.worlds
        if world.step_time_s is not None
    ]
    reasons: dict[str, list[int]] = {}
    for world in replan.worlds:
        if world.step_time_s is None:
            reasons.setdefault(world.reason, []).append(world.num_gpus)
    passed = [
        f"{len(worlds)} from {max(worlds)} to {min(worlds)}: {reason}" for reason, worlds in reasons.items()
    ]
    return [*timed, *passed] or ["not searched"]
