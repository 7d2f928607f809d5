"""A Hydra app that plans on a named allocation leaves the host files beside its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_megatron.launch.hostfile import NODES_NAME, RANKS_NAME
from nest_megatron.specs.plan import Plan
from tests.integration.hydra_app import LLAMA, App

pytestmark = pytest.mark.integration

TOPOLOGY = "SwitchName=l1 Nodes=n[1,3]\nSwitchName=l2 Nodes=n[2,4]\nSwitchName=top Switches=l[1-2]\n"


def test_plan_mode_writes_host_files(tmp_path: Path, repository: Path) -> None:
    """Nodes come from Slurm's variable, the topology from a file; another topology is another plan."""
    app = App(tmp_path, repository / "scripts" / "conf")
    topology = tmp_path / "topology.txt"
    topology.write_text(TOPOLOGY)
    arguments = (
        *LLAMA,
        "+nest=auto",
        "+nest.cluster=dgx-h100-2to1",
        "+nest.nodelist=${oc.env:SLURM_JOB_NODELIST}",
        f"+nest.topology={topology}",
        "trainer.num_nodes=4",
    )
    environment = {
        "NEST_MODE": "plan",
        "NEST_PLAN": str(tmp_path / "made" / "plan.json"),
        "SLURM_JOB_NODELIST": "n[1-4]",
    }
    ended = app.run(*arguments, environment=environment)
    assert ended.code == 0, ended.text
    assert ended.received is None
    plan = Plan.load(tmp_path / "made" / "plan.json")
    assert sorted(plan.rank_map.nodes) == ["n1", "n2", "n3", "n4"]
    assert (tmp_path / "made" / NODES_NAME).read_text().split() == list(plan.rank_map.nodes)
    assert len((tmp_path / "made" / RANKS_NAME).read_text().split()) == 32
    assert NODES_NAME in ended.out
    topology.write_text(TOPOLOGY.replace("n[1,3]", "n[1,2]").replace("n[2,4]", "n[3,4]"))
    again = app.run(*arguments, environment=environment)
    assert again.code == 0, again.text
    assert (
        Plan.load(tmp_path / "made" / "plan.json").provenance["fingerprint"] != plan.provenance["fingerprint"]
    )
