"""Floors of time and memory of one candidate over all its splits, in a few operations per rank."""

from __future__ import annotations

import math

from cython_dp.columns import NUM_KINDS, RECOMPUTE_BLOCK, RECOMPUTE_UNIFORM, Column, Feature, Param
from cython_dp.reference.problem import Problem, hop_s
from cython_dp.reference.schedule import BOUND_SAFETY, in_flight
from cython_dp.reference.split import least_again_s


def present_kinds(problem: Problem) -> list[tuple[int, int]]:
    """Return (slot, number of layers) of the kinds that the model has."""
    counts = problem.prefix[:, -1]
    return [(k, int(counts[k])) for k in range(NUM_KINDS) if counts[k] > 0]


def extra_floor(problem: Problem, node: int) -> float:
    """Return at most the synchronisation plus optimizer seconds of any split: the mean over ranks.

    Latencies are left out, and of the synchronisation only what no compute hides is counted.
    """
    times, params = problem.node_times[node], problem.node_params[node]
    dense, expert = float(params[Param.FIRST] + params[Param.LAST]), 0.0
    for k, count in present_kinds(problem):
        dense += float(count * params[Param.DENSE + k])
        expert += float(count * params[Param.EXPERT + k])
    shown = 1.0 - times[Column.SYNC_HIDDEN]
    total = dense * (shown * times[Column.SYNC_BETA_DENSE] + times[Column.OPTIMIZER_DENSE])
    total += expert * (shown * times[Column.SYNC_BETA_EXPERT] + times[Column.OPTIMIZER_EXPERT])
    return float(total / int(problem.node_pp[node]) * BOUND_SAFETY)


def fewest_with_room(problem: Problem, i: int, limit_bytes: int) -> int:
    """Return the fewest recomputed layers of each chunk with room for all layers, up to all of them."""
    num_layers = int(problem.prefix.shape[1] - 1)
    return next((n for n in range(1, num_layers) if has_room(problem, i, limit_bytes, n)), num_layers)


def _least_recomputed_s(problem: Problem, i: int, limit_bytes: int) -> float:
    """Return the seconds of the layers that have no room without recomputation, the cheapest ones.

    With more recomputed layers per chunk fewer others have room, so the fewest possible decide.
    """
    _, _, _, _, _, mode, num_recompute, node = problem.shape(i)
    if mode != RECOMPUTE_BLOCK:
        return 0.0
    count = num_recompute or fewest_with_room(problem, i, limit_bytes)
    num_layers = int(problem.prefix.shape[1] - 1)
    unstored = num_layers - _room(problem, i, limit_bytes, count)[1]
    again_s = problem.node_times[node][Column.AGAIN : Column.AGAIN + NUM_KINDS].tolist()
    return least_again_s(problem.prefix.tolist(), again_s, 0, num_layers, unstored)


def quick_time(problem: Problem, i: int, limit_bytes: int) -> float:
    """Return seconds that no split of the candidate within memory can beat: work, fill, messages once."""
    _, p, v, m, _, mode, _, node = problem.shape(i)
    times = problem.node_times[node]
    f = times[Column.F_FIRST] + times[Column.F_LAST]
    b = times[Column.B_FIRST] + times[Column.B_LAST]
    least = math.inf
    for k, count in present_kinds(problem):
        layer_f, layer_b = times[Column.FORWARD + k], times[Column.BACKWARD + k]
        if mode == RECOMPUTE_UNIFORM:
            layer_b = layer_b + times[Column.AGAIN + k]
        f, b = f + count * layer_f, b + count * layer_b
        least = min(least, layer_f + layer_b)
    b = b + _least_recomputed_s(problem, i, limit_bytes)
    hop = hop_s(times, v) if p > 1 else 0.0
    if v == 1:
        # split.FreeSplit.work_s
        seconds = f + b + (m - 1) * ((f + b) if m > p else max(f, b)) / p + 2 * hop * (p - 1)
    else:
        # Mean over ranks r of: head of r first chunks, and m times the work of r.
        chunk = int(problem.floor[i]) * least + 2 * hop
        seconds = m * (f + b) / p + chunk * (p - 1) / 2
        seconds += (times[Column.F_FIRST] + times[Column.B_FIRST]) * (p - 1) / p
    return float(seconds * BOUND_SAFETY + extra_floor(problem, node))


def has_room(problem: Problem, i: int, limit_bytes: int, count: int) -> bool:
    """Return False when the ranks together cannot hold all layers within ``limit_bytes``, whatever the split.

    Args:
        count: recomputed layers of each chunk in block mode.
    """
    return _room(problem, i, limit_bytes, count)[0] >= int(problem.prefix.shape[1] - 1)


def _room(problem: Problem, i: int, limit_bytes: int, count: int) -> tuple[int, int]:
    """Return (layers that the ranks can hold, how many of them at most without recomputation)."""
    _, p, v, m, group, mode, num_recompute, node = problem.shape(i)
    num_layers = int(problem.prefix.shape[1] - 1)
    each = count if mode == RECOMPUTE_BLOCK else 0
    count = each * v
    held = unrecomputed = 0
    for rank in range(p):
        alive = in_flight(p, v, m, group, rank)
        most = stored = num_layers
        for c in problem.node_memory[node].tolist():
            fixed = c[Feature.ONE] + sum(alive) * c[Feature.LIVE_CHUNKS]
            if rank == 0:
                fixed += c[Feature.FIRST] + alive[0] * c[Feature.LIVE_FIRST]
            if rank == p - 1:
                fixed += c[Feature.LAST]
            if fixed > limit_bytes:
                return -1, 0
            unit = c[Feature.LIVE_UNITS] // (num_recompute if mode == RECOMPUTE_UNIFORM else 1)
            kept = [
                (c[Feature.HELD + k], unit if mode == RECOMPUTE_UNIFORM else c[Feature.LIVE + k])
                for k, _ in present_kinds(problem)
            ]
            plain = min(states + alive[v - 1] * saved for states, saved in kept)
            again = min(plain, min(states + alive[v - 1] * unit for states, _ in kept))
            # The recomputed layers first, then as many plain ones as still fit.
            free = limit_bytes - fixed
            if again > 0 and free // again < count:
                most = min(most, free // again)
            elif plain > 0:
                most = min(most, count + (free - count * again) // plain)
            if plain > 0:
                # A chunk that keeps a layer recomputes ``each`` others.
                stored = min(stored, max(0, free - each * again) // plain)
        held += most
        unrecomputed += stored
    return held, min(num_layers, unrecomputed)
