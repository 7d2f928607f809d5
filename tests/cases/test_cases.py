"""Cases that people reported: illegal ones are refused for the reported reason, and repaired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nest_megatron import rules
from nest_megatron.planner.change import changed, parse_value
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from tests.cases import computable, table
from tests.cases.builder import Case, build, records, vary
from tests.cases.verdicts import Expectation, expectations, memory_verdict, texts

#: Part of the visible memory by which a verdict must be clear before it is a test.
MARGIN = 0.10
#: Illegal cases that must be computable (issue "breadth of the spine").
LEAST_ILLEGAL = 10

_ALL = expectations()
_RULES = [pytest.param(e, id=e.name) for e in _ALL if e.rules is not None]
_BROKEN = [pytest.param(e, id=e.name) for e in _ALL if e.rules]
_CLEAR = [pytest.param(e, id=e.name) for e in _ALL if e.clear]


@pytest.fixture(scope="module")
def cases(shared: Path) -> dict[str, dict[str, Any]]:
    """The records of the shared data, by id."""
    return records(shared)


def built(cases: dict[str, dict[str, Any]], expected: Expectation) -> Case:
    """Return the case an expectation is about."""
    return build(vary(cases[expected.id], expected.changes))


def test_the_list_of_computable_records_is_current(shared: Path) -> None:
    """computable.yaml says of every record what the builder really does with it."""
    assert computable.LIST.read_text(encoding="utf-8") == computable.text(shared)
    assert len(yaml.safe_load(computable.LIST.read_text(encoding="utf-8"))) == len(records(shared))


@pytest.mark.parametrize("expected", [pytest.param(e, id=e.name) for e in _ALL])
def test_every_expectation_quotes_its_record(cases: dict[str, dict[str, Any]], expected: Expectation) -> None:
    """The words that prove an expectation stand in the record."""
    assert any(expected.says in text for text in texts(cases[expected.id]))


def test_every_computable_illegal_case_has_an_expectation(shared: Path) -> None:
    """No record whose outcome is illegal is left out, and at least ten of them are computable."""
    able = {
        id_
        for id_, record in records(shared).items()
        if record["outcome_kind"] == "illegal" and computable.outcome(record, build) == "yes"
    }
    assert able == {e.id for e in _ALL if e.rules is not None}
    assert len(able) >= LEAST_ILLEGAL


@pytest.mark.parametrize("expected", _RULES)
def test_the_reported_rule_is_named(cases: dict[str, dict[str, Any]], expected: Expectation) -> None:
    """A case is illegal for the reported reason, and legal where the report says that it is."""
    case = built(cases, expected)
    broken = {violation.rule for violation in rules.check(case.job, case.layout)}
    if expected.rules:
        assert set(expected.rules) <= broken
    else:
        assert broken == set()


def apply(job: TrainJob, layout: Layout, nearest: str) -> Layout:
    """Return ``layout`` after one printed choice, for example ``pp=4 overlap.p2p=false``."""
    pairs = (word.split("=", 1) for word in nearest.split() if not word.startswith("overlap."))
    values = {axis: parse_value(axis, yaml.safe_load(text), origin="nearest") for axis, text in pairs}
    return changed(job, layout, values)


@pytest.mark.parametrize("expected", _BROKEN)
def test_the_nearest_choice_of_a_case_is_legal(
    cases: dict[str, dict[str, Any]], expected: Expectation
) -> None:
    """The first choice that is printed for the reported rule gives a legal layout."""
    case = built(cases, expected)
    assert expected.rules is not None
    for violation in rules.check(case.job, case.layout):
        if violation.rule in expected.rules:
            assert violation.nearest, violation.render()
            assert rules.check(case.job, apply(case.job, case.layout, violation.nearest[0])) == ()


@pytest.mark.parametrize("expected", _CLEAR)
def test_clear_memory_outcomes_are_right(cases: dict[str, dict[str, Any]], expected: Expectation) -> None:
    """What surely ran out of memory does not fit, what ran fits, whatever the record leaves open."""
    least = memory_verdict(cases[expected.id], expected.changes).least
    if expected.fits:
        assert least.peak_device_bytes <= (1 - MARGIN) * least.visible_bytes
    else:
        assert least.peak_device_bytes >= (1 + MARGIN) * least.visible_bytes


def test_the_memory_table_has_a_row_for_every_expectation(shared: Path) -> None:
    """Each expectation about memory is computable, and its row says whether the case agrees."""
    rows = table.lines(shared)[1:]
    assert len(rows) == sum(e.fits is not None for e in _ALL)
    assert all(any(f"| {word} |" in row for word in ("right", "WRONG", "undecided")) for row in rows)
