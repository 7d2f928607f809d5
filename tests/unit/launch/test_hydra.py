"""Parts of the interception that need no process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nest_megatron.launch.fingerprint import fingerprint_of
from nest_megatron.launch.hydra import apply_plan
from nest_megatron.pipeline import plan_config
from nest_megatron.specs.settings import PlanSettings


def fingerprint(**changes: object) -> dict[str, str]:
    """The parts for a small configuration with one change."""
    given = {"tp": 1, "overrides": ["tp=1"], "settings": PlanSettings(), "mode": "auto"} | changes
    config = OmegaConf.create({"model": {"tp": given["tp"], "name": "${unknown_resolver:1}"}})
    return fingerprint_of(
        config,
        overrides=given["overrides"],  # type: ignore[arg-type]
        settings=given["settings"],  # type: ignore[arg-type]
        mode=str(given["mode"]),
    ).parts


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"tp": 2}, "configuration"),
        ({"overrides": []}, "overrides"),
        ({"settings": PlanSettings(reserved_gib=1.0)}, "settings"),
        ({"mode": "check"}, "mode"),
    ],
)
def test_each_input_has_its_part(change: dict[str, object], part: str) -> None:
    """A change of one input changes exactly its part; unknown resolvers do no harm."""
    before, after = fingerprint(), fingerprint(**change)
    assert [name for name in before if before[name] != after[name]] == [part]


def test_cluster_file_counts_by_content(tmp_path: Path) -> None:
    """Editing a cluster file changes the fingerprint although its path stays."""
    path = tmp_path / "cluster.yaml"
    settings = PlanSettings(cluster=str(path))
    path.write_text("num_nodes: 1")
    before = fingerprint(settings=settings)
    path.write_text("num_nodes: 2")
    after = fingerprint(settings=settings)
    assert [name for name in before if before[name] != after[name]] == ["cluster file"]


def test_rank_variables_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one job agree although the configuration reads their rank; other variables count."""
    config = OmegaConf.create({"seed": "${oc.env:RANK}", "name": "${oc.env:RUN_NAME,none}"})

    def digest() -> str:
        return fingerprint_of(config, overrides=[], settings=PlanSettings(), mode="auto").digest

    monkeypatch.setenv("RANK", "0")
    first = digest()
    monkeypatch.setenv("RANK", "1")
    assert digest() == first
    monkeypatch.setenv("RUN_NAME", "x")
    assert digest() != first


def test_compose_api_applies_a_plan(repository: Path) -> None:
    """A script without hydra.main plans, applies, and keeps the struct flag of its configuration."""
    with initialize_config_dir(str(repository / "scripts" / "conf"), version_base=None):
        config = compose("megatron_llama3_8b")
    plan = plan_config(config, settings=PlanSettings(pin={"tp": 4}))
    assert plan.edits
    apply_plan(config, plan)
    assert OmegaConf.is_struct(config)
    assert config.model.tensor_model_parallel_size == 4
    for key, value in plan.edits.items():
        found = OmegaConf.select(config, key)
        assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value


def test_plugin_module_imports_nothing_heavy() -> None:
    """The module that Hydra imports in every app loads neither numpy, torch nor the planner."""
    code = (
        "import json, sys; import hydra.plugins.search_path_plugin; before = set(sys.modules); "
        "import hydra_plugins.nest_megatron.search_path; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    heavy = ("numpy", "torch", "megatron", "nemo", "nest_megatron", "rich")
    assert "hydra_plugins.nest_megatron.search_path" in loaded
    assert not [name for name in loaded if name.split(".")[0] in heavy]
