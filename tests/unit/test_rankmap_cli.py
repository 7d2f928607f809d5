"""``nest-megatron plan`` on a named allocation: what it prints, prices and writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nest_megatron.cli import main
from nest_megatron.errors import EXIT_BAD_INPUT, EXIT_OK
from nest_megatron.launch.hostfile import NODES_NAME, RANKS_NAME
from nest_megatron.specs.plan import Plan

#: Names alternate between two leaves.
TOPOLOGY = "SwitchName=l1 Nodes=n[1,3]\nSwitchName=l2 Nodes=n[2,4]\nSwitchName=top Switches=l[1-2]\n"
SLOW_SPINE = """\
base: dgx-h100
levels:
  - {name: nvlink, gpus: 8, bandwidth_GB_per_s_per_gpu: 450, efficiency: 0.813, latency_us: 2.7}
  - {name: leaf, gpus: 16, bandwidth_GB_per_s_per_gpu: 50, efficiency: 0.96, latency_us: 3.0}
  - {name: spine, gpus: 1024, bandwidth_GB_per_s_per_gpu: 5, efficiency: 0.95, latency_us: 4.0}
"""
#: Data parallel rings over all nodes: the only layout whose price the order of names spoils here.
PINS = ("--pin", "tp=8", "--pin", "pp=1", "--pin", "cp=1", "--free", "sequence_parallel=true")


@pytest.fixture
def arguments(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The example job on four named nodes."""
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "topology").write_text(TOPOLOGY)
    (tmp_path / "cluster.yaml").write_text(SLOW_SPINE)
    config = repository / "scripts" / "conf" / "megatron_llama3_8b.yaml"
    cluster = ["--cluster", str(tmp_path / "cluster.yaml"), "--topology", str(tmp_path / "topology")]
    return ["plan", "--config", str(config), *cluster, *PINS, "trainer.num_nodes=4"]


def test_plan_writes_the_map_and_says_its_gain(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Headline and prediction price the scheduler's order, the gain stands beside, host files are written."""
    out = tmp_path / "plan.json"
    assert main([*arguments, "--nodelist", "n[1-4]", "--json", str(out)]) == EXIT_OK
    plan, text = Plan.load(out), capsys.readouterr().out
    assert plan.rank_map.nodes in (("n1", "n3", "n2", "n4"), ("n2", "n4", "n1", "n3"))
    assert plan.prediction.step_time_s == plan.rank_map.default_step_time_s > plan.rank_map.step_time_s
    assert f"the rank map saves another {plan.rank_map.gain:.1%} of the step" in text.splitlines()[0]
    assert re.search(r"no other order of whole nodes is faster", text)
    assert (tmp_path / NODES_NAME).read_text().split() == list(plan.rank_map.nodes)
    assert len((tmp_path / RANKS_NAME).read_text().split()) == 32
    (dp,) = (axis for axis in plan.rank_map.crossings if axis.axis == "dp_cp")
    assert (dp.size, dp.groups, dp.mapped) == (4, 8, {"nvlink": 8, "leaf": 8})


def test_without_a_plan_file_no_host_file_is_written(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host files lie beside plan.json or nowhere."""
    monkeypatch.chdir(tmp_path)
    for extra in ([], ["--json", "-"]):
        assert main([*arguments, "--nodelist", "n[1-4]", *extra]) == EXIT_OK
    assert not list(tmp_path.glob("hostfile.*"))


@pytest.mark.parametrize(
    ("nodelist", "said"),
    [
        ("n[1-3]", "num_gpus is more than the named nodes hold"),
        ("n[1-", "brackets do not match"),
        ("n[1-3],m4", "nodes that are not known"),
        ("n1,n1", "named twice"),
    ],
)
def test_a_node_list_that_cannot_be_used_is_bad_input(
    arguments: list[str], nodelist: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 with one sentence, for a node too few, a typing error, a stranger, and a node named twice."""
    assert main([*arguments, "--nodelist", nodelist]) == EXIT_BAD_INPUT
    assert said in capsys.readouterr().err
