"""Rank maps on random fragmented allocations, and against optima that do not use the planner's search.

Prints the tables of docs/rank-maps.md.  Exit code 1 when a map is slower than the scheduler's order, when an
order of nodes beats a map on a small tree, or when a map of GPUs is priced below the bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence

from nest_megatron import rules
from nest_megatron.planner.rankmap import SMALLEST_GAIN, rank_map
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from tests.builders import make_job, make_layout
from tests.placement import (
    best_node_order_s,
    best_slot_map_s,
    fragmented,
    placement_gap,
    small_layout,
    small_model,
    small_tree,
)

#: Prices are compared up to rounding.
ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """One fragmented allocation."""

    kind: str
    gain: float
    room: float
    cpu_s: float
    worse: bool


def place(seed: int) -> Placed:
    """Map one random allocation."""
    job, cluster, layout = fragmented(seed)
    started = time.process_time()
    found = rank_map(job, cluster, layout, orders=job.capabilities.orders)
    cpu_s = time.process_time() - started
    assert found.bound_s is not None
    return Placed(
        kind=f"{job.model.name}, {cluster.num_gpus} GPUs",
        gain=found.gain,
        room=1 - found.bound_s / found.step_time_s,
        cpu_s=cpu_s,
        worse=found.step_time_s > found.default_step_time_s,
    )


def fragmented_table(count: int) -> bool:
    """Print gains by kind of job; return whether no map is slower than the scheduler's order."""
    print(
        f"{count} fragmented allocations (seeds 0-{count - 1}); gain over the scheduler's order; room: bound"
    )
    heads = ("job", "count", "slower", "no gain", "mean gain", "best gain", "mean room", "CPU s", "max CPU s")
    print("{:24s} {:>6s} {:>7s} {:>8s} {:>10s} {:>10s} {:>10s} {:>6s} {:>10s}".format(*heads))
    rows = [place(seed) for seed in range(count)]
    for kind in [*sorted({row.kind for row in rows}), "all"]:
        these = [row for row in rows if kind in (row.kind, "all")]
        gains, cpu_s = [row.gain for row in these], [row.cpu_s for row in these]
        print(
            f"{kind:24s} {len(these):6d} {sum(row.worse for row in these):7d} "
            f"{sum(gain == 0 for gain in gains):8d} {statistics.mean(gains):10.2%} {max(gains):10.2%} "
            f"{statistics.mean(row.room for row in these):10.2%} {statistics.mean(cpu_s):6.2f} "
            f"{max(cpu_s):10.2f}",
            flush=True,
        )
    return not any(row.worse for row in rows)


def small_tables(count: int) -> bool:
    """Compare with all orders of 3 to 6 nodes; return whether every map is optimal up to its least gain."""
    missed = 0
    for seed in range(count):
        rng = random.Random(seed)
        nodes = rng.choice((3, 4, 5, 5, 6))
        cluster = small_tree(rng, nodes=nodes, per_node=rng.choice((2, 4)), depth=rng.choice((1, 1, 2)))
        job, layout = small_layout(rng, cluster.num_gpus)
        found = rank_map(job, cluster, layout)
        best_s = best_node_order_s(job, cluster, layout)
        # A map below the least gain is not made.
        allowed = best_s * (1 + ROUNDING) if found.gain > 0 else best_s / (1 - SMALLEST_GAIN)
        missed += found.step_time_s > allowed
    print(f"\nall orders of 3 to 6 nodes, {count} random trees: {missed} maps are not optimal", flush=True)
    return not missed


def gap_tables(count: int) -> bool:
    """Print what whole nodes cost against single GPUs; return whether no map of GPUs is below the bound."""
    fixed, joint, below = [], [], 0
    for seed in range(count):
        rng = random.Random(seed)
        nodes, per_node = rng.choice(((3, 2), (2, 3), (2, 4)))
        cluster = small_tree(rng, nodes=nodes, per_node=per_node)
        job = make_job(
            model=small_model(),
            num_gpus=cluster.num_gpus,
            global_batch=cluster.num_gpus * 4,
            sequence_length=1024,
        )
        by_nodes, by_gpus = [], []
        for layout in small_layouts(job):
            found = rank_map(job, cluster, layout)
            best_s = best_slot_map_s(job, cluster, layout)
            assert found.bound_s is not None
            below += best_s < found.bound_s * (1 - ROUNDING)
            by_nodes.append(found.step_time_s)
            by_gpus.append(best_s)
        fixed += [n / g - 1 for n, g in zip(by_nodes, by_gpus, strict=True)]
        joint.append(min(by_nodes) / min(by_gpus) - 1)
    print(f"\nwhole nodes against single GPUs, {count} random trees of 6 or 8 GPUs, every layout of each")
    for name, gaps in (("a given layout", fixed), ("the best layout of each", joint)):
        exact = sum(gap <= ROUNDING for gap in gaps)
        print(
            f"{name:24s} {len(gaps):5d} cases, {exact:5d} equal, mean gap {statistics.mean(gaps):7.2%}, "
            f"median {statistics.median(gaps):7.2%}, max {max(gaps):8.2%}"
        )
    print(f"maps of GPUs priced below the bound: {below}", flush=True)
    return not below


def small_layouts(job: TrainJob) -> list[Layout]:
    """Return the legal layouts of a small dense job, both order strings."""
    found = []
    for tp, cp, pp in itertools.product((1, 2, 4), (1, 2), (1, 2, 3, 4)):
        if job.num_gpus % (tp * cp * pp):
            continue
        for order in job.capabilities.orders:
            layout = make_layout(job, tp=tp, cp=cp, pp=pp, sequence_parallel=tp > 1, order=order)
            if not rules.check(job, layout):
                found.append(layout)
    return found


def milp_table(count: int, nodes: Sequence[int]) -> None:
    """Print how far the search for large allocations is from the least load of a mixed-integer program."""
    gaps = []
    for seed in range(count):
        ours, least = placement_gap(seed, nodes=nodes)
        gaps.append(ours / least - 1 if least else 0.0)
    exact = sum(gap <= 1e-6 for gap in gaps)
    print(
        f"\nload of the best order against a MILP (HiGHS), {count} random trees of {min(nodes)} to "
        f"{max(nodes)} nodes: {exact} equal, mean gap {statistics.mean(gaps):.2%}, max {max(gaps):.2%}",
        flush=True,
    )


def main() -> int:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allocations", type=int, default=200)
    parser.add_argument("--small", type=int, default=60)
    parser.add_argument("--gpus", type=int, default=12, help="trees whose GPUs are assigned one by one")
    parser.add_argument("--milp", type=int, default=30)
    options = parser.parse_args()
    good = [
        fragmented_table(options.allocations),
        small_tables(options.small),
        gap_tables(options.gpus),
    ]
    milp_table(options.milp, nodes=(8, 9, 10, 12, 15, 16))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
