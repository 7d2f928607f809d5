"""Hostile input of every kind: a message, a code, exit 2 or 1, no traceback, nothing half-written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import KINDS, Hostile, hostile_input, judge

CORPUS = Path(__file__).resolve().parent.parent / "corpus"
FILES = sorted(path for path in CORPUS.glob("*/*") if path.is_file())
#: Kinds whose corpus file holds one argument per line.
STRINGS = ("settings", "override", "option")


def read(path: Path) -> Hostile:
    """An entry of the corpus; its folder is its kind."""
    kind, content = path.parent.name, path.read_bytes()
    texts = tuple(content.decode().splitlines()) if kind in STRINGS else ()
    return Hostile(kind, path.name, content, texts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_corpus(path: Path) -> None:
    """Every committed entry is refused, never planned, and never a fault."""
    verdict = judge(read(path))
    assert not verdict.problem
    assert verdict.outcome in ("exit 2", "exit 1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_mutated_input(kind: str, seed: int) -> None:
    """A seeded slice of `scripts/hostile_inputs.py`: whatever was mutated, the answer is an answer."""
    hostile = hostile_input(seed, kind)
    verdict = judge(hostile)
    assert not verdict.problem, f"{hostile.mutation} {hostile.texts}: {verdict.problem}"


def test_same_seed_same_input() -> None:
    """A seed that failed can be run again."""
    assert [hostile_input(seed) for seed in range(12)] == [hostile_input(seed) for seed in range(12)]


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: a defect behind any input is reported as a fault."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("nest_megatron.pipeline.plan_config", broken)
    valid = read(Path(__file__).resolve().parents[2] / "scripts/conf/megatron_llama3_8b.yaml")
    verdict = judge(Hostile("config", "none", valid.content))
    assert verdict.outcome == "fault"
    assert "ZeroDivisionError" in verdict.problem
