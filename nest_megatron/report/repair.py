"""Repair advice in words: what makes a layout fit and its price, and what does not help."""

from __future__ import annotations

from rich.table import Table

from nest_megatron.planner.advise import Advice, NoHelp, Repair
from nest_megatron.report import page as fmt
from nest_megatron.report.page import Page

#: Terms named per change that does not help.
NAMED_TERMS = 2


def render_repair(page: Page, repair: Repair, title: str) -> None:
    """Print the advice as a table, then what does not help."""
    page.section(title)
    if repair.advice:
        page.show(_table(page, repair.advice))
        page.line("one change, or two together; time: step time relative to now, same global batch", "dim")
    else:
        page.line("  no change of one or two axes makes it fit, nor up to eight times the GPUs")
    if repair.no_help:
        page.section("What does not help")
        page.bullets([no_help_sentence(item, repair.limit_bytes) for item in repair.no_help])


def _table(page: Page, advice: tuple[Advice, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(page.text("change"), overflow="fold")
    for name in ("saves GiB", "device GiB", "time", "memory"):
        table.add_column(page.text(name), justify="right", no_wrap=True)
    for item in advice:
        change = " ".join(item.changes)
        if item.follows:
            change += f" (with {' '.join(item.follows)})"
        if item.releases:
            change += f", releases the pin of {' and '.join(item.releases)}"
        cells = (
            change,
            fmt.gib(item.saved_bytes),
            fmt.gib(item.peak_device_bytes),
            f"{item.time_ratio:.2f}x",
            item.fits,
        )
        table.add_row(*(page.text(cell) for cell in cells))
    return table


def no_help_sentence(item: NoHelp, limit_bytes: int) -> str:
    """Return what the change saves, what is still missing, and the largest terms it leaves alone."""
    text = (
        f"{item.change}: saves {fmt.gib(item.saved_bytes)} GiB, still needs "
        f"{fmt.gib(item.peak_device_bytes)} of {fmt.gib(limit_bytes)} GiB"
    )
    stays = [f"{fmt.gib(size)} GiB of {term}" for term, size in item.stays_bytes.items()][:NAMED_TERMS]
    return f"{text}; {' and '.join(stays)} per GPU do not shrink" if stays else text
