"""Sweeps through real launchers: each job has its own plan, or nothing is launched."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nest_megatron.specs.plan import Plan
from tests.integration.hydra_app import LLAMA, App, Ended
from tests.integration.test_hydra_run import VERSION, optional_pythons

pytestmark = pytest.mark.integration

PLUGINS = {"joblib": "hydra_joblib_launcher", "submitit_local": "hydra_submitit_launcher"}
#: Each job's task writes what it received into the job's own folder.
OUTPUT = "+hydra.job.env_set.TASK_OUTPUT=${hydra.runtime.output_dir}/received.json"


def launcher(name: str) -> Any:
    """A launcher, skipped where its plug-in is not installed."""
    plugin = PLUGINS.get(name)
    absent = plugin is not None and importlib.util.find_spec(f"hydra_plugins.{plugin}") is None
    return pytest.param(name, marks=pytest.mark.skipif(absent, reason=f"{plugin} is not installed"))


@dataclass
class Job:
    """One job of a finished sweep."""

    folder: Path
    plan: Plan
    received: dict[str, Any]

    @property
    def config(self) -> DictConfig:
        """The configuration that the task received."""
        return OmegaConf.create(self.received["config"])

    @property
    def overrides(self) -> list[str]:
        """What Hydra recorded."""
        return [str(text) for text in OmegaConf.load(self.folder / ".hydra" / "overrides.yaml")]


@pytest.fixture
def app(tmp_path: Path, repository: Path) -> App:
    """A plain app in an empty folder."""
    return App(tmp_path, repository / "scripts" / "conf")


def sweep(app: App, *arguments: str, environment: dict[str, str] | None = None) -> Ended:
    """Run a sweep of the example configuration."""
    return app.run(*LLAMA, "--multirun", "hydra.sweep.dir=sweep", OUTPUT, *arguments, environment=environment)


def jobs_of(app: App, ended: Ended, count: int) -> list[Job]:
    """The jobs of a sweep that succeeded, in order."""
    assert ended.code == 0, ended.text
    folders = [app.folder / "sweep" / str(number) for number in range(count)]
    return [
        Job(
            folder,
            Plan.load(folder / "nest_plan" / "plan.json"),
            json.loads((folder / "received.json").read_text()),
        )
        for folder in folders
    ]


def assert_received(job: Job) -> None:
    """The task received the edits and the variables of the plan in its own record, and no key of ours."""
    for key, value in job.plan.edits.items():
        found = OmegaConf.select(job.config, key)
        assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value, key
        assert any(text.startswith(f"++{key}=") for text in job.overrides), key
    assert job.plan.env.items() <= job.received["environment"].items()
    assert Plan.load(Path(job.received["environment"]["NEST_PLAN"])) == job.plan
    assert "nest" not in job.received["config"]


@pytest.mark.parametrize("name", [launcher(name) for name in ("basic", "joblib", "submitit_local")])
def test_each_job_has_its_own_plan(app: App, name: str) -> None:
    """Two depths are planned separately; each task has its own edits, variables and record."""
    ended = sweep(app, f"hydra/launcher={name}", "+nest=auto", "+nest.pin.tp=4", "model.num_layers=8,24")
    jobs = jobs_of(app, ended, 2)
    for job, num_layers in zip(jobs, (8, 24), strict=True):
        assert job.config.model.num_layers == num_layers
        assert job.plan.layout.tp == job.config.model.tensor_model_parallel_size == 4
        assert sum(job.plan.layout.num_layers_per_chunk) == num_layers
        assert_received(job)
    assert jobs[0].received["environment"]["NEST_PLAN"] != jobs[1].received["environment"]["NEST_PLAN"]
    assert ended.err.count("nest: planned by process") == 2


def test_swept_axes_are_pins_and_settings_can_be_swept(app: App) -> None:
    """An axis that the sweep varies keeps its value and is no edit; settings of NEST vary like any key."""
    ended = sweep(
        app, "+nest=auto", "+nest.cluster=dgx-h100,dgx-a100-80", "model.tensor_model_parallel_size=2,4"
    )
    jobs = jobs_of(app, ended, 4)
    assert [job.plan.provenance["cluster"] for job in jobs] == ["dgx-h100"] * 2 + ["dgx-a100-80"] * 2
    assert [job.plan.layout.tp for job in jobs] == [2, 4, 2, 4]
    for job in jobs:
        assert "model.tensor_model_parallel_size" not in job.plan.edits
        assert_received(job)


def test_record_of_a_job(app: App) -> None:
    """Folders carry the user's overrides only, and the recorded ones compose to what the task received."""
    subdir = "hydra.sweep.subdir='job-${hydra.job.override_dirname}'"
    ended = sweep(app, "+nest=auto", "+nest.pin.tp=4", "model.num_layers=8", subdir)
    assert ended.code == 0, ended.text
    (folder,) = (path for path in (app.folder / "sweep").iterdir() if path.is_dir())
    assert folder.name == "job-+nest=auto,model.num_layers=8"
    recorded = [str(text) for text in OmegaConf.load(folder / ".hydra" / "overrides.yaml")]
    again = app.run(*LLAMA, *(text for text in recorded if not text.startswith("+nest")))
    assert again.received is not None, again.text
    assert again.received["config"] == json.loads((folder / "received.json").read_text())["config"]


def test_one_failing_job_stops_all(app: App) -> None:
    """A job without a plan ends the sweep before any job starts, and the message names it."""
    ended = sweep(app, "+nest=auto", "model.tensor_model_parallel_size=4,3")
    assert ended.code == 1, ended.text
    assert "job 1 (+nest=auto model.tensor_model_parallel_size=3): NEST-" in ended.err
    assert "1 of 2 jobs cannot run as asked; nothing was launched" in ended.err
    assert "Traceback" not in ended.text
    assert not list(app.folder.glob("sweep/*/"))


def test_unknown_setting_is_said_once(app: App) -> None:
    """A reason that all jobs share is printed once with all their names: exit 2."""
    ended = sweep(app, "+nest=auto", "+nest.clutser=dgx-h100", "model.num_layers=8,24")
    assert ended.code == 2, ended.text
    assert ended.err.count("did you mean 'cluster'?") == 1
    assert "2 of 2 jobs" in ended.err
    assert not list(app.folder.glob("sweep/*/"))


def test_check_prints_every_job(app: App) -> None:
    """+nest=check judges each job and launches them unchanged when all run."""
    ended = sweep(app, "+nest=check", "model.num_layers=8,24")
    assert ended.code == 0, ended.text
    assert ended.out.count("\nLEGAL, FITS") == 2
    plain = app.run(*LLAMA, "model.num_layers=24")
    received = json.loads((app.folder / "sweep" / "1" / "received.json").read_text())
    assert plain.received is not None
    assert received["config"] == plain.received["config"]


def test_check_stops_the_sweep(app: App) -> None:
    """One illegal job of a checked sweep: every verdict is printed, exit 1, nothing is launched."""
    ended = sweep(app, "+nest=check", "model.tensor_model_parallel_size=3,4")
    assert ended.code == 1, ended.text
    assert ended.out.count("\nLEGAL, FITS") == 1
    assert "job 0 (+nest=check model.tensor_model_parallel_size=3)" in ended.err
    assert not list(app.folder.glob("sweep/*/"))


def test_plans_are_written_ahead(app: App) -> None:
    """NEST_MODE=plan writes one plan per job and launches nothing; a single run can read one of them."""
    ended = sweep(app, "+nest=auto", "model.num_layers=8,24", environment={"NEST_MODE": "plan"})
    assert ended.code == 0, ended.text
    assert not list(app.folder.glob("sweep/*/"))
    path = app.folder / "nest_plan" / "1" / "plan.json"
    assert (path.parent / "env.sh").is_file()
    single = app.run(*LLAMA, "+nest=auto", "model.num_layers=24", environment={"NEST_PLAN": str(path)})
    assert single.code == 0, single.text
    refused = sweep(app, "+nest=auto", "model.num_layers=8,24", environment={"NEST_PLAN": str(path)})
    assert refused.code == 2
    assert "NEST-L11" in refused.err


@pytest.mark.parametrize("python", optional_pythons())
def test_other_hydra_releases_sweep_too(app: App, python: str, repository: Path) -> None:
    """The wrapping launcher works with another Hydra release."""
    app.python = python
    environment = {"PYTHONPATH": str(repository)}
    ended = sweep(app, "+nest=auto", VERSION, "model.num_layers=8,24", environment=environment)
    for job in jobs_of(app, ended, 2):
        assert_received(job)
