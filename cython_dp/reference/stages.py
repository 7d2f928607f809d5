"""What one pipeline rank holds, computes, synchronises and needs, from the layers of its chunks."""

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
from cython_dp.reference.schedule import in_flight

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

#: Share of a rank's per-micro-batch busy time that can hide its gradient
#: synchronisation (time_model.md section 2).
DP_WINDOW_SHARE = 0.8
#: Weight of sqrt(alpha * beta) in a collective's time (network.md 0.3).
FILL_WEIGHT = 0.75


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
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + int(size))
    rows = []
    for rank in range(p):
        chunks = [(starts[j], int(sizes[j])) for j in range(rank, p * v, p)]
        alive = in_flight(p, v, m, group, rank)
        rows.append(rank_features(chunks, alive, prefix, p, rank, mode, num_recompute))
    return np.array(rows, dtype=np.int64).reshape(p, NUM_FEATURES)


def rank_features(
    chunks: Sequence[tuple[int, int]],
    alive: Sequence[int],
    prefix: Int32,
    p: int,
    rank: int,
    mode: int,
    num_recompute: int,
) -> list[int]:
    """Return the counts of one rank.

    Args:
        chunks: (first layer, layers) of each chunk of the rank; ``alive``: its forwards in flight.
    """
    row = [0] * NUM_FEATURES
    row[Feature.ONE] = 1
    row[Feature.FIRST] = int(rank == 0)
    row[Feature.LAST] = int(rank == p - 1)
    row[Feature.LIVE_CHUNKS] = sum(alive)
    if rank == 0:
        row[Feature.LIVE_FIRST] = alive[0]
    for (start, size), forwards in zip(chunks, alive, strict=True):
        plain, recomputed, units = chunk_layers(size, start, prefix, mode, num_recompute)
        row[Feature.LIVE_UNITS] += forwards * units
        row[Feature.LIVE_EDGES] += forwards if size else 0
        unit = min(size, num_recompute) if mode == RECOMPUTE_UNIFORM else 1
        for k in range(NUM_KINDS):
            row[Feature.HELD + k] += plain[k] + recomputed[k]
            row[Feature.LIVE + k] += forwards * plain[k]
            if recomputed[k]:
                row[Feature.UNIT + k] = max(row[Feature.UNIT + k], unit)
    for k in range(NUM_KINDS):
        if row[Feature.HELD + k]:
            row[Feature.HAS + k] = row[Feature.ANY] = 1
    return row


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
