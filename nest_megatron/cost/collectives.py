"""Time of a collective: the fastest algorithm on the group's real place in the network."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nest_megatron.cluster.groups import GroupShape
from nest_megatron.cost.algorithms import Algorithms
from nest_megatron.cost.lines import CollectiveOp, Line
from nest_megatron.errors import Factor, PlannerFault
from nest_megatron.specs.cluster import Cluster

#: c of T = alpha + beta + c*sqrt(alpha*beta): the pipeline needs time to fill (research/network.md 1.6).
PIPELINE_FILL = 0.75


@dataclass(frozen=True, slots=True)
class CollectiveTerms:
    """Latency and inverse bandwidth of one collective on one group, at one message size.

    Args:
        alpha_s: time before the first byte counts.
        beta_s_per_byte: seconds per byte of the op's own byte convention (``CollectiveModel``).
    """

    alpha_s: float
    beta_s_per_byte: float

    def time_s(self, num_bytes: float) -> float:
        """Return T = alpha + beta + 0.75*sqrt(alpha*beta), beta = beta_s_per_byte * num_bytes."""
        return _time_s(self.alpha_s, self.beta_s_per_byte * num_bytes)


FREE = CollectiveTerms(0.0, 0.0)


def _time_s(alpha_s: float, beta_s: float) -> float:
    return alpha_s + beta_s + PIPELINE_FILL * math.sqrt(alpha_s * beta_s)


class CollectiveModel:
    """Prices collectives on one cluster.

    Bytes (research/network.md 1.1): all_reduce = full buffer; all_gather, reduce_scatter = full gathered
    size; all_to_all = send buffer of one rank; p2p = one message between neighbours in rank order.
    All symmetric groups of a parallel axis communicate at the same time, as they do in Megatron.

    Raises:
        BadInputError: no communication constants for the accelerator's generation.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._algorithms = Algorithms(cluster)
        self._lines: dict[tuple[CollectiveOp, GroupShape, int], tuple[Line, ...]] = {}

    def terms(self, op: CollectiveOp, group: GroupShape, num_bytes: float) -> CollectiveTerms:
        """Return the terms of the algorithm that is fastest at ``num_bytes``; a group of one is free.

        Raises:
            PlannerFault: a negative number of bytes.
        """
        if group.size == 1:
            return FREE
        lines = self._bucket(op, group, num_bytes)
        line = lines[0]
        if len(lines) > 1:
            line = min(lines, key=lambda one: _time_s(one.alpha_s, one.beta_s(num_bytes)))
        if line.intercept_s and num_bytes:
            return CollectiveTerms(line.alpha_s, line.beta_s(num_bytes) / num_bytes)
        return CollectiveTerms(line.alpha_s, line.slope_s_per_byte)

    def time_s(self, op: CollectiveOp, num_bytes: float, group: GroupShape) -> float:
        """Return the time of the fastest algorithm; 0 for a group of one."""
        return self.terms(op, group, num_bytes).time_s(num_bytes)

    def by_algorithm(
        self, op: CollectiveOp, group: GroupShape, num_bytes: float
    ) -> dict[str, CollectiveTerms]:
        """Return the terms of every algorithm and protocol, for reports: ``ring/Simple`` -> terms."""
        if group.size == 1:
            return {}
        lines = self._algorithms.lines(op, group, _bucket_of(num_bytes))
        size = max(num_bytes, 1)
        return {line.name: CollectiveTerms(line.alpha_s, line.beta_s(size) / size) for line in lines}

    def _bucket(self, op: CollectiveOp, group: GroupShape, num_bytes: float) -> tuple[Line, ...]:
        bucket = _bucket_of(num_bytes)
        key = (op, group, bucket)
        lines = self._lines.get(key)
        if lines is None:
            lines = _undominated(self._algorithms.lines(op, group, bucket), bucket)
            self._lines[key] = lines
        return lines


def _bucket_of(num_bytes: float) -> int:
    """Return b with 2**(b-1) <= num_bytes < 2**b; 0 and 1 byte share the first bucket."""
    if num_bytes < 0:
        raise PlannerFault(
            "NEST-F11", "a collective of negative size", factors=[Factor("num_bytes", num_bytes)]
        )
    return max(1, int(num_bytes).bit_length())


def _undominated(lines: list[Line], bucket: int) -> tuple[Line, ...]:
    """Drop every line that another one beats in latency and, all over the bucket, in transfer time."""
    low, high = 2.0 ** (bucket - 1), 2.0**bucket

    def cost(line: Line) -> tuple[float, float, float]:
        return line.alpha_s, line.beta_s(low), line.beta_s(high)

    kept: list[Line] = []
    for line in sorted(lines, key=cost):
        if not any(all(a <= b for a, b in zip(cost(other), cost(line), strict=True)) for other in kept):
            kept.append(line)
    return tuple(kept)
