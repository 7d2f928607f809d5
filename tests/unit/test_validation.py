"""Replay of published runs: accuracy on the shared records, honest gaps, and the tables themselves."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nest_megatron.cli import main
from nest_megatron.validation.command import SHIPPED, load_records
from nest_megatron.validation.joint import joint_choice, mean_pick_regret
from nest_megatron.validation.metrics import UNTIMED_FAMILIES, Errors, rows_of
from nest_megatron.validation.ranking import mean_regret, pair_order
from nest_megatron.validation.render import render
from nest_megatron.validation.replay import predict_record, replay
from nest_megatron.validation.scores import Scores, score
from nest_megatron.validation.subsets import load_subsets

Replayed = tuple[list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def records(shared: Path) -> list[dict[str, Any]]:
    """The measured records that lie beside the checkout."""
    return load_records(shared / "data" / "measured" / "perf.json")


@pytest.fixture(scope="session")
def replayed(records: list[dict[str, Any]]) -> Replayed:
    """Records and predictions of every family whose times are performance figures."""
    chosen = [r for r in records if r["family"] not in UNTIMED_FAMILIES]
    return chosen, replay(chosen)


@pytest.fixture(scope="session")
def scores(replayed: Replayed, shared: Path) -> Scores:
    """Every table of the replayed records, with the named subsets."""
    return score(*replayed, subsets=load_subsets(shared / "data" / "measured" / "subsets.json"))


def scoring_script(shared: Path) -> ModuleType:
    """The public scoring script, imported from its file."""
    spec = importlib.util.spec_from_file_location("score", shared / "tools" / "score.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_allocated_peaks_on_b200(replayed: Replayed, scores: Scores) -> None:
    """Megatron-LM's allocated peak on B200 is met: MAPE at most 0.7 %, no row worse than 2.5 %."""
    chosen, predictions = replayed
    simumax = [r for r in chosen if r["family"] == "simumax"]
    errors = scores.memory.families["simumax"]
    assert errors.count == len(simumax)
    assert errors.mape <= 0.7
    by_id = {p["id"]: p for p in predictions}
    worst = max(
        abs(by_id[r["id"]]["peak_allocated_bytes"] / (r["measured"]["peak_mem_gb"] * 2**30) - 1)
        for r in simumax
    )
    assert worst <= 0.025


def test_bridge_peaks(scores: Scores) -> None:
    """Runs of Megatron-Bridge that survived are met within 3 % on average."""
    assert scores.memory.families["bridge"].mape <= 3.0


def test_out_of_memory_outcomes(scores: Scores) -> None:
    """At least 96 % of the 417 published layouts are judged right, and no sweep's pick ran out of memory."""
    confusion = scores.memory.oom["layouts23"]
    assert confusion.oom_oom + confusion.oom_fits + confusion.ran_oom + confusion.ran_fits == 417
    assert confusion.accuracy >= 96.0
    assert not [pick.sweep for pick in scores.joint if pick.outcome == "oom"]


def assert_same(ours: Errors, theirs: dict[str, float]) -> None:
    """One row of an error table equals that of the public scoring script."""
    assert ours.count == theirs["n"]
    for name in ("mape", "median", "p90", "bias"):
        assert getattr(ours, name) == pytest.approx(theirs[name]), name


def test_error_tables_equal_the_scoring_script(replayed: Replayed, scores: Scores, shared: Path) -> None:
    """Time and memory errors, verdicts, missing rows and the scalar are those of the scoring script."""
    theirs = scoring_script(shared).score(replayed[0], {"records": replayed[1]})
    for ours, table in ((scores.time.families, "time"), (scores.memory.families, "memory")):
        assert set(ours) == set(theirs[table])
        for family, errors in ours.items():
            assert_same(errors, theirs[table][family])
    assert scores.time.all is not None
    assert_same(scores.time.all, theirs["time_all"])
    assert scores.time.after_scalar == pytest.approx(theirs["after_scalar_mape"])
    assert set(scores.memory.oom) == set(theirs["oom"])
    for family, confusion in scores.memory.oom.items():
        for name in ("oom_oom", "oom_fits", "ran_oom", "ran_fits", "accuracy"):
            assert getattr(confusion, name) == pytest.approx(theirs["oom"][family][name])
    missing = {f"{family}:time": count for family, count in scores.time.missing.items()}
    missing |= {f"{family}:memory": count for family, count in scores.memory.missing.items()}
    assert missing == theirs["missing"]


def test_choices_equal_the_scoring_script(replayed: Replayed, scores: Scores, shared: Path) -> None:
    """Order, regret, top three, joint choice, scale curves and bands are those of the scoring script."""
    theirs = scoring_script(shared).score(replayed[0], {"records": replayed[1]})
    sweeps = scores.ranking.sweeps
    assert {sweep.name for sweep in sweeps} == set(theirs["groups"])
    for sweep in sweeps:
        group = theirs["groups"][sweep.name]
        assert (sweep.count, sweep.pairs) == (group["n"], group["pairs"])
        assert sweep.regret == pytest.approx(group["regret"], abs=1e-9)
        assert sweep.order == (None if group["order"] is None else pytest.approx(group["order"]))
    ranking = theirs["ranking"]
    assert mean_regret(sweeps) == pytest.approx(ranking["mean_regret"])
    assert mean_regret(scores.ranking.large) == pytest.approx(ranking["mean_regret_4plus"])
    assert pair_order(sweeps) == pytest.approx(ranking["order"])
    assert max(s.top_three for s in scores.ranking.large) == pytest.approx(theirs["top3"]["worst"], abs=1e-9)
    assert len(scores.ranking.large) == theirs["top3"]["sweeps"]
    joint = theirs["joint"]
    assert len(scores.joint) == joint["sweeps"]
    for outcome in ("ran", "oom", "none"):
        assert sum(pick.outcome == outcome for pick in scores.joint) == joint[outcome]
    assert mean_pick_regret(scores.joint) == pytest.approx(joint["mean_regret"])
    assert len(scores.curves) == theirs["scale"]["curves"]
    assert statistics.median(abs(c.error) for c in scores.curves) == pytest.approx(theirs["scale"]["median"])
    assert scores.bands is not None
    assert scores.bands.count == theirs["bands"]["n"]
    assert scores.bands.coverage == pytest.approx(theirs["bands"]["coverage"])
    assert scores.bands.median_width == pytest.approx(theirs["bands"]["median_width"])


@pytest.mark.parametrize("name", ["moe", "dense_megatron"])
def test_a_class_is_the_scoring_script_on_its_subset(
    replayed: Replayed, scores: Scores, shared: Path, name: str
) -> None:
    """A class of a subsets file has the figures of the scoring script's --subset."""
    members = load_subsets(shared / "data" / "measured" / "subsets.json")[name]
    theirs = scoring_script(shared).score(
        [r for r in replayed[0] if r["id"] in members], {"records": replayed[1]}
    )
    ours = scores.classes[name]
    assert ours.time.all is not None and ours.bands is not None
    assert_same(ours.time.all, theirs["time_all"])
    assert ours.time.after_scalar == pytest.approx(theirs["after_scalar_mape"])
    assert ours.bands.coverage == pytest.approx(theirs["bands"]["coverage"])


def test_sweeps_that_no_layout_model_can_know_are_left_out_once_more(scores: Scores, shared: Path) -> None:
    """The regret without the unpredictable sweeps is over all others, and both are printed."""
    unpredictable = load_subsets(shared / "data" / "measured" / "subsets.json")["unpredictable_sweeps"]
    left = {sweep.name for sweep in scores.ranking.predictable}
    assert left == {sweep.name for sweep in scores.ranking.sweeps} - unpredictable
    assert len(left) < len(scores.ranking.sweeps)
    text = render(scores)
    assert f"{mean_regret(scores.ranking.predictable):5.2f} %" in text
    assert f"{mean_regret(scores.ranking.sweeps):5.2f} %" in text


def test_every_pick_says_why_the_best_was_not_picked(scores: Scores) -> None:
    """A pick is the measured best exactly where its reason says so; every sweep is in the printed table."""
    text = render(scores)
    for pick in scores.joint:
        assert pick.sweep in text
        assert pick.picked in text and pick.best in text and pick.reason in text
        if pick.reason == "the best is picked":
            assert (pick.picked, pick.regret) == (pick.best, 0.0)
        else:
            assert pick.picked != pick.best


def test_bands_cover_what_they_claim(scores: Scores) -> None:
    """The 80 % bands cover 70 to 90 % of the published steps at a median width of at most 25 %."""
    assert scores.bands is not None
    assert 70.0 <= scores.bands.coverage <= 90.0
    assert scores.bands.median_width <= 25.0


def sweep_row(
    name: str, predicted_s: float | None, measured_s: float | None, band: str, *, feasible: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of one small sweep and its prediction; no measured time means out of memory."""
    record = {"id": name, "family": "made", "group": "sweep", "group_kind": "layout-sweep", "micro_batch": 1}
    record["measured"] = {"oom": True} if measured_s is None else {"oom": False, "step_time_s": measured_s}
    return record, {"id": name, "step_time_s": predicted_s, "feasible": feasible, "band": band}


@pytest.mark.parametrize(
    ("rows", "outcome", "reason"),
    [
        ([("a", 1.0, 2.0, "FITS"), ("b", 3.0, None, "OOM")], "ran", "the best is picked"),
        ([("a", 1.1, 2.0, "FITS"), ("b", 1.0, 3.0, "FITS"), ("c", 9.0, None, "OOM")], "ran", "10.0 % slower"),
        ([("a", 1.0, 2.0, "TIGHT"), ("b", 5.0, 3.0, "FITS"), ("c", 9.0, None, "OOM")], "ran", "TIGHT"),
        ([("a", 1.0, 2.0, "TIGHT"), ("b", 0.5, None, "TIGHT")], "oom", "100.0 % slower"),
        ([("a", 1.0, 2.0, "FITS"), ("b", 1.0, 3.0, "FITS"), ("c", 9.0, None, "OOM")], "ran", "tied with 1"),
    ],
)
def test_reasons_of_a_joint_choice(rows: list[tuple[Any, ...]], outcome: str, reason: str) -> None:
    """FITS goes before TIGHT; the reason names the memory verdict, or how much slower the best was priced."""
    records, predictions = zip(*(sweep_row(*row) for row in rows), strict=True)
    (pick,) = joint_choice(rows_of(records, predictions))
    assert pick.outcome == outcome
    assert reason in pick.reason


def test_a_sweep_without_a_feasible_row_finds_nothing() -> None:
    """Where every row is predicted out of memory there is no pick, and the table says so."""
    rows = [sweep_row("a", 1.0, 2.0, "OOM", feasible=False), sweep_row("b", 1.0, None, "OOM", feasible=False)]
    (pick,) = joint_choice(rows)
    assert (pick.outcome, pick.picked_s, pick.regret) == ("none", None, None)
    assert "predicted OOM" in pick.reason


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


@pytest.mark.parametrize("text", ["[]", '{"a": "readme", "b": 3}', '{"a": [1]}', "nonsense", ""])
def test_hostile_subset_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """A file that is no object of named lists of texts is bad input with a code."""
    path = tmp_path / "subsets.json"
    path.write_text(text)
    assert main(["validate", "--family", "simumax", "--subsets", str(path)]) == 2
    assert "NEST-V04" in capsys.readouterr().err


def test_each_sweep_is_printed_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """`--sweeps` adds one line per layout sweep."""
    lines = []
    for option in ([], ["--sweeps"]):
        assert main(["validate", "--family", "simumax", *option]) == 0
        lines.append(capsys.readouterr().out.splitlines())
    added = [line for line in lines[1] if line not in lines[0]]
    assert added and all("regret=" in line or "GPUs" in line for line in added)
