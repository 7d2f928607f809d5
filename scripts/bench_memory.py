"""Time the memory function inside the search on one core: nodes and candidate layouts per second.

Coefficients are computed once per node (layout without splits, vpp and recompute depth) by `memory_terms` in
numpy; `bounds` turns them into the peak of the worst stage of every candidate, and bounds its step time, in
Cython.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cython_dp import bounds
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cost.tables import CostModel
from nest_megatron.dialects import registry
from nest_megatron.dialects.files import load_config
from nest_megatron.planner.freedom import apply_settings
from nest_megatron.planner.search import candidate_problem
from nest_megatron.planner.space import enumerate_space
from nest_megatron.specs.settings import PlanSettings

CONF = Path(__file__).resolve().parent / "conf"
#: Configuration, cluster, GPUs (None: those of the configuration).
ROWS = (
    ("megatron_llama3_8b.yaml", "dgx-h100", None),
    ("megatron_mixtral_8x7b.yaml", "dgx-h100", None),
    ("megatron_gpt3_175b.yaml", "dgx-a100-80", 1024),
)
REPEATS = 5


def best_of(run: Callable[[], object]) -> float:
    """Return the shortest of a few runs in seconds."""
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return min(taken)


def measure(config: str, cluster_name: str, gpus: int | None) -> str:
    """Return one row of the table."""
    settings = PlanSettings(num_gpus=gpus)
    loaded, _ = load_config(CONF / config)
    dialect = registry.detect(loaded)
    job = apply_settings(dialect.read(loaded, overrides=(), settings=settings), settings)
    cluster = load_cluster(cluster_name, num_gpus=job.num_gpus)
    space = enumerate_space(job)
    model = CostModel(job, cluster)
    tables = model.tables(space.nodes)  # builds the graphs, so that what follows is the memory function alone
    problem = candidate_problem(job, tables, space)
    rows = [model.row(node) for node in space.nodes]
    nodes_s = best_of(lambda: model.memory(space.nodes, rows))
    peaks_s = best_of(lambda: bounds(problem))
    name = f"{config.removesuffix('.yaml')} on {cluster_name}"
    return (
        f"{name:44s} {job.num_gpus:6d} {len(space.nodes):7d} {len(space.nodes) / nodes_s:11,.0f} "
        f"{len(space):10d} {len(space) / peaks_s:13,.0f} {len(space) / (nodes_s + peaks_s):13,.0f}"
    )


def main() -> None:
    """Print the table."""
    print(
        f"{'job':44s} {'GPUs':>6s} {'nodes':>7s} {'nodes/s':>11s} "
        f"{'candidates':>10s} {'candidates/s':>13s} {'both together':>13s}"
    )
    for row in ROWS:
        print(measure(*row), flush=True)


if __name__ == "__main__":
    main()
