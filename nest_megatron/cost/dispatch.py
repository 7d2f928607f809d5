"""Seconds of one expert dispatch or combine by one copy per destination (DeepEP, HybridEP).

Source of every formula: research/moe.md section 3, item 1.
"""

from __future__ import annotations

from nest_megatron.cluster.groups import GroupShape
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.constants import StepConstants
from nest_megatron.specs.model import MoESpec


class DispatchModel:
    """Prices the flex dispatcher's token exchange on one cluster; all-to-all is an ordinary collective."""

    def __init__(self, cluster: Cluster, time: StepConstants) -> None:
        self._levels = cluster.levels
        self._time = time

    def flex_s(self, token_bytes: float, moe: MoESpec, group: GroupShape) -> float:
        """Return seconds when a token travels once per destination domain and fans out inside it.

        Of D domains a token with k experts hits D*(1-(1-1/D)^k), at most ``group_topk``; of e ranks
        e*(1-(1-1/e)^k).

        Args:
            token_bytes: hidden states of the tokens of one rank, once.
        """
        time, ranks, domains = self._time, group.size, group.num_domains
        hit_domains = domains * (1 - (1 - 1 / domains) ** moe.top_k)
        if moe.group_topk:
            hit_domains = min(hit_domains, moe.group_topk)
        hit_ranks = ranks * (1 - (1 - 1 / ranks) ** moe.top_k)
        inside = self._levels[0].usable_bytes_per_s * time.flex_domain_share
        seconds = token_bytes * hit_ranks * (1 - 1 / ranks) / inside
        # Copies spread evenly over the domains, so each port carries its share of the exchange.
        for load, level in zip(group.loads.pairs, self._levels[1:], strict=True):
            rate = level.usable_bytes_per_s * time.flex_network_share
            seconds = max(seconds, token_bytes * hit_domains * load / rate)
        return time.dispatch_start_s + seconds
