"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that rewrites golden files instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run whose groups would be ignored: every worker would build what a group shares."""
    grouped = config.getoption("dist", "no") == "loadgroup"
    if grouped and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError(f"pytest-xdist does not group under pytest {pytest.__version__}")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public configurations and measurements that lies beside the checkout."""
    folder = REPOSITORY.parent / "shared"
    if not (folder / "data").is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return folder


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file of tests/golden; trailing blanks do not count."""

    def compare(name: str, text: str) -> None:
        path = REPOSITORY / "tests" / "golden" / name
        stripped = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        if request.config.getoption("--update-golden"):
            path.write_text(stripped, encoding="utf-8")
        assert path.is_file(), f"{path} is absent; --update-golden writes it"
        assert stripped == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of an empty calibration store of this test."""
    path = tmp_path / "calibration.json"
    monkeypatch.setenv("NEST_CALIBRATION", str(path))
    return path
