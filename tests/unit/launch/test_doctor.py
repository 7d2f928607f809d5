"""The doctor: ready where everything works, and every promise it makes can be broken and is then found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from cython_dp import problem as compiled
from nest_megatron.launch import doctor
from nest_megatron.launch.doctor import Finding, examine

PROGRAM = (
    "import sys\n"
    "for name in {blocked!r}:\n    sys.modules[name] = None\n"
    "from nest_megatron.cli import main\n"
    "code = main(['doctor', *sys.argv[1:]])\n"
    "assert not {{'torch', 'megatron', 'nemo'}} & {{name for name in sys.modules if sys.modules[name]}}\n"
    "sys.exit(code)\n"
)


def run(
    folder: Path, *arguments: str, blocked: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, where the ``blocked`` modules cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=blocked), *arguments],
        env=os.environ | {"NEST_CACHE": str(folder / "cache")} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def finding(subject: str) -> Finding:
    """The finding of one check in this process."""
    (found,) = (one for one in examine().findings if one.subject == subject)
    return found


def test_ready_here(tmp_path: Path) -> None:
    """In an environment that works nothing fails, no framework is imported, and no file stays behind."""
    done = run(tmp_path, "--json", "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["exit_code"] == 0
    assert "failed" not in {one["status"] for one in record["findings"]}
    assert "READY: +nest=auto plans with" in done.stdout
    assert not list((tmp_path / "cache").iterdir())


def test_quiet_is_silent_where_all_is_well(tmp_path: Path) -> None:
    """A batch script's log gets nothing from ``doctor --quiet`` in an environment that works."""
    done = run(tmp_path, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_absent_plugin_is_found(tmp_path: Path) -> None:
    """Where Hydra sees no plug-in and would train unplanned, the doctor exits 1 and says how to repair it."""
    done = run(tmp_path, "--quiet", blocked=("hydra_plugins",))
    assert done.returncode == 1
    assert "hydra plug-in: Hydra takes +nest=auto as an ordinary value" in done.stderr
    assert "NOT READY: hydra plug-in failed" in done.stderr
    assert done.stdout == ""


def test_absent_extension_is_found(tmp_path: Path) -> None:
    """Without the compiled solver no plan can be made here: exit 1."""
    done = run(tmp_path, "--quiet", blocked=("cython_dp.search",))
    assert done.returncode == 1
    assert "NOT READY: compiled solver, small plan failed" in done.stderr


def test_wrong_extension_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled solver that computes something else than its twin is refused."""
    compute = compiled.bounds

    def off_by_one(problem: compiled.Problem) -> tuple[object, ...]:
        first, second, peaks, *rest = compute(problem)
        return first, second, peaks + 1, *rest

    monkeypatch.setattr(compiled, "bounds", off_by_one)
    assert finding("compiled solver").status == "failed"


def test_unwritable_cache_is_found(tmp_path: Path) -> None:
    """A cache that cannot be a folder fails and names NEST_CACHE."""
    (tmp_path / "file").write_text("")
    done = run(tmp_path, "--quiet", NEST_CACHE=str(tmp_path / "file" / "cache"))
    assert done.returncode == 1
    assert "set NEST_CACHE" in done.stderr
    assert "Traceback" not in done.stderr


def test_locks_that_do_not_lock_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a second process gets the lock that the first one holds, the doctor says so."""
    monkeypatch.setenv("NEST_CACHE", str(tmp_path))
    # This process locks by the existence of a file, which the other process does not look at.
    monkeypatch.setattr(doctor.filelock, "FileLock", filelock.SoftFileLock)
    assert finding("file locks").status == "failed"


@pytest.mark.parametrize(
    ("name", "version", "requires", "status"),
    [
        ("nest-megatron", "9.0", "hydra-core<9.9,>=9.0", "failed"),
        ("nest-megatron", "9.0", "no-such-distribution>=1.0", "failed"),
        ("megatron-core", "0.3.0", None, "warning"),
        ("hydra-core", "1.3.99", None, "warning"),
    ],
)
def test_versions_are_judged(
    tmp_path: Path, name: str, version: str, requires: str | None, status: str
) -> None:
    """A requirement that is not met forbids a run; a release that nobody tested or tabled is only said."""
    metadata = tmp_path / "packages" / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    needed = f"Requires-Dist: {requires}\n" if requires else ""
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
    path = os.pathsep.join([str(metadata.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = run(tmp_path, "--json", "-", PYTHONPATH=path)
    found = {one["subject"]: one["status"] for one in json.loads(done.stdout)["findings"]}
    subject = requires.replace("<", ">").split(">")[0] if requires else name
    assert found[subject] == status
    assert done.returncode == (1 if status == "failed" else 0)
