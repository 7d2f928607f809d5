"""Constants of collective communication, read from ``conf/network/nccl.yaml`` into SI units."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from nest_megatron import units
from nest_megatron.cluster.fields import Fields, parse_yaml, shipped_text, sourced_values
from nest_megatron.specs.codec import from_plain

#: Order of every protocol triple below.
PROTOCOLS = ("LL", "LL128", "Simple")
LL, LL128, SIMPLE = range(3)

Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclConstants:
    """Latency and bandwidth constants (NVIDIA/nccl tuning.cc and research/network.md 1.1 to 1.3).

    Args:
        base_latency_s: algorithm -> launch latency by protocol.
        nvlink_hop_latency_s, net_hop_latency_s: algorithm -> latency of one hop by protocol.
        nvls_domain_latency_s, nvls_net_hop_latency_s: NVLS inside a domain, NVLSTree hop between domains.
        net_overhead_s: least latency of an inner hop when the ring also crosses the network.
        ll_max_one_node_bytes_per_s: generation -> cap of LL; ..._multi_node: (two, more domains).
        ring_bandwidth_share, tree_bandwidth_share: protocol -> share of the Simple bandwidth.
        tree_share_of_domain: tree algorithm bandwidth inside a domain over the ring rate.
        tree_size_correction: protocol -> bandwidth factor at 64 B, 128 B, 256 B, ...
        ring_all_reduce_simple_latency_factor: generation -> factor on a multi-node ring all-reduce.
        nvls_share_of_domain: generation -> NVLS algorithm bandwidth of 8 GPUs over the ring rate.
        nvls_min_members: generation -> fewest members per domain for NVLS.
        pat_*: parallel aggregated trees, one rank per domain.
        all_to_all_share_of_domain: all-to-all rate over the ring rate inside a domain.
        all_to_all_latency_by_remote_peers_s: peers outside the own domain -> latency.
    """

    base_latency_s: dict[str, Triple]
    nvlink_hop_latency_s: dict[str, Triple]
    net_hop_latency_s: dict[str, Triple]
    nvls_domain_latency_s: float
    nvls_net_hop_latency_s: float
    net_overhead_s: Triple
    ll_max_one_node_bytes_per_s: dict[str, float]
    ll_max_multi_node_bytes_per_s: tuple[float, float]
    ring_bandwidth_share: Triple
    tree_bandwidth_share: Triple
    tree_share_of_domain: float
    tree_size_correction: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    ring_all_reduce_simple_latency_factor: dict[str, float]
    nvls_share_of_domain: dict[str, float]
    nvls_min_members: dict[str, int]
    pat_bandwidth_share: float
    pat_hop_divisor: float
    pat_rank_latency_s: float
    all_to_all_share_of_domain: float
    all_to_all_domain_latency_s: float
    all_to_all_latency_by_remote_peers_s: dict[int, float]


def _seconds(value: Any) -> Any:
    """Convert microseconds to seconds in any nesting of mappings and lists."""
    if isinstance(value, dict):
        return {key: _seconds(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_seconds(item) for item in value]
    return units.seconds_from_us(value)


def _bytes_per_s(rates: dict[str, float]) -> dict[str, float]:
    return {key: units.bytes_per_s_from_gb_per_s(rate) for key, rate in rates.items()}


@cache
def nccl_constants() -> NcclConstants:
    """Return the shipped constants.

    Raises:
        BadInputError: the data file lost a key, a source, or has a value of the wrong type.
    """
    where = "conf/network/nccl.yaml"
    plain = parse_yaml(shipped_text("network", "nccl"), where=where)
    values = Fields.checked(sourced_values(plain, where=where), where, required=_KEYS).values
    multi = _bytes_per_s(values["ll_max_GB_per_s_multi_node"])
    fields: dict[str, Any] = {
        "base_latency_s": _seconds(values["base_latency_us"]),
        "nvlink_hop_latency_s": _seconds(values["nvlink_hop_latency_us"]),
        "net_hop_latency_s": _seconds(values["net_hop_latency_us"]),
        "nvls_domain_latency_s": _seconds(values["nvls_latency_us"]["domain"]),
        "nvls_net_hop_latency_s": _seconds(values["nvls_latency_us"]["net_hop"]),
        "net_overhead_s": _seconds(values["net_overhead_us"]),
        "ll_max_one_node_bytes_per_s": _bytes_per_s(values["ll_max_GB_per_s_one_node"]),
        "ll_max_multi_node_bytes_per_s": [multi["two_nodes"], multi["more_nodes"]],
        "pat_bandwidth_share": values["pat"]["bandwidth_share"],
        "pat_hop_divisor": values["pat"]["hop_divisor"],
        "pat_rank_latency_s": _seconds(values["pat"]["rank_latency_us"]),
        "all_to_all_share_of_domain": values["all_to_all"]["share_of_domain"],
        "all_to_all_domain_latency_s": _seconds(values["all_to_all"]["domain_latency_us"]),
        "all_to_all_latency_by_remote_peers_s": _seconds(values["all_to_all_latency_us_by_remote_peers"]),
    }
    fields |= {key: values[key] for key in _UNCHANGED}
    return from_plain(NcclConstants, fields, source=where)


#: Keys without a unit to convert.
_UNCHANGED = (
    "ring_bandwidth_share",
    "tree_bandwidth_share",
    "tree_share_of_domain",
    "tree_size_correction",
    "ring_all_reduce_simple_latency_factor",
    "nvls_share_of_domain",
    "nvls_min_members",
)
_KEYS = (
    *_UNCHANGED,
    "base_latency_us",
    "nvlink_hop_latency_us",
    "net_hop_latency_us",
    "nvls_latency_us",
    "net_overhead_us",
    "ll_max_GB_per_s_one_node",
    "ll_max_GB_per_s_multi_node",
    "pat",
    "all_to_all",
    "all_to_all_latency_us_by_remote_peers",
)
