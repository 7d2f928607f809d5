"""Print the check of the network model: public logs, NCCL's tuner, ASTRA-sim, and the cost of one price.

    python scripts/bench_network.py --data ../shared/data/network [--logs]

Tables of docs/network.md.  Errors are |ln(predicted / measured)|.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

import numpy as np

from nest_megatron.cluster.groups import group_shape, worst_shape
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cluster.slots import slot_tree
from nest_megatron.cost.collectives import CollectiveModel
from nest_megatron.cost.hierarchical import hierarchical_s, stages_of
from nest_megatron.validation.astra import AGREEMENT, worst_differences
from nest_megatron.validation.network import BANDS, Point, compare, error_band
from nest_megatron.validation.tuner import ring_simple_differences

GIB = 1024**3
#: TP 8, DP 128 of 1,024 GPUs on 2:1 leaves, and a ring of all of them.
GROUPS = ((128, 8), (4, 256), (1024, 1))
REPEATS = 20


def line(name: str, points: list[Point]) -> str:
    """Return count, median and p90 before, and median after one calibration point."""
    before = error_band(p.log_error for p in points)
    after = error_band(p.calibrated_log_error for p in points)
    assert before is not None
    tail = f"{after.median:6.3f}" if after else "     -"
    return f"  {name:58s} {before.count:4d}  {before.median:6.3f} {before.p90:6.3f}   {tail}"


def table(title: str, points: Iterable[Point], key: Callable[[Point], Hashable]) -> None:
    """Print one line per value of ``key``."""
    groups: dict[Hashable, list[Point]] = defaultdict(list)
    for point in points:
        groups[key(point)].append(point)
    print(f"{title:60s}    n  median    p90    after one point")
    for name, chosen in groups.items():
        print(line(str(name), chosen))


def logs(path: Path, *, each: bool) -> None:
    """Print the errors by size class, operation and machine."""
    points = compare(path)
    main = [p for p in points if p.in_bands]
    table("public logs, 580 points of network.md 1.6", main, lambda p: p.size_class)
    for name, limit in BANDS.items():
        print(f"  limit {name}: {limit.median:.3f} {limit.p90:.3f}   {limit.calibrated_median:.3f}")
    table("by operation and size", main, lambda p: f"{p.op} {p.size_class}")
    table("by machine and size", main, lambda p: f"{p.base} {p.size_class}")
    table("outside the 580 points", [p for p in points if not p.in_bands], lambda p: f"{p.op} {p.size_class}")
    if each:
        table("by log", points, lambda p: f"{p.log} {p.num_ranks} {p.size_class}")


def tuner(path: Path) -> None:
    """Print the largest difference to NCCL's own ring numbers."""
    differences = ring_simple_differences(path)
    bandwidth = max(abs(d.bandwidth) for d in differences)
    latency = max(abs(d.latency) for d in differences)
    print(
        f"NCCL tuner, ring/Simple, {len(differences)} points: bandwidth {bandwidth:.2%}, "
        f"latency {latency:.2%}"
    )


def astra(path: Path) -> None:
    """Print the largest difference to ASTRA-sim by collective and number of chunks."""
    print("ASTRA-sim, hierarchical closed form      n   largest   stated")
    for (op, chunks), row in worst_differences(path).items():
        stated = AGREEMENT[op, chunks]
        print(f"  {op:16s} {chunks:3d} chunks       {row.count:4d}   {row.worst:7.2%}   {stated:6.1%}")


def prices() -> None:
    """Print what a hierarchical all-reduce would take beside NCCL's, and how long one price takes."""
    cluster = load_cluster("dgx-h100-2to1", num_gpus=1024)
    model = CollectiveModel(cluster)
    print("all-reduce of 1 GiB, 1,024 H100 on 2:1 leaves, ms: NCCL, hierarchical in 16 chunks")
    for size, stride in GROUPS:
        shape = group_shape(cluster, size, stride)
        nccl_s = model.time_s("all_reduce", GIB, shape)
        other_s = hierarchical_s("all_reduce", GIB, stages_of(cluster, shape), chunks=16)
        print(f"  {size:5d} ranks, stride {stride:4d}: {nccl_s * 1e3:7.2f} {other_s * 1e3:7.2f}")
    tree = slot_tree(cluster)
    order = np.random.default_rng(0).permutation(128)
    slot_of_rank = (order[:, None] * 8 + np.arange(8)).ravel()
    groups = slot_of_rank[np.arange(8)[:, None] + np.arange(128) * 8]
    shape = worst_shape(tree, groups)
    model.time_s("all_reduce", GIB, shape)
    timed = {
        "shape of 8 groups of 128 in a shuffled order, counted": lambda: worst_shape(tree, groups),
        "price of a known shape": lambda: model.time_s("all_reduce", GIB, shape),
    }
    for name, run in timed.items():
        taken = []
        for _ in range(REPEATS):
            started = time.process_time()
            run()
            taken.append(time.process_time() - started)
        print(f"  {name}: {min(taken) * 1e6:.0f} us")


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with collectives.json")
    parser.add_argument("--logs", action="store_true", help="also one line per log")
    arguments = parser.parse_args()
    logs(arguments.data / "collectives.json", each=arguments.logs)
    tuner(arguments.data / "collectives.json")
    astra(arguments.data / "astra_reference.json")
    prices()


if __name__ == "__main__":
    main()
