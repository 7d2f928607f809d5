"""Time the search on public models: CPU seconds of one core, space, simulations, peak memory, proven gap.

One fresh process per row; its start and the reading of the job are not counted.  Peak memory is the process'
peak resident set, interpreter and libraries included.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

JOBS = Path(__file__).resolve().parent / "jobs"


@dataclass(frozen=True, slots=True)
class Row:
    """One search: a script of ``scripts/jobs`` on a cluster."""

    name: str
    script: str
    cluster: str
    gpus: int
    global_batch: int | None = None


ROWS = (
    Row("GPT-3 175B / 1,024 A100", "gpt3_175b.sh", "dgx-a100-80", 1024),
    Row("Llama 3.1 405B / 16,384 H100", "llama31_405b.sh", "dgx-h100", 16384),
    Row("Mixtral 8x7B / 64 H100", "mixtral_8x7b.sh", "dgx-h100", 64),
    Row("DeepSeek-V3 / 2,048 H100", "deepseek_v3.sh", "dgx-h100", 2048),
    Row("Llama 3.1 405B / 100,000 H100", "llama31_405b.sh", "dgx-h100", 100_000, 25_000),
)


def measure(row: Row) -> str:
    """Search in this process and return one line of the table."""
    from nest_megatron.cluster.load import load_cluster
    from nest_megatron.dialects import registry
    from nest_megatron.dialects.files import load_config
    from nest_megatron.planner.freedom import apply_settings
    from nest_megatron.planner.search import search
    from nest_megatron.specs.settings import PlanSettings

    settings = PlanSettings(cluster=row.cluster, num_gpus=row.gpus)
    if row.global_batch is not None:
        os.environ["GLOBAL_BATCH"] = str(row.global_batch)
    config, _ = load_config(JOBS / row.script)
    read = registry.detect(config).read(config, overrides=(), settings=settings)
    job = apply_settings(read, settings)
    cluster = load_cluster(row.cluster, num_gpus=row.gpus, ranks_per_node=job.gpus_per_node)
    started = time.process_time()
    result = search(job, cluster)
    seconds = time.process_time() - started
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    certificate = result.certificate
    return (
        f"{row.name:30s} {seconds:7.2f} {certificate.configurations:10,d} {certificate.evaluated:9,d} "
        f"{peak_mib:8.0f} {certificate.gap:9.1e}   {result.fastest.describe()}"
    )


def main() -> None:
    """Print the table, or one row of it in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", type=int, help="print this row only, in this process")
    options = parser.parse_args()
    if options.row is not None:
        print(measure(ROWS[options.row]))
        return
    print(
        f"{'job':30s} {'CPU s':>7s} {'configs':>10s} {'simulated':>9s} {'peak MiB':>8s} {'gap':>9s}   fastest"
    )
    for k in range(len(ROWS)):
        subprocess.run([sys.executable, __file__, "--row", str(k)], check=True)


if __name__ == "__main__":
    main()
