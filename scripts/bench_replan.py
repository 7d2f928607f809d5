"""Time `nest-megatron replan` on GPT-3 175B, 1,024 A100: a lost node, a degraded leaf, a requeue.

One fresh process per row, interpreter start included; the planner's own seconds stand beside it.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nest_megatron.specs.plan import Plan

CONF = Path(__file__).resolve().parent / "conf"
COMMAND = [sys.executable, "-m", "nest_megatron.cli"]
NUM_LEAVES, NODES_PER_LEAF = 4, 32
#: Name of the row -> options of replan.
ROWS: dict[str, tuple[str, ...]] = {
    "nothing changed": (),
    "lost node": ("--changed", "lost=gpu007"),
    "lost leaf": ("--changed", "lost=gpu[033-064]"),
    "degraded leaf, uplink x 0.25": ("--changed", "degraded=leaf2:0.25"),
    "degraded leaf, map only": ("--changed", "degraded=leaf2:0.25", "--keep-layout"),
    "slow node, NICs x 0.25": ("--changed", "degraded=gpu100:0.25"),
}


def topology() -> str:
    """Return `scontrol show topology` of the nodes: full leaves below one spine."""
    lines = [
        f"SwitchName=leaf{leaf} Nodes=gpu[{leaf * NODES_PER_LEAF + 1:03d}-{(leaf + 1) * NODES_PER_LEAF:03d}]"
        for leaf in range(NUM_LEAVES)
    ]
    return "\n".join([*lines, f"SwitchName=spine Switches=leaf[0-{NUM_LEAVES - 1}]"]) + "\n"


def measure(plan: Path, out: Path, options: tuple[str, ...]) -> str:
    """Return one row of the table."""
    command = [*COMMAND, "replan", "--plan", str(plan), "--json", str(out), *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wall_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    new = Plan.load(out)
    (own,) = re.findall(r"planned again in (.+)", text)
    carried = new.user.prediction
    old_now = f"{carried.step_time_s:8.2f}" if carried is not None else f"{'-':>8s}"
    return (
        f"{wall_s:7.2f} {cpu_s:6.2f} {own:>8s} {new.layout.world:6d} {old_now} "
        f"{new.prediction.step_time_s:8.2f} {new.rank_map.gain:7.2%}   {new.outcome}: {new.layout.describe()}"
    )


def main() -> None:
    """Plan once, then print the table."""
    with tempfile.TemporaryDirectory() as folder:
        switches, plan, out = (Path(folder) / name for name in ("topology", "plan.json", "new.json"))
        switches.write_text(topology())
        command = [*COMMAND, "plan", "--config", str(CONF / "megatron_gpt3_175b.yaml")]
        command += ["--cluster", "dgx-a100-80-2to1", "--topology", str(switches), "--json", str(plan)]
        command += ["--nodelist", f"gpu[001-{NUM_LEAVES * NODES_PER_LEAF:03d}]"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        heads = ("change", "wall s", "CPU s", "replan", "GPUs", "old s", "new s", "map")
        print("{:30s} {:>7s} {:>6s} {:>8s} {:>6s} {:>8s} {:>8s} {:>7s}".format(*heads))
        for name, options in ROWS.items():
            print(f"{name:30s} {measure(plan, out, options)}", flush=True)


if __name__ == "__main__":
    main()
