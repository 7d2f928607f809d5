"""A robust plan in words: its time under every scenario beside the nominal plan's, and what is proven."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from nest_megatron.report import page as fmt
from nest_megatron.report.page import Page
from nest_megatron.specs.plan import Robust

MEASURE_WORDS = {"worst": "worst case", "cvar": "CVaR at 80 %"}


def render_robust(page: Page, robust: Robust) -> None:
    """Print the table of scenarios and what the search over them proves."""
    page.section("Scenarios")
    page.show(_prices(page, robust))
    page.bullets([measure_sentence(robust), proof_sentence(robust)])


def measure_sentence(robust: Robust) -> str:
    """Return the measure of the plan beside that of the layout chosen for the network as it is."""
    share = robust.value_s / robust.nominal_value_s
    return (
        f"{MEASURE_WORDS[robust.measure]} over {len(robust.scenarios)} scenarios: "
        f"{fmt.duration(robust.value_s)}, {fmt.percent(share)} of the nominal plan's "
        f"{fmt.duration(robust.nominal_value_s)} ({robust.nominal_layout.describe()})"
    )


def proof_sentence(robust: Robust) -> str:
    """Return what the lower bound covers."""
    proof = (
        "nothing in this space has a smaller one"
        if robust.gap <= 0
        else f"any better one is at most {fmt.percent(robust.gap)} smaller"
    )
    return (
        f"{fmt.count(robust.configurations)} configurations in the nominal plan's memory band, "
        f"{fmt.count(robust.visited)} solved under the scenarios, {fmt.count(robust.evaluated)} simulations; "
        f"proven bound of this measure {fmt.duration(robust.lower_bound_s)}: {proof} at nominal overlap, "
        "in the scheduler's order of nodes"
    )


def _prices(page: Page, robust: Robust) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    table.add_column(page.text("bandwidth"), overflow="fold")
    for name in ("plan", "nominal plan"):
        table.add_column(page.text(name), justify="right", no_wrap=True)
    for price in robust.scenarios:
        cells = (
            _factors(price.factors),
            fmt.duration(price.step_time_s),
            fmt.duration(price.nominal_step_time_s),
        )
        table.add_row(*(page.text(cell) for cell in cells))
    return table


def _factors(factors: Mapping[str, float]) -> str:
    return ", ".join(f"{level} x {factor:g}" for level, factor in factors.items()) or "as it is"
