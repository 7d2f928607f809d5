"""The doctor's table for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from nest_megatron.launch.doctor import Examination
from nest_megatron.report.page import Page

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def render_examination(examination: Examination, *, console: Console) -> None:
    """Print every finding, then the verdict for this interpreter."""
    page = Page(console)
    table = Table(box=box.ASCII if page.ascii_only else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in examination.findings:
        status = page.text(finding.status, _STYLES[finding.status])
        table.add_row(page.text(finding.subject), status, page.text(finding.detail))
    page.show(table)
    page.verbatim(verdict(examination))


def verdict(examination: Examination) -> str:
    """Return one line: whether a run can be planned here."""
    where = f"{examination.python} on {examination.host}"
    if examination.failed:
        return f"NOT READY: {', '.join(f.subject for f in examination.failed)} failed for {where}"
    return f"READY: +nest=auto plans with {where}"
