"""A rank map under a real Slurm: the topology it prints, the order it starts ranks in, and the host files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nest_megatron.cluster.allocation import natural_order
from nest_megatron.launch.hostfile import NODES_NAME, RANKS_NAME
from nest_megatron.launch.processes import PER_PROCESS_VARIABLES
from nest_megatron.specs.plan import Plan
from tests import slurm

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
]

#: Two leaves; neighbours by name lie on different ones, and n10 sorts before n2 as text.
NODES = ("n1", "n2", "n10", "n11")
TOPOLOGY = "SwitchName=leaf1 Nodes=n1,n10\nSwitchName=leaf2 Nodes=n2,n11\nSwitchName=top Switches=leaf[1-2]\n"
PER_NODE = 8
SLOW_SPINE = """\
base: dgx-h100
levels:
  - {name: nvlink, gpus: 8, bandwidth_GB_per_s_per_gpu: 450, efficiency: 0.813, latency_us: 2.7}
  - {name: leaf, gpus: 16, bandwidth_GB_per_s_per_gpu: 50, efficiency: 0.96, latency_us: 3.0}
  - {name: spine, gpus: 1024, bandwidth_GB_per_s_per_gpu: 2, efficiency: 0.95, latency_us: 4.0}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a running Slurm."""
    with slurm.running(tmp_path_factory.mktemp("slurm"), NODES, topology=TOPOLOGY) as variables:
        yield variables


def in_allocation(cluster: dict[str, str], folder: Path, script: str) -> str:
    """Run a script inside an allocation of all nodes and return what it prints."""
    inherited = {key: value for key, value in os.environ.items() if key not in PER_PROCESS_VARIABLES}
    done = subprocess.run(
        ["salloc", "--quiet", f"--nodes={len(NODES)}", f"--ntasks-per-node={PER_NODE}", "bash", "-c", script],
        env=inherited | cluster,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def node_of_rank(output: str) -> dict[int, str]:
    """Return rank -> node from lines ``rank node``."""
    pairs = (line.split() for line in output.splitlines())
    return {int(rank): node for rank, node in pairs}


SHOW = """bash -c 'echo "$SLURM_PROCID $SLURMD_NODENAME"'"""


def test_ranks_land_on_the_nodes_of_the_map(
    cluster: dict[str, str], tmp_path: Path, repository: Path
) -> None:
    """Slurm's own topology and node list make the plan; its host file puts rank r on the planned node."""
    config = repository / "scripts" / "conf" / "megatron_llama3_8b.yaml"
    (tmp_path / "cluster.yaml").write_text(SLOW_SPINE)
    script = f"""
        set -e
        scontrol show topology | {sys.executable} -m nest_megatron.cli plan --config {config} \\
            --cluster cluster.yaml --pin tp=8 --pin pp=1 --pin cp=1 --free sequence_parallel=true \\
            --nodelist "$SLURM_JOB_NODELIST" --topology - --json plan.json trainer.num_nodes={len(NODES)} >&2
        SLURM_HOSTFILE=$PWD/{RANKS_NAME} srun --distribution=arbitrary {SHOW}
    """
    found = node_of_rank(in_allocation(cluster, tmp_path, script))
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.rank_map.gain > 0
    assert plan.rank_map.nodes != NODES
    assert set(plan.rank_map.nodes) == set(NODES)
    assert found == {rank: plan.rank_map.nodes[rank // PER_NODE] for rank in range(len(NODES) * PER_NODE)}
    leaves = [{"n1": 1, "n10": 1, "n2": 2, "n11": 2}[node] for node in plan.rank_map.nodes]
    assert leaves in ([1, 1, 2, 2], [2, 2, 1, 1])
    assert (tmp_path / NODES_NAME).read_text().split() == list(plan.rank_map.nodes)


def test_without_the_host_file_slurm_orders_names_by_number(cluster: dict[str, str], tmp_path: Path) -> None:
    """The order that the plan prices as the scheduler's is the one that srun uses."""
    found = node_of_rank(in_allocation(cluster, tmp_path, f"srun {SHOW}"))
    assert [found[rank] for rank in range(0, len(found), PER_NODE)] == list(natural_order(NODES))


def test_torchrun_gets_its_node_rank_from_the_task_of_the_map(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    """One task per node with hostfile.nodes: SLURM_PROCID follows the file, SLURM_NODEID does not."""
    order = ("n11", "n1", "n10", "n2")
    (tmp_path / NODES_NAME).write_text("".join(f"{node}\n" for node in order))
    show = """bash -c 'echo "$SLURM_PROCID $SLURMD_NODENAME $SLURM_NODEID"'"""
    step = f"srun --distribution=arbitrary --ntasks={len(order)} --ntasks-per-node=1 {show}"
    output = in_allocation(cluster, tmp_path, f"SLURM_HOSTFILE=$PWD/{NODES_NAME} {step}")
    rows = sorted(line.split() for line in output.splitlines())
    assert tuple(node for _, node, _ in rows) == order
    assert [int(node_id) for _, _, node_id in rows] != list(range(len(order)))
