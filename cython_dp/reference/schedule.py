"""Pipeline schedules, event by event: 1F1B and interleaved 1F1B, and what they take at least."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

#: Bounds are scaled by this, so that rounding never lifts them above the simulated value.
BOUND_SAFETY = 1.0 - 1e-9


def in_flight(p: int, v: int, m: int, group: int, rank: int) -> list[int]:
    """Return the forwards alive at the peak on ``rank``, per chunk of that rank (memory_model.md 2.4)."""
    if v == 1:
        return [min(m, p - rank)]
    alive = min(m * v, 2 * (p - rank - 1) + (v - 1) * group + 1)
    counts = [0] * v
    for number in range(alive):
        counts[(number // group) % v] += 1
    return counts


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


def hop_times(p2p_s: float | Sequence[float] | Float64, p: int) -> list[float]:
    """Return the latency of each link: entry r from rank r to rank (r + 1) % p, the same both ways.

    Args:
        p2p_s: one latency for every link, or p of them; the last closes the ring and serves interleaving
        only.
    """
    if p == 1:
        return [0.0]
    if isinstance(p2p_s, int | float):
        return [float(p2p_s)] * p
    return [float(seconds) for seconds in p2p_s]


def simulate(
    forward: Sequence[float],
    backward: Sequence[float],
    p: int,
    v: int,
    m: int,
    group: int,
    p2p_s: float | Sequence[float],
) -> float:
    """Return the makespan in seconds of one step's pipeline, by event simulation.

    Args:
        forward, backward: (p*v,) seconds per chunk and micro-batch.
        p2p_s: latency from one chunk to the next when they lie on different ranks, see ``hop_times``.

    Raises:
        RuntimeError: the schedule deadlocks (our own invariant).
    """
    orders = [schedule_order(p, v, m, group, rank) for rank in range(p)]
    chunks = p * v
    end_f = [[-1.0] * m for _ in range(chunks)]
    end_b = [[-1.0] * m for _ in range(chunks)]
    clock = [0.0] * p
    position = [0] * p
    hop = hop_times(p2p_s, p)
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
                    ready = ready + hop[rank - 1] if j else 0.0
                    clock[rank] = max(clock[rank], ready) + forward[j]
                    end_f[j][micro] = clock[rank]
                else:
                    ready = end_f[j][micro] if j == chunks - 1 else end_b[j + 1][micro]
                    if ready < 0:
                        break
                    ready = ready if j == chunks - 1 else ready + hop[rank]
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


def cycle_period(
    forward: Sequence[float], backward: Sequence[float], p: int, p2p_s: float | Sequence[float]
) -> float:
    """Return at most the seconds between micro-batches of non-interleaved 1F1B once its fill is over.

    1F1B keeps p - q micro-batches in flight at rank q, so a round trip below q repeats every p - q of them:
    the largest mean of these cycles (nest_paper.md 1.6).  Exact for balanced stages; cycles that mix ranks
    can be longer otherwise.
    """
    hop = hop_times(p2p_s, p)
    period = trip = 0.0
    for rank in range(p - 1, -1, -1):
        load = forward[rank] + backward[rank]
        trip += load + (2 * hop[rank] if rank < p - 1 else 0.0)
        period = max(period, load, trip / (p - rank))
    return period


def pipeline_bound(
    forward: Sequence[float],
    backward: Sequence[float],
    p: int,
    v: int,
    m: int,
    group: int,
    p2p_s: float | Sequence[float],
) -> float:
    """Return a proven lower bound of ``simulate``: the longest of some paths through its events.

    A path of rank r starts with the first micro-batch passing the earlier ranks and ends with the last
    gradient passing them (``head``).  In between rank r does all its work; before its first backward and
    after its last forward it either works through the micro-batches in flight there or waits for a round trip
    through the later chunks (``down``, ``up``), whichever is longer.
    """
    paths = _plain_paths if v == 1 else _interleaved_paths
    return paths(forward, backward, p, v, m, group, hop_times(p2p_s, p)) * BOUND_SAFETY


def _plain_paths(
    forward: Sequence[float],
    backward: Sequence[float],
    p: int,
    v: int,
    m: int,
    group: int,
    hop: Sequence[float],
) -> float:
    """Return the longest path without interleaving; a round trip below r may repeat (``cycle_period``)."""
    bound = head = trip = 0.0
    for j in range(1, p):
        trip += forward[j] + backward[j] + 2 * hop[j - 1]
    for rank in range(p):
        f, b = forward[rank], backward[rank]
        window = p - rank
        if m > window:
            edges = max((window - 1) * f, trip) + max((window - 1) * b, trip)
            bound = max(bound, head + (m - window + 1) * (f + b) + edges)
            cycles = (m - 1) // window
            bound = max(bound, head + (1 + cycles) * trip + (m - cycles * (window - 1)) * (f + b))
        else:
            bound = max(bound, head + f + b + max((m - 1) * (f + b), trip + (m - 1) * max(f, b)))
        head += f + b + 2 * hop[rank]
        if rank + 1 < p:
            trip -= forward[rank + 1] + backward[rank + 1] + 2 * hop[rank]
    return bound


def _interleaved_paths(
    forward: Sequence[float],
    backward: Sequence[float],
    p: int,
    v: int,
    m: int,
    group: int,
    hop: Sequence[float],
) -> float:
    """Return the longest path with interleaving; forwards before the first backward as ``in_flight``."""
    last = (v - 1) * p
    bound = head = down = up = 0.0
    for j in range(1, p * v):
        down += forward[j] + hop[(j - 1) % p]
        up += backward[j] + hop[(j - 1) % p]
        if j > last:
            down += backward[j] + hop[j - last - 1]
            up += forward[j] + hop[j - last - 1]
    for rank in range(p):
        work = m * busy_time(forward, backward, p, v, rank)
        edges = 0.0
        # A short last group changes the order at the end, and all forwards may come before any backward.
        if m % group == 0 and m * v > 2 * (p - rank - 1) + (v - 1) * group + 1:
            local_f, local_b = -forward[rank], -backward[rank]
            for chunk, count in enumerate(in_flight(p, v, m, group, rank)):
                local_f += count * forward[chunk * p + rank]
                local_b += count * backward[chunk * p + rank]
            edges = max(0.0, down - local_f) + max(0.0, up - local_b)
        bound = max(bound, head + work + edges)
        head += forward[rank] + backward[rank] + 2 * hop[rank]
        if rank + 1 < p:
            down -= forward[rank + 1] + hop[rank] + backward[last + rank + 1] + hop[rank]
            up -= backward[rank + 1] + hop[rank] + forward[last + rank + 1] + hop[rank]
    return bound
