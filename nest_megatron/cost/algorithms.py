"""The algorithms of one collective as lines: a latency, and a transfer time that grows with the bytes.

Symbols of research/network.md 1.1: n members, N domains, p members per domain, b_i usable bytes/s per GPU of
level i (b_0 = B0 inside the domain), S bytes; l_i is the load of the busiest port of level i
(``cluster.crossings``), x_i/k_i for a ring of groups that lie alike.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from typing import assert_never

from nest_megatron.cluster.crossings import Pattern
from nest_megatron.cluster.groups import GroupShape
from nest_megatron.cluster.torus import torus_level
from nest_megatron.cost.lines import CollectiveOp, Line
from nest_megatron.cost.nccl import LL, PROTOCOLS, SIMPLE, nccl_constants
from nest_megatron.cost.torus import torus_lines
from nest_megatron.errors import BadInputError, Factor, PlannerFault
from nest_megatron.specs.cluster import Cluster


class Algorithms:
    """Rates and latencies of the groups of one cluster.

    Raises:
        BadInputError: no constants for the accelerator's generation.
    """

    def __init__(self, cluster: Cluster) -> None:
        constants = nccl_constants()
        generation = cluster.accelerator.generation
        if generation not in constants.ll_max_one_node_bytes_per_s:
            raise BadInputError(
                "NEST-C08",
                "no communication constants for this accelerator generation",
                factors=[Factor("generation", generation, f"accelerator {cluster.accelerator.name}")],
                nearest=tuple(constants.ll_max_one_node_bytes_per_s),
            )
        self._constants = constants
        self._generation = generation
        self._usable_bytes_per_s = tuple(level.usable_bytes_per_s for level in cluster.levels)
        self._latency_s = tuple(level.latency_s for level in cluster.levels)
        self._busbw_table = tuple(sorted(cluster.busbw_by_group_size_bytes_per_s.items()))
        self._nvls = cluster.nvls and generation in constants.nvls_share_of_domain
        self._torus_level = torus_level(tuple(level.gpus for level in cluster.levels), cluster.torus)

    def lines(self, op: CollectiveOp, group: GroupShape, bucket: int) -> list[Line]:
        """Return every algorithm for sizes from ``2**(bucket-1)`` to ``2**bucket`` bytes."""
        torus = self._torus_level
        if torus is not None and group.torus and group.members[torus] == group.size:
            rate, hop = self._usable_bytes_per_s[torus], self._latency_s[torus]
            return list(torus_lines(op, group.size, group.torus, link_bytes_per_s=rate, hop_s=hop))
        match op:
            case "all_reduce":
                lines = [*self._ring(group, rounds=2), *self._tree(group, bucket), *self._nvls_lines(group)]
            case "all_gather" | "reduce_scatter":
                lines = [*self._ring(group, rounds=1), *self._pat(group)]
            case "all_to_all":
                lines = [self._all_to_all(group)]
            case "p2p":
                lines = list(self._p2p(group))
            case _:
                assert_never(op)
        return lines

    # -- rates -------------------------------------------------------------------------------------------

    def domain_bytes_per_s(self, members: int) -> float:
        """Return B0 of a ring of ``members`` inside level 0: the measured table, linear between points."""
        table = self._busbw_table
        if not table:
            return self._usable_bytes_per_s[0]
        index = bisect.bisect_left(table, (members, 0.0))
        if index == 0 or index == len(table):
            return table[min(index, len(table) - 1)][1]
        (below, low), (above, high) = table[index - 1], table[index]
        return low + (high - low) * (members - below) / (above - below)

    def tree_domain_bytes_per_s(self, members: int) -> float:
        """Return the algorithm bandwidth of the double binary tree in a domain: 0.46*B0 (network.md 1.2)."""
        return self._constants.tree_share_of_domain * self.domain_bytes_per_s(members)

    def nvls_bytes_per_s(self, members: int) -> float:
        """Return A0, the algorithm bandwidth of a reduction in the NVLink switch (network.md 1.2).

        Measured at 8 GPUs; larger domains keep the bus bandwidth of 8: GB200 with 72 GPUs reaches 835 to
        847 GB/s, 8 B200 838.

        Raises:
            PlannerFault: the cluster has no such switch.
        """
        if not self._nvls:
            raise PlannerFault("NEST-F13", "no reduction in the switch", factors=[Factor("nvls", self._nvls)])
        rate = self._constants.nvls_share_of_domain[self._generation] * self.domain_bytes_per_s(members)
        return rate * min(1.0, (7 / 8) * members / (members - 1))

    def pairs_domain_bytes_per_s(self, members: int) -> float:
        """Return B0a, the rate of all-to-all inside a domain: 0.95*B0 (network.md 1.2)."""
        return self._constants.all_to_all_share_of_domain * self.domain_bytes_per_s(max(members, 2))

    def inner_ring_bytes_per_s(self, group: GroupShape) -> float:
        """Return what the ring hops inside a domain or a torus allow; infinite without such a hop."""
        torus = self._torus_level
        if torus is not None:
            return self._usable_bytes_per_s[torus] * group.torus.links if group.torus else math.inf
        return self.domain_bytes_per_s(group.members[0]) if group.hops[0] else math.inf

    def uplink_s_per_byte(self, group: GroupShape, pattern: Pattern) -> float:
        """Return max_i(l_i / b_{i+1}): seconds per byte of the pattern's unit at the busiest port (1.4)."""
        loads = group.loads.of(pattern)
        first = self._torus_level or 0  # levels inside a torus are hop classes, not uplinks
        return max(
            (
                load / rate
                for load, rate in zip(loads[first:], self._usable_bytes_per_s[first + 1 :], strict=True)
            ),
            default=0.0,
        )

    def ring_bytes_per_s(self, group: GroupShape) -> float:
        """Return busbw = min(B0, b1/l1, b2/l2, ...) of a ring: min(B0, p*b1/x1, ...) of network.md 1.2."""
        outside = self.uplink_s_per_byte(group, "ring")
        return min(self.inner_ring_bytes_per_s(group), 1 / outside if outside else math.inf)

    def _ll_cap(self, group: GroupShape) -> float:
        if group.num_domains == 1:
            return self._constants.ll_max_one_node_bytes_per_s[self._generation]
        two, more = self._constants.ll_max_multi_node_bytes_per_s
        return two if group.num_domains == 2 else more

    # -- latencies ---------------------------------------------------------------------------------------

    def _inner_hop_s(self, algorithm: str, protocol: int) -> float:
        """Scale NCCL's NVLink hop so that the Simple ring hop is the cluster's level-0 latency."""
        hops = self._constants.nvlink_hop_latency_s
        return hops[algorithm][protocol] * self._latency_s[0] / hops["ring"][SIMPLE]

    def _fabric_s(self, level: int, protocol: int) -> float:
        """Return the fabric's share of one hop through ``level``; Simple pays it twice, data and flush."""
        return self._latency_s[level] * (2 if protocol == SIMPLE else 1)

    def _net_hop_s(self, group: GroupShape, algorithm: str, protocol: int) -> float:
        """Return the mean latency of the ring hops that leave a domain (network.md 1.3).

        With one rank per domain NCCL takes the tree's hop for the ring as well (its own TUNING output).
        """
        alone = group.num_domains == group.size and algorithm == "ring"
        hop = self._constants.net_hop_latency_s["tree" if alone else algorithm][protocol]
        outside = sum(group.hops[1:])
        fabric = sum(
            count * self._fabric_s(level, protocol)
            for level, count in enumerate(group.hops)
            if level and count
        )
        return hop + fabric / outside

    def _outermost(self, group: GroupShape) -> int:
        return max(level for level, count in enumerate(group.hops) if count)

    # -- algorithms --------------------------------------------------------------------------------------

    def _ring(self, group: GroupShape, *, rounds: int) -> Iterator[Line]:
        """Ring: beta = rounds*(n-1)/n * S / busbw; alpha = base + inner steps + network steps."""
        constants = self._constants
        share_of_data = rounds * (group.size - 1) / group.size
        busbw = self.ring_bytes_per_s(group)
        outside = sum(group.hops[1:])
        net_steps = rounds * (outside - 1) if outside else 0
        inner_steps = rounds * (group.size - 1) - net_steps
        for protocol, name in enumerate(PROTOCOLS):
            inner = self._inner_hop_s("ring", protocol)
            alpha = constants.base_latency_s["ring"][protocol]
            if outside:
                inner = max(inner, constants.net_overhead_s[protocol])
                alpha += net_steps * self._net_hop_s(group, "ring", protocol)
            alpha += inner_steps * inner
            if outside and rounds == 2 and protocol == SIMPLE:
                alpha *= constants.ring_all_reduce_simple_latency_factor[self._generation]
            rate = busbw * constants.ring_bandwidth_share[protocol]
            if protocol == LL:
                rate = min(rate, self._ll_cap(group))
            yield Line(f"ring/{name}", alpha, share_of_data / rate)

    def _pat(self, group: GroupShape) -> Iterator[Line]:
        """Parallel aggregated trees: one rank per domain only (NCCL tuning.cc)."""
        if group.num_domains != group.size:
            return
        constants = self._constants
        hop = self._net_hop_s(group, "pat", SIMPLE)
        alpha = constants.base_latency_s["pat"][SIMPLE] + group.size * constants.pat_rank_latency_s
        alpha += math.log2(group.size) * hop / constants.pat_hop_divisor
        rate = self.ring_bytes_per_s(group) * constants.pat_bandwidth_share
        yield Line("pat/Simple", alpha, (group.size - 1) / group.size / rate)

    def _tree_net_latency_s(self, group: GroupShape, hop_s: float, protocol: int) -> float:
        """Return 2 * log2(N) hops, each through the level at which that part of the tree lies."""
        total = 0.0
        for level in range(1, len(group.members)):
            depth = math.log2(group.members[level] / group.members[level - 1])
            total += 2 * depth * (hop_s + self._fabric_s(level, protocol))
        return total

    def _tree(self, group: GroupShape, bucket: int) -> Iterator[Line]:
        """Double binary tree over domains, chains inside: S / min(0.46*B0, b_{i+1}/l_i of the tree)."""
        if group.num_domains == 1:
            return
        constants = self._constants
        inner_members = group.members[0]
        rate = 1 / self.uplink_s_per_byte(group, "tree")
        if group.hops[0]:
            rate = min(rate, self.tree_domain_bytes_per_s(inner_members))
        for protocol, name in enumerate(PROTOCOLS):
            inner = 2 * (inner_members - 1) * self._inner_hop_s("tree", protocol)
            net = self._tree_net_latency_s(group, constants.net_hop_latency_s["tree"][protocol], protocol)
            alpha = constants.base_latency_s["tree"][protocol] + inner + net
            protocol_rate = rate * constants.tree_bandwidth_share[protocol]
            if protocol == LL:
                protocol_rate = min(protocol_rate, self._ll_cap(group))
            yield self._corrected(f"tree/{name}", alpha, 1 / protocol_rate, protocol, bucket)

    def _corrected(self, name: str, alpha_s: float, s_per_byte: float, protocol: int, bucket: int) -> Line:
        """Apply NCCL's bandwidth factor by size, with the time linear between powers of two.

        NCCL steps at each power of two, which would make some larger messages faster than smaller ones.
        """
        table = self._constants.tree_size_correction[protocol]
        first = 6  # the table starts at 64 bytes = 2**6
        low, high = 2.0 ** (bucket - 1), 2.0**bucket
        factor_low, factor_high = (
            table[min(max(exponent - first, 0), len(table) - 1)] for exponent in (bucket - 1, bucket)
        )
        time_low, time_high = low * s_per_byte / factor_low, high * s_per_byte / factor_high
        slope = (time_high - time_low) / (high - low)
        return Line(name, alpha_s, slope, time_low - slope * low)

    def _nvls_lines(self, group: GroupShape) -> Iterator[Line]:
        """NVLS in one domain: S / A0; NVLSTree over domains: S / min(A0, uplinks) (network.md 1.2)."""
        constants = self._constants
        members = group.members[0]
        if not self._nvls or members < constants.nvls_min_members[self._generation]:
            return
        rate = self.nvls_bytes_per_s(members)
        if group.num_domains == 1:
            yield Line("nvls/Simple", constants.nvls_domain_latency_s, 1 / rate)
            return
        net = self._tree_net_latency_s(group, constants.nvls_net_hop_latency_s, SIMPLE)
        rate = min(rate, 1 / self.uplink_s_per_byte(group, "tree"))
        yield Line("nvlstree/Simple", constants.nvls_domain_latency_s + net, 1 / rate)

    def _all_to_all(self, group: GroupShape) -> Line:
        """Direct pairs: max_i s*l_i/b_{i+1}, l_i = (n-k_i)/n, and s*(p-1)/n / (0.95*B0) inside (1.2)."""
        constants = self._constants
        size, inner = group.size, group.members[0]
        inside = self.pairs_domain_bytes_per_s(inner)
        slope = max((inner - 1) / size / inside, self.uplink_s_per_byte(group, "pairs"))
        if group.num_domains == 1:
            return Line("pairs/Simple", constants.all_to_all_domain_latency_s, slope)
        alpha = self._peers_latency_s(size - inner) + self._latency_s[self._outermost(group)]
        return Line("pairs/Simple", alpha, slope)

    def _peers_latency_s(self, peers: int) -> float:
        """Interpolate the measured 0-byte latency by remote peers; beyond the table it is proportional."""
        points = sorted(self._constants.all_to_all_latency_by_remote_peers_s.items())
        last_peers, last_s = points[-1]
        if peers <= points[0][0]:
            return points[0][1]
        if peers >= last_peers:
            return last_s * peers / last_peers
        index = bisect.bisect_left(points, (peers, 0.0))
        (below, low), (above, high) = points[index - 1], points[index]
        return low + (high - low) * (peers - below) / (above - below)

    def _p2p(self, group: GroupShape) -> Iterator[Line]:
        """Message between ring neighbours, all members sending: S / min(path), the slowest pair counts."""
        constants = self._constants
        outermost = self._outermost(group)
        inside = 1 / self.domain_bytes_per_s(2) if group.hops[0] else 0.0
        rate = 1 / max(inside, self.uplink_s_per_byte(group, "message"))
        for protocol in (LL, SIMPLE):
            if outermost == 0:
                hop = self._inner_hop_s("ring", protocol)
            else:
                hop = constants.net_hop_latency_s["ring"][protocol] + self._fabric_s(outermost, protocol)
            share = rate * constants.ring_bandwidth_share[protocol]
            if protocol == LL:
                share = min(share, self._ll_cap(group))
            yield Line(
                f"pair/{PROTOCOLS[protocol]}", constants.base_latency_s["ring"][protocol] + hop, 1 / share
            )
