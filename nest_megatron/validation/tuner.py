"""Ring bandwidths and latencies against those that NCCL's tuner reports for itself (network.md 0.1)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from nest_megatron import units
from nest_megatron.cluster.groups import group_shape
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cost.collectives import CollectiveModel
from nest_megatron.cost.lines import CollectiveOp
from nest_megatron.cost.nccl import SIMPLE, nccl_constants
from nest_megatron.specs.cluster import Cluster

_ANY_LARGE_BYTES = units.GIB


@dataclass(frozen=True, slots=True)
class Difference:
    """Predicted over reported, minus one, of one point."""

    bandwidth: float
    latency: float


def tuner_cluster() -> Cluster:
    """Return the 32 H100 nodes as NCCL plans them: 48 GB/s per NIC, its own constants, no fabric latency.

    Its inner bandwidth is never the limit of the reported points.
    """
    base = load_cluster("dgx-h100", num_gpus=256)
    hop_s = nccl_constants().nvlink_hop_latency_s["ring"][SIMPLE]
    inner = dataclasses.replace(base.levels[0], efficiency=1.0, latency_s=units.Seconds(hop_s))
    outer = dataclasses.replace(base.levels[1], latency_s=units.seconds_from_us(0))
    return dataclasses.replace(base, levels=(inner, outer))


def ring_simple_differences(path: Path) -> list[Difference]:
    """Compare every Ring/Simple point of ``collectives.json``."""
    cluster = tuner_cluster()
    model = CollectiveModel(cluster)
    # The tuner prints its table before it multiplies the latency of a multi-node ring all-reduce.
    factor = nccl_constants().ring_all_reduce_simple_latency_factor[cluster.accelerator.generation]
    points = json.loads(path.read_text(encoding="utf-8"))["nccl_tuning_model_points"]["points"]
    found = []
    for point in points:
        if (point["algo"], point["proto"]) != ("Ring", "Simple"):
            continue
        per_node = point["ranks_per_node"]
        group = group_shape(cluster, per_node * point["nodes"], cluster.gpus_per_node // per_node)
        op: CollectiveOp = "all_reduce" if point["collective"] == "all_reduce" else "all_gather"
        terms = model.by_algorithm(op, group, _ANY_LARGE_BYTES)["ring/Simple"]
        reported_bytes_per_s = units.bytes_per_s_from_gb_per_s(point["algbw_GBs"])
        reported_s = units.seconds_from_us(point["latency_us"]) * (factor if op == "all_reduce" else 1.0)
        found.append(
            Difference(
                bandwidth=1 / terms.beta_s_per_byte / reported_bytes_per_s - 1,
                latency=terms.alpha_s / reported_s - 1,
            )
        )
    return found
