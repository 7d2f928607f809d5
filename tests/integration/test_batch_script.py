"""The batch script of docs/slurm.md, executed: it trains planned or not at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nest_megatron.launch.processes import PER_PROCESS_VARIABLES
from nest_megatron.specs.plan import Plan

pytestmark = pytest.mark.integration

#: In the place of srun, which needs a Slurm: drops srun's own options and runs one rank.
SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nSLURM_PROCID=0 exec "$@"\n'


@pytest.fixture
def script(tmp_path: Path, repository: Path) -> Path:
    """The script of the page beside the app, which composes an example configuration by default."""
    page = (repository / "docs" / "slurm.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
    app = (repository / "tests" / "integration" / "apps" / "task_app.py").read_text(encoding="utf-8")
    named = f'config_path="{repository}/scripts/conf", config_name="megatron_llama3_8b"'
    (tmp_path / "train.py").write_text(app.replace("config_path=None, config_name=None", named))
    (tmp_path / "bin").mkdir()
    for name, content in {"srun": SRUN, "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n'}.items():
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    path = tmp_path / "job.sh"
    path.write_text(text)
    return path


def run(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script as the batch step of a job."""
    folder = script.parent
    inherited = {key: value for key, value in os.environ.items() if key not in PER_PROCESS_VARIABLES}
    own = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "NEST_CACHE": str(folder / "cache"),
        "TASK_OUTPUT": str(folder / "received.json"),
        "SLURM_JOB_ID": "17",
        "SLURM_NNODES": "1",
    }
    return subprocess.run(
        ["bash", str(script)],
        env=inherited | own | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_script_trains_planned(script: Path) -> None:
    """The plan is made once before the launch, and the task receives its edits and its environment."""
    done = run(script)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = Plan.load(script.parent / "nest_plan" / "17" / "plan.json")
    received = json.loads((script.parent / "received.json").read_text())
    assert plan.env.items() <= received["environment"].items()
    for key, value in plan.edits.items():
        found = OmegaConf.select(OmegaConf.create(received["config"]), key)
        assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value, key
    assert done.stderr.count("nest: planned by process") == 1


def test_script_stops_where_the_plugin_is_absent(script: Path) -> None:
    """Where Hydra does not see the plug-in, nothing is trained, neither planned nor unplanned."""
    hidden = script.parent / "hidden"
    hidden.mkdir()
    # Python imports this module at every start; the name is then unknown to Hydra's scan.
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['hydra_plugins'] = None\n")
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    done = run(script, PYTHONPATH=path)
    assert done.returncode == 1
    assert "hydra plug-in: Hydra takes +nest=auto as an ordinary value" in done.stderr
    assert not (script.parent / "received.json").exists()


def test_script_stops_without_a_plan(script: Path) -> None:
    """An illegal pin ends the job before srun, with the reason in the log."""
    text = script.read_text().replace("+nest=auto", "+nest=auto model.tensor_model_parallel_size=3")
    script.write_text(text)
    done = run(script)
    assert done.returncode == 1
    assert "NEST-" in done.stderr
    assert not (script.parent / "received.json").exists()
