"""Which records can be computed: ``python -m tests.cases.computable SHARED`` prints computable.yaml."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cases.builder import build, build_for_memory, records
from tests.cases.models import NotComputable

LIST = Path(__file__).parent / "computable.yaml"
HEADER = "# Written by `python -m tests.cases.computable SHARED`: yes, or the fact that is missing.\n"


def outcome(record: Mapping[str, Any], builder: Callable[[Mapping[str, Any]], object]) -> str:
    """Return ``yes``, or why the record cannot be built."""
    try:
        builder(record)
    except NotComputable as reason:
        return str(reason)
    return "yes"


def table(shared: Path) -> dict[str, dict[str, str]]:
    """Return id -> what the rules and the memory model can say about it."""
    return {
        id_: {"rules": outcome(record, build), "memory": outcome(record, build_for_memory)}
        for id_, record in records(shared).items()
    }


def text(shared: Path) -> str:
    """Return the whole file."""
    return HEADER + yaml.safe_dump(table(shared), sort_keys=False, width=110)


if __name__ == "__main__":
    sys.stdout.write(text(Path(sys.argv[1])))
