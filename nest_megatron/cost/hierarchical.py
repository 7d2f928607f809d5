"""A hierarchical (BlueConnect-like) collective: one ring per level, chunks pipelined over the levels.

NCCL does not run this algorithm, so no plan is priced with it.  It serves two purposes: it is checked against
ASTRA-sim's analytical backend, which does run it, and it says what a multi-level algorithm would gain over
NCCL's ring and trees on the same group.  Formula: research/network.md section 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nest_megatron.cluster.groups import GroupShape
from nest_megatron.errors import Factor, PlannerFault
from nest_megatron.specs.cluster import Cluster

HierarchicalOp = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The ring of one level.

    Args:
        members: ranks that it joins.
        bytes_per_s: rate of one rank, one direction.
        hop_s: latency of one step.
    """

    members: int
    bytes_per_s: float
    hop_s: float


def hierarchical_s(
    op: HierarchicalOp,
    num_bytes: float,
    stages: Sequence[Stage],
    *,
    chunks: int,
    reduce_s_per_byte: float = 0.0,
) -> float:
    """Return T = sum(tau_d) + (chunks - 1) * max(tau_d), seconds.

    tau_d is the time of one chunk in stage d, innermost first: (n_d-1)/n_d of the stage's bytes over its
    rate, plus n_d - 1 hops, plus the local reduction of what arrives.  An all-reduce pays the way twice and
    the reduction once, since its way back gathers.  Each stage hands 1/n_d of its bytes to the next one.

    Args:
        num_bytes: full buffer (all-reduce) or full gathered size (all-gather, reduce-scatter).
        chunks: parts of the buffer that follow each other through the stages.
        reduce_s_per_byte: time to reduce one received byte in local memory.
    """
    if chunks < 1 or num_bytes < 0:
        raise PlannerFault(
            "NEST-F11",
            "a collective needs a positive number of chunks and no negative size",
            factors=[Factor("chunks", chunks), Factor("num_bytes", num_bytes)],
        )
    rounds = 2 if op == "all_reduce" else 1
    reduces = op != "all_gather"
    left = num_bytes
    times = []
    for stage in stages:
        moved = (stage.members - 1) / stage.members * left / chunks
        transfer = rounds * (moved / stage.bytes_per_s + (stage.members - 1) * stage.hop_s)
        times.append(transfer + reduces * moved * reduce_s_per_byte)
        left /= stage.members
    return sum(times) + (chunks - 1) * max(times, default=0.0)


def stages_of(cluster: Cluster, shape: GroupShape) -> list[Stage]:
    """Return one stage per level of ``cluster`` on which members of the group meet.

    A stage moves its share through all members of a unit at once, so each has its full rate per GPU.

    Raises:
        PlannerFault: the group lies unevenly, so that the stages have no whole number of members.
    """
    steps = itertools.pairwise((1, *shape.members))
    if shape.num_domains * shape.members[0] != shape.size or any(outer % inner for inner, outer in steps):
        raise PlannerFault(
            "NEST-F14",
            "a hierarchical collective needs equal parts on every level",
            factors=[Factor("members", str(shape.members)), Factor("domains", shape.num_domains)],
        )
    stages = []
    inside = 1
    for level, members in zip(cluster.levels, shape.members, strict=True):
        if members > inside:
            stages.append(
                Stage(members=members // inside, bytes_per_s=level.usable_bytes_per_s, hop_s=level.latency_s)
            )
        inside = members
    return stages
