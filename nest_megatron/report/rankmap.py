"""A rank map in words: which node holds which ranks, what that is worth, which groups leave which level."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from nest_megatron.report import page as fmt
from nest_megatron.report.page import Page
from nest_megatron.specs.plan import AxisCrossings, OrderPrice, RankMap

#: Longest list of nodes that is printed in full.
MAX_NODES = 8

_ORDER_WORDS = {
    "slurm": "Slurm, names in order",
    "torchrun": "torchrun c10d, names as strings",
    "map": "this map",
}


def render_rank_map(page: Page, rank_map: RankMap) -> None:
    """Print nodes, prices of all orders, and crossings; the whole list of nodes is in the JSON."""
    page.section("Rank map")
    if rank_map.nodes:
        names = list(rank_map.nodes)
        shown = names if len(names) <= MAX_NODES else [*names[:4], page.dots, *names[-2:]]
        page.line(f"  {', '.join(shown)} ({len(names)} nodes, {rank_map.gpus_per_node} ranks each)")
        page.line(f"  {gain_sentence(rank_map)}")
        page.show(_prices(page, rank_map.prices))
    else:
        page.line("  the scheduler's order: the cluster has no node names (--nodelist, or nodes in its file)")
    if rank_map.crossings:
        page.show(_crossings(page, rank_map.crossings, both=rank_map.gain > 0))


def gain_sentence(rank_map: RankMap) -> str:
    """Return what the host files change, and how far from the best map this one can be."""
    if rank_map.gain > 0:
        text = (
            f"with hostfile.ranks or hostfile.nodes {fmt.duration(rank_map.step_time_s)} per step instead of "
            f"{fmt.duration(rank_map.default_step_time_s)}: {fmt.percent(rank_map.gain)} less"
        )
    else:
        text = f"the scheduler's order: {fmt.duration(rank_map.default_step_time_s)} per step"
    if rank_map.optimal:
        return f"{text}; no other order of whole nodes is faster"
    if rank_map.bound_s is None:
        return text
    most = fmt.percent(1 - rank_map.bound_s / rank_map.step_time_s)
    return f"{text}; any other assignment, of single GPUs too, saves at most {most} more"


def _prices(page: Page, prices: Sequence[OrderPrice]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    for name in ("ranks in order", "nodes in order of"):
        table.add_column(page.text(name), overflow="fold")
    table.add_column(page.text("step"), justify="right", no_wrap=True)
    for price in prices:
        cells = (price.order, _ORDER_WORDS[price.nodes], fmt.duration(price.step_time_s))
        table.add_row(*(page.text(cell) for cell in cells))
    return table


def _crossings(page: Page, crossings: Sequence[AxisCrossings], *, both: bool) -> Table:
    """Return groups that leave a unit, by axis and level; ``before -> after`` where a map changes it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    table.add_column(page.text("groups that leave a unit"), no_wrap=True)
    table.add_column(page.text("groups x size"), justify="right", no_wrap=True)
    levels = list(crossings[0].mapped)
    for level in levels:
        table.add_column(page.text(level), justify="right", no_wrap=True)
    for axis in crossings:
        cells = [axis.axis, f"{axis.groups} x {axis.size}"]
        for level in levels:
            after, before = axis.mapped[level], axis.default[level]
            cells.append(f"{before} -> {after}" if both and before != after else str(after))
        table.add_row(*(page.text(cell) for cell in cells))
    return table
