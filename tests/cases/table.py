"""Memory verdicts of every case that says whether it fits: ``python -m tests.cases.table SHARED``."""

from __future__ import annotations

import sys
from pathlib import Path

from nest_megatron.units import gib
from tests.cases.builder import records
from tests.cases.models import NotComputable
from tests.cases.verdicts import Expectation, MemoryVerdict, expectations, memory_verdict

_WORDS = {True: "fits", False: "does not fit", None: "open"}
_AGREEMENT = {True: "right", False: "WRONG", None: "undecided"}


def line(expected: Expectation, reported: bool, verdict: MemoryVerdict) -> str:
    """Return one row: what was asked, GiB on the device, the verdict and whether the case agrees."""
    needs = f"{gib(verdict.least.peak_device_bytes):.1f}"
    if verdict.most is not verdict.least:
        needs += f" to {gib(verdict.most.peak_device_bytes):.1f}"
    cause = max(_worst(verdict).items(), key=lambda item: item[1])[0]
    cells = (
        expected.name,
        verdict.case.layout.describe(),
        f"{needs} of {gib(verdict.least.visible_bytes):.1f} GiB",
        cause,
        _WORDS[verdict.fits],
        _WORDS[reported],
        _AGREEMENT[verdict.agrees(reported)],
        "open: " + ", ".join(verdict.case.open) if verdict.case.open else "",
    )
    return " | ".join(cells)


def _worst(verdict: MemoryVerdict) -> dict[str, int]:
    prediction = verdict.least
    return next(s.terms_bytes for s in prediction.stages if s.stage == prediction.worst_stage)


def lines(shared: Path) -> list[str]:
    """Return the table, one line per expectation about memory."""
    by_id = records(shared)
    found = ["case | layout | needs | largest term | verdict | reported | agreement | left open"]
    for expected in expectations():
        if expected.fits is None:
            continue
        try:
            verdict = memory_verdict(by_id[expected.id], expected.changes)
            found.append(line(expected, expected.fits, verdict))
        except NotComputable as reason:
            found.append(f"{expected.name} | not computable: {reason}")
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines(Path(sys.argv[1]))) + "\n")
