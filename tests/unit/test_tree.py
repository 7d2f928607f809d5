"""The shape of the source tree: module sizes, which room may import which, and what stays unloaded."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_LINES = 500
SOURCE_ROOTS = ("nest_megatron", "cython_dp", "hydra_plugins", "scripts", "tests")
SOURCE_SUFFIXES = (".py", ".pyi", ".pyx", ".pxd")

ROOMS = (
    "dialects",
    "cluster",
    "rules",
    "graph",
    "cost",
    "planner",
    "baselines",
    "calibration",
    "launch",
    "report",
)
DOWNSTREAM = ("dialects", "launch", "report")

#: Room -> rooms it must not import, at module level or inside a function (DESIGN section 1).
FORBIDDEN_IMPORTS = {
    "specs": ROOMS,
    "rules": DOWNSTREAM,
    "cost": DOWNSTREAM,
    "planner": DOWNSTREAM,
    "report": ("cost",),
    "launch": ("cost",),
}

HEAVY_MODULES = ("torch", "megatron", "nemo", "transformer_engine")


def source_files(root: Path, *suffixes: str) -> list[Path]:
    """Return the source files below ``root``, without build products and without following symlinks."""
    return sorted(
        path for path in root.rglob("*") if path.suffix in suffixes and "__pycache__" not in path.parts
    )


def imported_modules(path: Path, package: str) -> Iterator[str]:
    """Yield the absolute name of every module that a Python file imports anywhere.

    ``from a import b`` yields both ``a`` and ``a.b``, since ``b`` may be a module.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def cython_imports(path: Path) -> Iterator[str]:
    """Yield the top-level package of every import and cimport of a Cython file."""
    statement = re.compile(r"^\s*(?:from\s+([\w.]+)\s+c?import\b|c?import\s+([\w.]+))")
    for line in path.read_text(encoding="utf-8").splitlines():
        found = statement.match(line)
        if found:
            yield found.group(1) or found.group(2)


def is_inside(module: str, package: str) -> bool:
    """Tell whether ``module`` is ``package`` or lies below it."""
    return module == package or module.startswith(package + ".")


def package_of(path: Path, root: Path) -> str:
    """Return the dotted package that holds a source file."""
    return ".".join(path.parent.relative_to(root).parts)


def test_no_module_is_longer_than_500_lines(repository: Path) -> None:
    """A source file has at most 500 lines."""
    files = [path for root in SOURCE_ROOTS for path in source_files(repository / root, *SOURCE_SUFFIXES)]
    num_lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert repository / "nest_megatron" / "errors.py" in num_lines
    too_long = {str(path.relative_to(repository)): n for path, n in num_lines.items() if n > MAX_LINES}
    assert not too_long


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_every_path_a_page_names_exists(repository: Path, page: str) -> None:
    """A page that says where things are names only files and folders of this tree."""
    text = (repository / page).read_text(encoding="utf-8")
    tops = "|".join((*SOURCE_ROOTS, "conf", "docs", "docker"))
    named = {found.group(1) for found in re.finditer(rf"(?:`|\]\()((?:{tops})/[\w./-]*)", text)}
    assert named, f"{page} names no path"
    assert not sorted(path for path in named if not (repository / path).exists())


@pytest.mark.parametrize("room", FORBIDDEN_IMPORTS)
def test_a_room_imports_only_upstream_rooms(repository: Path, room: str) -> None:
    """Data flows one way: a room never imports the rooms that DESIGN section 1 puts out of its reach."""
    files = source_files(repository / "nest_megatron" / room, ".py")
    assert files, f"{room} has no modules"
    broken = [
        f"{path.relative_to(repository)} imports {module}"
        for path in files
        for module in imported_modules(path, package_of(path, repository))
        for forbidden in FORBIDDEN_IMPORTS[room]
        if is_inside(module, f"nest_megatron.{forbidden}")
    ]
    assert not broken


def test_the_import_walk_sees_relative_and_nested_imports(tmp_path: Path) -> None:
    """The walk behind the layering tests resolves relative imports and finds those inside functions."""
    module = tmp_path / "probe.py"
    program = "from ..cost import tables\nfrom . import b\ndef f():\n    import a.c\n"
    module.write_text(program, encoding="utf-8")
    found = set(imported_modules(module, "nest_megatron.report"))
    assert found == {
        "nest_megatron.cost",
        "nest_megatron.cost.tables",
        "nest_megatron.report",
        "nest_megatron.report.b",
        "a.c",
    }


def test_the_solver_knows_only_numbers(repository: Path) -> None:
    """cython_dp imports itself, numpy and the standard library (libc in Cython), nothing else."""
    folder = repository / "cython_dp"
    imports = {
        (path.name, module.split(".")[0])
        for path in source_files(folder, ".py", ".pyi")
        for module in imported_modules(path, "cython_dp")
    } | {
        (path.name, module.split(".")[0])
        for path in source_files(folder, ".pyx", ".pxd")
        for module in cython_imports(path)
        if module.split(".")[0]  # a leading dot is the package itself
    }
    allowed = {"cython_dp", "numpy", "libc", "libcpp", "cpython", "cython"} | sys.stdlib_module_names
    assert imports, "cython_dp has no imports to check"
    assert not sorted((name, module) for name, module in imports if module not in allowed)


@pytest.mark.parametrize(
    "statement",
    [
        "import nest_megatron",
        "import nest_megatron.cli; sys.argv = ['nest-megatron', '--help']; run(nest_megatron.cli.main)",
        "import hydra_plugins.nest_megatron as p; "
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.')]",
    ],
    ids=["package", "command-help", "hydra-plugins"],
)
def test_start_up_loads_no_framework(repository: Path, statement: str) -> None:
    """Importing the package, the command's help and Hydra's plug-in scan load no torch, Megatron or NeMo."""
    program = f"""
import contextlib, importlib, io, pkgutil, sys

def run(main):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main()
    assert "usage" in text.getvalue().lower(), text.getvalue()

{statement}
print(sorted(set({HEAVY_MODULES!r}) & {{name.split('.')[0] for name in sys.modules}}))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
