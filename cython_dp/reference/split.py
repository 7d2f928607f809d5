"""Exact layer split of a pipeline without interleaving, by search over the bottleneck (nest_paper.md 4.2).

A stage [x, y) on rank r may hold the layers x..y-1.  Whether it fits in memory, and whether every path of
``schedule.pipeline_bound`` through it is at most T seconds, depends on x and y only: the earlier ranks hold
the x layers before it, the later ones the rest.  Both get harder with larger y and easier with larger x, so
the legal ends form an interval [x + least, e(x)] with e non-decreasing, and one pass of two pointers over x
finds them.  A split exists when layer L can be reached from layer 0: O(p L) per T, O(p L log) for the
smallest T.

Taking the farthest end of every stage is not exact: the later ranks may then have too few layers to hold one
each, or too long a round trip; the backward pass over reachable starts is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cython_dp.reference.schedule import BOUND_SAFETY

#: Relative width at which the bisection over the bottleneck stops.
BISECTION_WIDTH = 1e-10
MAX_BISECTIONS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSplit:
    """One layout whose layers may be dealt to its p stages in any way.

    Attributes:
        m: micro-batches; ``num_layers``: L; ``least``: fewest layers of a stage (0 or 1).
        forward_s, backward_s: (L + 1,) seconds of the layers before each layer, recomputation of every layer
            included where it does not depend on the split.
        first_s, last_s: (forward, backward) seconds of the embedding and of the head.
        hop_s: latency between neighbouring ranks.
        again_s, num_again: recomputation of one layer, and how many of each stage (block mode), else 0.
        reach: (p, L + 1) the farthest end of a stage that starts at layer x and fits in memory.
    """

    p: int
    m: int
    num_layers: int
    least: int
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    first_s: tuple[float, float]
    last_s: tuple[float, float]
    hop_s: float
    again_s: float
    num_again: int
    reach: Sequence[Sequence[int]]

    def stage_s(self, rank: int, x: int, y: int) -> tuple[float, float]:
        """Return (forward, backward) seconds of rank's stage of the layers x..y-1."""
        f = self.forward_s[y] - self.forward_s[x]
        b = self.backward_s[y] - self.backward_s[x] + self.again_s * min(self.num_again, y - x)
        if rank == 0:
            f, b = f + self.first_s[0], b + self.first_s[1]
        if rank == self.p - 1:
            f, b = f + self.last_s[0], b + self.last_s[1]
        return f, b

    def path_s(self, rank: int, x: int, y: int) -> float:
        """Return the longest path of ``schedule.pipeline_bound`` through rank's stage of layers x..y-1.

        Block recomputation of other stages depends on their sizes and is left out: still a lower bound.
        """
        f, b = self.stage_s(rank, x, y)
        head = trip = 0.0
        if rank > 0:
            head = self.forward_s[x] + self.backward_s[x] + self.first_s[0] + self.first_s[1]
            head += 2 * self.hop_s * rank
        if rank < self.p - 1:
            trip = self.forward_s[self.num_layers] - self.forward_s[y]
            trip += self.backward_s[self.num_layers] - self.backward_s[y]
            trip += self.last_s[0] + self.last_s[1] + 2 * self.hop_s * (self.p - 1 - rank)
        m, window = self.m, self.p - rank
        if m <= window:
            return head + f + b + max((m - 1) * (f + b), trip + (m - 1) * max(f, b))
        edges = max((window - 1) * f, trip) + max((window - 1) * b, trip)
        cycles = (m - 1) // window
        return max(
            head + (m - window + 1) * (f + b) + edges,
            head + (1 + cycles) * trip + (m - cycles * (window - 1)) * (f + b),
        )

    def work_s(self) -> float:
        """Return a bound of every split without memory limit: the paths' mean over ranks.

        Weights that make the mean independent of the split exist when m > p; else every path is at least all
        work once and the slower pass of its own stage m - 1 times.
        """
        f = self.forward_s[self.num_layers] + self.first_s[0] + self.last_s[0]
        b = self.backward_s[self.num_layers] + self.first_s[1] + self.last_s[1]
        rest = (self.m - 1) * ((f + b) if self.m > self.p else max(f, b)) / self.p
        return f + b + rest + 2 * self.hop_s * (self.p - 1)

    def ceiling_s(self) -> float:
        """Return more than any path takes: all work and every hop, once per micro-batch and at both ends."""
        f = self.forward_s[self.num_layers] + self.first_s[0] + self.last_s[0]
        b = self.backward_s[self.num_layers] + self.first_s[1] + self.last_s[1]
        work = f + b + self.again_s * self.num_layers + 2 * self.hop_s * self.p
        return (self.m + 4) * work


def ends(split: FreeSplit, rank: int, limit_s: float) -> list[int]:
    """Return the farthest legal end of rank's stage for every start, -1 where there is none."""
    found = []
    reach = split.reach[rank]
    y = 0
    for x in range(split.num_layers + 1):
        y = max(y, x)
        while y < reach[x] and split.path_s(rank, x, y + 1) <= limit_s:
            y += 1
        legal = x + split.least <= y <= reach[x] and split.path_s(rank, x, y) <= limit_s
        found.append(y if legal else -1)
    return found


def feasible_starts(split: FreeSplit, limit_s: float) -> tuple[list[list[int]], list[list[bool]]]:
    """Return (ends per rank, whether a stage of rank r may start at layer x and the rest still be dealt)."""
    num_layers = split.num_layers
    farthest = [ends(split, rank, limit_s) for rank in range(split.p)]
    starts = [[False] * (num_layers + 1) for _ in range(split.p)]
    starts.append([x == num_layers for x in range(num_layers + 1)])
    for rank in range(split.p - 1, -1, -1):
        nearest = num_layers + 1
        following = [nearest] * (num_layers + 2)
        for x in range(num_layers, -1, -1):
            if starts[rank + 1][x]:
                nearest = x
            following[x] = nearest
        for x in range(num_layers + 1 - split.least):
            starts[rank][x] = following[x + split.least] <= farthest[rank][x]
    return farthest, starts


def feasible(split: FreeSplit, limit_s: float) -> bool:
    """Return whether some split fits in memory with every path at most ``limit_s``."""
    return feasible_starts(split, limit_s)[1][0][0]


def smallest_limit(split: FreeSplit, cutoff_s: float) -> tuple[float, float] | None:
    """Return (lower bound, a limit that some split keeps), None when none keeps ``cutoff_s`` (finite)."""
    if not feasible(split, cutoff_s):
        return None
    low, high = split.work_s(), cutoff_s
    if low >= high or feasible(split, low):
        return min(low, high), min(low, high)
    for _ in range(MAX_BISECTIONS):
        if high - low <= BISECTION_WIDTH * high:
            break
        middle = 0.5 * (low + high)
        if feasible(split, middle):
            high = middle
        else:
            low = middle
    return low, high


def _nearest(split: FreeSplit, rank: int, x: int, low: int, high: int) -> int:
    """Return the end in [low, high] whose stage comes closest to an equal share of the work that is left."""
    f, b = split.stage_s(rank, x, low)
    left = split.forward_s[split.num_layers] - split.forward_s[x]
    left += split.backward_s[split.num_layers] - split.backward_s[x] + split.last_s[0] + split.last_s[1]
    if rank == 0:
        left += split.first_s[0] + split.first_s[1]
    share = left / (split.p - rank)
    best, distance = low, abs(f + b - share)
    for y in range(low + 1, high + 1):
        f, b = split.stage_s(rank, x, y)
        if abs(f + b - share) < distance:
            best, distance = y, abs(f + b - share)
    return best


def first_split(split: FreeSplit, limit_s: float) -> list[int]:
    """Return the layers per stage of one split whose paths keep ``limit_s``, as even as that allows."""
    farthest, starts = feasible_starts(split, limit_s)
    sizes, x = [], 0
    for rank in range(split.p):
        legal = [y for y in range(x + split.least, farthest[rank][x] + 1) if starts[rank + 1][y]]
        wanted = _nearest(split, rank, x, x + split.least, farthest[rank][x])
        y = min(legal, key=lambda end: (abs(end - wanted), end))
        sizes.append(y - x)
        x = y
    return sizes


def splits_within(split: FreeSplit, limit_s: float, current: Callable[[], float]) -> Iterator[list[int]]:
    """Yield every split whose paths stay below ``current()``, which may fall meanwhile; stage 0 first.

    Args:
        limit_s: an upper bound of ``current()``.
    """
    farthest, starts = feasible_starts(split, limit_s)
    sizes = [0] * split.p

    def deal(rank: int, x: int) -> Iterator[list[int]]:
        if rank == split.p:
            yield list(sizes)
            return
        for y in range(x + split.least, farthest[rank][x] + 1):
            if starts[rank + 1][y] and split.path_s(rank, x, y) * BOUND_SAFETY < current():
                sizes[rank] = y - x
                yield from deal(rank + 1, y)

    if starts[0][0]:
        yield from deal(0, 0)
