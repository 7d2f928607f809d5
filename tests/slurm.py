"""A real Slurm of a few nodes with eight GPUs each on this machine, without systemd and cgroups."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo")
NODES = ("n1", "n2")
_START_S, _STOP_S = 20.0, 10.0
_NULL_DEVICE = os.makedev(1, 3)

_CONFIGURATION = """\
ClusterName=nest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
SwitchType=switch/none
TopologyPlugin={topology}
MpiDefault=none
ReturnToService=2
GresTypes=gpu
NodeName=DEFAULT CPUs=16 RealMemory=2000 Gres=gpu:8 State=UNKNOWN
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why no Slurm can be started here, or nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"Slurm is not installed: {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "Slurm's daemons without a cluster user need root"


@contextlib.contextmanager
def running(
    folder: Path, nodes: Sequence[str] = NODES, *, topology: str | None = None
) -> Iterator[dict[str, str]]:
    """Start the daemons, wait until all nodes are idle, and yield the variables that name this Slurm.

    Args:
        topology: text of topology.conf for Slurm's tree plug-in; None for a flat network.
    """
    for name in ("state", "dev", *(f"spool/{node}" for node in nodes)):
        (folder / name).mkdir(parents=True)
    for gpu in range(8):
        os.mknod(folder / "dev" / f"gpu{gpu}", 0o600 | stat.S_IFCHR, _NULL_DEVICE)
    port, *ports = _free_ports(1 + len(nodes))
    lines = [
        f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={number}"
        for node, number in zip(nodes, ports, strict=True)
    ]
    text = _CONFIGURATION.format(
        host=socket.gethostname(),
        folder=folder,
        port=port,
        nodes="\n".join(lines),
        topology="topology/none" if topology is None else "topology/tree",
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(f"NodeName={','.join(nodes)} Name=gpu File={folder}/dev/gpu[0-7]\n")
    if topology is not None:
        (folder / "topology.conf").write_text(topology)
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[bytes]] = []
    with (folder / "daemons.log").open("wb") as log:

        def start(*command: str) -> None:
            environment = os.environ | variables
            daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

        try:
            start("slurmctld", "-D", "-c")
            for node in nodes:
                start("slurmd", "-D", "-N", node)
            _wait_until_idle(variables, len(nodes), folder / "daemons.log")
            yield variables
        finally:
            # The nodes go first: a controller that is gone leaves them waiting.
            for daemon in reversed(daemons):
                daemon.terminate()
                try:
                    daemon.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until_idle(variables: dict[str, str], count: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        command = ["sinfo", "--noheader", "--format=%D", "--states=idle"]
        found = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        if found.stdout.strip() == str(count):
            return
        time.sleep(0.2)
    pytest.fail(f"Slurm did not start within {_START_S:.0f} s:\n{log.read_text()[-2000:]}")
