"""The batch script of docs/slurm.md, submitted to a real Slurm: it trains planned or not at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nest_megatron.launch.processes import PER_PROCESS_VARIABLES
from nest_megatron.specs.plan import Plan
from tests import slurm

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
]

RANKS = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a running Slurm."""
    with slurm.running(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def script(tmp_path: Path, repository: Path) -> Path:
    """The script of the page beside the app, which composes an example configuration by default."""
    page = (repository / "docs" / "slurm.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
    app = (repository / "tests" / "integration" / "apps" / "task_app.py").read_text(encoding="utf-8")
    named = f'config_path="{repository}/scripts/conf", config_name="megatron_llama3_8b"'
    (tmp_path / "train.py").write_text(app.replace("config_path=None, config_name=None", named))
    (tmp_path / "bin").mkdir()
    # `python` of the script is the interpreter of these tests, whatever the machine calls by that name.
    (tmp_path / "bin" / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    path = tmp_path / "job.sh"
    path.write_text(text)
    return path


def submit(script: Path, cluster: dict[str, str], **environment: str) -> tuple[int, str]:
    """Submit the script, wait for its end, and return its exit code and its log."""
    folder = script.parent
    inherited = {key: value for key, value in os.environ.items() if key not in PER_PROCESS_VARIABLES}
    own = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "NEST_CACHE": str(folder / "cache"),
        "TASK_OUTPUT": str(folder / "received.%t.json"),
    }
    done = subprocess.run(
        ["sbatch", "--wait", "--export=ALL", f"--output={folder / 'log'}", str(script)],
        env=inherited | own | cluster | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "Submitted batch job" in done.stdout, done.stderr
    return done.returncode, (folder / "log").read_text()


def test_script_trains_planned(script: Path, cluster: dict[str, str]) -> None:
    """The plan is made once before srun, and every rank receives its edits and its environment."""
    code, log = submit(script, cluster)
    assert code == 0, log
    (made,) = (script.parent / "nest_plan").glob("*/plan.json")
    plan = Plan.load(made)
    for rank in range(RANKS):
        received = json.loads((script.parent / f"received.{rank}.json").read_text())
        assert received["environment"]["SLURM_PROCID"] == str(rank)
        assert plan.env.items() <= received["environment"].items()
        for key, value in plan.edits.items():
            found = OmegaConf.select(OmegaConf.create(received["config"]), key)
            assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value, key
    assert log.count("nest: planned by process") == 1


def test_script_stops_where_the_plugin_is_absent(script: Path, cluster: dict[str, str]) -> None:
    """Where Hydra does not see the plug-in, nothing is trained, neither planned nor unplanned."""
    hidden = script.parent / "hidden"
    hidden.mkdir()
    # Python imports this module at every start; the name is then unknown to Hydra's scan.
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['hydra_plugins'] = None\n")
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    code, log = submit(script, cluster, PYTHONPATH=path)
    assert code == 1
    assert "hydra plug-in: Hydra takes +nest=auto as an ordinary value" in log
    assert not list(script.parent.glob("received.*"))


def test_script_stops_without_a_plan(script: Path, cluster: dict[str, str]) -> None:
    """An illegal pin ends the job before srun, with the reason in the log."""
    text = script.read_text().replace("+nest=auto", "+nest=auto model.tensor_model_parallel_size=3")
    script.write_text(text)
    code, log = submit(script, cluster)
    assert code == 1
    assert "NEST-" in log
    assert not list(script.parent.glob("received.*"))
