"""The hierarchical closed form against 1,080 results of ASTRA-sim (research/network.md section 2)."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nest_megatron import units
from nest_megatron.cost.hierarchical import HierarchicalOp, Stage, hierarchical_s

#: (collective, chunks) -> largest relative difference that network.md 0.4 and section 2 state.
AGREEMENT: Mapping[tuple[HierarchicalOp, int], float] = {
    ("all_gather", 1): 0.002,
    ("all_gather", 4): 0.002,
    ("all_gather", 16): 0.002,
    ("reduce_scatter", 1): 0.02,
    ("reduce_scatter", 4): 0.02,
    ("reduce_scatter", 16): 0.02,
    ("all_reduce", 1): 0.01,
    ("all_reduce", 4): 0.22,
    ("all_reduce", 16): 0.09,
}

#: The simulator counts 3 bytes of local memory per reduced byte at 3,350 of its GB/s, which are GiB/s.
REDUCE_S_PER_BYTE = 3 / (3350 * units.GIB)
#: Latencies that the simulator counts per hop: a switch has two links.
LINKS_PER_HOP = {"Switch": 2, "Ring": 1}


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest |closed form / simulator - 1| of ``count`` results."""

    count: int
    worst: float


def worst_differences(path: Path) -> dict[tuple[HierarchicalOp, int], Difference]:
    """Return (collective, chunks) -> largest difference over all topologies and sizes of the data file."""
    found: dict[tuple[HierarchicalOp, int], list[float]] = defaultdict(list)
    for point in json.loads(path.read_text(encoding="utf-8"))["points"]:
        predicted_s = _closed_form_s(point)
        measured_s = units.seconds_from_us(point["time_us"])
        found[point["collective"], point["chunks"]].append(abs(predicted_s / measured_s - 1))
    return {key: Difference(len(values), max(values)) for key, values in found.items()}


def _closed_form_s(point: Mapping[str, Any]) -> float:
    dims = zip(point["dims"], point["kind"], point["bw_GiBps_per_npu"], point["latency_ns"], strict=True)
    stages = [
        Stage(
            members=members,
            bytes_per_s=gib_per_s * units.GIB,
            hop_s=LINKS_PER_HOP[kind] * latency_ns * 1e-9,
        )
        for members, kind, gib_per_s, latency_ns in dims
    ]
    # The simulator's all-gather counts what one rank brings, not the gathered size.
    ranks = math.prod(point["dims"]) if point["collective"] == "all_gather" else 1
    return hierarchical_s(
        point["collective"],
        point["bytes"] * ranks,
        stages,
        chunks=point["chunks"],
        reduce_s_per_byte=REDUCE_S_PER_BYTE,
    )
