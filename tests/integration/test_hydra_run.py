"""Real Hydra apps in real processes: what the task receives, what is recorded, how failures end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nest_megatron.specs.plan import Plan
from tests.environments import missing, optional_python
from tests.integration.hydra_app import LLAMA, App, assert_applied, plan_of

pytestmark = pytest.mark.integration

NEMO = {
    version: f"data/configs/{version}/examples/nlp/language_modeling/conf"
    for version in ("nemo-1.23", "nemo-2.4")
}
RECIPES = "data/configs/gpu-recipes/src/frameworks/a3mega/nemo-configs"
PARALLEL_SIZE = "exp_manager.checkpoint_callback_params.model_parallel_size"

#: An installed NeMo decides otherwise, and that of `make env-nemo` has no Megatron training on Hydra.
VERSION = "+nest.framework_version=2.4.0"


@pytest.fixture
def app(tmp_path: Path, repository: Path) -> App:
    """A plain app in an empty folder."""
    return App(tmp_path, repository / "scripts" / "conf")


def optional_pythons() -> list[Any]:
    """Interpreters with other Hydra versions, built outside the test run."""
    return [
        pytest.param(
            str(optional_python(target)),
            id=target,
            marks=pytest.mark.skipif(bool(missing(target)), reason=missing(target)),
        )
        for target in ("env-hydra-1.3.8", "env-nemo")
    ]


@pytest.mark.parametrize("version", NEMO)
def test_stock_nemo_config_is_planned(app: App, shared: Path, version: str) -> None:
    """NeMo's stock GPT configuration is rewritten or kept, with a ratio; struct mode stays on."""
    ended = app.run(
        "--config-path", str(shared / NEMO[version]), "--config-name", "megatron_gpt_config", "+nest=auto"
    )
    plan = plan_of(ended)
    assert plan.outcome in ("rewritten", "kept")
    assert plan.ratio is not None
    assert "step time under the same assumptions" in ended.out
    assert_applied(ended, plan)
    assert ended.received is not None
    assert ended.received["struct"] is True
    assert "nest" not in ended.received["config"]


@pytest.mark.parametrize(
    "name", ["gpt3-175b-256gpus-fp8", "llama3-1-70b-256gpus-bf16", "mixtral-8x7b-256gpus-bf16"]
)
def test_published_recipes_are_planned(app: App, shared: Path, name: str) -> None:
    """The three published 256-GPU recipes are planned for their real number of GPUs."""
    ended = app.run(
        "--config-path", str(shared / RECIPES), "--config-name", name, "+trainer.num_nodes=32", "+nest=auto"
    )
    plan = plan_of(ended)
    assert plan.layout.world == 256
    assert plan.layout.global_batch == ended.received["config"]["model"]["global_batch_size"]  # type: ignore[index]
    assert_applied(ended, plan)


def test_command_line_value_is_kept(app: App, shared: Path) -> None:
    """A size given on the command line is a pin: the plan and the task have exactly that value."""
    ended = app.run(
        *("--config-path", str(shared / NEMO["nemo-2.4"]), "--config-name", "megatron_gpt_config"),
        *("trainer.devices=8", "model.tensor_model_parallel_size=4", "+nest=auto"),
    )
    assert plan_of(ended).layout.tp == 4
    assert ended.received is not None
    assert ended.received["config"]["model"]["tensor_model_parallel_size"] == 4


def test_interpolations_follow_the_edits(app: App, shared: Path) -> None:
    """A value computed from planned keys is recomputed by the task: tensor times pipeline parallel size."""
    ended = app.run(
        *("--config-path", str(shared / RECIPES), "--config-name", "llama3-1-70b-256gpus-bf16"),
        *("+trainer.num_nodes=32", "+nest=auto", "+nest.pin.tp=8", "+nest.pin.pp=2"),
        environment={"TASK_RESOLVE": PARALLEL_SIZE},
    )
    plan = plan_of(ended)
    assert (plan.layout.tp, plan.layout.pp) == (8, 2)
    assert ended.received is not None
    assert ended.received["resolved"] == {PARALLEL_SIZE: 16}


def test_override_may_refer_to_what_only_the_task_knows(app: App) -> None:
    """An override that interpolates Hydra's output folder is planned around and reaches the task as typed."""
    ended = app.run(*LLAMA, "+nest=auto", "+nest.pin.tp=4", "+results=${hydra:runtime.output_dir}/x")
    assert_applied(ended, plan_of(ended))
    assert ended.received is not None
    assert ended.received["config"]["results"] == "${hydra:runtime.output_dir}/x"


def test_structured_root_is_planned(app: App) -> None:
    """An app with a dataclass as root configuration is planned like any other, settings in both spellings."""
    app.name = "schema_app.py"
    short = app.run("+nest=auto", "+nest.pin.tp=2")
    long = app.run("+nest=auto", "+hydra.callbacks.nest.pin.tp=2")
    plan = plan_of(short)
    assert plan.layout.tp == 2
    assert_applied(short, plan)
    assert plan_of(long).layout == plan.layout
    assert short.received is not None
    assert set(short.received["config"]) == {"trainer", "model"}


def test_record_reproduces_the_run(app: App) -> None:
    """Hydra's recorded overrides, without NEST's own, compose to the configuration that the task received."""
    planned = app.run(*LLAMA, "+nest=auto", "+nest.pin.tp=4", "hydra.run.dir=run")
    plan = plan_of(planned)
    assert plan.edits
    recorded = OmegaConf.load(app.folder / "run" / ".hydra" / "overrides.yaml")
    again = app.run(*LLAMA, *(str(text) for text in recorded if not str(text).startswith("+nest")))
    assert again.received is not None
    assert planned.received is not None
    assert again.received["config"] == planned.received["config"]


def test_nemo_like_runner_keeps_a_record(app: App) -> None:
    """Behind a runner that turns Hydra's record off, plan and overrides lie in nest_plan/."""
    app.name = "runner_app.py"
    ended = app.run(*LLAMA, "+nest=auto")
    plan = plan_of(ended)
    assert_applied(ended, plan)
    assert not (app.folder / ".hydra").exists()
    assert Plan.load(app.folder / "nest_plan" / "plan.json") == plan
    assert "+nest=auto" in OmegaConf.load(app.folder / "nest_plan" / "overrides.yaml")


@pytest.mark.parametrize("python", optional_pythons())
def test_other_environments(app: App, python: str, repository: Path) -> None:
    """Another Hydra release plans, pins and refuses in the same way."""
    app.python = python
    environment = {"PYTHONPATH": str(repository)}
    auto = ("+nest=auto", VERSION)
    ended = app.run(*LLAMA, "model.tensor_model_parallel_size=4", *auto, environment=environment)
    plan = plan_of(ended)
    assert plan.layout.tp == 4
    assert_applied(ended, plan)
    failed = app.run(*LLAMA, *auto, "+nest.cluster=absent.yaml", environment=environment)
    assert (failed.code, failed.received) == (2, None), failed.text
    app.name = "schema_app.py"
    assert_applied(schema := app.run(*auto, environment=environment), plan_of(schema))


def test_settings_are_checked(app: App) -> None:
    """A misspelled setting ends the run with the nearest known name, instead of being ignored."""
    ended = app.run(*LLAMA, "+nest=auto", "+nest.clutser=dgx-h100")
    assert (ended.code, ended.received) == (2, None)
    assert "did you mean 'cluster'?" in ended.err
    assert "Traceback" not in ended.text


def test_broken_cluster_file_ends_the_run(app: App) -> None:
    """A cluster file that cannot be read is bad input: exit 2, one message, the task never runs."""
    (app.folder / "cluster.yaml").write_text("levels: [")
    ended = app.run(*LLAMA, "+nest=auto", "+nest.cluster=cluster.yaml")
    assert (ended.code, ended.received) == (2, None)
    assert "cluster.yaml" in ended.err
    assert "Traceback" not in ended.text


def test_unreadable_model_ends_the_run(app: App) -> None:
    """A model without a number of layers is bad input: exit 2, and the message names the key."""
    ended = app.run(*LLAMA, "+nest=auto", "model.num_layers=???")
    assert (ended.code, ended.received) == (2, None)
    assert "num_layers" in ended.err
    assert "Traceback" not in ended.text


def test_planner_fault_ends_the_run(app: App) -> None:
    """An unexpected exception ends the run with its type and a traceback file; Hydra cannot swallow it."""
    app.name = "broken_app.py"
    ended = app.run(*LLAMA, "+nest=auto")
    assert (ended.code, ended.received) == (1, None)
    assert "planner fault: ModuleNotFoundError" in ended.err
    assert "Traceback" not in ended.text
    (trace,) = app.folder.glob("cache/*/fault.txt")
    assert "numpy" in trace.read_text()


def test_check_runs_a_legal_layout_unchanged(app: App) -> None:
    """+nest=check prints its verdict and hands over the configuration as composed."""
    plain = app.run(*LLAMA)
    checked = app.run(*LLAMA, "+nest=check")
    assert checked.code == 0, checked.text
    assert checked.out.startswith("LEGAL")
    assert plain.received is not None
    assert checked.received is not None
    assert checked.received["config"] == plain.received["config"]


@pytest.mark.parametrize(
    "override",
    ["model.tensor_model_parallel_size=3", "model.num_layers=800"],
    ids=["illegal", "out of memory"],
)
def test_check_stops_what_would_not_run(app: App, override: str) -> None:
    """+nest=check ends the run before the task when the layout is illegal or does not fit."""
    ended = app.run(*LLAMA, "+nest=check", override)
    assert (ended.code, ended.received) == (1, None), ended.text


def test_environment_of_the_plan_is_set(app: App) -> None:
    """The task has every variable of the plan, over hydra.job.env_set too; a replaced value is named."""
    ended = app.run(
        *LLAMA,
        *("+nest=auto", "+nest.pin.tp=4", "+hydra.job.env_set.CUDA_DEVICE_MAX_CONNECTIONS=7"),
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    )
    plan = plan_of(ended)
    assert plan.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert ended.received is not None
    assert plan.env.items() <= ended.received["environment"].items()
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 replaces 8" in ended.err


@pytest.mark.parametrize("name", ["8b", "70b"])
def test_demo_app_shows_the_plan(repository: Path, tmp_path: Path, name: str) -> None:
    """The demo app shows report, changed keys, the plan's file, and then the planned configuration."""
    ended = subprocess.run(
        [
            sys.executable,
            str(repository / "scripts/train.py"),
            f"--config-name=megatron_llama3_{name}",
            "+nest=auto",
        ],
        cwd=tmp_path,
        env=os.environ | {"NEST_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    (path,) = tmp_path.glob("cache/*/plan.json")
    plan = Plan.load(path)
    assert ended.stdout.startswith(plan.headline)
    assert str(path) in ended.stdout
    for key in plan.edits:
        assert f"{key}=" in ended.stdout
    printed = OmegaConf.create(ended.stdout[ended.stdout.index("\nname: megatron") :])
    assert printed.model.tensor_model_parallel_size == plan.layout.tp


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "gpt3_175b", "mixtral_8x7b"])
def test_demo_layouts_are_legal(app: App, name: str) -> None:
    """The layouts of the shipped example configurations are legal and fit."""
    ended = app.run("--config-path", "{scripts}", "--config-name", f"megatron_{name}", "+nest=check")
    assert ended.code == 0, ended.text
