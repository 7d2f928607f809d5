"""scripts/train.py under a real srun: ranks on two nodes train, and refuse nodes they were not given."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nest_megatron.launch.processes import PER_PROCESS_VARIABLES
from tests import slurm

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
]

#: Two nodes with one rank each.
CLUSTER = """
accelerator: cpu-core
gpus_per_node: 1
nodes: [n1, n2]
levels:
  - {name: network, gpus: 2, bandwidth_GB_per_s_per_gpu: 1, efficiency: 0.5, latency_us: 100}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a running Slurm."""
    pytest.importorskip("megatron.core")
    with slurm.running(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


def srun(
    repository: Path, folder: Path, cluster: dict[str, str], *hosts: str
) -> subprocess.CompletedProcess[str]:
    """Run two ranks, on ``hosts`` in that order if given, else in Slurm's own."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        **{
            k: v
            for k, v in os.environ.items()
            if k not in PER_PROCESS_VARIABLES and not k.startswith("NEST_")
        },
        **cluster,
        "NEST_CACHE": str(folder / "cache"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    options = ["--nodes=2", "--ntasks-per-node=1"]
    if hosts:
        (folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
        environment["SLURM_HOSTFILE"] = str(folder / "hosts")
        options = ["--ntasks=2", "--distribution=arbitrary"]
    app = [sys.executable, str(repository / "scripts" / "train.py"), "--config-name=megatron_llama_tiny"]
    job = ["trainer.num_nodes=2", "trainer.devices=1", "trainer.max_steps=2"]
    plan = ["+nest=auto", f"+nest.cluster={folder}/cluster.yaml", "+nest.pin.pp=2"]
    return subprocess.run(
        ["srun", *options, *app, *job, *plan],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_ranks_of_srun_train_the_plan(repository: Path, tmp_path: Path, cluster: dict[str, str]) -> None:
    """One plan, two nodes, and the loss that forked ranks give, because all layouts start from one model."""
    done = srun(repository, tmp_path, cluster)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "are those of the plan (TP1 PP2 " in done.stdout
    losses = re.findall(r"^train: step .*loss ([\d.]+)", done.stdout, re.MULTILINE)
    assert len(losses) == 2
    assert float(losses[1]) < float(losses[0])


def test_a_rank_on_another_node_ends_the_job(
    repository: Path, tmp_path: Path, cluster: dict[str, str]
) -> None:
    """A host file in another order than the plan's map is refused before any rank meets another."""
    done = srun(repository, tmp_path, cluster, "n2", "n1")
    assert done.returncode != 0
    assert "NEST-L20" in done.stderr
    assert "train: step" not in done.stdout
