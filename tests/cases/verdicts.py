"""Verdicts on the cases: broken rules, and memory as a bracket over what a record leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nest_megatron.cluster.load import load_cluster
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.specs.plan import Prediction
from tests.cases.builder import Case, build_for_memory, vary

EXPECTATIONS = Path(__file__).parent / "expectations.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One thing a case proves; ``rules`` and ``fits`` are None where it says nothing about them."""

    id: str
    says: str
    changes: Mapping[str, Any]
    rules: tuple[str, ...] | None
    fits: bool | None
    clear: bool

    @property
    def name(self) -> str:
        """A short name of the variation."""
        changed = ",".join(f"{key}={value}" for key, value in self.changes.items())
        return f"{self.id}[{changed}]" if changed else self.id


def expectations() -> tuple[Expectation, ...]:
    """Return the committed table."""
    plain = yaml.safe_load(EXPECTATIONS.read_text(encoding="utf-8"))
    return tuple(
        Expectation(
            id=id_,
            says=row["says"],
            changes=row.get("with", {}),
            rules=tuple(row["rules"]) if "rules" in row else None,
            fits=row.get("fits"),
            clear=row.get("clear", False),
        )
        for id_, rows in plain.items()
        for row in rows
    )


def texts(value: Any) -> Iterator[str]:
    """Yield every text inside a record."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """The least and the most a case can need; ``fits`` is None when what is open decides."""

    case: Case
    least: Prediction
    most: Prediction

    @property
    def fits(self) -> bool | None:
        """Whether it fits; an unstated micro-batch counts as one sequence."""
        if not self.least.feasible:
            return False
        return True if self.most.feasible else None

    def agrees(self, reported: bool) -> bool | None:
        """Whether the reported outcome is ours; None when something unstated decides."""
        if self.fits is None or (self.fits and not reported and self.case.growing):
            return None
        return self.fits == reported


def memory_verdict(record: Mapping[str, Any], changes: Mapping[str, Any]) -> MemoryVerdict:
    """Return the memory of a varied record.

    Raises:
        NotComputable: see ``build_for_memory``.
    """
    case, name = build_for_memory(vary(record, changes))
    # A device has its memory whatever the size of the cluster; shipped ones come in whole nodes.
    cluster = load_cluster(name)
    predictions = Evaluator(case.job, cluster).predict(case.layouts)
    ordered = sorted(predictions, key=lambda p: p.peak_device_bytes)
    return MemoryVerdict(case=case, least=ordered[0], most=ordered[-1])
