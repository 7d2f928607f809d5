"""Every table of ``nest-megatron validate`` in one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nest_megatron.validation.bands import Coverage, coverage
from nest_megatron.validation.curves import Curve, scale_curves
from nest_megatron.validation.joint import Pick, joint_choice
from nest_megatron.validation.metrics import Record, Row, rows_of
from nest_megatron.validation.peak_memory import MemoryTable, memory_table
from nest_megatron.validation.ranking import Ranking, ranking
from nest_megatron.validation.step_time import TimeTable, time_table
from nest_megatron.validation.subsets import UNPREDICTABLE, Subsets, classes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScores:
    """Time, memory and bands of one class of rows."""

    time: TimeTable
    memory: MemoryTable
    bands: Coverage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """All tables of one set of records; the parts say what each figure means."""

    time: TimeTable
    memory: MemoryTable
    ranking: Ranking
    joint: tuple[Pick, ...]
    curves: tuple[Curve, ...]
    bands: Coverage | None
    family_bands: dict[str, Coverage] = field(default_factory=dict)
    classes: dict[str, ClassScores] = field(default_factory=dict)


def score(
    records: Sequence[Record], predictions: Sequence[Record], *, subsets: Subsets | None = None
) -> Scores:
    """Return every table for ``records``; a record without a prediction counts as missing.

    Args:
        predictions: the entries of ``validation.replay``.
        subsets: named record ids and the unpredictable sweeps (``validation.subsets``).
    """
    rows = rows_of(records, predictions)
    named = subsets or {}
    return Scores(
        time=time_table(rows),
        memory=memory_table(rows),
        ranking=ranking(rows, unpredictable=named.get(UNPREDICTABLE, frozenset())),
        joint=joint_choice(rows),
        curves=scale_curves(rows),
        bands=coverage(rows),
        family_bands=_family_bands(rows),
        classes=_classes(rows, named),
    )


def _family_bands(rows: Sequence[Row]) -> dict[str, Coverage]:
    found = {}
    for family in sorted({str(record["family"]) for record, _ in rows}):
        covered = coverage([row for row in rows if row[0]["family"] == family])
        if covered is not None:
            found[family] = covered
    return found


def _classes(rows: Sequence[Row], subsets: Mapping[str, frozenset[str]]) -> dict[str, ClassScores]:
    found = {}
    for name, members in classes_of([record for record, _ in rows], subsets).items():
        inside = [row for row in rows if row[0]["id"] in members]
        found[name] = ClassScores(
            time=time_table(inside), memory=memory_table(inside), bands=coverage(inside)
        )
    return found
