"""Time `nest-megatron replan` on GPT-3 175B, 1,024 A100 (a lost node, a degraded leaf), and robust searches.

Replanning: one fresh process per row, interpreter start included; the planner's own seconds stand beside it.
Robust: CPU seconds of the search over four scenarios on the jobs of ``bench_search.py``, start not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_search import JOBS
from bench_search import ROWS as JOB_ROWS

from nest_megatron.cluster.load import load_cluster
from nest_megatron.dialects import registry
from nest_megatron.dialects.files import load_config
from nest_megatron.planner.freedom import apply_settings
from nest_megatron.planner.robust import ScenarioPricer, robust_choice
from nest_megatron.planner.search import search
from nest_megatron.specs.plan import Plan
from nest_megatron.specs.settings import PlanSettings

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


def replan_table() -> None:
    """Plan once, then print one row per change."""
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


def robust_table() -> None:
    """Print, per job, the search for the network as it is and the robust one."""
    heads = ("job", "search s", "robust s", "solved", "simulated", "gap", "worst / nominal's worst")
    print("{:30s} {:>8s} {:>8s} {:>7s} {:>9s} {:>7s}   {}".format(*heads))
    # Larger worlds need another batch than their file says.
    for row in (row for row in JOB_ROWS if row.global_batch is None):
        settings = PlanSettings(cluster=row.cluster, num_gpus=row.gpus)
        config, _ = load_config(JOBS / row.script)
        read = registry.detect(config).read(config, overrides=(), settings=settings)
        job = apply_settings(read, settings)
        whole = load_cluster(row.cluster, num_gpus=row.gpus, ranks_per_node=job.gpus_per_node)
        inner, leaf, outer = (whole.levels[i].name for i in (0, 1, -1))
        cluster = dataclasses.replace(whole, scenarios=({}, {inner: 0.5}, {leaf: 0.3}, {outer: 0.5}))
        started = time.process_time()
        nominal = search(job, cluster)
        searched = time.process_time()
        choice = robust_choice(job, cluster, nominal, "worst")
        done = time.process_time()
        nominal_s = float(ScenarioPricer(job, cluster, "worst").values_s([nominal.best])[0])
        print(
            f"{row.name:30s} {searched - started:8.2f} {done - searched:8.2f} {choice.visited:7,d} "
            f"{choice.evaluated:9,d} {choice.value_s / choice.lower_bound_s - 1:7.3f}   "
            f"{choice.value_s / nominal_s:.3f}",
            flush=True,
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("replan", "robust"), help="print one table")
    only = parser.parse_args().only
    if only != "robust":
        replan_table()
    if only != "replan":
        robust_table()


if __name__ == "__main__":
    main()
