"""The cluster a record ran on: a shipped one, with the network that the record or its source names."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from nest_megatron.cluster.load import load_cluster
from nest_megatron.specs.cluster import Cluster
from nest_megatron.units import BITS_PER_BYTE, bytes_per_s_from_gbit_per_s
from nest_megatron.validation.stacks import cluster_of, network_of

#: GPUs of an NVL72 rack, and how many of them runs of a power of two use.
RACK_GPUS, USED_RACK_GPUS = 72, 64
#: Printed forms of a node's network: cards x Gb/s each, Gb/s or GB/s per GPU, Gb/s per node.
_CARDS = re.compile(r"(\d+) ?[x*] ?(?:(?:BF3 )?ConnectX[^,;+]*?)?(\d{3,4}) ?Gb")
_PER_GPU = re.compile(r"(\d+) ?(Gb|GB)/s per GPU")
_PER_NODE = re.compile(r"(\d+) ?Gb(?:/s|ps)(?: per node| node-node|$)")


def record_cluster(record: dict[str, Any]) -> Cluster | None:
    """Return the cluster of ``record``; None when nothing is known about its accelerator."""
    name = cluster_of(str(record.get("accelerator") or ""))
    if name is None:
        return None
    cluster = load_cluster(name)
    gpus, per_node = record.get("num_gpus"), record.get("gpus_per_node")
    if per_node and gpus and gpus >= per_node and cluster.gpus_per_node % per_node == 0:
        cluster = load_cluster(name, ranks_per_node=per_node)
    if gpus and (gpus < cluster.gpus_per_node or gpus % cluster.gpus_per_node == 0):
        cluster = load_cluster(name, num_gpus=gpus, ranks_per_node=min(gpus, cluster.gpus_per_node))
    return _with_network(_even_racks(cluster), record)


def _even_racks(cluster: Cluster) -> Cluster:
    """Return ``cluster`` with 64 of the 72 GPUs of each rack in use, where the job fills such racks.

    Groups of a power of two straddle racks of 72; public runs leave 8 GPUs per rack idle for that reason
    (research/network.md 1.4).
    """
    inner = cluster.levels[0].gpus
    if inner != RACK_GPUS or cluster.num_gpus <= inner or cluster.num_gpus % USED_RACK_GPUS:
        return cluster
    levels = tuple(
        dataclasses.replace(level, gpus=level.gpus * USED_RACK_GPUS // RACK_GPUS) for level in cluster.levels
    )
    return dataclasses.replace(cluster, levels=levels)


def _with_network(cluster: Cluster, record: dict[str, Any]) -> Cluster:
    """Return ``cluster`` with the line rate per GPU that the record prints, else that of its source."""
    per_node = int(record.get("gpus_per_node") or cluster.gpus_per_node)
    gbit = printed_gbit_per_s(str(record.get("interconnect") or ""), per_node)
    if gbit is None:
        gbit = network_of(f"{record.get('source')} {record.get('accelerator')}")
        gbit = None if gbit is None else gbit / per_node
    if gbit is None:
        return cluster
    rate = bytes_per_s_from_gbit_per_s(gbit)
    levels = (
        cluster.levels[0],
        *(dataclasses.replace(level, bandwidth_bytes_per_s=rate) for level in cluster.levels[1:]),
    )
    return dataclasses.replace(cluster, levels=levels)


def printed_gbit_per_s(interconnect: str, gpus_per_node: int) -> float | None:
    """Return the line rate per GPU that a record's interconnect text names, Gb/s; None when it names none."""
    text = interconnect.rsplit("Compute:", 1)[-1]
    per_gpu = _PER_GPU.search(text)
    if per_gpu:
        return float(per_gpu.group(1)) * (BITS_PER_BYTE if per_gpu.group(2) == "GB" else 1)
    cards = _CARDS.search(text)
    if cards:
        return int(cards.group(1)) * float(cards.group(2)) / gpus_per_node
    per_node = _PER_NODE.search(text)
    return float(per_node.group(1)) / gpus_per_node if per_node else None
