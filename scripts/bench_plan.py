"""Time `nest-megatron plan` on the shipped configurations: wall and CPU seconds, configurations, peak memory.

One fresh process per row, interpreter start included; the memory is the process' peak resident set.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONF = Path(__file__).resolve().parent / "conf"
#: Configuration, cluster, GPUs.
ROWS = (
    ("megatron_llama3_8b.yaml", "dgx-h100", None),
    ("megatron_llama3_70b.yaml", "dgx-h100", None),
    ("megatron_mixtral_8x7b.yaml", "dgx-h100", None),
    ("megatron_gpt3_175b.yaml", "dgx-a100-80", 1024),
    ("megatron_gpt3_175b.yaml", "dgx-h100-2to1", 1024),
)


def measure(config: str, cluster: str, gpus: int | None) -> str:
    """Return one row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "nest_megatron.cli", "plan", "--config", str(CONF / config)]
        command += ["--cluster", cluster, "--json", str(out)] + (["--gpus", str(gpus)] if gpus else [])
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall_s = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        plan = json.loads(out.read_text())
    certificate = plan["certificate"]
    name = f"{config.removesuffix('.yaml')} on {cluster}"
    return (
        f"{name:46s} {plan['provenance']['num_gpus']:6d} {wall_s:7.2f} {cpu_s:7.2f} "
        f"{certificate['search_s']:8.2f} "
        f"{certificate['configurations']:9d} {certificate['evaluated']:9d} {certificate['gap']:6.3f} "
        f"{after.ru_maxrss / 1024:8.0f}"
    )


def main() -> None:
    """Print the table."""
    heads = ("job", "GPUs", "wall s", "CPU s", "search s", "configs", "simulated", "gap", "peak MiB")
    print(
        f"{heads[0]:46s} {heads[1]:>6s} {heads[2]:>7s} {heads[3]:>7s} {heads[4]:>8s} {heads[5]:>9s} "
        f"{heads[6]:>9s} {heads[7]:>6s} {heads[8]:>8s}"
    )
    for row in ROWS:
        print(measure(*row), flush=True)


if __name__ == "__main__":
    main()
