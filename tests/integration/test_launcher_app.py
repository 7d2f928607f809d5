"""The NeMo launcher's own configuration tree in a real Hydra app that stands in for its ``main.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nest_megatron.errors import EXIT_BAD_INPUT, NothingToPlanError
from nest_megatron.specs.plan import Plan
from tests.integration.hydra_app import App, Ended, assert_applied, plan_of
from tests.unit.nemo_files import LAUNCHER

pytestmark = pytest.mark.integration

PRODUCT = "training.exp_manager.checkpoint_callback_params.model_parallel_size"


@pytest.fixture
def app(tmp_path: Path, repository: Path) -> App:
    """The stand-in, in an empty folder."""
    return App(tmp_path, repository / "scripts" / "conf", name="launcher_app.py")


def launch(app: App, shared: Path, *overrides: str, mode: str = "") -> Ended:
    """Start the launcher on its real tree, on a shipped cluster."""
    tree = ("--config-path", str(shared / "data" / "configs" / LAUNCHER), "--config-name", "config")
    environment = {"TASK_RESOLVE": PRODUCT} | ({"NEST_MODE": mode} if mode else {})
    return app.run(*tree, "launcher_scripts_path=/launcher_scripts", *overrides, environment=environment)


def trained(app: App, shared: Path, name: str) -> tuple[Ended, Plan]:
    """Plan the training stage ``name`` and check what every plan must keep."""
    asked = ("stages=[training]", f"training={name}", "+nest=auto", "+nest.cluster=dgx-h100")
    # Composing the nested groups of this stage takes Hydra longer than all the others together.
    ended = launch(app, shared, *asked, "~data_curation")
    plan = plan_of(ended)
    assert plan.provenance["dialect"] == "launcher"
    assert all(key.startswith("training.") for key in plan.edits)
    assert_applied(ended, plan)
    assert ended.received is not None
    model, trainer = (ended.received["config"]["training"][key] for key in ("model", "trainer"))
    assert plan.layout.world == trainer["num_nodes"] * trainer["devices"]
    assert plan.layout.global_batch == model["global_batch_size"]
    assert ended.received["resolved"][PRODUCT] == plan.layout.tp * plan.layout.pp
    return ended, plan


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("gpt3/175b", 1024),
        ("llama/llama3_70b", 1024),
        ("mixtral/mixtral_8x3b", 16),
        ("gpt3/mlperf-24n", 192),
        ("mixtral/mixtral_8x7b", 64),
    ],
)
def test_training_is_rewritten_or_kept_with_the_ratio(app: App, shared: Path, name: str, gpus: int) -> None:
    """A legal training stage is rewritten for its own nodes, or kept and the ratio printed."""
    ended, plan = trained(app, shared, name)
    assert plan.layout.world == gpus
    assert plan.outcome in ("rewritten", "kept")
    assert plan.user.violations == ()
    assert plan.ratio is not None
    assert "step time under the same assumptions" in ended.out
    assert (plan.outcome == "kept") == (plan.edits == {})


def test_an_illegal_training_stage_is_repaired(app: App, shared: Path) -> None:
    """falcon_7b asks for 128 data parallel ranks with a batch of 32: both batch rules, then fewer ranks."""
    ended, plan = trained(app, shared, "falcon/falcon_7b")
    assert plan.outcome == "repaired"
    assert {violation["code"] for violation in plan.user.violations} == {"NEST-RB02", "NEST-RB04"}
    assert 32 % (plan.layout.dp * plan.layout.micro_batch) == 0
    assert "NEST-RB02" in ended.out


def test_stages_without_training_run_unchanged(app: App, shared: Path) -> None:
    """The launcher's default stages are left alone: one sentence, same configuration, the app's own end."""
    plain = launch(app, shared)
    assert plain.code == 0 and plain.received is not None
    for mode in ("auto", "check"):
        ended = launch(app, shared, f"+nest={mode}")
        assert ended.code == 0, ended.text
        assert ended.received is not None
        assert OmegaConf.create(ended.received["config"]) == OmegaConf.create(plain.received["config"])
        assert ended.out.count(NothingToPlanError.CODE) == 1
        assert "stages=conversion" in ended.out
        assert "NEST_PLAN" not in ended.received["environment"]


def test_planning_ahead_without_training_writes_no_plan(app: App, shared: Path) -> None:
    """NEST_MODE=plan ends with bad input, because the plan that a script would read does not exist."""
    ended = launch(app, shared, "+nest=auto", mode="plan")
    assert ended.code == EXIT_BAD_INPUT
    assert NothingToPlanError.CODE in ended.err
    assert ended.received is None
    assert not (app.folder / "nest_plan" / "env.sh").exists()


def test_other_models_end_before_the_launcher_submits(app: App, shared: Path) -> None:
    """Training of an encoder is refused in one sentence with its parallel sizes; nothing is started."""
    ended = launch(app, shared, "stages=[training]", "training=bert/20b", "+nest=auto")
    assert ended.code == EXIT_BAD_INPUT
    assert "trains a BERT encoder (TP4 PP4)" in ended.err
    assert ended.received is None
