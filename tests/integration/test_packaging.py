"""The wheel and the editable install: what they carry, and that a real Hydra finds the plug-in in each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.environments import missing, optional_python

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.xdist_group("packaging")]

#: Prints what Hydra knows about our config group, and which heavy frameworks that loaded.
PROBE = """
import json, sys
from hydra import compose, initialize
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path

loader = ConfigLoaderImpl(config_search_path=create_config_search_path(None))
options = loader.get_group_options("nest")
with initialize(version_base=None, config_path=None):
    config = compose(overrides=["+nest=auto"], return_hydra_config=True)
import hydra, nest_megatron
print(json.dumps({
    "hydra": hydra.__version__,
    "options": sorted(options),
    "target": config.hydra.callbacks.nest._target_,
    "task_keys": sorted(key for key in config if key != "hydra"),
    "package": nest_megatron.__file__,
    "heavy": sorted({"torch", "megatron", "nemo"} & {name.split(".")[0] for name in sys.modules}),
}))
"""


@dataclass(frozen=True, slots=True)
class Distributions:
    """The built archives and the sources they were built from."""

    source: Path
    wheel: Path
    sdist: Path

    def wheel_names(self) -> set[str]:
        """Return the names of the files in the wheel."""
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command in a clean environment and return what it prints; fail with its output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "NEST_MODE")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_sources(repository: Path, target: Path) -> Path:
    """Copy the tree without version control, environments and build products; symlinks stay symlinks."""
    ignored = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.c", "tests"
    )
    shutil.copytree(repository, target, symlinks=True, ignore=ignored)
    return target


def fresh_environment(folder: Path) -> Path:
    """Create a virtual environment that sees the dependencies of this one, but not our package in it.

    A path file adds the other site-packages at the end of the path. Path files inside that folder are then
    not read, so an editable install there stays invisible.

    Returns:
        The environment's Python.
    """
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    python = folder / "bin" / "python"
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", program, cwd=folder).strip())
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def pip_install(python: Path, *arguments: str | Path) -> None:
    """Install without dependencies and without downloads."""
    run(
        python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps",
        "--no-build-isolation", "--force-reinstall", "--ignore-installed", *arguments, cwd=python.parent,
    )  # fmt: skip


@pytest.fixture(scope="module")
def distributions(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """A source archive, and the wheel built from it, of a copy of this checkout."""
    work = tmp_path_factory.mktemp("build")
    source = copy_sources(repository, work / "source")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist", source, cwd=work)
    (wheel,) = (work / "dist").glob("*.whl")
    (sdist,) = (work / "dist").glob("*.tar.gz")
    return Distributions(source=source, wheel=wheel, sdist=sdist)


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(
    request: pytest.FixtureRequest, distributions: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Python of a fresh environment with the package in it, once per way to install."""
    python = fresh_environment(tmp_path_factory.mktemp("installed") / request.param)
    if request.param == "wheel":
        pip_install(python, distributions.wheel)
    else:
        pip_install(python, "--editable", distributions.source)
    return python


@pytest.fixture
def hydra138() -> Path:
    """Python of the optional environment with hydra-core 1.3.8."""
    if reason := missing("env-hydra-1.3.8"):
        pytest.skip(reason)
    return optional_python("env-hydra-1.3.8")


def probe(python: Path, cwd: Path) -> dict[str, object]:
    """Return what the Hydra of an environment knows about our plug-in."""
    return dict(json.loads(run(python, "-c", PROBE, cwd=cwd)))


def test_wheel_carries_every_configuration_file(repository: Path, distributions: Distributions) -> None:
    """Every YAML file of conf/ is in the wheel under nest_megatron/conf."""
    files = (repository / "conf").rglob("*.yaml")
    expected = {f"nest_megatron/{path.relative_to(repository)}" for path in files}
    assert "nest_megatron/conf/hydra/nest/auto.yaml" in expected
    assert expected <= distributions.wheel_names()


def test_wheel_carries_modules_and_typing_files(repository: Path, distributions: Distributions) -> None:
    """Modules, stubs, Cython declarations and py.typed of the three packages are in the wheel."""
    expected = {
        str(path.relative_to(repository))
        for root in ("nest_megatron", "cython_dp", "hydra_plugins")
        for path in (repository / root).rglob("*")
        if path.suffix in (".py", ".pyi", ".pxd") or path.name == "py.typed"
    }
    assert "nest_megatron/py.typed" in expected
    assert expected <= distributions.wheel_names()


def test_wheel_has_no_generated_source(repository: Path, distributions: Distributions) -> None:
    """Each .pyx is in the wheel as a shared object; no C file is, and no namespace gets an __init__.py."""
    names = distributions.wheel_names()
    for path in (repository / "cython_dp").glob("*.pyx"):
        assert [name for name in names if name.startswith(f"cython_dp/{path.stem}.") and name.endswith(".so")]
    assert not [name for name in names if name.endswith((".c", ".cpp"))]
    assert "hydra_plugins/__init__.py" not in names


def test_wheel_has_no_package_of_the_workshop(distributions: Distributions) -> None:
    """Only the three packages and the metadata are installed: no tests, scripts or docs."""
    tops = {name.split("/")[0] for name in distributions.wheel_names()}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages == {"nest_megatron", "cython_dp", "hydra_plugins"}


def test_source_archive_can_be_compiled_again(repository: Path, distributions: Distributions) -> None:
    """The source archive holds the Cython sources, not their C output."""
    with tarfile.open(distributions.sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    expected = {f"cython_dp/{path.name}" for path in (repository / "cython_dp").glob("*.p[yx][xd]")}
    assert expected | {"setup.py", "LICENSE"} <= names
    assert not [name for name in names if name.endswith((".c", ".so"))]


def test_hydra_finds_the_config_group(installed: Path, tmp_path: Path) -> None:
    """After either install, `+nest=auto` composes to our callback and adds no key to the task's config."""
    found = probe(installed, tmp_path)
    assert {"auto", "check"} <= set(found["options"])  # type: ignore[call-overload]
    assert str(found["target"]).startswith("nest_megatron.")
    assert found["task_keys"] == []
    assert found["heavy"] == []


def test_search_path_names_the_provider(installed: Path, tmp_path: Path) -> None:
    """`--info searchpath` of a plain Hydra app lists our folder, after Hydra's own."""
    app = tmp_path / "app.py"
    program = "import hydra\nhydra.main(version_base=None, config_path=None)(lambda config: None)()\n"
    app.write_text(program, encoding="utf-8")
    text = run(installed, app, "--info", "searchpath", cwd=tmp_path)
    assert 0 < text.index("pkg://hydra.conf") < text.index("pkg://nest_megatron.conf.hydra")


def test_command_answers_help(installed: Path, tmp_path: Path) -> None:
    """The installed command prints its help with the two main verbs."""
    text = run(installed.parent / "nest-megatron", "--help", cwd=tmp_path)
    assert "plan" in text
    assert "check" in text


def test_import_comes_from_the_install(installed: Path, distributions: Distributions, tmp_path: Path) -> None:
    """The package is loaded from the environment's own install, so the other tests here test that one."""
    package = Path(str(probe(installed, tmp_path)["package"])).resolve()
    home = distributions.source if installed.parent.parent.name == "editable" else installed.parent.parent
    assert package.is_relative_to(home.resolve())


def test_compiled_solver_is_importable(installed: Path, repository: Path, tmp_path: Path) -> None:
    """Every compiled module can be imported after either install."""
    modules = [f"cython_dp.{path.stem}" for path in sorted((repository / "cython_dp").glob("*.pyx"))]
    program = f"import importlib\nfor name in {modules!r}:\n    print(importlib.import_module(name).__file__)"
    files = run(installed, "-c", program, cwd=tmp_path).split()
    assert len(files) == len(modules)
    assert all(name.endswith(".so") for name in files)


def test_newest_tested_hydra_finds_the_config_group(hydra138: Path, tmp_path: Path) -> None:
    """Hydra 1.3.8 with our wheel, and no torch installed, finds the same group."""
    found = probe(hydra138, tmp_path)
    assert found["hydra"] == "1.3.8"
    assert {"auto", "check"} <= set(found["options"])  # type: ignore[call-overload]
    assert run(hydra138.parent / "nest-megatron", "--help", cwd=tmp_path)
