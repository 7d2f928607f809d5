"""Slow, obvious twin of the compiled solver: same names, same signatures, same results.

Index letters: p pipeline ranks, v chunks per rank, m micro-batches, L layers, C candidates, N nodes.
Chunk j (0 <= j < p*v, model order) runs on pipeline rank j % p.  Everything here is a number: bytes are
int64, times float64 seconds; the meaning of a coefficient is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cython_dp.columns import (
    NUM_FEATURES,
    NUM_KINDS,
    RECOMPUTE_BLOCK,
    RECOMPUTE_UNIFORM,
    Column,
    Feature,
    Param,
)

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

#: Bounds are scaled by this, so that rounding never lifts them above the simulated value.
BOUND_SAFETY = 1.0 - 1e-9
#: Share of a rank's per-micro-batch busy time that can hide its gradient
#: synchronisation (time_model.md section 2).
DP_WINDOW_SHARE = 0.8
#: Weight of sqrt(alpha * beta) in a collective's time (network.md 0.3).
FILL_WEIGHT = 0.75


def in_flight(p: int, v: int, m: int, group: int, rank: int) -> list[int]:
    """Return the forwards alive at the peak on ``rank``, per chunk of that rank (memory_model.md 2.4)."""
    if v == 1:
        return [min(m, p - rank)]
    alive = min(m * v, 2 * (p - rank - 1) + (v - 1) * group + 1)
    counts = [0] * v
    for number in range(alive):
        counts[(number // group) % v] += 1
    return counts


def chunk_layers(
    size: int, start: int, prefix: Int32, mode: int, num_recompute: int
) -> tuple[list[int], list[int], int]:
    """Return (plain layers per kind, recomputed layers per kind, checkpointed units) of one chunk."""
    if mode == RECOMPUTE_UNIFORM and size:
        again, units = size, -(-size // num_recompute)
    elif mode == RECOMPUTE_BLOCK:
        again = units = min(num_recompute, size)
    else:
        again = units = 0
    first, end = start + again, start + size
    recomputed = [int(prefix[k][first] - prefix[k][start]) for k in range(NUM_KINDS)]
    plain = [int(prefix[k][end] - prefix[k][first]) for k in range(NUM_KINDS)]
    return plain, recomputed, units


def stage_features(
    sizes: Sequence[int] | Int32,
    prefix: Int32,
    p: int,
    v: int,
    m: int,
    group: int,
    mode: int,
    num_recompute: int,
) -> Int64:
    """Return the (p, NUM_FEATURES) counts that every linear memory term is a product of.

    Args:
        prefix: (NUM_KINDS, L + 1) layers of each kind before each layer.
    """
    features = np.zeros((p, NUM_FEATURES), dtype=np.int64)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + int(size))
    for rank in range(p):
        alive = in_flight(p, v, m, group, rank)
        row = features[rank]
        row[Feature.ONE] = 1
        row[Feature.FIRST] = int(rank == 0)
        row[Feature.LAST] = int(rank == p - 1)
        row[Feature.LIVE_CHUNKS] = sum(alive)
        for chunk in range(v):
            j = chunk * p + rank
            size = int(sizes[j])
            plain, recomputed, units = chunk_layers(size, starts[j], prefix, mode, num_recompute)
            row[Feature.LIVE_UNITS] += alive[chunk] * units
            row[Feature.LIVE_EDGES] += alive[chunk] if size else 0
            if j == 0:
                row[Feature.LIVE_FIRST] += alive[chunk]
            unit = min(size, num_recompute) if mode == RECOMPUTE_UNIFORM else 1
            for k in range(NUM_KINDS):
                row[Feature.HELD + k] += plain[k] + recomputed[k]
                row[Feature.LIVE + k] += alive[chunk] * plain[k]
                if recomputed[k]:
                    row[Feature.UNIT + k] = max(row[Feature.UNIT + k], unit)
        held = row[Feature.HELD : Feature.HELD + NUM_KINDS]
        row[Feature.HAS : Feature.HAS + NUM_KINDS] = held > 0
        row[Feature.ANY] = int(held.any())
    return features


def chunk_times(
    sizes: Sequence[int] | Int32,
    prefix: Int32,
    p: int,
    v: int,
    mode: int,
    num_recompute: int,
    times: Sequence[float],
) -> tuple[list[float], list[float]]:
    """Return forward and backward seconds of every chunk for one micro-batch."""
    forward, backward = [], []
    start = 0
    for j in range(p * v):
        size = int(sizes[j])
        plain, recomputed, _ = chunk_layers(size, start, prefix, mode, num_recompute)
        f = b = 0.0
        for k in range(NUM_KINDS):
            layers = plain[k] + recomputed[k]
            f += layers * times[Column.FORWARD + k]
            b += layers * times[Column.BACKWARD + k] + recomputed[k] * times[Column.AGAIN + k]
        if j == 0:
            f += times[Column.F_FIRST]
            b += times[Column.B_FIRST]
        if j == p * v - 1:
            f += times[Column.F_LAST]
            b += times[Column.B_LAST]
        forward.append(f)
        backward.append(b)
        start += size
    return forward, backward


def schedule_order(p: int, v: int, m: int, group: int, rank: int) -> list[tuple[bool, int, int]]:
    """Return the (is_forward, chunk of the rank, micro-batch) sequence of ``rank``: 1F1B, or interleaved."""
    total = m * v
    forwards: list[tuple[int, int]] = []
    first = 0
    while first < m:
        members = range(first, min(m, first + (group if v > 1 else m)))
        forwards.extend((chunk, micro) for chunk in range(v) for micro in members)
        first = members.stop
    warmup = min(total, p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * group)
    order = [(True, chunk, micro) for chunk, micro in forwards[:warmup]]
    for number in range(total):
        if number + warmup < total:
            chunk, micro = forwards[number + warmup]
            order.append((True, chunk, micro))
        chunk, micro = forwards[number]
        order.append((False, v - 1 - chunk, micro))
    return order


def simulate(
    forward: Sequence[float], backward: Sequence[float], p: int, v: int, m: int, group: int, p2p_s: float
) -> float:
    """Return the makespan in seconds of one step's pipeline, by event simulation.

    Args:
        forward, backward: (p*v,) seconds per chunk and micro-batch.
        p2p_s: latency from one chunk to the next when they lie on different ranks.

    Raises:
        RuntimeError: the schedule deadlocks (our own invariant).
    """
    orders = [schedule_order(p, v, m, group, rank) for rank in range(p)]
    chunks = p * v
    end_f = [[-1.0] * m for _ in range(chunks)]
    end_b = [[-1.0] * m for _ in range(chunks)]
    clock = [0.0] * p
    position = [0] * p
    hop = p2p_s if p > 1 else 0.0
    left = sum(len(order) for order in orders)
    while left:
        before = left
        for rank in range(p):
            while position[rank] < len(orders[rank]):
                is_forward, chunk, micro = orders[rank][position[rank]]
                j = chunk * p + rank
                if is_forward:
                    ready = 0.0 if j == 0 else end_f[j - 1][micro]
                    if j and ready < 0:
                        break
                    ready = ready + hop if j else 0.0
                    clock[rank] = max(clock[rank], ready) + forward[j]
                    end_f[j][micro] = clock[rank]
                else:
                    ready = end_f[j][micro] if j == chunks - 1 else end_b[j + 1][micro]
                    if ready < 0:
                        break
                    ready = ready if j == chunks - 1 else ready + hop
                    clock[rank] = max(clock[rank], ready) + backward[j]
                    end_b[j][micro] = clock[rank]
                position[rank] += 1
                left -= 1
        if left == before:
            raise RuntimeError(f"pipeline schedule deadlocks: p={p} v={v} m={m} group={group}")
    return max(clock)


def busy_time(forward: Sequence[float], backward: Sequence[float], p: int, v: int, rank: int) -> float:
    """Return the seconds ``rank`` computes per micro-batch, summed in chunk order."""
    total = 0.0
    for chunk in range(v):
        total += forward[chunk * p + rank] + backward[chunk * p + rank]
    return total


def pipeline_bound(
    forward: Sequence[float], backward: Sequence[float], p: int, v: int, m: int, p2p_s: float
) -> float:
    """Return a proven lower bound of ``simulate``.

    For each rank r: the first forward reaches it only after the first chunks of all earlier ranks, its last
    operation is a backward of its first chunk whose gradient still passes all earlier ranks, and in between
    it works m times.  For v = 1, 1F1B keeps p - r micro-batches in flight at r, so a round trip below r
    repeats every p - r micro-batches (nest_paper.md 1.6, here as a bound).
    """
    hop = p2p_s if p > 1 else 0.0
    bound = 0.0
    head = 0.0
    for rank in range(p):
        bound = max(bound, head + m * busy_time(forward, backward, p, v, rank))
        if v == 1:
            trip = 2 * hop * (p - 1 - rank)
            for j in range(rank, p):
                trip += forward[j] + backward[j]
            bound = max(bound, head + ((m - 1) // (p - rank) + 1) * trip)
        head += forward[rank] + backward[rank] + 2 * hop
    return bound * BOUND_SAFETY


def sync_times(
    features: Int64, busy: Sequence[float], times: Sequence[float], params: Sequence[int]
) -> tuple[float, float]:
    """Return the worst exposed synchronisation and the worst optimizer time over ranks, seconds."""
    worst_sync = worst_optimizer = 0.0
    for rank, row in enumerate(features):
        dense = int(row[Feature.FIRST] * params[Param.FIRST] + row[Feature.LAST] * params[Param.LAST])
        expert = 0
        for k in range(NUM_KINDS):
            dense += int(row[Feature.HELD + k] * params[Param.DENSE + k])
            expert += int(row[Feature.HELD + k] * params[Param.EXPERT + k])
        comm = _bucketed(
            dense, times[Column.SYNC_ALPHA_DENSE], times[Column.SYNC_BETA_DENSE], times[Column.BUCKET]
        )
        comm += _bucketed(
            expert, times[Column.SYNC_ALPHA_EXPERT], times[Column.SYNC_BETA_EXPERT], times[Column.BUCKET]
        )
        exposed = comm - min(comm * times[Column.SYNC_HIDDEN], DP_WINDOW_SHARE * busy[rank])
        worst_sync = max(worst_sync, exposed)
        worst_optimizer = max(
            worst_optimizer, dense * times[Column.OPTIMIZER_DENSE] + expert * times[Column.OPTIMIZER_EXPERT]
        )
    return worst_sync, worst_optimizer


def _bucketed(params: float, alpha_s: float, beta_s: float, bucket: float) -> float:
    if params <= 0 or (alpha_s == 0 and beta_s == 0):
        return 0.0
    buckets = math.ceil(params / bucket)
    each = params / buckets * beta_s
    return buckets * (alpha_s + each + FILL_WEIGHT * math.sqrt(alpha_s * each))


def peak_memory(features: Int64, coefficients: Int64) -> tuple[int, int, int]:
    """Return (peak bytes, rank, phase): the largest of features @ coefficients."""
    values = features @ coefficients.T
    rank, phase = divmod(int(values.argmax()), values.shape[1])
    return int(values[rank, phase]), rank, phase


class Problem:
    """The arrays of one search: N nodes (degrees) and C candidates (a node with chunks, split, recompute).

    Args:
        prefix: (NUM_KINDS, L + 1) int32, layers of each kind before each layer.
        node_pp, node_m: (N,) int32.
        node_times: (N, NUM_COLUMNS) float64 seconds, see ``columns.Column``.
        node_params: (N, NUM_PARAMS) int64 elements per rank.
        node_memory: (N, phases, NUM_FEATURES) int64 bytes per feature.
        node, vpp, group, mode, num_recompute, split_start: (C,) int32.
        sizes: concatenated layer counts per chunk; candidate i owns ``sizes[split_start[i]:][:p*v]``.
    """

    def __init__(
        self,
        *,
        prefix: Int32,
        node_pp: Int32,
        node_m: Int32,
        node_times: Float64,
        node_params: Int64,
        node_memory: Int64,
        node: Int32,
        vpp: Int32,
        group: Int32,
        mode: Int32,
        num_recompute: Int32,
        split_start: Int32,
        sizes: Int32,
    ) -> None:
        self.prefix = prefix
        self.node_pp, self.node_m = node_pp, node_m
        self.node_times, self.node_params, self.node_memory = node_times, node_params, node_memory
        self.node, self.vpp, self.group = node, vpp, group
        self.mode, self.num_recompute = mode, num_recompute
        self.split_start, self.sizes = split_start, sizes

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.node)

    def shape(self, i: int) -> tuple[Int32, int, int, int, int, int, int, int]:
        """Return (sizes, p, v, m, group, mode, num_recompute, node) of candidate ``i``."""
        node = int(self.node[i])
        p, v = int(self.node_pp[node]), int(self.vpp[i])
        start = int(self.split_start[i])
        sizes = self.sizes[start : start + p * v]
        return (
            sizes,
            p,
            v,
            int(self.node_m[node]),
            int(self.group[i]),
            int(self.mode[i]),
            int(self.num_recompute[i]),
            node,
        )


def _p2p(times: Sequence[float], v: int) -> float:
    hidden = times[Column.P2P_HIDDEN] if v > 1 else 0.0
    return float(times[Column.P2P]) * (1.0 - hidden)


def bounds(problem: Problem) -> tuple[Float64, Float64, Int64, Int32, Int32]:
    """Return per candidate: lower bound (s), additive sync + optimizer time (s), peak bytes, rank, phase."""
    count = len(problem)
    bound_s, extra_s = np.empty(count), np.empty(count)
    peak = np.empty(count, dtype=np.int64)
    worst_rank, worst_phase = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    for i in range(count):
        sizes, p, v, m, group, mode, num_recompute, node = problem.shape(i)
        times = problem.node_times[node]
        features = stage_features(sizes, problem.prefix, p, v, m, group, mode, num_recompute)
        peak[i], worst_rank[i], worst_phase[i] = peak_memory(features, problem.node_memory[node])
        forward, backward = chunk_times(sizes, problem.prefix, p, v, mode, num_recompute, times)
        busy = [busy_time(forward, backward, p, v, rank) for rank in range(p)]
        sync, optimizer = sync_times(features, busy, times, problem.node_params[node])
        extra_s[i] = sync + optimizer
        bound_s[i] = pipeline_bound(forward, backward, p, v, m, _p2p(times, v)) + extra_s[i]
    return bound_s, extra_s, peak, worst_rank, worst_phase


def smallest_block(problem: Problem, limit_bytes: int) -> Int32:
    """Return per candidate the fewest recomputed layers per chunk whose peak is at most ``limit_bytes``.

    Only candidates in block mode are searched, between 1 and the largest chunk less one; 0 means none is
    enough, or another mode.  Memory never grows with the number of layers, so bisection is exact.
    """
    found = np.zeros(len(problem), dtype=np.int32)
    for i in range(len(problem)):
        sizes, p, v, m, group, mode, _, node = problem.shape(i)
        if mode != RECOMPUTE_BLOCK:
            continue
        for layers in range(1, int(max(sizes))):
            features = stage_features(sizes, problem.prefix, p, v, m, group, mode, layers)
            if peak_memory(features, problem.node_memory[node])[0] <= limit_bytes:
                found[i] = layers
                break
    return found


def step_time(problem: Problem, i: int, extra_s: float) -> float:
    """Return the simulated step time of candidate ``i``: pipeline makespan plus its additive part."""
    sizes, p, v, m, group, mode, num_recompute, node = problem.shape(i)
    times = problem.node_times[node]
    forward, backward = chunk_times(sizes, problem.prefix, p, v, mode, num_recompute, times)
    return simulate(forward, backward, p, v, m, group, _p2p(times, v)) + extra_s


def best_first(
    problem: Problem, order: Int64, bound_s: Float64, extra_s: Float64, slack: float
) -> tuple[Float64, int]:
    """Simulate candidates in ``order`` (ascending bounds) until none can come within ``slack`` of the best.

    Returns:
        (C,) simulated step times, NaN where not needed, and the number simulated.  Every candidate left out
        has a bound above ``(1 + slack) * best``.
    """
    simulated = np.full(len(problem), np.nan)
    best = math.inf
    evaluated = 0
    for i in order:
        if bound_s[i] > best * (1.0 + slack):
            break
        simulated[i] = step_time(problem, int(i), float(extra_s[i]))
        best = min(best, float(simulated[i]))
        evaluated += 1
    return simulated, evaluated
