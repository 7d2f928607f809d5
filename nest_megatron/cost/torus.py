"""Collectives inside a torus, by the axis formula of research/network.md 1.5."""

from __future__ import annotations

from collections.abc import Iterator

from nest_megatron.cluster.torus import TorusShape
from nest_megatron.cost.lines import CollectiveOp, Line


def torus_lines(
    op: CollectiveOp, size: int, torus: TorusShape, *, link_bytes_per_s: float, hop_s: float
) -> Iterator[Line]:
    """Yield the line of ``op`` on a group inside one torus.

    All-gather: (n-1)/n * S over the links of all spanned axes, each member's shards travelling half way round
    every axis (alpha = hops times ``hop_s``).  All-reduce is a reduce-scatter and an all-gather.

    Args:
        link_bytes_per_s: usable rate of one link in one direction.
        hop_s: latency of one link.
    """
    match op:
        case "all_reduce" | "all_gather" | "reduce_scatter":
            rounds = 2 if op == "all_reduce" else 1
            slope = rounds * (size - 1) / size / (torus.links * link_bytes_per_s)
            yield Line("torus/axes", rounds * torus.hops * hop_s, slope)
        case "all_to_all":
            yield Line("torus/pairs", torus.hops * hop_s, torus.pairs / link_bytes_per_s)
        case "p2p":
            yield Line("torus/pair", torus.message_hops * hop_s, torus.message / link_bytes_per_s)
