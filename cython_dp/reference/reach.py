"""The free split of one candidate: seconds of its layers, and the stages that fit in memory."""

from __future__ import annotations

import numpy as np

from cython_dp.columns import NUM_KINDS, RECOMPUTE_BLOCK, RECOMPUTE_UNIFORM, Column, Feature
from cython_dp.reference.problem import Problem, hop_s
from cython_dp.reference.quick import present_kinds
from cython_dp.reference.schedule import in_flight
from cython_dp.reference.split import FreeSplit
from cython_dp.reference.stages import rank_features


def reach_of(problem: Problem, i: int, num_recompute: int, limit_bytes: int) -> list[list[int]]:
    """Return the farthest end of a stage within memory, per rank and start (split.FreeSplit.reach).

    With several kinds of layers a recomputed block may come to start with another kind, whose recomputed
    unit is larger; units are left out then, so that needs grow with the stage.  The exact peak is judged per
    split.
    """
    _, p, _, m, group, mode, _, node = problem.shape(i)
    num_layers = int(problem.prefix.shape[1] - 1)
    kinds = len(present_kinds(problem))
    memory = problem.node_memory[node].copy()
    if mode == RECOMPUTE_BLOCK and kinds > 1:
        memory[:, Feature.UNIT : Feature.UNIT + NUM_KINDS] = 0

    def fits(rank: int, x: int, y: int) -> bool:
        alive = in_flight(p, 1, m, group, rank)
        row = rank_features([(x, y - x)], alive, problem.prefix, p, rank, mode, num_recompute)
        return int((memory @ np.array(row)).max()) <= limit_bytes

    found = []
    for rank in range(p):
        ends: list[int] = []
        y = 0
        for x in range(num_layers + 1):
            if kinds == 1 and x > 0:
                ends.append(min(num_layers, x + ends[0]) if ends[0] >= 0 else x - 1)
                continue
            y = max(y, x)
            while y < num_layers and fits(rank, x, y + 1):
                y += 1
            ends.append(y if fits(rank, x, y) else x - 1)
        found.append(ends)
    return found


def free_split(problem: Problem, i: int, num_recompute: int, reach: list[list[int]]) -> FreeSplit:
    """Return the free split of candidate ``i`` with ``num_recompute`` layers recomputed per stage."""
    _, p, v, m, _, mode, _, node = problem.shape(i)
    times = problem.node_times[node]
    num_layers = int(problem.prefix.shape[1] - 1)
    forward, backward = [], []
    for x in range(num_layers + 1):
        f = b = 0.0
        for k in range(NUM_KINDS):
            again = times[Column.AGAIN + k] if mode == RECOMPUTE_UNIFORM else 0.0
            f += problem.prefix[k][x] * times[Column.FORWARD + k]
            b += problem.prefix[k][x] * (times[Column.BACKWARD + k] + again)
        forward.append(float(f))
        backward.append(float(b))
    blocks = mode == RECOMPUTE_BLOCK
    again = [float(times[Column.AGAIN + k]) if blocks else 0.0 for k in range(NUM_KINDS)]
    return FreeSplit(
        p=p,
        m=m,
        num_layers=num_layers,
        least=problem.least,
        forward_s=forward,
        backward_s=backward,
        first_s=(float(times[Column.F_FIRST]), float(times[Column.B_FIRST])),
        last_s=(float(times[Column.F_LAST]), float(times[Column.B_LAST])),
        hop_s=hop_s(times, v) if p > 1 else 0.0,
        again_s=again,
        num_again=num_recompute if blocks else 0,
        prefix=problem.prefix.tolist(),
        reach=reach,
    )
