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
BISECTION_WIDTH = 1e-5
MAX_BISECTIONS = 60
#: Rounding may move an end by one comparison: windows of starts are a little wider than the limit asks.
WINDOW_SLACK = 1.0 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSplit:
    """One layout whose layers may be dealt to its p stages in any way.

    Attributes:
        m: micro-batches; ``num_layers``: L; ``least``: fewest layers of a stage (0 or 1).
        forward_s, backward_s: (L + 1,) seconds of the layers before each layer, recomputation of every layer
            included where it does not depend on the split.
        first_s, last_s: (forward, backward) seconds of the embedding and of the head.
        hop_s: latency between neighbouring ranks.
        again_s, num_again: recomputation of a layer by kind, and how many of each stage (block mode), else 0.
        prefix: (NUM_KINDS, L + 1) layers of each kind before each layer.
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
    again_s: Sequence[float]
    num_again: int
    prefix: Sequence[Sequence[int]]
    reach: Sequence[Sequence[int]]

    @property
    def cheapest_again_s(self) -> float:
        """Recomputation of one layer of the kind that takes least."""
        return min(self.again_s[k] for k, counts in enumerate(self.prefix) if counts[-1])

    def recomputed(self, x: int, y: int) -> int:
        """Return how many layers a stage of the layers x..y-1 recomputes, its first ones."""
        return min(self.num_again, y - x)

    def stage_s(self, rank: int, x: int, y: int, *, sharp: bool = True) -> tuple[float, float]:
        """Return (forward, backward) seconds of rank's stage of the layers x..y-1.

        Args:
            sharp: with what it recomputes; else every recomputed layer counts as one of the cheapest kind,
                which makes the seconds grow with y and fall with x.
        """
        f = self.forward_s[y] - self.forward_s[x]
        b = self.backward_s[y] - self.backward_s[x]
        count = self.recomputed(x, y)
        if sharp:
            b += self.before_s(x + count) - self.before_s(x)
        else:
            b += self.cheapest_again_s * count
        if rank == 0:
            f, b = f + self.first_s[0], b + self.first_s[1]
        if rank == self.p - 1:
            f, b = f + self.last_s[0], b + self.last_s[1]
        return f, b

    def before_s(self, x: int) -> float:
        """Return the recomputation of all layers before x."""
        total = 0.0
        for k, seconds in enumerate(self.again_s):
            total += self.prefix[k][x] * seconds
        return total

    def path_s(self, rank: int, x: int, y: int, *, others_s: tuple[float, float] | None) -> float:
        """Return the longest path of ``schedule.pipeline_bound`` through rank's stage of layers x..y-1.

        Args:
            others_s: recomputation of the layers before x and from y on, at least.  None leaves it out and
                takes the stage's own from below too: still a bound, and one that grows with y and falls with
                x.
        """
        f, b = self.stage_s(rank, x, y, sharp=others_s is not None)
        before_s, after_s = others_s or (0.0, 0.0)
        head = trip = 0.0
        if rank > 0:
            head = self.forward_s[x] + self.backward_s[x] + self.first_s[0] + self.first_s[1]
            head += 2 * self.hop_s * rank
            head += before_s
        if rank < self.p - 1:
            trip = self.forward_s[self.num_layers] - self.forward_s[y]
            trip += self.backward_s[self.num_layers] - self.backward_s[y]
            trip += self.last_s[0] + self.last_s[1] + 2 * self.hop_s * (self.p - 1 - rank)
            trip += after_s
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
        return (self.m + 4) * (f + b + self.before_s(self.num_layers) + 2 * self.hop_s * self.p)


def ends(split: FreeSplit, rank: int, limit_s: float) -> list[int]:
    """Return the farthest legal end of rank's stage for every start, -1 where there is none."""
    found = []
    reach = split.reach[rank]
    y = 0
    for x in range(split.num_layers + 1):
        y = max(y, x)
        while y < reach[x] and split.path_s(rank, x, y + 1, others_s=None) <= limit_s:
            y += 1
        legal = x + split.least <= y <= reach[x] and split.path_s(rank, x, y, others_s=None) <= limit_s
        found.append(y if legal else -1)
    return found


@dataclass(frozen=True, slots=True)
class Windows:
    """Where the stages may start and end within one limit.

    Attributes:
        farthest: (p, L + 1) the farthest end of a stage by start, -1 where there is none.
        starts: (p + 1, L + 1) whether a stage may start there and the rest still be dealt.
        before_s, after_s: (L + 1,) what the layers before each layer, and those from it on, recompute at
            least in other stages.
    """

    split: FreeSplit
    limit_s: float
    farthest: list[list[int]]
    starts: list[list[bool]]
    before_s: list[float]
    after_s: list[float]

    def path_s(self, rank: int, x: int, y: int) -> float:
        """Return ``FreeSplit.path_s`` with the recomputation of the other stages."""
        return self.split.path_s(rank, x, y, others_s=(self.before_s[x], self.after_s[y]))

    def ends(self, rank: int, x: int) -> list[int]:
        """Return the ends of a stage from which the rest may still be dealt."""
        inside = range(x + self.split.least, self.farthest[rank][x] + 1)
        return [y for y in inside if self.starts[rank + 1][y] and self.path_s(rank, x, y) <= self.limit_s]


def windows(split: FreeSplit, limit_s: float) -> Windows:
    """Return where the stages may start and end within ``limit_s``.

    With block recomputation the largest stage of these windows says how much the other stages recompute at
    least (min(num_again, size) is concave in the size: full stages and one with the rest), and starts that no
    end keeps within the limit then are closed.
    """
    num_layers = split.num_layers
    zeros = [0.0] * (num_layers + 1)
    found = Windows(split, limit_s, *_monotone(split, limit_s), zeros, list(zeros))
    if split.num_again == 0 or not found.starts[0][0]:
        return found
    stages = [(r, x) for r in range(split.p) for x in range(num_layers + 1) if found.starts[r][x]]
    most = max(1, *(found.farthest[r][x] - x for r, x in stages))
    for x in range(num_layers + 1):
        full, rest = divmod(x, most)
        count = full * min(split.num_again, most) + min(split.num_again, rest)
        found.before_s[x] = least_again_s(split.prefix, split.again_s, 0, x, count)
        found.after_s[num_layers - x] = least_again_s(
            split.prefix, split.again_s, num_layers - x, num_layers, count
        )
    for rank in range(split.p - 1, -1, -1):
        for x in range(num_layers + 1):
            found.starts[rank][x] = found.starts[rank][x] and bool(found.ends(rank, x))
    return found


def least_again_s(
    prefix: Sequence[Sequence[int]], again_s: Sequence[float], x: int, y: int, count: int
) -> float:
    """Return the recomputation of the cheapest ``count`` of the layers x..y-1.

    Args:
        prefix: (NUM_KINDS, L + 1) layers of each kind before each layer; ``again_s``: seconds by kind.
    """
    total = 0.0
    for k in sorted(range(len(again_s)), key=lambda kind: again_s[kind]):
        layers = min(count, int(prefix[k][y]) - int(prefix[k][x]))
        total += layers * again_s[k]
        count -= layers
    return total


def _monotone(split: FreeSplit, limit_s: float) -> tuple[list[list[int]], list[list[bool]]]:
    """Return ``Windows.farthest`` and ``starts`` while ends grow with starts."""
    num_layers = split.num_layers
    farthest = [ends(split, rank, limit_s) for rank in range(split.p)]
    starts = [[False] * (num_layers + 1) for _ in range(split.p)]
    starts.append([x == num_layers for x in range(num_layers + 1)])
    latest = _latest(split, limit_s * WINDOW_SLACK)
    for rank in range(split.p - 1, -1, -1):
        nearest = num_layers + 1
        following = [nearest] * (num_layers + 2)
        for x in range(num_layers, -1, -1):
            if starts[rank + 1][x]:
                nearest = x
            following[x] = nearest
        for x in range(min(latest[rank], num_layers - split.least) + 1):
            starts[rank][x] = following[x + split.least] <= farthest[rank][x]
    return farthest, starts


def _latest(split: FreeSplit, limit_s: float) -> list[int]:
    """Return the latest start of each rank, every earlier one taking all it may."""
    found, y = [], 0
    for rank in range(split.p):
        x = y
        found.append(x)
        while y < split.reach[rank][x] and split.path_s(rank, x, y + 1, others_s=None) <= limit_s:
            y += 1
    return found


def feasible(split: FreeSplit, limit_s: float) -> bool:
    """Return False when no split fits in memory with every path at most ``limit_s``.

    Exact unless blocks are recomputed: what other stages recompute is taken from below.
    """
    return windows(split, limit_s).starts[0][0]


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
    found = windows(split, limit_s)
    sizes, x = [], 0
    for rank in range(split.p):
        wanted = _nearest(split, rank, x, x + split.least, found.farthest[rank][x])
        y = min(found.ends(rank, x), key=lambda end: (abs(end - wanted), end))
        sizes.append(y - x)
        x = y
    return sizes


def splits_within(split: FreeSplit, limit_s: float, current: Callable[[], float]) -> Iterator[list[int]]:
    """Yield every split whose paths stay below ``current()``, which may fall meanwhile; stage 0 first.

    Args:
        limit_s: an upper bound of ``current()``.
    """
    found = windows(split, limit_s)
    sizes = [0] * split.p

    def deal(rank: int, x: int) -> Iterator[list[int]]:
        if rank == split.p:
            yield list(sizes)
            return
        for y in range(x + split.least, found.farthest[rank][x] + 1):
            if found.starts[rank + 1][y] and found.path_s(rank, x, y) * BOUND_SAFETY < current():
                sizes[rank] = y - x
                yield from deal(rank + 1, y)

    if found.starts[0][0]:
        yield from deal(0, 0)
