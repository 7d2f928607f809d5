"""The record that one process makes and all read, driven by real threads and real files."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nest_megatron.errors import BadInputError, NoPlanError, PlannerFault
from nest_megatron.launch import publish
from nest_megatron.launch.publish import Published, PublishedFailure, publish_once, write_atomically
from nest_megatron.specs.plan import PlanFailure


class Maker:
    """Counts its calls; each takes a moment, so that others arrive meanwhile."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls = 0
        self.error = error

    def __call__(self) -> int:
        """Return the number of the call, or raise."""
        self.calls += 1
        time.sleep(0.2)
        if self.error is not None:
            raise self.error
        return self.calls


def parse(text: str) -> int:
    """Read a record: a JSON object with one number."""
    value = json.loads(text).get("value")
    if not isinstance(value, int):
        raise BadInputError("TEST", "no record")
    return value


def once(path: Path, make: Maker, *, rank: int | None = None, timeout_s: float = 20.0) -> Published[int]:
    """Publish a number."""
    return publish_once(
        path,
        make,
        parse=parse,
        render=lambda value: json.dumps({"value": value}),
        rank=rank,
        timeout_s=timeout_s,
    )


def test_one_of_many_makes_it(tmp_path: Path) -> None:
    """Of 16 that start at once exactly one makes the record, and all return the same one."""
    make, start = Maker(), threading.Barrier(16)

    def enter(_: int) -> Published[int]:
        start.wait()
        return once(tmp_path / "record.json", make)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(enter, range(16)))
    assert make.calls == 1
    assert {result.value for result in results} == {1}
    assert [result.origin for result in results].count("made") == 1


def test_waiting_processes_share_the_failure(tmp_path: Path) -> None:
    """Those that waited get the maker's failure with its exit code; a later start tries again."""
    make, start = Maker(NoPlanError("NEST-T1", "nothing fits")), threading.Barrier(4)

    def enter(_: int) -> BaseException:
        start.wait()
        with pytest.raises((NoPlanError, PublishedFailure), match="nothing fits") as caught:
            once(tmp_path / "record.json", make)
        return caught.value

    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(enter, range(4)))
    assert make.calls == 1
    assert {error.exit_code for error in errors} == {1}  # type: ignore[attr-defined]
    make.error = None
    assert once(tmp_path / "record.json", make).origin == "made"


def test_unexpected_exception_is_published_with_its_traceback(tmp_path: Path) -> None:
    """A defect reaches the other ranks as a planner fault, and its traceback lies beside the record."""
    path = tmp_path / "record.json"
    with pytest.raises(PlannerFault, match="ZeroDivisionError"):
        once(path, Maker(ZeroDivisionError("boom")))
    assert "boom" in (tmp_path / "fault.txt").read_text()
    failure = publish.read_failure(path.read_text(), source="record")
    assert failure is not None
    assert "ZeroDivisionError" in failure.message


def test_rank_above_zero_waits_for_the_record(tmp_path: Path) -> None:
    """A rank above 0 never makes the record, and returns as soon as it appears."""
    path, make = tmp_path / "folder" / "record.json", Maker()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(once, path, make, rank=1)
        time.sleep(0.3)
        assert not waiting.done()
        write_atomically(path, '{"value": 7}')
        assert waiting.result(timeout=10) == Published(7, path, "awaited")
    assert make.calls == 0


def test_failure_of_an_earlier_start_is_not_believed_at_once(tmp_path: Path) -> None:
    """A waiting rank ignores a failure that lay there before, and takes the record rank 0 makes now."""
    path = tmp_path / "record.json"
    path.write_text(PlanFailure(code="NEST-T1", message="old", exit_code=1).to_json())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(once, path, Maker(), rank=1)
        time.sleep(0.3)
        assert once(path, Maker(), rank=0).origin == "made"
        assert waiting.result(timeout=10).value == 1


def test_failure_that_stays_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nobody replaces an old failure, the rank that waits ends with it and not with the time-out."""
    monkeypatch.setattr(publish, "_SETTLE_S", 0.2)
    path = tmp_path / "record.json"
    path.write_text(PlanFailure(code="NEST-T1", message="old", exit_code=2).to_json())
    with pytest.raises(PublishedFailure, match="old") as caught:
        once(path, Maker(), rank=1)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"value": "x"}', '{"failed": true}', "\ufeff{}", "null"])
def test_unusable_text_is_replaced(tmp_path: Path, text: str) -> None:
    """A cut-off, foreign or malformed record counts as absent."""
    path = tmp_path / "record.json"
    path.write_text(text)
    assert once(path, Maker()).origin == "made"
    assert parse(path.read_text()) == 1


def test_waits_have_an_end(tmp_path: Path) -> None:
    """Neither a missing rank 0 nor a lock that is never released blocks for ever."""
    path = tmp_path / "record.json"
    with pytest.raises(BadInputError, match="rank 3 waits"):
        once(path, Maker(), rank=3, timeout_s=0.2)
    with (
        publish.filelock.FileLock(path.with_suffix(".lock")),
        pytest.raises(BadInputError, match="holds the lock"),
    ):
        once(path, Maker(), timeout_s=0.2)


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A path below a file is an error that names the folder and NEST_CACHE."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="NEST_CACHE"):
        once(tmp_path / "file" / "below" / "record.json", Maker())
