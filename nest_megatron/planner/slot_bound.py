"""A step time that no assignment of ranks to GPUs is priced below, not even one that splits nodes.

In a unit of W slots let P_A be the number of groups of axis A that touch the unit.  The ranks of the unit are
points of the rank grid, so by the inequality of Loomis and Whitney (Bull. AMS 55, 1949) the product of the
P_A over the d axes is at least W^(d-1): groups of one axis can lie close together only where those of the
others are spread.  Every tree factorisation of research/nest_paper.md 4.5 satisfies it with equality, so the
bound is the best of them, relaxed to P_A that are no whole numbers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nest_megatron.cluster.crossings import PortLoads
from nest_megatron.cluster.groups import GroupShape
from nest_megatron.cluster.slots import SlotTree, slot_tree
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.planner.placement import axes_of
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout

#: Ratio of neighbouring values of P_A beyond the smallest ones, which are every whole number.
STEP = math.sqrt(2.0)
#: Steps of the search; the least price among the open cells is a bound at any time.
MAX_CELLS = 80

_Group = tuple[int, int]
#: Cell number of each (axis, level).
_Cell = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Unit:
    """The unit of a level that forces the most traffic; ``largest``: slots of the level's largest unit."""

    slots: int
    share: float
    largest: int


def slot_bound_s(job: TrainJob, cluster: Cluster, layout: Layout) -> float:
    """Return the bound on the step time of ``layout``, seconds.

    Cells of P_A by axis and level are searched in the order of their price at their best corner, until
    one satisfies the inequality on every level.
    """
    evaluator = Evaluator(job, cluster)
    evaluator.step_times_s([layout])
    bound = _Bound(job, cluster, layout, [g for g in evaluator.cost.pricer.groups if g[0] > 1])
    return bound.search()


class _Bound:
    def __init__(self, job: TrainJob, cluster: Cluster, layout: Layout, groups: list[_Group]) -> None:
        self._job, self._cluster, self._layout = job, cluster, layout
        self._groups = groups
        self._units = _tightest_units(slot_tree(cluster))
        self._keys = list(itertools.product(range(len(groups)), range(len(self._units))))
        self._grids = [
            axes for grid in _grids(layout) if (axes := [i for i, g in enumerate(groups) if g in grid])
        ]
        self._prices: dict[tuple[GroupShape, ...], float] = {}
        self._forms: dict[tuple[int, tuple[int, ...]], GroupShape] = {}
        #: (axis, level) -> the P_A at which its cells begin.
        self._starts = {(a, i): _starts(groups[a][0], self._units[i].slots) for a, i in self._keys}

    def search(self) -> float:
        """Return the price of the cheapest cell that satisfies every inequality."""
        # A cell waits under its parent's price, which is no higher, and is priced when it is next.
        heap: list[tuple[float, bool, _Cell]] = [(0.0, False, (0,) * len(self._keys))]
        seen: set[_Cell] = set()
        for _ in range(MAX_CELLS):
            price, priced, cell = heapq.heappop(heap)
            if not priced:
                heapq.heappush(heap, (max(price, self._price(cell)), True, cell))
                continue
            broken = self._broken(cell)
            if broken is None:
                return price
            for child in self._children(cell, *broken):
                if child not in seen:
                    seen.add(child)
                    heapq.heappush(heap, (price, False, child))
        return heap[0][0]

    def _broken(self, cell: _Cell) -> tuple[int, list[int]] | None:
        """Return the first level and grid whose inequality no point of the cell satisfies."""
        at = dict(zip(self._keys, cell, strict=True))
        for level, unit in enumerate(self._units):
            for axes in self._grids:
                most = math.prod(self._largest(axis, level, at[axis, level]) for axis in axes)
                if most < unit.slots ** (len(axes) - 1):
                    return level, axes
        return None

    def _largest(self, axis: int, level: int, cell: int) -> int:
        starts = self._starts[axis, level]
        return starts[cell + 1] - 1 if cell + 1 < len(starts) else self._units[level].slots

    def _children(self, cell: _Cell, level: int, axes: list[int]) -> Iterator[_Cell]:
        """Yield the cells one step further on one axis; what leaves a unit leaves those inside it, too."""
        for axis in axes:
            here = self._keys.index((axis, level))
            if cell[here] + 1 < len(self._starts[axis, level]):
                child = list(cell)
                child[here] += 1
                for inner in range(level):
                    place = self._keys.index((axis, inner))
                    if self._starts[axis, inner][0] * self._groups[axis][0] == self._units[inner].slots:
                        child[place] = max(child[place], 1)
                yield tuple(child)

    def _price(self, cell: _Cell) -> float:
        at = dict(zip(self._keys, cell, strict=True))
        levels = range(len(self._units))
        return self._step_time_s(
            [
                self._cheapest_form(axis, tuple(at[axis, i] for i in levels))
                for axis in range(len(self._groups))
            ]
        )

    def _cheapest_form(self, axis: int, cells: tuple[int, ...]) -> GroupShape:
        """Return the cheaper of the two extreme forms, all other axes inside one domain.

        Times of axes add up, so the choice does not depend on the others.
        """
        if (axis, cells) not in self._forms:
            forms = [self._shape(axis, cells, spread=spread) for spread in (False, True)]
            if forms[0] != forms[1]:
                inside = [_free(size, len(cells)) for size, _ in self._groups]
                forms.sort(key=lambda form: self._step_time_s([*inside[:axis], form, *inside[axis + 1 :]]))
            self._forms[axis, cells] = forms[0]
        return self._forms[axis, cells]

    def _step_time_s(self, shapes: list[GroupShape]) -> float:
        key = tuple(shapes)
        if key not in self._prices:
            evaluator = Evaluator(self._job, self._cluster)
            evaluator.cost.pricer.assume(dict(zip(self._groups, shapes, strict=True)))
            self._prices[key] = evaluator.step_times_s([self._layout])[0]
        return self._prices[key]

    def _shape(self, axis: int, cells: tuple[int, ...], *, spread: bool) -> GroupShape:
        """Return a shape that costs no more than any real one in the cells: least loads, least latency.

        Args:
            spread: one member per domain, which opens other algorithms; else as few domains as can hold it.
        """
        size = self._groups[axis][0]
        ring: list[float] = []
        pairs: list[float] = []
        members: list[int] = []
        exits = [size]
        for level, (cell, unit) in enumerate(zip(cells, self._units, strict=True)):
            leaving = _least_leaving(size, unit.slots, self._starts[axis, level][cell])
            ring.append(leaving / unit.share)
            pairs.append(leaving * (size - 1) / size / unit.share)
            held = min(size - 1, unit.largest) if leaving else size
            if spread and level == 0 and leaving:
                held = 1
            members.append(max(held, members[-1] if members else 1))
            exits.append(min(exits[-1], max(2, math.ceil(size / members[-1]))) if leaving else 0)
        hops = tuple(outer - inner for outer, inner in itertools.pairwise([*exits, 0]))
        return GroupShape(
            size=size,
            members=(*members, size),
            runs=(1,) * (len(members) + 1),
            hops=hops,
            num_domains=max(1, exits[1]) if members else 1,
            loads=PortLoads(ring=tuple(ring), tree=tuple(ring), pairs=tuple(pairs), message=tuple(ring)),
        )


def _free(size: int, levels: int) -> GroupShape:
    """Return the shape of groups that lie inside one domain."""
    none = (0.0,) * levels
    return GroupShape(
        size=size,
        members=(size,) * (levels + 1),
        runs=(1,) * (levels + 1),
        hops=(size,) + (0,) * levels,
        num_domains=1,
        loads=PortLoads(ring=none, tree=none, pairs=none, message=none),
    )


def _starts(size: int, slots: int) -> list[int]:
    """Return values of P_A from the least, where groups of ``size`` fill the unit, to one group per slot."""
    found = [math.ceil(slots / size)]
    while found[-1] < slots:
        found.append(min(slots, max(found[-1] + 1, math.ceil(found[-1] * STEP))))
    return found


def _least_leaving(size: int, slots: int, touching: int) -> float:
    """Return the fewest groups per slot that leave a unit which ``touching`` groups touch.

    At most (slots - touching) / (size - 1) of them lie inside, since each other one has a slot in the unit.
    """
    inside = min(slots // size, (slots - touching) // (size - 1))
    return max(0, touching - inside) / slots


def _tightest_units(tree: SlotTree) -> list[_Unit]:
    """Return, for each level, the unit that two axes of equal density load most."""
    found = []
    for units, share in zip(tree.unit_of_slot, tree.uplink_share, strict=True):
        slots = np.bincount(units, minlength=share.size)
        used = np.flatnonzero(slots)
        tight = used[np.argmin(share[used] * np.sqrt(slots[used]))]
        found.append(_Unit(int(slots[tight]), float(share[tight]), int(slots.max())))
    return found


def _grids(layout: Layout) -> Iterator[set[_Group]]:
    """Yield the groups (size, stride) of each set of axes whose groups meet in one rank only."""
    axes = axes_of(layout)
    for names in (("tp", "dp_cp", "pp"), ("etp", "ep", "edp", "pp")):
        yield {axes[name] for name in names if name in axes}
