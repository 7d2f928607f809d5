"""Replay of published runs: accuracy on the shared records, honest gaps, and the tables themselves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nest_megatron.cli import main
from nest_megatron.validation.command import SHIPPED, load_records
from nest_megatron.validation.metrics import score
from nest_megatron.validation.replay import predict_record, replay


@pytest.fixture(scope="session")
def records(shared: Path) -> list[dict[str, Any]]:
    """The measured records that lie beside the checkout."""
    return load_records(shared / "data" / "measured" / "perf.json")


@pytest.fixture(scope="session")
def replayed(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records and predictions of the families that have memory or out-of-memory ground truth."""
    chosen = [r for r in records if r["family"] in ("simumax", "layouts23", "bridge")]
    return chosen, replay(chosen)


def scoring_script(shared: Path) -> ModuleType:
    """The public scoring script, imported from its file."""
    spec = importlib.util.spec_from_file_location("score", shared / "tools" / "score.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_allocated_peaks_on_b200(replayed) -> None:
    """Megatron-LM's allocated peak on B200 is met: MAPE at most 0.7 %, no row worse than 2.5 %."""
    chosen, predictions = replayed
    simumax = [r for r in chosen if r["family"] == "simumax"]
    errors = score(simumax, predictions).memory["simumax"]
    assert errors.count == len(simumax)
    assert errors.mape <= 0.7
    by_id = {p["id"]: p for p in predictions}
    worst = max(
        abs(by_id[r["id"]]["peak_allocated_bytes"] / (r["measured"]["peak_mem_gb"] * 2**30) - 1)
        for r in simumax
    )
    assert worst <= 0.025


def test_bridge_peaks(replayed) -> None:
    """Runs of Megatron-Bridge that survived are met within 3 % on average."""
    assert score(*replayed).memory["bridge"].mape <= 3.0


def test_out_of_memory_outcomes(replayed) -> None:
    """At least 96 % of the 417 published layouts are judged right, and no sweep's pick ran out of memory."""
    scores = score(*replayed)
    confusion = scores.oom["layouts23"]
    assert confusion.oom_oom + confusion.oom_fits + confusion.ran_oom + confusion.ran_fits == 417
    assert confusion.accuracy >= 96.0
    assert scores.joint["oom"] == 0


def test_tables_equal_the_scoring_script(replayed, shared: Path) -> None:
    """Our tables are those of the public scoring script."""
    chosen, predictions = replayed
    ours, theirs = score(chosen, predictions), scoring_script(shared).score(chosen, {"records": predictions})
    for family, errors in ours.memory.items():
        assert errors.mape == pytest.approx(theirs["memory"][family]["mape"])
        assert errors.count == theirs["memory"][family]["n"]
    for family, errors in ours.time.items():
        assert errors.median == pytest.approx(theirs["time"][family]["median"])
    assert ours.ranking["mean_regret"] == pytest.approx(theirs["ranking"]["mean_regret"])
    assert ours.ranking["order"] == pytest.approx(theirs["ranking"]["order"])
    assert ours.joint["mean_regret"] == pytest.approx(theirs["joint"]["mean_regret"])


def test_a_missing_input_is_unknown_with_its_name(records) -> None:
    """A record without a sequence length is `unknown` and says so; nothing is guessed."""
    record = next(r for r in records if r["family"] == "simumax") | {"seq_len": None}
    assert predict_record(record) == {
        "id": record["id"],
        "status": "unknown",
        "reason": "seq_len is not printed",
    }


def test_an_unprinted_recompute_is_a_bracket(records) -> None:
    """A record that does not print its recomputation is marked as a bracket."""
    record = next(r for r in records if r["family"] == "simumax" and r["recompute"]["mode"] is None)
    assert predict_record(record)["status"] == "bracket"


def test_the_shipped_records_replay_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`nest-megatron validate` runs on the records in the package and writes every prediction."""
    out = tmp_path / "predictions.json"
    assert main(["validate", "--family", "simumax", "--json", str(out)]) == 0
    assert "peak memory" in capsys.readouterr().out
    written = json.loads(out.read_text())["records"]
    assert {entry["id"] for entry in written} == {
        r["id"] for r in load_records(SHIPPED) if r["family"] == "simumax"
    }


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"id": 1}]', "nonsense", ""])
def test_hostile_record_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """A file that is no list of records is bad input with a code."""
    path = tmp_path / "records.json"
    path.write_text(text)
    assert main(["validate", "--records", str(path)]) == 2
    assert "NEST-V01" in capsys.readouterr().err
